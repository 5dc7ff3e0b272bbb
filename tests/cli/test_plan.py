"""`headway plan`: what it prints, what follows from what, and what it refuses."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headway.data.encoders import load_processor
from headway.data.media.sizes import MediaSizes
from headway.devices import named_device
from headway.devices.measure import TimeBudget
from headway.devices.model_rates import ModelRates
from headway.predict.speeds import Speeds
from headway.synthetic.digits import write_reader
from helpers.folders import QUESTIONS
from helpers.processes import ROOT

RECIPE = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
MODEL = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 8)
EXPERTS = ("data.tokens_per_pack=16384", "optim.accumulation=5", "speed.compile=true", "parallel.expert=8")


def test_a_model_alone_is_planned_and_what_follows_agrees(headway):
    result = headway(*MODEL, "--tokens", "1e9", "--price", 2, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["schema_version"], found["model"], found["devices"]) == (1, "qwen3-0.6b", 8)
    time, run = found["time"], found["run"]
    for case in range(3):
        assert time["step_s"][case] == pytest.approx(sum(line["seconds"][case] for line in time["lines"]))
        assert time["mfu"][case] == pytest.approx(time["flops"] / time["step_s"][case] / time["peak_flops_per_s"])
        assert time["tokens_per_s"][case] == pytest.approx(time["tokens"] / time["step_s"][case])
        assert run["seconds"][case] == pytest.approx(1e9 / time["tokens_per_s"][case])
        assert run["device_hours"][case] == pytest.approx(8 * run["seconds"][case] / 3600)
        assert run["cost"][case] == pytest.approx(2 * run["device_hours"][case])
        power_w = named_device("H100").board_power_w
        assert run["energy_kwh"][case] == pytest.approx(run["device_hours"][case] * power_w / 1000)
    assert time["step_s"] == sorted(time["step_s"])
    assert time["flops"] == found["flops"]["total"]
    assert time["peak_flops_per_s"] == 8 * named_device("H100").peak_flops_per_s["bf16"]


ONE_CARD = ("--devices", 1, "--device", "H200", "--set", "run.dtype=bfloat16-params")


def test_faster_packs_of_the_same_step_are_named_and_their_settings_can_be_pasted(headway):
    """Whoever pastes the settings gets the plan that was printed; what does not fit the packs stands beside it."""
    plan = json.loads(headway("plan", RECIPE, *ONE_CARD, "--json").out)
    whole, shorter = plan["same_step"]
    step = 81_920
    for other in (whole, shorter):
        assert other["tokens_per_pack"] * other["accumulation"] == pytest.approx(step, rel=0.01)
        pasted = [word for name, value in other["settings"].items() for word in ("--set", f"{name}={value}")]
        again = json.loads(headway("plan", RECIPE, *ONE_CARD, *pasted, "--json").out)
        assert again["time"]["mfu"][1] == pytest.approx(other["mfu"], rel=0.01)
        assert again["memory"]["peak"] == pytest.approx(other["peak_bytes"], rel=0.01)
        assert again["fit"] == "fits"
    assert plan["time"]["mfu"][1] < whole["mfu"] < shorter["mfu"]
    assert (whole["leaves_out"], shorter["leaves_out"]) == (False, True)
    assert 0 == whole["longer_tokens"] < shorter["longer_samples"] < shorter["longer_tokens"] < 0.04
    text = headway("plan", RECIPE, *ONE_CARD).out
    packs, tokens = shorter["accumulation"], shorter["tokens_per_pack"]
    assert f"In {packs} packs of {tokens:,} tokens, the same step reaches MFU {100 * shorter['mfu']:.1f} %" in text
    assert (
        "0.16 % of the samples, with 2.8 % of the tokens, are longer than a pack. Headway assumes the lengths of chats"
        in text
    )
    lines = text[text.index(f"In {packs} packs") :].partition("\n\n")[0].splitlines()
    assert " ".join(lines[1:]).replace("\\ ", "").split() == [
        word for name, value in shorter["settings"].items() for word in ("--set", f"{name}={value}")
    ]


def test_a_recipe_is_planned_for_its_own_devices_within_eighty_columns(headway, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = headway("plan", RECIPE)
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if len(line) > 80] == []
    assert "32 x NVIDIA A800-SXM4-80GB" in result.out
    assert "useful work at peak" in result.out
    assert "Links: printed links of NVIDIA A800-SXM4-80GB" in result.out


def test_fits_says_by_how_much_and_only_what_cannot_run_is_refused(headway, monkeypatch, tmp_path):
    """A tenth is kept free for what the plan does not count; a run without it is tight, and may well work."""
    peak = json.loads(headway(*MODEL, "--json").out)["memory"]["peak"]
    peaks = tmp_path / "peaks.toml"
    monkeypatch.setenv("HEADWAY_PEAKS", str(peaks))
    card = 'title = "Lab Card"\ntflops = { bf16 = 312.0 }\nmemory_gb = 1\nmemory_gb_per_s = 2039'
    dates = 'source = "the lab"\nread_on = 2026-11-29\ndriver_source = "nvidia-smi"\ndriver_read_on = 2026-11-29'
    words = {}
    for share in (0.5, 0.85, 0.95, 1.1):
        peaks.write_text(f"[lab]\n{card}\n{dates}\ndriver_mib = {round(peak / share / 2**20)}\n")
        asked = (*MODEL, "--device", "lab")
        result, found = headway(*asked), json.loads(headway(*asked, "--json").out)
        words[share] = (result.code, found["fits"], found["fit"])
        assert {"fits": ": fits, ", "tight": ": tight, ", "does not fit": ": DOES NOT FIT, "}[
            found["fit"]
        ] in result.out
        assert ("Eager loops of transformers held" in " ".join(result.out.split())) == (share in (0.85, 0.95))
    assert words == {
        0.5: (0, True, "fits"),
        0.85: (0, True, "fits"),
        0.95: (0, True, "tight"),
        1.1: (1, False, "does not fit"),
    }


def test_a_printed_size_is_planned_where_no_driver_is_known_and_the_plan_says_so(headway):
    assert "A30's 22.4 GiB as printed: fits" in " ".join(
        headway(*MODEL[:2], "--device", "A30", "--devices", 8).out.split()
    )
    assert "HBM3's 79.6 GiB: fits" in " ".join(headway(*MODEL).out.split())  # 81,559 MiB; 74.5 GiB are printed


def test_a_device_without_links_exchanges_over_pci_express_and_ethernet(headway, monkeypatch, tmp_path):
    """No exchange is free: what nobody prints is slow, in the best case as in the worst."""
    peaks = tmp_path / "peaks.toml"
    card = 'title = "Lab Card"\ntflops = { bf16 = 312.0 }\nmemory_gb = 80\nmemory_gb_per_s = 2039'
    peaks.write_text(f'[lab]\n{card}\nsource = "the lab\'s own"\nread_on = 2026-11-29\n')
    monkeypatch.setenv("HEADWAY_PEAKS", str(peaks))
    slow = ("--link", 31.5, "--per-node", 8, "--network", 1.5625)
    fast = ("--link", 300, "--per-node", 8, "--network", 25)
    short = ("--set", "data.tokens_per_pack=8192")
    assumed, given, joined = (
        json.loads(headway("plan", RECIPE, "--device", "lab", *links, *short, "--json").out)["time"]["step_s"]
        for links in ((), slow, fast)
    )
    assert assumed == given
    assert all(step_s > 1.2 * other for step_s, other in zip(assumed, joined, strict=True))


def test_devices_of_equal_products_differ_by_no_more_than_their_links(headway, tmp_path):
    """B200 and B300 have the same peak, memory rate and NVLink; the network of a B300 is twice as fast."""
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n" + "4096\n" * 5120)
    asked = ("plan", "gpt-oss-120b", "--devices", 64, "--lengths", file, "--epochs", 1, "--json")
    settings = [part for setting in EXPERTS for part in ("--set", setting)]
    slower, faster, equal = (
        json.loads(headway(*asked, *settings, "--device", *device).out)["time"]["tokens_per_s"]
        for device in (("B200",), ("B300",), ("B300", "--network", 50))
    )
    for rates in zip(slower, faster, equal, strict=True):
        assert rates[0] == pytest.approx(rates[2], rel=0.02)
        assert rates[0] < rates[1] < 2 * rates[0]


def test_a_run_over_given_lengths_lasts_as_many_epochs(headway, tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n" + "\n".join(str(100 + row % 900) for row in range(9000)))
    tokens = sum(100 + row % 900 for row in range(9000))
    asked = (*MODEL, "--lengths", file, "--price", 2, "--json")
    run = json.loads(headway(*asked, "--epochs", 2.5).out)["run"]
    assert run["tokens"] == 2.5 * tokens
    assert run == json.loads(headway(*asked, "--tokens", 2.5 * tokens).out)["run"]


def test_data_are_measured_and_their_making_is_timed(headway, monkeypatch, tmp_path):
    data = tmp_path / "chats.jsonl"
    answers = ["digit " * (1 + row % 7) for row in range(60)]
    rows = [{"prompt": QUESTIONS[row % len(QUESTIONS)], "completion": answers[row]} for row in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    few = ("--device", "H100", "--set", "data.tokens_per_pack=64", "--data", data, "--epochs", 3)
    plan = headway("plan", tmp_path / "model", *few)
    assert plan.code == 0, plan.err
    assert "lengths chats" in " ".join(plan.out.split())
    assert "Data: a worker makes" in plan.out
    found = json.loads(headway("plan", tmp_path / "model", *few, "--json").out)
    index = json.loads(headway("index", data, "--model", tmp_path / "model", "--json").out)
    assert found["run"]["tokens"] == 3 * index["indices"][0]["tokens"]
    monkeypatch.setattr("headway.cli.plan_data.making_s", lambda *_: 1.0)
    slow = json.loads(headway("plan", tmp_path / "model", *few, "--set", "data.workers=2", "--json").out)
    tokens = 64 * slow["packs"]["fill"]
    assert slow["time"]["step_s"] == pytest.approx([tokens / 2] * 3)  # two workers, a second a token


@pytest.fixture
def chats(tmp_path):
    """A recipe without a plan section, over 60 chats that are there."""
    rows = [{"prompt": QUESTIONS[row % len(QUESTIONS)], "completion": "digit " * (1 + row % 7)} for row in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    recipe = tmp_path / "train.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{train: [{{path: {tmp_path / 'chats.jsonl'}}}], tokens_per_pack: 64}}\n"
        f"optim: {{steps: 10, lr: 1e-3}}\nrun: {{folder: {tmp_path / 'run'}}}\n"
    )
    return recipe


@pytest.mark.slow
def test_the_data_of_a_recipe_are_what_is_planned_where_nothing_else_is_named(headway, chats):
    dry = json.loads(headway("train", chats, "--dry-run", "--json").out)
    index = json.loads(headway("index", chats.parent / "chats.jsonl", "--model", chats.parent / "model", "--json").out)
    tokens = index["indices"][0]["tokens"]
    assert dry["packs"]["lengths"] == "data.train: chats"
    on_cuda = ("--set", "run.device=cuda")  # where autocast makes bfloat16 copies, and a processor has none
    assert json.loads(headway("train", chats, "--dry-run", *on_cuda, "--json").out)["memory"]["casts"] > 0
    assert torch.cuda.is_available() or dry["memory"]["casts"] == 0
    device = ("--device", "H100", "--json")
    plan = json.loads(headway("plan", chats, "--epochs", 3, *device).out)
    assert plan["run"]["tokens"] == 3 * tokens
    sizes = json.loads(headway("plan", chats, "--epochs", 3, "--scale", "1,2", *device).out)["sizes"]
    assert [size["run"]["tokens"] for size in sizes] == [3 * tokens] * 2
    assert json.loads(headway("tune", chats, *device).out)["lengths"] == "data.train: chats"


@pytest.mark.slow
def test_every_plan_counts_each_source_by_its_own_bounds_and_policy(headway, tmp_path):
    """As training does: what `headway look` says of the same recipe's sources, and of pictures that are shrunk."""
    model = write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    Image.new("RGB", (300, 200)).save(tmp_path / "a.png")
    question = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]}
    seen = [{"messages": [question, {"role": "assistant", "content": "digit " * n}]} for n in (1, 2, 90, 3)]
    long = [{"prompt": QUESTIONS[0], "completion": "digit " * n} for n in (1, 70, 200, 5)]
    short = [{"Frage": QUESTIONS[1], "completion": "digit " * n} for n in (1, 300)]
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("seen", "long", "short")}
    for name, rows in (("seen", seen), ("long", long), ("short", short)):
        Path(files[name]).write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "train.yaml"
    sources = [
        {"path": files["seen"], "max_pixels": 4000, "overlong": "truncate"},
        {"path": files["long"], "overlong": "split"},
        {"path": files["short"], "overlong": "drop", "columns": {"prompt": "Frage"}, "name": "curt"},
    ]
    data = {"train": sources, "tokens_per_pack": 64, "samples_per_pack": 1, "overlong": "error"}
    recipe.write_text(
        json.dumps(
            {"model": {"path": str(model)}, "data": data, "optim": {"steps": 9, "lr": 1e-3}, "run": {"folder": "r"}}
        )
    )
    looked = json.loads(headway("look", recipe, "--packs", 1, "--json").out)["sources"]
    assert [looked[name]["used"] for name in ("seen", "long", "curt")] == [4, 4, 1]
    assert (looked["seen"]["truncated"], looked["long"]["split"], looked["curt"]["dropped"]) == (1, 2, 1)
    total = {key: sum(source[key] for source in looked.values()) for key in looked["curt"]}
    images = MediaSizes(max_pixels=4000).written_into(load_processor(model)).image_processor
    patches = int(np.prod(images(images=[Image.new("RGB", (300, 200))])["image_grid_thw"]))
    device = ("--device", "H100", "--json")
    named = [argument for path in files.values() for argument in ("--data", path)]
    for asked in (
        ("train", recipe, "--dry-run", "--json"),
        ("plan", recipe, *device),
        ("plan", recipe, *named, *device),
    ):
        planned = headway(*asked)
        assert planned.code == 0, planned.err
        packs = json.loads(planned.out)["packs"]
        assert (packs["overlong"], packs["most_patches"]) == (total, patches)
    refused = headway("plan", recipe, "--data", files["long"], "--set", "data.train.1.overlong=error", *device)
    assert refused.code == 1
    assert "of long has" in refused.err


