"""Sizes are read off configurations and settled by ledgers; witnesses are the tools' own functions, run on them.

The numbers marked as a witness were computed once by calling the function of the tool that the comment names, at the
commit that the convention's docstring names, on an object with these sizes; none of its code is here.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.conventions import Step, architecture, get_convention
from headway.conventions.reading import decoder
from headway.count import Workload, load_cost_model
from headway.count.models import presets, shipped_models
from headway.errors import UnknownConventionError, UnknownModelError
from helpers.cases import some

_PUBLISHED = json.loads((Path(__file__).parents[1] / "count" / "published_models.json").read_text(encoding="utf-8"))
GEMMA2_9B, LLAMA4_SCOUT = _PUBLISHED["gemma-2-9b"], _PUBLISHED["llama-4-scout (text)"]
MINITRON_4B, QWEN2_VL_7B = _PUBLISHED["minitron-4b"], _PUBLISHED["qwen2-vl-7b"]


def bill(model, convention, workload, seq_len):
    return get_convention(convention).bill(model, Step(workload, seq_len))


def trusted(config, name):
    """Read a configuration alone, of a type that no shipped ledger shows to be read rightly."""
    read = architecture(config, name)
    assert "no ledger of the type" in read.unread
    return replace(read, unread="")


def like_a_ledger(model, **changes):
    """A stored ledger whose rows are rescaled to what other sizes of the same layers would cost."""
    cost_model = load_cost_model(model)
    rows = tuple(
        replace(row, forward=row.forward * changes[row.component][0] // changes[row.component][1])
        if row.component in changes
        else row
        for row in cost_model.rows
    )
    return replace(cost_model, rows=rows)


@pytest.mark.parametrize("name", shipped_models())
def test_what_a_configuration_alone_says_is_what_the_ledger_says(name):
    settled = architecture(presets()[name], name, load_cost_model(name))
    assert settled.unread == ""
    assert settled.feed_forward_weights == decoder(load_cost_model(name)).feed_forward
    alone = architecture(presets()[name], name)
    if alone.unread:  # GPT-2 and Gemma-3 do not say whether there is a gate, Mistral not which layers have the window
        assert "its cost model would tell" in alone.unread
    else:
        assert replace(settled, cost_model=None) == alone
        assert bill(alone, "maxtext", Workload([512]), 512) == bill(settled, "maxtext", Workload([512]), 512)


def test_llama_4s_shared_expert_interleaving_and_chunks():
    model = trusted(LLAMA4_SCOUT, "llama4-scout")
    # witness: MaxText's calculate_tflops_training_per_device
    assert bill(model, "maxtext", Workload([8192]), 8192).flops == 892_166_712_852_480
    # by hand: 36 of 48 layers stay in chunks of 8192, two of which a row of 16384 has
    halves = 12 * 16384**2 / 2 + 36 * 2 * 8192**2 / 2
    assert bill(model, "maxtext", Workload([16384]), 16384).parts["attention"] == 12 * 40 * 128 * halves
    maverick = trusted({**LLAMA4_SCOUT, "interleave_moe_layer_step": 2, "num_local_experts": 128}, "maverick")
    assert (maverick.moe_layers, maverick.dense_layers) == (24, 24)
    assert (maverick.ffn, maverick.expert_ffn, maverick.shared_ffn) == (16384, 8192, 8192)


def test_the_ledger_says_which_layers_a_window_is_for():
    alone = architecture(GEMMA2_9B, "gemma2-9b")
    assert "only its class says which layers" in alone.unread
    assert "only its class says" in bill(alone, "maxtext", Workload([8192]), 8192).reason
    gemma3 = architecture(
        {k: v for k, v in presets()["gemma-3-4b"].items() if k != "layer_types"},
        "gemma-3-4b",
        load_cost_model("gemma-3-4b"),
    )
    assert gemma3.windows == architecture(presets()["gemma-3-4b"], "x", load_cost_model("gemma-3-4b")).windows
    # witness: MaxText's function, with the layers that Gemma 2's class makes
    windows = tuple(None if i % 2 else 4096 for i in range(42))
    gemma2 = replace(alone, unread="", windows=windows)
    assert bill(gemma2, "maxtext", Workload([8192]), 8192).flops == 514_829_139_836_928


def test_qwen2_has_its_window_from_max_window_layers_on():
    config = {**presets()["qwen2.5-7b"], "sliding_window": 4096, "max_window_layers": 20}
    assert architecture(config, "off").windows == (None,) * 28
    on = architecture({**config, "use_sliding_window": True}, "on")
    assert on.windows == (None,) * 20 + (4096,) * 8


def test_an_mlp_without_a_gate_is_seen_in_the_ledger_and_guessed_nowhere():
    # Minitron's MLPs are two matrices: the ledger of GPT-2 shows the same of its own.
    assert not architecture(presets()["gpt2"], "gpt2", load_cost_model("gpt2")).gated
    alone = architecture(MINITRON_4B, "minitron-4b")
    assert "whether its MLP has a gate (hidden_act is 'relu2')" in alone.unread
    # witness: Megatron-Bridge's num_floating_point_operations with gated_linear_unit=False
    model = replace(alone, unread="", gated=False)
    assert bill(model, "megatron-bridge", Workload([4096]), 4096).flops == 93_544_387_706_880


@pytest.mark.parametrize(
    ("component", "share", "quoted"),
    [
        ("language.mlp", (5, 2), "weights that one token meets in MLPs, experts and routers"),
        ("language.projections", (1, 2), "weights of attention projections"),
        ("language.attention", (2, 1), "features of a query-key pair"),
    ],
)
def test_sizes_that_do_not_make_the_ledger_are_refused_with_the_reason(component, share, quoted):
    model = architecture(presets()["qwen3-8b"], "odd", like_a_ledger("qwen3-8b", **{component: share}))
    for convention in ("maxtext", "trl", "lmms-engine", "torchtitan"):
        refused = bill(model, convention, Workload([128]), 128)
        assert refused.flops is None
        assert quoted in refused.reason
    assert bill(model, "useful", Workload([128]), 128).flops
    masked = tuple(
        replace(row, driver="pairs:topk:64") if row.op == "attention" else row
        for row in load_cost_model("qwen3-8b").rows
    )
    sparse = architecture(presets()["qwen3-8b"], "odd", replace(load_cost_model("qwen3-8b"), rows=masked))
    assert "attend over pairs:topk:64, which no formula here has" in bill(sparse, "trl", Workload([128]), 128).reason
    fewer = architecture({**presets()["qwen3-8b"], "num_hidden_layers": 35}, "odd", load_cost_model("qwen3-8b"))
    assert "35 layers where the model's code runs attention in 36" in fewer.unread


def test_experts_are_held_against_the_ledgers():
    config, ledger = presets()["qwen3-30b-a3b"], load_cost_model("qwen3-30b-a3b")
    assert (decoder(ledger).expert_layers, architecture(config, "moe", ledger).moe_layers) == (48, 48)
    # a dense MLP is as wide as eight of its experts, so that a layer more of them hardly changes the weights
    shifted = architecture({**config, "mlp_only_layers": [0]}, "shifted", ledger)
    assert "47 layers with experts where the model's code has 48" in shifted.unread
    # twelve picks of two matrices would be as many weights as eight of three
    twelve = architecture({**config, "num_experts_per_tok": 12}, "twelve", ledger)
    assert "where the model's code has" in twelve.unread


def test_expert_layers_have_a_first_a_last_and_a_step():
    config = {**presets()["qwen3-30b-a3b"], "num_hidden_layers": 12, "decoder_sparse_step": None}
    spread = {**config, "moe_layer_start_index": 3, "moe_layer_end_index": 8, "moe_layer_interval": 2}
    assert architecture(spread, "ernie").moe_layers == 3  # 3, 5 and 7, whose successors are even
    assert architecture({**config, "num_dense_layers": 5}, "afmoe").moe_layers == 7


def test_adapters_do_not_change_what_the_sizes_are_held_against():
    config = presets()["qwen3-8b"]
    assert architecture(config, "lora", load_cost_model("qwen3-8b").lora(64)).unread == ""


def test_a_size_that_differs_by_layer_is_named():
    with pytest.raises(UnknownModelError, match=r"gives intermediate_size as \[1, 2\]"):
        architecture({**presets()["qwen3-8b"], "intermediate_size": [1, 2]}, "by layer")


def test_qwen2_vls_tower_has_names_of_its_own():
    model = trusted(QWEN2_VL_7B, "qwen2-vl-7b")
    tower = model.vision
    assert (tower.hidden, tower.ffn, tower.out, tower.gated) == (1280, 5120, 3584, False)
    step = Workload([2000], [(1, 32, 48)])
    # witness: VeOmni's VeomniFlopsCounter.estimate_flops
    assert bill(model, "veomni", step, 2000).flops == 97_028_879_155_200
    assert bill(model, "megatron-bridge", step, 2000).parts["vision"] > 0
    assert "verl reads intermediate_size of the tower" in bill(model, "verl", step, 2000).reason  # AttributeError there
    assert bill(model, "verl", Workload([2000]), 2000).flops  # without pictures it does not look at the tower


def test_a_tower_that_no_formula_can_express_is_said_to_be_left_out():
    config = {**presets()["qwen3-8b"], "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}}
    model = architecture(config, "siglip", load_cost_model("qwen3-8b"))
    pictures = Workload([4096], [(1, 32, 48)])
    note = "the vision tower is left out: vision_config does not give depth"
    assert bill(model, "megatron-bridge", pictures, 4096).note == note
    assert bill(model, "megatron-bridge", Workload([4096]), 4096).note == ""
    assert bill(model, "torchtitan", pictures, 4096).note == ""  # bills no tower of any model


def shipped(name):
    return architecture(presets()[name], name, load_cost_model(name))


def test_megatron_bridges_frames_since_august_2026_and_before():
    # witness: Megatron-Bridge's num_floating_point_operations and vit_flops_from_grid_thw, Qwen3-VL-8B
    model, video = shipped("qwen3-vl-8b"), Workload([3200], videos=[(8, 32, 48)])
    new, old = bill(model, "megatron-bridge", video, 3200), bill(model, "megatron-bridge-2026-05", video, 3200)
    assert (new.flops, new.parts["vision"]) == (194_676_472_676_352, 40_309_308_260_352)
    assert (old.flops, old.parts["vision"]) == (241_772_399_689_728, 87_405_235_273_728)
    images = Workload([3200], [(1, 64, 64), (1, 32, 48)])
    assert bill(model, "megatron-bridge", images, 3200).parts["vision"] == 22_388_888_567_808
    assert bill(model, "megatron-bridge-2026-05", images, 3200).parts["vision"] == 26_068_937_342_976


def test_veomnis_windows_since_7_august_2026_and_before():
    # witness: VeOmni's VeomniFlopsCounter.estimate_flops, Qwen2.5-VL-7B
    model, step = shipped("qwen2.5-vl-7b"), Workload([1000], [(1, 36, 50)])
    new, old = bill(model, "veomni", step, 1000), bill(model, "veomni-2026-07", step, 1000)
    assert (new.flops, new.parts["vision"]) == (51_159_465_984_000, 7_533_527_040_000)
    assert (old.flops, old.parts["vision"]) == (60_820_783_104_000, 17_194_844_160_000)


# witness: VeOmni's VeomniFlopsCounter.estimate_flops on 1,000 tokens and one image of 1,800 patches: all trained, with
# freeze_vit, and with a VeOmniLoraConfig of rank 16 on q_proj and v_proj
VEOMNI_SETUPS = {
    "qwen3-vl-8b": (54_578_717_491_200, 49_644_942_950_400, 34_554_754_662_400),
    "qwen3-vl-30b-a3b": (27_602_212_454_400, 22_940_228_812_800, 16_897_023_180_800),
    "qwen2.5-vl-7b": (51_159_465_984_000, 46_137_114_624_000, 32_026_820_608_000),
}


@pytest.mark.parametrize("name", VEOMNI_SETUPS)
def test_veomni_bills_frozen_towers_and_what_lies_below_adapters_at_less(name):
    whole = load_cost_model(name)
    step = Workload([1000], [(1, 36, 50)])
    for ledger, flops in zip(
        (whole, whole.freeze(["vision"]), whole.lora(16, ["q_proj", "v_proj"])), VEOMNI_SETUPS[name], strict=True
    ):
        model = architecture(presets()[name], name, ledger)
        assert bill(model, "veomni", step, 1000).flops == flops
        assert (
            bill(model, "veomni-2026-07", step, 1000).parts == bill(shipped(name), "veomni-2026-07", step, 1000).parts
        )
    # it has no setting for a language model, or a part of the tower, that is frozen: those are billed as trained
    part = architecture(presets()[name], name, whole.freeze(["language", "vision.mlp"]))
    assert bill(part, "veomni", step, 1000).flops == VEOMNI_SETUPS[name][0]


_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "rank", "targets", "step", "flops"),
    [  # witness: VeomniFlopsCounter.estimate_flops with a VeOmniLoraConfig of this rank and these target_modules
        ("qwen3-8b", 64, _LAYER, Workload([1000, 2000]), 102_807_109_632_000),
        ("qwen3-30b-a3b", 32, ("q_proj", "o_proj"), Workload([4096]), 89_880_780_603_392),
        (
            "qwen3-vl-8b",
            8,
            ("qkv", "proj", "linear_fc1", "linear_fc2"),
            Workload([3200], videos=[(2, 32, 48)]),
            123_867_271_528_448,
        ),
        (
            "qwen2.5-vl-7b",
            8,
            (*_LAYER, "qkv", "proj", "*.mlp.0", "*.mlp.2"),
            Workload([3200], [(1, 32, 48)]),
            107_602_789_793_792,
        ),
    ],
)
def test_veomni_bills_adapters_of_either_tower(name, rank, targets, step, flops):
    model = architecture(presets()[name], name, load_cost_model(name).lora(rank, targets))
    assert bill(model, "veomni", step, step.slots).flops == flops


@pytest.mark.parametrize(
    ("name", "targets", "reason"),
    [
        ("llama-3.1-8b", ["q_proj"], "no LoRA rule for the model type 'llama': it prints 0"),
        ("qwen3-8b", ["q_proj", "lm_head"], "does not know adapters on lm_head: it prints 0"),
        ("qwen3-8b", ["model.layers.0.*"], "every module of a name, but model.layers.1.mlp.down_proj has none"),
        ("qwen2.5-vl-7b", ["model.language_model.*"], "but model.visual.blocks.0.mlp.down_proj has none"),
    ],
)
def test_adapters_that_veomnis_rule_cannot_be_told_of_have_no_number(name, targets, reason):
    model = architecture(presets()[name], name, load_cost_model(name).lora(8, targets))
    assert reason in bill(model, "veomni", Workload([100]), 100).reason


@pytest.mark.parametrize(
    ("name", "lengths", "flops"),
    [  # witness: LMMs-Engine 0.1.4's FlopsCounter.estimate_flops, its raw FLOPs
        ("qwen3-vl-8b", [1000, 2200], 167_589_917_491_200),
        ("qwen3-vl-30b-a3b", [1000, 2200], 78_152_466_432_000),
        ("qwen2.5-vl-7b", [1000, 2200], 153_246_105_600_000),
        ("deepseek-v3", [1000, 2200], 826_043_950_694_400),
    ],
)
def test_lmms_engine_bills_the_language_model_of_every_type_that_it_lists(name, lengths, flops):
    assert bill(shipped(name), "lmms-engine", Workload(lengths), 4096).flops == flops


def test_qwen2_moes_shared_expert_is_in_no_formula_of_verls_kind():
    config = {**presets()["qwen3-30b-a3b"], "model_type": "qwen2_moe"}
    config.update(hidden_act="silu", shared_expert_intermediate_size=5632)
    with_shared = trusted(config, "qwen2-moe")
    without = replace(with_shared, shared_ffn=0)
    for convention in ("lmms-engine", "verl", "verl-2025-12"):
        bills = [bill(model, convention, Workload([100]), 100) for model in (with_shared, without)]
        assert bills[0].flops
        assert bills[0].parts == bills[1].parts
    megatron = [bill(model, "megatron-bridge", Workload([100]), 100).flops for model in (with_shared, without)]
    assert megatron[0] - megatron[1] == 6 * 100 * 48 * 3 * 2048 * 5632


def test_trl_bills_the_router():
    # witness: TRL's compute_flops_per_token x 4096, Qwen3-30B-A3B
    assert bill(shipped("qwen3-30b-a3b"), "trl", Workload([4096]), 4096).flops == 114_334_176_903_168
    # it reads keys that these configurations do not have, as objects of transformers either
    missing = {
        "trl": {"deepseek-v3": "decoder_sparse_step", "mixtral-8x7b": "moe_intermediate_size",
                "gpt2": "num_key_value_heads"},
        "trl-2026-07": {"deepseek-v3": "decoder_sparse_step", "mixtral-8x7b": "head_dim", "gpt2": "head_dim",
                        "qwen2.5-7b": "head_dim", "qwen3-vl-8b": "hidden_size at the top"},
    }  # fmt: skip
    for rule, models in missing.items():
        for name, key in models.items():
            assert f"TRL reads {key} of" in bill(shipped(name), rule, Workload([4096]), 4096).reason


def test_trl_bills_what_the_installed_release_does():
    """TRL's own function of the installed release, on objects of the installed transformers."""
    transformers = pytest.importorskip("transformers")
    theirs = pytest.importorskip("trl.trainer.utils").compute_flops_per_token
    numbers = 0
    for name in shipped_models():
        config = dict(presets()[name])
        if config["model_type"] not in transformers.CONFIG_MAPPING:
            continue
        theirs_of = transformers.AutoConfig.for_model(config.pop("model_type"), **config).get_text_config()
        try:
            expected = 4096 * theirs(theirs_of, 4096)
        except AttributeError:
            expected = None
        assert bill(shipped(name), "trl", Workload([4096]), 4096).flops == expected, name
        numbers += expected is not None
    assert numbers >= 10


