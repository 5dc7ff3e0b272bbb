"""Progress bars of training scripts, read as rows of a log."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from headway.audit.rows import NUMBER, STEP_NUMBER, Interval, LogRow, Reading, printed

# tqdm: description, bar, updates/all, elapsed and left, time of an update, and what the script sets behind it
_DIFFUSERS = re.compile(rf"\| {STEP_NUMBER}/\d+ \[[^\]]*?,\s*{NUMBER}(s/it|it/s), (?:step_)?loss=[^,\]]+, lr=")

BAR_NOTE = (
    "a progress bar has no FLOPs: what is restated is one update of one device, all its accumulated batches, as the "
    "options describe it, without the encoders beside the denoiser; its time is the bar's running mean"
)


def progress_bar(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read the progress bar of diffusers' training scripts: the last line of each update, and its time."""
    last: LogRow | None = None
    for line in lines:
        if (match := _DIFFUSERS.search(line)) is None:
            continue
        step, number, unit = int(match[1]), match[2], match[3]
        if last is not None and last.step != step:
            yield last
        if not float(number):
            skipped["an update whose time is not known yet"] += 1
            continue
        rate = printed(number)
        if unit == "it/s":
            low, high = rate.range.low, rate.range.high
            rate = Reading(1 / rate.value, Interval(1 / high, 1 / low if low else 2 / rate.value))
        last = LogRow(step, step_s=rate)
    if last is not None:
        yield last