@pytest.mark.slow
def test_a_dry_run_refuses_the_data_that_training_refuses(headway, chats):
    def planned(*settings):
        result = headway("train", chats, "--dry-run", *(item for setting in settings for item in ("--set", setting)))
        return result.code, " ".join(result.err.split())

    useless = chats.with_name("useless.jsonl")
    useless.write_text('{"messages": 5}\n' * 3)
    missing = "Error: The dataset elsewhere.jsonl cannot be read: No such file or directory."
    for settings, words in {
        ("data.train=elsewhere.jsonl",): missing,
        ("data.train=elsewhere.jsonl", "data.stream={lanes: 2, shuffle: 4}"): missing,
        ("data.eval={path: elsewhere.jsonl}",): missing,
        (f"data.train={useless}",): "Error: No row of useless can be used",
    }.items():
        code, message = planned(*settings)
        assert (code, words in message) == (2 if "elsewhere" in message else 1, True), message
    code, message = planned("data.train=[{path: 's3://bucket/data.jsonl'}]")  # memory alone is planned
    assert (code, "behind a URL" in message) == (0, True)


def test_settings_change_the_plan(headway):
    plain, again = (
        json.loads(headway(*MODEL, "--json", *more).out)["time"] for more in ((), ("--set", "speed.recompute=full"))
    )
    assert plain["flops"] == again["flops"]
    assert plain["step_s"] < again["step_s"]
    assert "recomputation" in {line["key"] for line in again["lines"]} - {line["key"] for line in plain["lines"]}


