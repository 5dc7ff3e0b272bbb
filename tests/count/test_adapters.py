"""Adapters: on a stored cost model against real ones that peft made, and real ones against PyTorch's own counter."""

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model

from headway.count import Workload
from headway.tracing import trace
from helpers.cases import some
from helpers.counter import build, check, counted, counted_eagerly
from helpers.models import VISION_FAMILIES, tiny_ledger, tiny_model

# Without targets both adapt all linear modules but the head. (On text mixtures of experts peft's all-linear also adapts
# the router and the experts' tensors, which are no linear modules; ours does not.)
CASES = [
    *((family, None) for family in ("qwen3", "gemma3_sliding", *VISION_FAMILIES)),
    *((family, ["q_proj", "v_proj"]) for family in ("qwen3", "gemma3_sliding", "qwen3_moe", *VISION_FAMILIES)),
    ("qwen3", ["down_proj"]),
    ("deepseek_v3", ["q_b_proj", "o_proj"]),
    ("qwen3_vl", ["linear_fc2"]),
    ("qwen2_5_vl", ["qkv"]),
]

# Of vision models one that adapters go through whole, and one where only a part has them.
ONE_OF_VISION = (("qwen3_vl", ["linear_fc2"]), ("qwen3_vl", {"target_modules": "all-linear"}))


def is_often(case):
    family, _ = case
    return family not in VISION_FAMILIES or case in ONE_OF_VISION


def adapted(family, targets):
    model = tiny_model(family, dtype=torch.float32)
    adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules=targets or "all-linear")
    return get_peft_model(model, adapters).base_model.model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("family", "targets"), some(CASES, is_often))
def test_adapters_on_a_stored_cost_model_cost_what_pefts_do(family, targets):
    images = [(1, 4, 6)] if family in VISION_FAMILIES else []
    step = Workload([50, 33], images=images)
    real, stored = trace(adapted(family, targets)), tiny_ledger(family).lora(4, targets)
    a, b = real.count(step, recompute="full"), stored.count(step, recompute="full")
    assert (a.forward, a.dgrad, a.wgrad, a.recompute) == (b.forward, b.dgrad, b.wgrad, b.recompute)
    assert real.params == stored.params


EVERYWHERE_IN_VISION = r".*visual.*(qkv|proj|fc1|fc2|linear_fc1)"
SETTINGS = [
    *((family, {"target_modules": "all-linear"}) for family in ("qwen3", *VISION_FAMILIES)),
    ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    *((family, {"target_modules": EVERYWHERE_IN_VISION}) for family in VISION_FAMILIES),
    *((family, {"target_modules": EVERYWHERE_IN_VISION, "use_dora": True}) for family in ("qwen2_5_vl", "qwen3_vl")),
    ("qwen3", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    ("qwen3", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    ("qwen3", {"target_modules": ["q_proj"], "use_dora": True, "lora_dropout": 0.1}),  # runs the base product twice
    ("qwen3", {"target_modules": ["q_proj"], "use_rslora": True}),
    ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
    ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("qwen3_vl", {"target_modules": ["q_proj"], "modules_to_save": ["merger"]}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("family", "settings"), some(SETTINGS, is_often))
def test_adapters_anywhere_count_what_pytorch_dispatches(family, settings):
    check(get_peft_model(build(family), LoraConfig(r=4, **settings)).get_base_model(), family)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_pefts_wrapper_changes_neither_names_nor_counts():
    wrapped = get_peft_model(build("qwen3"), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    cost = trace(wrapped)
    assert cost == trace(wrapped.get_base_model())
    # the frozen original beside the head that is trained, and an adapter that is not active, never run: on purpose
    wrapped.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    assert trace(wrapped).unknown == ()
    assert {row.component for row in cost.rows if row.module.startswith("lm_head")} == {"language.head"}
    assert cost.params.trainable == trainable


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_doras_norm_costs_once_per_forward_pass():
    settings = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    cost = trace(get_peft_model(build("qwen3"), settings))
    # B A is made as B(A(1)), the identity of 32 inputs through A [32, 4] and B [4, 32], in each of two layers
    norm = 2 * 2 * 32 * (32 * 4 + 4 * 32)
    (row,) = [row for row in cost.count(Workload([50, 33])).rows if row.driver == "packs"]
    assert (row.name, row.forward, row.dgrad, row.wgrad) == ("language.projections", norm, 0, 0)
    one, two = cost.count(Workload([50, 33])), cost.count(Workload([50]) + Workload([33]))
    assert two.forward - one.forward == norm
    assert cost.count(Workload([50, 33], packs=2)) == two


_VIRTUAL = 5  # tokens that a learnt prompt puts before each text
# queries, keys and values: then backward needs all four products of each attention
_TARGETS = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
# adapters whose own work is on weights alone, on every row, or both
METHODS = {
    "HRA": lambda: peft.HRAConfig(r=4, **_TARGETS),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=_VIRTUAL, encoder_hidden_size=16),
    "DoRA": lambda: LoraConfig(r=4, use_dora=True, **_TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=4, **_TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=4, **_TARGETS),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, **_TARGETS),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, **_TARGETS, use_cayley_neumann=False),
    "OFT by a series": lambda: peft.OFTConfig(r=0, oft_block_size=8, **_TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, **_TARGETS),
    "SHiRA": lambda: peft.ShiraConfig(r=4, **_TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, **_TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, **_TARGETS),
    "IA3": lambda: peft.IA3Config(feedforward_modules=[], **_TARGETS),
}


def _adapted_step(config, rows, length=9):
    """Count a batch of rows under an adapter: FLOPs of the ledger, and of a real step less its forbidden pairs."""
    torch.manual_seed(0)
    config.task_type = peft.TaskType.CAUSAL_LM
    model = get_peft_model(tiny_model("qwen3", attn_implementation="eager", dtype=torch.float32), config).train()
    ids = torch.randint(6, 160, (rows, length))
    forward, backward = counted_eagerly(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    seen = length + (_VIRTUAL if isinstance(config, peft.PromptEncoderConfig) else 0)
    # eager attention runs whole squares: two products of 4 heads of 8 in each of 2 layers, twice as many in backward
    forbidden = rows * 2 * 2 * 2 * 4 * 8 * (seen * (seen - 1) // 2)
    return counted(trace(model), Workload([length] * rows)), (forward - forbidden, backward - 2 * forbidden)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning", "ignore:Setting boft_n:UserWarning")
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_what_an_adapter_does_to_weights_is_done_once_for_all_rows(method):
    for rows in (1, 3):
        ledger, real = _adapted_step(METHODS[method](), rows)
        assert ledger == real


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_that_cannot_be_read_is_named_beside_its_base():
    with pytest.warns(RuntimeWarning, match=r"leaves out the adapters .*q_proj.*Fourier transform"):
        ledger, _ = _adapted_step(peft.C3AConfig(block_size=8, **_TARGETS), 2)
    # as an adapter without products: each rescales what its layer gives, from the same layers on
    assert ledger == _adapted_step(peft.IA3Config(feedforward_modules=[], **_TARGETS), 2)[1]
