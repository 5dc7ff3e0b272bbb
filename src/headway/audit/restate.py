"""Restate a log in `useful`: row by row, as time-weighted means, with the difference attributed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from headway.audit.by_phase import PhaseRow, restated
from headway.audit.compare import Factor, factors
from headway.audit.identify import Fit, Identification, counted_tokens, identify
from headway.audit.rows import Interval, Log, LogRow, RestatedRow, per_device
from headway.conventions import Architecture, Step, get_convention
from headway.devices import Peak
from headway.errors import LogError, UsageError
from headway.words import Argument

_SAME_PEAK = 1e-9  # peaks that agree to this share are one
_AGREEMENT = 0.005  # factors must multiply to the reported over the useful MFU this closely
_FAR = 2.0  # MFU of a phase by its time and MFU by the tool's own clock within it differ by less
_UPDATES = ("update_actor", "actor_train", "policy_training")  # phases that tools print a rate of
_PEAK_AGREEMENT = 0.01  # peaks further apart than this are those of two devices


@dataclass(frozen=True, slots=True)
class Audit:
    """A log, identified and restated."""

    log: Log  # rows of one device
    identified: Identification  # rule and peak that explain the log
    step: Step | None  # the work that a row stands for; None for Headway's own records, which counted theirs
    rows: tuple[RestatedRow, ...]  # restated
    # the peak below useful MFU [FLOP/s of one device]; None where nothing says
    peak_flops_per_s: float | None
    peak_source: str  # source of that peak
    reported_mfu_mean: float | None  # time-weighted mean as printed; None where the log prints none
    useful_mfu_mean: float | None  # time-weighted mean in `useful`
    factors: tuple[Factor, ...]  # reported over useful, attributed; they multiply to `ratio`
    ratio: float | None  # reported over useful mean; of FLOPs where the log prints no MFU; None where no rule is known
    warnings: tuple[str, ...]  # numbers that cannot be right, with likely causes
    notes: tuple[str, ...]  # remarks on the numbers
    phases: tuple[PhaseRow, ...] = ()  # steps by phase, for a trainer that generates

    @property
    def fit(self) -> Fit | None:
        """The rule that the factors belong to: the identified one, or the tool's own where rounding does not decide."""
        return self.identified.fit or (self.identified.fits[0] if self.identified.fits else None)


def audit(
    log: Log,
    model: Architecture,
    step_of: Callable[[int], Step],
    *,
    seq_len: int | None = None,
    device: Peak | None = None,
    num_ranks: int | None = None,
    trained: Architecture | None = None,
    skip: int = 0,
    mean_sample: int | None = None,
) -> Audit:
    """Identify a log's counting rule and restate it in `useful`.

    Args:
        log: as `read_log` gives it.
        model: what was trained, every parameter trainable.
        step_of: builds the step that a row stands for, from a row length [tokens].
        seq_len: the configured row length [tokens]; searched for when None.
        device: peak of one device; the log's own where None and identified.
        num_ranks: devices of the job, where the log does not fix them.
        trained: the model with its frozen parameters, if any are.
        skip: rows to leave out at the start (warm-up).
        mean_sample: mean length of prompt and answer together [tokens], for phases of a log that does not tell it.

    Raises:
        LogError: no rule explains the numbers, or no row is left.
        UsageError: the row length is neither given nor found.
    """
    log = _without_warm_up(log, skip)
    phases, remarks = restated(log, (trained or model).cost_model, device, num_ranks, mean_sample)
    log = replace(log, notes=(*log.notes, *remarks))
    if not log.rows:  # times and lengths, and no rate to explain
        nothing = Identification(None, (), (), None, None, None)
        return replace(_summed_up(log, nothing, None, (), _peak(nothing, device), device, [], 0), phases=phases)
    identified = identify(per_device(log, num_ranks) if num_ranks else log, model, step_of, seq_len, num_ranks)
    fit = identified.fit or (identified.fits[0] if identified.fits else None)
    length = seq_len or (fit.seq_len if fit else None)
    if length is None and not log.conventions:  # a log of times alone, for which no rule asks for a row's length
        length = seq_len = int(step_of(1).workload.segments.max())
    if length is None or (not seq_len and identified.fit is None):
        raise UsageError(
            Argument("seq_len"),
            f" is missing, and this {log.tool} log does not determine it, because several row lengths or none "
            "explain its numbers. Give the configured row length in tokens.",
        )
    ranks = num_ranks or (fit.num_ranks if fit else None)
    log = per_device(log, ranks) if ranks else log
    step = step_of(length)
    trained = trained or model
    peak, source = _peak(identified, device)
    useful = get_convention("useful").bill(trained, step).flops or 0
    counted = counted_tokens(fit.convention, step, log.counted) if fit else step.workload.slots
    seconds = _durations(log)
    rows = tuple(
        RestatedRow(
            row,
            useful / counted,
            _useful_mfu(row, log, useful / counted, float(useful), fit, identified, peak),
            duration,
        )
        for row, duration in zip(log.rows, seconds, strict=True)
    )
    links = list(factors(fit.convention, model, step, trained)) if fit else []
    result = _summed_up(log, identified, step, rows, (peak, source), device, links, length)
    return replace(result, phases=phases, warnings=(*result.warnings, *_contradictions(rows, phases)))


