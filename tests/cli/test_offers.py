"""`headway plan --price-list`: which devices, how many of them, at what cost, and what is refused."""

import json

import pytest

from headway.devices import named_device
from helpers.processes import ROOT

RECIPE = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
RUN = ("plan", "qwen3-vl-8b", "--samples", "2e6", "--images", "1024x768px", "--tokens-per-sample", "300")
PRICES = "H100: 2\nH200: $3\nA100 80GB SXM: {price: 1.5, most: 8}\n4090: 0.4\nL40S: 0.8\n"  # made up


@pytest.fixture
def prices(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    return file


def planned(headway, *arguments):
    result = headway(*arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_offers_are_ranked_by_cost_and_what_follows_agrees(headway, prices):
    found = planned(headway, *RUN, "--within", "7d", "--price-list", prices)
    runs = found["runs"]
    assert [run["cost"][1] for run in runs] == sorted(run["cost"][1] for run in runs)
    assert found["within_s"] == 7 * 86400
    for run in runs:
        # 2 million samples of 300 tokens of text and 1024 x 768 pixels, which 32 x 32 to a token are 768 tokens
        assert run["tokens"] == pytest.approx(2e6 * (300 + 32 * 24))
        assert run["seconds"][1] <= found["within_s"]
        for seconds, cost, rate in zip(run["seconds"], run["cost"], run["step"]["tokens_per_s"], strict=True):
            assert seconds == pytest.approx(run["tokens"] / rate)
            assert cost == pytest.approx(seconds / 3600 * run["devices"] * run["price"])
        device = named_device(run["device"])
        assert run["memory_bytes"] <= 0.9 * device.total_memory_bytes
        assert not any("lora" in setting for setting in run["settings"])
    by_device = {}
    for run in runs:
        by_device.setdefault(run["device"], []).append(run["devices"])
    assert all(len(counts) <= 2 for counts in by_device.values())
    assert len(by_device) == len(PRICES.splitlines())  # each has links, of which the L40S's are PCI Express
    assert found["others"] == []


def test_a_size_costs_what_a_plan_of_it_alone_says(headway, prices):
    found = planned(headway, *RUN, "--within", "12h", "--price-list", prices, "--device", "H200")
    for run in found["runs"]:
        settings = [part for setting in run["settings"] for part in ("--set", setting)]
        alone = ("--device", "H200", "--scale", run["devices"], "--price", 3, *settings)
        (size,) = planned(headway, *RUN, *alone)["sizes"]
        assert size["run"]["cost"] == pytest.approx(run["cost"])
        assert size["run"]["seconds"] == pytest.approx(run["seconds"])


def test_less_time_takes_more_devices_and_what_is_too_slow_is_told(headway, prices):
    counts = {}
    for within in ("7d", "12h", "1h"):
        found = planned(headway, *RUN, "--within", within, "--price-list", prices)
        counts[within] = {run["device"]: run["devices"] for run in reversed(found["runs"])}
        others = {other["device"]: other for other in found["others"]}
    h100 = named_device("H100").title
    assert counts["7d"][h100] <= counts["12h"][h100] < counts["1h"][h100]
    slow = others[named_device("A100 80GB SXM").title]
    assert "8 of them take" in slow["why"]
    assert "more are not offered" in slow["why"]
    assert slow["fastest"]["devices"] == 8
    assert slow["fastest"]["seconds"][1] > 3600


FEWEST = [
    # model, device, time, settings and the fewest devices, all for 10^12 tokens
    ("llama-3.1-70b", "B200", 30, (), 256),
    ("llama-3.1-70b", "B200", 60, (), 128),
    ("llama-3.1-70b", "MI300X", 30, (), 512),
    ("llama-3.1-70b", "H100", 60, (), 256),
    ("qwen3-32b", "H100", 60, (), 128),
    ("llama-3.1-8b", "H100", 60, (), 32),
    ("qwen3-8b", "H100", 60, (), 32),
    ("qwen3-30b-a3b", "H200", 60, ("parallel.expert=8",), 32),
    ("qwen3-0.6b", "4090", 100, ("data.tokens_per_pack=2048",), 32),
]


@pytest.mark.parametrize(("model", "device", "days", "settings", "fewest"), FEWEST)
def test_no_smaller_number_of_devices_fits_and_is_in_time(headway, model, device, days, settings, fewest):
    """The witness is a plan of each smaller number, which finds nothing by proportion."""
    changed = ("data.tokens_per_pack=8192", "speed.recompute=full", *settings)
    run = ("plan", model, "--tokens", "1e12", "--device", device, *(part for one in changed for part in ("--set", one)))
    found = min(run["devices"] for run in planned(headway, *run, "--within", f"{days}d", "--price", 5)["runs"])
    in_time = []
    for power in range(found.bit_length()):
        alone = headway(*run, "--devices", 1 << power, "--json")
        size = json.loads(alone.out) if alone.code != 2 else {"fits": False}  # a mesh that the devices do not fit
        if size["fits"] and 1e12 / size["time"]["tokens_per_s"][1] <= 86400 * days:
            in_time.append(1 << power)
    assert in_time == [found]
    assert found == fewest


def test_what_cannot_be_planned_is_not_called_late(headway, tmp_path):
    (tmp_path / "prices.yaml").write_text(
        "- {device: H200, price: 3}\n- {device: H100, price: 2, most: 4, offer: few}\n"
        "- {device: A100, price: 1, most: 16, offer: slow}\n"
    )
    run = ("plan", "qwen3-30b-a3b", "--tokens", "1e10", "--within", "36h", "--price-list", tmp_path / "prices.yaml")
    result = headway(*run, "--set", "parallel.expert=8")
    late, _, others = result.out.partition("Not in time\n")[2].partition("\n\n")
    heading, reason = others.splitlines()[:2]
    assert late.startswith("NVIDIA A100-SXM4-80GB (slow): 16 of them take ")
    assert heading == "Cannot be planned, or does not fit"
    assert "few): 4 of them: parallel.expert 8 does not divide the 4 processes" in reason


def test_the_table_is_for_people(headway, prices):
    result = headway(*RUN, "--within", "12h", "--price-list", prices)
    assert result.code == 0, result.err
    assert "train on  2,136,000,000 tokens" in result.out
    assert "settings that make it fit" in result.out
    assert "Not in time\nNVIDIA A100-SXM4-80GB: " in result.out


def test_a_device_and_a_price_are_a_list_of_one(headway):
    found = planned(headway, *RUN, "--within", "12h", "--device", "H100", "--price", 2)
    assert {run["device"] for run in found["runs"]} == {named_device("H100").title}
    fixed = planned(headway, *RUN, "--within", "12h", "--device", "H100", "--price", 2, "--devices", 12)
    assert [run["devices"] for run in fixed["runs"]] == [12]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prices.json", '{"H100": 2, "4090": "$0.4"}'),
        ("prices.json", '[{"device": "H100", "price": 2}, {"device": "4090", "price": 0.4, "most": 16}]'),
        ("prices.csv", "device,price\nH100,2\n4090,0.4\n"),
        ("prices.csv", "device,price,most,offer\nH100,2,,\n4090,$0.40,16,a cellar\n"),
        ("prices.yml", "- {device: H100, price: 2}\n- {device: 4090, price: 0.4}\n"),
    ],
)
def test_a_price_list_has_several_forms(headway, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = planned(headway, "plan", "qwen3-0.6b", "--tokens", "1e9", "--price-list", tmp_path / name)
    prices = {run["device"]: run["price"] for run in found["runs"]}
    assert prices == {named_device("H100").title: 2, named_device("4090").title: 0.4}


WRONG_LISTS = {
    "H10x: 2": "entry 1: The peak of 'H10x' is not known",
    "H100:": "entry 1: H100 has no price. Write the price of one device for an hour, 2.5 or $2.5",
    "H100: cheap": 'H100 has "cheap" as its price',
    "H100: 0": "H100 has 0 as its price",
    "H100: -2": "H100 has -2 as its price",
    "H100: {price: 2, most: 1.5}": "H100 has 1.5 as the most devices",
    "H100: {price: 2, per: hour}": "has 'per', which means nothing there. Known are device, price, most, offer",
    "- {price: 2}": "entry 1 names no device",
    "[]": "holds no price",
    "2.5": "holds no price",
    "{H100: 2": "cannot be read",
    "H100: 2\nH100: 3": "cannot be read",
}


@pytest.mark.parametrize("text", WRONG_LISTS)
def test_a_wrong_price_list_is_told_in_one_paragraph(headway, tmp_path, text):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    result = headway(*RUN, "--price-list", file)
    assert (result.code, result.out) == (2, "")
    said = " ".join(result.err.split())
    assert said.startswith("Error: ")
    assert WRONG_LISTS[text] in said
    assert str(file) in said


WRONG = {
    "no such file": (("--price-list", "gone.yaml"), "the price list gone.yaml cannot be read: No such file"),
    "no time": (("--within", "0d"), "--within 0 is no time"),
    "no unit of time": (("--within", "7x"), "--within '7x' is not a number. Write"),
    "no prices": (("--within", "7d"), "--within needs prices: give --price-list FILE, or --device and --price"),
    "two prices": (("--price", 2), "both set the price of devices"),
    "no such device in the list": (("--device", "B200"), "the price list has no price for NVIDIA B200"),
    "a link of all": (("--link", 50), "--link 50.0 cannot take effect beside --price-list or --within"),
    "sizes twice": (("--scale", "8,16"), "--scale 8,16 cannot take effect"),
    "lengths twice": (("--segments", "900"), "--segments 900 and --tokens-per-sample 300 both set"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_contradict_each_other_are_refused(headway, prices, case):
    options, message = WRONG[case]
    listed = () if case in ("no prices", "no such file") else ("--price-list", prices)
    result = headway(*RUN, *listed, *options)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.split())


def test_a_time_too_short_for_any_names_the_fastest(headway, prices):
    result = headway(*RUN, "--within", "30s", "--price-list", prices)
    assert result.code == 2
    said = " ".join(result.err.split())
    assert "no offer trains 2,136,000,000 tokens within 30.00 s. The fastest is 1,024 x NVIDIA H200" in said


def test_a_model_that_fits_nowhere_says_why_of_each(headway, tmp_path):
    (tmp_path / "prices.yaml").write_text("4090: {price: 0.4, most: 1}\nL40S: {price: 0.8, most: 1}\n")
    result = headway("plan", "qwen3-8b", "--tokens", "1e9", "--price-list", tmp_path / "prices.yaml")
    assert result.code == 2
    said = " ".join(result.err.split())
    assert "no offer can train it: NVIDIA GeForce RTX 4090: 158.0 GiB do not fit 21.6 GiB, but adapters would" in said


def test_a_run_without_an_end_is_refused(headway, prices):
    result = headway("plan", "qwen3-0.6b", "--price-list", prices)
    assert result.code == 2
    assert (
        "--price-list and --within are for a whole run; give its --samples, --tokens or --epochs"
        in result.err.replace("\n", " ")
    )


def test_text_beside_pictures_is_what_segments_would_say(headway):
    options = ("--device", "H100", "--devices", 8, "--set", "speed.recompute=full")
    described = planned(headway, *RUN, *options)
    by_hand = planned(
        headway, "plan", "qwen3-vl-8b", "--samples", "2e6", "--segments", "1068", "--images", "1x48x64", *options
    )
    assert described["run"] == by_hand["run"]


def test_a_recipe_is_planned_on_other_devices_than_its_own(headway, prices):
    """Its plan section has lengths and devices; a list is not bounded by them."""
    found = planned(headway, "plan", RECIPE, "--tokens", "1e9", "--price-list", prices)
    assert named_device("H200").title in {run["device"] for run in found["runs"]}
    assert all(run["tokens"] == 1e9 for run in found["runs"])


def test_more_devices_than_there_are_is_told_of_each_offer(headway, prices):
    found = planned(headway, "plan", "qwen3-0.6b", "--tokens", "1e9", "--price-list", prices, "--devices", 16)
    assert {run["devices"] for run in found["runs"]} == {16}
    why = {other["device"]: other["why"] for other in found["others"]}
    assert why[named_device("A100 80GB SXM").title].startswith("16 are more than are offered")
