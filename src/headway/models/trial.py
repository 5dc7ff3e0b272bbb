"""A trial of packs before the first step, on a tiny copy of the model at hand.

A pack may be computed otherwise than its samples: a model's own code may attend without the backend that was set, count
positions over the pack, or carry a state past a boundary. So a tiny copy, of the same classes and the same
configuration but for its sizes, runs a pack of two segments, with a picture or a sound in the first if the
model takes them. Its logits are compared with those of the model's own eager attention on each segment alone, and with
those of packs in which a token of the first segment, or the last token of the second, is another.

A text model that fails runs each segment by itself from then on (`recurrent.run_apart`), if that passes the trial.

A tiny copy runs the same code on sizes that take milliseconds. What decides which code runs is kept: the family, kinds
of layers, how many queries share a key, how experts are picked. Head counts are divided by one factor, sizes of heads
by another, and every other width by both, so that products and sums of sizes stay what they were. Lengths from which on
a model attends otherwise (windows, chunks, top-k) become shorter than the segments that it is tried on. Fields are
found by the words of their names, so a copy may not fit together: the first that the model's own code builds and runs
is the one.
"""

import copy
import hashlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from headway.cache import cache_root, write_whole
from headway.count.workload import Workload
from headway.errors import ConfigError, HeadwayError, first_line
from headway.models.attention import use_attention
from headway.models.init_weights import to_memory
from headway.models.load import load_model, rope_index, without_advice
from headway.models.recurrent import run_apart
from headway.models.scores import SCORE, is_scorer
from headway.plugins import lays_out_packs
from headway.tracing.build import subconfigs, twin_of_model, with_layers
from headway.tracing.inputs.model_inputs import Inputs
from headway.version import __version__

LENGTH = 8
"""Windows, chunks and the like of a tiny copy [tokens]."""
VOCABULARY = 512
"""Entries of its vocabulary, at most [tokens]."""

_FIRST_SPECIAL = VOCABULARY // 2  # first number of a special token
_LAYERS = (4, 12)  # layers of a tower: at least, and at most, until every kind of layer is there
_FACTORS = (
    (16, 8), (8, 8), (8, 4), (8, 2), (4, 4), (8, 1), (4, 2), (4, 1), (2, 2), (1, 8), (1, 4), (1, 2), (2, 1), (1, 1),
)  # fmt: skip
_FEW_FACTORS = ((8, 4), (4, 2), (1, 4), (1, 1))
_SMALLEST = 32  # widths below it are left alone
_LEAST = 4  # least width or size of a head

_ROPES = ("rope_parameters", "rope_scaling")
SPECIAL = re.compile(r"token_ids?$|token_index$|image_patch_id$|_(start|end|newline)_id$")
"""Names of fields that hold numbers of special tokens."""
_HEADS = re.compile(r"heads$|^n_head$|num_query_groups$")
_HEAD_SIZES = re.compile(r"head_dim$|head_size$|headdim$|d_head$|dim_head$|d_kv$|rotary_dim$|kv_channels$")
_WIDTHS = re.compile(
    r"(hidden|intermediate)_(size|dim)|ffn_dim|embed(ding)?_dim|emb_dim|embd$|embedding_size|d_model$|d_ff$|dff$|inner$"
    r"|dim_ff$|mlp_dim|lowrank|_rank$|_width$|dim_model_base|d_ssm|(in|out)put_(size|dim)|proj\w*_dim|expert_dim"
    r"|feed_forward_size|(in|out)_dim$"
)
_LENGTHS = re.compile(r"window(_size|_len)?$|chunk_(size|length)$|floor_scale$|index_topk$|original_max_position")
_MOST = {
    re.compile(r"experts$|expert_num$"): 16,
    re.compile(r"per_tok(en)?$|(^|moe_)(top_?)?k$"): 4,
    re.compile(r"n_group$|expert_group$"): 4,
    re.compile(r"topk_group$"): 2,
    re.compile(r"vocab_size"): VOCABULARY,
}

_TEXTS = (LENGTH - 1, LENGTH + 6)  # text of the two segments, on both sides of a length [tokens]
_CLOSE = 1e-3  # share of the logits' standard deviation; rounding is below 1e-5, and a leak is 0.1 and more
_MOST_PARAMETERS = 200_000_000  # most parameters of a tiny copy, in float32
_ALIKE = 7  # copies that may fail alike, but for numbers
_NUMBER = re.compile(r"\d+")

