import json
import subprocess
import sys

import pytest

LLAMA_3_1_8B_AT_8192 = 421651971833856


def record(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_llama_3_1_8b_has_the_derived_total(headway):
    # Multiply-adds of the matrices that a token meets (hidden 4096, 32 layers, 8 KV heads of 128, inner 14336,
    # vocabulary 128256): q and o, k and v, three MLP matrices; then the head. Forward, dgrad, wgrad: 2 FLOPs each.
    per_token = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    pairs = 8192 * 8193 // 2
    attention = 2 * 2 * 32 * 128 * 32 * pairs  # scores and values, 32 heads of 128, 32 layers
    linear = 2 * per_token * 8192
    assert 3 * (linear + attention) == LLAMA_3_1_8B_AT_8192

    data = record(headway("flops", "llama-3.1-8b", "--segments", 8192, "--json"))
    assert data["flops"] == {
        "total": LLAMA_3_1_8B_AT_8192,
        "forward": linear + attention,
        "dgrad": linear + 2 * attention,  # attention has no weights: both halves of its backward are input gradients
        "wgrad": linear,
        "recompute": 0,
    }


def test_the_record_has_the_documented_keys_in_order(headway):
    data = record(
        headway("flops", "qwen3-vl-8b", "--segments", "4096*3,512", "--images", "1x32x48*2", "--slots", 13000, "--json")
    )
    assert list(data) == [
        "schema_version",
        "model",
        "convention",
        "workload",
        "flops",
        "components",
        "params",
        "unknown",
    ]
    assert data["schema_version"] == 1
    assert data["model"] == "qwen3-vl-8b"
    assert data["convention"] == "useful/1"
    assert data["workload"] == {
        "segments": 4,
        "tokens": 12800,
        "slots": 13000,
        "images": 2,
        "videos": 0,
        "patches": 3072,
        "source_tokens": 0,
        "audio_clips": 0,
        "audio_frames": 0,
        "past_tokens": 0,
        "splits": {},
        "latent_patches": 0,
        "noised_patches": 0,
        "supervised": 12800,
        "logits": 12_800,
    }
    assert list(data["components"][0])[:6] == ["name", "driver", "forward", "dgrad", "wgrad", "total"]
    assert list(data["params"]) == ["total", "active", "trainable"]
    assert data["unknown"] == []
    assert sum(row["total"] for row in data["components"]) == data["flops"]["total"]
    names = {row["name"] for row in data["components"]}
    assert {"language.attention", "language.mlp", "language.head", "vision.attention", "vision.merger"} <= names


def test_costs_add_over_segments(headway):
    one = record(headway("flops", "llama-3.1-8b", "--segments", "256", "--json"))
    many = record(headway("flops", "llama-3.1-8b", "--segments", "256*32", "--json"))
    assert many["flops"] == {key: 32 * value for key, value in one["flops"].items()}


def test_modules_sum_to_the_same_total_as_components(headway):
    data = record(
        headway("flops", "qwen3-vl-8b", "--segments", 1024, "--images", "1x16x16", "--by", "module", "--json")
    )
    assert sum(row["total"] for row in data["modules"]) == data["flops"]["total"]
    assert any("layers.*" in row["name"] for row in data["modules"])


def test_frozen_vision_has_neither_gradient(headway):
    arguments = ("flops", "qwen3-vl-8b", "--segments", 1024, "--images", "1x16x16", "--json")
    frozen = record(headway(*arguments, "--freeze", "vision"))
    vision = [row for row in frozen["components"] if row["name"].startswith("vision.")]
    assert vision
    assert all(row["dgrad"] == row["wgrad"] == 0 < row["forward"] for row in vision)
    assert frozen["params"]["trainable"] < frozen["params"]["total"]


def test_lora_trains_only_the_adapters(headway):
    data = record(headway("flops", "llama-3.1-8b", "--segments", 128, "--lora", "16:q_proj,v_proj", "--json"))
    # A is rank x in, B is out x rank, in each of 32 layers: q_proj is 4096 -> 4096, v_proj 4096 -> 1024
    assert data["params"]["trainable"] == 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert data["flops"]["wgrad"] == 2 * 128 * data["params"]["trainable"]


def test_recompute_is_counted_apart(headway):
    plain = record(headway("flops", "llama-3.1-8b", "--segments", 128, "--json"))
    full = record(headway("flops", "llama-3.1-8b", "--segments", 128, "--recompute", "full", "--json"))
    assert full["flops"]["recompute"] > 0
    assert full["flops"]["total"] == plain["flops"]["total"]


def test_forward_only_is_the_forward_part(headway):
    plain = record(headway("flops", "llama-3.1-8b", "--segments", 128, "--json"))
    forward = record(headway("flops", "llama-3.1-8b", "--segments", 128, "--forward-only", "--json"))
    assert forward["flops"]["total"] == forward["flops"]["forward"] == plain["flops"]["forward"]


def test_a_decode_step_attends_over_its_past(headway):
    step = ["llama-3.1-8b", "--segments", "1*64", "--forward-only", "--json"]
    empty, late = record(headway("flops", *step)), record(headway("flops", *step, "--past", "4096*63,0"))
    assert late["workload"]["past_tokens"] == 4096 * 63
    # one query of 32 heads of 128 over 4,096 more keys, in each of 32 layers
    assert late["flops"]["total"] - empty["flops"]["total"] == 63 * 4096 * 32 * 2 * 32 * (128 + 128)


def test_a_reference_model_runs_forward_only(headway):
    step = ["--segments", "1800,1500", "--json"]
    policy = record(headway("flops", "qwen3-8b", *step, "--lora", 16, "--recompute", "full"))
    other = record(headway("flops", "llama-3.1-8b", *step, "--forward-only"))
    both = headway("flops", "qwen3-8b", *step, "--lora", 16, "--recompute", "full", "--reference", "llama-3.1-8b")
    data = record(both)
    assert data["flops"] == {phase: n + other["flops"][phase] for phase, n in policy["flops"].items()}
    assert sum(row["total"] for row in data["components"]) == data["flops"]["total"]
    reference = [row for row in data["components"] if row["name"].startswith("reference.language.")]
    assert sum(row["forward"] for row in reference) == other["flops"]["forward"]
    assert data["reference"] == {"model": "llama-3.1-8b", "unknown": []}
    assert data["params"] == policy["params"]
    table = headway("flops", "qwen3-8b", "--segments", "64", "--reference", "qwen3-8b", "--by", "module").out
    assert "reference.model.layers.*.mlp.up_proj" in table
    assert "reference   qwen3-8b, forward only" in table


def test_the_table_states_total_workload_parameters_and_convention(headway):
    result = headway(
        "flops", "qwen3-vl-8b", "--segments", "2048", "--images", "1x32x48", "--slots", "2560", "--recompute", "full"
    )
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["component", "driver", "forward", "dgrad", "wgrad", "total", "share"]
    assert any(line.startswith("vision.attention") and "patch_pairs:frame" in line for line in lines)
    assert "1 segment, 2,048 tokens, 2,560 slots (padding 20.0 %), 1 image, 1,536 patches" in result.out
    assert "convention  useful/1; a multiply-add is 2 FLOPs" in result.out
    assert "recompute" in result.out
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in result.out


def test_the_table_by_module_names_modules(headway):
    result = headway("flops", "llama-3.1-8b", "--segments", "8", "--by", "module")
    assert result.out.startswith("module")
    assert "model.layers.*.self_attn.q_proj" in result.out


@pytest.mark.parametrize("name", ["LLAMA-3.1-8B", "llama-3.1-8b"])
@pytest.mark.parametrize("convention", ["useful", "useful/1"])
def test_names_of_models_ignore_case_and_conventions_may_drop_the_version(headway, name, convention):
    data = record(headway("flops", name, "--segments", 8192, "--convention", convention, "--json"))
    assert data["flops"]["total"] == LLAMA_3_1_8B_AT_8192


def test_another_convention_is_printed_part_by_part(headway):
    arguments = ("flops", "llama-3.1-8b", "--segments", "4096*2", "--convention", "maxtext-2025-06", "--seq-len", 4096)
    data = record(headway(*arguments, "--json"))
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert {part["name"]: part["total"] for part in data["components"]} == {
        "linear": 6 * 8192 * weights,
        "head": 6 * 8192 * 4096 * 128256,
        "attention": 12 * 32 * 4096 * 2 * 4096**2,
    }
    assert data["convention"] == "maxtext-2025-06/2025-06"
    assert data["flops"]["total"] == sum(part["total"] for part in data["components"])
    table = headway(*arguments).out
    assert "8,192 token positions; row length 4,096" in table
    assert f"bills {data['ratio_to_useful']:.3f} times that" in table


def test_a_row_length_alone_is_one_sample_of_it(headway):
    by_length, by_segment = (
        headway("flops", "qwen3-8b", option, 4096, "--json") for option in ("--seq-len", "--segments")
    )
    assert by_length.code == 0, by_length.err
    assert by_length.out == by_segment.out
    tool = headway("flops", "llama-3.1-8b", "--seq-len", 4096, "--convention", "maxtext-2025-06", "--json")
    assert json.loads(tool.out)["seq_len"] == json.loads(tool.out)["workload"]["tokens"] == 4096


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("llama-3-8b", "llama-3.1-8b"), ("qwen3vl-8b", "qwen3-vl-8b"), ("mixtral8x7b", "mixtral-8x7b")],
)
def test_an_unknown_model_gets_the_nearest_names(headway, name, nearest):
    result = headway("flops", name, "--segments", "8")
    assert result.code == 2
    assert repr(name) in result.err
    assert nearest in result.err


