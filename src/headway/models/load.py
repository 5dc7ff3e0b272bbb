"""Open a model's config, weights and processor by folder, config.json or Hub id, with errors a user can act on."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_torchvision_available

from headway.count.models import shipped_name
from headway.errors import (
    CheckpointError,
    ConfigError,
    UnknownModelError,
    first_line,
    foreign,
    is_out_of_memory,
    reraise_own,
)
from headway.files import read_text
from headway.hub import CONFIG, located
from headway.models.attention import register_attention, use_attention
from headway.models.experts import use_experts
from headway.models.foreign import check_config, check_plain_files, check_processor, check_tokenizer, print_names_safely
from headway.models.init_weights import init_weights
from headway.models.new_rows import grow, resize
from headway.models.recurrent import separate_segments
from headway.models.rotary import count_by_segment, rotate_by_segment
from headway.models.scores import SCORE_WEIGHT, initialise_score, is_scorer, scoring_config
from headway.models.video import video_processor
from headway.models.waits import answer_ahead
from headway.plugins import register_families, where_to_find
from headway.tracing.build import preset_config

Spec = str | Path | PreTrainedConfig
Processor = ProcessorMixin | PreTrainedTokenizerBase
RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_TOKENIZER = "tokenizer.json"
_ADAPTERS = "adapter_config.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_WEIGHT_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_NO_CODE = {"trust_remote_code": False}
"""Given to whatever opens a folder: if unset, transformers asks, and takes a yes from standard input."""


def load_model_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Read a model's configuration.

    Args:
        name_or_path: a model folder, a config.json, or a model's name on the Hugging Face Hub.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: the folder is there but holds no readable config.json, or needs code of its own.
    """
    name = located(name_or_path)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"The model folder {path} has no config.json. It holds {_listing(path)}. Give a folder that "
            "save_pretrained wrote, or an export of a training run."
        )
    if path.is_file() and path.suffix != ".json":
        raise UnknownModelError(f"{path} is a file but not a config.json. Give a model folder or its config.json.")
    register_families()
    print_names_safely()
    try:
        check_plain_files(Path(name))
        if (file := _file(name, CONFIG)) is not None:
            check_config(file)
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **_NO_CODE)
    except BaseException as error:  # whatever transformers raises on a stranger's file
        reraise_own(error)
        _refuse_code(name, error)
        _refuse_stranger(name, error)
        if path.exists():
            raise CheckpointError(
                f"The configuration in {path} cannot be read: {first_line(error)}. Mend the file, or save the "
                "configuration again with config.save_pretrained."
            ) from error
        raise _unreachable(name, error) from error
    return config


def _refuse_stranger(name: str, error: BaseException) -> None:
    """Say of a configuration whose type nothing here knows that a plug-in may bring it."""
    model_type = ""
    # the first error tells of a configuration that is missing
    with suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        model_type = str(PreTrainedConfig.get_config_dict(name)[0].get("model_type") or "")
    if model_type.isidentifier() and model_type not in CONFIG_MAPPING:
        raise UnknownModelError(
            f"{name} is a model of type {model_type!r}, which neither transformers nor an installed plug-in knows. "
            f"{where_to_find(model_type)}"
        ) from error


