"""One page of what a GPU gave: the recipes' MFU beside its estimate, where their steps' time went, attention's kernels.

    make gpu-report                          # build/gpu-report.html, of the committed records, which have no profiles
    make gpu-report FROM=gpu-results         # first of what benchmarks/gpu_all.sh left, in pieces or whole
    .venv/bin/python benchmarks/gpu_report.py gpu-results benchmarks/results -o gpu-report.html

Of several folders, a record is taken from the first that has one of its name, a profile from the first that has one of
its case. A profile is explained as `headway explain` does it, and its lines stand beside those that `headway plan`
predicts for the same pack. Nothing is measured.
"""

import argparse
import contextlib
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attention_gpu import fastest_kernels
from engine_case import folder_name
from engine_forecast import StepLines, measured_lines, predicted_lines
from engine_setups import SETUPS
from engine_table import attention_kernel, packs, remarks
from headway.explain.explanation import JobExplanation, mean_of
from headway.explain.run_folder import newest_window
from headway.explain.trace import read_traces
from headway.explain.waterfall import explain
from headway.pages.page import RunPage
from headway.pages.steps import time_section
from headway.report import format_bytes, format_duration, format_share
from headway.report.section import ReportSection
from record import RESULTS, describe_environment

ESTIMATES = {"text": 0.46, "image": 0.38, "video": 0.39, "vqa": 0.22}
"""Useful MFU of each recipe as it was estimated before the first run, from a list of its operations at rates that were
read elsewhere: products 640 TFLOP/s, FlashAttention-2 310, memory 4.0 TB/s. Review of 2026-11-25, benchmarks/log.md."""
PIECES = "*.tar.gz.*"
Row = dict[str, Any]


