"""Find which rule, row length and peak explain a log's numbers, from the log's own arithmetic within its rounding."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headway.audit.rows import Counted, Interval, Log, common, hull
from headway.conventions import Architecture, Convention, Step, conventions, get_convention
from headway.conventions.tool_peaks import plausible_peaks
from headway.errors import LogError
from headway.words import Argument

_SAME = 1e-9  # rules whose numbers agree to this share are one rule on this model
_SLACK = 1e-9  # for the arithmetic of floats
_ROW_LENGTHS = sorted({*(256 * k for k in range(1, 65)), *(1024 * k for k in range(1, 257))})
_JOB_SIZES = sorted({1, 2, 3, 4, 5, 6, 7, *(8 * k for k in range(1, 65)), *(2**k for k in range(9, 16))})


@dataclass(frozen=True, slots=True)
class Fit:
    """A rule, with a configuration, that explains the log."""

    convention: Convention  # the rule
    seq_len: int  # row length [tokens]
    flops_per_token: float  # FLOPs that it bills per token position that the log counts [FLOP]
    num_ranks: int | None = None  # devices of the job, where the log's numbers fix them


@dataclass(frozen=True, slots=True)
class Identification:
    """The counting rule, row length and peak that a log's numbers imply."""

    fit: Fit | None  # the rule that explains them; None where several do and rounding does not decide
    fits: tuple[Fit, ...]  # every rule that does, with different numbers, the tool's own first
    same: tuple[str, ...]  # names of rules that give the same number as the first fit on this model
    # implied by tokens/s and FLOP/s over all rows [FLOP]; None where the log lacks one
    flops_per_token: Interval | None
    # implied by MFU over all rows [FLOP/s of one device]; None where the log prints no MFU
    peak_flops_per_s: Interval | None
    peak: float | None  # the peak in that interval that some tool uses; None where none or several do
    consistent: bool = True  # whether one number of FLOPs per token explains all rows


def bill_per_token(
    convention: Convention, model: Architecture, step: Step, counted: Counted = "billed"
) -> float | None:
    """FLOPs that a rule bills per token position that the log counts; None where it has no number."""
    bill, tokens = convention.bill(model, step), counted_tokens(convention, step, counted)
    return bill.flops / tokens if bill.flops and tokens else None


def counted_tokens(convention: Convention, step: Step, counted: Counted) -> int:
    """Token positions of a step that a log counts."""
    if counted == "billed":
        return convention.billed_tokens(step)
    return step.row_slots if counted == "rows" else step.workload.tokens


def identify(
    log: Log, model: Architecture, step_of: Callable[[int], Step], seq_len: int | None, num_ranks: int | None
) -> Identification:
    """Find the rule, the row length and the peak behind a log.

    Args:
        log: as `read_log` gives it.
        model: what was trained.
        step_of: builds the step for a row length.
        seq_len: the configured row length [tokens]; searched for when None.
        num_ranks: devices of the job, where known.

    Raises:
        LogError: no rule explains the numbers; the message says what they imply and which rules come nearest.
    """
    peak = common(_implied_peaks(log)) or hull(_implied_peaks(log))
    # The ratio of a row's FLOP/s and tokens/s is what the rule bills per token.
    implied = _implied_per_token(log, seq_len, num_ranks)
    if not implied:
        return _by_format(log, model, step_of, seq_len, num_ranks, peak)
    exact = common(implied)
    # All rows must agree on one number; where rounding lets none, any number between the rows' extremes will do.
    wanted = exact or hull(implied)
    assert wanted is not None, "there is at least one interval"
    wanted = wanted.widened(_SLACK)

    def fits_of(rules: Iterable[Convention]) -> list[Fit]:
        lengths = [seq_len] if seq_len else _ROW_LENGTHS
        fits = (fit for rule in rules for fit in _fits(rule, model, step_of, lengths, log.counted))
        return [fit for fit in fits if fit.flops_per_token in wanted]

    # The tool's own rules come first: another tool's rule is asked only where none of them fits.
    own = [get_convention(name) for name in log.conventions]
    matching = fits_of(own) or fits_of(rule for rule in conventions() if rule not in own)
    if not matching and exact is not None:
        raise LogError(_unexplained(log, model, step_of, seq_len, exact))
    fits = _distinct(matching)
    # Rules that bill the same on this model cannot be told apart by its logs, so they are named beside the first fit.
    same = tuple(
        rule.name
        for rule in conventions()
        if fits
        and rule is not fits[0].convention
        and (value := bill_per_token(rule, model, step_of(fits[0].seq_len), log.counted))
        and abs(value / fits[0].flops_per_token - 1) < _SAME
    )
    decided = fits[0] if len(fits) == 1 and exact is not None else None
    return Identification(decided, fits, same, exact or hull(implied), peak, nominal_peak(peak, log), exact is not None)


