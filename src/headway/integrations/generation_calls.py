"""Read how much a call generated off its arguments and its answers: transformers' own, vLLM's, and TRL's around it."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from headway.count import CostModel, Generation
from headway.count.integers import Ints
from headway.errors import WorkloadError
from headway.meter import workload_of

_SHAPES = ("input_ids", "pixel_values")
_VALUES = ("attention_mask", "image_grid_thw", "video_grid_thw")
"""Arguments of `generate` whose shapes or values describe the prompts."""

Grids = tuple[tuple[int, int, int], ...]


def generation_of(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any, cost: CostModel
) -> Generation:
    """Read the work of a call of transformers' `generate`.

    The device is not waited for longer than `generate` itself has: it reads each token before it asks for the next.

    Args:
        model: whose method it is.
        args: of the call: at most the prompts and a generation config.
        kwargs: of the call.
        results: what it returned: token ids [rows, slots], or an output that holds them as `sequences`.
        cost: ledger of the model.

    Raises:
        WorkloadError: prompts, answers or a way to decode that the lengths of prompts and answers do not tell the work
            of.
    """
    arguments = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
    name = f"generate of {type(model).__name__}"
    prompts = arguments.get("input_ids", arguments.get("inputs"))
    sequences = getattr(results, "sequences", results)
    if prompts is None or getattr(prompts, "ndim", 0) != 2 or getattr(sequences, "ndim", 0) != 2:
        raise WorkloadError(
            f"{name} was given {_shape(prompts)} and returned {_shape(sequences)}: token ids [rows, slots] are read."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise WorkloadError(f"{name} runs an encoder and a decoder, whose answers are not counted.")
    if (past := arguments.get("past_key_values")) is not None and past.get_seq_length():
        raise WorkloadError(f"{name} goes on from {past.get_seq_length()} cached tokens, which no prompt shows.")
    # settings: of the call, of its config, of the model
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))

    def setting(key: str) -> Any:
        values = (arguments.get(key), *(getattr(config, key, None) for config in configs))
        return next((value for value in values if value is not None), None)

    if (setting("num_beams") or 1) > 1:
        raise WorkloadError(f"{name} searches with {setting('num_beams')} beams, and returns the answers of the best.")
    (rows, width), (num_answers, slots) = prompts.shape, sequences.shape
    if num_answers % rows or slots < width:
        raise WorkloadError(
            f"{name} returned {num_answers} x {slots} tokens for {rows} x {width}: rows that begin with their prompts "
            "are read."
        )
    # The workload is what prompts hold; idle rows and padding are slots, and the last token is not read again.
    arguments["input_ids"] = prompts
    batch = {key: arguments[key] for key in _SHAPES if arguments.get(key) is not None}
    batch |= {key: _on_host(arguments[key]) for key in _VALUES if arguments.get(key) is not None}
    workload = workload_of(batch, cost)
    stops = np.ravel(_on_host(setting("eos_token_id") if setting("eos_token_id") is not None else ()))
    return Generation(
        workload.segments,
        _lengths(np.asarray(_on_host(sequences))[:, width:], stops),
        group=num_answers // rows,
        batch_size=num_answers,
        slots=num_answers * (width + max(slots - width - 1, 0)),
        media=workload.media,
    )


def _lengths(answers: Ints, stops: Any) -> Ints:
    """Count the tokens of answers [rows, slots] up to the first that ends one, itself included."""
    ends = np.isin(answers, stops)
    lengths: Ints = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, answers.shape[1])
    return lengths


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, "detach") else value


def _shape(value: Any) -> str:
    return f"a tensor of {[*value.shape]}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def generations_of(engine: str, results: Any, grids: Sequence[Grids] | None = None) -> list[Generation]:
    """Read what an engine that fills freed places at once computed, from the token ids that it returned.

    Equal prompts in a row are computed once, as engines do that cache prefixes.

    Args:
        engine: for errors.
        results: of `generate_batch`, of vLLM's `LLM.generate`, of TRL's clients of vLLM and rollout functions.
        grids: of the images of each answer's prompt [patches]; None without images.

    Raises:
        WorkloadError: other results.
    """
    try:
        pairs = _pairs(results)
        images = grids if grids is not None else [()] * len(pairs)
        answers = [
            ((tuple(prompt), pictures), len(answer)) for (prompt, answer), pictures in zip(pairs, images, strict=True)
        ]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise WorkloadError(
            f"{engine} returned a {type(results).__name__} that token ids of prompts and answers cannot be read from: "
            f"{error}."
        ) from error
    # prompts by how many answers they have, since a Generation has as many to each
    groups: dict[int, list[tuple[int, Grids, list[int]]]] = {}
    for (prompt, pictures), rows in groupby(answers, key=lambda answer: answer[0]):
        lengths = [length for _, length in rows]
        groups.setdefault(len(lengths), []).append((len(prompt), pictures, lengths))
    return [
        Generation(
            [prompt for prompt, *_ in group],
            [length for *_, lengths in group for length in lengths],
            group=size,
            prefix="computed once",
            media={"images": [grid for _, pictures, _ in group for grid in pictures]},
        )
        for size, group in groups.items()
    ]


class ImageGrids:
    """Grids of patches into which a processor cuts images, found on a blank image of each size, once.

    Args:
        processor: of the model, with an `image_processor`.
    """

    def __init__(self, processor: Any) -> None:
        self._processor: Any = getattr(processor, "image_processor", None)
        self._of_size: dict[tuple[int, int], tuple[int, int, int]] = {}

    def of(self, images: Iterable[Sequence[Any] | None]) -> list[Grids]:
        """Give the grids of the images of each prompt [patches].

        Raises:
            WorkloadError: the processor tells no grids.
        """
        return [tuple(self._grid(image) for image in of_prompt or ()) for of_prompt in images]

    def _grid(self, image: Any) -> tuple[int, int, int]:
        size: Any = getattr(image, "size", None)
        if size not in self._of_size:
            try:
                from PIL import Image

                features = self._processor(images=[Image.new("RGB", size)], return_tensors="np")
                time, height, width = map(int, features["image_grid_thw"][0])
            except Exception as error:
                raise WorkloadError(
                    f"the grid of patches of a {type(image).__name__} of {size} cannot be asked of "
                    f"{type(self._processor).__name__}: {type(error).__name__}: {error}."
                ) from error
            self._of_size[size] = time, height, width
        return self._of_size[size]


def _pairs(results: Any) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Pair the token ids of each answer with its prompt's."""
    if isinstance(results, Mapping) and "completion_ids" in results:
        results = (results["prompt_ids"], results["completion_ids"])
    if isinstance(results, Mapping):  # transformers gives results by request
        return [(output.prompt_ids, output.generated_tokens) for output in results.values()]
    if isinstance(results, tuple):
        prompts, answers, *_ = results
        times = len(answers) // len(prompts)  # a prompt may be named once for all its answers
        if times * len(prompts) != len(answers):
            raise ValueError(f"{len(answers)} answers to {len(prompts)} prompts")
        return list(zip((prompt for prompt in prompts for _ in range(times)), answers, strict=True))
    return [(request.prompt_token_ids, answer.token_ids) for request in results for answer in request.outputs]
