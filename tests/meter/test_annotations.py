"""Cost of a profile: what comes on top of a call is measured, whatever the call takes itself."""

import time

import torch

from headway.meter.annotations import ProfilerCost


def test_what_comes_on_top_of_a_modules_call_is_its_cost():
    cost = ProfilerCost()
    cost.module.register_forward_pre_hook(lambda *_: time.sleep(0.001))
    assert cost.added()["module_ns"] >= 0.9e6  # a sleep never ends early


def test_costs_are_never_below_zero_and_leave_random_numbers_alone():
    state = torch.get_rng_state()
    assert all(ns >= 0 for ns in ProfilerCost().added().values())
    assert torch.equal(torch.get_rng_state(), state)
