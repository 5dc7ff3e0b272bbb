"""`headway run`: a training script, started as Python would, and metered without a change to it."""

import atexit
import io
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from headway.cli.output import say
from headway.errors import UsageError
from headway.safe_path import SAFE_PATH_VARIABLE

if TYPE_CHECKING:
    from headway.integrations.script import ScriptWatch


def run(
    program: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.", show_default=False),
    ],
    is_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.", show_default=False)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the run. Default: runs/SCRIPT-TIME."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record three steps for `headway explain`.", show_default=False)
    ] = False,
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            "--log-to",
            metavar="PLACE",
            help=("Tracker that gets the records too: tensorboard:FOLDER, wandb:PROJECT, ..."),
        ),
    ] = None,
) -> None:
    """Run a training script as Python would, and meter the model that it trains. The script stays unchanged.

    The script's output, losses, errors and exit code stay as they are without Headway. Headway finds the trained model,
    its optimizer and its data loaders by itself. At the end, one line on stderr shows MFU, tokens/s and the wait for
    data. headway report, explain and goodput read the folder of the run. Processes that the script starts are not
    metered.

    Example: headway run -o runs/mnist main.py --epochs 2

    On several GPUs: torchrun --nproc-per-node 8 --no-python headway run train.py, or accelerate launch --no_python
    headway run train.py. In a notebook: %load_ext headway.
    """
    if log_to:
        from headway.log.sinks import check_spec

        for spec in log_to:
            check_spec(spec)
    if not is_module and not Path(program[0]).exists():
        raise UsageError(f"There is no script {program[0]}. Check the path. A module needs -m.")
    name = program[0].rpartition(".")[2] if is_module else Path(program[0]).resolve().stem
    folder = output or Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    raise Program(program, is_module=is_module, folder=folder.absolute(), profile=profile, log_to=log_to or ())


class ScriptCommand(TyperCommand):
    """A command whose options end where the script's name stands."""

    allow_interspersed_args = False


class Program(BaseException):
    """A program that takes the place of this command, raised through all that handles the command's errors.

    Args:
        arguments: its script or module, and what follows.
        is_module: whether it is a module.
        options: as for `ScriptWatch`.
    """

    def __init__(self, arguments: list[str], *, is_module: bool, **options: Any) -> None:
        super().__init__(arguments[0])
        self._arguments, self._is_module, self._options = arguments, is_module, options
        self._watch: ScriptWatch | None = None
        self._pid = os.getpid()

    def run(self) -> None:
        """Run the program; whatever it raises goes on to Python, without a frame of this package in front."""
        self._become()
        failure: BaseException | None = None
        atexit.register(self._tell_result)
        meter = partial(self._meter, time.monotonic_ns())
        if "torch" in sys.modules:
            meter()
        else:
            sys.meta_path.insert(0, _AfterTorch(meter))
        try:
            self._start()
        except BaseException as error:
            failure = None if isinstance(error, SystemExit) else error
            _show_frames_within(Program._start)
            raise
        finally:
            if self._watch is not None:
                with suppress(Exception):
                    self._watch.close(is_whole=failure is None, error=failure)

    def _become(self) -> None:
        """Leave no trace of this command in what the program is given."""
        import headway.quiet

        headway.quiet.let_complain()
        sys.stdout.flush()
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        own = Path(sys.argv[0]).resolve().parent  # folder of the command, first on the path
        if sys.path[:1] == [str(own)] and not sys.flags.safe_path:
            del sys.path[0]
        sys.argv = [*self._arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")

    def _start(self) -> None:
        # Source: docs.python.org/3.11/library/sys.html, sys.path: the script's folder, or the current one for a module.
        script = self._arguments[0]
        is_folder = not self._is_module and Path(script).is_dir()
        if not os.environ.get(SAFE_PATH_VARIABLE):
            of_script = script if is_folder else str(Path(script).resolve().parent)
            sys.path.insert(0, str(Path.cwd()) if self._is_module else of_script)
        if self._is_module or is_folder:
            run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what python -m calls
            run_as_main(script if self._is_module else "__main__", self._is_module)
            return
        path = str(Path(script).absolute())
        main = vars(sys.modules["__main__"])
        main |= {"__file__": path, "__cached__": None, "__builtins__": __builtins__}
        main["__loader__"] = SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main)

    def _meter(self, since_ns: int) -> None:
        from headway.integrations.script import ScriptWatch

        self._watch = ScriptWatch(**self._options, since_ns=since_ns, report=_tell)

    def _tell_result(self) -> None:
        with suppress(Exception):  # standard error may be closed
            line, reason = "", ", as no optimizer of torch took a third step"
            if self._watch is not None:
                line, reason = self._watch.line, "" if self._watch.has_failed else reason
            if os.getpid() == self._pid and os.environ.get("RANK", "0") == "0":
                _tell(line or f"nothing was metered{reason}.")


class _AfterTorch(MetaPathFinder):
    """Waits for the program to import torch, which reads settings of the program as it is imported; then goes."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, *arguments: Any) -> ModuleSpec | None:
        """Find torch as all others would; nothing else. Libraries ask where it is, and may not import it."""
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, *arguments) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del loader.exec_module
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                load(module)
                try:
                    self._then()
                except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on without numbers
                    _tell(f"Warning: the script is not metered: {type(error).__name__}: {error}")

            loader.exec_module = exec_module
        return spec


def _tell(text: str) -> None:
    say(f"headway run: {text}", on_stderr=True, flush=True)


def _show_frames_within(function: Callable[..., Any]) -> None:
    """Show an uncaught exception from the frames on that a function of this file calls, as without this command."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        own = trace
        while own is not None and own.tb_frame.f_code is not function.__code__:
            own = own.tb_next
        trace = trace if own is None else own.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook
