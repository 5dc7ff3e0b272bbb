"""Options that `chat`, `generate` and `evaluate` share: a model by its path, on a device, in a precision."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.output import say
from headway.log.working import working

if TYPE_CHECKING:
    import torch

    from headway.answer.generate import AnswerGenerator
    from headway.answer.model_folder import OpenedModel
    from headway.config import RunConfig
    from headway.models.precision import Precision


class WeightDtype(StrEnum):
    """Precisions that a model is opened in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help="A model folder, a folder of adapters, a checkpoint, a run folder (its newest export, or checkpoint if "
        "that is newer), or a Hub id OWNER/MODEL.",
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer [tokens].")]
TemperatureOption = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, help=("Temperature of sampling, usually 0.7. 0 takes the most likely token every time.")
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", help=("Sample among the most likely tokens that together have this probability.")
    ),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample among this number of the most likely tokens.")
]
SeedOption = Annotated[
    int, typer.Option(metavar="S", min=0, help=("Seed of sampling. The same seed gives the same answers."))
]


BestOption = Annotated[
    bool,
    typer.Option("--best", help="Use a run's checkpoint of its best evaluation (checkpoint.keep_best)."),
]
EmaOption = Annotated[
    bool | None,
    typer.Option(
        "--ema/--no-ema",
        help=(
            "Use the moving average of the weights (optim.ema), or the last weights. Default: the weights that "
            "evaluations used."
        ),
        show_default=False,
    ),
]


@dataclass(frozen=True)
class OpenOptions:
    """Options that say how a model is opened."""

    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model of the adapters, if the base has moved."),
    ] = None
    best: BestOption = False
    ema: EmaOption = None
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help=("Device: auto, cpu, cuda or cuda:N. auto means CUDA if there is a GPU.")),
    ] = "auto"
    dtype: Annotated[
        WeightDtype, typer.Option(help="Dtype of the weights. auto means bfloat16 on CUDA and float32 on a CPU.")
    ] = WeightDtype.auto


def open_generator(model: str, opening: OpenOptions, *, chat_template: str | None = None) -> "AnswerGenerator":
    """Open a model to generate with it.

    Args:
        model: what `find_model` finds.
        opening: its base, device and precision.
        chat_template: file of a template in place of the model's own.
    """
    with working(f"opening {model}"):
        from headway.answer.generate import generator_of

        model_opened, where = open_where(model, opening, for_generation=True, chat_template=chat_template)
        return generator_of(model_opened, where)


def open_where(
    model: str,
    opening: OpenOptions,
    *,
    for_generation: bool,
    chat_template: str | None = None,
) -> "tuple[OpenedModel, torch.device]":
    """Open a model on the device that is asked for, and say which that is; arguments as `open_generator`."""
    with working(f"opening {model}"):
        import torch

        from headway.answer.model_folder import find_model, open_model
        from headway.config import RunConfig
        from headway.data.chat_settings import ChatSettings

        chats = ChatSettings.of(chat_template)
        location = find_model(model, opening.base, best=opening.best, average=opening.ema)
        where, precision = chosen_device(RunConfig(folder=Path(), device=opening.device))
        chosen = precision.compute if opening.dtype is WeightDtype.auto else getattr(torch, opening.dtype.value)
        loaded = open_model(location, dtype=chosen, device=where, for_generation=for_generation, chats=chats)
    if loaded.is_average:
        say(f"{location.path}: the moving average of the weights, which --no-ema leaves out", on_stderr=True)
    return loaded, where


def chosen_device(run: "RunConfig") -> "tuple[torch.device, Precision]":
    """Device and precision that settings mean on this machine.

    Raises:
        ConfigError: there is no such device here.
    """
    from transformers.utils import logging

    from headway.models.precision import choose_device, choose_precision

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    device = choose_device(run)
    return device, choose_precision(run, device)
