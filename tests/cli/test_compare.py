import json
import subprocess
import sys

import pytest


def record(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


STEP = ("--segments", "512*16", "--device", "H100", "--step-time", "0.5")


def by_name(data):
    return {row["name"]: row for row in data["conventions"]}


def test_one_step_in_every_convention(headway):
    data = record(headway("compare", "llama-3.1-8b", *STEP, "--json"))
    assert list(data) == [
        "schema_version", "model", "workload", "seq_len", "step_s", "ranks", "device", "conventions", "forward_macs"
    ]  # fmt: skip
    rows = by_name(data)
    # Llama-3.1-8B: hidden 4096, 32 layers, 8 key-value heads of 128, MLP 14336, vocabulary 128256
    linear = 6 * 8192 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256)
    assert rows["useful"]["flops"] == linear + 12 * 32 * 4096 * 16 * 512 * 513 // 2
    assert data["forward_macs"] == rows["useful"]["flops"] // 6  # a multiply-add is two FLOPs, forward a third of them
    assert rows["maxtext-2025-06"]["flops"] == linear + 12 * 32 * 4096 * 8192**2
    assert rows["useful"]["mfu"] == pytest.approx(rows["useful"]["flops"] / 0.5 / 989.4e12)
    assert rows["torchtitan"]["mfu"] == pytest.approx(rows["torchtitan"]["flops"] / 0.5 / 989e12)
    assert rows["palm"]["peak_flops_per_s"] == 312e12
    for row in rows.values():
        assert row["ratio_to_useful"] == pytest.approx(row["flops"] / rows["useful"]["flops"])
        assert row["flops"] == sum(row["parts"].values())
        assert row["why"]


def test_ranks_share_the_step(headway):
    one = by_name(record(headway("compare", "llama-3.1-8b", *STEP, "--json")))
    data = record(headway("compare", "llama-3.1-8b", *STEP, "--ranks", 4, "--seq-len", 8192, "--json"))
    assert by_name(data)["torchtitan"]["flops"] == one["torchtitan"]["flops"]
    assert by_name(data)["torchtitan"]["mfu"] == pytest.approx(one["torchtitan"]["mfu"] / 4)
    # without --seq-len a rank's share of the slots is one row
    assert record(headway("compare", "llama-3.1-8b", *STEP, "--ranks", 4, "--json"))["seq_len"] == 2048


def test_padding_is_billed_by_those_who_bill_slots(headway):
    data = record(headway("compare", "qwen3-8b", "--segments", "3000", "--slots", "4096", *STEP[2:], "--json"))
    tokens = {row["name"]: row["tokens_billed"] for row in data["conventions"]}
    assert tokens["useful"] == tokens["verl"] == 3000
    assert tokens["torchtitan"] == tokens["megatron-bridge"] == tokens["hardware"] == 4096


def test_a_convention_without_a_number_says_so(headway):
    data = record(headway("compare", "gpt2", *STEP, "--json"))
    assert by_name(data)["verl"]["flops"] is None
    assert "does not list the model type 'gpt2'" in by_name(data)["verl"]["why"]


def test_a_device_that_a_tool_does_not_know(headway):
    result = headway("compare", "qwen3-8b", "--segments", "1024", "--device", "1e14", "--step-time", 1)
    lines = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert "unknown" in lines["verl"] or "infinite peak" in lines["verl"]
    data = by_name(
        record(headway("compare", "qwen3-8b", "--segments", 1024, "--device", "1e14", "--step-time", 1, "--json"))
    )
    assert data["verl"]["mfu"] == 0.0
    assert data["verl"]["peak_flops_per_s"] is None
    assert data["torchtitan"]["peak_flops_per_s"] == 312e12


def test_the_table(headway):
    result = headway("compare", "qwen3-vl-8b", "--segments", "4096", "--images", "1x32x48", "--device", "H200",
                     "--step-time", 0.6)  # fmt: skip
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["convention", "FLOPs", "TFLOP/s", "peak", "MFU", "x", "useful"]
    assert "NVIDIA H200 x 1, 989.4 TFLOP/s each" in result.out
    assert "vision -" in next(line for line in lines if line.startswith("maxtext ") and "vision free" in line)


def test_equal_segments_without_a_row_length_are_noted(headway):
    arguments = ("llama-3.1-8b", "--segments", "2048*4")
    for command in (
        ("compare", *arguments, "--device", "H100", "--step-time", 1),
        ("flops", *arguments, "--convention", "maxtext"),
    ):
        assert "If each segment is a row, give --seq-len 2048" in " ".join(headway(*command).err.split())
        assert "Note:" not in headway(*command, "--seq-len", 2048).err
    assert "Note:" not in headway("flops", *arguments, "--convention", "verl").err


def test_an_impossible_mfu_is_printed_and_explained(headway):
    result = headway("compare", "qwen3-8b", "--segments", "8192*64", "--device", "H100", "--step-time", "0.1", "--json")
    assert by_name(json.loads(result.out))["useful"]["mfu"] > 1
    assert "a useful MFU above 100 % is impossible. Likely causes" in result.err
    assert result.code == 1


def test_compare_needs_no_torch():
    code = (
        "import sys; from headway.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e:\n"
        "    print(int(e.code), *sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    arguments = ["compare", "qwen3-vl-8b", "--segments", "4096", "--images", "1x32x48", "--device", "H100"]
    command = [sys.executable, "-c", code, *arguments, "--step-time", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "0\n"