@pytest.mark.slow
def test_a_plan_for_hopper_says_what_auto_attention_gains_with_cudnns_package(headway):
    long = (*MODEL, "--segments", "32768", "--set", "data.tokens_per_pack=32768", "--json")

    def planned(*more):
        return json.loads(headway(*long, *more).out)

    plan, cudnn = planned(), planned("--set", "speed.attention=cudnn")
    (note,) = (note for note in plan["notes"] if "speed.attention=auto" in note)
    (gain,) = re.findall(r"A step then takes .*?, ([\d.]+) % less", note)
    assert float(gain) == pytest.approx(100 * (1 - cudnn["time"]["step_s"][1] / plan["time"]["step_s"][1]), abs=0.06)
    assert plan["time"] == planned("--set", "speed.attention=torch")["time"]
    assert not any("speed.attention" in note for note in cudnn["notes"])
    short = json.loads(headway(*MODEL, "--segments", "64", "--json").out)
    assert "would gain nothing" in " ".join(short["notes"])
    ampere = json.loads(headway("plan", "qwen3-0.6b", "--device", "A100", "--json").out)
    assert not any("speed.attention" in note for note in ampere["notes"])


def test_this_processor_is_measured_at_the_models_sizes_and_kept(headway, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("headway.devices.model_rates._LENGTHS", {"cpu": (16,)})
    monkeypatch.setattr("headway.predict.block_times._SLOTS", {"cpu": (8, 16)})
    monkeypatch.setattr("headway.predict.block_times._BUDGET", TimeBudget(0.0, 60.0, 1))
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (2**16,)})
    monkeypatch.setattr("headway.predict.step_time.shapes_of", lambda _: [(8, 4, 2), (16, 4, 2)])
    measured = headway("ceiling", "--model", "qwen3-0.6b", "--device", "cpu", "--dtype", "fp32")
    assert measured.code == 0, measured.err
    assert " ".join(measured.out.split()).count("fp32 product 8x4x2") == 1
    assert "first blocks, forward and backward  pack of 16 tokens" in measured.out
    assert "just now" in measured.out
    again = json.loads(headway("ceiling", "--model", "qwen3-0.6b", "--device", "cpu", "--json").out)
    assert (again["schema_version"], again["model"], again["device"]["type"]) == (1, "qwen3-0.6b", "cpu")
    assert [(one["dtype"], one["cached"], one["blocks"]["cached"]) for one in again["rates"]] == [("fp32", True, True)]
    planned = headway("plan", "qwen3-0.6b", "--set", "run.device=cpu", "--json")
    assert planned.code == 0, planned.err
    speeds = json.loads(planned.out)["speeds"]
    assert speeds["measured"]
    assert speeds["source"].startswith("measured at the model's sizes on")


