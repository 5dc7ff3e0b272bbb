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


def test_a_panel_takes_the_place_of_the_bar_and_lines_stand_above_it(monkeypatch):
    """As `headway train` shows them: every line whole, and one panel below them at the end."""
    from headway.log import live
    from headway.train.progress import Progress

    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    monkeypatch.setattr(live, "shared_console", lambda: console)
    monkeypatch.setattr("headway.train.progress.shared_console", lambda: console)
    with Progress(3, done=0, log_every=1, has_panel=True) as progress, live.LiveSink(3) as sink:
        for step in (1, 2, 3):
            sink.write(record(step))
            progress.step(record(step))
    shown = after_control_codes(out.getvalue())
    assert [line for line in shown if line.startswith("step ")] == [
        f"step {step}/3  tokens/s 12,800  padding 7.1 %  MFU 41.2 %" for step in (1, 2, 3)
    ]
    assert sum("headway" in line for line in shown) == 1
    assert shown[-1].startswith("╰")
    assert not any("training" in line for line in shown)


def after_control_codes(text):
    """Lines that a terminal shows once it has obeyed: moves up, and lines that are cleared."""
    import re

    lines, row = [""], 0
    for part in re.findall(r"\033\[[?\d;]*[A-Za-z]|\r|\n|[^\033\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\033"):
            row -= int(part[2:-1] or 1)
        elif part == "\033[2K":
            lines[row] = ""
        elif not part.startswith("\033") and part != "\r":
            lines[row] += part
    return [line for line in lines if line]