def test_a_release_names_the_rule_that_it_prints_by():
    assert get_convention("trl/1.16.0").name == "trl"
    assert get_convention("megatron-bridge/0.6.2").name == "megatron-bridge-2026-05"
    with pytest.raises(UnknownConventionError, match=r"Of its tool's releases 0.3.0 is known.*'torchtitan/0.3.0'"):
        get_convention("torchtitan/9.9")


def test_automodel_has_no_number_for_a_tower_wherever_the_sizes_stand():
    flat = dict(presets()["qwen2.5-vl-7b"])
    flat |= flat.pop("text_config", {})  # as the published config.json has them
    for config in (presets()["qwen2.5-vl-7b"], flat | {"model_type": "qwen2_5_vl"}):
        model = architecture(config, "vl", load_cost_model("qwen2.5-vl-7b"))
        assert "it prints no MFU" in get_convention("nemo-automodel").bill(model, Step(Workload([4096]), 4096)).reason


def test_nanochat_counts_weights_of_linear_modules_alone():
    # witness: nanochat's estimate_flops x 2048, Llama-3.1-8B's sizes
    assert bill(shipped("llama-3.1-8b"), "nanochat", Workload([2048]), 2048).flops == 98_814_312_579_072


def test_olmo_core_counts_the_norms_that_its_modules_hold():
    # by hand, Qwen3-8B: projections, MLPs, the norms of queries and keys, and the head with the last norm
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * 128
    weights = 36 * layer + 4096 + 4096 * 151936
    expected = 2048 * (6 * weights + 12 * 36 * 4096 * 2048)
    assert bill(shipped("qwen3-8b"), "olmo-core", Workload([2048]), 2048).flops == expected