BOTH_WAYS = "it reads in both directions, so that a token sees the one that it is to predict"
FUTURE = "a token of a pack sees the tokens behind it"
LEAK = "the segments of a pack see each other"
DIFFERS = "the logits of a segment in a pack are not those of the segment alone"

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "vocab_size", "architectures")  # no part of a key


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial.

    Attributes:
        mode: `packed`: a pack is its segments; `apart`: it is, if each runs by itself; `refused`: neither is so;
            `untried`: no tiny copy of the model runs.
        reason: why a pack is not its segments, or why no copy runs; "" where a pack is.
        media_error: why pictures or sounds were not among what was tried, of a model that takes some; else None.
    """

    mode: str
    reason: str = ""
    media_error: str | None = None


def try_packs(model: PreTrainedModel, *, tokens: float = math.inf, is_shared: bool = False) -> tuple[str, ...]:
    """Make sure that a model computes of each segment of a pack what it computes of the segment alone.

    Args:
        model: from `load_model`, with or without weights; changed in place where its segments have to run apart.
        tokens: of the longest pack [tokens].
        is_shared: whether several processes hold its weights or share its packs.

    Returns:
        Lines for the start of a run: how segments run if not as a pack, or what could not be tried.

    Raises:
        ConfigError: a token sees what is not to be seen, the model cannot run packs, or several processes cannot.
    """
    if lays_out_packs(model.config):
        return ()
    name, verdict = type(model).__name__, _verdict(model, tokens)
    if verdict.mode == "refused":
        raise ConfigError(
            f"{name} cannot be trained on packs. A trial of a tiny copy showed the reason: {verdict.reason}. Give a "
            "model of a type that docs/models.md lists as trained."
        )
    if verdict.mode == "untried":
        return (
            f"warning: Headway does not know whether {name} keeps the samples of a pack apart, because no tiny copy "
            f"of the model runs ({verdict.reason}). Compare the losses with a run with data.samples_per_pack=1",
        )
    notes: tuple[str, ...] = ()
    if verdict.media_error is not None:
        notes = (f"warning: packs were tried with text alone, because no tiny copy took media: {verdict.media_error}",)
    if verdict.mode == "packed":
        return notes
    if is_shared:
        raise ConfigError(
            f"{name} runs each segment of a pack by itself, because otherwise {verdict.reason}. Processes have "
            "different numbers of segments, so they would wait for each other forever. Train this model on one "
            "process."
        )
    run_apart(model)
    return (f"each segment of a pack runs by itself, which is slower, because otherwise {verdict.reason}", *notes)


def _verdict(model: PreTrainedModel, tokens: float) -> Verdict:
    """The verdict on a model's classes and configuration: from the cache if it held packs, else by a trial."""
    file = cache_root() / "packs" / f"{_key(model, tokens)}.json"
    with suppress(OSError, ValueError, TypeError):  # a file that is missing or was cut short is made again
        return Verdict(**json.loads(file.read_text(encoding="utf-8")))
    verdict = verdict_on(model.config, tokens)
    if verdict.mode in ("packed", "apart"):  # another failure may be for want of memory
        with suppress(OSError):  # a cache that cannot be written costs the next run its trial
            write_whole(file, lambda opened: opened.write(json.dumps(asdict(verdict)).encode()))
    return verdict


def _key(model: PreTrainedModel, tokens: float) -> str:
    """A key of all that a verdict depends on: versions, the configuration, and the code of the model's classes."""
    versions = [torch.__version__, transformers.__version__, __version__]
    lengths = [length for length in critical_lengths(model.config) if length < tokens]
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE}
    code = hashlib.sha256()
    for kind in sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__):
        for name, value in sorted(vars(kind).items()):
            if inspect.isfunction(value):
                code.update(f"{kind.__qualname__}.{name} {value.__code__.co_names}".encode() + value.__code__.co_code)
    with suppress(OSError, TypeError):  # a class may have no file
        code.update(Path(inspect.getfile(type(model))).read_bytes())
    key = json.dumps([versions, lengths, config, code.hexdigest()], sort_keys=True, default=str)
    return hashlib.sha256(key.encode()).hexdigest()


