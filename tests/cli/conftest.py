import sys
from typing import NamedTuple

import pytest


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def headway(monkeypatch, capsys):
    """Run the command line in this process: headway("flops", "gpt2", ...) -> Result."""
    from headway.cli.app import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        code = exit_.value.code
        return Result(0 if code is None else code, captured.out, captured.err)

    return run
