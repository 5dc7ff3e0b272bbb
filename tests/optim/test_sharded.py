"""Optimizers on sharded parameters, in real processes."""

import sys
from pathlib import Path

import pytest

from helpers.processes import run_processes

SCRIPT = Path(__file__).with_name("sharded_optimizer.py")


@pytest.mark.dist
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_muon_on_matrices_cut_in_any_way_is_muon_on_whole_ones(count, tmp_path):
    run_processes([sys.executable, SCRIPT, "muon", tmp_path], count)


@pytest.mark.dist
def test_copies_of_weights_that_are_rounded_by_chance_stay_copies_and_slices_differ(tmp_path):
    run_processes([sys.executable, SCRIPT, "copies", tmp_path], 4)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("held", ["float32", "bfloat16", "8bit"])
def test_a_checkpoint_of_optimizer_and_average_goes_on_with_another_number_of_processes(held, tmp_path):
    run_processes([sys.executable, SCRIPT, "save", tmp_path, held], 2)
    for count in (1, 3):
        run_processes([sys.executable, SCRIPT, "resume", tmp_path, held], count)
