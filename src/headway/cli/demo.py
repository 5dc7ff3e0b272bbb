"""`headway demo`: write the handwritten digits, then train on them with the shipped recipe."""

import json
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.cli.output import needs_extra
from headway.cli.train import ResumeOption, SetOption, print_summary

FolderOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Where data, model folder and run go; made where it is missing.")
]
StepsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Optimizer steps [steps]; the recipe's own number if not given.")
]


def demo(
    folder: FolderOption = Path("runs/digits"),
    steps: StepsOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small vision-language model to read handwritten digits, on a CPU in a few minutes.

    Writes scikit-learn's digits as chat samples of 1 to 4 images, a model folder of about a million parameters, and
    then does what `headway train recipes/digits.yaml` does.
    """
    from headway.train.config import load_config

    paths = {
        "model.path": folder / "model",
        "data.stages.0.path": folder / "data" / "one_digit.jsonl",
        "data.stages.1.path": folder / "data" / "train.jsonl",
        "data.eval": folder / "data" / "eval.jsonl",
        "run.folder": folder / "run",
    }
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    if steps is not None:  # the recipe's proportions, on another number of steps
        quarter = max(1, steps // 4)
        overrides += [f"optim.steps={steps}", f"optim.warmup_steps={steps // 32}"]
        overrides += [f"eval.every={quarter}", f"checkpoint.every={quarter}"]
    with as_file(files("headway.synthetic") / "digits.yaml") as recipe:
        config = load_config(recipe, (*overrides, *(settings or ())))

    with needs_extra("training"):
        from headway.synthetic.digits import write_digits, write_reader
        from headway.train.loop import train
        from headway.train.run_folder import refuse_existing_run

    if not resume:
        refuse_existing_run(config.run.folder)
        data = write_digits(folder / "data")
        write_reader(folder / "model")
        print(
            f"wrote {data.num_images} images of {data.num_train_scans} scans to train on and {data.num_eval_scans} "
            f"held out, as chat samples, to {folder / 'data'}",
            file=sys.stderr,
        )
    print_summary(train(config, resume=resume), as_json=as_json)