def own(log: Log, *, device: Peak | None = None, skip: int = 0) -> Audit:
    """Restate Headway's own records, whose FLOPs are useful and need no model: for another peak, if one is given.

    Args:
        log: as `read_log` gives it, with what the records say of themselves.
        device: peak of one device; the one that was recorded where None.
        skip: rows to leave out at the start (warm-up).

    Raises:
        LogError: no row is left.
    """
    log = _without_warm_up(log, skip)
    basis = log.recorded
    assert basis is not None, "not Headway's own records"
    peak, source = basis.peak_flops_per_s, basis.peak_source
    if device is not None:
        peak, source = device.flops_per_s, f"{device.name}, {device.source}"
    seconds = _durations(log)
    rows = []
    for row, duration in zip(log.rows, seconds, strict=True):
        rate = row.flops_per_s.value if row.flops_per_s else 0.0
        per_token = rate / row.tokens_per_s.value if row.tokens_per_s else 0.0
        rows.append(RestatedRow(row, per_token, rate / peak if peak else None, duration))
    recorded = basis.peak_flops_per_s
    divided = None if recorded is None else Interval(recorded, recorded)
    identified = Identification(None, (), (), None, divided, recorded)
    return _summed_up(log, identified, None, tuple(rows), (peak, source), device, [], 0)


def _summed_up(
    log: Log,
    identified: Identification,
    step: Step | None,
    rows: tuple[RestatedRow, ...],
    peak_and_source: tuple[float | None, str],
    device: Peak | None,
    links: list[Factor],
    length: int,
) -> Audit:
    """Take the means over time, add the factor between the log's own peak and ours, and warn of oddities."""
    peak, source = peak_and_source
    seconds = [row.seconds for row in rows]
    reported = _mean([(row.mfu.value if row.mfu else None) for row in log.rows], seconds)
    mean = _mean([row.mfu for row in rows], seconds)
    own_peak = identified.peak or (identified.peak_flops_per_s.middle if identified.peak_flops_per_s else None)
    if reported and peak and own_peak and abs(peak / own_peak - 1) > _SAME_PEAK:
        links = [*links, Factor("peak", peak / own_peak, f"divided by {own_peak / 1e12:.1f} TFLOP/s")]
    ratio = (
        reported / mean if reported and mean else math.prod(link.ratio for link in links) if identified.fits else None
    )
    return Audit(
        log, identified, step, rows, peak, source, reported, mean, tuple(links), ratio,
        _warnings(rows, identified, device, links, ratio), _notes(log, seconds, length),
    )  # fmt: skip


