"""Disturbing a command: its processes are stopped and go on, and what was stopped before stays so."""

import signal
import sys

import psutil
import pytest

from helpers.processes import running
from tools.disturbed import _stop, main


@pytest.mark.parametrize("status", [0, 3])
def test_a_disturbed_command_goes_on_to_its_own_end(status, tmp_path, capsys):
    lines = tmp_path / "lines"
    child = f"import time\nfor n in range(40):\n    open({str(lines)!r}, 'a').write(f'{{n}} ')\n    time.sleep(0.01)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\nsys.exit({status})"
    assert main([sys.executable, "-c", code]) == status
    assert lines.read_text().split() == [str(number) for number in range(40)]
    num_stops = int(capsys.readouterr().err.split()[3].replace(",", ""))
    assert num_stops > 0


def test_a_process_that_somebody_else_stopped_is_left_alone():
    with running([sys.executable, "-c", "import time; time.sleep(600)"]) as program:
        process = psutil.Process(program.pid)
        assert _stop(process)
        while process.status() != psutil.STATUS_STOPPED:
            pass
        assert not _stop(process)
        program.send_signal(signal.SIGKILL)
    assert not _stop(process)
