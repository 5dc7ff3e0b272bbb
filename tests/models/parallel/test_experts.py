"""Experts spread over processes: as one process would have it, and errors where they cannot be."""

import sys
from pathlib import Path

import pytest

from processes import run_processes


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "degree"), [(2, 2), (4, 4), (4, 2)], ids=["2", "4", "2 and FSDP2 over 2"])
def test_losses_and_gradients_are_those_of_one_process(processes, degree, tmp_path):
    run_processes([sys.executable, Path(__file__).with_name("experts_process.py"), degree, tmp_path], processes)
