"""`headway demo`: write the handwritten digits, and train on them with a shipped recipe."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption, SetOption
from headway.cli.output import needs_extra, print_result
from headway.cli.train import ResumeOption, print_summary
from headway.errors import UsageError
from headway.plugins import hooks_of_all
from headway.report import render_pairs
from headway.stores import refuse

if TYPE_CHECKING:
    from headway.config import TrainConfig


@dataclass(frozen=True)
class Demo:
    """Made-up data and a small model, and the recipe that trains it.

    Attributes:
        recipe: the YAML file.
        paths: files of the data, below the demo's folder, by the settings that name them.
        write: writes data and model into a folder; returns a line about them.
        judge: judges what a complete run has learnt; returns a part of the record, and lines about it. None for nothing
            beyond the run's own evaluation.
    """

    recipe: Traversable
    paths: Mapping[str, str]
    write: Callable[[Path], str]
    judge: "Callable[[TrainConfig], tuple[dict[str, Any], str]] | None" = None


_READ, _DATA = "read", "data"
WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="[read|data|...]",
        help=(
            "read trains a model that reads digits. data only writes pictures of single digits for a model of yours. "
            "A plug-in may bring other demos."
        ),
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=(
            "Folder of data, model and run. Default: runs/digits for read, digits for data, and runs/NAME for other "
            "demos."
        ),
        show_default=False,
    ),
]
StepsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Optimizer steps [steps]. Default: the recipe's number.")
]


def demo(
    what: WhatArgument = _READ,
    folder: FolderOption = None,
    steps: StepsOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small vision-language model to read handwritten digits, on a CPU in a few minutes.

    The command writes scikit-learn's digits as chat samples, makes a model folder of about a million parameters, and
    then trains as `headway train recipes/digits.yaml` does.

    Example: headway demo data --folder digits
    """
    if what == _DATA:
        if steps is not None or settings or resume:
            raise UsageError(
                "demo data trains nothing, so --steps, --set and --resume cannot take effect. Leave them out."
            )
        refuse(folder or Path(), "--folder")
        _print_data(folder or Path("digits"), as_json=as_json)
        return
    chosen = _demo_of(what)
    refuse(folder or Path(), "--folder")
    from headway.config import load_config

    folder = folder or Path("runs", "digits" if what == _READ else what)
    paths = {"model.path": folder / "model", "run.folder": folder / "run"}
    paths |= {key: folder / "data" / file for key, file in chosen.paths.items()}
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    if steps is not None:  # the recipe's proportions, on another number of steps
        quarter = max(1, steps // 4)
        overrides += [f"optim.steps={steps}", f"optim.warmup_steps={steps // 32}"]
        overrides += [f"eval.every={quarter}", f"checkpoint.every={quarter}"]
    with as_file(chosen.recipe) as recipe:
        config = load_config(recipe, (*overrides, *(settings or ())))

    with needs_extra("training"):
        from headway.train.run import train
        from headway.train.run_folder import refuse_existing_run

    if not resume:
        refuse_existing_run(config.run.folder)
        print(chosen.write(folder), file=sys.stderr)
    summary = train(config, resume=resume)
    if chosen.judge is None or not summary.is_complete:
        print_summary(summary, as_json=as_json)
        return
    record, text = chosen.judge(config)
    print_result(lambda: summary.to_dict() | record, lambda: f"{summary.as_table()}\n{text}", as_json=as_json)


def _demo_of(name: str) -> Demo:
    """Find a demo by its name."""
    own = Demo(
        files("headway.synthetic") / "digits.yaml",
        {
            "data.stages.0.path": "one_digit.jsonl",
            "data.stages.1.path": "train.jsonl",
            "data.eval": "eval.jsonl",
        },
        _write,
    )
    demos: dict[str, Demo] = {_READ: own}
    for brought in hooks_of_all("demos"):
        demos |= brought
    if name not in demos:
        raise UsageError(
            f"There is no demo {name!r}. Here are {', '.join([*demos, _DATA])}. If a plug-in brings the demo, install "
            "the plug-in."
        )
    return demos[name]


def _print_data(folder: Path, *, as_json: bool) -> None:
    """Write pictures of single digits, to train on and held out, and print the files."""
    with needs_extra("drawing digits"):
        from headway.synthetic.digits import write_digits

        data = write_digits(folder, num_one_digit=0, num_train=6000, num_eval=200, most_digits=1, renderings=4)
    record = {"train": str(data.train), "eval": str(data.eval), "images": data.num_images}
    pairs = [
        ("train", f"{data.train}, 6,000 samples of {data.num_train_scans:,} scans"),
        ("held out", f"{data.eval}, 200 samples of {data.num_eval_scans:,} other scans"),
        ("next", f"headway new-model tiny --data {data.train}"),
    ]
    print_result(lambda: record, lambda: render_pairs(pairs), as_json=as_json)


def _write(folder: Path) -> str:
    """Write data and model of the reading demo; returns a line on the files."""
    from headway.synthetic.digits import write_digits, write_reader

    data = write_digits(folder / "data")
    write_reader(folder / "model")
    return (
        f"wrote {data.num_images} images of {data.num_train_scans} scans to train on and {data.num_eval_scans} "
        f"held out, as chat samples, to {folder / 'data'}"
    )
