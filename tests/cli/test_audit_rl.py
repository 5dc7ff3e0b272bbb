"""Logs of trainers that generate: steps by phase, on lines that others published and on lines of known lengths."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import Workload, load_cost_model
from headway.audit import read_log
from headway.audit.by_phase import restated
from headway.devices import named_peak
from tools.their_rules.cases import ANSWERS, Case

MODEL = load_cost_model("gemma-3-4b")  # with windows
RECORD = json.loads(next(Path("benchmarks/results").glob("their_rules_*.json")).read_text(encoding="utf-8"))
H100 = named_peak("H100", "bf16")


@pytest.fixture
def audit(headway, tmp_path):
    """Write a log, audit it, return the JSON record, or the error: audit(text, *options, code=0)."""

    def run(text, *options, code=0):
        log = tmp_path / "train.log"
        log.write_text(text, encoding="utf-8")
        result = headway("audit", log, *options, "--json")
        assert result.code == code, result.err
        return {**json.loads(result.out), "err": result.err} if code == 0 else " ".join(result.err.split())

    return run


def phases_of(data, step):
    return {row["phase"]: row for row in data["phases"] if row["step"] == step}


def verl(prompts, answers, times, *, devices=8, mfu=None, step=3):
    """A line of verl's console logger, of samples that the test knows: compute_data_metrics and its neighbours."""
    tokens = sum(prompts) + sum(answers)
    lengths = {
        f"{name}/{what}": function(values)
        for name, values in (("response_length", answers), ("prompt_length", prompts))
        for what, function in (("mean", lambda v: sum(v) / len(v)), ("max", max), ("min", min))
    }
    entries = {
        "global_seqlen/mean": tokens / devices, **(mfu or {}), **lengths,
        **{f"timing_s/{name}": seconds for name, seconds in times.items()}, "perf/total_num_tokens": tokens,
        "perf/time_per_step": times["step"], "perf/throughput": tokens / times["step"] / devices,
    }  # fmt: skip
    return f"(TaskRunner pid=7) step:{step} - " + " - ".join(f"{key}:{value!r}" for key, value in entries.items())


TIMES = {"gen": 40.0, "reward": 0.5, "old_log_prob": 4.0, "ref": 4.0, "adv": 0.1, "update_actor": 12.0, "step": 64.0}


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3000)), min_size=1, max_size=12))
def test_the_flops_of_a_phase_lie_between_both_ends(lengths):
    prompts, answers = [p for p, _ in lengths], [a for _, a in lengths]
    rows, _ = restated(read_log(verl(prompts, answers, TIMES)), MODEL, H100, None, None)
    flops = {row.phase: row.flops for row in rows}
    whole = MODEL.count(Workload([p + a for p, a in lengths]))
    written = [max(a - 1, 0) for a in answers]
    decoded = [(n, p) for n, p in zip(written, prompts, strict=True) if n]
    generated = MODEL.count(
        Workload(prompts, logits=len(prompts)), forward_only=True
    ).total + (MODEL.count(Workload([n for n, _ in decoded], past=[p for _, p in decoded]), forward_only=True).total
               if decoded else 0)  # fmt: skip
    for phase, true in (("update_actor", whole.total), ("ref", whole.forward), ("gen", generated)):
        least, most = flops[phase]
        # an answer of no token reads its prompt alone, where the mean answer decodes
        slack = 2 * MODEL.count(Workload([2])).total if phase == "gen" else 0
        assert least - slack <= true <= most + slack, phase
    assert flops["reward"] is None


