"""The phases that a loop names, on its page: a table with bars."""

import json
import re

from headway.pages.page import report_page
from headway.pages.run import read_run
from headway.pages.steps import phases
from helpers.loops import metered_rl_loop
from helpers.pages import report_markdown


def test_phases_of_the_mean_step_are_a_table_that_adds_up_to_it(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl", num_steps=250, server=4)
    run = read_run(tmp_path / "m.jsonl")
    (section,) = phases(run.mean)
    assert [row[0] for row in section.rows][-1] == "the step"
    assert {"rollout", "reference"} <= {row[0] for row in section.rows}
    assert len(section.bars) == len(section.rows)
    assert 0.99 < sum(section.bars) <= 1.01
    text = report_page(run)
    assert "<h3>Phases of a step</h3>" in text
    numbers = json.loads(re.search(r'id="headway-report">(.*?)</script>', text, re.DOTALL)[1])
    assert sum(phase["ns"] for phase in numbers["phases"]) == numbers["mean_step"]["duration_ns"]


def test_a_run_without_phases_has_no_such_section(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "wall_s": 1.0}\n{"step": 2, "wall_s": 1.0, "phases": {}}\n')
    run = read_run(tmp_path / "m.jsonl")
    assert phases(run.mean) == []
    assert "Phases of a step" not in report_page(run)


def test_hostile_names_of_phases_stay_text(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl")
    hostile = "<script>alert(1)</script>"
    records = (tmp_path / "m.jsonl").read_text().replace('"rollout"', json.dumps(hostile))
    (tmp_path / "m.jsonl").write_text(records)
    assert hostile not in report_page(read_run(tmp_path / "m.jsonl"))


def test_the_markdown_has_the_table_too(tmp_path):
    metered_rl_loop(tmp_path / "m.jsonl")
    text = report_markdown(read_run(tmp_path / "m.jsonl"))
    assert "### Phases of a step" in text
    assert "decode steps of 16.0 rows" in text
