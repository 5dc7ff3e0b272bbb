"""Five packs of BAGEL-7B-MoT: the ledger against formulas written out by hand, and what two other rules print.

Tokens: an image of 1,024 x 1,024 pixels that is drawn has 64 x 64 latent patches, one of 512 x 512 has 32 x 32, each
between two tokens; each pack is filled up to 11,520 slots, as Bagel's trainer is configured.
"""

import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from headway.conventions import Step, architecture, get_convention, tool_peak
from headway.count import Workload, load_cost_model
from headway.count.models import presets

HIDDEN, LAYERS, HEADS, GROUPS, HEAD, MLP, VOCAB = 3584, 28, 28, 4, 128, 18944, 152064
TOWER, TOWER_LAYERS, TOWER_MLP = 1152, 26, 4304
SLOTS = 11520


def record(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


def text(tokens):
    return ("causal", tokens)


def drawn(side):
    return ("noise", side * side + 2)


def read(side):
    return ("full", side * side + 2)


PACKS = {
    "two pictures and a question": Workload(
        splits=[[text(100), drawn(64)], [text(100), drawn(32)], [read(70), text(300)]],
        images=[(1, 70, 70)], latents=[(1, 64, 64), (1, 32, 32)], supervised=250, slots=SLOTS,
    ),
    "nine pictures of 512 pixels": Workload(
        splits=[[text(100), drawn(32)]] * 9, latents=[(1, 32, 32)] * 9, supervised=0, slots=SLOTS
    ),
    "two pictures of 1,024 pixels": Workload(
        splits=[[text(100), drawn(64)]] * 2, latents=[(1, 64, 64)] * 2, supervised=0, slots=SLOTS
    ),
    "eight questions": Workload(
        splits=[[read(32), text(250)]] * 8, images=[(1, 32, 32)] * 8, supervised=1600, slots=SLOTS
    ),
    "three edits": Workload(
        splits=[[read(32), read(37), text(52), drawn(32)]] * 3,
        images=[(1, 37, 37)] * 3, references=[(1, 32, 32)] * 3, latents=[(1, 32, 32)] * 3, supervised=0, slots=SLOTS,
    ),
}  # fmt: skip
# total in PFLOP, and what Bagel's trainer and LMMs-Engine count as shares of it, computed before and apart from this
# product, by formulas that leave out the autoencoder's passes over images that are only referred to
PRINTED = {
    "two pictures and a question": (0.493, 1.09, 1.25),
    "nine pictures of 512 pixels": (0.420, 1.14, 1.40),
    "two pictures of 1,024 pixels": (0.380, 1.15, 1.23),
    "eight questions": (0.442, 1.10, 1.34),
    "three edits": (0.453, 1.15, 1.34),
}


def pairs_of(segment):
    """Query-key pairs of one segment, run by run."""
    pairs = visible = 0
    for mode, tokens in segment:
        pairs += tokens * visible + (tokens * (tokens + 1) // 2 if mode == "causal" else tokens**2)
        visible += tokens * (mode != "noise")
    return pairs


def autoencoder(pixels):
    """FLOPs of FLUX's encoder on a square image: convolutions of 3 x 3 by level, two residual blocks in each."""

    def convolution(side, inputs, outputs, kernel=3):
        return 2 * side**2 * kernel**2 * inputs * outputs

    def residual(side, inputs, outputs):
        shortcut = 0 if inputs == outputs else convolution(side, inputs, outputs, 1)
        return convolution(side, inputs, outputs) + convolution(side, outputs, outputs) + shortcut

    widths, side = (128, 256, 512, 512), pixels
    flops, before = convolution(side, 3, widths[0]), widths[0]
    for level, width in enumerate(widths):
        flops += residual(side, before, width) + residual(side, width, width)
        before = width
        if level < 3:
            side //= 2
            flops += convolution(side, width, width)
    middle = 2 * residual(side, 512, 512) + 4 * 2 * side**2 * 512 * 512 + 4 * side**4 * 512
    return flops + middle + convolution(side, 512, 32)


def by_hand(workload, segments):
    """FLOPs of a step by component, from the sizes alone."""
    copy = HIDDEN * (2 * HEADS + 2 * GROUPS) * HEAD + 3 * HIDDEN * MLP
    patches = [h * w for _, h, w in workload.images.tolist()]
    drawn = [h * w for _, h, w in workload.latents.tolist()]
    grids = [*drawn, *(h * w for _, h, w in workload.references.tolist())]
    block = 4 * TOWER**2 + 2 * TOWER * TOWER_MLP
    embedding, connector = 3 * 14 * 14 * TOWER, TOWER * HIDDEN + HIDDEN**2
    trained = 6 * sum(patches) * (TOWER_LAYERS * block + embedding + connector)
    trained += 12 * TOWER_LAYERS * TOWER * sum(n * n for n in patches)
    trained -= 2 * sum(patches) * embedding  # pixels want no gradient
    times = 6 * len(grids) * (256 * HIDDEN + HIDDEN**2) - 2 * len(grids) * 256 * HIDDEN
    return {
        "blocks": 6 * workload.tokens * LAYERS * copy,
        "attention": 12 * LAYERS * HEADS * HEAD * sum(map(pairs_of, segments)),
        "head": 6 * workload.supervised * HIDDEN * VOCAB,
        "tower": trained,
        "latents": 4 * sum(grids) * 64 * HIDDEN + 6 * sum(drawn) * 64 * HIDDEN + times,
        "autoencoder": sum(autoencoder(16 * round(n**0.5)) for n in grids),
    }


SEGMENTS = {
    "two pictures and a question": [[text(100), drawn(64)], [text(100), drawn(32)], [read(70), text(300)]],
    "nine pictures of 512 pixels": [[text(100), drawn(32)]] * 9,
    "two pictures of 1,024 pixels": [[text(100), drawn(64)]] * 2,
    "eight questions": [[read(32), text(250)]] * 8,
    "three edits": [[read(32), read(37), text(52), drawn(32)]] * 3,
}


@pytest.fixture(scope="module")
def cost():
    return load_cost_model("bagel-7b-mot")


OF_COMPONENT = {
    "language.projections": "blocks", "language.mlp": "blocks", "language.attention": "attention",
    "language.head": "head", "vision": "tower",
}  # fmt: skip


def part(row):
    """Which line of the formulas a row belongs to."""
    if row.module.startswith("vae_model"):
        return "autoencoder"
    return OF_COMPONENT.get(row.component, OF_COMPONENT.get(row.component.split(".")[0], "latents"))


@pytest.mark.parametrize("name", PACKS)
def test_every_component_is_the_formula_to_the_flop(cost, name):
    workload, parts, found = PACKS[name], {row.module: part(row) for row in cost.rows}, Counter()
    for row in cost.count(workload, by="layer").rows:
        found[parts[row.name]] += row.total
    assert found == Counter(by_hand(workload, SEGMENTS[name]))


@pytest.mark.parametrize("name", PACKS)
def test_the_total_and_the_ratios_are_those_computed_apart(cost, name):
    workload, (total, bagel, lmms_engine) = PACKS[name], PRINTED[name]
    referred = sum(autoencoder(16 * h) for _, h, _ in workload.references.tolist())
    truth = cost.count(workload).total
    assert (truth - referred) / 1e15 == pytest.approx(total, abs=0.001)
    model = architecture(presets()["bagel-7b-mot"], "bagel-7b-mot", cost)
    for convention, ratio in (("bagel", bagel), ("lmms-engine", lmms_engine)):
        said = get_convention(convention).bill(model, Step(workload, SLOTS)).flops
        assert said / (truth - referred) == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize("name", PACKS)
def test_padding_runs_through_the_copy_for_text(cost, name):
    model = architecture(presets()["bagel-7b-mot"], "bagel-7b-mot", cost)
    said = [get_convention(one).bill(model, Step(PACKS[name], SLOTS)).flops for one in ("useful", "hardware")]
    copy = HIDDEN * (2 * HEADS + 2 * GROUPS) * HEAD + 3 * HIDDEN * MLP
    assert said[1] - said[0] == 6 * (SLOTS - PACKS[name].tokens) * LAYERS * copy


def test_its_trainer_knows_no_other_model():
    model = architecture(presets()["qwen2.5-7b"], "qwen2.5-7b", load_cost_model("qwen2.5-7b"))
    assert "Bagel's trainer does not list" in get_convention("bagel").bill(model, Step(Workload([8]), 8)).reason


BAGEL = ["--splits", "causal:102,noise:1026;full:1026,causal:52", "--images", "1x32x32", "--latents", "32x32"]


def test_splits_images_and_latents_are_counted(headway):
    data = record(headway("flops", "bagel-7b-mot", *BAGEL, "--supervised", 20, "--json"))
    found = {key: data["workload"][key] for key in ("segments", "tokens", "splits", "noised_patches", "supervised")}
    assert found == {
        "segments": 2,
        "tokens": 2206,
        "splits": {"causal": 154, "full": 1026, "noise": 1026},
        "noised_patches": 1024,
        "supervised": 20,
    }
    head = next(row for row in data["components"] if row["name"] == "language.head")
    assert head["total"] == 6 * 20 * 3584 * 152064
    pairs = 102 * 103 // 2 + 1026 * 102 + 1026**2 + 1026**2 + 52 * 1026 + 52 * 53 // 2
    attention = next(row for row in data["components"] if row["name"] == "language.attention")
    assert attention["total"] == 12 * 28 * 3584 * pairs


def test_every_command_that_takes_a_workload_takes_splits(headway):
    compared = headway("compare", "bagel-7b-mot", *BAGEL, "--device", "H100", "--step-time", 1, "--json")
    assert record(compared)["workload"]["noised_patches"] == 1024
    planned = headway("mfu", "bagel-7b-mot", *BAGEL, "--device", "H100", "--chips", 8, "--mfu", 0.2, "--json")
    assert record(planned)["tokens_per_step"] == 2206


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bagel-7b-mot", "--splits", "causal:5,noise:3", "--latents", "2x2"],
            "noise runs hold 3 tokens, and 4 latent",
        ),
        (["bagel-7b-mot", "--splits", "causal:5,noise:9", "--references", "2x2"], "full runs hold 0 tokens, and 4"),
        (["bagel-7b-mot", "--segments", 30, "--latents", "2x2"], "need --splits"),
        (["bagel-7b-mot", "--splits", "causal:8", "--supervised", 9], "0 to the 8 tokens"),
        (["bagel-7b-mot", "--splits", "full:10", "--images", "1x4x4"], "hold 16 patches, each a token of a full run"),
        (["bagel-7b-mot", "--splits", "noise:8", "--latents", "3x3"], "cannot hold 9 latent patches"),
        (["bagel-7b-mot", "--latents", "3x3"], "--segments is missing"),
    ],
)
def test_splits_that_cannot_take_effect_are_refused(headway, arguments, message):
    result = headway("flops", *arguments)
    assert result.code != 0
    assert message in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("pack", "ratio"),  # of its rule to the truth, by formulas apart from this code: shared figures of Bagel's packs
    [
        (["--splits", ";".join(["causal:102,noise:1026"] * 9), "--latents", "32x32*9", "--supervised", 0], 1.40),
        (["--splits", ";".join(["causal:102,noise:4098"] * 2), "--latents", "64x64*2", "--supervised", 0], 1.23),
    ],
)
def test_lmms_engine_on_packs_that_draw(headway, tmp_path, pack, ratio):
    text = "".join(f"step:{step} - train/loss:1.1 - train/mfu:0.27\n" for step in range(3))
    (tmp_path / "train.log").write_text(text)
    options = ("--model", "bagel-7b-mot", "--seq-len", 10240, "--device", "H100", *pack, "--json")
    data = record(headway("audit", tmp_path / "train.log", *options))
    assert data["useful_mfu_mean"] == pytest.approx(0.27 / ratio, rel=0.006)


