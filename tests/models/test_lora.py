"""Adapters in models: where they go, what they cost, what they weigh."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from headway.count import Workload
from headway.errors import ConfigError
from headway.models.load import load_model
from headway.models.lora import (
    adapter_modules,
    add_adapters,
    has_adapters,
    initialise_adapters,
    is_adapter,
    with_merged_adapters,
    without_adapters,
)
from headway.tracing import trace
from helpers.models import VISION_FAMILIES, tiny_config, tiny_ledger

# peft asks transformers for a name that is going away
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
IDS = torch.arange(10, 40)[None]


def adapted(family, targets=None, *, trained=True, **settings):
    torch.manual_seed(0)
    model = load_model(tiny_config(family), random_init=True, attention="eager")
    modules = adapter_modules(tiny_ledger(family), targets)
    add_adapters(model, modules, **{"rank": 4, "alpha": 8.0, "dropout": 0.0, "base": "base"} | settings)
    initialise_adapters(model, 1, "cpu")
    if trained:
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter.data, std=0.1)
    return model


TARGETS = (None, ["q_proj", "v_proj"], ["*.layers.1.*"])
OFTEN = [*(("qwen3", targets) for targets in TARGETS), ("qwen3_vl_moe", None)]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param(family, targets, marks=() if (family, targets) in OFTEN else [pytest.mark.slow])
        for family in ("qwen3", "qwen3_moe", *VISION_FAMILIES)
        for targets in TARGETS
    ],
)
def test_the_ledger_counts_what_headway_flops_says(family, targets):
    images = [(1, 4, 6)] if family in VISION_FAMILIES else []
    step = Workload([50, 33], images=images)
    real, stored = trace(adapted(family, targets)), tiny_ledger(family).lora(4, targets)
    assert real.params == stored.params
    a, b = real.count(step, recompute="full"), stored.count(step, recompute="full")
    assert (a.forward, a.dgrad, a.wgrad, a.recompute) == (b.forward, b.dgrad, b.wgrad, b.recompute)


def test_adapters_start_as_pefts_and_change_nothing():
    plain = load_model(tiny_config("qwen3"), random_init=True, attention="eager")
    model = adapted("qwen3", trained=False)
    plain.load_state_dict(with_merged_adapters(model, model.state_dict()))
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    witness = get_peft_model(plain, LoraConfig(r=4, target_modules=["down_proj"]))
    theirs = torch.cat([p.flatten() for n, p in witness.named_parameters() if "lora_A" in n])
    ours = torch.cat([p.flatten() for n, p in model.named_parameters() if "down_proj.lora_A" in n])
    # uniform up to 1 / sqrt(fan-in), 48 here: of 2 x 4 x 48 numbers the largest is near the bound in both
    for numbers in (ours, theirs):
        assert 0.95 / 48**0.5 < numbers.abs().max() < 1 / 48**0.5


def test_under_autocast_adapters_read_what_their_layer_reads_and_learn_as_with_pefts_casts():
    """peft casts inputs to the adapter's float32, which autocast casts back: the same numbers, in more memory."""
    gradients, read = [], []
    for casts in (False, True):
        model, dtypes = adapted("qwen3"), set()
        for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
            layer.cast_input_dtype_enabled = casts or layer.cast_input_dtype_enabled
            layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs, to=dtypes: to.add(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        read.append(dtypes)
    assert torch.bfloat16 in read[0]
    assert read[1] == {torch.float32}
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_first_weights_follow_from_seed_and_name_alone():
    one, other = adapted("qwen3", trained=False), adapted("qwen3", ["q_proj"], trained=False)
    names = [name for name, _ in other.named_parameters() if is_adapter(name)]
    assert names
    assert all(torch.equal(one.get_parameter(name), other.get_parameter(name)) for name in names)
    initialise_adapters(other, 2, "cpu")
    assert not torch.equal(one.get_parameter(names[0]), other.get_parameter(names[0]))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2", "qwen3_vl"])
def test_a_merged_model_computes_the_same_without_adapters(family):
    model = adapted(family)
    plain = load_model(tiny_config(family), random_init=True, attention="eager")
    plain.load_state_dict(with_merged_adapters(model, model.state_dict()))
    assert not has_adapters(plain)
    torch.testing.assert_close(plain(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_peft_opens_saved_adapters(tmp_path):
    torch.manual_seed(0)
    base = load_model(tiny_config("qwen3"), random_init=True, attention="eager")
    base.save_pretrained(tmp_path / "base")
    model = adapted("qwen3", base=str(tmp_path / "base"))  # of the same weights
    model.save_pretrained(tmp_path / "adapters")
    opened = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    assert torch.equal(opened(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_model_can_be_had_without_its_adapters_for_a_while():
    model = adapted("qwen3_vl")
    names = [name for name, _ in model.named_parameters()]
    with without_adapters(model):
        assert [n for n, _ in model.named_parameters()] == [
            n for n, _ in load_model(tiny_config("qwen3_vl"), random_init=True).named_parameters()
        ]
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    ("targets", "frozen", "words"),
    [
        (["q_porj"], [], "model.lora.targets: target 'q_porj' matches no linear module"),
        (
            ["qkv"],
            ["vision"],
            r"of the 3 modules that qkv names, none can take an adapter, because model.freeze holds them",
        ),
        (["gate"], [], "model.lora.targets: target 'gate' matches no linear module"),  # routers and experts are none
    ],
)
def test_targets_that_can_take_no_adapter_are_an_error(targets, frozen, words):
    with pytest.raises(ConfigError, match=words):
        adapter_modules(tiny_ledger("qwen3_vl_moe").freeze(frozen), targets)


def test_a_tied_head_takes_no_adapter():
    config = tiny_config("qwen3")
    config.tie_word_embeddings = True
    model = load_model(config, random_init=True)
    with pytest.raises(ConfigError, match=r"none can take an adapter: lm_head shares its weight with another module"):
        adapter_modules(trace(model), ["lm_head", "q_proj"])


def test_frozen_modules_take_no_adapter():
    modules = adapter_modules(tiny_ledger("qwen3_vl").freeze(["vision"]), None)
    assert modules
    assert not [name for name in modules if "visual" in name]