def test_exchanges_of_processes_on_this_machine_are_not_in_a_plan_which_says_so(headway, monkeypatch):
    rates = ModelRates({(100, 10, 10): 1e9}, {100: (2e9, 1e9)}, 5e9, datetime(2026, 11, 23, tzinfo=UTC), False)
    speeds = Speeds.measured("mine", 5e9, rates, runs_ahead=False)
    monkeypatch.setattr("headway.cli.plan.speeds_of", lambda *_: speeds)
    asked = ("plan", "qwen3-0.6b", "--set", "run.device=cpu", "--devices", 2)
    text = headway(*asked)
    assert text.code == 0, text.err
    assert "The step does not contain exchanges between processes of this machine" in " ".join(text.out.split())
    keys = {line["key"] for line in json.loads(headway(*asked, "--json").out)["time"]["lines"]}
    assert "communication.transfer" not in keys


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model.freeze=[language.mlp]", "model.lora={rank: 8}"])
def test_plan_tune_and_a_dry_run_expect_the_same_memory_of_a_model_that_learns_in_part(headway, setting):
    few = ("--set", "data.tokens_per_pack=8192", "--set", setting, "--device", "H200", "--devices", 2, "--json")
    planned = json.loads(headway("plan", RECIPE, *few).out)
    assert planned["memory"] == json.loads(headway("train", RECIPE, "--dry-run", *few).out)["memory"]
    tuned = json.loads(headway("tune", RECIPE, *few).out)
    assert planned["memory"] == tuned["as_it_is"]["memory"]
    assert planned["time"]["step_s"][1] == pytest.approx(tuned["as_it_is"]["step_s"])