def test_samples_of_one_length_are_exact(audit):
    text = verl([100] * 16, [924] * 16, TIMES, mfu={"perf/mfu/actor": 0.3, "perf/mfu/actor_infer": 0.25})
    data = audit(text, "--model", "qwen3-8b", "--device", "H100")
    model, sizes = load_cost_model("qwen3-8b"), Workload([1024] * 16)
    phases = phases_of(data, 3)
    assert list(phases) == ["gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "rest"]
    assert phases["update_actor"]["useful"]["flops"] == [model.count(sizes).total] * 2
    assert phases["ref"]["useful"]["flops"] == [model.count(sizes).forward] * 2
    assert phases["ref"]["useful"]["mfu"][0] == pytest.approx(model.count(sizes).forward / 4.0 / 8 / H100.flops_per_s)
    assert (phases["update_actor"]["reported"]["mfu"], phases["old_log_prob"]["reported"]["mfu"]) == (0.3, 0.25)
    assert phases["rest"]["wall_s"] == pytest.approx(64 - 60.6)
    assert sum(row["share"] for row in phases.values()) == pytest.approx(1)
    assert data["rows"][0]["reported"]["mfu"] == 0.3  # the update's, restated as before by the log's own lengths


def test_a_published_line_of_verl(audit):
    # github.com/verl-project/verl/issues/1208: step 2 on GH200, 5 answers each to 1,024 prompts. Its MFU is above 1,
    # and belongs to no model of which its times and lengths tell: the line's end is not quoted there
    line = (
        "(TaskRunner pid=16292) step:2 - global_seqlen/mean:547190.500 - perf/mfu/actor:1.018 - response_length/mean:"
        "324.958 - response_length/max:1024.000 - response_length/min:9.000 - prompt_length/mean:102.534 - "
        "prompt_length/max:256.000 - prompt_length/min:63.000 - timing_s/gen:74.020 - timing_s/old_log_prob:3.566 - "
        "timing_s/ref:3.420 - timing_s/adv:1.167 - timing_s/update_actor:14.302 - timing_s/step:96.551 - "
        "perf/total_num_tokens:2188762.000"
    )
    data = audit(line, "--model", "qwen2.5-0.5b", "--device", "H200", "--ranks", 4)
    phases = phases_of(data, 2)
    assert {name: row["wall_s"] for name, row in phases.items()} == pytest.approx(
        {"gen": 74.02, "old_log_prob": 3.566, "ref": 3.42, "adv": 1.167, "update_actor": 14.302, "rest": 0.076}
    )
    assert phases["gen"]["share"] == pytest.approx(0.7666, abs=1e-4)
    count = load_cost_model("qwen2.5-0.5b").count(Workload([427] * 2598 + [428] * 2522))
    assert count.total <= phases["update_actor"]["useful"]["flops"][0] * 1.001
    assert "update_actor is a useful one of 80.1%, but its time and lengths make 11.7%" in " ".join(data["err"].split())


def test_a_line_whose_mfu_is_unknown_has_its_phases(audit):
    # github.com/verl-project/verl/issues/7412: step 34, an MFU of 0.0, times with all their digits
    line = (
        "(TaskRunner pid=222265) step:34 - global_seqlen/mean:458966.5 - perf/mfu/actor_infer:0.0 - perf/mfu/actor:0.0 "
        "- response_length/mean:1267.024169921875 - response_length/max:3072.0 - response_length/min:38.0 - "
        "timing_s/agent_loop/slowest/prompt_length:150 - timing_s/gen:541.1881153844297 - timing_s/reward:"
        "5.0749629735946655e-05 - timing_s/old_log_prob:72.40668203681707 - timing_s/ref:72.03436468541622 - "
        "timing_s/update_actor:472.1077583655715 - timing_s/update_weights:5.82697419822216 - timing_s/step:"
        "1163.9566092677414"
    )
    data = audit(line, "--model", "qwen3-8b")
    assert (data["tool"], data["rows"]) == ("verl", [])
    phases = phases_of(data, 34)
    assert phases["gen"]["share"] == pytest.approx(541.1881153844297 / 1163.9566092677414)
    assert phases["update_actor"]["useful"]["flops"] is None
    assert any(
        "Give the mean length of prompt and answer together with --mean-segment L" in note for note in data["notes"]
    )
    assert sum(row["wall_s"] for row in phases.values()) == pytest.approx(1163.9566092677414)


SLIME = """\
(RolloutManager pid=1805485) [2026-04-15 07:57:53] rollout.py:1193 - perf 0: {{'rollout/response_len/mean': \
2773.71484375, 'rollout/response_len/max': 4096, 'rollout/response_len/min': 593, 'perf/rollout_time': \
371.1796889305115, 'perf/tokens_per_gpu_per_sec': 239.12643295688667}}
(Actor pid=1) [2026-04-15 07:58:00] data.py:44 - rollout 0: {{'rollout/total_lengths': 2993.5}}
(Actor pid=1) [2026-04-15 08:00:29] train_metric_utils.py:44 - perf 0: {{'perf/update_weights_time': 0.25, \
'perf/ref_log_probs_time': 14.0, 'perf/log_probs_time': 13.5, 'perf/actor_train_time': 60.0, {rates}, \
'perf/actor_train_tok_per_s': {tokens}, 'perf/step_time': 480.0, 'perf/wait_time_ratio': 0.79}}
"""


@pytest.mark.parametrize("tool", ["slime", "miles"])
def test_slimes_lines_of_a_step_belong_together(audit, tool):
    # rollout: github.com/THUDM/slime/issues/1837; the trainer's as train_metric_utils.py writes them
    number, tokens = 512, 1532672  # 512 x 2993.5
    mfu = ", 'perf/mfu_peak_tflops': 989.0, 'perf/actor_train_mfu': 0.02" if tool == "miles" else ""
    rate = 4e16 / 60.0 / 8 / 1e12
    rates = f"'perf/log_probs_tflops': 180.0, 'perf/actor_train_tflops': {rate}{mfu}"
    data = audit(SLIME.format(rates=rates, tokens=tokens / 60), "--model", "qwen3-4b", "--device", "H100", "--ranks", 8)
    assert data["tool"] == tool
    assert data["identified"]["candidates"][0]["convention"] == tool
    phases = phases_of(data, 0)
    assert phases["rollout"]["share"] == pytest.approx(371.1796889305115 / 480)
    assert phases["log_probs"]["reported"]["flops_per_s_per_device"] == pytest.approx(180e12)
    assert phases["actor_train"]["reported"]["mfu"] == (0.02 if tool == "miles" else None)
    least, most = phases["actor_train"]["useful"]["flops"]
    assert most is None  # prompts of which no end is known
    mean = load_cost_model("qwen3-4b").count(Workload([tokens // number] * number)).total
    assert least == pytest.approx(mean, rel=1e-3)


def test_prime_rls_lines(audit):
    # as its trainers write them: MFU of all devices by its own function, tokens/s of the job
    case = Case("qwen3-8b", "equal answers")
    (rule,) = (rule for rule in RECORD["rules"] if rule["convention"] == "prime-rl")
    per_token = rule["flops"][case.model][case.step_name] / ANSWERS[case.step_name].row_slots
    lines = [
        f"10:00:0{i} SUCCESS Step {i} | 12.3s | Loss 0.0123 | Entropy 0.4 | Grad. Norm 0.1 | LR 1.00e-06 | Throughput "
        f"{rate:.0f} tokens/s | MFU {100 * per_token * rate / 989e12 / 8:.1f}% | Peak Mem. 60.1 GiB"
        for i, rate in enumerate((0.0, 61000.0, 63500.0))
    ]
    data = audit("\n".join(lines), "--model", "qwen3-8b", "--seq-len", 1024, "--ranks", 8, "--device", "H100")
    assert (data["tool"], data["identified"]["convention"]) == ("prime-rl", "prime-rl")
    assert data["identified"]["peak"] == 989e12
    useful = load_cost_model("qwen3-8b").count(Workload([1024])).total / 1024
    assert data["rows"][0]["useful"]["mfu"] == pytest.approx(61000 / 8 * useful / H100.flops_per_s)
    # github.com/PrimeIntellect-ai/prime-rl/pull/999, of 2025, with colons
    old = (
        "02:40:54 SUCCESS Step 4 | Time: 0.36s | Loss: 12.2812 | Throughput: 4771 tokens/s | MFU: 1.4% | Peak Mem.: 5.2"
    )
    (row,) = read_log(old).rows
    assert (row.step, row.mfu.value, row.tokens_per_s.value) == (4, pytest.approx(0.014), 4771)


NEMO_RL = """\
========================= Step 2/100 =========================
📊 Training Results:
  • Loss: 0.1032
  • Mean Generation Length: 900.0000

⏱️  Timing:
  • Total step time: 66.55s
  • generation: 32.52s (48.9%)
  • policy_training: 25.05s (37.6%)
  • policy_and_reference_logprobs: 4.78s (7.2%)
  • logprob_inference_prep: 1.34s (2.0%)
  • training_prep: 1.06s (1.6%)
  • weight_sync: 0.13s (0.2%)

🔍 Performance Metrics:
  • Mean Total Tokens per Sample: 1100.00
  • Throughputs (per GPU):
    - E2E (Samples/sec/gpu): 0.96
    - E2E (Tokens/sec/gpu): 1057.85
  • Throughputs (per Group):
    - E2E (Samples/sec): 7.69
    - E2E (Tokens/sec): 8462.81
"""


def test_nemo_rls_summary_by_phase(audit):
    # times of github.com/NVIDIA-NeMo/RL/pull/1052; 512 samples on 8 devices, without FLOPS, as with packed sequences
    data = audit(NEMO_RL, "--model", "qwen3-8b", "--device", "H100")
    assert (data["tool"], data["rows"]) == ("NeMo RL", [])
    phases = phases_of(data, 2)
    count = load_cost_model("qwen3-8b").count(Workload([1100] * 512))
    assert phases["policy_training"]["useful"]["flops"][0] == pytest.approx(count.total, rel=2e-3)
    assert phases["policy_and_reference_logprobs"]["useful"]["flops"][0] == pytest.approx(2 * count.forward, rel=2e-3)
    mfu = count.total / 25.05 / 8 / H100.flops_per_s
    assert phases["policy_training"]["useful"]["mfu"][0] == pytest.approx(mfu, rel=2e-3)
    assert phases["weight_sync"]["useful"]["flops"] is None


OPENRLHF = (
    "INFO ✨ Global step 3: {'policy_loss': -0.01, 'timing/make_experience': 20.0, 'timing/ppo_train': 60.0, "
    "'timing/broadcast': 2.0, 'rollout/response_length_mean': 900.5, 'rollout/num_samples': 1024.0, "
    "'timing/generation': 100.0, 'timing/step_total': 182.0}"
)


def test_openrlhf_prints_times_and_no_rate(audit, headway, tmp_path):
    data = audit(OPENRLHF, "--model", "qwen3-8b", "--device", "H100", "--ranks", 8, "--mean-segment", 1100)
    assert (data["tool"], data["rows"], data["useful_mfu_mean"]) == ("OpenRLHF", [], None)
    phases = phases_of(data, 3)
    count = load_cost_model("qwen3-8b").count(Workload([1100] * 1024))
    assert phases["ppo_train"]["useful"]["flops"][0] == pytest.approx(count.total, rel=1e-3)
    assert phases["make_experience"]["useful"]["flops"][0] == pytest.approx(2 * count.forward, rel=1e-3)
    log = tmp_path / "train.log"
    text = headway("audit", log, "--model", "qwen3-8b", "--device", "H100", "--ranks", 8, "--mean-segment", 1100).out
    assert "ppo_train          1 min 0 s  33.0 %" in text
    assert "work of a critic, if there is one, is left out" in " ".join(text.split())
    # without a rate there are phases to explain, and the way to their FLOPs
    for result in (headway("explain", log), headway("report", log, "--md")):
        text = " ".join(result.out.split())
        assert result.code == 0, result.err
        assert "takes 54.9 % of the time" in text  # 100 of 182 s
        assert "`headway audit` recomputes all phases" in text


@pytest.mark.parametrize(
    "line",
    [
        "step:1 - timing_s/step:1e400 - timing_s/gen:1.0 - response_length/mean:1e300 - prompt_length/mean:1.0",
        "step:1 - timing_s/step:0.0 - timing_s/gen:0.0 - response_length/mean:9.0 - prompt_length/mean:0.0",
        "step:1 - timing_s/step:5.0 - timing_s/gen:9.0 - response_length/mean:9.0 - prompt_length/mean:9.0 - "
        "perf/total_num_tokens:99999999999999999999",
        "step:1 - timing_s/step:5.0 - timing_s/update_actor:1.0 - response_length/mean:9.0 - response_length/min:900.0 "
        "- response_length/max:3.0 - prompt_length/mean:9.0 - prompt_length/min:1.0 - prompt_length/max:20.0 - "
        "perf/total_num_tokens:1800 - perf/time_per_step:5.0 - perf/throughput:1e-30",
        f"step:1 - {'timing_s/gen:' * 5000}{'9' * 50000} - timing_s/step:5.0 - response_length/mean:9.0",
    ],
)
def test_numbers_that_no_run_has_end_in_no_error(audit, line):
    data = audit(line, "--model", "qwen3-8b", "--device", "H100")
    assert data["tool"] == "verl"


def test_a_long_line_is_read_once(audit):
    # markers without end, on one line: each pattern passes over it once
    text = "Step 1 | " * 200_000 + "Throughput " + "perf 1: {" * 100_000 + "'a/" * 100_000
    assert "has no line that Headway recognises" in audit(text, "--model", "qwen3-8b", code=1)