def nominal_peak(interval: Interval | None, log: Log) -> float | None:
    """Find the one peak in an interval [FLOP/s] that the log's own tool divides by, or else that any tool does."""
    return _own_peak(interval, log) or _one_of(plausible_peaks(), interval)


def _own_peak(interval: Interval | None, log: Log) -> float | None:
    tools = frozenset(get_convention(name).tool for name in log.conventions)
    return _one_of(plausible_peaks(tools), interval)


def _is_of_table(peak: Interval | None, fit: Fit) -> bool:
    return _one_of(plausible_peaks(frozenset({fit.convention.tool})), peak) is not None


def _one_of(peaks: Sequence[float], interval: Interval | None) -> float | None:
    inside = [peak for peak in peaks if interval is not None and peak in interval.widened(_SLACK)]
    return inside[0] if len(inside) == 1 else None


def _implied_peaks(log: Log) -> list[Interval]:
    return [
        row.flops_per_s.range / row.mfu.range
        for row in log.rows
        if row.flops_per_s and row.mfu and row.mfu.range.low > 0
    ]


def _implied_per_token(log: Log, seq_len: int | None, num_ranks: int | None) -> list[Interval]:
    """FLOPs per token position, row by row, where a row says enough."""
    implied = []
    for row in log.rows:
        if row.flops_per_s is None or not row.flops_per_s.value:
            continue
        if row.tokens_per_s is not None and row.tokens_per_s.range.low > 0:
            implied.append(row.flops_per_s.range / row.tokens_per_s.range)
        elif row.step_s and row.sequences and seq_len and num_ranks:
            implied.append(row.flops_per_s.range * row.step_s.range * num_ranks / (row.sequences * seq_len))
    return implied


def _by_format(
    log: Log,
    model: Architecture,
    step_of: Callable[[int], Step],
    seq_len: int | None,
    num_ranks: int | None,
    peak: Interval | None,
) -> Identification:
    """Take the tool's own rule where the log does not print FLOP/s beside tokens/s, and let whole numbers decide."""
    lengths = [seq_len] if seq_len else []
    rules = map(get_convention, log.conventions)
    candidates = [fit for rule in rules for fit in _fits(rule, model, step_of, lengths, log.counted)]
    work = [row.flops_per_s.range * row.step_s.range for row in log.rows if row.flops_per_s and row.step_s]
    # FLOP/s x step time is the step's work on one device; the sequences of a step make it the job's, for one job size.
    sequences = {row.sequences for row in log.rows}
    batch = next(iter(sequences), None) if len(sequences) == 1 else None
    if work and batch and (total := common(work) or hull(work)):
        sized = [
            Fit(fit.convention, fit.seq_len, fit.flops_per_token, ranks)
            for fit in candidates
            for ranks in _JOB_SIZES
            if fit.flops_per_token * fit.seq_len * batch / ranks in total.widened(_SLACK)
        ]
        if candidates and not sized:
            raise LogError(_no_job_size(log, model, candidates, batch, total))
        # A job size decides as a rule does: one fit alone.
        fits = _distinct(sized, by_ranks=True)
        decided = fits[0] if len(fits) == 1 else None
        implied = total * (decided.num_ranks or 1) / (batch * decided.seq_len) if decided else None
        return Identification(decided, fits, (), implied, peak, nominal_peak(peak, log))
    # Without FLOP/s, MFU and tokens/s imply the peak that the rule divides by.
    if peak is None and candidates:
        # the tool has several rules: it is the one under which this peak is in the tool's table
        of_table = [fit for fit in candidates if _is_of_table(_peak_from_share(log, fit, num_ranks)[0], fit)]
        candidates = of_table if len(of_table) == 1 else candidates
        first = candidates[0]
        peak, ranks = _peak_from_share(log, first, num_ranks)
        fits = tuple(Fit(fit.convention, fit.seq_len, fit.flops_per_token, ranks) for fit in candidates)
        nominal = nominal_peak(peak, log)
        # FLOPs per token that the tool bills, if it divides by the one peak of its table that fits
        is_of_table = peak is not None and nominal is not None and log.tool != "nanoGPT"
        implied = Interval(nominal or 0, nominal or 0) * first.flops_per_token / peak if peak and is_of_table else None
        return Identification(fits[0] if peak and len(fits) == 1 else None, fits, (), implied, peak, nominal)
    return Identification(None, tuple(candidates), (), None, peak, nominal_peak(peak, log))


