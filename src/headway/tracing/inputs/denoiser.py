"""The inputs of models that denoise latents: transformers and UNets of images and videos, as diffusers calls them.

A sample is a segment: its tokens are the patches of its latents, and its source is the text (or whatever stands in
`encoder_hidden_states`) that is attended to beside them or across. Arguments are made by their names from the sizes in
the model's configuration; the layout of the latents, and what is wide as the text, are asked of the model itself.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import nn

from headway.count.cost_model import DENOISES, SINGLE_FRAMES
from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing.arguments import on_device
from headway.tracing.inputs.form import Floats, Probe
from headway.tracing.phantom import phantom_floats

_LATENTS = ("hidden_states", "sample")
_TEXT = "encoder_hidden_states"
_TIMES = ("timestep", "timesteps")
# settings that may hold the width of the text's states, likeliest first
_TEXT_WIDTHS = (
    "joint_attention_dim", "cross_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "cap_feat_dim",
    "text_hidden_dim",
    "encoder_hid_dim", "context_in_dim", "hidden_size",
)  # fmt: skip
_MASKS = ("encoder_attention_mask", "encoder_hidden_states_mask")
# samples, frames, sides of the latents in units, and tokens of text, in each of the four runs; some models take
# squares alone
_RUNS = ((1, 1, 3, 5, 23), (2, 2, 7, 2, 31), (1, 3, 4, 3, 47), (3, 1, 5, 6, 37))
_SQUARES = tuple((samples, frames, side, side, text) for samples, frames, side, _, text in _RUNS)


def takes_latents(accepted: Container[str]) -> bool:
    """Say whether a forward's arguments are a denoiser's: latents and a time, and no token ids."""
    has_latents = any(name in accepted for name in _LATENTS)
    return has_latents and any(name in accepted for name in _TIMES) and "input_ids" not in accepted


_Sizes = tuple[tuple[int, ...], ...]


class _Batch:
    """Sizes of one batch, and the function that makes its floats."""

    def __init__(self, workload: Workload, floats: Floats) -> None:
        grids = workload.grids.tolist()
        if not grids or any(grid != grids[0] for grid in grids):
            raise TraceError(f"a batch of latents has one size, but the workload has {len({*map(tuple, grids)})}.")
        self.samples = len(grids)
        self.frames, self.height, self.width = map(int, grids[0])  # patches
        self.text = int(workload.sources[0]) if workload.sources.size else 0  # tokens of each sample's text
        self.floats = floats

    @property
    def tokens(self) -> int:
        """Patches of one sample."""
        return self.frames * self.height * self.width


class Denoiser:
    """Latents and a time, with the text and other arguments that the model's forward names.

    Raises:
        TraceError: the forward needs an argument that no row below makes, or refuses all layouts of its latents.
    """

    strided: Sequence[str] = ()

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.accepted = inspect.signature(model.forward).parameters
        self._latents = next(name for name in _LATENTS if name in self.accepted)
        patch = getattr(self.config, "patch_size", None) or 1
        frames = getattr(self.config, "patch_size_t", None) or 1
        # pixels of the latents along a patch: over frames, height and width
        self.patch = tuple(patch) if isinstance(patch, list | tuple) else (frames, patch, patch)
        levels = len(getattr(self.config, "block_out_channels", ()) or ())
        self._unit = 2 ** max(levels - 1, 0)  # patches: a UNet halves its latents' sides between levels
        groups = [4**level for level in range(1, levels)]  # patches that a level joins into one
        self._widths = [w for name in _TEXT_WIDTHS for w in _whole_numbers(getattr(self.config, name, None))] or [0]
        self._sizes, self._layout, self._width = self._ask(model)
        self.patch = (1, 1, 1) if self._layout is _packed else self.patch  # packing has made the patches already
        self.notes = {DENOISES: " ".join([self._latents, self._layout.__name__.strip("_"), *map(str, self.patch)])}
        self.notes |= SINGLE_FRAMES if self._layout is _images else {}
        self.drivers = ("patches", *(f"patches/{n}" for n in groups), "segments", "frames", "packs")
        self.drivers += ("patch_pairs:frame", "patch_pairs:grid", *(f"patch_pairs:merged:{n}" for n in groups))
        if self._reads_text:
            self.drivers += ("sources", "joint", "pairs:joint", "pairs:cross", "source_pairs:full")

    @classmethod
    def of(cls, model: Any) -> "Denoiser | None":
        """Read the form off a model's signature; None where it takes no latents with a time, or has no sizes."""
        has_sizes = getattr(getattr(model, "config", None), "in_channels", None) is not None
        return cls(model) if has_sizes and takes_latents(inspect.signature(model.forward).parameters) else None

    def _ask(self, model: nn.Module) -> "tuple[_Sizes, _Layout, int]":
        """Find the first sizes, layout of latents and width of the text with which the model runs."""
        probe, refusal = Probe(model), None
        is_packed = not {"img_ids", "img_shapes"}.isdisjoint(self.accepted)
        layouts = (_packed,) if is_packed else (_images, _videos, _clips, _packed)
        for choice in itertools.product((_RUNS, _SQUARES), layouts, dict.fromkeys(self._widths)):
            self._sizes, self._layout, self._width = choice
            try:
                probe.run(self.arguments(self.workloads()[0]))
            except TraceError:
                raise
            except Exception as error:  # noqa: BLE001 - the model's own code refuses in its own way
                refusal = refusal or error
            else:
                return self._sizes, self._layout, self._width
        raise TraceError(
            f"{type(model).__name__} refuses latents in every layout that Headway knows ({type(refusal).__name__}: "
            f"{refusal}). Give the forward's arguments with trace(model, inputs=...)."
        )

    def workloads(self, _longest_window: int = 0) -> list[Workload]:
        """Plan four batches of unlike samples, sizes and texts."""
        unit, has_frames = self._unit, self._layout in (_videos, _clips)
        only = getattr(self.config, "max_text_seq_length", None)  # tokens of every text, where each has a place
        return [
            self.workload_of((frames if has_frames else 1, height * unit, width * unit), samples, only or text)
            for samples, frames, height, width, text in self._sizes
        ]

    @property
    def _reads_text(self) -> bool:
        return bool(self._width) and _TEXT in self.accepted

    def workload_of(self, grid: tuple[int, int, int], samples: int, text: int) -> Workload:
        """Build the workload of a batch of one size; the text is left out where the model takes none."""
        sources = [text] * samples if self._reads_text else ()
        images, videos = ([grid] * samples, ()) if grid[0] == 1 else ((), [grid] * samples)
        return Workload([math.prod(grid)] * samples, images, videos, sources=sources)

    def arguments(self, workload: Workload, device: torch.device | None = None) -> dict[str, Any]:
        """Make the arguments of one forward, phantoms or on a device; unknown arguments with a default are left out."""
        batch = _Batch(workload, phantom_floats if device is None else lambda shape: torch.randn(tuple(shape)))
        arguments: dict[str, Any] = {self._latents: self._make_latents(batch)}
        for name, parameter in self.accepted.items():
            if name in _ARGUMENTS and (value := _ARGUMENTS[name](self, batch)) is not None:
                arguments[name] = value
            elif (
                parameter.default is parameter.empty and name not in arguments and parameter.kind.name != "VAR_KEYWORD"
            ):
                raise TraceError(
                    f"the model's forward needs {name}, but Headway cannot make this argument from the "
                    "configuration. Give the model's arguments with trace(model, inputs=...)."
                )
        return arguments if device is None else on_device(arguments, device)

    def _make_latents(self, batch: _Batch) -> torch.Tensor:
        t, h, w = (n * p for n, p in zip((batch.frames, batch.height, batch.width), self.patch, strict=True))
        return batch.floats(self._layout(batch, self.config.in_channels, (t, h, w)))

    def text(self, batch: _Batch) -> torch.Tensor | None:
        """Make states of the text [samples, tokens, width]."""
        return batch.floats((batch.samples, batch.text, self._width)) if self._width else None


