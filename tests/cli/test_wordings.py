"""One mistake, made in Python and at the command line: each reads its own words."""

from pathlib import Path

import pytest

from headway import load_cost_model
from headway.audit.compare import compare
from headway.audit.logs import read_log
from headway.audit.rows import Log, LogRow, near
from headway.audit.waterfalls import explain_log
from headway.config.read import load_config
from headway.conventions.convention import Step
from headway.conventions.registry import get_convention
from headway.count.workload import Workload
from headway.data.sources import open_source
from headway.devices.lookup import named_peak
from headway.errors import HeadwayError
from headway.predict.scale import sizes_of
from headway.predict.solve import solve
from headway.synthetic.new_model import write_new_model

MODEL = "qwen3-0.6b"
RECIPE = """
model: {path: qwen3-0.6b, random_init: true}
data: {train: [{path: chats.jsonl}], tokens_per_pack: 256}
optim: {steps: 4, lr: 1.0e-3}
run: {folder: run, device: cpu}
"""
LOG = "".join(
    f"completed step: {step}, seconds: 8.000, TFLOP/s/device: 100.0, Tokens/s/device: 9000.0, loss: 2.191\n"
    for step in range(1, 7)
)
ERRORS = [  # a call in Python, a command that meets the same mistake, and how each says it
    (
        lambda: load_cost_model(MODEL).freeze(["nope"]),
        ["flops", MODEL, "--segments", "64", "--freeze", "nope"],
        "freeze='nope' matches no parameter of qwen3-0.6b.",
        "--freeze nope matches no parameter of qwen3-0.6b.",
    ),
    (
        lambda: load_cost_model(MODEL).lora(4, ["nope"]),
        ["flops", MODEL, "--segments", "64", "--lora", "4:nope"],
        "targets 'nope' matches no linear module",
        "--lora target 'nope' matches no linear module",
    ),
    (
        lambda: load_cost_model(MODEL).count(Workload([64]), recompute="nope"),
        ["flops", MODEL, "--segments", "64", "--recompute", "nope"],
        "recompute='nope' matches nothing of qwen3-0.6b.",
        "--recompute nope matches nothing of qwen3-0.6b.",
    ),
    (
        lambda: get_convention("torchtitn"),
        ["flops", MODEL, "--segments", "64", "--convention", "torchtitn"],
        "convention 'torchtitn' is not known. Did you mean torchtitan",
        "--convention 'torchtitn' is not known. Did you mean torchtitan",
    ),
    (
        lambda: get_convention("useful/99"),
        ["flops", MODEL, "--segments", "64", "--convention", "useful/99"],
        "convention 'useful/99': useful is kept in version 1 only.",
        "--convention 'useful/99': useful is kept in version 1 only.",
    ),
    (
        lambda: _compare(step_s=0.0),
        ["compare", MODEL, "--segments", "64", "--device", "H100", "--step-time", "0"],
        "step_s=0.0 is not a time:",
        "--step-time 0 is not a time:",
    ),
    (
        lambda: _compare(num_ranks=0),
        ["compare", MODEL, "--segments", "64", "--device", "H100", "--step-time", "1", "--ranks", "0"],
        "num_ranks=0: at least 1 device",
        "--ranks 0: at least 1 device",
    ),
    (
        lambda: named_peak("312", "bf16"),
        ["compare", MODEL, "--segments", "64", "--step-time", "1", "--device", "312"],
        "device='312' is not a known device (`headway devices` lists them). As a rate, 312 FLOP/s would be slower "
        "than any computer. State the rate of one device in FLOP/s, for example device=989.4e12.",
        "--device 312 is not a known device (`headway devices` lists them). As a rate, 312 FLOP/s would be slower "
        "than any computer. State the rate of one device in FLOP/s, for example --device 989.4e12.",
    ),
    (
        lambda: solve({"mfu": 40.0, "num_chips": 8}),
        ["mfu", "--mfu", "40", "--chips", "8"],
        "mfu=40.0 is above 1, which no device reaches.",
        "--mfu 40 is above 1, which no device reaches.",
    ),
    (
        lambda: solve({"num_chips": 8}),
        ["mfu", "--chips", "8"],
        "(a model with segments or seq_len), num_chips, peak_flops_per_s and step_s with tokens_per_step, or tokens/s; "
        "a training time needs total_tokens and tokens/s, or an MFU with chips, device and model; chips needed follow "
        "from time_s.",
        "(a model with segments or --seq-len), --chips, --device and --step-time with --tokens-per-step, or tokens/s; "
        "a training time needs --total-tokens and tokens/s, or an MFU with chips, device and model; chips needed "
        "follow from --within.",
    ),
    (
        lambda: sizes_of("8,x"),
        ["plan", "r.yaml", "--device", "H100", "--scale", "8,x"],
        "scale='8,x': 'x' is not a number of devices.",
        "--scale 8,x: 'x' is not a number of devices.",
    ),
    (
        lambda: load_config(Path("r.yaml"), ("optim.lr",)),
        ["plan", "r.yaml", "--set", "optim.lr"],
        "overrides 'optim.lr' is not an assignment.",
        "--set 'optim.lr' is not an assignment.",
    ),
    (
        lambda: read_log(LOG, "a.log", resumed_at=3),
        ["audit", "a.log", "--model", MODEL, "--resumed-at", "3"],
        "resumed_at=3 is for a trainer_state.json, and a.log is none.",
        "--resumed-at 3 is for a trainer_state.json, and a.log is none.",
    ),
    (
        lambda: explain_log(
            Log("MaxText", (), tuple(LogRow(step, step_s=near(8.0, 1e-9)) for step in range(1, 7))), "a.log", step=99
        ),
        ["explain", "a.log", "--step", "99"],
        "step=99: a.log has no line with the time of this step. Its steps are 1 to 6.",
        "--step 99: a.log has no line with the time of this step. Its steps are 1 to 6.",
    ),
    (
        lambda: write_new_model(Path("m"), [open_source("a.jsonl")], like="nope", size=10**6, vocab_size=300, seed=0),
        ["new-model", "m", "--data", "a.jsonl", "--like", "nope"],
        "like 'nope' is no model type of the installed transformers.",
        "--like 'nope' is no model type of the installed transformers.",
    ),
]


def _compare(**changes):
    options = {"step_s": 1.0, "num_ranks": 1} | changes
    return compare(load_cost_model(MODEL), Step(Workload([64]), 64), peak=named_peak("H100", "bf16"), **options)


@pytest.mark.parametrize(("call", "arguments", "python", "command"), ERRORS, ids=[row[2][:12] for row in ERRORS])
def test_an_error_is_said_by_python_and_by_the_command(
    call, arguments, python, command, headway, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "a.log").write_text(LOG)
    (tmp_path / "a.jsonl").write_text('{"text": "Some words of a document."}\n' * 20)
    with pytest.raises(HeadwayError) as caught:
        call()
    assert python in str(caught.value)
    assert "--" not in str(caught.value)
    result = headway(*arguments)
    assert result.code
    assert command in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (ERRORS[0][0], ("freeze", "nope", "language.mlp")),
        (ERRORS[1][0], ("targets", "nope", "q_proj")),
        (ERRORS[3][0], ("convention", "torchtitn", "torchtitan")),
        (ERRORS[4][0], ("convention", "useful/99", "1")),
        (ERRORS[13][0], ("step", 99, "6")),
    ],
)
def test_an_error_tells_the_argument_its_value_and_what_there_is(call, fields):
    with pytest.raises(HeadwayError) as caught:
        call()
    assert (caught.value.parameter, caught.value.value) == fields[:2]
    assert fields[2] in caught.value.choices
