"""The page of `headway look --html`: samples as boxes of tokens, their pictures, packs as strips."""

import base64
from io import BytesIO
from typing import TYPE_CHECKING, Any

from headway.errors import DataError
from headway.report import format_count, format_flops, format_share
from headway.report.page import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.data import Budget
    from headway.data.look import DataView, ShownMedia, ShownPack, ShownPreference, ShownRow
    from headway.packing import OverlongCounts

_LONGEST_SIDE = 320  # longest side of a picture on the page [pixels]


def samples_page(view: "DataView") -> str:
    """Render samples, pictures and packs as one HTML page; whatever stands in them is escaped."""
    budget = view.budget
    lines = [] if budget is None else [pack_line(number, pack, budget) for number, pack in enumerate(view.packs, 1)]
    return render(
        "samples.html.jinja",
        model=view.model,
        samples=[_sample(sample, budget) for sample in view.samples],
        packs=[(line, pack.items) for line, pack in zip(lines, view.packs, strict=False)],
        budget=0 if budget is None else budget.tokens,
        counts=[counts_line(name, count) for name, count in view.counts.items()],
        bad=[str(error) for error in view.bad],
    )


def _sample(sample: "ShownRow | DataError", budget: "Budget | None") -> dict[str, Any]:
    from headway.data.look import ShownPreference, why_not_whole

    if isinstance(sample, DataError):
        return {"error": str(sample)}
    page: dict[str, Any] = {
        "error": "",
        "where": sample.where,
        "lengths": headline(sample),
        "left_out": why_not_whole(sample, budget) if budget is not None else None,
        "media": _pictured(sample.media, sample.where),
    }
    if not isinstance(sample, ShownPreference):
        return page | {"pieces": sample.pieces, "answers": []}
    # The prompt once, and behind it each answer, with the pictures that it alone was shown.
    shared = sample.num_shared
    answers = [
        {
            "lengths": answer_line(number, sample),
            "media": _pictured(answer.media, sample.where) if not sample.media else [],
            "pieces": answer.pieces[shared:],
        }
        for number, answer in enumerate(sample.answers)
    ]
    return page | {"pieces": sample.answers[0].pieces[:shared], "answers": answers}


def _pictured(media: "Sequence[ShownMedia]", where: str) -> list[tuple[str, str]]:
    return [(media_line(number, shown), _thumbnail(shown, where)) for number, shown in enumerate(media, start=1)]


def _thumbnail(shown: "ShownMedia", where: str) -> str:
    """An image made small, as PNG in base64; "" of a video or sound."""
    from headway.data.media.images import Picture

    if shown.kind != "image":
        return ""
    with Picture(shown.media, where) as opened:
        picture = opened.decode()
    picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    png = BytesIO()
    picture.save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()


def headline(sample: "ShownRow") -> str:
    """Lengths of a sample in words, and its grade if it has one."""
    lengths = sample.lengths
    grade = getattr(sample, "desirable", None)
    parts = [] if grade is None else [f"graded as a {'good' if grade else 'bad'} answer"]
    parts += [f"{lengths.num_answers} answers to one prompt"] if lengths.num_answers else []
    parts += [f"prompt of {format_count(lengths.prompt)} tokens once"] if lengths.branches else []
    parts.append(f"{format_count(lengths.tokens)} tokens")
    parts.append(f"{format_count(lengths.supervised)} learnt ({format_share(lengths.supervised / lengths.tokens)})")
    if lengths.patches:
        parts.append(f"{format_count(lengths.patches)} patches")
    return ", ".join(parts)


def answer_line(number: int, sample: "ShownPreference") -> str:
    """Place and lengths of one of the answers, counted from 0, in words."""
    place = "the best" if not number else "worse" if len(sample.answers) == 2 else f"place {number + 1}"
    return f"answer {number + 1}, {place}: {headline(sample.answers[number])}"


def media_line(number: int, shown: "ShownMedia") -> str:
    """An image, video or sound in words."""
    parts = [f"{shown.kind} {number}: {shown.media}"]
    if shown.size is not None:
        parts.append("{} x {} pixels".format(*shown.size))
    if shown.grid is not None:
        parts.append(f"grid {'x'.join(map(str, shown.grid))}, {format_count(shown.patches or 0)} patches")
    if shown.frames is not None:
        parts.append(f"{format_count(shown.frames)} feature frames")
    return ", ".join(parts)


def pack_line(number: int, pack: "ShownPack", budget: "Budget") -> str:
    """A pack's fill and costs in words."""
    share = format_share(pack.tokens / budget.tokens)
    fill = f"{format_count(pack.tokens)} of {format_count(budget.tokens)} tokens ({share})"
    patches = f", {format_count(pack.patches)} patches" if pack.patches else ""
    return f"pack {number}, step {pack.step}: {len(pack.items)} samples, {fill}{patches}, {format_flops(pack.flops)}"


def counts_line(name: str, count: "OverlongCounts") -> str:
    """Fate of a dataset's rows."""
    outcomes = [f"{format_count(count.read)} read"]
    outcomes += [
        f"{format_count(number)} {what}"
        for what in ("bad", "empty", "dropped", "truncated", "split")
        if (number := getattr(count, what))
    ]
    lost = f", {format_count(count.tokens_dropped)} tokens left out" if count.tokens_dropped else ""
    return f"{name}: {', '.join(outcomes)}{lost}"
