import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.explain.explanation import Finding
from headway.meter.goodput_report import account
from headway.pages.page import is_headline, page_of, report_page
from headway.pages.run import in_order, read_run
from helpers.pages import report_markdown, write_run
from helpers.runs import read_metrics


def rewritten(run, change):
    """A run whose records are changed, each by a function from it to fields."""
    records = read_metrics(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record | change(record)) + "\n" for record in records))
    return run


def even(folder, **more):
    """A run of equal steps, without anything to mend but what `more` says."""
    return rewritten(write_run(folder, 20, **more), lambda _: {"wall_s": 0.5, "step_s": 0.5, "mfu": 0.18})


def ended(run, **facts):
    (run / "config.yaml").write_text("run: {}\n")
    (run / "summary.json").write_text(json.dumps({"complete": True, "steps": 20, "planned_steps": 20} | facts))
    return run


def test_a_good_run_says_in_a_line_and_six_tiles_how_it_went_and_what_to_change(tmp_path):
    run = ended(even(tmp_path / "run"))
    made = {"model": {"class": "Qwen3ForCausalLM", "parameters": 1_459_840}, "device": {"name": "H100"}}
    (run / "run.json").write_text(json.dumps(made))
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LEDGER[:2]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 20, "loss": 0.25, "exact_match": 0.974, "samples": 500}\n')
    page = page_of(read_run(run))
    assert page.facts == ["Qwen3, 1.46 M parameters · 1 x H100 · 20 steps in 4.00 s · finished"]
    # The loss is 3 / step: of 20 steps the last tenth are two, of 0.1579 and 0.15.
    assert page.tiles.rows == [
        ["MFU", "18.0 %", ""],
        ["Tokens/s", "200", "2 k in all"],
        ["Step", "500 ms", ""],
        ["Loss", "0.154", "held out 0.25"],
        ["Answers right", "97.4 %", "of 500 held out"],
        ["Goodput", "100.0 %", "0 s of set-up"],
    ]
    seen, why, advice = page.card.points
    assert (page.card.remark, seen) == ("up to 20.0 % of the time", "The step waited for data 20.0 % of the time.")
    assert (why[:5], advice[:6]) == ("Why: ", "Next: ")
    for text in (page.as_markdown(), page.as_terminal()):
        assert [
            text.index(part) for part in ("finished", "97.4 %", "useful work at peak", "Why: ", "Next: ")
        ] == sorted(text.index(part) for part in ("finished", "97.4 %", "useful work at peak", "Why: ", "Next: "))


def test_parts_of_a_step_are_those_of_its_lines_and_add_up_to_it(tmp_path):
    page = page_of(read_run(even(tmp_path / "run")))
    assert [part.name for part in page.parts] == ["useful work at peak", "slower than peak", "data"]
    assert sum(part.ns[0] for part in page.parts) == page.totals[0]
    opened = {name: ns[0] for part in page.parts for name, ns in part.lines}
    assert {*opened} == {"padding and masked work", "unseparated: no profile"}
    assert sum(opened.values()) == page.parts[1].ns[0]
    # Without a peak nothing is known to be useful, and so nothing to be slower.
    bare = rewritten(even(tmp_path / "bare"), lambda _: {"peak_flops_per_s": None})
    assert [part.name for part in page_of(read_run(bare)).parts] == ["work and waiting, not told apart", "data"]


def test_what_is_not_known_has_no_tile(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda _: {"mfu": None, "peak_flops_per_s": None})
    assert [row[0] for row in page_of(read_run(run)).tiles.rows] == ["Tokens/s", "Step", "Loss"]


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "finished"),
        ({"complete": False, "planned_steps": 400}, "stopped after step 20 of 400"),
        ({"ended_early": True, "planned_steps": 400}, "ended early, after step 20 of 400"),
        (None, "unfinished"),
    ],
)
def test_how_a_run_ended_stands_among_its_facts(tmp_path, facts, state):
    run = ended(even(tmp_path / "run"), **(facts or {}))
    if facts is None:
        (run / "summary.json").unlink()
    assert state in page_of(read_run(run)).facts[0]