def test_a_run_that_does_not_fit_is_told_and_fails(headway):
    result = headway("plan", RECIPE, "--device", "H100", "--devices", 2)
    assert result.code == 1
    assert "DOES NOT FIT, " in result.out
    assert json.loads(headway("plan", RECIPE, "--device", "H100", "--devices", 2, "--json").out)["fits"] is False


def test_a_plan_that_does_not_fit_names_settings_with_which_it_does(headway):
    few = ("plan", "qwen3-vl-8b", "--device", "H100", "--devices", 8)
    told = headway(*few)
    assert told.code == 1
    ways = json.loads(headway(*few, "--json").out)["ways"]
    assert ways
    for way in ways:
        assert " and ".join(way["settings"] or [f"{way['devices']} devices"]) in told.out
        settings = [word for setting in way["settings"] for word in ("--set", setting)]
        again = headway(*few[:-1], way["devices"], *settings)
        assert again.code == 0, again.out


@pytest.mark.slow
def test_one_device_is_told_several_settings_where_none_is_enough_alone(headway):
    lora = ("plan", "qwen3-8b", "--device", "4080", "--set", "model.lora.rank=16")
    ways = json.loads(headway(*lora, "--json").out)["ways"]
    assert (ways[0]["devices"], len(ways[0]["settings"])) == (1, 3)
    assert "model.base=nf4" in ways[0]["settings"]  # adapters are there, and a frozen base in bfloat16 leaves no room
    settings = [word for setting in ways[0]["settings"] for word in ("--set", setting)]
    assert headway(*lora, *settings).code == 0


