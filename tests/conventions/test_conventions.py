"""Every expected value is derived here from a model's published sizes and the tool's own formula, written out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from headway.conventions import Step, architecture, conventions, get_convention, tool_peak
from headway.conventions.tool_peaks import plausible_peaks
from headway.count import Workload, load_cost_model
from headway.count.models import presets, shipped_models
from headway.errors import UnknownConventionError, UnknownModelError, UsageError
from headway.plugins import hooks_of_all

# Qwen3-8B: hidden 4096, 36 layers, 32 query and 8 key-value heads of 128, MLP 12288, vocabulary 151936, untied.
HIDDEN, LAYERS, QUERY, KEY, FFN, VOCAB = 4096, 36, 32 * 128, 8 * 128, 12288, 151936
LAYER = HIDDEN * (QUERY + 2 * KEY) + QUERY * HIDDEN + 3 * HIDDEN * FFN  # matrix elements
NORMS = LAYERS * (2 * HIDDEN + 2 * 128) + HIDDEN
HEAD = HIDDEN * VOCAB


def numbers(name):
    return architecture(presets()[name], name, load_cost_model(name))


def flops(convention, workload, seq_len, model="qwen3-8b", **keywords):
    bill = get_convention(convention).bill(numbers(model), Step(workload, seq_len, **keywords))
    assert bill.flops == sum(bill.parts.values())
    return bill.flops


PACK = Workload([1000, 2000, 3000], slots=8192)
SQUARES = 1000**2 + 2000**2 + 3000**2
PAIRS = sum(s * (s + 1) // 2 for s in (1000, 2000, 3000))

QWEN3_8B = {
    "useful": 6 * 6000 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * PAIRS,
    "useful-full-head": 6 * 6000 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * PAIRS,
    "hardware": 6 * 8192 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * PAIRS,
    "6nd": 6 * 8192 * (LAYERS * LAYER + NORMS + HEAD),
    "palm": 8192 * (6 * (LAYERS * LAYER + NORMS + 2 * HEAD) + 12 * LAYERS * QUERY * 8192),
    "torchtitan": 8192 * (6 * (LAYERS * LAYER + NORMS + HEAD) + 12 * LAYERS * QUERY * 8192),
    "torchtitan-2026-06": 8192 * (6 * (LAYERS * LAYER + NORMS + HEAD) + 12 * LAYERS * QUERY * 8192),
    "torchtitan-2025-12-vlm": 8192 * (6 * (LAYERS * LAYER + NORMS + HEAD) + 12 * LAYERS * QUERY * 8192),
    # 151936 is a multiple of 128 already, so that padding the vocabulary adds nothing
    "megatron-bridge": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * SQUARES,
    "megatron-bridge-2026-05": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * SQUARES,
    "megatron-bridge-2025": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * 8192**2,
    # packs by real tokens and their squares; before, and without packs, the configured rows
    "megatron-lm": 6 * 6000 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * SQUARES,
    "megatron-lm-2026-05": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * 8192**2,
    "maxtext": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * 8192**2,
    "maxtext-2026-03": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * 8192**2,
    "maxtext-2025-06": 6 * 8192 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * 8192**2,
    "lmms-engine": 6 * 6000 * (LAYERS * LAYER + 2 * HEAD) + 12 * LAYERS * QUERY * SQUARES,
    "veomni": 6 * 6000 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * SQUARES,
    "veomni-2026-07": 6 * 6000 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * SQUARES,
    "verl": 6 * 6000 * (LAYERS * LAYER + 2 * HEAD) + 6 * LAYERS * QUERY * SQUARES,
    "verl-2025-12": 6 * 6000 * (LAYERS * LAYER + 2 * HEAD) + 12 * LAYERS * QUERY * SQUARES,
    "nemo-automodel": 6 * 8192 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * 8192**2,
    "nemo-rl": 6 * 6000 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * SQUARES,
    # an output projection of hidden x hidden, which the heads fill here
    "slime": 6 * 6000 * (LAYERS * LAYER + HEAD) + 6 * LAYERS * QUERY * SQUARES,
    # keys and values of rank 32 for heads of 128 + 128, one rotary part of 64; a pair costs 192 + 128 features a head
    "miles": 6 * 6000 * (LAYERS * (LAYER - 2 * HIDDEN * KEY + 32 * (HIDDEN + 32 * 256) + HIDDEN * 64) + HEAD)
    + 3 * LAYERS * 32 * 320 * SQUARES,
    "prime-rl": 8192 * (6 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * HIDDEN * 8192),
    "llm-foundry": 8192 * (6 * (LAYERS * LAYER + NORMS + HEAD) + 12 * LAYERS * HIDDEN * 8192),
    "olmo-core": 8192 * (6 * (LAYERS * (LAYER + 2 * 128) + HIDDEN + HEAD) + 12 * LAYERS * QUERY * 8192),
    "nanochat": 8192 * (6 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * 8192),
    "trl": 8192 * (6 * (LAYERS * LAYER + HEAD) + 12 * LAYERS * QUERY * 8192),
    "trl-2026-07": 8192 * (6 * (LAYERS * LAYER + 2 * HEAD) + 12 * LAYERS * QUERY * 8192),
    # forward 4 FLOPs per pair and feature, backward 2.5 times that
    "flop-counter": 6 * 8192 * (LAYERS * LAYER + HEAD) + 14 * LAYERS * QUERY * SQUARES,
}


@pytest.mark.parametrize("name", QWEN3_8B)
def test_a_padded_pack_of_a_dense_model(name):
    assert flops(name, PACK, 8192) == QWEN3_8B[name]


def test_a_head_that_runs_on_labelled_tokens_is_billed_for_them_by_what_reads_the_cost_model():
    """Every other tool's rule has the head on every token, as that tool runs it."""
    partly = PACK.with_counts(logits=2500)
    less = {name: QWEN3_8B[name] - flops(name, partly, 8192) for name in QWEN3_8B}
    own = {"useful": 6 * 3500 * HEAD, "hardware": 6 * 5692 * HEAD, "flop-counter": 6 * 5692 * HEAD}
    assert {name: flops for name, flops in less.items() if flops} == own


