"""Options that several commands share, each documented once with its unit."""

from typing import TYPE_CHECKING, Annotated

import typer

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.data.media.sizes import MediaSizes

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A shipped name (`headway models` lists them), a config's JSON file or folder, or a Hub id OWNER/MODEL.",
    ),
]

SegmentsOption = Annotated[
    str | None,
    typer.Option(
        metavar="L*N,L,...",
        help="Segment lengths [tokens], the tokens of images and videos included; L*N means N segments of L tokens.",
    ),
]

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="NAME=THEIRS", help="What the dataset calls a column, as question=Frage. Repeatable."
    ),
]


def columns_of(given: list[str] | None) -> dict[str, str]:
    """Read `--column`: the dataset's name of each column, by the name that it has here.

    Raises:
        UsageError: one is not NAME=THEIRS.
    """
    pairs = [one.partition("=") for one in given or []]
    for name, equals, theirs in pairs:
        if not (name and equals and theirs):
            raise UsageError(f"--column {name + equals + theirs!r} is not NAME=THEIRS, such as question=Frage.")
    return {name: theirs for name, _, theirs in pairs}


ImagesOption = Annotated[
    str | None,
    typer.Option(
        metavar="TxHxW*N,...",
        help="Image grids [patches, before merging], or WxHpx in pixels, as 1024x768px; *N repeats one N times.",
    ),
]

VideosOption = Annotated[
    str | None,
    typer.Option(metavar="TxHxW*N,...", help="Video grids [patches, before merging]; *N repeats a grid N times."),
]

SplitsOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODE:N,...;...",
        help="Who sees whom, in place of --segments: runs of tokens that are causal, full or noise, `;` between "
        "segments, as causal:102,noise:4098;full:4902,causal:302; (...)*N repeats a segment.",
    ),
]

LatentsOption = Annotated[
    str | None,
    typer.Option(metavar="HxW*N,...", help="Grids of latent patches that are drawn, a token each; *N repeats one."),
]

ReferencesOption = Annotated[
    str | None,
    typer.Option(metavar="HxW*N,...", help="Grids of clean latent patches that are read, as edits do; *N repeats one."),
]

SupervisedOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Labelled tokens, on which alone some models run their head; causal ones if not given."
    ),
]

SourcesOption = Annotated[
    str | None,
    typer.Option(
        metavar="L*N,L,...",
        help="What the encoder reads for each segment [tokens, or frames of speech]; models with cross attention.",
    ),
]

AudioOption = Annotated[
    str | None,
    typer.Option(metavar="L*N,L,...", help="Audio clips that lie in the segments [feature frames]; *N repeats one."),
]

PastOption = Annotated[
    str | None,
    typer.Option(
        metavar="L*N,L,...",
        help="Cached tokens before each segment, with --forward-only [tokens]; a decode step of 64 sequences is "
        "--segments 1*64 --past 4096*64.",
    ),
]

SlotsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Token slots computed, padding included [tokens]; the sum of the segments if not given."
    ),
]

SeqLenOption = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        min=1,
        help="Row length that a tool is configured with [tokens]; one row of all slots per rank if not given.",
    ),
]

FreezeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Parameters that are not trained: a component (vision) or a pattern (model.layers.0.*). Repeatable.",
    ),
]

LoraOption = Annotated[
    str | None,
    typer.Option(
        metavar="RANK[:TARGETS]",
        help="Train low-rank adapters of this rank on these linear layers and nothing else, e.g. 16:q_proj,v_proj.",
    ),
]

RecomputeOption = Annotated[
    str,
    typer.Option(
        metavar="none|full|CHOICE",
        help="Activation checkpointing: what runs forward twice, counted apart, never in the total. A choice joins "
        "reentrant, every:N, patterns of blocks (model.layers.*) and parts (mlp, -attention), such as full,-attention, "
        "which keeps what attention computed; see docs/counting.md.",
    ),
]

ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template in place of the model's own, as model.chat_template of the run.",
    ),
]

MediaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--media",
        metavar="SETTING=N",
        help="Bound on what is read of images and videos, as max_pixels=1003520 or fps=1 in the data section of the "
        "run. Repeatable.",
    ),
]


def sizes_of(given: list[str] | None) -> "MediaSizes":
    """Read `--media`: bounds on what is read of media, by the names and with the limits of a run's settings.

    Raises:
        UsageError: one is not SETTING=N, or no such setting or value.
    """
    from pydantic import ValidationError

    from headway.config.data import MediaConfig
    from headway.config.mistakes import describe_all
    from headway.data.media.sizes import MediaSizes

    pairs = [one.partition("=") for one in given or []]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise UsageError(f"--media {name + equals + value!r} is not SETTING=N, such as max_pixels=1003520.")
    try:
        return MediaSizes.of(MediaConfig.model_validate({name: value for name, _, value in pairs}))
    except ValidationError as error:
        raise UsageError(f"--media {'; '.join(describe_all(error.errors(), MediaConfig))}.") from error


MaxCharactersOption = Annotated[
    int | None,
    typer.Option(
        "--max-characters",
        metavar="N",
        min=1,
        help="Longest text of DATA [characters], as data.max_characters of the run; 5000000 if not given.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]

DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A device that `headway devices` lists, such as H100, or a dense peak [FLOP/s]."),
]

DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="What the matrix products run in, whose peak --device has: bf16 if not given, fp8, fp16, ...; several by "
        "their shares of the FLOPs, as fp8:0.7,bf16:0.3.",
    ),
]

RanksOption = Annotated[int, typer.Option(metavar="N", help="Devices that shared the step.")]