def main() -> None:
    """Read folders, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", default=[RESULTS], help="with records, and profiles/ if any")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-report.html"), help="the page")
    options = parser.parse_args()
    if missing := [str(folder) for folder in options.folders if not folder.is_dir()]:
        parser.error(f"{', '.join(missing)} is no folder; give those that hold records of engine_gpu.py")
    with contextlib.ExitStack() as stack:
        folders = [place for folder in options.folders for place in stack.enter_context(unpacked(folder))]
        records = read_records(folders)
        if not records.get("engine_gpu"):
            parser.error(f"no engine_gpu_*.json is in {', '.join(map(str, options.folders))}; engine_gpu.py writes one")
        written = page(records, folders)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(written, encoding="utf-8")
    print(f"{options.output}: {len(written):,} bytes", file=sys.stderr)


@contextlib.contextmanager
def unpacked(folder: Path) -> Iterator[list[Path]]:
    """The folder, and what the pieces of a tar in it hold."""
    pieces = sorted(folder.glob(PIECES))
    if not pieces:
        yield [folder]
        return
    joined = io.BytesIO(b"".join(path.read_bytes() for path in pieces))
    with tempfile.TemporaryDirectory() as name, tarfile.open(fileobj=joined) as archive:
        archive.extractall(name, filter="data")
        yield [folder, Path(name)]


def read_records(folders: Sequence[Path]) -> dict[str, list[Row]]:
    """Read the records of a GPU by what they are of; of one name the first."""
    found: dict[str, Row] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.get("what") in ("engine_gpu", "attention_gpu", "meter_truth"):
                found.setdefault(path.name, record)
    by_kind: dict[str, list[Row]] = {}
    for name, record in found.items():
        if record["what"] == "engine_gpu" or "nvidia" in name:
            by_kind.setdefault(record["what"], []).append(record)
    return by_kind


def page(records: dict[str, list[Row]], folders: Sequence[Path]) -> str:
    """Render the page."""
    headings: dict[str, list[ReportSection]] = {}
    first, notes, facts, lead = [], [], [], []
    for record in records["engine_gpu"]:
        device = record["environment"]["device"]
        cases = [case for case in record["cases"].values() if case["setup"] in SETUPS and case["case"][:5] != "smoke"]
        measured = [case for case in cases if "mfu" in case]
        predicted = {case["case"]: _predicted(record, case) for case in measured}
        lead += _reached(measured)
        # models that were cut to fit are others than the recipes': they stand by themselves
        is_whole = {case["case"]: case["layers"] == case["of_layers"] for case in measured}
        for title, are_whole in ((device, True), (f"{device}, of parts of models", False)):
            rows = [case for case in measured if is_whole[case["case"]] is are_whole]
            first += [section for section in (_shares(rows, title), _rates(rows, predicted)) if section.rows]
        facts += _facts(record)
        for case in measured:
            parts, about = _case_sections(case, predicted[case["case"]], folders)
            headings[f"{case['case']} ({device})" if len(records["engine_gpu"]) > 1 else case["case"]] = parts
            notes += about
        notes += [remark for case in cases for remark in remarks(case)]
        if record["scale"] == "small":
            notes.append("small sizes: a smoke test, whose rates mean nothing")
        notes.append(describe_environment(record))
    for record in records.get("attention_gpu", ()):
        headings[f"Attention on {record['environment']['device']}"] = _attention(record)
    for record in records.get("meter_truth", ()):
        headings[f"The meter on {record['environment']['device']}"] = [_truth(record)]
    first.append(ReportSection("What was measured", ["what", "value"], [list(fact) for fact in facts]))
    first.append(ReportSection("What to know of these numbers", points=notes))
    return RunPage(
        title="The engine on a GPU",
        facts=[record["environment"]["device"] for record in records["engine_gpu"]],
        tiles=ReportSection("", ["recipe", "MFU", "target"], lead),
        folds={"All recipes": first} | {heading: parts for heading, parts in headings.items() if parts},
        numbers={"records": records},
    ).as_html()


def _reached(cases: Sequence[Row]) -> list[list[str]]:
    """The best MFU of each recipe beside its target, and which recipes have none."""
    rows = []
    for name, setup in SETUPS.items():
        best = max((case for case in cases if case["setup"] == name), default=None,
                   key=lambda case: (case["layers"] == case["of_layers"], case["mfu"]))  # fmt: skip
        target = f"target {format_share(setup.target)}"
        if best is not None and best["layers"] < best["of_layers"]:
            target = f"{best['layers']} of {best['of_layers']} layers"
        rows.append([name, "not measured" if best is None else format_share(best["mfu"]), target])
    return rows


def _facts(record: Row) -> list[tuple[str, str]]:
    env, ceiling = record["environment"], record["ceiling"]
    peaks = {case["peak_flops_per_s"] for case in record["cases"].values() if "peak_flops_per_s" in case}
    rates = {name: ceiling[f"{name}_flops_per_s"] for name in ("best", "sustained")}
    return [
        ("device", env["device"]),
        ("date", env["date"]),
        ("versions", f"torch {env['torch']}, transformers {env['transformers']}, Headway {env['headway']}"),
        *(("peak", f"{peak / 1e12:,.1f} TFLOP/s") for peak in sorted(peaks)),
        *((f"{name} product", f"{rate / 1e12:,.2f} TFLOP/s") for name, rate in rates.items()),
    ]


def _shares(cases: Sequence[Row], device: str) -> ReportSection:
    """MFU of each case beside what was estimated and what is aimed at."""
    bars, rows = [case["mfu"] for case in cases], []
    for case in cases:
        estimate, target = ESTIMATES[case["setup"]], SETUPS[case["setup"]].target
        name = _name(case)
        rows.append([name, format_share(case["mfu"]), format_share(estimate), format_share(target)])
    title = f"Useful MFU on {device}"
    says = "Useful FLOPs (useful/1) over the datasheet's dense peak; estimated on 2026-11-25, by a list of operations."
    return ReportSection(title, ["case", "measured", "estimated", "target"], rows, says, bars=bars)


def _rates(cases: Sequence[Row], predicted: dict[str, StepLines | None]) -> ReportSection:
    headings = ["case", "layers", "step", "predicted", "tokens/s", "MFU", "HFU", "as lmms-engine", "as torchtitan"]
    rows = []
    for case in cases:
        lines = predicted[case["case"]]
        others = [case["others"].get(name) for name in ("lmms-engine", "torchtitan")]
        rows.append(
            [
                _name(case),
                f"{case['layers']} of {case['of_layers']}",
                format_duration(case["step_s"]),
                "" if lines is None else format_duration(lines.step_s),
                f"{case['tokens_per_s']:,.0f}",
                *("" if share is None else format_share(share) for share in (case["mfu"], case["hfu"], *others)),
            ]
        )
    says = "HFU adds what is recomputed. The last columns are what these tools would print for the same step and peak."
    return ReportSection("Steps, and MFU in four conventions", headings, rows, says)


def _name(case: Row) -> str:
    """A case by its recipe and the kernels that ran, short enough for a bar."""
    attention = attention_kernel(case).removesuffix("'s ragged attention")
    run = ", headway train" if "headway train" in case["case"] else ""
    return f"{case['setup']}, {packs(case)}, {case['kernels']}{'' if case['compiled'] else ', eager'}, {attention}{run}"


def _predicted(record: Row, case: Row) -> StepLines | None:
    """The plan's lines of a case; none of small sizes, or where the table has no such device."""
    return None if record["scale"] == "small" else predicted_lines(case, record["environment"]["device"])


