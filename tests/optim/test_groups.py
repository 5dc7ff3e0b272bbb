"""What learns, how fast, by which rule and with which decay."""

import pytest
import torch

from headway.config import OptimConfig
from headway.count import Workload
from headway.count.activations import SavedActivations, SavedBlock
from headway.errors import ConfigError
from headway.meter.phases import update_of
from headway.models.load import load_model
from headway.optim import freeze, learning_rate, make_optimizer, parameter_groups, set_learning_rate
from headway.predict.memory import plan_memory
from headway.predict.recipe import Sharing, State
from headway.tracing import trace
from helpers.models import tiny_config


@pytest.fixture(scope="module")
def model(digits):
    return load_model(str(digits / "model"), random_init=True)


@pytest.fixture(scope="module")
def cost_model(model):
    return trace(model)


@pytest.fixture(autouse=True)
def all_learn(model):
    yield
    model.requires_grad_(True)


def by_name(model, key, groups):
    """A setting of every parameter that learns."""
    value = {id(p): group[key] for group in groups for p in group["params"]}
    return {name: value[id(p)] for name, p in model.named_parameters() if id(p) in value}


def optim_config(**settings):
    return OptimConfig(**{"steps": 10, "lr": 0.1} | settings)


def test_norms_and_biases_do_not_decay(model, cost_model):
    decay = by_name(model, "weight_decay", parameter_groups(model, optim_config(weight_decay=0.3), cost_model))
    vectors = {name for name, p in model.named_parameters() if p.ndim < 2}
    assert any(name.endswith("norm.weight") for name in vectors)
    assert decay == {name: 0.0 if name in vectors else 0.3 for name, _ in model.named_parameters()}


def test_a_frozen_parameter_is_not_optimised(model, cost_model):
    frozen = freeze(model, cost_model, ["vision"])
    optimised = by_name(model, "lr", make_optimizer(model, optim_config(), frozen).param_groups)
    assert optimised.keys() == {name for name, _ in model.named_parameters() if not name.startswith("model.visual.")}


def test_freezing_the_vision_tower_leaves_the_rest_in_model_and_ledger_alike(model, cost_model):
    frozen = freeze(model, cost_model, ["vision"])
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert names == {name for name, _ in model.named_parameters() if name.startswith("model.visual.")}
    assert frozen.params.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_pattern_that_matches_nothing_is_an_error(model, cost_model):
    with pytest.raises(ConfigError, match=r"model.freeze: visoin matches no parameter"):
        freeze(model, cost_model, ["visoin"])


def test_freezing_everything_is_an_error(model, cost_model):
    with pytest.raises(ConfigError, match="no parameter to train"):
        freeze(model, cost_model, ["*"])


def test_parts_have_learning_rates_of_their_own_on_the_common_schedule(model, cost_model):
    rates = {"vision": "x0.1", "vision.merger": 0.02, "*.bias": "1e-3"}  # the last as YAML reads 1e-3
    optim = optim_config(lr_of=rates, warmup_steps=2)
    optimizer = make_optimizer(model, optim, cost_model)
    components = {entry.name: entry.component for entry in cost_model.parameters}
    for step in (1, 7):
        set_learning_rate(optimizer, learning_rate(step, optim))
        share = learning_rate(step, optim) / 0.1
        for name, lr in by_name(model, "lr", optimizer.param_groups).items():
            peak = 0.02 if components[name] == "vision.merger" else 0.01 if components[name].startswith("vi") else 0.1
            peak = 1e-3 if name.endswith(".bias") else peak
            assert lr == pytest.approx(share * peak, rel=1e-12), name


@pytest.mark.parametrize(
    ("rates", "frozen", "words"),
    [
        ({"visoin": "x0.1"}, [], "optim.lr_of: visoin matches no parameter"),
        ({"vision": "x0.1"}, ["vision"], r"optim.lr_of: vision matches \d+ parameters of .*, but none of these learns"),
        ({"vision.mlp": "x0.1", "vision": 0.2}, [], "vision.mlp has no effect, because later patterns match the same"),
    ],
)
def test_a_learning_rate_without_effect_is_an_error(model, cost_model, rates, frozen, words):
    with pytest.raises(ConfigError, match=words):
        parameter_groups(model, optim_config(lr_of=rates), freeze(model, cost_model, frozen))