def test_copies_of_shards_take_the_devices_that_are_left(headway):
    few = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 128, "--set", "parallel.shard=8", "--json")
    mesh = json.loads(headway(*few).out)["mesh"]
    assert (mesh["replicate"], mesh["shard"]) == (16, 8)
    assert "16 copies of 8 shards" in headway(*few[:-1]).out
    assert json.loads(headway(*few[:-1], "--set", "parallel.replicate=16", "--json").out)["mesh"] == mesh


def test_adapters_are_a_way_to_fit_where_they_are(headway):
    few = ("plan", "qwen3-4b", "--device", "H100", "--devices", 1)
    ways = json.loads(headway(*few, "--json").out)["ways"]
    assert ["model.lora.rank=16"] in [way["settings"] for way in ways]


def test_a_base_in_4_bits_is_a_way_to_fit_where_adapters_alone_are_none(headway):
    few = ("plan", "qwen3-8b", "--device", "4090", "--set", "speed.recompute=full")
    ways = json.loads(headway(*few, "--json").out)["ways"]
    assert ["model.lora.rank=16", "model.base=nf4"] in [way["settings"] for way in ways]
    assert "adapters learn, and the model's own weights stay as they are; the frozen weights are rounded to 4 bits" in (
        " ".join(headway(*few).out.split())
    )


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("parallel.tensor=8", "parallel.shard"),
        ("parallel.pipeline=4", "parallel.shard"),
        ("parallel.context=2", "parallel.sequence"),
        ("parallel.cp=2", "no ring"),
    ],
)
def test_parallelism_that_is_not_here_is_refused_with_what_is(headway, setting, instead):
    result = headway("plan", "qwen3-0.6b", "--device", "H100", "--set", setting)
    assert result.code != 0
    assert f"unknown key '{setting.partition('=')[0]}'" in result.err
    assert instead in result.err