def test_every_convention_is_tested():
    # FLUX's: tests/cli/test_audit_diffusion.py; those of plug-ins in their own tests
    brought = [convention for more in hooks_of_all("conventions") for convention in more]
    assert {*QWEN3_8B, "torchtitan-flux"} == {each.name for each in conventions() if each not in brought}


def test_the_readme_counts_the_rules_that_compare_shows():
    number = {32: "thirty-two"}[len(conventions("llama"))]
    readme = " ".join(Path("README.md").read_text(encoding="utf-8").split())
    assert f"shows the MFU of one step by {number} counting rules" in readme


@pytest.mark.parametrize(("seq_len", "gflops"), [(12288, 50.474024352), (8192, 40.810347936)])
def test_torchtitans_qwen3_vl_branch_gives_what_its_logs_imply(seq_len, gflops):
    # Experiments of December 2025 on Qwen3-VL-30B-A3B: "tps: 6,590 tflops: 332.64" at 12288 (text) and "tps: 1,764
    # tflops: 71.98" at 8192 (images): 50.472 to 50.475 and 40.791 to 40.819 GFLOP per token.
    per_token = flops("torchtitan-2025-12-vlm", Workload([seq_len]), seq_len, "qwen3-vl-30b-a3b") / seq_len
    assert per_token == pytest.approx(gflops * 1e9, rel=1e-9)
    tps, tflops = {12288: (6590, 332.64), 8192: (1764, 71.98)}[seq_len]
    assert (tflops - 0.005) / (tps + 0.5) < per_token / 1e12 < (tflops + 0.005) / (tps - 0.5)


def test_mixture_of_experts():
    # Qwen3-30B-A3B: hidden 2048, 48 layers, 32 / 4 heads of 128, 128 experts of 768, 8 per token.
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    active, everything, router = 3 * 2048 * 768 * 8, 3 * 2048 * 768 * 128, 2048 * 128
    head, norms, tokens = 2048 * 151936, 48 * (2 * 2048 + 256) + 2048, 4096
    square = 12 * 48 * 4096 * tokens**2
    step = Workload([tokens])

    def linear(expert):
        return 6 * tokens * (48 * (attention + expert) + head)

    model = "qwen3-30b-a3b"
    assert flops("6nd", step, tokens, model) == linear(everything + router) + 6 * tokens * norms
    assert flops("torchtitan", step, tokens, model) == linear(active + router) + 6 * tokens * norms + square
    assert flops("megatron-bridge", step, tokens, model) == linear(active) + square / 2
    assert flops("maxtext", step, tokens, model) == linear(active + router) + square / 2
    assert flops("veomni", step, tokens, model) == linear(active + router) + square
    assert flops("verl", step, tokens, model) == linear(active + router) + 6 * tokens * head + square / 2
    assert flops("trl", step, tokens, model) == linear(active + router) + square
    assert flops("trl-2026-07", step, tokens, model) == linear(active + router) + 6 * tokens * head + square
    # grouped expert products and attention's two missing halves: the counter sees the router, not the experts
    assert flops("flop-counter", step, tokens, model) == linear(router) + square * 14 // 12