def _case_sections(
    case: Row, predicted: StepLines | None, folders: Sequence[Path]
) -> tuple[list[ReportSection], list[str]]:
    """Where a case's time went, what to mend first, predicted against measured; and what to know of it."""
    explanation = explained(case["case"], folders)
    sections, notes, measured = [], [], None
    if explanation is None:
        notes.append(f"{case['case']}: no profile is here; engine_gpu.py takes one with --profiles")
    else:
        mean = mean_of(explanation.steps)
        sections.append(time_section([mean], f"by `headway explain`, of {mean.num_steps} profiled steps"))
        findings = explanation.findings
        rows = [[f"{f.id}: {f.seen}", f"Likely: {f.cause} Try: {f.next}", format_share(f.share)] for f in findings]
        columns = ["finding", "why, and what to try", "of the step, at most"]
        sections.append(ReportSection("What to mend first", columns, rows))
        notes += [f"{case['case']}: {note}" for note in explanation.notes]
        measured = measured_lines(explanation.steps[-1])
    if predicted is not None:
        sections.insert(min(1, len(sections)), _time(case, predicted, measured))
    return [section for section in [*sections, _memory(case)] if section.rows], notes


def explained(case: str, folders: Sequence[Path]) -> JobExplanation | None:
    """The explanation of a case's profile; None where no folder has one."""
    for folder in folders:
        paths, _ = newest_window(folder / "profiles" / folder_name(case))
        if paths:
            return explain([trace for path in paths for trace in read_traces(path)])
    return None


def _time(case: Row, predicted: StepLines, measured: StepLines | None) -> ReportSection:
    """The plan's lines beside those of the profile, or beside the step alone."""
    plan, told = predicted.to_dict(), {} if measured is None else measured.to_dict()
    rows = []
    for name in dict.fromkeys([*plan, *told]):
        rows.append([name, *_beside(plan.get(name, 0.0), told.get(name) if measured is None else told.get(name, 0.0))])
    rows.append(["of these attention", *_beside(predicted.attention_s, measured and measured.attention_s)])
    if measured is not None:
        rows.append(["the profiled step", *_beside(predicted.step_s, measured.step_s)])
    rows.append(["a step without a profile", *_beside(predicted.step_s, case["step_s"])])
    title = "Time of a step, predicted and measured"
    headings = ["line", "predicted", "measured", "measured / predicted"]
    says = f"A tower's line has its products and attention. `headway plan` predicts the same pack: {predicted.source}."
    return ReportSection(title, headings, rows, says)


def _beside(predicted_s: float, measured_s: float | None) -> list[str]:
    if measured_s is None:
        return [format_duration(predicted_s), "", ""]
    ratio = f"{measured_s / predicted_s:.2f}" if predicted_s > 0 else ""
    return [format_duration(max(predicted_s, 0.0)), format_duration(measured_s), ratio]


def _memory(case: Row) -> ReportSection:
    """The parts of the predicted peak, and what the allocator had."""
    memory = case["memory"]
    plan = memory["predicted"]
    parts = {name: size for name, size in plan["moments"][plan["peak_moment"]].items() if size and name != "total"}
    rows = [[name, format_bytes(size)] for name, size in parts.items()]
    rows.append([f"predicted peak, in {plan['peak_moment']}", format_bytes(plan["peak"])])
    if memory["allocated"] is not None:
        ours = memory["allocated"] - memory["packs"]
        rows.append(["allocated, less the packs", f"{format_bytes(ours)}"])
        rows.append(["predicted / allocated", format_share(plan["peak"] / ours)])
    if memory["reserved"] is not None:
        rows.append(
            ["reserved, of the device", f"{format_bytes(memory['reserved'])} of {format_bytes(memory['device'])}"]
        )
    title = "Memory at the predicted peak, by part"
    return ReportSection(title, ["part", "memory"], rows)


def _attention(record: Row) -> list[ReportSection]:
    """Rates of forward with backward by shape and kernel, and the table of all that was timed."""
    rows = []
    for shape in record["shapes"]:
        for kernel, found in shape["kernels"].items():
            about = [shape["name"], f"{len(shape['lengths']):,} of at most {max(shape['lengths']):,}", kernel]
            if "error" in found:
                rows.append([*about, found["error"].partition("\n")[0][:120], "", "", ""])
                continue
            rates = [found[f"{what}_flops_per_s"] for what in ("forward", "both")]
            times = f"{1e3 * found['both_s']:.2f} ms", f"{max(found['errors'].values()):.1e}"
            rows.append([*about, *(f"{rate / 1e12:.0f} TFLOP/s" for rate in rates), *times])
    fastest = ", ".join(f"{setup} {kernel}" for setup, kernel in fastest_kernels(record["shapes"]).items())
    says = "Rates of the work that masks leave." + (f" Fastest over a recipe's layers: {fastest}." if fastest else "")
    title = "Attention, forward with backward [TFLOP/s]"
    headings = ["shape", "segments", "kernel", "forward", "with backward", "takes", "largest error"]
    return [ReportSection(title, headings, rows, says)]


def _truth(record: Row) -> ReportSection:
    """The meter's times over a stopwatch's."""
    rows = [
        [
            name,
            *(format_duration(loop[key]["median"]) for key in ("step_s", "added_s")),
            f"{loop['told_of_true']['median']:.4f}",
        ]
        for name, loop in record["loops"].items()
    ]
    return ReportSection("The meter against a stopwatch", ["loop", "step", "added", "told / true"], rows)


if __name__ == "__main__":
    main()
