"""The `headway` command: its list of commands, and the way of an error to the terminal.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted. Results go to stdout, everything else to stderr. A mistake
is one readable paragraph; a traceback appears only with HEADWAY_DEBUG=1.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

import headway.quiet  # noqa: F401 - before any library that complains as it is imported
from headway.cli import (
    answer,
    audit,
    compare,
    config,
    convert,
    demo,
    devices,
    evaluate,
    explain,
    flops,
    index,
    init,
    look,
    mfu,
    models,
    pack,
    plan,
    records,
    report,
    train,
    tune,
    verify,
)
from headway.cli.output import ReaderGoneError, missing_library_told, open_streams
from headway.cli.parse import HeadwayCommand
from headway.errors import HeadwayError, OutOfMemoryError, RankLostError, is_out_of_memory
from headway.plugins import hooks_of_all
from headway.report.terminal import coloured, width_of, wrapped
from headway.safe_path import keep_current_folder_out
from headway.version import __version__

DEBUG_VARIABLE = "HEADWAY_DEBUG"
_NO_MEMORY_MESSAGE = (
    "there was not enough memory. Give a smaller file, model or pack, or a machine with more; a small file may be long "
    f"once it is unpacked. {DEBUG_VARIABLE}=1 shows where this came up."
)
_ERROR_WIDTH = 120  # width of an error where stderr is no terminal [characters]

app = typer.Typer(
    name="headway",
    help="Train multimodal models on packed data, and know to the FLOP how much of the hardware turned into progress.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help loads no rich, so that `headway flops` stays fast
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("flops", short_help="Count the exact FLOPs of a training step.")(flops.flops)
app.command("compare", short_help="Show one step as every tool would print it.")(compare.compare)
app.command("audit", short_help="Restate a training log of another tool.")(audit.audit)
app.command("mfu", short_help="Relate step time, tokens/s, MFU, chips, days and cost.")(mfu.mfu)
app.command("goodput", short_help="Show where a run's wall time went, restarts included.")(records.goodput)
app.command("explain", short_help="Show where every second of a step went.")(explain.explain)
app.command("report", short_help="Write a run as one HTML page, or as Markdown.")(report.report)
app.command("check", short_help="Prove from a run's records that no sample was lost or repeated.")(records.check)
app.command("devices", short_help="List the devices whose peak is known, with sources.")(devices.devices)
app.command("ceiling", short_help="Measure what this device reaches at best.")(devices.ceiling)
app.command("models", short_help="List the models that ship with their costs.")(models.models)
app.command("verify", short_help="Hold a model's FLOPs against PyTorch's own counter.")(verify.verify)
app.command("index", short_help="Measure the lengths of all samples, without pixels.")(index.index)
app.command("look", short_help="See samples as tokens with their loss mask, and packs.")(look.look)
app.command("pack", short_help="Plan packs and steps from lengths; trains nothing.")(pack.pack)
app.command("plan", short_help="Predict memory, step time, MFU, days and cost of a run.")(plan.plan)
app.command("init", short_help="Write a configuration for a model and data.")(init.init)
app.command("new-model", short_help="Write a small model with random weights, for experiments.")(models.new_model)
app.command("train", short_help="Train a model on packed data.")(train.train)
app.command("tune", short_help="Search the settings that train fastest within the memory.")(tune.tune)
app.command("chat", short_help="Talk to a model that was trained.")(answer.chat)
app.command("generate", short_help="Answer one prompt or a file of them.")(answer.generate)
app.command("evaluate", short_help="Judge a model on held-out samples, as eval in training.")(evaluate.evaluate)
app.command("config", short_help="Print every setting of `headway train`.")(config.config)
app.command("export", short_help="Make a model folder of a checkpoint.")(convert.export)
app.command("demo", short_help="Train a small model to read handwritten digits.")(demo.demo)
for _commands in hooks_of_all("commands"):  # commands of installed families
    for _name, _function in _commands.items():
        app.command(_name, short_help=_function.__doc__.partition("\n")[0])(_function)
for _command in app.registered_commands:
    _command.cls = HeadwayCommand


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train multimodal models on packed data, and know to the FLOP how much of the hardware turned into progress."""


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    keep_current_folder_out()
    sys.argv[1:] = _spoken(sys.argv[1:])
    try:
        open_streams()
        try:
            with missing_library_told("this command"):  # whatever a command imports, also beyond what it asks for
                app(prog_name="headway")
        finally:
            sys.stdout.flush()  # while what is lost can still be told
    except SystemExit as error:
        # A checkpoint that is still written, as after Ctrl-C, frees tensors: an ordinary exit aborts below it (-6).
        saver = sys.modules.get("headway.checkpoint.saver")
        if saver is not None and saver.writers():
            sys.stderr.flush()
            os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except ReaderGoneError as error:
        sys.exit(error.exit_code)
    except OSError as error:  # a file, a folder or a disk that is not as a command needs it, wherever it was met
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        print(error_paragraph(_of_system(error)), file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if os.environ.get(DEBUG_VARIABLE) == "1" or not is_out_of_memory(error):
            raise
        print(error_paragraph(HeadwayError(_NO_MEMORY_MESSAGE)), file=sys.stderr)
        sys.exit(1)
    except HeadwayError as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        print(error_paragraph(error), file=sys.stderr)
        # An ordinary exit was seen to abort (-6) after both: native threads are still there, or could not be started.
        if isinstance(error, (RankLostError, OutOfMemoryError)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    sys.exit(0)


def _of_system(error: OSError) -> HeadwayError:
    place = f"{error.filename}: " if error.filename is not None else ""
    return HeadwayError(f"{place}{error.strerror or error}. {DEBUG_VARIABLE}=1 shows where this came up.")


def _spoken(arguments: list[str]) -> list[str]:
    """`version` and `help` as commands: what other tools call them."""
    if arguments[:1] == ["version"]:
        return ["--version"]
    return [*arguments[1:], "--help"] if arguments[:1] == ["help"] else arguments


def error_paragraph(error: HeadwayError) -> str:
    """Render an error as one paragraph, wrapped for the terminal."""
    text = " ".join(f"Error: {error}".split())
    lines = wrapped(text, width_of(sys.stderr) or _ERROR_WIDTH)
    return coloured("Error:", "red", sys.stderr) + "\n".join(lines)[len("Error:") :]