def named_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a model by any name: a folder or file here, a shipped model's, or one on the Hub.

    Raises:
        UnknownModelError, CheckpointError: as `load_model_config` raises them.
    """
    shipped = shipped_name(name)
    config: PreTrainedConfig = load_model_config(name) if shipped is None else preset_config(shipped)
    return config


def load_model(
    spec: Spec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "headway_flash",
    random_init: bool = False,
    rows: int = 0,
    seed: int = 0,
    scores: bool = False,
) -> PreTrainedModel:
    """Build a causal or multimodal model that writes text, from weights or at random; or one that scores it.

    Args:
        spec: a model folder, a config.json, a Hub name, or a configuration object.
        dtype: the parameters' floating-point type.
        device: where the parameters live; "meta" for a random initialisation that `init_weights` or `read_weights` will
            complete, once the model is sharded.
        attention: name of the attention backend; "headway_flash" for packed data, "eager" or "sdpa" for reference.
        random_init: initialise from the configuration alone, drawing from torch's global generator.
        rows: of the vocabulary, where tokens were added to it; fewer than the model has change nothing [tokens].
        seed: of the first values of added rows, and of the head of a reward model.
        scores: whether to make a reward model of it: with a head of one column (`headway.models.scores`), which has
            first values where the files have none. Of a folder that holds a reward model, one is built anyway.

    Raises:
        UnknownModelError: nothing of that name, or a kind of model that does not write text, one token after another.
        CheckpointError: the folder is only half written: weights or shards missing, or a file cut short.
        ConfigError: a configuration alone was given without `random_init`.
    """
    register_attention()
    if not isinstance(spec, PreTrainedConfig):
        spec = located(spec)
    config = spec if isinstance(spec, PreTrainedConfig) else load_model_config(spec)
    config = scoring_config(config) if scores else config
    model_class = _model_class(config)
    # Structure first, without memory: values are drawn where the model will live, or later, once sharded.
    if random_init:
        with torch.device("meta"), without_advice():
            model: PreTrainedModel = model_class.from_config(
                config, dtype=dtype, attn_implementation="eager", **_NO_CODE
            )
            resize(model, rows)
        if torch.device(device).type != "meta":
            init_weights(model, device)
    else:
        # Weights come from a folder that has been checked, or the Hub; added rows then get their first values.
        if isinstance(spec, PreTrainedConfig) or Path(spec).is_file():
            raise ConfigError(
                f"{spec if not isinstance(spec, PreTrainedConfig) else 'A configuration object'} describes a model but "
                "holds no weights. Ask for a random initialisation, or give the folder that holds the weights."
            )
        if Path(spec).is_dir():
            check_weights(Path(spec))
        model = _with_weights(model_class, str(spec), config, dtype, heads_seed=seed if scores else None)
        grow(model, rows, seed)
        model.to(device)  # type: ignore[arg-type]  # transformers narrows `to` to its own overloads
    # Packing needs attention and experts that know segments, and a forward without waits.
    use_attention(model, attention)
    use_experts(model)
    answer_ahead(model)
    separate_segments(model)
    rotate_by_segment(model)
    count_by_segment(model)
    return model


def load_processor(name_or_path: str | Path) -> Processor:
    """Open a model's processor, or the tokenizer of a text-only model.

    Images are processed by transformers' PIL backends, and videos by Headway's `VideoProcessor` where it knows the
    model's rules, so that the result does not depend on whether torchvision is installed.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: the folder holds no tokenizer, its files cannot be read, or need code of its own.
    """
    register_families()
    print_names_safely()
    name = located(name_or_path)
    if Path(name).is_file():
        name = str(Path(name).parent)
    try:
        check_plain_files(Path(name))
        if (file := _file(name, CONFIG)) is not None:
            check_config(file)  # transformers reads the configuration for a tokenizer too
        if (file := _file(name, _TOKENIZER)) is not None:
            check_tokenizer(file)
        for file_name in (*_PROCESSOR_FILES, "video_preprocessor_config.json"):
            if (file := _file(name, file_name)) is not None:
                check_processor(file)
        class_name = _processor_class_name(name)
        if class_name is None:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **_NO_CODE)
            return tokenizer
        processor_class = getattr(transformers, class_name)
        if not (isinstance(processor_class, type) and issubclass(processor_class, ProcessorMixin)):
            raise ValueError(f"transformers has no processor called {class_name!r}")
        return _processor(processor_class, name)
    except BaseException as error:  # tokenizers panics with what is no Exception
        reraise_own(error)
        _refuse_code(name, error)
        if Path(name).exists():
            if (Path(name) / CONFIG).is_file():
                load_model_config(name)  # raises an error of its own if the configuration cannot be read
            raise CheckpointError(
                f"The folder {name} holds no tokenizer or processor that can be opened: {first_line(error)}. It holds "
                f"{_listing(Path(name))}. Copy the tokenizer and processor files of the base model into it."
            ) from error
        raise _unreachable(name, error) from error


def processor_note(folder: Path) -> str | None:
    """Find what opens a folder's processor where transformers' AutoProcessor cannot; None where it can.

    transformers opens a processor that reads videos with torchvision alone, whatever the folder holds.
    """
    processor_class = getattr(transformers, _processor_class_name(str(folder)) or "", None)
    attributes = () if processor_class is None else processor_class.get_attributes()
    if is_torchvision_available() or "video_processor" not in attributes:
        return None
    return f"headway.models.load_processor({str(folder)!r}); AutoProcessor needs torchvision, which is not installed"


def rope_index(model: PreTrainedModel) -> RopeIndex | None:
    """The model's own rule for multi-axis rotary positions (M-RoPE), or None where positions are plain indices.

    The rule needs the model's class and configuration alone; it holds no weights and can be pickled. It takes all of a
    sample's tensors by the names of the model's arguments, and reads those that it names: grids, or sizes of tiles.
    """
    inner: Any = getattr(model, "model", None)
    for module in (model, inner):
        if hasattr(module, "get_rope_index"):
            kind: Any = type(module)
            shell = kind.__new__(kind)
            torch.nn.Module.__init__(shell)
            plain = (bool, int, float, str, type(None))  # sizes that some rules read
            vars(shell).update({name: value for name, value in vars(module).items() if isinstance(value, plain)})
            shell.config = module.config
            rule: Any = shell.get_rope_index
            return partial(_ask, rule, tuple(inspect.signature(rule).parameters))
    return None


def _ask(rule: RopeIndex, names: tuple[str, ...], **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ask a rule with those of a sample's tensors that it names; one that takes no token types wants a mask of all."""
    accepted = {name: value for name, value in arguments.items() if name in names}
    if "mm_token_type_ids" not in names:
        accepted["attention_mask"] = torch.ones_like(arguments["input_ids"])
    return rule(**accepted)