_Layout = Callable[[_Batch, int, tuple[int, ...]], tuple[int, ...]]


# layouts of latents: their shapes
def _packed(batch: _Batch, channels: int, _pixels: tuple[int, ...]) -> tuple[int, ...]:
    return batch.samples, batch.tokens, channels


def _images(batch: _Batch, channels: int, pixels: tuple[int, ...]) -> tuple[int, ...]:
    return batch.samples, channels, *pixels[1:]


def _videos(batch: _Batch, channels: int, pixels: tuple[int, ...]) -> tuple[int, ...]:
    return batch.samples, channels, *pixels


def _clips(batch: _Batch, channels: int, pixels: tuple[int, ...]) -> tuple[int, ...]:
    return batch.samples, pixels[0], channels, *pixels[1:]


def _whole_numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [number for number in values if isinstance(number, int) and number > 0]


def _pooled(form: Denoiser, batch: _Batch) -> torch.Tensor | None:
    width = getattr(form.config, "pooled_projection_dim", None)
    return batch.floats((batch.samples, width)) if width else None


def _labels(form: Denoiser, batch: _Batch) -> torch.Tensor | None:
    sizes = [getattr(form.config, name, None) for name in ("num_embeds_ada_norm", "num_class_embeds")]
    return torch.zeros(batch.samples, dtype=torch.long) if any(sizes) and not form._width else None