def _without_warm_up(log: Log, skip: int) -> Log:
    rows, phased = log.rows[skip:], log.phased[skip:]
    if not rows and not phased:
        raise LogError("no row is left to audit: ", Argument("skip"), " leaves out all rows of the log.")
    return replace(log, rows=rows, phased=phased)


def _peak(identified: Identification, device: Peak | None) -> tuple[float | None, str]:
    if device is not None:
        return device.flops_per_s, f"{device.name}, {device.source}"
    if identified.peak is not None:
        return identified.peak, f"the log's own, from its MFU; {Argument('device')} states the device"
    if identified.peak_flops_per_s is not None:
        middle = identified.peak_flops_per_s.middle
        return middle, f"the middle of what the log's MFU implies; {Argument('device')} states the device"
    return None, f"unknown: the log prints no MFU; {Argument('device')} states the device"


def _useful_mfu(
    row: LogRow,
    log: Log,
    per_token: float,
    per_step: float,
    fit: Fit | None,
    identified: Identification,
    peak: float | None,
) -> float | None:
    """Restate one row: from tokens/s where it is that of one device, otherwise from its own rate or MFU."""
    if peak is None:
        return None
    if row.tokens_per_s is not None and not log.whole_job:
        return row.tokens_per_s.value * per_token / peak
    if fit is None:
        return per_step / row.step_s.value / peak if not log.conventions and row.step_s else None
    share = per_token / fit.flops_per_token
    if row.flops_per_s is not None and not log.whole_job:
        return row.flops_per_s.value * share / peak
    return None if row.mfu is None else row.mfu.value * share * (identified.peak or peak) / peak


def _durations(log: Log) -> list[float]:
    """Time that each row stands for [s]: printed, from the lines' time stamps, or one over tokens/s."""
    if all(row.step_s for row in log.rows):
        return [row.step_s.value if row.step_s else 0.0 for row in log.rows]
    rates = [row.tokens_per_s.value if row.tokens_per_s else 0.0 for row in log.rows]
    if all(rates) and (gaps := _gaps(log)):
        tokens = median(gap * rate for gap, rate in zip(gaps, rates[1:], strict=True))
        return [tokens / rates[0], *gaps]  # the first row's time is not stamped: its tokens are as the others'
    if all(rates):
        return [1 / rate for rate in rates]
    return [1.0] * len(log.rows)


def _gaps(log: Log) -> list[float]:
    """Times between the lines' stamps [s]; empty where they do not stand for as many steps each, or do not go on."""
    strides = {after.step - before.step for before, after in pairwise(log.rows)}
    stamps = [row.stamp_s for row in log.rows]
    gaps = [b - a for a, b in pairwise(stamps) if a is not None and b is not None]
    return gaps if len(strides) == 1 and len(gaps) == len(stamps) - 1 and min(gaps) > 0 else []


def _mean(values: list[float | None], seconds: list[float]) -> float | None:
    pairs = [(value, duration) for value, duration in zip(values, seconds, strict=True) if value is not None]
    total = sum(duration for _, duration in pairs)
    return sum(value * duration for value, duration in pairs) / total if total else None