def check_weights(folder: Path) -> list[Path]:
    """Check that a folder's safetensors files are all there and whole, without reading their tensors.

    Returns:
        The files.

    Raises:
        CheckpointError: no weights, a shard of the index missing, or a file cut short.
    """
    # Shards by the index, each beside it and there; else the one file.
    index = folder / _WEIGHT_INDEX
    if index.is_file():
        refusal = f"The weight index {index} cannot be read: "
        with foreign(lambda reason: CheckpointError(f"{refusal}{reason} Save the model again.")):
            names = sorted({str(name) for name in json.loads(read_text(index))["weight_map"].values()})
        # A name with a folder in it would read files outside the model's folder.
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(
                f"The weight index {index} names {outside[0]!r}, which is no file of its folder. Save the model again."
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"The model folder {folder} lacks {len(missing)} of its {len(names)} weight files: "
                f"{', '.join(missing[:4])}. The folder was written or copied only in part. Fetch the folder again."
            )
        files = [folder / name for name in names]
    else:
        files = [folder / _WEIGHTS] if (folder / _WEIGHTS).is_file() else []
    if not files:
        raise CheckpointError(
            f"The model folder {folder} has no weights ({_WEIGHTS}, or {_WEIGHT_INDEX} and the files that it names). "
            f"The folder holds {_listing(folder)}. To start from random weights, ask for a random initialisation."
        )
    # The header says how long a file must be, which opening compares with its length.
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"The weight file {file} ({file.stat().st_size} bytes) is cut short or damaged: {first_line(error)}. "
                "Writing or copying the file was interrupted. Fetch the file again, or resume from an earlier "
                "checkpoint."
            ) from error
    return files


def _with_weights(
    model_class: Any, name: str, config: PreTrainedConfig, dtype: torch.dtype, heads_seed: int | None
) -> PreTrainedModel:
    with weights_of(name) as missing:
        model, info = model_class.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True,
            **_NO_CODE,
        )
        missing.update(info["missing_keys"])
        if heads_seed is not None and SCORE_WEIGHT in missing:
            initialise_score(model, heads_seed)
            missing.remove(SCORE_WEIGHT)
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def weights_of(name: str) -> Iterator[set[str]]:
    """Turn errors of reading weights into ones that a user can act on.

    Args:
        name: a model folder or Hub name.

    Yields:
        A set to put the names of parameters into that the files lack.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: the weights do not fit the configuration, or some are missing.
    """
    if (Path(name) / _ADAPTERS).is_file():  # transformers would lay them over the model without a word
        raise CheckpointError(
            f"The folder {name} holds the weights of a model and adapters ({_ADAPTERS}), but Headway cannot tell "
            "whether the adapters belong to this model. Merge the adapters (`headway export --merge-lora`), or move "
            "them into another folder."
        )
    missing: set[str] = set()
    try:
        yield missing
    except (OSError, SafetensorError) as error:
        raise _unreachable(name, error) from error
    except ImportError as error:
        raise CheckpointError(
            f"The weights in {name} have a form that needs another package: {first_line(error)}. Install that "
            "package. Or give the original weights, and set `model.base: nf4` to keep them in 4 bits beside LoRA."
        ) from error
    except BaseException as error:  # transformers' report of weights of other shapes, or whatever a stranger's raise
        reraise_own(error)
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"The weights in {name} do not fit its config.json: {first_line(error)}. One of the two belongs to "
            "another model. Fetch both again."
        ) from error
    if missing:
        raise CheckpointError(
            f"The weights in {name} lack {len(missing)} of the model's parameters, such as {min(missing)}. The files "
            "were written only in part, or belong to another model. Fetch the files again."
        )


