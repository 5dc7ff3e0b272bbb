"""The page of benchmarks/engine_gpu.py, rendered from its record."""

import re
from typing import Any

from engine_case import OTHERS
from engine_setups import SETUPS
from record import describe_environment, markdown_table

Row = dict[str, Any]
_ATTENTION = "Attention on CUDA: "  # begins the line of a run that says which kernel attends


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page; cases that failed or are under way are in it with what is known of them."""
    cases = list(record["cases"].values())
    engine = [case for case in cases if case["setup"] != "gpt2"]
    parts = ["# The engine on one device", ""]
    if record["scale"] == "small":
        parts += ["Small sizes: a smoke test, whose rates mean nothing.", ""]
    if measured := [case for case in engine if "mfu" in case]:
        parts += [_rates(measured, record["ceiling"]), "", "Memory of the same cases [GiB]:", "", _memory(measured), ""]
    if loops := [case for case in cases if case["setup"] == "gpt2" and "mfu" in case]:
        parts += ["GPT-2 in a plain loop with PyTorch's AdamW, rows of 1,024 tokens:", "", _gpt2(loops), ""]
    if lines := [remark for case in cases for remark in remarks(case)]:
        parts += ["Remarks:", "", *(f"* {remark}" for remark in lines), ""]
    return "\n".join([*parts, _explanation(record["ceiling"]), "", describe_environment(record), ""])


def _rates(cases: list[Row], ceiling: dict[str, float]) -> str:
    headings = [
        "",
        "layers",
        "packs",
        "kernels",
        "attention",
        "steps",
        "step [s]",
        "tokens/s",
        "MFU useful/1",
        "target",
        "HFU",
    ]
    headings += ["of the best matmul", "of the sustained", *(f"as {name}" for name in OTHERS)]
    rows = []
    for case in cases:
        rate = case["flops_per_step"] / case["step_s"]
        rows.append(
            [
                f"{SETUPS[case['setup']].model}, {case['case'].partition(',')[0]}",
                f"{case['layers']} of {case['of_layers']}",
                packs(case),
                f"{case['kernels']}, {'compiled' if case['compiled'] else 'eager'}",
                attention_kernel(case),
                str(case["steps"]),
                f"{case['step_s']:.3f} ({case['step_s_range'][0]:.3f} to {case['step_s_range'][1]:.3f})",
                f"{case['tokens_per_s']:,.0f}",
                f"**{_percent(case['mfu'])}**",
                f"{100 * SETUPS[case['setup']].target:.0f} %",
                _percent(case["hfu"]),
                _percent(rate / ceiling["best_flops_per_s"]),
                _percent(rate / ceiling["sustained_flops_per_s"]),
                *(_percent(case["others"].get(name)) for name in OTHERS),
            ]
        )
    return markdown_table(headings, rows)


def attention_kernel(case: Row) -> str:
    """The kernel of attention that ran, as the run's own notes have it.

    >>> attention_kernel({"notes": ["Attention on CUDA: PyTorch's variable-length FlashAttention-2; others are not"]})
    'FlashAttention-2'
    >>> attention_kernel({"notes": ["Attention on CUDA: cuDNN's ragged attention (cudnn)"]})
    "cuDNN's ragged attention"
    >>> attention_kernel({"notes": []})
    'by segment'
    """
    notes = [note.removeprefix(_ATTENTION) for note in case["notes"] if note.startswith(_ATTENTION)]
    if not notes:
        return "by segment"  # as on a CPU
    return re.split(r";| \(| behind ", notes[0])[0].removeprefix("PyTorch's variable-length ")


def packs(case: Row) -> str:
    """Packs of a step and the tokens of each; records of before they could be chosen have the recipe's.

    >>> packs({"setup": "text"}), packs({"setup": "text", "accumulation": 4, "tokens_per_pack": 20_480})
    ('1 x 81,920', '4 x 20,480')
    """
    length = case.get("tokens_per_pack", SETUPS[case["setup"]].packing_length)
    return f"{case.get('accumulation', 1)} x {length:,}"


def _memory(cases: list[Row]) -> str:
    headings = ["", "predicted", "allocated, less the packs", "predicted / allocated", "reserved", "packs", "device"]
    rows = []
    for case in cases:
        memory = case["memory"]
        predicted, allocated = memory["predicted"]["peak"], memory["allocated"]
        ours = None if allocated is None else allocated - memory["packs"]
        rows.append(
            [
                case["case"],
                _gib(predicted),
                _gib(ours),
                "-" if ours is None else _percent(predicted / ours),
                _gib(memory["reserved"]),
                _gib(memory["packs"]),
                _gib(memory["device"]),
            ]
        )
    return markdown_table(headings, rows)


def _gpt2(cases: list[Row]) -> str:
    rows = [
        [
            f"batch {case['rows']}, {case['attention']}{', compiled' if case['compiled'] else ''}",
            str(case["steps"]),
            f"{1e3 * case['step_s']:.1f}",
            f"{case['tokens_per_s']:,.0f}",
            _percent(case["mfu"]),
        ]
        for case in cases
    ]
    return markdown_table(["", "steps", "step [ms]", "tokens/s", "MFU useful/1"], rows)


def remarks(case: Row) -> list[str]:
    """What a reader of a case's numbers must know besides."""
    found = []
    if case["status"] == "running":
        found.append("was under way when this was written")
    elif case["status"] != "done":
        first = str(case["error"]).partition("\n")[0]
        found.append(f"{case['status']}: {first}" if case["status"] != "error" else f"failed: {first}")
    if case.get("samples_cut"):
        found.append(f"{case['samples_cut']} of {case['samples']} samples were drawn longer than a pack, and are text")
    if case["too_large"]:
        found.append(f"did not fit with {', '.join(map(str, case['too_large']))} layers")
    if case.get("recompilations"):
        found.append(f"compiled again: {'; '.join(case['recompilations'])}")
    if case.get("left_out"):
        found.append(f"{case['left_out']} steps that compiled are not counted")
    if case["status"] == "done" and case["warmup_s"]:
        times = ", ".join(f"{step_s:.1f}" for step_s in case["warmup_s"])
        found.append(f"warm-up steps of {times} s, the first with what it compiles")
    return [f"{case['case']}: {remark}" for remark in found]