def _warnings(
    rows: Sequence[RestatedRow],
    identified: Identification,
    device: Peak | None,
    factors: Sequence[Factor],
    ratio: float | None,
) -> tuple[str, ...]:
    warnings = []
    for row in rows:
        printed = row.row.mfu.value if row.row.mfu else 0.0
        if max(printed, row.mfu or 0.0) > 1:
            what = f"reports an MFU of {printed:.1%}" if printed > 1 else f"has a useful MFU of {row.mfu or 0:.1%}"
            warnings.append(
                f"step {row.row.step} {what}, which no device can reach, so some number is wrong. Likely causes: "
                f"tokens/s of the whole job taken for one device ({Argument('num_ranks')}), a wrong device in the "
                f"tool or in {Argument('device')}, a wrong {Argument('model')}, or a clock that does not wait for "
                "the device."
            )
            break
    # A peak that differs from the device's is another device's, in the tool's table or on the command line.
    peak = identified.peak_flops_per_s
    if device is not None and peak is not None and abs(peak.middle / device.flops_per_s - 1) > _PEAK_AGREEMENT:
        warnings.append(
            f"the log divides by {peak.low / 1e12:.1f} to {peak.high / 1e12:.1f} TFLOP/s, but {device.name} has "
            f"{device.flops_per_s / 1e12:.1f}. Either the tool took the device for another one, or "
            f"{Argument('device')} is wrong."
        )
    # One run has one number of FLOPs per token, unless its tool bills each step's samples.
    if not identified.consistent:
        warnings.append(
            "no single number of FLOPs per token explains all rows. Either the log mixes runs, or its rule depends "
            "on each step's samples."
        )
    # The factors come from the rule, the ratio from what the log prints: they agree where the two belong together.
    product = math.prod(factor.ratio for factor in factors)
    if factors and ratio and identified.fit and abs(product / ratio - 1) > _AGREEMENT:
        warnings.append(
            f"the factors multiply to {product:.4f}, the means' ratio is {ratio:.4f}. The printed numbers are too "
            "coarse, or do not belong together."
        )
    return tuple(warnings)


def _contradictions(rows: Sequence[RestatedRow], phases: Sequence[PhaseRow]) -> tuple[str, ...]:
    """Say where a printed MFU does not belong to the time and the lengths that the log prints beside it."""
    of_step = {row.row.step: row.mfu for row in rows}
    for phase in phases:
        printed = of_step.get(phase.step) if phase.printed_mfu and phase.phase in _UPDATES else None
        if printed is None or phase.mfu is None or not phase.mfu[0]:
            continue
        low, high = phase.mfu[0], phase.mfu[1] or math.inf
        if printed > _FAR * high or printed * _FAR < low or (high == math.inf and printed > _FAR**2 * low):
            return (
                f"step {phase.step}: the MFU that is printed of {phase.phase} is a useful one of {printed:.1%}, but "
                f"its time and lengths make {low:.1%}. Likely causes: another {Argument('model')} than was trained, "
                f"another number of devices ({Argument('num_ranks')}), several epochs on each sample, or a clock that "
                "leaves out much of the phase.",
            )
    return ()


def _span(values: Sequence[float]) -> str:
    """The least and the most, or one number where both are printed alike: "1,024 to 2,048"."""
    least, most = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _notes(log: Log, seconds: Sequence[float], seq_len: int) -> tuple[str, ...]:
    notes = [*log.notes]
    notes += [
        f"{count:,} {'lines are' if count > 1 else 'line is'} left out: {why}" for why, count in log.skipped.items()
    ]
    if log.whole_job:
        notes.append(
            f"the log's rates are those of all devices together. Give {Argument('num_ranks', example='N')} to see "
            "the rates and the MFU of each device"
        )
    rates = [row.tokens_per_s.value for row in log.rows if row.tokens_per_s]
    gaps = [] if any(row.step_s for row in log.rows) else _gaps(log)
    if gaps and len(rates) == len(log.rows) > 2:
        tokens = [rate * gap for rate, gap in zip(rates[1:], gaps, strict=True)]
        if max(tokens) < seq_len or min(tokens) < 0.95 * max(tokens):
            notes.append(
                f"tokens/s x the time between lines gives {_span(tokens)} tokens per step, but attention is billed "
                f"for rows of {seq_len:,}"
            )
    if len(seconds) > 3 and seconds[0] > 2 * median(seconds):
        notes.append(
            f"the first row stands for {seconds[0] / sum(seconds):.0%} of the time (start-up, compilation). Leave "
            f"this row out of the means with {Argument('skip', 1)}"
        )
    return tuple(notes)