def test_an_error_that_ended_a_run_is_the_first_to_show(tmp_path):
    run = read_run(even(tmp_path / "run"))
    error = "Error: step 2 has gradient norm nan. The rate was 9.97e+03. Lower optim.lr, key hf_abcdefghijklmnopqrstuv."
    page = page_of(replace(run, goodput=account([BEGIN | {"wall_s": 0}, {"kind": "failed", "error": error}], "x")))
    assert page.facts[0].endswith(" · failed")
    assert [page.card.title, *page.card.points] == [
        "What ended the run",
        "Error: step 2 has gradient norm nan.",
        "The rate was 9.97e+03.",
        "Lower optim.lr, key (hidden).",
    ]
    assert page.more[0].points[0] == "The step waited for data 20.0 % of the time."
    resumed = account([BEGIN | {"wall_s": 0}, {"kind": "failed", "error": error}, BEGIN | {"wall_s": 1}], "x")
    assert page_of(replace(run, goodput=resumed)).card.title == "What to change first"


def test_a_run_whose_numbers_are_not_finite_says_so_in_place_of_its_loss(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda record: {"loss": None} if record["step"] > 12 else {})
    page = page_of(read_run(run))
    assert ["Loss", "NaN", "not finite in 8 of 20 records"] in page.tiles.rows
    assert page.card.points[0].startswith("Loss is NaN from step 13 on")


def test_a_model_that_only_draws_and_a_meter_without_losses(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda _: {"loss": None, "flow_loss": 0.5})
    assert ["Flow loss", "0.5", ""] in page_of(read_run(run)).tiles.rows
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"step": {n}, "num_steps": 4, "step_s": 0.5, "wall_s": 2}}\n' for n in (4, 8)))
    assert page_of(read_run(path)).facts == ["8 steps in 4.00 s"]


BEGIN = {"kind": "start", "schema_version": 1, "pid": 1, "host": "h"}
LEDGER = [BEGIN | {"wall_s": 0.0}, {"kind": "spans", "wall_s": 4.0, "ns": {"step": 4 * 10**9}}]
LEDGER += [{"kind": "checkpoint", "step": 5}, BEGIN | {"wall_s": 90.0}, {"kind": "resumed", "step": 5}]
LEDGER += [{"kind": "spans", "wall_s": 98.0, "ns": {"step": 8 * 10**9}}]


def test_a_resumed_run_has_the_time_of_all_its_processes(tmp_path):
    run = ended(even(tmp_path / "run"))
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LEDGER))
    (run / "resumes.jsonl").write_text('{"kind": "resumed", "step": 5}\n')
    page = page_of(read_run(run))
    assert "20 steps in 1 min 38 s" in page.facts[0]
    assert page.tiles.rows[-1][-1] == "1 restart"


def test_two_runs_are_the_same_page_with_names_that_differ_and_a_column_of_differences(tmp_path):
    for name, rate, step_s in (("before", 0.1, 0.5), ("after", 0.2, 0.4)):
        (tmp_path / name).mkdir()
        run = rewritten(even(tmp_path / name / "run"), lambda _, s=step_s: {"wall_s": s, "step_s": s, "mfu": 0.09 / s})
        (run / "config.yaml").write_text(f"optim: {{lr: {rate}}}\nrun: {{folder: {name}}}\n")
        (run / "summary.json").write_text("{}\n")
    page = page_of(read_run(tmp_path / "before/run"), read_run(tmp_path / "after/run"))
    assert page.title == "before (A) and after (B)"
    assert page.facts == ["A: 1 rank · 20 steps in 10.00 s", "B: 1 rank · 20 steps in 8.00 s"]
    assert ["MFU", "18.0 %", "22.5 %", "+4.5 points"] in page.tiles.rows
    assert ["Step", "500 ms", "400 ms", "-20.0 %"] in page.tiles.rows
    assert page.time.footer == ["the step", "500.0 ms", "400.0 ms", "-100.0 ms"]
    assert page.card.points[0].startswith("A step of B takes 100.00 ms less than one of A (-20.0 %).")
    assert "Settings that differ: optim.lr (0.1 in A, 0.2 in B)." in page.card.points
    assert page.as_markdown().startswith("# before (A) and after (B)\n")


