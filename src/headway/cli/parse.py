"""Turn a user's text for a workload into numbers: `4096*3,32k`, `1x32x48*2`, `16:q_proj,v_proj`.

Grammar: items separated by commas; an item is a length, a grid or a run of tokens, `*N` repeats it N times.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_type_hints

from typer.core import TyperCommand
from typer.models import OptionInfo

from headway.cli.output import warn
from headway.count.modalities import GRID, LATENT, LENGTH, MODALITIES
from headway.errors import UsageError, WorkloadError, errors_in
from headway.report.quantity import MONEY, advice, parse_number
from headway.words import RUN_KEYS, Options, Words

_MAX_ITEMS = 10_000_000
_MAX_DIGITS = 18  # every number of 18 digits fits 64 bits
_MAX_RANK = 2**16  # limit of model.lora.rank
_SEGMENT = re.compile(r"([0-9][^*]*)(?:\*([0-9][^*]*))?")
_EXAMPLES = {
    "--segments": "--segments 4096*3,512",
    "--sources": "--sources 512*3,64",
    "--past": "--past 4096*64",
    "--splits": '--splits "causal:102,noise:4098;full:4902,causal:302"',
    **{f"--{name}": f"--{name} {row.example}" for name, row in MODALITIES.items()},
}
_SPLIT = re.compile(r"([a-z]+):([0-9].*)")
_REPEATED = re.compile(r"\((.*)\)\*([0-9].*)")
_SHEET = re.compile(r"([0-9]+)x([0-9]+)(?:\*([0-9].*))?")
_GRID = re.compile(r"([0-9]+)x([0-9]+)x([0-9]+)(?:\*([0-9].*))?")


class Lora(NamedTuple):
    """Low-rank adapters: their rank, and the modules that get one (None: the default of `CostModel.lora`)."""

    rank: int
    targets: list[str] | None


def parse_segments(text: str, option: str = "--segments") -> list[int]:
    """Read lengths of segments, sources, cached pasts [tokens] or audio clips [feature frames].

    Args:
        text: what was typed.
        option: the option's name, for the error; only a past may be 0.

    Raises:
        WorkloadError: the text is not a list of lengths, or a length or repetition is 0.

    >>> parse_segments("4096*3,512")
    [4096, 4096, 4096, 512]
    """
    lengths: list[int] = []
    modality = MODALITIES.get(option.removeprefix("--"))
    unit = "tokens" if modality is None else modality.unit
    for item in _items(option, text):
        match = _SEGMENT.fullmatch(item)
        length = parse_number(match[1], unit, whole=True) if match else None
        if match is None or not isinstance(length, int):
            raise WorkloadError(
                f"{option} {text[:80]!r}: {item[:40]!r} is not a length. Give whole numbers of {unit} separated "
                f"by commas, L*N for N of length L, for example {_EXAMPLES[option]}."
            )
        repeat = _whole(option, match[2] or "1")
        if length >= 10**_MAX_DIGITS:
            raise WorkloadError(
                f"{option} holds a length of more than {_MAX_DIGITS} digits. Write, for example, {_EXAMPLES[option]}."
            )
        if length < 1 and option != "--past":
            raise WorkloadError(
                f"{option} {text!r}: a length of {length} {unit} computes nothing. Lengths are 1 or more, for "
                f"example {_EXAMPLES[option]}."
            )
        lengths += [length] * _repeats(option, text, item, repeat, len(lengths))
    return lengths


def parse_grids(text: str, option: str) -> list[tuple[int, int, int]]:
    """Read image or video grids t x h x w [patches, before merging].

    Args:
        text: what was typed.
        option: the option's name, for the error: "--images" or "--videos".

    Raises:
        WorkloadError: the text is not a list of grids, or a side or repetition is 0.

    >>> parse_grids("1x32x48*2", "--images")
    [(1, 32, 48), (1, 32, 48)]
    """
    grids: list[tuple[int, int, int]] = []
    for item in _items(option, text):
        match = _GRID.fullmatch(item)
        if match is None:
            raise WorkloadError(
                f"{option} {text!r}: {item!r} is not a grid. Give TxHxW in patches before merging, separated by "
                f"commas, TxHxW*N for N of them, for example {_EXAMPLES[option]}"
                + ("; or pixels, width x height, as 1024x768px." if option == "--images" else ".")
            )
        *sides, repeat = (_whole(option, digits) for digits in (match[1], match[2], match[3], match[4] or "1"))
        grid = (sides[0], sides[1], sides[2])
        if min(grid) < 1:
            raise WorkloadError(
                f"{option} {text!r}: the grid {item!r} holds no patch. T, H and W are 1 or more, for example "
                f"{_EXAMPLES[option]}."
            )
        grids += [grid] * _repeats(option, text, item, repeat, len(grids))
    return grids


def parse_media(name: str, text: str) -> list[Any]:
    """Read the sizes of one kind of input beside text, as its option is typed.

    Args:
        name: of the kind of input, such as "audio".
        text: what was typed.

    Raises:
        WorkloadError: the text is something else, or a size or repetition is 0.

    >>> parse_media("audio", "3000*2")
    [3000, 3000]
    """
    return _PARSERS[MODALITIES[name].metavar](text, f"--{name}")


def parse_latents(text: str, option: str) -> list[tuple[int, int, int]]:
    """Read grids of latent patches, as (1, height, width).

    Args:
        text: what was typed.
        option: the option's name, for the error: "--latents" or "--references".

    Raises:
        WorkloadError: the text is not a list of grids, or a side or repetition is 0.

    >>> parse_latents("64x64*2", "--latents")
    [(1, 64, 64), (1, 64, 64)]
    """
    items = _items(option, text)
    if wrong := next((item for item in items if not _SHEET.fullmatch(item)), None):
        raise WorkloadError(
            f"{option} {text!r}: {wrong!r} is not a grid of latent patches. Give HxW separated by commas, HxW*N for N "
            f"of them, for example {_EXAMPLES[option]}."
        )
    return parse_grids(",".join(f"1x{item}" for item in items), option)


_PARSERS: dict[str, Callable[[str, str], list[Any]]] = {
    GRID: parse_grids,
    LENGTH: parse_segments,
    LATENT: parse_latents,
}


def parse_splits(text: str, option: str = "--splits") -> list[list[tuple[str, int]]]:
    """Read segments as runs of tokens with modes.

    Args:
        text: runs MODE:N separated by commas, segments by semicolons; `(...)*N` repeats a segment.
        option: the option's name, for the error.

    Raises:
        WorkloadError: the text is something else, a mode is not known, or a run or repetition is 0.

    >>> parse_splits("(causal:2,noise:4)*2; full:3,causal:1")
    [[('causal', 2), ('noise', 4)], [('causal', 2), ('noise', 4)], [('full', 3), ('causal', 1)]]
    """
    from headway.count.splits import MODES

    segments: list[list[tuple[str, int]]] = []
    for item in (segment.strip() for segment in text.split(";")):
        repeated = _REPEATED.fullmatch(item)
        runs = []
        for run in _items(option, repeated[1] if repeated else item):
            match = _SPLIT.fullmatch(run)
            if match is None or match[1] not in MODES or not _whole(option, match[2]):
                raise WorkloadError(
                    f"{option} {text[:80]!r}: {run!r} is not a run of tokens. Give MODE:N with a mode of "
                    f"{', '.join(MODES)} and 1 token or more, for example {_EXAMPLES[option]}."
                )
            runs.append((match[1], _whole(option, match[2])))
        repeat = _whole(option, repeated[2]) if repeated else 1
        segments += [runs] * _repeats(option, text, item, repeat, len(segments))
    return segments


def parse_lora(text: str) -> Lora:
    """Read RANK or RANK:TARGET,TARGET,...

    Raises:
        UsageError: the rank is not a whole number of 1 to 65536, or a target is empty.

    >>> parse_lora("16:q_proj,v_proj")
    Lora(rank=16, targets=['q_proj', 'v_proj'])
    """
    rank_text, colon, targets_text = text.partition(":")
    targets = [target.strip() for target in targets_text.split(",")] if colon else None
    rank = parse_number(rank_text, whole=True)
    if not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK or (targets and not all(targets)):
        raise UsageError(
            f"--lora {text[:80]!r} is not RANK or RANK:TARGETS. The rank is 1 to {_MAX_RANK}, the targets are names of "
            "linear layers separated by commas, for example --lora 16 or --lora 16:q_proj,v_proj."
        )
    return Lora(rank, targets)


def _whole(option: str, text: str) -> int:
    if len(text.lstrip("0")) > _MAX_DIGITS:
        raise WorkloadError(
            f"{option} holds a number of {len(text)} digits, but Headway reads at most {_MAX_DIGITS}, for example "
            f"{_EXAMPLES[option]}."
        )
    number = parse_number(text, whole=True)
    if not isinstance(number, int):
        raise WorkloadError(f"{option}: {text!r} is not a whole number. Write, for example, {_EXAMPLES[option]}.")
    return number


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        what = "is empty" if not text.strip() else "has nothing between two commas or at an end"
        raise WorkloadError(f"{option} {text!r} {what}. For example {_EXAMPLES[option]}.")
    return items


def _repeats(option: str, text: str, item: str, repeat: int, so_far: int) -> int:
    if repeat < 1:
        raise WorkloadError(
            f"{option} {text!r}: {item!r} repeats 0 times. Leave this item out or repeat it, as in {_EXAMPLES[option]}."
        )
    if so_far + repeat > _MAX_ITEMS:
        raise WorkloadError(
            f"{option} {text!r} describes more than {_MAX_ITEMS:,} items in one step. Costs add up, so count a "
            "smaller step and multiply."
        )
    return repeat


_UNIT = re.compile(r"\[([a-zA-Z/]+)\]")

_NOT_FINITE = {sign + word for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}


class _Kind(NamedTuple):
    """Unit of a numeric option, "" for none, and whether it is whole."""

    unit: str
    is_whole: bool


_OPTION_OF = {
    "step_s": "step_time",
    "num_ranks": "ranks",
    "num_chips": "chips",
    "peak_flops_per_s": "device",
    "mfu": "mfu_fraction",
    "time_s": "within",
    "rank": "lora",
    "as_one_step": "whole",
    "merge_adapters": "merge_lora",
    "columns": "column",
    "overrides": "settings",
    "to_dict": "as_json",
    "resume=None": "resume_if_any",
}
"""Options of commands that are named otherwise than the arguments of the rooms below, by Python's names of those."""
_OPTION_OF_KEY = {
    "model.chat_template": "chat_template",
    "model.path": "model",
    "data.train": "data",
    "data.eval": "data",
    "data.tokens_per_pack": "packing_length",
    "optim.steps": "steps",
    "eval.generate": "generate",
    "eval.max_new_tokens": "max_new_tokens",
    "run.device": "device",
}
"""Options that stand for a run's keys, in commands that take no keys themselves."""