def verdict_on(config: PreTrainedConfig, tokens: float = math.inf) -> Verdict:
    """Try a model on packs of so many tokens, by its configuration."""
    with without_advice(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            trial = _first_that_runs(config, tokens)
        except _NoCopyError as error:
            return Verdict("untried", first_line(error.__cause__ or error))
        if not trial.is_causal:
            return Verdict("refused", BOTH_WAYS, trial.media_error)
        use_attention(trial.model)
        if not (reason := trial.fault()):
            return Verdict("packed", media_error=trial.media_error)
        run_apart(trial.model)
        mode = "refused" if trial.fault() else "apart"
    # if packs below all lengths of the configuration hold, the shortest of these lengths is their limit
    shortest = next((length for length in critical_lengths(config) if length < tokens), None)
    if shortest is not None and verdict_on(config, 0).mode == "packed":
        reason += f", in packs of more than {shortest:,} tokens"
    return Verdict(mode, reason, trial.media_error)


class _NoCopyError(Exception):
    """No tiny copy of a model builds and runs."""


def _first_that_runs(config: PreTrainedConfig, tokens: float) -> "_Trial":
    """The smallest copy of a model that runs by its own code: with media, or without where none runs with them."""
    errors = Counter[str]()
    last: Exception = _NoCopyError("it has too many parameters.")
    for has_media in (True, False):
        for small in tiny_configs(config, tokens):
            try:
                model = load_model(small, random_init=True, device="meta")
                if sum(parameter.numel() for parameter in model.parameters()) <= _MOST_PARAMETERS:
                    return _Trial(model, media_error=None if has_media else first_line(last))
            except Exception as error:  # noqa: BLE001  # sizes that do not fit together: whatever the model's code raises
                last = error
                errors[_NUMBER.sub("", f"{has_media} {type(error)} {error}")] += 1
                if isinstance(error, HeadwayError) or max(errors.values()) == _ALIKE:  # sizes are not the reason
                    break
        errors.clear()
    raise _NoCopyError from last


class _Trial:
    """A tiny model, two segments for it, and their logits alone.

    Args:
        model: on the meta device; is given weights.
        media_error: why the first segment does not hold what the model's towers take; None if it does.

    Attributes:
        model: the same.
        media_error: the same.
        is_causal: whether no token sees those behind it in a segment alone.

    Raises:
        ValueError: the logits do not depend on the tokens.
    """

    def __init__(self, model: PreTrainedModel, *, media_error: str | None) -> None:
        self.model, self.media_error = model.train(False), media_error
        _draw_weights(model)
        inputs = Inputs(twin_of_model(model))
        if media_error is not None:
            inputs.parts = []
        plan = {name: sizes for part in inputs.parts for name, sizes in part.sizes(0).items()}
        self._special = _special_tokens(model.config)
        places = inputs.positions(Workload([1], **plan))
        first = self._segment(inputs, Workload([places + _TEXTS[0]], **plan))
        inputs.parts = []
        second = self._segment(inputs, Workload([_TEXTS[1]]))
        use_attention(model, "eager")
        # the second segment has the arguments of the first for each token, such as its type, as text has them
        ids_1S, names = second["input_ids"], [name for name in self._of_tokens(first) if name not in second]
        for kind in (0, 1):
            second |= {name: torch.full_like(ids_1S, kind, dtype=first[name].dtype) for name in names}
            self._segments = [first, second]
            self._alone = [self._logits(segment) for segment in self._segments]
            self._scale = float(torch.cat(self._alone).std())
            other = self._logits(self._changed(1, -1)[1])
            if self._are_close(other[-1:], self._alone[1][-1:]):
                raise ValueError("its logits do not depend on its tokens")
            self.is_causal = self._are_close(other[:-1], self._alone[1][:-1])
            if self.is_causal or not names:
                break

    def fault(self) -> str:
        """Say what is wrong with the logits of a pack; "" where they are those of its segments."""
        length, first = len(self._alone[0]), int(self._plain(self._segments[0])[0].nonzero()[0])
        try:
            logits_TV = self._pack(self._segments)
            other_first, other_last = self._pack(self._changed(0, first)), self._pack(self._changed(1, -1))
        except HeadwayError as error:
            return f"a pack ends in an error ({str(error).partition('. ')[0]})"
        except Exception as error:  # noqa: BLE001  # whatever the model's code raises on a pack is a result here
            return f"a pack ends in an error ({type(error).__name__}: {first_line(error).rstrip('.')})"
        if not self._are_close(logits_TV[:-1], other_last[:-1]):
            return FUTURE
        if not self._are_close(logits_TV[length:], other_first[length:]):
            return LEAK
        return "" if self._are_close(logits_TV, torch.cat(self._alone)) else DIFFERS

    def _are_close(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= _CLOSE * self._scale).all())

    def _segment(self, inputs: Inputs, workload: Workload) -> dict[str, Any]:
        """A forward's arguments for one segment, its text drawn at random from tokens that are not special."""
        arguments = inputs.arguments(workload, torch.device("cpu"))
        ids_1S = arguments["input_ids"]
        rows = len(self.model.get_input_embeddings().get_parameter("weight"))
        plain = torch.tensor([token for token in range(1, rows) if token not in self._special])
        drawn = plain[torch.randint(len(plain), ids_1S.shape)]
        arguments["input_ids"] = torch.where(self._plain(arguments), drawn, ids_1S)
        return {name: value for name, value in arguments.items() if name not in ("position_ids", "use_cache")}

    def _plain(self, segment: dict[str, Any]) -> torch.Tensor:
        """Tell for each token of a segment whether it is no special one, shape (1, S)."""
        return torch.isin(segment["input_ids"], torch.tensor(sorted(self._special)), invert=True)

    def _changed(self, number: int, slot: int) -> list[dict[str, Any]]:
        """The segments with another token at a slot of one; its media are others too if it is the first."""
        segment = dict(self._segments[number])
        ids_1S = segment["input_ids"].clone()
        ids_1S[0, slot] = self._segments[1 - number]["input_ids"][0, -2]
        segment["input_ids"] = ids_1S
        return [segment if place == number else other for place, other in enumerate(self._segments)]

    def _logits(self, arguments: dict[str, Any]) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        if is_scorer(self.model.config):
            hook = self.model.get_submodule(SCORE).register_forward_hook(lambda *call: outputs.append(call[2]))
        output = self.model(**arguments, use_cache=False)
        if outputs:
            hook.remove()
        logits_TV: torch.Tensor = (outputs or [output.logits])[0][0].float()
        slots = arguments["input_ids"].shape[1]
        if len(logits_TV) != slots or not bool(logits_TV.isfinite().all()):
            raise ValueError(f"it gives {tuple(logits_TV.shape)} finite or infinite logits for {slots} tokens")
        return logits_TV

    def _pack(self, segments: list[dict[str, Any]]) -> torch.Tensor:
        lengths = [segment["input_ids"].shape[1] for segment in segments]
        inputs = dict(segments[0])
        for name in self._of_tokens(inputs):
            inputs[name] = torch.cat([segment[name] for segment in segments], dim=1)
        positions_RT = torch.cat([self._positions(segment) for segment in segments], dim=1)
        return self._logits(
            inputs
            | {
                "position_ids": positions_RT if len(positions_RT) == 1 else positions_RT[:, None],
                "pack_cu_seqlens": torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
                "pack_max_seqlen": max(lengths),
                "pack_segments": tuple((length, length) for length in lengths),
            }
        )

    def _positions(self, segment: dict[str, Any]) -> torch.Tensor:
        """Positions of a segment's tokens, shape (1 or 3, S), as an encoder gives them."""
        plain_1S, rule = torch.arange(segment["input_ids"].shape[1])[None], rope_index(self.model)
        if rule is None:
            return plain_1S
        has_media = len(segment) > len(self._of_tokens(segment))
        return rule(**segment)[0][:, 0] if has_media else plain_1S.repeat(3, 1)

    @staticmethod
    def _of_tokens(segment: dict[str, Any]) -> list[str]:
        shape = segment["input_ids"].shape
        return [name for name, value in segment.items() if isinstance(value, torch.Tensor) and value.shape == shape]


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    """Give a model from the meta device weights of a spread that lets every part of it count, and its buffers."""
    to_memory(model, "cpu")
    for buffer in model.buffers():
        buffer.zero_()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' rules leave it alone then
    model.initialize_weights()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.05)