def test_windows_were_billed_in_full_by_torchtitan_until_august_2026():
    model, step = shipped("gemma-3-4b"), Workload([4096])
    old = bill(model, "torchtitan-2026-06", step, 4096).parts
    new = bill(model, "torchtitan", step, 4096).parts
    assert old["attention"] == 12 * 34 * 8 * 256 * 4096**2
    assert new["attention"] < old["attention"]
    assert new["linear"] == old["linear"]


# What the code of small models of these families does: layers' windows, gate, key-value heads, layers with experts
TRACED = {
    "gemma2": ({"head_dim": 16, "sliding_window": 32}, (32, None, 32, None), True, 2, 0),
    "nemotron": ({"head_dim": 16}, (None,) * 4, False, 2, 0),
    "arcee": ({}, (None,) * 4, False, 2, 0),
    "qwen2_moe": (
        {
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        (None,) * 4, True, 2, 4,
    ),
    "ernie4_5_moe": (
        {
            "moe_intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 0,
            "moe_layer_start_index": 1,
        },
        (None,) * 4, True, 2, 3,
    ),
    "gpt_neo": (
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
        (None, 16, None, 16), False, 4, 0,
    ),
    "gpt_bigcode": ({"n_embd": 64, "n_layer": 4, "n_head": 4}, (None,) * 4, False, 1, 0),
    "mpt": ({"d_model": 64, "n_layers": 4, "n_heads": 4}, (None,) * 4, False, 4, 0),
}  # fmt: skip


@pytest.mark.parametrize("model_type", some(sorted(TRACED), lambda name: name == "gpt_neo"))
def test_families_that_a_configuration_does_not_describe_are_read_off_their_code(model_type):
    transformers = pytest.importorskip("transformers")
    from headway.tracing import trace

    given, windows, gated, kv_heads, moe_layers = TRACED[model_type]
    sizes = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    if not {"n_embd", "d_model", "num_layers"} & set(given):
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
    config = transformers.AutoConfig.for_model(
        model_type, **({} if {"n_embd", "d_model"} & set(given) else {"hidden_size": 64}), **sizes, **given
    )
    model = architecture(config.to_dict(), model_type, trace(config))
    assert model.unread == ""
    assert (model.windows, model.gated, model.kv_heads, model.moe_layers) == (windows, gated, kv_heads, moe_layers)
    useful = bill(model, "useful", Workload([8]), 8).parts
    assert bill(model, "maxtext", Workload([8]), 8).parts["linear"] == useful["linear"]


@pytest.mark.parametrize(("tokens_per_s", "printed", "rows"), [(25, 0.08, 4096), (35, 0.14, 8192), (34, 0.14, 8192)])
def test_the_first_experiments_of_torchtitans_page_are_billed_for_rows_of_two_lengths(tokens_per_s, printed, rows):
    model = shipped("qwen3-vl-30b-a3b")
    fitting = []
    for length in (4096, 8192):
        flops = bill(model, "torchtitan-2025-12-vlm", Workload([8192]), length).flops / 8192
        fitting += [length] if round(100 * tokens_per_s * flops / 989e12, 2) == printed else []
    assert fitting == [rows]


def test_qwen35s_attention_does_not_explain_what_megatron_bridges_page_says():
    # 8 of 32 layers attend, 16 heads of 256 features, half the square; 48.7 GFLOP a token by the traced ledger
    attention, everything = 6 * 8 * 16 * 256 * 4096, 48.7e9
    explained = everything / (everything - attention)
    assert explained == pytest.approx(1.017, abs=5e-4)
    assert 4096 / (261.6 / 88.9 / explained) == pytest.approx(1415, abs=2)


@pytest.mark.parametrize(
    ("rows", "mfu", "step_s"),
    [(1, 0.027, 0.040), (8, 0.09, 0.093), (8, 0.12, 0.074), (8, 0.17, 0.050), (16, 0.16, 0.104)],
)
def test_mfu_trackers_table_is_of_rows_of_some_140_tokens(rows, mfu, step_s):
    of_a_row = mfu * step_s * 97.5e12 / rows
    useful = {length: load_cost_model("gpt2").count(Workload([length])).total for length in (135, 145, 1024)}
    assert useful[135] * 0.99 <= of_a_row <= useful[145]
    assert useful[1024] > 7 * of_a_row
