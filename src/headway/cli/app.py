"""The `headway` command: its list of commands, and the way of an error to the terminal.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted. Results go to stdout, everything else to stderr. A mistake
is one readable paragraph; a traceback appears only with HEADWAY_DEBUG=1.
"""

import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

import headway.quiet  # noqa: F401 - before any library that complains as it is imported
from headway.cli.output import ReaderGoneError, missing_library_told, open_streams
from headway.cli.run import Program, ScriptCommand
from headway.errors import HeadwayError, OutOfMemoryError, RankLostError, is_out_of_memory
from headway.plugins import hooks_of_all
from headway.report.table import coloured, width_of, wrapped
from headway.safe_path import keep_current_folder_out
from headway.version import __version__

DEBUG_VARIABLE = "HEADWAY_DEBUG"
_NO_MEMORY_MESSAGE = (
    "there was not enough memory. Give a smaller file, model or pack, or use a machine with more memory. A small "
    f"compressed file may be large when it is unpacked. {DEBUG_VARIABLE}=1 shows where this came up."
)
_WRONG_USE = 2  # exit code
_ERROR_WIDTH = 120  # width of an error where stderr is no terminal [characters]
# by the name of a command: the file of `headway.cli` that has its function, and its line in the list of commands
_COMMANDS = {
    "flops": ("flops", "Count the exact FLOPs of a training step."),
    "compare": ("compare", "Show one step as every tool would print it."),
    "audit": ("audit", "Recompute the MFU of a training log of another tool."),
    "mfu": ("mfu", "Relate step time, tokens/s, MFU, chips, days and cost."),
    "goodput": ("records", "Show where a run's wall time went, restarts included."),
    "explain": ("explain", "Show where every second of a step went."),
    "report": ("report", "Write a run as one HTML page, or as Markdown."),
    "check": ("records", "Prove from a run's records that no sample was lost or repeated."),
    "devices": ("devices", "List the devices whose peak is known, with sources."),
    "ceiling": ("devices", "Measure the best rate that this device reaches."),
    "models": ("models", "List the models that ship with their costs."),
    "verify": ("verify", "Compare a model's FLOPs with PyTorch's own counter."),
    "index": ("index", "Measure the lengths of all samples, without pixels."),
    "look": ("look", "Show samples as tokens with their loss mask, and packs."),
    "pack": ("pack", "Plan packs and steps from lengths, without training."),
    "plan": ("plan", "Predict memory, step time, MFU, days and cost of a run."),
    "init": ("init", "Write a configuration for a model and data."),
    "new-model": ("models", "Write a small model with random weights, for experiments."),
    "train": ("train", "Train a model on packed data."),
    "run": ("run", "Run any training script, and meter it."),
    "tune": ("tune", "Search the fastest settings that fit the memory."),
    "chat": ("answer", "Talk to a model that was trained."),
    "generate": ("answer", "Answer one prompt or a file of them."),
    "evaluate": ("evaluate", "Score a model on held-out samples, as in training."),
    "config": ("config", "Print every setting of `headway train`."),
    "export": ("convert", "Make a model folder of a checkpoint."),
    "demo": ("demo", "Train a small model to read handwritten digits."),
}
# The list of commands by what one does with them; those of plug-ins stand behind.
_GROUPS = {
    "Measure": ("run", "flops", "compare", "mfu", "verify", "ceiling", "devices", "models"),
    "Explain": ("explain", "report", "goodput", "audit", "check"),
    "Plan": ("plan", "tune"),
    "Data": ("look", "index", "pack"),
    "Train": ("demo", "new-model", "init", "config", "train"),
    "Use": ("chat", "generate", "evaluate", "export"),
}


class Commands(TyperGroup):
    """The commands, each of which is imported once it is asked for, so that none waits for the others' imports."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands.update(dict.fromkeys(_COMMANDS))  # type: ignore[arg-type]  # None until it is asked for

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: D102 - as the class above says
        if cmd_name not in _COMMANDS:
            self._add_those_of_families()
        elif self.commands[cmd_name] is None:
            file, short_help = _COMMANDS[cmd_name]
            self._add(cmd_name, getattr(import_module(f"headway.cli.{file}"), cmd_name.replace("-", "_")), short_help)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: D102 - as the class above says
        self._add_those_of_families()
        return super().list_commands(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, without importing them: the table has their lines."""
        names = self.list_commands(ctx)
        grouped = {name for group in _GROUPS.values() for name in group}
        groups = {**_GROUPS, "Plug-ins": tuple(name for name in names if name not in grouped)}
        for title, group in groups.items():
            rows = [(name, _line_of(self.commands[name], name)) for name in group if name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _add_those_of_families(self) -> None:
        for commands in hooks_of_all("commands"):
            for name, function in commands.items():
                self._add(name, function, function.__doc__.partition("\n")[0])

    def _add(self, name: str, function: Any, short_help: str) -> None:
        kind: type[TyperCommand] = ScriptCommand
        if name != "run":  # a script may have settings that NumPy reads as it is imported
            from headway.cli.parse import HeadwayCommand

            kind = HeadwayCommand
        info = CommandInfo(name, cls=kind, callback=function, short_help=short_help)
        self.commands[name] = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)


def _line_of(command: Any, name: str) -> str:
    return _COMMANDS[name][1] if name in _COMMANDS else str(command.short_help)


app = typer.Typer(
    name="headway",
    cls=Commands,
    help="Train multimodal models on packed data, and know to the FLOP how much of the hardware turned into progress.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help loads no rich, so that `headway flops` stays fast
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


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
    """Run the command line and exit with its code, or with that of the program that it starts."""
    try:
        _command()
    except Program as ready:
        program = ready
    program.run()  # behind all that handles errors of commands
    sys.exit(0)


def _command() -> NoReturn:
    sys.argv[1:] = _spoken(sys.argv[1:])
    if sys.argv[1:2] != ["run"]:  # a script starts processes of its own, as Python does without this command
        keep_current_folder_out()
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
        sys.exit(_WRONG_USE if _is_missing_input(error) else error.exit_code)
    sys.exit(0)


def _is_missing_input(error: HeadwayError) -> bool:
    """Tell whether a file or folder that was named is not there, which is a wrong use in every command.

    A file that a row of a dataset names is no such mistake: its error has the place of the row.
    """
    is_missing = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
    return is_missing and not getattr(error, "where", "")


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
