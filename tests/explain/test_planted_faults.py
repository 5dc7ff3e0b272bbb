"""Faults that are planted in real runs on a CPU: the first finding names each, and nothing is found in a clean run.

What is found is a matter of time, which other processes take as well, so these are run by hand and on a quiet machine:
`pytest -m long tests/explain/test_planted_faults.py`. `findings/` holds each rule to written traces of known times.
"""

import pytest
import torch

from headway.explain.findings.device import unfused_chains
from headway.explain.findings.evidence import StepEvidence
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers import planted_faults
from helpers.planted_faults import FAULTS, FAULTS_OF_A_RANK, found_in, found_in_ranks

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As a rank of several has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_first_finding_names_the_planted_fault(tmp_path, plant):
    found = found_in(plant, tmp_path)
    assert [one.id for one in found][:1] == [FAULTS[plant]]
    assert 0 < found[0].share < 1
    assert found[0].mfu_from < found[0].mfu_to


@pytest.mark.parametrize("fault", FAULTS_OF_A_RANK)
def test_the_first_finding_names_the_fault_of_a_rank(tmp_path, fault):
    found = found_in_ranks(fault, tmp_path)
    assert [one.id for one in found][:1] == [FAULTS_OF_A_RANK[fault]]
    assert "mostly for rank 1" in found[0].seen


def test_nothing_is_found_in_a_clean_run(tmp_path):
    assert found_in(planted_faults.clean, tmp_path) == ()


@pytest.mark.parametrize(("plant", "modules"), [(planted_faults.clean, None), (planted_faults.written_out_norms, "5 ")])
def test_a_norm_of_one_operator_is_no_chain_of_kernels_and_one_that_is_written_out_is(tmp_path, plant, modules):
    seen = unfused_chains(StepEvidence(explain([read_trace(plant(tmp_path))]).steps))
    assert (seen and seen.message[:2]) == modules