def test_vision_towers():
    # Qwen3-VL-8B's tower: 1152 wide, 27 blocks of MLP 4304, 16 x 16 x 2 x 3 patches, 4 mergers of 4608 -> 4608 -> 4096.
    patches, tokens = 32 * 48, 4096
    step = Workload([tokens], images=[(1, 32, 48)])
    block = 4 * 1152**2 + 2 * 1152 * 4304
    merger = 4608 * (4608 + 4096)
    square = 12 * 27 * 1152 * patches**2

    def vision(convention, model="qwen3-vl-8b", workload=step):
        return get_convention(convention).bill(numbers(model), Step(workload, tokens)).parts.get("vision", 0)

    per_patch = 1152 * 1536 + 27 * block + 4 * merger
    assert vision("veomni") == vision("verl") == 6 * patches * per_patch + square
    assert vision("megatron-bridge") == 6 * patches * 27 * block + 6 * patches // 4 * 4 * merger + square
    assert vision("megatron-bridge-2026-05") == 6 * patches * 27 * block + 6 * patches // 4 * merger + square
    assert vision("torchtitan") == vision("maxtext") == vision("trl") == 0
    # useful: mergers per merged token; the first convolution's input needs no gradient
    assert vision("useful") == (
        4 * patches * 1152 * 1536 + 6 * patches * 27 * block + 6 * (patches // 4) * 4 * merger + square
    )
    weights = 1152 * 1536 + 1152 + 27 * (block + 3 * 1152 + 1152 + 4304 + 1152 + 4 * 1152)
    weights += 4 * (merger + 4608 + 4096) + 2 * 1152 + 3 * 2 * 4608
    assert vision("6nd") == 6 * tokens * weights
    assert vision("torchtitan-2025-12-vlm") == 6 * tokens * (weights + 2304 * 1152)  # position embeddings too


@pytest.mark.parametrize(("convention", "side"), [("veomni", 8), ("veomni-2026-07", 112)])
def test_veomni_took_qwen2_5_vls_windows_in_pixels(convention, side):
    # 28 of 32 blocks see windows of 112 pixels, 8 patches a side; the older formula has 112^2 keys per patch.
    patches = 32 * 48
    bill = get_convention(convention).bill(numbers("qwen2.5-vl-7b"), Step(Workload([4096], images=[(1, 32, 48)]), 4096))
    block, merger = 4 * 1280**2 + 3 * 1280 * 3420, 5120 * (5120 + 3584)
    attention = 12 * 1280 * (4 * patches**2 + 28 * patches * side**2)
    assert bill.parts["vision"] == 6 * patches * (32 * block + merger) + attention


def test_megatron_bridge_took_all_pictures_of_a_row_for_one():
    def vision(convention, images):
        step = Step(Workload([4096], images=images), 4096)
        return get_convention(convention).bill(numbers("qwen3-vl-8b"), step).parts["vision"]

    old = "megatron-bridge-2026-05"
    assert vision(old, [(1, 32, 32)] * 2) == vision(old, [(1, 32, 64)])
    assert vision("megatron-bridge", [(1, 32, 32)] * 2) == 2 * vision("megatron-bridge", [(1, 32, 32)])


def test_verl_takes_too_small_heads_for_qwen3_vl_4b():
    # hidden 2560, 32 heads: 80 features a head instead of the configuration's 128
    bill = get_convention("verl").bill(numbers("qwen3-vl-4b"), Step(Workload([1024]), 1024))
    assert bill.parts["attention"] == 6 * 36 * 32 * 80 * 1024**2


def test_windows():
    # Gemma-3-4B: 34 layers, every sixth full, 8 heads of 256, window 1024.
    model, tokens, window = numbers("gemma-3-4b"), 4096, 1024
    full, per_pair = 34 // 6, 8 * 256
    sliding = 34 - full
    step = Step(Workload([tokens]), tokens)

    def attention(name):
        return get_convention(name).bill(model, step).parts["attention"]

    assert attention("torchtitan") == 12 * per_pair * tokens * (full * tokens + sliding * window)
    assert attention("verl") == 6 * per_pair * tokens * (full * tokens + sliding * window)
    assert attention("maxtext") == 12 * per_pair * (full * tokens**2 / 2 + sliding * (tokens * window - window**2 / 2))
    assert attention("maxtext-2026-03") == 12 * per_pair * (full * tokens**2 / 2 + sliding * tokens * window / 2)
    keys = tokens * (window - window * (window - 1) / (2 * tokens))
    assert attention("megatron-bridge") == pytest.approx(12 * per_pair * 34 * keys, rel=1e-15)  # all layers windowed
    assert attention("megatron-lm") == 12 * per_pair * 34 * tokens**2 / 2  # none
    exact = full * tokens * (tokens + 1) // 2 + sliding * (window * (window + 1) // 2 + (tokens - window) * window)
    assert attention("useful") == 12 * per_pair * exact


def test_latent_attention_and_prediction_layers():
    # DeepSeek-V3: 61 layers, 128 heads of 128 + 64 and 128, ranks 1536 and 512, 1 prediction layer that Megatron bills.
    model, tokens = numbers("deepseek-v3"), 4096
    step = Step(Workload([tokens]), tokens)
    useful = get_convention("useful").bill(model, step).parts["linear"]
    layer = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert useful == 6 * tokens * (61 * layer + 3 * 3 * 7168 * 18432)
    megatron = get_convention("megatron-bridge").bill(model, step).parts
    extra = 2 * 7168**2 + 3 * 7168
    assert megatron["linear"] == 6 * tokens * (62 * (layer + 1536 + 512) + 3 * 3 * 7168 * 18432 + extra)
    assert megatron["head"] == 6 * tokens * 7168 * 129280 * 2
    assert megatron["attention"] == 6 * 62 * 128 * (192 + 128) * tokens**2 / 2


@pytest.mark.parametrize(
    ("convention", "model"),
    [("lmms-engine", "gemma-3-4b"), ("verl", "gpt2"), ("veomni", "gemma-3-4b"), ("nanochat", "mixtral-8x7b")],
)
def test_a_model_that_a_tool_cannot_express_has_no_number_but_a_reason(convention, model):
    bill = get_convention(convention).bill(numbers(model), Step(Workload([128]), 128))
    assert bill.flops is None
    assert bill.parts == {}
    assert "prints 0" in bill.reason or "no number" in bill.reason


def test_a_model_with_recurrent_layers_is_left_to_the_conventions_that_read_the_cost_model():
    config = {**presets()["qwen3-8b"], "layer_types": ["linear_attention", "full_attention"] * 18}
    plain = load_cost_model("qwen3-8b")
    rows = (replace(plain.rows[0], op="recurrence"), *plain.rows[1:])
    model = architecture(config, "hybrid", replace(plain, rows=rows))
    step = Step(Workload([128]), 128)
    without = {c.name for c in conventions() if c.bill(model, step).flops is None}
    counted = {"useful", "useful-full-head", "hardware", "6nd", "flop-counter"}
    assert without == {c.name for c in conventions()} - counted


def test_sizes_that_a_configuration_lacks_leave_what_the_cost_model_knows():
    model = architecture({"model_type": "t5", "d_kv": 64}, "encoder-decoder", load_cost_model("qwen3-8b"))
    step = Step(Workload([128]), 128)
    assert get_convention("useful").bill(model, step).flops == flops("useful", Workload([128]), 128)
    assert "does not give hidden_size" in get_convention("palm").bill(model, step).reason


def test_recomputation_is_the_hardwares_alone():
    step = Workload([1024])
    assert flops("hardware", step, 1024, recompute="full") > flops("hardware", step, 1024)
    assert flops("useful", step, 1024, recompute="full") == flops("useful", step, 1024)


@pytest.mark.parametrize("name", shipped_models())
def test_parameter_groups_are_disjoint_and_complete(name):
    model = numbers(name)
    ledger = load_cost_model(name)
    assert model.groups.total == ledger.params.total
    rest = model.groups.total - model.groups.experts + model.groups.active_experts
    # a copy of the blocks that no token of text meets is no expert
    apart = sum(p.numel for p in ledger.parameters if not p.active and not p.component.endswith(".experts"))
    assert rest == ledger.params.active + apart


@pytest.mark.parametrize("name", shipped_models())
def test_the_sizes_agree_with_the_trace(name):
    # The head, the projections and the experts of the traced model are what the configuration's sizes multiply to.
    model = numbers(name)
    useful = get_convention("useful").bill(model, Step(Workload([1000]), 1000)).parts
    experts = model.mlp_matrices * (model.top_k * model.expert_ffn + model.shared_ffn) + model.num_experts
    dense = model.layers * model.attention_weights + model.dense_layers * model.mlp_matrices * model.hidden * model.ffn
    assert useful["head"] == 6000 * model.hidden * model.vocab
    assert useful["linear"] == 6000 * dense
    assert useful["experts"] == 6000 * model.moe_layers * model.hidden * experts


def test_rows_are_billed_whole():
    # 10,000 tokens in rows of 8192 are two rows
    assert flops("maxtext", Workload([5000, 5000]), 8192) == 2 * flops("maxtext", Workload([8192]), 8192)


def test_versions_and_nearest_names():
    assert get_convention("Useful/1") is get_convention("useful")
    with pytest.raises(UnknownConventionError, match="Did you mean torchtitan"):
        get_convention("torch-titan")
    with pytest.raises(UnknownConventionError, match="version 1 only"):
        get_convention("useful/2")
    with pytest.raises(UsageError, match="seq_len must be at least 1"):
        Step(Workload([1]), 0)


def test_a_configuration_alone_gives_the_size_formulas_and_refuses_the_others():
    model = architecture(presets()["qwen3-8b"], "qwen3-8b")
    step = Step(Workload([128]), 128)
    assert get_convention("maxtext").bill(model, step).flops == flops("maxtext", Workload([128]), 128)
    assert "needs its cost model" in get_convention("useful").bill(model, step).reason
    with pytest.raises(UnknownModelError, match="number of parameters"):
        get_convention("palm").bill(model, step)
    with pytest.raises(UnknownModelError, match="does not give hidden_size"):
        architecture({"model_type": "vit"}, "no transformer")


PEAKS = [
    ("torchtitan", "NVIDIA H200", 989e12),
    ("torchtitan", "NVIDIA H100 PCIe", 756e12),
    ("torchtitan", "NVIDIA L40S", 312e12),  # looks for "l40s" in lower case, so that an L40S is an A100
    ("torchtitan", "NVIDIA A800-SXM4-80GB", 312e12),
    ("torchtitan", "NVIDIA H20", 148e12),
    ("torchtitan", "NVIDIA GB200", 2.5e15),
    ("torchtitan", "AMD Instinct MI355X", 2.5e15),
    ("torchtitan", "NVIDIA RTX A6000", 154.85e12),
    ("torchtitan", "NVIDIA B300 SXM6 AC", 2.25e15),
    ("torchtitan", "TPU v7", 1153.5e12),
    ("veomni", "NVIDIA GB200", 2565e12),
    ("veomni", "NVIDIA B200", 2382e12),
    ("verl", "AMD Instinct MI300X", 1307e12),
    ("nanochat", "AMD Instinct MI355X", 2.5e15),
    ("nanochat", "NVIDIA H200 PCIe", 836e12),
    ("olmo-core", "NVIDIA H200", 312e12),
    ("trl", "NVIDIA A100-SXM4-80GB", 312e12),
    ("trl", "NVIDIA A10G", 125e12),
    ("trl", "NVIDIA H100 NVL", 835e12),
    ("trl-2026-07", "NVIDIA A100-SXM4-80GB", 989.5e12),
    ("lmms-engine", "NVIDIA L40S", 181.05e12),  # found as an L40
    ("lmms-engine", "NVIDIA GeForce RTX 4090", math.inf),
    ("verl", "NVIDIA L40S", 362.05e12),
    ("veomni", "NVIDIA H200", 989e12),
    ("nanochat", "NVIDIA H200 NVL", 836e12),
    ("nanogpt", "NVIDIA H100 80GB HBM3", 312e12),
    ("", "NVIDIA H100 80GB HBM3", None),
]


@pytest.mark.parametrize(("tool", "device", "expected"), PEAKS)
def test_each_tool_has_its_own_peaks(tool, device, expected):
    assert tool_peak(tool, device).flops_per_s == expected


def test_plausible_peaks_are_finite():
    assert plausible_peaks() == sorted(plausible_peaks())
    assert {312e12, 989e12} <= set(plausible_peaks())
    assert math.inf not in plausible_peaks()
