from io import StringIO

import pytest
from rich.console import Console

from headway.errors import ConfigError, UsageError
from headway.log.live import LiveSink
from headway.log.sinks import open_sink


def record(step, **more):
    return {"step": step, "mfu": 0.4123, "tokens_per_s": 12800.4, "padding_share": 0.071, **more}


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_without_a_terminal_there_is_a_line_every_so_many_records():
    out, clock = StringIO(), Clock()
    with LiveSink(20, every=5, console=Console(file=out, width=200), clock=clock) as sink:
        for step in range(1, 12):
            clock.now_s = 3.0 * step
            sink.write(record(step, loss=2.0))
    assert out.getvalue().splitlines() == [
        "step 1 of 20  loss 2.0000  tokens/s 12,800  padding 7.1 %  MFU 41.2 %",
        "step 6 of 20  loss 2.0000  tokens/s 12,800  padding 7.1 %  MFU 41.2 %  left 42.00 s",  # 14 steps of 3 s
        "step 11 of 20  loss 2.0000  tokens/s 12,800  padding 7.1 %  MFU 41.2 %  left 27.00 s",
    ]


def test_every_record_can_be_a_line_and_what_is_missing_is_left_out():
    out = StringIO()
    with LiveSink(every=1, console=Console(file=out, width=200)) as sink:
        sink.write({"step": 1, "mfu": None})
        sink.write({"kind": "evaluation", "step": 1, "loss": 9.0})
        sink.write({"step": 2, "mfu": 0.5})
    assert out.getvalue().splitlines() == ["step 1", "step 2  MFU 50.0 %"]


def test_a_terminal_shows_one_panel_that_holds_the_last_record():
    out = StringIO()
    console = Console(file=out, width=60, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    with LiveSink(console=console) as sink:
        sink.write(record(1))
        sink.write(record(2, loss=1.25))
    last = out.getvalue().rpartition("headway")[2]
    for word in ("step", "2", "MFU", "41.2 %", "12,800", "1.2500", "7.1 %"):
        assert word in last
    assert "\x1b[?25h" in last  # the cursor is back


def test_the_steps_of_the_run_can_be_given_in_words(capsys):
    with open_sink("live:40") as sink:
        sink.write({"step": 3, "mfu": 0.5})
    assert capsys.readouterr().err == "step 3 of 40  MFU 50.0 %\n"
    with pytest.raises(ConfigError, match="live:soon names no number of steps"):
        open_sink("live:soon")


def test_every_nought_records_is_refused():
    with pytest.raises(UsageError, match="every=0 is not a number of records"):
        LiveSink(every=0)