PICTURES = ("--segments", 900, "--images", "1024x768px")


def test_samples_that_are_described_stand_for_a_whole_run(headway):
    few = ("plan", "qwen3-vl-2b", "--device", "H100", "--price", "$2", "--json")
    found = json.loads(headway(*few, "--samples", "2M", *PICTURES).out)
    run = found["run"]
    assert run["tokens"] == 2_000_000 * 900
    assert run["steps"] == pytest.approx(run["tokens"] / found["time"]["tokens"])
    # nine samples of 900 tokens in a pack of 8,192, each with 48 x 64 patches: pixels / 16, width 1024 and height 768
    assert (found["packs"]["most_tokens"], found["packs"]["most_patches"]) == (8100, 9 * 48 * 64)
    twice = json.loads(headway(*few, "--samples", "2M", "--epochs", 2, *PICTURES).out)["run"]
    assert twice["cost"] == pytest.approx([2 * cost for cost in run["cost"]])


def test_samples_in_turn_have_their_own_pictures(headway):
    mixed = ("--segments", "900,3000", "--images", "1x32x48,1x64x64")
    found = json.loads(headway("plan", "qwen3-vl-2b", "--device", "H100", "--samples", 1000, *mixed, "--json").out)
    assert found["run"]["tokens"] == 500 * 900 + 500 * 3000
    assert found["packs"]["most_patches"] % 512 == 0


def test_samples_of_a_mix_are_as_long_as_the_mix(headway):
    found = json.loads(headway(*MODEL, "--samples", 1000, "--json").out)
    assert 500 < found["run"]["tokens"] / 1000 < 2000  # chats: a median of 800 tokens, cut at a pack's 8,192
    assert "chats" in found["packs"]["lengths"]


SCALE = ("plan", RECIPE, "--set", "data.tokens_per_pack=8192", "--scale", "8,16")


def test_sizes_are_planned_within_bounds_and_with_their_assumptions(headway):
    result = headway(*SCALE, "--mtbf", 50_000, "--save", 60)
    assert result.code == 0, result.err
    assert "tokens/s that last" in result.out
    assert "one in 50,000 h of each device" in result.out
    assert "stands still 1 min 0 s for a checkpoint" in result.out
    assert "over 16 steps of all ranks" in result.out
    found = json.loads(headway(*SCALE, "--mtbf", 50_000, "--save", 60, "--json").out)
    assert [one["devices"] for one in found["sizes"]] == [8, 16]
    assert found["links"]["devices_per_node"] == 8
    assert all(line in result.out for line in found["assumptions"])
    plain = json.loads(headway(*SCALE, "--json").out)
    assert [one["interruptions"] for one in plain["sizes"]] == [None, None]


def test_sizes_are_compared_by_what_a_run_takes_and_whether_they_fit(headway):
    few = ("plan", "qwen2.5-1.5b", "--device", "H100", "--scale", "8,64", "--tokens", "100B", "--price", 2.5)
    told = headway(*few)
    assert told.code == 0, told.err
    assert "fits" in told.out
    for size in json.loads(headway(*few, "--json").out)["sizes"]:
        run, rates = size["run"], size["time"]["tokens_per_s"]
        assert size["fits"] is True
        assert run["seconds"] == pytest.approx([1e11 / rate for rate in rates])
        assert run["cost"] == pytest.approx([2.5 * size["devices"] * seconds / 3600 for seconds in run["seconds"]])
        assert f"{run['cost'][1]:,.4g}" in told.out


