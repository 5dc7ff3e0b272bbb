import os
import re
from pathlib import Path

import pytest

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def run(monkeypatch, headway, tmp_path):
    """Run a command; gives its exit code, and fails at anything but the conventional end."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    nothing = Path(os.devnull).open()  # noqa: SIM115 - open until the test has ended
    monkeypatch.setattr("sys.stdin", nothing)

    def run(arguments):
        code, out, err = headway(*arguments)
        assert code in (0, 1, 2), (arguments, err)
        assert code == 0 or "Error: " in err or "Usage: " in err, (arguments, err)
        assert not CONTROL.search(out + err), (arguments, CONTROL.search(out + err))
        return code

    yield run
    nothing.close()