def _added(form: Denoiser, batch: _Batch) -> dict[str, Any] | None:
    """Make SDXL's additions to the time (a pooled text and six sizes), or PixArt's (resolution and proportions)."""
    c = form.config
    if getattr(c, "addition_embed_type", None) == "text_time":
        pooled = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        return {"text_embeds": batch.floats((batch.samples, pooled)), "time_ids": batch.floats((batch.samples, 6))}
    if not hasattr(c, "use_additional_conditions"):
        return None
    sizes = c.use_additional_conditions
    if sizes is None:
        sizes = c.sample_size == 128
    names = {"resolution": 2, "aspect_ratio": 1}
    return {name: batch.floats((batch.samples, n)) if sizes else None for name, n in names.items()}


def _mask(form: Denoiser, batch: _Batch) -> torch.Tensor | None:
    """Make a mask of text that is all real, where the forward does not run without."""
    is_needed = any(form.accepted[name].default is inspect.Parameter.empty for name in _MASKS if name in form.accepted)
    return torch.ones((batch.samples, batch.text), dtype=torch.long) if is_needed else None


def _axes(form: Denoiser) -> int:
    sizes = getattr(form.config, "axes_dims_rope", None) or (0, 0, 0)
    return len(sizes)


# by the name of an argument: what makes it, or None where the model has no use for it
_ARGUMENTS: dict[str, Callable[[Denoiser, _Batch], Any]] = {
    **dict.fromkeys(_TIMES, lambda _form, batch: torch.full((batch.samples,), 3)),
    _TEXT: Denoiser.text,
    **dict.fromkeys(_MASKS, _mask),
    "pooled_projections": _pooled,
    "class_labels": _labels,
    "added_cond_kwargs": _added,
    "img_ids": lambda form, batch: batch.floats((batch.tokens, _axes(form))),
    "txt_ids": lambda form, batch: batch.floats((batch.text, _axes(form))),
    "guidance": lambda form, batch: (
        batch.floats((batch.samples,)) if getattr(form.config, "guidance_embeds", 0) else None
    ),
    "img_shapes": lambda _form, batch: [[(batch.frames, batch.height, batch.width)]] * batch.samples,
    "num_frames": lambda _form, batch: batch.frames,
    "height": lambda _form, batch: batch.height,
    "width": lambda _form, batch: batch.width,
    **dict.fromkeys(
        ("original_size", "target_size", "crop_coords"), lambda _form, batch: batch.floats((batch.samples, 2))
    ),
}