def _model_class(config: PreTrainedConfig) -> Any:
    if is_scorer(config):
        return AutoModelForSequenceClassification
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise UnknownModelError(
        f"Models of type {config.model_type!r} cannot be trained. Headway trains causal language models, and models "
        "that read images or sound and write text. Give the configuration of the whole model, not of one of its "
        "towers. docs/models.md lists the families that train."
    )


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep transformers from advising how else to use a model while it is built; errors are still said."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _file(name: str, file: str) -> Path | None:
    """A file of a folder or a Hub model; the one that is named if a file was."""
    if Path(name).is_file():
        return Path(name)
    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _processor_class_name(name: str) -> str | None:
    for file in _PROCESSOR_FILES:
        path = _file(name, file)
        if path is None:
            continue
        class_name = json.loads(path.read_text(encoding="utf-8")).get("processor_class")
        if isinstance(class_name, str):
            return class_name
    return None


def _processor(processor_class: Any, name: str) -> ProcessorMixin:
    """Open a processor with Headway's video processor in it; transformers' own cannot be opened without torchvision."""
    attributes = processor_class.get_attributes()
    opened: Any
    if "video_processor" in attributes:
        opened = _with_videos(processor_class, name).from_pretrained(name, **_NO_CODE)
        opened.__class__ = processor_class
    else:
        opened = processor_class.from_pretrained(name, **_NO_CODE)
    if "image_processor" in attributes and is_torchvision_available():
        images: Any = AutoImageProcessor
        opened.image_processor = images.from_pretrained(name, backend="pil", **_NO_CODE)
    processor: ProcessorMixin = opened
    return processor


def _with_videos(processor_class: Any, name: str) -> Any:
    """The processor's class, whose `from_pretrained` opens everything but the video processor, which is Headway's."""
    attributes = processor_class.get_attributes()
    plain_attributes = [attribute for attribute in attributes if attribute != "video_processor"]
    others: Any = type(
        processor_class.__name__, (processor_class,), {"get_attributes": staticmethod(lambda: plain_attributes)}
    )

    class Opening(processor_class):  # type: ignore[misc]  # a class that is only known here
        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            parts = list(others._get_arguments_from_pretrained(*args, **kwargs))
            parts.insert(attributes.index("video_processor"), video_processor(name, processor_class.__name__))
            return parts

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                return super().check_argument_for_proper_class(argument_name, argument)
            return type(argument)

    Opening.__name__, Opening.__module__ = processor_class.__name__, processor_class.__module__
    return Opening


def _refuse_code(name: str, error: BaseException) -> None:
    if isinstance(error, ValueError) and "trust_remote_code=True" in str(error):
        raise CheckpointError(
            f"The model {name} needs Python code that comes with its files (auto_map), but Headway does not run such "
            "code, because it could do anything. Give a model of a type that the installed transformers "
            f"{transformers.__version__} supports, or convert this model to such a type."
        ) from error


def _unreachable(name: str, error: BaseException) -> UnknownModelError:
    return UnknownModelError(
        f"The model {name!r} is no folder on this machine and could not be fetched from the Hugging Face Hub: "
        f"{first_line(error)}. Check the name and the network. For gated models, run `hf auth login`. Or download "
        f"the model on a machine with a network, with `hf download {name}`, and give the folder."
    )


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") if names else "nothing"
