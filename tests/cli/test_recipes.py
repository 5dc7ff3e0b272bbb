"""Every recipe: what it says, what its dry run says, and that it trains when scaled down."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch

from headway.config import load_config
from headway.count import load_cost_model
from headway.predict.recipe import precision_of
from headway.tracing.build import model_on_shapes, preset_config
from helpers.cases import some
from helpers.processes import ROOT
from helpers.runs import scaled_down

RECIPES = ROOT / "recipes"
# name: model, devices, tokens per pack, processes that share one, as their pages say
PAGES = {
    "qwen2.5-7b-text-81920": ("qwen2.5-7b", 32, 81_920, 1),
    "qwen2.5-vl-7b-image-61440": ("qwen2.5-vl-7b", 32, 61_440, 1),
    "qwen3-vl-8b-image-61440": ("qwen3-vl-8b", 32, 61_440, 1),
    "qwen2.5-vl-7b-video-51200": ("qwen2.5-vl-7b", 32, 51_200, 1),
    "qwen3-vl-8b-video-51200-sp2": ("qwen3-vl-8b", 32, 51_200, 2),
    "qwen3-vl-30b-a3b-text-12288": ("qwen3-vl-30b-a3b", 8, 12_288, 1),
    "qwen3-vl-30b-a3b-vqa-8192": ("qwen3-vl-30b-a3b", 8, 8_192, 1),
    **{
        f"qwen3-vl-30b-a3b-vqa-8192-exp{number}": ("qwen3-vl-30b-a3b", 8, 12_288 if number == 4 else 8_192, 1)
        for number in range(1, 7)
    },
}


EXPERIMENTS = re.compile(r"-exp\d$")  # of a page, which try what the recipe beside them has
SIBLINGS = {name: f"{name}-h200" for name in PAGES if not EXPERIMENTS.search(name)}
OTHERS = ("digits", "digits-dpo", "qwen2.5-vl-7b-dpo-32768")


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*PAGES, *SIBLINGS.values(), *OTHERS}


@pytest.mark.parametrize("name", [*PAGES, *SIBLINGS.values()])
def test_a_recipe_says_of_each_number_whose_it_is(name):
    number = re.compile(r"^ +(?!path|folder)\w+: [^#]*\d[^#]*$|^ +(?!path|folder)\w+: [^#]*\d[^#]*#(?P<comment>.*)$")
    for line in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if match := number.match(line):
            assert re.search(r"\[page\]|\[ours\]|default", match["comment"] or ""), line


@pytest.mark.parametrize("name", [name if number < 2 else pytest.param(name, marks=pytest.mark.long)
                                  for number, name in enumerate(SIBLINGS)])  # fmt: skip
def test_a_recipe_for_h200_is_faster_there_with_as_many_tokens_a_step(name, headway):
    """With cuDNN's attention as without, whose sums take more memory; and no sample more is left out."""
    options = ("--device", "H200", "--devices", 8, "--json")
    for kernel in ("torch", "cudnn"):
        kernel_option = ("--set", f"speed.attention={kernel}")
        both = [RECIPES / f"{stem}.yaml" for stem in (name, SIBLINGS[name])]
        recipe, sibling = json.loads(headway("plan", *both, *options, *kernel_option).out)["plans"]
        assert sibling["fit"] == "fits"
        assert sibling["time"]["mfu"][1] > 1.02 * recipe["time"]["mfu"][1]
        assert sibling["time"]["tokens"] == pytest.approx(recipe["time"]["tokens"], rel=0.02)
        assert sibling["packs"]["overlong"]["dropped"] <= recipe["packs"]["overlong"]["dropped"]


def dry_run(headway, name, *options):
    result = headway("train", RECIPES / f"{name}.yaml", "--dry-run", "--json", *options)
    plan = json.loads(result.out)
    assert result.code == (1 if plan["fits"] is False else 0), result.err
    return plan


