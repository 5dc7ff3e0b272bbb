"""No setting of training is free in a plan: each moves time or memory, or stands here with the reason why not."""

import functools

import pytest

from headway.cli.plan import named_recipe, speeds_of
from headway.config import TrainConfig
from headway.config.tree import walk
from headway.count import Workload
from headway.count.activations import shipped_activations
from headway.devices import named_device
from headway.errors import PlanError
from headway.packing.mesh import MeshShape
from headway.predict.communication import Links
from headway.predict.engine import float8_of
from headway.predict.exchanges import exchanges_of
from headway.predict.memory import plan_memory
from headway.predict.predictor import Predictor
from headway.predict.recipe import Sharing, State, with_copies

BASE = ("plan.mix=chats", "data.tokens_per_pack=8192", "optim.accumulation=2")
DENSE, EXPERTS = "llama-3.1-8b", "qwen3-30b-a3b"
TIME, MEMORY, BOTH = frozenset({"time"}), frozenset({"memory"}), frozenset({"time", "memory"})

MOVES = [
    # what is set, what it moves, and the settings beside which it does
    ("data.tokens_per_pack=4096", BOTH, ()),
    ("run.dtype=float32", BOTH, ()),
    ("run.dtype=bfloat16-params", BOTH, ()),
    ("run.dtype=float8", TIME, ()),
    ("speed.compile=false", BOTH, ("speed.kernels=torch",)),
    ("speed.recompute=full", BOTH, ()),
    ("speed.recompute=full,-projections", BOTH, ("speed.recompute=full",)),
    ("speed.recompute=full,-mlp", BOTH, ("speed.recompute=full",)),
    ("speed.recompute=full,-attention", BOTH, ("speed.recompute=full",)),
    ("speed.recompute=memory:20GiB", BOTH, ()),
    ("speed.offload=inputs", BOTH, ("speed.recompute=full",)),
    ("speed.kernels=liger", BOTH, ("speed.compile=false",)),
    ("speed.attention=fa3", TIME, ()),
    ("speed.attention=cudnn", BOTH, ("speed.recompute=full,-attention", "data.tokens_per_pack=32768")),
    ("speed.loss_chunk=null", MEMORY, ()),
    ("model.base=nf4", BOTH, ("model.lora.rank=16",)),
    ("model.base=int8", BOTH, ("model.lora.rank=16",)),
    ("optim.name=muon", BOTH, ()),
    ("optim.state=bfloat16", BOTH, ()),
    ("optim.state=8bit", BOTH, ()),
    ("optim.clip=null", TIME, ()),
    ("optim.ema.decay=0.999", BOTH, ()),
    ("optim.ema.every=10", TIME, ("optim.ema.decay=0.999",)),
    ("optim.accumulation=1", BOTH, ()),
    ("parallel.replicate=2", BOTH, ()),
    ("parallel.shard=4", BOTH, ()),
    ("parallel.sequence=2", BOTH, ()),
    ("parallel.expert=8", TIME, ()),
    ("parallel.reshard=false", MEMORY, ()),
    ("parallel.reduce=step", BOTH, ("plan.devices=16",)),
    ("parallel.reduce_dtype=bfloat16", TIME, ()),
    ("parallel.offload=true", BOTH, ()),
]

KINDS = {"text", "number", "null", "mapping", "section"}
"""Words for values that are no choice among few."""

SAME = {
    # values of a setting that plan as its default does, and why
    "run.dtype=bfloat16-autocast": "it is what auto is on CUDA",
    "speed.compile=true": "it is what auto is on CUDA",
    "speed.kernels=torch": "blocks compile on CUDA, and compiled ones save and move what Liger's kernels do",
    "speed.attention=torch": "it is what auto is planned as, since every machine has it",
    "speed.attention=flash-attn": "a package's FlashAttention-2, which is PyTorch's kernel",
    "optim.state=float32": "it is what auto is for weights in float32",
}

FREE = {
    "speed.recompiles": "says what a recompilation is called, not what is computed",
    "optim.steps": "the length of the run, of which a step knows nothing",
    "optim.epochs": "as optim.steps",
    "optim.lr": "a factor of the update",
    "optim.lr_of": "factors of the update",
    "optim.betas": "factors of the update",
    "optim.eps": "a term of the update",
    "optim.weight_decay": "a factor of weights that are read and written anyway",
    "optim.muon.momentum": "a factor of the update",
    "optim.muon.scale": "a factor of the update",
    "optim.muon.lr": "a factor of the update",
    "optim.warmup_steps": "changes factors of the update alone",
    "optim.schedule": "changes factors of the update alone",
    "optim.min_lr_ratio": "changes factors of the update alone",
    "optim.decay_share": "changes factors of the update alone",
    "optim.on_nonfinite": "gradients are checked by their norm, which every step reads",
    "optim.ema.warmup": "changes a factor of the average",
}


def names_of_config():
    """Settings of the sections in question, by their dotted names, with their annotations."""
    sections = ("speed.", "optim.", "parallel.")
    chosen = (*sections, "run.dtype", "data.tokens_per_pack", "model.base")
    settings = [setting for setting in walk(TrainConfig) if setting.name.startswith(chosen)]
    return {setting.name: setting for setting in settings}