def _explanation(ceiling: dict[str, Any]) -> str:
    best, sustained = (
        f"{ceiling[f'{name}_flops_per_s'] / 1e12:,.2f} TFLOP/s ({' x '.join(map(str, ceiling[f'{name}_shape']))})"
        for name in ("best", "sustained")
    )
    return (
        "What it is: the step of `headway train` with the recipe's settings (model, kernels, recomputation, "
        "loss in chunks, clipping, Headway's optimizer), the host at most one step ahead, timed by `headway.Meter` "
        "from one step's end on the device to the next; weights, gradients and moments in bf16 on CUDA (fp32 on a "
        "CPU). What it is not: a run. Weights are random, samples made up in the recipe's lengths, and a few full "
        "packs lie on the device before the clock starts and take turns, so that feed, records and checkpoints are "
        "left out; fewer layers run where the first column says so. Steps in which something compiled are not counted, "
        "nor are the warm-up steps, which end when the rate changes by less than 3 % from one to the next. MFU counts "
        "useful work (useful/1) against the datasheet's dense peak; HFU adds the recomputation; 'the best matmul' is "
        f"the fastest repetition of any shape on this device, {best}, 'the sustained' the median of the largest, "
        f"{sustained}; 'as ...' is what that tool's rule would count in the same time against the same peak (a dash: "
        "the rule cannot express the model). Predicted memory is `headway train --dry-run`'s for packs of this size; "
        "it leaves out the CUDA context, workspaces and what the allocator wastes."
    )


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
