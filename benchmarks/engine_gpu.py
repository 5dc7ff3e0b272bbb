"""The engine's MFU on one device: text, image, video and question recipes at full width, and mfu-tracker's GPT-2 table.

    .venv/bin/python benchmarks/engine_gpu.py                     # an hour or so on one H200
    .venv/bin/python benchmarks/engine_gpu.py --only text gpt2 --steps 10
    .venv/bin/python benchmarks/engine_gpu.py --scale small       # the same code with small sizes, on a CPU as well

Language layers are left out where the weights, gradients and moments of the whole model do not fit; the record says how
many run. Widths, vocabulary, vision towers and packing lengths are the recipes'. The text recipe runs with Liger's
kernels and compiled blocks on and off; the others as --kernels and --eager say.

Writes benchmarks/results/engine_gpu_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import gc
import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig

from engine_setups import SETUPS, Setup
from headway.count import Workload, trace
from headway.count.conventions import Step, architecture, get_convention
from headway.count.models import presets
from headway.data.collate import Collator
from headway.data.vision import vision_geometry
from headway.devices import peak_for
from headway.devices.ceilings import matmul_ceiling
from headway.meter import StepMeter
from headway.models import load_model, rope_index
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.head import loss_head
from headway.models.kernels import use_kernels
from headway.models.recompute import recompute_blocks
from headway.train.config.speed import SpeedConfig
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

OTHERS = ("lmms-engine", "torchtitan", "torchtitan-2025-12-vlm")  # what these would have printed for the same run
STATE_BYTES = 10  # of a parameter in bf16: weight, gradient, two moments (8), and room for what a step adds
USABLE = 0.8  # of the device's memory, the rest being activations


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SETUPS, "gpt2"], help="some of the set-ups; all if not given")
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--scale", choices=["full", "small"], default="full", help="small: sizes for a smoke test")
    parser.add_argument(
        "--kernels", choices=["torch", "liger"], help="liger on CUDA where it is installed, if not given"
    )
    parser.add_argument("--eager", action="store_true", help="never compile")
    parser.add_argument("--loss-chunk", type=int, default=SpeedConfig().loss_chunk, help="slots of a chunk of the loss")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.scale == "full":
        parser.error("there is no CUDA device here; --scale small runs the same code on a CPU")
    has_liger = device.type == "cuda" and find_spec("liger_kernel") is not None
    kernels = options.kernels or ("liger" if has_liger else "torch")
    wanted = options.only or [*SETUPS, "gpt2"]
    record: dict[str, Any] = {
        "what": "engine_gpu",
        "environment": environment(device),
        "scale": options.scale,
        "steps": options.steps,
        "ceiling_flops_per_s": matmul_ceiling(device, _dtype_name(device)).best.best_per_s,
        "runs": [],
        "gpt2": [],
    }
    for name in (name for name in wanted if name in SETUPS):
        variants = [(kernels, not options.eager)]
        if name == "text":
            both = ("torch", "liger") if has_liger else (kernels,)
            variants = list(itertools.product(both, (False,) if options.eager else (False, True)))
        for kind, is_compiled in variants:
            record["runs"].append(fit(SETUPS[name], kind, is_compiled, options, device))
            print(json.dumps(record["runs"][-1]), flush=True)
    if "gpt2" in wanted:
        ways = [("eager", False), ("sdpa", False)] + ([] if options.eager else [("sdpa", True)])
        record["gpt2"] = [gpt2(rows, *way, options, device) for rows in (1, 8) for way in ways]
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def fit(
    setup: Setup, kernels: str, is_compiled: bool, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Run with as many language layers as the device's memory holds."""
    is_small = options.scale == "small"
    layers = setup.layers(is_small=is_small)
    if device.type == "cuda":
        whole, fewer = (_num_parameters(setup, n, is_small=is_small) for n in (layers, layers - 1))
        room = USABLE * torch.cuda.get_device_properties(device).total_memory / STATE_BYTES
        layers = min(layers, layers - int(max(0.0, whole - room) // (whole - fewer)))
    while True:
        try:
            return run(setup, layers, kernels, is_compiled, options, device)
        except torch.OutOfMemoryError:
            if layers <= 2:
                raise
            layers = layers * 3 // 4
        gc.collect()
        torch.cuda.empty_cache()


def run(
    setup: Setup, layers: int, kernels: str, is_compiled: bool, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train for some steps, a pack each, with every block recomputed."""
    torch.manual_seed(0)
    is_small = options.scale == "small"
    config = setup.config(layers=layers, is_small=is_small)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(config, dtype=dtype, device=device, random_init=True).train()
    cost_model = trace(model)
    use_kernels(model, kernels, device)
    head = loss_head(model, chunk=options.loss_chunk, liger=kernels == "liger")
    recompute_blocks(model, "full")
    if is_compiled:
        compile_blocks(model, CompileWatch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    meter = StepMeter(
        cost_model, peak_for(device, _dtype_name(device)), recompute="full", num_warmup_steps=options.warmup
    )
    collator = Collator(geometry=vision_geometry(model))
    packs = setup.packs(config, rope_index(model), is_small=is_small)
    workloads = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(options.warmup + options.steps):
        batch = collator(next(packs))  # made up before the clock starts: what is measured is the device
        batch = batch.to(device)
        meter.start_step()
        pack = head(batch.model_inputs(), batch.labels_1T[0], per=batch.num_supervised)
        torch.autograd.backward(pack.total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.add(batch.workload)
        loss = pack.total.item()  # waits for the device, so that the step's time is the step's
        meter.end_step()
        if number >= options.warmup:
            workloads.append(batch.workload)
    found = meter.summary()
    sizes = architecture(config.to_dict(), setup.model, cost_model)
    whole = Step(Workload.total(workloads), sum(w.slots for w in workloads) // len(workloads))
    peak = found.peak_flops_per_s
    bills = {name: get_convention(name).bill(sizes, whole).flops for name in OTHERS}
    return {
        "setup": setup.name,
        "layers": layers,
        "of_layers": setup.layers(is_small=is_small),
        "parameters": cost_model.params.total,
        "kernels": kernels,
        "compiled": is_compiled,
        "step_s": found.wall_s / found.num_steps,
        "tokens_per_s": whole.workload.tokens / found.wall_s,
        "flops_per_step": found.flops.total / found.num_steps,
        "peak_flops_per_s": peak,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "others": {name: None if f is None else f / found.wall_s / peak for name, f in bills.items()},
        "memory_bytes": memory_bytes(device),
        "last_loss": loss,
    }


def gpt2(
    rows: int, attention: str, is_compiled: bool, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """GPT-2 on rows of 1,024 tokens, forward, backward and AdamW: the table of mfu-tracker's page."""
    torch.manual_seed(0)
    values = dict(presets()["gpt2"])
    if options.scale == "small":
        values |= {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    config = AutoConfig.for_model(**values, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(config, dtype=dtype, device=device, random_init=True, attention=attention).train()
    meter = StepMeter(trace(model), peak_for(device, _dtype_name(device)), num_warmup_steps=options.warmup)
    trained = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (rows, config.n_positions), device=device)
    for _ in range(options.warmup + options.steps):
        meter.start_step()
        logits = trained(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.add(Workload([config.n_positions] * rows))
        loss.item()
        meter.end_step()
    found = meter.summary()
    return {
        "rows": rows,
        "attention": attention,
        "compiled": is_compiled,
        "step_s": found.wall_s / found.num_steps,
        "mfu": found.mfu,
    }


def _num_parameters(setup: Setup, layers: int, *, is_small: bool) -> int:
    model = load_model(setup.config(layers=layers, is_small=is_small), device="meta", random_init=True)
    return sum(parameter.numel() for parameter in model.parameters())


def _dtype_name(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    ceiling = record["ceiling_flops_per_s"]
    rows = []
    for found in record["runs"]:
        setup = SETUPS[found["setup"]]
        rate = found["flops_per_step"] / found["step_s"]
        rows.append(
            [
                f"{setup.model}, {setup.name}",
                f"{found['layers']} of {found['of_layers']}",
                f"{found['kernels']}, {'compiled' if found['compiled'] else 'eager'}",
                f"{found['step_s']:.3f}",
                f"{found['tokens_per_s']:,.0f}",
                f"**{100 * found['mfu']:.1f} %**",
                f"{100 * setup.target:.0f} %",
                f"{100 * found['hfu']:.1f} %",
                f"{100 * rate / ceiling:.1f} %",
                *(_percent(found["others"][name]) for name in OTHERS),
                f"{found['memory_bytes'] / 2**30:.1f}",
            ]
        )
    headings = ["", "layers", "kernels", "step [s]", "tokens/s", "MFU useful/1", "target", "HFU", "of the ceiling"]
    parts = ["# The engine on one device", ""]
    if rows:
        parts += [markdown_table([*headings, *(f"as {name}" for name in OTHERS), "GiB"], rows), ""]
    if record["gpt2"]:
        table = [
            [
                f"batch {g['rows']}, {g['attention']}{', compiled' if g['compiled'] else ''}",
                f"{1e3 * g['step_s']:.1f}",
                f"{100 * g['mfu']:.1f} %",
            ]
            for g in record["gpt2"]
        ]
        parts += ["GPT-2, rows of 1,024 tokens:", "", markdown_table(["", "step [ms]", "MFU useful/1"], table), ""]
    small = "Small sizes: a smoke test, whose rates mean nothing. " if record["scale"] == "small" else ""
    parts += [
        f"{small}{record['steps']} steps each after warm-up, one full pack a step, random weights, made-up samples of "
        "the recipe's lengths that lie on the device before the clock starts; forward, backward with every block "
        "recomputed, clipping and fused AdamW; weights, gradients and moments in bf16 on CUDA (fp32 on a CPU). MFU "
        "counts useful work (useful/1) against the datasheet's dense peak; HFU adds the recomputation; 'of the "
        "ceiling' divides by the best matmul measured on this device, "
        f"{ceiling / 1e12:,.2f} TFLOP/s; 'as ...' is what that tool's rule would count in the same "
        "time against the same peak (a dash: the rule cannot express the model).",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(parts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