@functools.cache
def planned(settings, model=DENSE):
    """Time of a step [s] and memory of a device [bytes] on H100."""
    cost_model, config = named_recipe(model, (*BASE, *settings))
    device, count = named_device("H100"), config.plan.devices or 8
    config = with_copies(config, count)
    speeds, links = speeds_of(config, cost_model, device, count), Links.of_device(device)
    run = Predictor.of(config, cost_model, device=device, speeds=speeds, links=links).at(config, count)
    return run.step_s / run.step.tokens, run.memory.peak


def test_every_setting_of_training_is_here():
    changed = {setting.partition("=")[0] for setting, _, _ in MOVES}
    sections = {"optim.muon", "optim.ema"}  # whose settings have rows
    assert names_of_config().keys() - sections == changed | FREE.keys()
    assert not changed & FREE.keys()


def test_every_value_of_a_choice_is_here():
    rows = {setting for setting, _, _ in MOVES} | SAME.keys()
    for name, setting in names_of_config().items():
        if name in FREE:
            continue
        choices = {value for value in setting.values.split(" | ") if " " not in value} - KINDS
        assert {f"{name}={value}" for value in choices - {setting.default}} <= rows


@pytest.mark.parametrize(("setting", "moves", "beside"), MOVES, ids=[setting for setting, _, _ in MOVES])
def test_a_setting_moves_what_it_says(setting, moves, beside):
    model = EXPERTS if "expert" in setting else DENSE
    before, after = planned(beside, model), planned((*beside, setting), model)
    differs = {name for name, a, b in zip(("time", "memory"), before, after, strict=True) if abs(b / a - 1) > 1e-4}
    assert moves <= differs


@pytest.mark.parametrize("setting", SAME)
def test_a_value_that_is_the_default_plans_as_it(setting):
    assert planned((setting,)) == planned(())


@pytest.mark.parametrize(
    ("setting", "slower"),
    [
        ("run.dtype=float8", False),
        ("speed.attention=fa3", False),
        ("speed.attention=cudnn", False),
        ("parallel.offload=true", True),
        ("optim.name=muon", True),
    ],
)
def test_a_setting_moves_time_the_right_way(setting, slower):
    assert (planned((setting,))[0] > planned(())[0]) == slower


@pytest.mark.parametrize(("shards", "offload", "number_bytes"), [(8, False, 1), (8, True, 2), (1, False, 2)])
def test_weights_of_converted_layers_are_gathered_in_float8(shards, offload, number_bytes):
    """Of Llama-3.1-8B all matrices of the 32 blocks: 4096 x (4096, 1024, 1024, 4096) and 3 x 4096 x 14336."""
    cost_model, _ = named_recipe(DENSE, BASE)
    saved = shipped_activations(DENSE, "bfloat16")
    matrices, norms = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2 * 4096
    sharing = Sharing(shards=shards, gathers=True, offload=offload, reshard=False)
    shape = MeshShape.of(8, replicate=8 // shards)
    exchanges = exchanges_of(cost_model, saved, Workload([8192]), State(float8=float8_of("headway")), sharing, shape)
    gathered = [x.num_bytes for x in exchanges.all if x.unit == "model.layers.1" and x.kind == "all-gather"]
    assert gathered == [number_bytes * matrices + 2 * norms] * (shards > 1)  # once, as blocks stay gathered
    memory = [
        plan_memory(cost_model, saved, Workload([8192]), State(float8=way, recompute="full"), sharing).at("backward")
        for way in (None, float8_of("headway"))
    ]
    assert memory[0].parts["gathered"] - memory[1].parts["gathered"] == 32 * (2 - number_bytes) * matrices


def test_mfu_of_float8_is_against_the_peak_that_a_run_prints():
    cost_model, config = named_recipe(DENSE, (*BASE, "run.dtype=float8"))
    device = named_device("H100")
    assert speeds_of(config, cost_model, device, 8).peak_flops_per_s == device.peak_flops_per_s["fp8"]
    with pytest.raises(PlanError, match="its dense peak in fp8 is not known"):
        speeds_of(config, cost_model, named_device("A100"), 8)


def test_a_power_limit_slows_products_by_the_cube_root_and_is_below_the_boards():
    cost_model, config = named_recipe(DENSE, (*BASE, "plan.power_w=350"))
    device = named_device("H100")
    limited, free = speeds_of(config, cost_model, device, 8), speeds_of(*named_recipe(DENSE, BASE)[::-1], device, 8)
    shape = (8192, 8192, 8192)
    ratio = limited.product_s(1e15, shape, 2).expected / free.product_s(1e15, shape, 2).expected
    assert ratio == pytest.approx(2 ** (1 / 3))
    assert (limited.board_power_w, free.board_power_w) == (350, 700)
    with pytest.raises(PlanError, match=r"plan\.power_w = 800: .* draws 700 W at most"):
        speeds_of(named_recipe(DENSE, (*BASE, "plan.power_w=800"))[1], cost_model, device, 8)