def test_the_page_shows_what_the_command_prints(headway):
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    command, *shown = re.search(r"```console\n\$ headway (.*?)```", page, re.S)[1].splitlines()
    printed = headway(*shlex.split(command)).out.splitlines()
    assert [line for line in shown if line != "..." and line not in printed] == []


def test_sizes_are_those_published_and_those_of_the_page():
    """Qwen2.5-7B twice, SigLIP so400m and FLUX's autoencoder; 7.61 active without what is no text's."""
    model = load_cost_model("bagel-7b-mot")
    assert model.params.total / 1e9 == pytest.approx(14.65, rel=0.012)
    assert (model.params.active - (8_133_209_219 - 7_615_623_680)) / 1e9 == pytest.approx(7.61, rel=0.025)
    step = model.count(Workload([4096]))
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    cells = re.search(r"\| `bagel-7b-mot` \|(.*)", page)[1].split("|")
    found = (model.params.total, model.params.active, step.forward / 4096, step.total / 4096)
    assert [cells[place].strip() for place in (1, 3, 4, 5)] == [
        f"{value / 1e9:,.{digits}f}" for value, digits in zip(found, (3, 3, 2, 2), strict=True)
    ]


@pytest.mark.slow
def test_a_fresh_trace_gives_the_shipped_ledger():
    from tools.shipped_models import trace_preset

    fresh, shipped = trace_preset("bagel-7b-mot"), load_cost_model("bagel-7b-mot")
    assert (fresh.rows, fresh.parameters) == (shipped.rows, shipped.parameters)


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA GeForce RTX 3070 Ti", 21.75e12), ("NVIDIA B200", math.inf)])
def test_its_trainer_has_its_own_peaks(device, peak):
    assert tool_peak("bagel", device).flops_per_s == peak
