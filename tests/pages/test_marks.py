import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.pages.page import report_page
from headway.pages.run import read_run
from headway.pages.steps import marks_of, stage_begins, stages
from headway.report.charts import ChartMark
from helpers.pages import report_markdown, write_run
from helpers.runs import read_metrics


def played(seed, lengths, weights):
    """Sources of each record of stages of some lengths, each source drawn into a record by its weight."""
    random = np.random.default_rng(seed)
    return [
        frozenset(name for name, weight in of_stage.items() if random.random() < weight)
        for length, of_stage in zip(lengths, weights, strict=True)
        for _ in range(length)
    ]


@given(st.integers(0, 10**6), st.lists(st.integers(30, 300), min_size=2, max_size=5), st.data())
def test_stages_are_found_to_the_record(seed, lengths, data):
    """Each stage plays a source of its own in every record, beside others of the whole run that come now and then."""
    always = {"rare": data.draw(st.floats(0, 0.05)), "often": data.draw(st.floats(0.5, 1))}
    weights = [{f"source {number}": 1.0, **always} for number in range(len(lengths))]
    begins = stage_begins(played(seed, lengths, weights))
    assert begins == np.cumsum(lengths)[:-1].tolist()


@given(st.integers(0, 10**6), st.integers(1, 1500), st.lists(st.sampled_from([0.003, 0.03, 0.3, 1.0]), max_size=6))
def test_a_mixture_has_no_stages_however_rare_its_sources_are(seed, length, shares):
    weights = {f"source {number}": share for number, share in enumerate(shares)}
    assert stage_begins(played(seed, [length], [weights])) == []


def test_a_source_that_ends_where_another_begins_is_one_change():
    both = frozenset("ab")
    assert stage_begins([frozenset("a")] * 20 + [both] + [frozenset("b")] * 20) == [20]
    # Shuffled packs play what is left of a stage while the next one has begun: demo's first stage, 258 to 275 of 1,600.
    blended = [frozenset("a")] * 258 + [both] * 17 + [frozenset("b")] * 1325
    assert stage_begins(blended) == [258]
    assert stage_begins([frozenset("a")] * 300 + [both] * 600 + [frozenset("b")] * 300) == [300, 900]
    assert stage_begins([]) == stage_begins([frozenset()] * 9) == []


@pytest.fixture
def curriculum(tmp_path):
    """A run of two stages that was resumed and judged."""
    run = write_run(tmp_path / "run", 40)
    records = read_metrics(run / "metrics.jsonl")
    for record in records[24:]:
        record["sources"] = {"<b>": {"loss": 1.0, "tokens": 100}}
    records += [{"kind": "evaluation", "step": step, "loss": 1.0, "exact_match": 0.5} for step in (20, 40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "resumes.jsonl").write_text('{"kind": "resumed", "step": 12, "lost": []}\n')
    return run


def test_restarts_and_stages_are_marked_and_said_and_evaluations_are_dots(curriculum):
    run = read_run(curriculum)
    assert run.marks == marks_of(curriculum, run.records) == [ChartMark(12, "restart"), ChartMark(25, "stage 2")]
    text = report_page(run)
    assert (
        text.count("Marked: restart at 12, stage 2 at 25.") == text.count('data-of="step"') > 5
    )  # losses of sources too
    assert "held out: 2 values over step 20 to 40, from 1 to 1." in text
    assert text.count('class="ring') == 1


def test_a_loss_that_is_not_finite_to_the_end_is_marked_where_that_begins(tmp_path):
    run = write_run(tmp_path / "run", 40)
    records = read_metrics(run / "metrics.jsonl")
    for record in (records[5], *records[30:]):
        record["loss"] = None
    assert marks_of(None, records) == [ChartMark(31, "not finite")]
    assert marks_of(None, records[:30]) == []


def test_stages_are_a_table_with_their_steps_and_sources(curriculum):
    run = read_run(curriculum)
    assert [*stages(run.records).rows] == [["1", "1 to 24", "a", "2,400"], ["2", "25 to 40", "<b>", "1,600"]]
    assert "| 2 | 25 to 40 | &lt;b> | 1,600 |" in report_markdown(run)
    assert "<b>" not in report_page(run).replace("</b>", "").replace("<p><b>", "")
