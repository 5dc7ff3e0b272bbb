import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.explain.explanation import Finding
from headway.pages.comparison import compared_markdown
from headway.pages.run import in_order, read_run, report_page, verdict
from helpers.pages import write_run
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


def sentence(run):
    text = verdict(read_run(run))
    assert "\n" not in text
    assert text.endswith(".")
    assert not re.search(r"\bnan\b|None|\binf\b", text)
    return text


def test_a_good_run_says_what_it_reached_in_which_time_and_what_is_found_first(tmp_path):
    run = ended(even(tmp_path / "run"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 20, "loss": 0.25, "exact_match": 0.974}\n')
    # The loss is 3 / step: of 20 steps the last tenth are two, of 0.1579 and 0.15.
    assert sentence(run) == (
        "The loss went from 3 to 0.1539 (0.25 on held-out samples, 97.4 % of the held-out answers exact) in 20 steps "
        "and 10.00 s at MFU 18.0 % (median); first finding, data-bound (up to 20.0 % of the time): the step waited for "
        "data 20.0 % of the time."
    )
    assert report_page(read_run(run)).index(sentence(run)) < report_page(read_run(run)).index("<svg")


def test_without_a_finding_the_largest_loss_is_named(tmp_path):
    run = even(tmp_path / "run", data_wait_s=0.0, data_wait_share=0.0, slots=100)
    assert sentence(run).endswith(" of the mean step are kernels and waiting that only a profile tells apart.")


def test_a_run_without_a_known_peak_says_that_its_mfu_is_not_known(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda _: {"mfu": None, "peak_flops_per_s": None})
    assert "10.00 s; MFU is not known; first finding" in sentence(run)


@pytest.mark.parametrize(
    ("facts", "beginning"),
    [
        ({}, "The loss went"),
        ({"complete": False, "planned_steps": 400}, "Stopped after step 20 of 400: the loss went"),
        (None, "Unfinished run: the loss went"),
    ],
)
def test_how_a_run_ended_stands_first(tmp_path, facts, beginning):
    run = ended(even(tmp_path / "run"), **(facts or {}))
    if facts is None:
        (run / "summary.json").unlink()
    assert sentence(run).startswith(beginning)


def test_a_run_whose_numbers_were_not_finite_has_no_loss_to_tell(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda _: {"loss": None, "skipped": True})
    beginning = "The run took 20 steps and 10.00 s, all without an update, since their numbers were not finite, at MFU"
    assert sentence(run).startswith(beginning)


def test_a_model_that_only_draws_and_a_meter_without_losses(tmp_path):
    run = rewritten(even(tmp_path / "run"), lambda _: {"loss": None, "flow_loss": 0.5})
    assert sentence(run).startswith("The flow loss came to 0.5 in 20 steps")
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"step": {n}, "num_steps": 4, "step_s": 0.5, "wall_s": 2}}\n' for n in (4, 8)))
    assert sentence(path).startswith("The run took 8 steps and 4.00 s; MFU is not known")


def test_a_resumed_run_has_the_time_of_all_its_processes(tmp_path):
    run = ended(even(tmp_path / "run"))
    begin = {"kind": "start", "schema_version": 1, "pid": 1, "host": "h"}
    ledger = [begin | {"wall_s": 0.0}, {"kind": "spans", "wall_s": 4.0, "ns": {"step": 4 * 10**9}}]
    ledger += [{"kind": "checkpoint", "step": 5}, begin | {"wall_s": 90.0}, {"kind": "resumed", "step": 5}]
    ledger += [{"kind": "spans", "wall_s": 98.0, "ns": {"step": 8 * 10**9}}]
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    (run / "resumes.jsonl").write_text('{"kind": "resumed", "step": 5}\n')
    assert "in 20 steps and 1 min 38 s at MFU" in sentence(run)


def test_of_two_runs_both_are_told_under_names_that_differ_with_the_settings_that_differ(tmp_path):
    for name, rate in (("before", 0.1), ("after", 0.2)):
        (tmp_path / name).mkdir()
        run = even(tmp_path / name / "run")
        (run / "config.yaml").write_text(f"optim: {{lr: {rate}}}\nrun: {{folder: {name}}}\n")
        (run / "summary.json").write_text("{}\n")
    text = compared_markdown(read_run(tmp_path / "before/run"), read_run(tmp_path / "after/run"))
    assert text.startswith("# before (A) and after (B)\n")
    assert "* A, before: The loss went from 3 to 0.1539 in 20 steps" in text
    assert "* B, after: The loss went" in text
    assert "* Settings that differ: optim.lr (0.1 in A, 0.2 in B)." in text


def test_settings_that_decide_come_first_and_an_absent_section_is_one_of_them(tmp_path):
    texts = {
        "before": "data: {eval: {path: e.jsonl, end_token: 2}}\nrun: {log_every: 1}\noptim: {steps: 9}\n",
        "after": "data: {eval: null}\nrun: {log_every: 2}\noptim: {steps: 8}\npreference: {beta: 1}\n",
    }
    for name, text in texts.items():
        run = even(tmp_path / name)
        (run / "config.yaml").write_text(text)
        (run / "summary.json").write_text("{}\n")
    text = compared_markdown(read_run(tmp_path / "before"), read_run(tmp_path / "after"))
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
    sentence(path)
    assert report_page(run)


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