def test_muon_takes_the_matrices_of_hidden_layers():
    moe = load_model(tiny_config("qwen3_vl_moe"), random_init=True)
    rules = by_name(moe, "rule", parameter_groups(moe, optim_config(name="muon"), trace(moe)))
    muon = {name for name, rule in rules.items() if rule == "muon"}
    language = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    expected = {f"model.language_model.layers.{i}.{part}.weight" for i in range(2) for part in language}
    expected |= {
        f"model.language_model.layers.{i}.mlp.experts.{part}"
        for i in range(2)
        for part in ("gate_up_proj", "down_proj")
    }
    vision = ["attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    expected |= {f"model.visual.blocks.{i}.{part}.weight" for i in range(3) for part in vision}
    mergers = ["merger", "deepstack_merger_list.0", "deepstack_merger_list.1"]
    expected |= {f"model.visual.{merger}.linear_fc{i}.weight" for merger in mergers for i in (1, 2)}
    assert muon == expected
    # AdamW: embeddings of words, patches and positions, the router, the head, and every vector
    assert {name for name in rules.keys() - muon if moe.get_parameter(name).ndim >= 2} == {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.mlp.gate.weight",
        "model.language_model.layers.1.mlp.gate.weight",
        "model.visual.patch_embed.proj.weight",
        "model.visual.pos_embed.weight",
    }


@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss_sinks", "qwen2_5_vl", "qwen3_next", "qwen3_vl_moe"])
def test_what_is_planned_to_be_kept_of_each_parameter_is_kept(kind):
    """One moment of what Muon updates and two of the rest, whatever a part of a model calls its norms."""
    model = load_model(tiny_config(kind), random_init=True)
    cost_model = trace(model)
    optimizer = make_optimizer(model, optim_config(name="muon"), cost_model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    nothing_saved = SavedActivations({"": SavedBlock({}, {}, {}, {})})
    planned = plan_memory(cost_model, nothing_saved, Workload([16], packs=1), State(rule="muon"), Sharing())
    assert planned.optimizer == kept
    rules = by_name(model, "rule", optimizer.param_groups)
    assert all(model.get_parameter(name).ndim >= 2 for name, rule in rules.items() if rule == "muon")
    assert not any("bias" in name or "norm" in name for name, rule in rules.items() if rule == "muon")


@pytest.mark.parametrize(("name", "mode"), [("adamw", "fused"), ("muon", "foreach")])
def test_a_record_of_a_step_says_how_the_engine_updates(model, cost_model, name, mode):
    """A run of `headway train` was told that its optimizer goes through tensors in Python."""
    update = update_of(make_optimizer(model, optim_config(name=name), cost_model))
    assert (update["mode"], update["num_tensors"]) == (mode, len([*model.parameters()]))


def test_muons_matrices_have_a_peak_of_their_own(model, cost_model):
    optim = optim_config(name="muon", muon={"lr": 0.4}, lr_of={"vision": "x0.5", "language.mlp": 0.3})
    optimizer = make_optimizer(model, optim, cost_model)
    set_learning_rate(optimizer, 0.1)
    components = {entry.name: entry.component for entry in cost_model.parameters}
    rules = by_name(model, "rule", optimizer.param_groups)
    for name, lr in by_name(model, "lr", optimizer.param_groups).items():
        expected = 0.4 if rules[name] == "muon" else 0.1
        expected *= 0.5 if components[name].startswith("vision") else 1.0
        assert lr == pytest.approx(0.3 if components[name] == "language.mlp" else expected, rel=1e-12), name


def test_muon_without_a_matrix_is_an_error(model, cost_model):
    frozen = freeze(model, cost_model, ["language.projections", "language.mlp", "vision"])
    with pytest.raises(ConfigError, match=r"optim.name is 'muon', but no matrix of a hidden layer"):
        parameter_groups(model, optim_config(name="muon"), frozen)


def test_one_optimizer_of_every_rule_is_torchs_adamw_and_torchs_muon(model, cost_model):
    """Three steps of ours against PyTorch's two optimizers on a copy, with the same gradients."""
    optim = optim_config(name="muon", lr=0.01)
    twin = load_model(model.config, random_init=True)
    twin.load_state_dict(model.state_dict())
    ours = make_optimizer(model, optim, cost_model)
    rules = by_name(model, "rule", ours.param_groups)
    named = dict(twin.named_parameters())
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    rest = [(n, p) for n, p in named.items() if rules[n] == "adamw"]
    theirs = [
        torch.optim.Muon([p for n, p in named.items() if rules[n] == "muon"], lr=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for _, p in rest if p.ndim >= 2], weight_decay=0.1, **settings),
        torch.optim.AdamW([p for _, p in rest if p.ndim < 2], weight_decay=0.0, **settings),
    ]
    set_learning_rate(ours, 0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name].grad = parameter.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-6, atol=1e-7, msg=name)
