"""What a model takes from the longest position of a row is taken from each segment of a pack.

The reference is transformers' own model in eager attention, fresh for each sample, as dynamic NTK remembers rows.
"""

import copy

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway.models.load import load_model
from headway.models.rotary import reads_rows
from headway.models.waits import RunningPack, segments_of
from headway.tracing import trace

LENGTHS = [9, 130, 5, 70, 33]  # two beyond the 40 and 64 below, in two regimes of dynamic NTK
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 80,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROWS = {"dynamic", "longrope"}  # of transformers' types, those that go by the row
_OF_ROPE = {
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 40,
    },
    "yarn": {"original_max_position_embeddings": 16},
    "llama3": {"original_max_position_embeddings": 40, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **_OF_ROPE.get(kind, {}), **more}


def of_all_layers(kind):
    return transformers.Qwen3Config(**SMALL, head_dim=8, rope_parameters=rope(kind))


def by_layer_type(kind):
    parameters = {"sliding_attention": rope("default"), "full_attention": rope(kind)}
    types = ["sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, layer_types=types, sliding_window=16, rope_parameters=parameters
    )


def scaled_by_the_row(_kind):
    parameters = rope("longrope", short_mscale=1.1, long_mscale=1.3)
    return transformers.PhimoeConfig(**SMALL, num_local_experts=4, rope_parameters=parameters)


def counting_slots(_kind):
    """Llama 4, which scales queries of layers without positions by how many keys a slot has before it."""
    return transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=40, head_dim=8, num_local_experts=4, no_rope_layers=[1, 0], floor_scale=8,
        attn_scale=0.5, attention_chunk_size=16,
    )  # fmt: skip


CASES = [(of_all_layers, kind) for kind in ROPE_INIT_FUNCTIONS]
CASES += [(by_layer_type, kind) for kind in sorted(ROWS)]
CASES += [(scaled_by_the_row, "longrope"), (counting_slots, "default")]


@pytest.fixture
def pack():
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(2, 80, (1, length), generator=generator) for length in LENGTHS]
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = {"input_ids": torch.cat(samples, dim=1), "position_ids": positions, "use_cache": False}
    return samples, inputs | {"pack_cu_seqlens": boundaries, "pack_max_seqlen": max(LENGTHS)}


def pair_of(config):
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = load_model(config, random_init=True).eval()
    model.load_state_dict(plain.state_dict())
    return plain, model


@torch.no_grad()
@pytest.mark.parametrize("knows", [True, False], ids=["lengths on the host", "lengths on the device"])
@pytest.mark.parametrize(("make", "kind"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_a_pack_equals_its_samples_alone(pack, make, kind, knows):
    samples, inputs = pack
    plain, model = pair_of(make(kind))
    assert reads_rows(model) == (kind in ROWS)
    if knows:
        inputs["pack_segments"] = segments_of(inputs["pack_cu_seqlens"], inputs["position_ids"])
    for _ in range(2):  # once more, after the longest row
        parts = model(**inputs).logits.split(LENGTHS, dim=1)
        for part, sample in zip(parts, samples, strict=True):
            alone = copy.deepcopy(plain)(sample, use_cache=False).logits
            torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_whole_rows_would_differ(pack):
    """The lengths of the samples tell the cases apart: as one row of one segment, angles are others."""
    _, inputs = pack
    plain, _ = pair_of(of_all_layers("longrope"))
    angles = plain.model.rotary_emb(torch.zeros(1), inputs["position_ids"])[0].split(LENGTHS, dim=1)
    alone = plain.model.rotary_emb(torch.zeros(1), inputs["position_ids"][:, : LENGTHS[0]])[0]
    assert (angles[0] - alone).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("parts", [[(0, 30), (30, 247)], [(0, 3), (3, 200), (200, 247)]])
def test_processes_that_share_a_pack_turn_their_slots_alike(pack, parts, monkeypatch):
    _, inputs = pack
    _, model = pair_of(of_all_layers("longrope"))
    rotary, positions = model.model.rotary_emb, inputs["position_ids"]
    running = RunningPack(inputs["pack_cu_seqlens"], segments_of(inputs["pack_cu_seqlens"], positions))
    monkeypatch.setattr("headway.models.rotary.running_pack", lambda: running)
    whole = rotary(torch.zeros(1), positions)
    for start, stop in parts:
        running.local = slice(start, stop)
        for part, expected in zip(rotary(torch.zeros(1), positions[:, start:stop]), whole, strict=True):
            assert torch.equal(part, expected[:, start:stop])


def test_what_is_counted_stays():
    plain, model = (trace(each) for each in pair_of(of_all_layers("longrope")))
    assert model.rows == plain.rows
