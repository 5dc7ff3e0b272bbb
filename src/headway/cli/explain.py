"""`headway explain`: where every second of a step went, in lines that add up to the step exactly."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cache import write_whole
from headway.cli import options
from headway.cli.output import print_result, warn, warn_of_unknown
from headway.cli.workload import WorkloadOptions, resolve_for
from headway.errors import UsageError
from headway.log.working import working

if TYPE_CHECKING:
    from headway.cli.explain_sources import Pair


_Rows = Literal["component", "module", "kernel", "attention", "gemm"]


@options.spread(without=["past", "logits"])
def explain(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...|RUN|LOG",
            help="Traces of torch.profiler (.json, plain or compressed), also of several ranks of one job "
            "or in a zip or tar; a run folder or metrics.jsonl; a log that `headway audit` reads. Two runs, two logs "
            "or two traces of one rank are compared, the second against the first.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Show only this step, by the number in ProfilerStep#N. Default: all complete steps."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            help=("Show only this rank. Traces of other ranks still give the time for which this rank waits."),
        ),
    ] = None,
    by: Annotated[
        _Rows | None,
        typer.Option(
            help=(
                "Add a table of time by component, module or kernel, of attention by pack and layer, or of matrix "
                "products by size (gemm)."
            ),
            show_default=False,
        ),
    ] = None,
    compares: Annotated[
        bool, typer.Option("--compare", help="Compare two traces line by line, even if their ranks differ.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Take the whole trace as one step.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that was trained, if the trace does not say: as for `headway flops`, with the workload below.",
        ),
    ] = None,
    *,
    work: WorkloadOptions,
    freeze: options.FreezeOption = None,
    lora: options.LoraOption = None,
    recompute: options.RecomputeOption = "none",
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="With --model: the steps have no backward.")
    ] = False,
    device: options.DeviceOption = None,
    as_json: options.JsonOption = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown, for an issue or a pull request.")] = False,
) -> None:
    """Show where every second of a step went: computing by class, communication, copies, idle time by cause.

    The lines of a step add up to the step exactly. A step lasts from its beginning on the host to the end of its work.
    In a trace of a CPU alone, operators take the place of kernels. Headway's own traces say what was computed. For
    other traces, describe the work of one step and one rank with --model and --segments. If a run has a profile,
    Headway explains the profile, and otherwise the records. Headway writes explain.json into the run's folder.

    Example: headway explain trace.json.gz --by kernel
    """
    if as_json and markdown:
        raise UsageError("--json and --md are two outputs; give one of them.")
    if forward_only and recompute != "none":
        raise UsageError("--recompute cannot take effect with --forward-only. Leave one of them out.")
    # A model and a workload from the options replace those that the traces record.
    from headway.cli.explain_sources import SourceOptions, explained
    from headway.explain.explanation import JobExplanation

    stated = None
    if model is not None:
        from headway.explain.stated_work import StatedWork

        workload = work.in_patches(model).build()
        cost_model = resolve_for(model, workload, work.supervised, freeze, lora)
        warn_of_unknown(cost_model.unknown)
        stated = StatedWork(model, cost_model, workload, recompute, forward_only)
    else:
        others = {
            "--freeze": freeze,
            "--lora": lora,
            "--recompute": recompute != "none",
            "--forward-only": forward_only,
        }
        unused = [*work.typed(), *(option for option, value in others.items() if value)]
        if unused:
            raise UsageError(f"{unused[0]} cannot take effect without --model. Name the model, or leave it out.")
    with working(f"reading {', '.join(path.name for path in paths)}"):
        explanation = explained(paths, SourceOptions(step, rank, whole, stated, device), compares=compares)
    if not isinstance(explanation, JobExplanation):
        _compare(explanation, by, as_json=as_json, markdown=markdown)
        return
    from headway.explain.breakdown import breakdown_record, gemms_record
    from headway.explain.text import as_text

    record = explanation.to_dict()
    if by is not None:
        for written, waterfall in zip(record["steps"], explanation.steps, strict=True):
            written["by"] = gemms_record(waterfall) if by == "gemm" else breakdown_record(waterfall, by)
    if paths[0].is_dir() and step is None and rank is None:
        _keep(record, paths[0] / "explain.json")
    print_result(lambda: record, lambda: as_text(explanation, by, markdown=markdown), as_json=as_json)


def _compare(pair: "Pair", by: _Rows | None, *, as_json: bool, markdown: bool) -> None:
    if by is not None:
        raise UsageError(f"--by {by} cannot take effect in a comparison, which is by line. Leave it out.")
    from headway.explain.comparison import compare, comparison_text

    compared = compare(*pair)
    print_result(compared.to_dict, lambda: comparison_text(compared, markdown=markdown), as_json=as_json)


def _keep(record: dict[str, Any], path: Path) -> None:
    """Write the explanation of a run into its folder; one that cannot be written to is explained all the same."""
    try:
        write_whole(path, lambda file: file.write(json.dumps(record).encode() + b"\n"))
    except OSError as error:
        warn(f"{path} cannot be written: {error.strerror or error}.")