def test_settings_that_decide_come_first_and_an_absent_section_is_one_of_them(tmp_path):
    texts = {
        "before": "data: {eval: {path: e.jsonl, end_token: 2}}\nrun: {log_every: 1}\noptim: {steps: 9}\n",
        "after": "data: {eval: null}\nrun: {log_every: 2}\noptim: {steps: 8}\npreference: {beta: 1}\n",
    }
    for name, text in texts.items():
        run = even(tmp_path / name)
        (run / "config.yaml").write_text(text)
        (run / "summary.json").write_text("{}\n")
    text = report_markdown(read_run(tmp_path / "before"), read_run(tmp_path / "after"))
    line = "optim.steps (9 in A, 8 in B), preference (- in A, a section of 1 in B)"
    line += ", data.eval (a section of 2 in A, None in B) and 1 more"
    assert f"* Settings that differ: {line}." in text


ODD = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(-(10**20), 10**20), st.text(max_size=3), st.just([1])
)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(1, 50), "step_s": st.floats(1e-6, 1e6)},
        optional=dict.fromkeys(("loss", "flow_loss", "mfu", "num_steps", "skipped", "empty", "tokens", "sources"), ODD),
    ),
    min_size=1,
    max_size=8,
)


@given(RECORDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record_that_is_read_has_its_sentence(tmp_path, records):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        run = read_run(path)
    except ConfigError:
        return
    text = report_page(run)
    assert not re.search(r">(nan|None|inf)\b", text)


def finding(name, share):
    return Finding(name, f"{name} is seen.", "c", "n", round(share * 1e9), share)


def test_findings_of_a_profile_go_before_what_records_suspect_within_its_steps():
    by_profile = [finding("data-bound", 0.2), finding("launch-bound", 0.15)]
    by_records = [finding("unstable-steps", 0.7), finding("evaluation", 0.5), finding("data-bound", 0.3)]
    by_records += [finding("not-compute-bound", 0.9), finding("memory-limit", 0.0)]
    assert [entry.id for entry in in_order(by_profile, by_records)] == [
        "evaluation",  # lies between the steps, where a profile sees nothing
        "data-bound",
        "launch-bound",
        "unstable-steps",
        "memory-limit",
    ]
    assert in_order(None, by_records) == tuple(by_records)
    of_records = ["evaluation", "unstable-steps", "data-bound", "memory-limit"]  # a healthy profile shows no limit
    assert [entry.id for entry in in_order([], by_records)] == of_records


def test_a_finding_that_changes_nothing_in_print_is_never_the_first_to_show(tmp_path):
    small = Finding("slow-steps", "s", "c", "n", 1, 0.027, 0.012, 0.0123)
    large = Finding("data-bound", "d", "c", "n", 1, 0.2, 0.012, 0.015)
    assert [is_headline(small), is_headline(large)] == [False, True]
    run = read_run(even(tmp_path / "run"))
    page = page_of(replace(run, findings=(small, large)))
    assert [page.card.points[0], *(part.points[0] for part in page.more)] == ["D", "S"]
    page = page_of(replace(run, findings=(small,)))
    said = page.card.points
    assert [said[0], said[1].partition(" No ")[0]] == [
        "The step waited for data 20.0 % of the time.",
        "Limit: a wait is a finding from 5.0 % of the time.",
    ]
    assert said[1].endswith("No finding would change a number that is printed above.")
    assert said[2].startswith("Next: the largest part beside useful work is ")
    assert "1 more finding<" in page.as_html()
    assert "* Up to 2.7 % of the time. S Why: c Next: n" in page.as_markdown()
    assert page_of(replace(run, findings=())).card.points[1].endswith("No rule finds anything to change.")