def _peak_from_share(log: Log, fit: Fit, num_ranks: int | None) -> tuple[Interval | None, int | None]:
    """Find the peak that MFU and tokens/s imply under a rule; over the job's size too, where that is not known."""
    if log.tool == "nanoGPT":
        return Interval(312e12, 312e12), num_ranks  # nanoGPT's source divides by an A100, whatever the device
    shares = [
        row.tokens_per_s.range * fit.flops_per_token / row.mfu.range
        for row in log.rows
        if row.tokens_per_s and row.mfu and row.mfu.range.low > 0
    ]
    total = common(shares) or hull(shares)
    if total is None:
        return None, num_ranks
    if num_ranks or not log.whole_job:
        return total, num_ranks
    sizes_by_table = [[ranks for ranks in _JOB_SIZES if find(total / ranks, log)] for find in (_own_peak, nominal_peak)]
    sizes = sizes_by_table[0] or sizes_by_table[1]
    return (total / sizes[0], sizes[0]) if len(sizes) == 1 else (None, None)


def _fits(
    rule: Convention, model: Architecture, step_of: Callable[[int], Step], lengths: Sequence[int], counted: Counted
) -> list[Fit]:
    fits = []
    for length in lengths:
        step = step_of(length)
        value = bill_per_token(rule, model, step, counted)
        if value is not None and int(step.workload.segments.max()) <= length:
            fits.append(Fit(rule, length, value))
    return fits


def _distinct(fits: Iterable[Fit], *, by_ranks: bool = False) -> tuple[Fit, ...]:
    distinct: list[Fit] = []
    for fit in fits:
        new = all(
            abs(fit.flops_per_token / other.flops_per_token - 1) > _SAME
            or (by_ranks and fit.num_ranks != other.num_ranks)
            for other in distinct
        )
        if new:
            distinct.append(fit)
    return tuple(distinct)


def _unexplained(
    log: Log, model: Architecture, step_of: Callable[[int], Step], seq_len: int | None, implied: Interval
) -> str:
    length = seq_len or 4096
    values = [(rule, bill_per_token(rule, model, step_of(length), log.counted)) for rule in conventions()]
    billed = [(rule.name, value) for rule, value in values if value is not None]
    billed.sort(key=lambda pair: abs(pair[1] - implied.middle))
    nearest = ", ".join(f"{name} {value / 1e9:.3f}" for name, value in billed[:3])
    at = f"at a row length of {seq_len}" if seq_len else "at any row length up to 262,144"
    return (
        f"no convention explains this {log.tool} log: tokens/s and FLOP/s imply {implied.low / 1e9:.3f} to "
        f"{implied.high / 1e9:.3f} GFLOP per token, and no rule bills {model.name} that {at}. Nearest "
        f"{'' if seq_len else 'at 4,096 '}are {nearest} GFLOP. Check {Argument('model')}, {Argument('seq_len')} (the "
        f"configured one, not the samples'), {Argument('segments')} for rules that look at them, and that tokens/s "
        "and FLOP/s are both of one device."
    )


def _no_job_size(log: Log, model: Architecture, fits: Sequence[Fit], batch: int, total: Interval) -> str:
    needed = ", ".join(
        f"{fit.convention.name} {fit.flops_per_token * fit.seq_len * batch / total.middle:.2f}" for fit in fits
    )
    return (
        f"no convention explains this {log.tool} log: a step took {total.low / 1e12:.2f} to {total.high / 1e12:.2f} "
        f"TFLOP per device, and {model.name} in {batch} rows of {fits[0].seq_len} tokens would need so many devices, "
        f"which are no whole numbers: {needed}. Check {Argument('model')} and {Argument('seq_len')}, or give "
        f"{Argument('num_ranks')}."
    )