def _special_tokens(config: PreTrainedConfig) -> set[int]:
    values = [value for part in subconfigs(config) for name, value in vars(part).items() if SPECIAL.search(name)]
    listed = [value if isinstance(value, list | tuple) else [value] for value in values]
    return {0, *(token for tokens in listed for token in tokens if isinstance(token, int))}


def tiny_configs(config: Any, tokens: float) -> Iterator[Any]:
    """Make tiny copies of a configuration, smallest first; the last have its own layers, as some share theirs.

    Args:
        config: of a model.
        tokens: of the longest pack; lengths that no pack reaches stay [tokens].
    """
    cut = with_layers(config, _layers(config))
    for base, longest, factors in ((cut, tokens, _FACTORS), (cut, 0, _FEW_FACTORS), (config, tokens, _FEW_FACTORS)):
        for heads, size in factors:
            small = copy.deepcopy(base)
            if _shrink(small, heads, size, longest):
                yield small


def critical_lengths(config: Any) -> list[int]:
    """Lengths from which on a model may attend otherwise, by its configuration, shortest first [tokens]."""
    texts = [vars(part) for part in subconfigs(config) if hasattr(part, "vocab_size")]
    ropes = [rope for text in texts for name in _ROPES if isinstance(rope := text.get(name), dict)]
    values = [value for fields in texts + ropes for name, value in fields.items() if _LENGTHS.search(name)]
    return sorted({value for value in values if type(value) is int and value > LENGTH})