class HeadwayCommand(TyperCommand):
    """A command that reads the numbers among its options before the parser sees them, and speaks of its options."""

    def invoke(self, ctx: Any) -> Any:  # noqa: D102 - as the class above says
        with errors_in(*_words_of(self)):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: D102 - as the class above says
        if ctx.resilient_parsing:  # a shell asks how half a line goes on
            return super().parse_args(ctx, args)
        kinds = _numeric(self.callback) if self.callback else {}
        options = {name: kinds[param.name] for param in self.params if param.name in kinds for name in param.opts}
        _warn_of_repeats(args, self.params)
        try:
            return super().parse_args(ctx, _plain(args, options))
        except Exception as error:
            if (message := self._reworded(error)) is None:
                raise
            raise UsageError(message) from error

    def _reworded(self, error: Exception) -> str | None:
        """Put a refusal of the parser into Headway's words; None for one that is plain as it is."""
        from headway.config.mistakes import BOUNDS

        # typer brings a click of its own, or takes the one that is installed: whose error it is, its name tells
        kind, param = type(error).__name__, getattr(error, "param", None)
        if kind == "NoSuchOption":
            return _answer_to(str(getattr(error, "option_name", "")).lstrip("-"), {str(p.name) for p in self.params})
        meaning = str(getattr(param, "help", None) or "").rstrip(".")
        if kind == "MissingParameter":
            return f"{_name_of(param)} is missing. {meaning}. `headway {self.name} -h` has an example."
        for mistake in getattr(error.__cause__, "errors", list)():  # pydantic's
            if mistake["type"] in BOUNDS:
                limit = next(iter(mistake["ctx"].values()))
                return f"{_name_of(param)} {mistake['input']} must be {BOUNDS[mistake['type']]} {limit:,} ({meaning})."
            if mistake["type"] == "value_error":
                return f"{_name_of(param)}: {mistake['ctx']['error']}"
        return None


