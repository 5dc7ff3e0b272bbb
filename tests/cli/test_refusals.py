"""Refusals of commands, a line each: what was asked for, and words of the one error that comes instead of output."""

import pytest

MODEL = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 8)

FLOPS = [
    (["--segments", "0"], "--segments '0': a length of 0 tokens"),
    (["--segments", "12,x"], "--segments '12,x': 'x' is not a length"),
    (["--segments=-4"], "--segments '-4': '-4' is not a length"),
    (["--segments", "64", "--sources", "9"], "qwen3-vl-8b has no encoder beside its text"),
    (["--segments", "64,3", "--sources", "9"], "one length per segment: got 1 for 2 segments"),
    (["--segments", "64", "--audio", "3000*2"], "qwen3-vl-8b has no audio tower, but the workload holds 2 audio clips"),
    (["--segments", "64", "--audio", "3 s"], "--audio '3 s': '3 s' is not a length"),
    ([], "--segments is missing"),
    (["--segments", "64", "--slots", "63"], "--slots 63 cannot hold the 64 tokens"),
    (["--segments", "64", "--images", "1x4"], "--images '1x4': '1x4' is not a grid"),
    (["--segments", "64", "--videos", "0x4x4"], "the grid '0x4x4' holds no patch"),
    (["--segments", "63", "--images", "1x16x16"], "256 patches, which qwen3-vl-8b merges 4 to 1 into 64 tokens"),
    (["--segments", "64", "--images", "1x3x4"], "1x3x4 cannot be merged by this model"),
    (["--segments", "64", "--lora", "0"], "--lora '0' is not RANK"),
    (["--segments", "64", "--lora", "8:no_such_layer"], "no_such_layer"),
    (["--segments", "64", "--freeze", "no_such_part"], "no_such_part"),
    (["--segments", "64", "--recompute", "no.such.block"], "no.such.block"),
    (
        ["--segments", "64", "--convention", "torchtitn"],
        "--convention 'torchtitn' is not known. Did you mean torchtitan",
    ),
    (
        ["--segments", "64", "--convention", "nanochat"],
        "nanochat has no number for qwen3-vl-8b",
    ),
    (["--segments", "64", "--convention", "6nd", "--forward-only"], "--forward-only cannot take effect"),
    (["--segments", "64", "--convention", "6nd", "--by", "module"], "--by module cannot take effect"),
    (["--segments", "64", "--convention", "6nd", "--recompute", "full"], "--recompute full cannot take effect"),
    (["--segments", "64", "--seq-len", "64"], "--seq-len 64 cannot take effect with --convention useful"),
    (["--segments", "64", "--forward-only", "--recompute", "full"], "contradict each other"),
    (["--segments", "64", "--by", "layer"], "layer"),
    (["--segments", "64", "--reference", "qwen3-8b", "--convention", "6nd"], "--reference qwen3-8b cannot take effect"),
    (["--segments", "1", "--past", "64"], "no gradient reaches, so it needs --forward-only"),
    (["--segments", "1*8", "--past", "64", "--forward-only"], "past must be one length per segment: got 1 for 8"),
    (["--segments", "1", "--past", "64x2", "--forward-only"], "--past '64x2': '64x2' is not a length"),
]

COMPARE = [
    (["--segments", "8", "--step-time", "1"], "--device is missing"),
    (["--segments", "8", "--device", "H100"], "--step-time is missing"),
    (["--segments", "8", "--device", "H100", "--step-time", "-1"], "--step-time -1 is not a time"),
    (["--segments", "8", "--device", "H100", "--step-time", "0"], "--step-time 0 is not a time"),
    (["--segments", "8", "--device", "H100", "--step-time", "nan"], "--step-time nan is not a time"),
    (["--segments", "8", "--device", "H100", "--step-time", "1", "--ranks", "0"], "--ranks 0: at least 1 device"),
    (["--segments", "8", "--device", "-1e12", "--step-time", "1"], "--device '-1e12' is not a positive number"),
    (["--segments", "8,16", "--seq-len", "8", "--device", "H100", "--step-time", "1"], "--seq-len 8 contradicts"),
    (["--device", "H100", "--step-time", "1"], "--segments is missing"),
    (["runs/b"], "shows one step of one MODEL as every tool would print it, but got runs/b too"),
]

MFU = [
    (["qwen3-8b"], "qwen3-8b alone does not determine the cost of a token"),
    (["qwen3-8b", "--seq-len", "8", "--segments", "8"], "--segments and --seq-len contradict each other"),
    (["qwen3-8b", "--seq-len", "8", "--flops-per-token", "5"], "--flops-per-token and MODEL contradict"),
    (["--seq-len", "8"], "--seq-len cannot take effect without MODEL"),
    (["--step-time", "-1", "--tokens-per-step", "5"], "step time is -1"),
    (["--mfu", "45", "--device", "H100"], "Give a fraction: 0.45"),
    (["--chips", "4"], "chips 4 is too little to compute anything from"),
    (["--tokens-per-s", "5", "--step-time", "2", "--tokens-per-step", "20"], "contradict each other"),
]

