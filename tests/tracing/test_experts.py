"""Experts that are modules of their own, against PyTorch's counter on steps whose router spreads the tokens."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_VLMoeConfig,
    JetMoeConfig,
    Llama4TextConfig,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    Qwen3MoeConfig,
    SwitchTransformersConfig,
)
from transformers import SwitchTransformersForConditionalGeneration as Switch

from headway.count import Workload, load_cost_model
from headway.count.models import shipped_models
from headway.errors import WorkloadError
from headway.tracing import trace
from headway.tracing.build import with_layers
from headway.tracing.verify import verify
from helpers.counter import expected_step, real_step

TOKENS, SOURCES, EXPERTS = 23, 37, 4
WORKLOAD = Workload([TOKENS], sources=[SOURCES])
SQUARE = {"pairs:causal": TOKENS**2}  # eager attention runs it whole


def switch() -> nn.Module:
    return Switch._from_config(
        SwitchTransformersConfig(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_experts=EXPERTS,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        ),
        attn_implementation="eager",
    ).train()


def nllb() -> nn.Module:
    return NllbMoeForConditionalGeneration._from_config(
        NllbMoeConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=40,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            num_experts=EXPERTS,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
        ),
        attn_implementation="eager",
    ).train()


class Mixture(nn.Module):
    """Two of four experts for each token, as remote code of Mixtral's and DeepSeek's kind runs them.

    Args:
        sort: whether rows are sorted by expert and cut, in place of being looked up for each.
    """

    def __init__(self, sort: bool):
        super().__init__()
        self.sort = sort
        self.gate = nn.Linear(32, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        if self.sort:
            order = chosen.flatten().argsort()
            pieces = x[order // 2].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
            done = torch.cat([expert(rows) for expert, rows in zip(self.experts, pieces, strict=True) if len(rows)])
            return out.index_add(0, order // 2, done * weights.flatten()[order, None])
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


def seen(model, arguments):
    """Count a real step, an expert's products with its list's; and name the experts that ran."""
    by_module, backward = real_step(model, arguments)
    forward, ran = Counter(), set()
    for path, flops in by_module.items():
        home, inside, name = path.partition("experts.")
        forward[f"{home}experts" if inside else path] += flops
        ran |= {name.partition(".")[0]} if inside else set()
    return forward, backward, ran


@pytest.mark.parametrize(
    ("build", "wasted", "most_run"),
    [
        (switch, 1, EXPERTS),
        # transformers makes NLLB-MoE's one-hot choice one-hot again: each token meets one of four as the chosen one
        # and three as those not chosen, four rows in place of two, all of them in the first two experts
        (nllb, EXPERTS // 2, 2),
    ],
)
def test_tokens_times_the_chosen_experts_are_billed(build, wasted, most_run):
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(4, 60, (1, SOURCES))
    forward, backward, ran = seen(model, {"input_ids": ids, "decoder_input_ids": ids[:, :TOKENS]})
    assert 1 < len(ran) <= most_run  # a real router spreads its tokens
    cost = trace(model)
    assert (forward, backward) == expected_step(cost, WORKLOAD, SQUARE, wasted)
    routers = {row.module: (row.driver, row.forward) for row in cost.rows if row.component == "language.router"}
    assert sorted(routers.values()) == [("sources", 2 * 32 * EXPERTS), ("tokens", 2 * 32 * EXPERTS)]


@pytest.mark.parametrize("sort", [False, True])
def test_any_list_of_experts_beside_a_router_is_billed_for_the_rows_picked(sort):
    torch.manual_seed(0)
    model = Mixture(sort)
    forward, backward, ran = seen(model, {"x": torch.randn(TOKENS, 32)})
    assert len(ran) == EXPERTS
    cost = trace(model, inputs=lambda workload: {"x": torch.zeros(workload.tokens, 32)})
    assert (forward, backward) == expected_step(cost, Workload([TOKENS]), {})
    assert {(row.module, row.op, row.component) for row in cost.rows} == {
        ("gate", "linear", "language.router"),
        ("experts", "experts", "language.experts"),
    }


def test_a_token_uses_as_many_experts_as_its_router_picks():
    cost = trace(Mixture(sort=False), inputs=lambda workload: {"x": torch.zeros(workload.tokens, 32)})
    one_expert = 32 * 48 + 48 + 48 * 32 + 32
    assert cost.params.total == 32 * EXPERTS + 4 * one_expert
    assert cost.params.active == 32 * EXPERTS + 2 * one_expert


def test_experts_are_frozen_together():
    cost = trace(Mixture(sort=False), inputs=lambda workload: {"x": torch.zeros(workload.tokens, 32)})
    rows = 2 * TOKENS * 2 * 32 * 48  # two experts for each token, in each of the two layers
    step = cost.count(Workload([TOKENS]))
    frozen = cost.freeze(["language.experts"]).count(Workload([TOKENS]))
    # the first layer reads the input, so its experts have weight gradients only; frozen, none has any gradient
    assert step.wgrad - frozen.wgrad == 2 * rows
    assert step.dgrad - frozen.dgrad == rows


def test_a_module_that_rests_without_a_router_is_not_counted():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return self.layers[1](self.layers[0](x[torch.arange(len(x))]))

    cost = trace(Layers(), inputs=lambda workload: {"x": torch.zeros(workload.tokens, 32)})
    assert cost.unknown == ("layers.2 (it never ran)",)


def test_verify_adds_up_the_experts_of_a_list():
    torch.manual_seed(0)
    lines, _ = verify(switch(), WORKLOAD)
    assert [line for line in lines if line.explanation is None] == []
    experts = [line for line in lines if line.op == "experts"]
    # two layers, each with an up and a down projection; backward is twice forward
    assert [line.counted for line in experts] == [
        (n * 2 * 2 * 32 * 48, 2 * n * 2 * 2 * 32 * 48) for n in (SOURCES, TOKENS)
    ]


def llama4(**changes) -> Llama4TextConfig:
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 40,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_local_experts": 8, "attention_chunk_size": 16, "moe_layers": [0, 2],
    }  # fmt: skip
    return Llama4TextConfig(**sizes | changes)


def test_llama_4_is_billed_for_the_expert_that_a_token_is_routed_to():
    # Scout at two of its 48 layers, in chunks of 1,024 of its 8,192 tokens; its published size is in test_models
    layers, width, heads, head, expert, vocabulary, tokens = 2, 5120, 40, 128, 8192, 202_048, 1024
    scout = Llama4TextConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=expert, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=head, num_local_experts=16, num_experts_per_tok=1,
        interleave_moe_layer_step=1, attention_chunk_size=tokens,
    )  # fmt: skip
    ledger = trace(scout)
    projections = width * (heads * head * 2 + 2 * 8 * head)
    mixture = width * 16 + 3 * width * expert * (1 + 1)  # router, one expert, the shared one
    forward = 2 * tokens * (layers * (projections + mixture) + width * vocabulary)
    forward += layers * 2 * heads * head * tokens * (tokens + 1)  # causal pairs
    assert ledger.count(Workload([tokens])).total == 3 * forward


@pytest.mark.parametrize("picks", [1, 3])
def test_what_llama_4_runs_on_zeros_is_explained(picks):
    model = AutoModelForCausalLM.from_config(llama4(num_experts_per_tok=picks), attn_implementation="eager").train()
    lines, unseen = verify(model, Workload([21]))
    assert not unseen
    assert all(line.explanation is not None for line in lines)
    experts = [line for line in lines if line.op == "experts"]
    assert len(experts) == 2
    for line in experts:
        assert "all 8 experts" in line.explanation
        assert tuple(flops * 8 for flops in line.ledger) == tuple(flops * picks for flops in line.counted)


@pytest.mark.parametrize(
    "config",
    [
        llama4(num_experts_per_tok=2),
        JetMoeConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
            intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        ),
        Qwen3MoeConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_a_token_uses_the_expert_weights_that_it_is_billed_for(config):
    assert_experts_agree(trace(config))


MIXTURES = [name for name in shipped_models() if any(row.op == "experts" for row in load_cost_model(name).rows)]


@pytest.mark.parametrize("name", MIXTURES)
def test_shipped_mixtures_use_the_expert_weights_that_a_token_is_billed_for(name):
    assert_experts_agree(load_cost_model(name))


def assert_experts_agree(ledger):
    """Forward FLOPs of a stack of experts are two for each of its weights that a token uses, and those are few."""
    billed = Counter()
    for row in ledger.rows:
        for needs in {gradient.needs for gradient in row.gradients if gradient.phase == "wgrad"}:
            number = needs.bit_length() - 1
            is_shared_out = ledger.parameters[number].active < ledger.parameters[number].numel
            assert is_shared_out or row.op != "experts"
            billed[number] += row.forward if is_shared_out else 0
    assert any(billed.values())
    for number, forward in billed.items():
        assert forward in (0, 2 * ledger.parameters[number].active)


def test_image_tokens_are_billed_at_the_experts_for_images():
    tokens, image = 2000, (1, 64, 96)
    # 28B at three of its layers: 64 experts each for text and images, of which a token visits 6, in all but the first
    ledger = trace(with_layers(Ernie4_5_VLMoeConfig(), 3))
    width, layers, of_text, of_images = 2560, 2, 1536, 512
    positions = image[1] * image[2] // 4
    without, with_image = ledger.count(Workload([tokens])), ledger.count(Workload([tokens], images=[image]))
    moved = 3 * 2 * positions * layers * 6 * 3 * width * (of_text - of_images)
    assert without.by_component()["language.experts"] - with_image.by_component()["language.experts"] == moved
    assert not ledger.unknown


def test_a_clip_is_refused_where_only_single_frames_were_traced():
    config = Ernie4_5_VLMoeConfig()
    config.text_config.num_hidden_layers, config.vision_config.depth = 2, 1
    ledger = trace(config)
    assert ledger.count(Workload([300], videos=[(1, 8, 12)])).total > 0
    with pytest.raises(WorkloadError, match="the cost of a clip of 2x8x12 patches is not known"):
        ledger.count(Workload([300], videos=[(2, 8, 12)]))
    with pytest.raises(WorkloadError, match="20 tokens cannot hold the 24 tokens that stand for patches"):
        ledger.count(Workload([20], images=[(1, 8, 12)]))


def test_bare_matrices_that_nothing_reads_are_unknown():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = Bare(), Bare()
            self.table = nn.Embedding(7, 8)

        def forward(self, x):
            return self.used(x)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 8, 8))

        def forward(self, x):
            return torch.einsum("td,edf->tf", x, self.w)

    ledger = trace(Half(), inputs=lambda workload: {"x": torch.zeros(workload.tokens, 8)})
    assert ledger.unknown == ("idle (it never ran)",)
