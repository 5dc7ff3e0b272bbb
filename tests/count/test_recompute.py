"""What checkpointing runs again, against PyTorch's counter on real steps with real checkpointing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from headway.count import Workload, load_cost_model
from headway.count.recompute import KINDS, as_choice, kept_layers, recomputed_blocks
from headway.count.rows import Row
from headway.errors import UsageError
from headway.tracing import trace
from helpers.cases import some
from helpers.counter import build, check_recompute
from helpers.models import enable_checkpointing

# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]


def frozen(model, part):
    if part == "base":  # all but the adapters
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    elif part == "lower half":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    elif part == "all but norms":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    elif part == "vision":
        model.model.visual.requires_grad_(False)
    elif part == "language":
        model.model.language_model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("family", "part"),
    [
        *((family, part) for family in ("llama", "gemma3_sliding") for part in ("", "lower half", "all but norms")),
        ("qwen3_vl", ""),
        ("qwen3_vl", "vision"),
        *some(
            [("gpt2", ""), ("qwen2", ""), ("qwen2_5_vl", ""), ("qwen3_vl", "language"), ("qwen2_5_vl", "vision")],
            lambda _: False,
        ),
    ],
)
def test_checkpointed_blocks_run_again_up_to_the_last_tensor_that_backward_needs(family, part):
    plain, real = frozen(build(family), part), enable_checkpointing(frozen(build(family), part))
    check_recompute(plain, real, trace(plain), family, "full")


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"], "all-linear"])
def test_checkpointed_adapters_run_again_with_their_block(targets):
    def adapted():
        return get_peft_model(build("llama"), LoraConfig(r=4, target_modules=targets)).get_base_model()

    plain = adapted()
    check_recompute(plain, enable_checkpointing(adapted()), trace(plain), "llama", "full")


@pytest.mark.parametrize("family", ["llama", "gemma3_sliding", "qwen3_vl"])
def test_reentrant_checkpoints_run_blocks_to_their_end(family):
    plain = build(family)
    check_recompute(plain, enable_checkpointing(build(family), reentrant=True), trace(plain), family, "reentrant")


def wrapped(family, **options):
    """Wrap every second decoder layer as torchtitan does, or all where options say what they save."""
    model = build(family)
    for i, layer in enumerate(model.model.layers):
        if options or i % 2:
            model.model.layers[i] = checkpoint_wrapper(layer, **options)
    return model


def test_every_second_block_runs_again():
    plain, real = build("llama"), wrapped("llama")
    assert trace(real) == trace(plain)  # a checkpointed model has the ledger of the plain one
    check_recompute(plain, real, trace(plain), "llama", "every:2")
    check_recompute(plain, real, trace(plain), "llama", "model.layers.1")


SAVED = {
    "full,-attention": lambda func, _args: func is torch.ops.aten.bmm.default,
    "full,-attention,-*.gate_proj,-*.up_proj": lambda func, args: (
        func is torch.ops.aten.bmm.default or (func is torch.ops.aten.mm.default and args[1].shape == (32, 48))
    ),
}


@pytest.mark.parametrize("choice", SAVED)
def test_what_selective_checkpointing_saves_is_not_run_again(choice):
    def policy(_context, func, *args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if SAVED[choice](func, args) else CheckpointPolicy.PREFER_RECOMPUTE

    real = wrapped("llama", context_fn=partial(create_selective_checkpoint_contexts, policy))
    plain = build("llama")
    check_recompute(plain, real, trace(plain), "llama", choice)


def test_core_attention_alone_runs_again():
    def checkpointed(*args, **kwargs):
        return checkpoint(partial(eager_attention_forward, **kwargs), *args, use_reentrant=True)

    AttentionInterface.register("checkpointed_eager", checkpointed)
    plain, real = build("llama"), build("llama")
    real.config._attn_implementation = "checkpointed_eager"
    check_recompute(plain, real, trace(plain), "llama", "attention")
    assert trace(plain).count(Workload([9]), recompute="language.attention") == trace(plain).count(
        Workload([9]), recompute="attention"
    )


def test_choices_add_up_and_leave_out():
    model, step = load_cost_model("qwen3-8b"), Workload([100])
    parts = {choice: model.count(step, recompute=choice).recompute for choice in (
        "full", "reentrant", "every:2", "attention", "mlp", "projections", "attention,mlp", "full,-attention",
        "full,-full", "reentrant,-*.down_proj", "model.layers.*[02468]",
    )}  # fmt: skip
    assert parts["reentrant"] == parts["attention"] + parts["mlp"] + parts["projections"]
    assert parts["attention,mlp"] == parts["attention"] + parts["mlp"]
    assert parts["full,-attention"] == parts["full"] - parts["attention"]
    assert parts["full"] == parts["reentrant,-*.down_proj"]  # the closing projection is not run again
    assert parts["every:2"] == parts["model.layers.*[02468]"] == parts["full"] // 2
    assert parts["full,-full"] == 0


@pytest.mark.parametrize("choice", ["fool", "every:0", "every:x", "every:99", "language.vision", "full,-*.q_prj", ""])
def test_a_choice_that_matches_nothing_is_refused(choice):
    term = choice.rpartition(",-")[2]
    with pytest.raises(UsageError, match=rf"recompute='{term.replace('*', '.')}' matches nothing of qwen3-8b"):
        load_cost_model("qwen3-8b").count(Workload([9]), recompute=choice)


@pytest.mark.parametrize(("tower", "part"), [("vision", ""), ("language", ""), ("language", "vision")])
def test_the_checkpointed_blocks_of_one_tower_run_again_alone(tower, part):
    plain, real = frozen(build("qwen3_vl"), part), enable_checkpointing(frozen(build("qwen3_vl"), part))
    for name, module in real.named_modules():
        if hasattr(module, "gradient_checkpointing") and ("visual" in name) != (tower == "vision"):
            module.gradient_checkpointing = False
    check_recompute(plain, real, trace(plain), "qwen3_vl", f"{tower}:full")


def test_the_towers_choices_add_up():
    model, step = load_cost_model("qwen2.5-vl-7b"), Workload([2000], images=[(1, 40, 40)])
    full = model.count(step, recompute="full")
    vision, language = (model.count(step, recompute=f"{tower}:full") for tower in ("vision", "language"))
    assert vision.recompute + language.recompute == full.recompute
    assert {row.name.partition(".")[0] for row in vision.rows if row.recompute} == {"vision"}
    assert language == model.count(step, recompute="model.language_model.layers.*")
    assert model.count(step, recompute="vision:every:2") == model.count(step, recompute="model.visual.*[13579]")
    assert model.count(step, recompute="full,-vision:full") == language


def test_a_tower_that_the_model_has_not_is_refused():
    with pytest.raises(UsageError, match="recompute 'vision:full': the model has no vision tower whose blocks"):
        load_cost_model("qwen3-8b").count(Workload([9]), recompute="language:full,vision:full")


A, P, M = (frozenset([kind]) for kind in KINDS)
NAMES = [f"{tower}.{i}" for tower in ("vision", "text") for i in range(3)]
TOWERS = {name: name.partition(".")[0].replace("text", "language") for name in NAMES}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", {}),
        ("full", dict.fromkeys(NAMES, frozenset())),
        ("every:2", {"vision.1": frozenset(), "text.1": frozenset()}),
        ("every:3, -attention", {"vision.2": A, "text.2": A}),
        ("text.[01],-attention,text.1", {"text.0": A, "text.1": frozenset()}),
        ("vision:full", dict.fromkeys(NAMES[:3], frozenset())),
        ("language:every:2,-attention,vision:every:3", {"vision.2": frozenset(), "text.1": A}),
        ("full,-attention,vision:full", dict.fromkeys(NAMES[:3], frozenset()) | dict.fromkeys(NAMES[3:], A)),
        ("every:2,-mlp,full,-attention", dict.fromkeys(NAMES, A)),
        ("vision:full,-mlp,language:full,-attention", dict.fromkeys(NAMES[:3], A | M) | dict.fromkeys(NAMES[3:], A)),
        ("text.0,-projections,text.1,-mlp,text.2,-attention", {"text.0": A | M | P, "text.1": A | M, "text.2": A}),
    ],
)
def test_what_training_recomputes_is_what_the_ledger_bills(choice, expected):
    assert recomputed_blocks(choice, NAMES, TOWERS) == expected
    assert recomputed_blocks(as_choice(expected), NAMES) == expected
    model, step = load_cost_model("qwen3-8b"), Workload([100])
    blocks = [f"model.layers.{i}" for i in range(36)]
    for said in ("full,-attention", "every:5", "every:2,-attention,every:4", "every:5,-mlp,every:2,-projections,full"):
        again = as_choice(recomputed_blocks(said, blocks))
        assert model.count(step, recompute=said).recompute == model.count(step, recompute=again).recompute > 0


@pytest.mark.parametrize(
    "choice", ["attention", "reentrant", "full,-experts", "every:4", "-attention,audio", "vision:every:4", ""]
)
def test_what_training_does_not_recompute_is_refused(choice):
    with pytest.raises(UsageError, match="chooses none of the model's 6 blocks"):
        recomputed_blocks(choice, NAMES, TOWERS)


def test_only_linear_layers_that_can_be_told_from_others_are_kept():
    row = Row("layers.0.q", "linear", "language.projections", "tokens", 64, block="layers.0", recomputed=True)
    query, gate = replace(row, features=(4, 8)), replace(row, module="layers.0.gate", component="language.mlp")
    kept = {"layers.0": {"projections"}}
    down = replace(gate, module="layers.0.down", features=(8, 4), recomputed=False)
    assert kept_layers(kept, [query, replace(gate, features=(4, 12)), down]) == {"layers.0": [query]}
    # another layer of the same sizes is kept too: for nothing, where it does not run again
    closing = replace(down, features=(4, 8))
    assert kept_layers(kept, [query, closing]) == {"layers.0": [query, closing]}
    with pytest.raises(UsageError, match=r"layers.0.gate is to be recomputed, but its weight has the sizes \(4, 8\)"):
        kept_layers(kept, [query, replace(gate, features=(4, 8))])
    with pytest.raises(UsageError, match=r"the result of layers.0.q cannot be kept, because it is no linear layer"):
        kept_layers(kept, [row])
    with pytest.raises(UsageError, match=r"no linear layers of mlp to keep. Leave out ',-mlp'"):
        kept_layers({"layers.0": {"mlp"}}, [query])


def test_adapters_run_again_beside_layers_that_are_kept():
    model, step = load_cost_model("qwen3-8b").lora(8, ["q_proj", "up_proj"]), Workload([100])
    full, kept = (model.count(step, recompute=r).recompute for r in ("full", "full,-attention,-projections,-mlp"))
    width, inner = 4096, 12288
    assert kept == 36 * 100 * 2 * 8 * (width + width + width + inner)
    assert full > 100 * kept


def test_a_tower_without_blocks_is_refused_for_training():
    with pytest.raises(UsageError, match=r"no audio tower whose blocks can be recomputed. Its towers are vision and l"):
        recomputed_blocks("vision:full,audio:full", NAMES, TOWERS)


class Checkpointing(nn.Module):
    """A language model that checkpoints its middle by itself, or does not."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.head, self.options = nn.Embedding(50, 12), nn.Linear(12, 50), options
        self.middle = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return (self.head(checkpoint(self.middle, x, **self.options) if self.options else self.middle(x)),)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_inside_a_model_or_around_it_does_not_change_the_ledger(reentrant):
    assert trace(Checkpointing(use_reentrant=reentrant)) == trace(Checkpointing())
    family = build("qwen3_vl")
    plain = trace(family)
    assert trace(enable_checkpointing(family, reentrant=reentrant)) == plain