PLAN = [
    (("plan", "qwen3-0.6b"), "no device is named"),
    (("plan", "qwen3-0.6b", "--device", "H999"), "H999"),
    (("plan", "qwen3-0.6b", "--device", "rtx-3090-ti"), "the bandwidth of its memory is not known"),
    ((*MODEL, "--price", 2), "give its --tokens, --epochs or --samples too"),
    ((*MODEL, "--tokens", 1e9, "--epochs", 1), "both say how long the run is"),
    ((*MODEL, "--epochs", 1), "needs data that end"),
    ((*MODEL, "--tokens", "inf"), "--tokens inf is no length of a run"),
    ((*MODEL, "--epochs", 0, "--lengths", "x.csv"), "--epochs 0 is no length of a run"),
    ((*MODEL, "--data", "x.jsonl", "--lengths", "x.csv"), "two places for lengths"),
    (("plan", "qwen3-0.6b", "--data", "x.jsonl", "--scale", "8"), "--data x.jsonl is for one size of a run"),
    ((*MODEL, "--tokens", 1e9, "--samples", 10), "--tokens and --samples both say how long the run is"),
    ((*MODEL, "--lengths", "x.csv", "--samples", 10), "give --epochs instead"),
    ((*MODEL, "--lengths", "x.csv", "--segments", 900), "--lengths and --segments are two places for lengths"),
    ((*MODEL, "--images", "1x32x48"), "qwen3-0.6b has no vision tower"),
    (("plan", "qwen3-vl-2b", "--images", "1x32x48"), "which are 384 tokens"),
    (("plan", "qwen3-vl-2b", "--segments", "300", "--images", "1x32x48"), "give --segments 384 or more"),
    (("plan", "qwen3-vl-2b", "--segments", "900*2", "--images", "1x32x48*3"), "cannot be dealt to the 2 samples"),
    ((*MODEL, "--data", "no-such.jsonl"), "no-such.jsonl"),
    ((*MODEL, "--set", "plan.mix=null"), "nothing says how long the samples are"),
    ((*MODEL, "--set", "parallel.replicate=3"), "does not divide the 8 processes"),
    (("plan", "no-such-model", "--device", "H100"), "no-such-model"),
    (("plan", "no/such.yaml", "--device", "H100"), "no/such.yaml"),
    ((*MODEL, "--set", "speed.recompute=nothing.*"), "speed.recompute"),
]
OTHERS = [
    (("compare", "qwen3-8b", "--segments", "8", "--device", "H101", "--step-time", "1"), "peak of 'H101' is not known"),
    (("flops", "llama-3.1-8b", "--segments", "8192", "--images", "1x32x48"), "llama-3.1-8b has no vision tower"),
    (("flops", "zzzzzz", "--segments", "8"), "`headway models` lists the shipped models"),
    (("pack", "--packing-length", 10), "--lengths"),
    (("pack", "--packing-length", 0), "--packing-length 0 must be at least 1 (Token budget of a pack"),
    (("explain", "x", "--by", "colour"), "--by: 'colour' is not one of 'component'"),
    (("init",), "--model is missing. Model to train"),
    (("train",), "CONFIG is missing. YAML file"),
    (("plan", "qwen3-0.6b", "--gpus", 8), "There is no option --gpus. Give the number of devices as --devices."),
    (("pack", "x.csv", "--packing-length", 10), "give it as --lengths FILE"),
    (("pack", "x.csv", "--packing-length", "1e30"), "1,000,000,000,000,000,000,000,000,000,000 tokens, but at most"),
]
REFUSALS = [
    *((("flops", "qwen3-vl-8b", *arguments), words, [2]) for arguments, words in FLOPS),
    *((("compare", "qwen3-8b", *arguments), words, [2]) for arguments, words in COMPARE),
    *((("mfu", *arguments), words, [2]) for arguments, words in MFU),
    *((arguments, words, [2]) for arguments, words in (*PLAN, *OTHERS)),
]


@pytest.mark.parametrize(
    ("arguments", "words", "codes"), REFUSALS, ids=[" ".join(map(str, row[0])) for row in REFUSALS]
)
def test_a_mistake_is_one_error_that_quotes_it(headway, arguments, words, codes):
    result = headway(*arguments)
    assert result.code in codes
    assert result.out == ""
    assert words in " ".join(result.err.split())
    assert "Traceback" not in result.err