def test_a_size_that_does_not_fit_fails_and_is_told_what_does(headway):
    few = ("plan", "qwen3-vl-8b", "--device", "H100", "--scale", "8,64")
    told = headway(*few)
    assert told.code == 1
    assert "8 devices do not fit as they are" in told.out
    way = json.loads(headway(*few, "--json").out)["sizes"][0]["ways"][0]
    assert way["settings"][0] in told.out
    assert headway(*few, *(word for setting in way["settings"] for word in ("--set", setting))).code == 0


def test_samples_and_epochs_are_the_same_run_at_every_size(headway, tmp_path):
    (tmp_path / "lengths.csv").write_text("tokens\n" + "\n".join(["700", "3000"] * 3))
    asked = ("--scale", "8,16", "--json")
    runs = json.loads(headway("plan", RECIPE, *asked, "--lengths", tmp_path / "lengths.csv", "--epochs", 5).out)
    assert [size["run"]["tokens"] for size in runs["sizes"]] == pytest.approx([5 * 3 * 3700] * 2, rel=0.05)  # drawn
    vision = json.loads(headway("plan", "qwen3-vl-2b", "--device", "H100", *asked, "--samples", 1000, *PICTURES).out)
    assert [size["run"]["tokens"] for size in vision["sizes"]] == [900_000] * 2


def test_failures_make_a_run_longer(headway):
    few = ("plan", RECIPE, "--scale", "64", "--tokens", "1e9", "--json")
    calm, shaken = (json.loads(headway(*few, *mtbf).out)["sizes"][0] for mtbf in ((), ("--mtbf", 5000)))
    goodput = shaken["interruptions"]["goodput"]
    assert goodput < 1
    assert shaken["run"]["seconds"] == pytest.approx([seconds / goodput for seconds in calm["run"]["seconds"]])


def test_links_can_be_given(headway):
    slow, fast = (
        json.loads(headway(*SCALE, "--network", rate, "--json").out)["sizes"][1]["exposed_s"][1] for rate in (1, 100)
    )
    assert slow > fast
    given = headway(*SCALE, "--device", "A40", "--link", 50, "--per-node", 4, "--network", 12.5)
    assert given.code == 0, given.err
    assert "links as given for NVIDIA A40" in given.out


def test_lengths_of_a_file_take_the_place_of_typical_ones(headway, tmp_path):
    (tmp_path / "lengths.csv").write_text("tokens\n" + "\n".join(["700", "3000"] * 3))
    result = headway(*SCALE, "--lengths", tmp_path / "lengths.csv")
    assert result.code == 0, result.err
    assert "lengths.csv" in result.out


def test_many_shards_of_few_rows_are_told(headway):
    recipe = ROOT / "recipes/qwen3-vl-30b-a3b-vqa-8192.yaml"
    result = headway("plan", recipe, "--scale", "256")
    assert result.code == 0, result.err
    assert "256 devices hold and gather 1.9" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scale", "8,many"), "'many' is not a number of devices"),
        (("--scale", "8", "--devices", 8), "--devices 8 is for one size"),
        (("--mtbf", 1000), "--mtbf 1000 cannot take effect without --scale"),
        (("--scale", "8", "--save", 3), "--save 3 cannot take effect without --mtbf"),
        (("--scale", "8", "--mtbf", -3), "--mtbf -3 is no time"),
        (("--scale", "8", "--mtbf", 0), "above 0"),
        (("--set", "plan.device=null", "--link", 50), "so they need --device"),
        (("--devices", 1, "--link", 50), "cannot take effect on one device"),
        (("--set", "plan.mix=null"), "Give --lengths FILE"),
        (("--set", "plan.device=null", "--scale", "8"), "no device is named, and --scale needs one"),
        (("--scale", "8", "--set", "plan.mix=null"), "Give --lengths FILE"),
        (("--scale", "7", "--set", "parallel.shard=4"), "parallel.shard 4"),
    ],
)
def test_sizes_that_cannot_be_planned_are_refused(headway, options, words):
    result = headway("plan", RECIPE, *options)
    assert result.code == 2
    assert words in " ".join(result.err.split())
