"""`headway plan` of a run on preferences: what a reference costs the whole run."""

import json

import pytest

FEW = ("plan", "llama-3.1-8b", "--device", "H100", "--set", "plan.mix=chats")
STORED, NONE = ("--set", "preference.loss=sigmoid"), ("--set", "preference.loss=simpo")
OFF = (*STORED, "--set", "preference.reference=adapters-off", "--set", "model.lora={rank: 16}")


@pytest.mark.parametrize("sizes", [("--devices", 8), ("--scale", "8,16")])
def test_a_stored_reference_costs_one_forward_however_often_the_data_play(headway, sizes):
    whole = (*FEW, *sizes, "--samples", 1000, "--epochs", 3, "--price", 2, "--json")
    with_it, without = (json.loads(headway(*whole, *loss).out) for loss in (STORED, NONE))
    runs = [(plan, plan) for plan in (with_it, without)]
    if "--scale" in sizes:
        runs = [(plan["sizes"][1], plan["sizes"][1]) for plan in (with_it, without)]
    (plan, _), (other, _) = runs
    once = plan["run"]["steps"] / 3
    for case in range(3):
        more = plan["run"]["seconds"][case] - other["run"]["seconds"][case]
        assert more == pytest.approx(once * plan["time"]["reference_s"][case])
        hours = plan["devices"] * plan["run"]["seconds"][case] / 3600
        assert plan["run"]["cost"][case] == pytest.approx(2 * hours)
    assert other["time"]["reference_s"] == [0, 0, 0]


def test_a_list_of_prices_has_it_too(headway, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("H100: 2\n")
    whole = (*FEW, "--devices", 8, "--samples", 1000, "--epochs", 2, "--json")
    for loss in (STORED, NONE):
        offer = json.loads(headway(*whole, *loss, "--price-list", prices).out)
        plan = json.loads(headway(*whole, *loss, "--price", 2).out)
        assert _seconds(offer) == pytest.approx(plan["run"]["seconds"], rel=1e-2)


def _seconds(record):
    """The first place in a record that says the time of a whole run."""
    if isinstance(record, dict):
        if "seconds" in record:
            return record["seconds"]
        record = list(record.values())
    if isinstance(record, list):
        return next((seconds for value in record if (seconds := _seconds(value)) is not None), None)
    return None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (STORED, "reference stored: before the first step a forward of the data, for a step's packs"),
        (OFF, "reference a forward of each step without adapters,"),
    ],
)
def test_the_text_says_what_the_reference_takes(headway, options, said):
    text = headway(*FEW, "--devices", 8, *options).out
    assert said in " ".join(text.split())
