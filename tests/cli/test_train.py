"""How `headway train` ends, and what it refuses before it begins."""

import signal
from types import SimpleNamespace

import pytest
import typer

from headway.cli.train import INTERRUPTED, print_summary, train
from headway.errors import UsageError


def test_two_ways_to_resume_contradict_each_other(tmp_path):
    with pytest.raises(UsageError, match="--resume and --resume-if-any contradict"):
        train(tmp_path / "recipe.yaml", resume=True, resume_if_any=True)


@pytest.mark.parametrize(
    ("complete", "stopped_by", "code"),
    [(True, 0, 0), (True, signal.SIGINT, 0), (False, signal.SIGINT, INTERRUPTED), (False, signal.SIGTERM, 0)],
)
def test_only_a_run_that_ctrl_c_cut_short_ends_with_130(complete, stopped_by, code, capsys):
    summary = SimpleNamespace(is_complete=complete, stopped_by=stopped_by, as_table=lambda: "the table", to_dict=dict)
    if code:
        with pytest.raises(typer.Exit) as ended:
            print_summary(summary, as_json=False)
        assert ended.value.exit_code == code
    else:
        print_summary(summary, as_json=False)
    assert capsys.readouterr().out == "the table\n"