def _answer_to(option: str, parameters: set[str]) -> str | None:
    """Say what stands for an option that a command lacks: its own number of devices, or a setting of a run."""
    from headway.config.mistakes import SAME, translated
    from headway.config.read import TrainConfig
    from headway.config.tree import walk

    if "devices" in parameters and SAME.get(option.replace("-", "_")) == SAME["gpus"]:
        return f"There is no option --{option}. Give the number of devices as --devices."
    places = [setting.name for setting in walk(TrainConfig) if setting.name.rpartition(".")[2] == option]
    highest = [name for name in places if name.count(".") == min(other.count(".") for other in places)]
    answer = translated(option) or (f"the setting is {' or '.join(map(repr, highest))}" if highest else None)
    if answer is None or "settings" not in parameters:
        return None
    return (
        f"There is no option --{option}; {answer}. To change settings of a run, use --set, such as --set optim.lr=1e-3."
    )


def _name_of(param: Any) -> str:
    """An option by its long name, an argument as the usage line has it: DATA of [DATA]..."""
    place = re.search(r"\w+", getattr(param, "metavar", None) or "")
    return place[0] if place and param.param_type_name == "argument" else str(max(param.opts, key=len))


def _warn_of_repeats(arguments: list[str], params: list[Any]) -> None:
    """Warn of an option of one value that is given twice with different ones: the last counts, as in most shells."""
    takes_value = {
        name: param
        for param in params
        if param.param_type_name == "option" and not getattr(param, "is_flag", False) and not getattr(param, "count", 0)
        for name in param.opts
    }
    values: dict[str, list[str]] = {}
    iterator = iter(arguments)
    for argument in iterator:
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        if name in takes_value:
            param = takes_value[name]
            values.setdefault(max(param.opts, key=len), []).append(value if equals else next(iterator, ""))
    for name, stated in values.items():
        if len({*stated}) > 1 and not takes_value[name].multiple:
            warn(
                f"{name} {' and '.join(dict.fromkeys(stated[:-1]))} has no effect, because {name} {stated[-1]} follows."
            )