def test_help_documents_every_option(headway):
    text = " ".join(headway("flops", "--help").out.split())
    for option in (
        "--segments", "--images", "--videos", "--slots", "--freeze", "--lora", "--recompute", "--forward-only",
        "--past", "--reference",
        "--convention", "--by", "--json",
    ):  # fmt: skip
        assert option in text
    for unit in ("[tokens]", "[patches, before merging]"):
        assert unit in text


def test_a_shipped_model_is_counted_without_torch():
    code = (
        "import sys; from headway.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e:\n"
        "    print(int(e.code), *sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "flops", "llama-3.1-8b", "--segments", "8192", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "0\n"
    assert json.loads(done.stdout)["flops"]["total"] == LLAMA_3_1_8B_AT_8192


def test_a_causal_model_is_counted_under_splits_and_says_so(headway):
    result = headway("flops", "llama-3.1-8b", "--splits", "(full:100,causal:28)*2", "--json")
    assert "own mask is causal" in result.err
    attention = next(row for row in record(result)["components"] if row["name"] == "language.attention")
    assert attention["total"] == 12 * 32 * 4096 * 2 * (100**2 + 28 * 100 + 28 * 29 // 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-3.1-8b", "--splits", "full:8", "--segments", 9], "8 tokens, but the segment has 9"),
        (["llama-3.1-8b", "--segments", 9, "--supervised", 3], "--supervised 3 has no effect"),
        (["llama-3.1-8b", "--splits", "noise:8", "--latents", "2x2"], "takes no latents"),
        (["gemma-3-4b", "--splits", "full:8,causal:3"], "cannot be counted under splits"),
    ],
)
def test_splits_that_cannot_take_effect_are_refused(headway, arguments, said):
    result = headway("flops", *arguments)
    assert result.code != 0
    assert said in " ".join(result.err.split())