@pytest.mark.parametrize("name", PAGES)
def test_a_dry_run_says_what_the_page_set_up(name, headway):
    model, devices, tokens, sequence = PAGES[name]
    plan = dry_run(headway, name)
    assert (plan["model"], plan["devices"], plan["schema_version"]) == (model, devices, 1)
    assert plan["mesh"] == {"replicate": 1, "shard": devices // sequence, "sequence": sequence, "expert": 1}
    assert plan["params"]["total"] == load_cost_model(model).params.total
    memory, packs, flops = plan["memory"], plan["packs"], plan["flops"]
    weights = model_on_shapes(preset_config(model)).parameters()
    slices = (math.ceil(len(one) / devices) * one[0].numel() for one in weights)
    assert memory["weights"] == 4 * sum(slices)  # FSDP2 gives each process as many rows of a tensor as any other
    assert memory["peak"] >= memory["weights"] + memory["optimizer"] + memory["gradients"]
    assert plan["fits"]
    assert packs["most_tokens"] <= tokens
    assert 0 < packs["balance"] <= 1
    # the plan's own yardstick of a step, and the ledger's by component, are counted apart
    assert flops["total"] == pytest.approx(packs["step_flops"], rel=1e-6)
    assert flops["total"] == sum(flops["components"].values())
    assert 0 < flops["recompute"] < flops["forward"]  # all of these recompute their blocks, and never the head


def test_the_recipe_of_preferences_bills_the_second_pass_of_its_head(headway):
    plan = dry_run(headway, "qwen2.5-vl-7b-dpo-32768")
    assert (plan["model"], plan["devices"], plan["fits"]) == ("qwen2.5-vl-7b", 8, True)
    without = dry_run(headway, "qwen2.5-vl-7b-dpo-32768", "--set", "preference=null")
    more = plan["flops"]["recompute"] - without["flops"]["recompute"]
    # forward is a third of the head's useful work
    assert 3 * more == pytest.approx(plan["flops"]["components"]["language.head"], rel=1e-9)
    assert plan["flops"]["total"] == without["flops"]["total"]


def test_the_flops_of_a_text_step_are_six_for_each_parameter_and_twelve_for_each_pair(headway):
    plan = dry_run(headway, "qwen2.5-7b-text-81920")
    tokens = plan["packs"]["fill"] * 81_920 * 32
    hidden, vocabulary, layers = 3584, 152_064, 28
    vectors = layers * (2 * hidden + 3584 + 2 * 512) + hidden  # norms and biases
    matrices = plan["params"]["total"] - hidden * vocabulary - vectors
    attention = plan["flops"]["components"]["language.attention"]
    assert plan["flops"]["total"] - attention == pytest.approx(6 * matrices * tokens, rel=1e-4)
    # pairs of causal attention, n (n + 1) / 2 of each segment, 12 FLOPs for each number of a head's width
    pairs = attention / (12 * hidden * layers)
    assert 800 / 2 < pairs / tokens < 32_768 / 2


@pytest.mark.slow
def test_options_and_settings_change_the_plan(headway):
    name = "qwen3-vl-8b-image-61440"
    plan, fewer = (dry_run(headway, name, "--devices", n, "--device", "H200") for n in (32, 8))
    assert fewer["memory"]["weights"] == pytest.approx(
        4 * plan["memory"]["weights"], rel=1e-3
    )  # but for what fills slices
    assert (fewer["device"]["name"], fewer["device"]["memory_bytes"]) == ("NVIDIA H200", 143_771 * 2**20)
    assert fewer["flops"]["total"] == pytest.approx(plan["flops"]["total"] / 4, rel=0.02)
    none = dry_run(headway, name, "--set", "speed.recompute=none")
    assert none["fits"] is False
    assert none["flops"]["recompute"] == none["memory"]["recomputing"] == 0
    frozen = dry_run(headway, name, "--set", "model.freeze=[vision]")
    assert frozen["params"]["trainable"] < frozen["params"]["total"]
    assert frozen["memory"]["activations"] < plan["memory"]["activations"]
    chosen = dry_run(headway, name, "--set", "speed.recompute=memory:60GiB")
    assert chosen["memory"]["activations"] > plan["memory"]["activations"]
    assert chosen["flops"]["recompute"] < plan["flops"]["recompute"]


def test_the_tables_name_what_does_not_fit(headway):
    result = headway("train", RECIPES / "qwen2.5-7b-text-81920.yaml", "--dry-run", "--set", "speed.recompute=none")
    assert result.code == 1
    text = " ".join(result.out.split())
    assert re.search(
        r"A800-SXM4-80GB's 80\.0 GiB: DOES NOT FIT, [\d.]+ GiB too much by moment: built 907\.9 MiB, first forward",
        text,
    )
    assert "GiB what fits, by the plan" in text
    assert re.search(
        r"speed\.recompute=full,-attention [\d.]+ GiB backward recomputes each block except its attention", text
    )
    assert "parameters 7,615,616,512, 7,615,616,512 of them trained" in text


def test_a_full_fine_tuning_on_one_device_is_told_what_makes_it_fit(headway):
    one = ("--devices", 1, "--device", "H200", "--set", "parallel.reduce_dtype=float32")
    name = "qwen2.5-vl-7b-video-51200"
    plan = dry_run(headway, name, *one)
    room = 0.9 * plan["device"]["memory_bytes"]
    assert plan["fits"] is False
    assert plan["memory"]["peak"] == pytest.approx(148 * 2**30, rel=0.05)  # of a step under fake tensors
    ways = {",".join(way["settings"]) or way["devices"]: way["peak_bytes"] for way in plan["ways"]}
    # those that harm least first
    shorter = "data.tokens_per_pack=6400"
    assert [*ways] == ["optim.state=bfloat16", "run.dtype=bfloat16-params", "model.lora.rank=16", shorter, 2]
    for settings, peak in ways.items():
        changed = ("--devices", 2) if settings == 2 else (*one, "--set", settings)
        found = dry_run(headway, name, "--device", "H200", *changed)
        assert found["memory"]["peak"] <= room
        # packs of two processes are others, so that the largest is; adapters are traced anew where they are set
        is_near = settings in (2, "model.lora.rank=16", shorter)
        assert found["memory"]["peak"] == pytest.approx(peak, rel=0.03 if is_near else 0.0, abs=0)
        assert (found["fits"], found["ways"]) == (True, [])


def test_where_one_setting_is_not_enough_several_are_put_together(headway):
    settings = ("speed.recompute=none", "data.tokens_per_pack=81920", "parallel.reduce_dtype=float32")
    options = [part for setting in settings for part in ("--set", setting)]
    name = "qwen2.5-vl-7b-video-51200"
    (way,) = dry_run(headway, name, "--devices", 1, "--device", "H200", *options)["ways"]
    assert len(way["settings"]) > 1
    more = [part for setting in way["settings"] for part in ("--set", setting)]
    assert (
        dry_run(headway, name, "--devices", 1, "--device", "H200", *options, *more)["memory"]["peak"]
        == (way["peak_bytes"])
    )
    large = RECIPES / "qwen3-vl-30b-a3b-vqa-8192.yaml"  # whose base takes more in 4 bits alone
    words = headway("train", large, "--dry-run", "--devices", 1, "--device", "T4").out.split()
    assert "No setting makes the run fit 13.5 GiB. The smallest one, optim.state=8bit and" in " ".join(words)
    assert "takes 18.8 GiB. Train a smaller model, or on more devices." in " ".join(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", 9, "--set", "parallel.sequence=2"), "does not divide the 9 processes of this run"),
        (("--device", "H2000"), "H2000"),
        (("--set", "model.freeze=[visoin]"), "visoin matches no parameter"),
        (("--set", "parallel.shard=5"), "= 5 processes, but this run has 32 processes"),
        (("--set", "plan.mix=chat"), "no such mix of lengths"),
        (("--resume",), "--dry-run trains nothing"),
        (("--set", "data.tokens_per_pack=8"), "none fits a pack of 8 tokens"),
        (("--devices", 4096, "--set", "data.tokens_per_pack=67108864"), "a dry run plans 50,000,000 at most"),
        (("--devices", 10**9), "1000000000 ranks x"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence(options, message, headway):
    result = headway("train", RECIPES / "qwen2.5-7b-text-81920.yaml", "--dry-run", *options)
    assert result.code in (1, 2)
    assert message in " ".join(result.err.split())


def test_devices_without_a_dry_run_are_refused(headway):
    result = headway("train", RECIPES / "qwen2.5-7b-text-81920.yaml", "--devices", 4)
    assert result.code == 2
    assert "need --dry-run" in " ".join(result.err.split())


def test_a_dry_run_of_a_shipped_model_needs_no_torch():
    code = (
        "import sys; sys.argv = ['headway', 'train', sys.argv[1], '--dry-run', '--json']\n"
        "from headway.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(RECIPES / "qwen3-vl-8b-image-61440.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # what is forked has both
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_model_that_does_not_ship_is_traced(headway, tmp_path):
    from headway.synthetic.digits import write_reader

    write_reader(tmp_path / "model")
    plan = dry_run(headway, "digits", "--set", f"model.path={tmp_path / 'model'}", "--set", "plan.mix=vqa",
                   "--set", "data.tokens_per_pack=4096", "--set", "run.device=cuda")  # fmt: skip
    assert plan["devices"] == 1
    assert plan["memory"]["casts"] > 0
    config = load_config(RECIPES / "digits.yaml")
    assert precision_of(config, 1) == "bfloat16-autocast"


# One of each kind of data and model; the others differ from these in their length or in how processes share them.
KINDS = (
    "qwen2.5-7b-text-81920",
    "qwen3-vl-30b-a3b-vqa-8192-exp1",  # without packing
)
MORE = [pytest.param(name, marks=pytest.mark.long) for name in PAGES if name not in KINDS]


@pytest.mark.parametrize("name", [*some(KINDS, lambda name: name == KINDS[0]), *MORE])
def test_a_recipe_trains_when_scaled_down_and_its_model_generates(name, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from headway.models import load_processor

    summary = scaled_down(RECIPES / f"{name}.yaml", tmp_path / "run")
    assert summary["complete"]
    assert summary["last_loss"] < summary["first_loss"]
    assert (summary["fill"] > 0.85) == (load_config(RECIPES / f"{name}.yaml").data.strategy != "none")
    small = tmp_path / "run" / "small"
    config = json.loads((small / "model" / "config.json").read_text())
    assert config["architectures"] or config["model_type"]
    assert (summary["vision_share"] > 0) == (not name.endswith(("text-81920", "text-12288", "exp4")))
    exported = sorted((small / "run" / "export").iterdir())[-1]
    auto = AutoModelForCausalLM if name.startswith("qwen2.5-7b") else AutoModelForImageTextToText
    model, info = auto.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    opened = load_processor(exported)
    ids = getattr(opened, "tokenizer", opened)("bal ben", return_tensors="pt").input_ids
    with torch.no_grad():
        said = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert said.shape[1] > ids.shape[1]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_share_the_packs_of_the_recipe_that_asks_for_it(tmp_path):
    name = "qwen3-vl-8b-video-51200-sp2"
    one = scaled_down(RECIPES / f"{name}.yaml", tmp_path / "one", "parallel.sequence=1")
    two = scaled_down(RECIPES / f"{name}.yaml", tmp_path / "two", processes=2)
    assert two["first_loss"] == pytest.approx(one["first_loss"], rel=1e-5)
    assert two["last_loss"] == pytest.approx(one["last_loss"], rel=1e-4)
    resolved = (tmp_path / "two/small/run/config.yaml").read_text()
    assert "sequence: 2" in resolved


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-vl-7b-image-61440",
        pytest.param("qwen3-vl-30b-a3b-vqa-8192", marks=pytest.mark.slow),
        pytest.param("qwen3-vl-8b-image-61440", marks=pytest.mark.slow),
    ],
)
def test_a_small_model_keeps_the_structure_of_the_real_one(name):
    from headway.synthetic.small_model import small_config
    from headway.tracing import trace
    from headway.tracing.build import preset_config

    source = preset_config(PAGES[name][0])
    small = small_config(source, 300)
    real, tiny = load_cost_model(PAGES[name][0]), trace(small)
    assert {row.component for row in tiny.rows} == {row.component for row in real.rows}
    kinds = [{row.driver for row in model.rows} for model in (tiny, real)]
    assert kinds[0] == kinds[1]  # causal, windowed and whole-frame attention, merged patches
    text, old = small.get_text_config(), source.get_text_config()
    assert text.num_attention_heads * old.num_key_value_heads == old.num_attention_heads * text.num_key_value_heads
    assert tiny.params.total < real.params.total / 1000