def _layers(config: Any) -> int:
    least, most = _LAYERS
    for part in subconfigs(config):
        depth = getattr(part, "num_hidden_layers", None)
        for name, value in vars(part).items():
            if not isinstance(value, list | tuple) or not all(type(entry) in (str, int) for entry in value):
                continue
            if len(value) == depth:
                least = max(least, *(value.index(kind) + 1 for kind in set(value)))
            elif name.endswith(("indices", "indexes")) and value:
                least = max(least, min(value) + 1)
    return min(least, most)


def _shrink(config: Any, heads: int, size: int, tokens: float) -> bool:
    """Divide heads and their sizes, in place; False where heads do not divide, or a width would vanish."""
    special: dict[int, int] = {}  # numbers of special tokens, and what they become

    def token(number: Any) -> Any:
        is_special = type(number) is int and number >= _FIRST_SPECIAL
        return special.setdefault(number, _FIRST_SPECIAL + len(special)) if is_special else number

    for part in subconfigs(config):
        for name, value in list(vars(part).items()):
            small = value
            if SPECIAL.search(name):
                small = [*map(token, value)] if isinstance(value, list | tuple) else token(value)
            elif name in _ROPES and isinstance(value, dict):
                small = _rope(value, size, tokens)
            elif type(value) is int:
                small = _size(name, value, heads, size, tokens if hasattr(part, "vocab_size") else 0)
            if type(small) is int and small == 0 != value:
                return False
            if small is not value:
                setattr(part, name, small)
    return True


def _size(name: str, value: int, heads: int, size: int, tokens: float) -> int:
    if _HEADS.search(name):
        return max(1, value // heads) if value and not (value % heads and heads % value) else 0
    if _LENGTHS.search(name):
        return min(value, LENGTH) if value < tokens else value
    for words, most in _MOST.items():
        if words.search(name):
            return min(value, most)
    divisor = size if _HEAD_SIZES.search(name) else heads * size if _WIDTHS.search(name) and value >= _SMALLEST else 1
    return 0 if divisor > 1 and value < _LEAST * divisor else value // divisor


def _rope(rope: dict[str, Any], size: int, tokens: float) -> dict[str, Any]:
    """Rotary settings, of each kind of layer where they differ, for heads that are so many times smaller."""
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _rope(value, size, tokens)
        elif name == "mrope_section":
            others = [share // size for share in value[1:]]
            small[name] = [sum(value) // size - sum(others), *others]
        elif name.endswith("_factor") and isinstance(value, list):
            small[name] = value[::size]
        elif type(value) is int and _LENGTHS.search(name):
            small[name] = min(value, LENGTH) if value < tokens else value
    return small
