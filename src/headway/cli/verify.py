"""`headway verify`: a model's ledger against PyTorch's own counter, on a real step."""

import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.cli.output import needs_extra, print_result
from headway.cli.resolve import check_name, resolve_config
from headway.errors import HeadwayError, UsageError
from headway.log.working import working
from headway.report import Column, format_count, render_pairs, render_table

if TYPE_CHECKING:
    from headway.tracing.verify import Line


def verify(
    model: options.ModelArgument,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Number of layers to keep in each tower.")] = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device of the real step.")] = "cpu",
    as_json: options.JsonOption = False,
) -> None:
    """Run one small real step, with random weights, and compare each module's FLOPs with PyTorch's FlopCounterMode.

    The exit code is 1 if a difference is not explained.

    Example: headway verify gpt2
    """
    check_name(model)
    with needs_extra("running a model"), working(f"running a step of {model}"):
        lines, unseen, name = _run(model, layers, device)
    folded = _fold(lines)
    differences = [line for line in folded if line["explanation"] is None]
    record = {"model": name, "layers": layers, "modules": folded}
    record |= {"unseen": sorted(unseen), "unexplained": len(differences)}
    print_result(lambda: record, lambda: _text(folded, unseen, name, layers), as_json=as_json)
    if differences:
        raise HeadwayError(
            f"{len(differences)} of {len(folded)} modules differ from PyTorch's counter, and nothing explains the "
            f"difference: {', '.join(line['module'] for line in differences[:5])}. Please report this with the "
            "model's config.json."
        )


def _run(name: str, layers: int, device: str) -> tuple[list["Line"], set[str], str]:
    import torch

    from headway.tracing import trace
    from headway.tracing.build import model_class, with_layers
    from headway.tracing.inputs.model_inputs import inputs_for
    from headway.tracing.verify import verify as compare

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no CUDA device here. Leave the option out to run on the CPU.")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} is neither cpu nor cuda.")
    config = with_layers(resolve_config(name), layers)
    _check_memory(name, trace(config).params.total, device)
    model = model_class(config)._from_config(config, dtype=torch.float32).to(device).train()
    lines, unseen = compare(model, inputs_for(model).workloads()[1])
    return lines, unseen, name


def _check_memory(name: str, num_params: int, device: str) -> None:
    """Refuse a model whose fp32 weights and gradients do not fit into this machine's memory."""
    if device != "cpu":
        return
    needed, here = 8 * num_params, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * here:
        raise HeadwayError(
            f"{name} with these layers has {num_params / 1e9:.1f} billion parameters; their weights and gradients in "
            f"fp32 take {needed / 2**30:.0f} GiB and this machine has {here / 2**30:.0f} GiB. Give fewer --layers, or "
            "a config.json with fewer experts or narrower layers."
        )


def _fold(lines: list["Line"]) -> list[dict[str, Any]]:
    """Put layers that agree in everything but their number into one entry."""
    folded: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", line.module) or "(the model)"
        key = (module, line.op, line.ledger, line.counted, line.explanation)
        entry = folded.setdefault(
            key,
            {
                "module": module,
                "op": line.op,
                "times": 0,
                "ledger": {"forward": line.ledger[0], "backward": line.ledger[1]},
                "counted": {"forward": line.counted[0], "backward": line.counted[1]},
                "explanation": line.explanation,
            },
        )
        entry["times"] += 1
    return list(folded.values())


def _text(folded: list[dict[str, Any]], unseen: set[str], name: str, layers: int) -> str:
    columns = [Column("module", "left"), Column("op", "left"), Column("times")]
    columns += [Column("ledger fwd"), Column("PyTorch fwd"), Column("ledger bwd"), Column("PyTorch bwd")]
    columns.append(Column("", "left"))
    notes = {
        why: f"[{i}]" for i, why in enumerate(dict.fromkeys(e["explanation"] for e in folded if e["explanation"]), 1)
    }
    rows = []
    for entry in folded:
        numbers = [entry[side][phase] for phase in ("forward", "backward") for side in ("ledger", "counted")]
        mark = "UNEXPLAINED" if entry["explanation"] is None else notes.get(entry["explanation"], "equal")
        rows.append([entry["module"], entry["op"], str(entry["times"]), *map(format_count, numbers), mark])
    pairs = [(number, why) for why, number in notes.items()]
    pairs.append(("model", f"{name}, {layers} layers of each tower, random weights, eager attention and experts, fp32"))
    equal = sum(entry["times"] for entry in folded if entry["explanation"] == "")
    explained = sum(entry["times"] for entry in folded if entry["explanation"])
    unexplained = sum(entry["times"] for entry in folded if entry["explanation"] is None)
    pairs.append(("modules", f"{equal} equal, {explained} explained, {unexplained} not"))
    pairs.append(("PyTorch cannot see", ", ".join(sorted(unseen)) or "nothing that ran here"))
    return f"{render_table(columns, rows)}\n\n{render_pairs(pairs)}"
