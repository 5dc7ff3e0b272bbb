"""What a user names as output is written into; only a plain file is replaced."""

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from safetensors import SafetensorError
from typer.models import OptionInfo

from headway.cli.app import app
from headway.errors import UsageError
from headway.files import is_taken, open_output, read_text, write_failure, write_output

WRITES = re.compile("[Ww]rite|[Dd]raw lengths|The page|of the page|lines go")
CLI = Path(__file__).parents[1] / "src/headway/cli"


def test_what_has_no_end_is_not_read_for_ever():
    with pytest.raises(OSError, match="it has more than 3 MiB"):
        read_text(Path("/dev/zero"), most=3 * 2**20)


def test_a_text_is_read_from_a_file_and_a_pipe_alike(tmp_path):
    text = "step: 1\r\nloss: \u00e9\rend\n"
    (tmp_path / "log").write_bytes(text.encode())
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text.encode(),), daemon=True).start()
    read = [read_text(tmp_path / name, most=100) for name in ("log", "pipe")]
    assert read == [(tmp_path / "log").read_text(encoding="utf-8")] * 2
    (tmp_path / "log").write_bytes(b"\xff")
    assert read_text(tmp_path / "log", errors="replace") == "\ufffd"
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "log")


@pytest.fixture
def device(tmp_path):
    """Devices as Linux has them, by their minor number: 3 swallows all, 7 is always full.

    A user who may rename over the machine's own gets others, so that a defect here does not take them from everybody.
    """

    def path(minor):
        own, shared = tmp_path / f"device-{minor}", Path({3: "/dev/null", 7: "/dev/full"}[minor])
        if not os.access("/dev", os.W_OK):
            return shared
        try:
            os.mknod(own, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            own.open("wb").close()
        except OSError as error:
            pytest.skip(f"no device of one's own: {error}")
        return own

    return path


def test_a_missing_file_and_its_folder_are_made(tmp_path):
    write_output(tmp_path / "new/page.html", "é")
    assert (tmp_path / "new/page.html").read_bytes() == "é".encode()


def test_a_plain_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o600)
    with path.open("rb") as reader:
        write_output(path, b"new")
        assert reader.read() == b"old"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(tmp_path, is_there):
    (tmp_path / "target").mkdir()
    if is_there:
        (tmp_path / "target/page.html").write_text("old")
    (tmp_path / "link").symlink_to("target/page.html")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target/page.html").read_text() == "new"


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"page")
    reader.join()
    assert received == [b"page"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' device numbers")
def test_a_device_stays_a_device(device, tmp_path):
    null = device(3)
    before = null.stat()
    (tmp_path / "link").symlink_to(null)
    for path in (null, tmp_path / "link"):
        write_output(path, b"page")
    with open_output(null) as file:
        file.write("lines")
    assert not is_taken(null)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert null.stat().st_ino == before.st_ino


@pytest.mark.parametrize("named", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out.txt"])
@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_the_stream_that_a_shell_redirected_goes_on_where_it_stands(tmp_path, named, mode):
    (tmp_path / "out.txt").write_bytes(b"before\n")
    code = (
        "import sys; from pathlib import Path; from headway.files import write_output\n"
        f"print('one'); write_output(Path({named!r}), 'page\\n'); print('two')"
    )
    with (tmp_path / "out.txt").open(mode) as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, cwd=tmp_path, check=True)
    expected = b"before\n" * (mode == "ab") + b"one\npage\ntwo\n"
    assert (tmp_path / "out.txt").read_bytes() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' device numbers")
def test_what_cannot_be_written_is_one_error_that_names_option_and_reason(device, tmp_path):
    (tmp_path / "plain").write_text("old")
    for path, reason in (
        (device(7), "No space left"),
        (tmp_path, "s a directory"),
        (tmp_path / "plain/x", "N"),
    ):
        with pytest.raises(UsageError, match=rf"--html .*cannot be written: .*{reason}"):
            write_output(path, b"page", option="--html")


def test_a_file_that_must_be_new_is_left_as_it_is(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_output(path, "yours", new=True)
    assert path.read_text() == "mine"
    assert (is_taken(path), is_taken(tmp_path), is_taken(tmp_path / "no")) == (True, True, False)
    with pytest.raises(UsageError, match=r"--output .*exists already"), open_output(path, option="--output"):
        pass


def _outputs():
    """Command, parameter and source of every option that names a file to write, as its type and its help say."""
    group = typer.main.get_command(app)
    for command in (group.get_command(None, name) for name in group.list_commands(None)):
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            info = next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, OptionInfo)), None)
            if info is not None and "Path" in str(hint) and WRITES.search(info.help or ""):
                yield command.name, name, Path(sys.modules[command.callback.__module__].__file__)


def test_every_option_that_names_an_output_goes_through_one_function():
    """A command that gains such an option fails here until it is written by `write_output` or `open_output`."""
    options = list(_outputs())
    assert {command for command, _, _ in options} >= {"report", "pack", "tune", "look", "init", "draw"}
    for command, option, file in options:
        if (command, option) == ("index", "quarantine"):  # appended to, row by row
            continue
        source = file.read_text(encoding="utf-8")
        assert "write_output(" in source or "open_output(" in source, (command, option)


def test_a_library_without_the_systems_words_is_asked_through_the_system(tmp_path):
    """safetensors names the number, PyTorch and NumPy speak of positions and items; what is no write has no reason."""
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert write_failure(full, tmp_path) == "No space left on device"
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert write_failure(wrapped, tmp_path) == os.strerror(errno.EDQUOT)
    assert write_failure(RuntimeError("unexpected pos 704 vs 598"), tmp_path) is None  # the disk takes another file
    assert write_failure(OSError("60000 requested and 8688 written"), tmp_path) == "60000 requested and 8688 written"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        for error in (RuntimeError("unexpected pos 704 vs 598"), OSError("60000 requested and 8688 written")):
            assert write_failure(error, tmp_path) == os.strerror(errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
