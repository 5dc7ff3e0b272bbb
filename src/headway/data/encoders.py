"""Choice of the encoder and the collator of a model."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headway.config import TrainConfig
from headway.config.sections import Section
from headway.count import CostModel
from headway.data.collate import Collator
from headway.data.encode import Encoder
from headway.data.media.images import MAX_IMAGE_PIXELS
from headway.data.media.placeholders import MAX_CHARACTERS
from headway.data.media.processor_images import reads_processed_images
from headway.data.processor_settings import ProcessorSettings
from headway.errors import CheckpointError, foreign
from headway.hub import located
from headway.models.load import load_model_config, load_processor
from headway.models.new_rows import embedding_rows
from headway.models.vision import patch_size_of
from headway.plugins import family_hook, objective_of


def open_encoder(
    model: str,
    *,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    max_characters: int = MAX_CHARACTERS,
    settings: ProcessorSettings | None = None,
) -> Encoder:
    """Open the encoder that measures samples for a model, without the model's weights.

    Its positions are plain indices: lengths do not depend on them.

    Args:
        model: a model folder, or a name on the Hugging Face Hub.
        max_image_pixels: larger images are refused [pixels].
        max_characters: longer texts are refused [characters].
        settings: changes of the processor; it is as the model's folder says when None.

    Raises:
        UnknownModelError: nothing of that name.
        CheckpointError: its tokenizer or processor cannot be read.
        ConfigError: settings that the processor has no place for.
    """
    processor, config = load_processor(model), _config(model)
    settings = settings or ProcessorSettings()
    rows = settings.write_into(processor, None if config is None else embedding_rows(config))
    own = family_encoder(processor, config, max_image_pixels=max_image_pixels, max_characters=max_characters)
    if own is not None:
        return own
    patch_size = patch_size_of(load_model_config(model)) if reads_processed_images(processor) else None
    with settings_of_strangers(processor):
        return Encoder(
            processor,
            num_embeddings=rows,
            max_image_pixels=max_image_pixels,
            max_characters=max_characters,
            patch_size=patch_size,
        )


def settings_of_strangers(processor: Any) -> AbstractContextManager[None]:
    """Make an encoder within this: it runs the model's processor on pictures of its own, by whatever its files set.

    Args:
        processor: of the model.

    Raises:
        CheckpointError: the processor fails.
    """
    name = getattr(processor, "tokenizer", processor).name_or_path
    return foreign(
        lambda reason: CheckpointError(
            f"The processor in {name} cannot be used: {reason} Look into its preprocessor_config.json and "
            "processor_config.json, or copy those of the base model over them."
        )
    )


def family_encoder(processor: Any, config: Any, settings: Section | None = None, **limits: int) -> Encoder | None:
    """Make the encoder that a family of models brings; None for a model without one.

    Args:
        processor: the model's processor or tokenizer.
        config: its configuration.
        settings: of the family in training; None for none.
        **limits: `max_image_pixels` and `max_characters`, as `Encoder` takes them.
    """
    make = family_hook(config, "encoder")
    return None if make is None else make(processor, config, settings=settings, **limits)


def prepare_encoder(
    config: TrainConfig, model: PreTrainedModel, cost_model: CostModel, encoder: Encoder
) -> tuple[str, ...]:
    """Have a run's encoder lay out samples as its objective needs them.

    Args:
        config: of the run.
        model: with or without weights.
        cost_model: of the model.
        encoder: changed in place.

    Returns:
        Lines about it for the start of the run.

    Raises:
        ConfigError: the model cannot run such packs.
    """
    objective = objective_of(config.objective_name)
    prepare = None if objective is None else objective.hook("prepare_encoder")
    return () if prepare is None else tuple(prepare(config.objective_section, model, cost_model, encoder))


def _config(model: str) -> PreTrainedConfig | None:
    """A model's configuration; None of a folder that holds a tokenizer alone."""
    path = Path(located(model))
    return None if path.is_dir() and not (path / "config.json").is_file() else load_model_config(model)


def collator_of(encoder: Encoder, **settings: Any) -> Collator:
    """Make the collator for an encoder's samples.

    Args:
        encoder: of the model.
        **settings: of `Collator`.
    """
    return encoder.own_collator(**settings) or Collator(**settings)