def _words_of(command: TyperCommand) -> tuple[Words, ...]:
    """The options of a command, by the names of arguments of the rooms below, and a run's keys where it has none."""
    own = {str(param.name): _name_of(param) for param in command.params}
    assigns = own.get("settings", "")
    stands_for = _OPTION_OF if assigns else _OPTION_OF | _OPTION_OF_KEY
    names = {name: own[option] for name, option in stands_for.items() if option in own}
    if "lora" in own:
        names["targets"] = f"{own['lora']} target"
    # A command that has no such options names those that show a step or a rank.
    shown = {name: f"`headway explain --{name}`" for name in ("step", "rank")}
    return Options(shown | names | own, assigns), RUN_KEYS


def _numeric(function: Callable[..., Any]) -> dict[str, _Kind]:
    """The numeric options of a command's function, by the names of its arguments."""
    kinds = {}
    for name, annotation in get_type_hints(inspect.unwrap(function), include_extras=True).items():
        option = next((argument for argument in get_args(annotation) if isinstance(argument, OptionInfo)), None)
        types = _types(annotation)
        if option is not None and types & {int, float} and str not in types:
            written = option.help or ""
            match = _UNIT.search(written)
            unit = match[1] if match else MONEY if MONEY in written else ""
            kinds[name] = _Kind(unit, is_whole=float not in types)
    return kinds


def _types(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return (
        set().union(*map(_types, arguments)) if arguments else {annotation} if isinstance(annotation, type) else set()
    )


def _plain(arguments: list[str], options: dict[str, _Kind]) -> list[str]:
    """The arguments with the numbers of these options as Python writes them."""
    plain: list[str] = []
    option = ""  # the one whose value comes next
    for position, argument in enumerate(arguments):
        if argument == "--":
            return plain + arguments[position:]
        name, equals, value = argument.partition("=")
        if option:
            plain.append(_number(option, argument, options[option]))
            option = ""
        elif equals and name in options:
            plain.append(f"{name}={_number(name, value, options[name])}")
        else:
            plain.append(argument)
            option = argument if argument in options else ""
    return plain


def _number(option: str, text: str, kind: _Kind) -> str:
    number = parse_number(text, kind.unit, whole=kind.is_whole)
    if number is None and not kind.is_whole and text.strip().lower() in _NOT_FINITE:
        return text  # the commands refuse such a number themselves, each with what it needs
    if number is None or (kind.is_whole and not isinstance(number, int)):
        what = "a whole number" if kind.is_whole else "a number"
        way_out = advice(text[:40], kind.unit, whole=kind.is_whole)
        raise UsageError(f"{option} {text[:40]!r} is not {what}{':' if way_out[:1] != 'W' else '.'} {way_out}.")
    return repr(number)
