"""A real torchtitan Trainer on the CPU, in a process of its own: what it needs of a GPU is stood in for.

Standing in are `triton`, a compiler for GPUs that torchtitan imports at its top, and what `torch.cuda` would say of the
device. Everything that trains and logs is torchtitan's.

Importing all of it takes longer than a run, so one process imports it and forks for each rank of each run. It reads
runs from stdin, a line of JSON each: `settings`, `world`, `port` and a `folder` for what each rank prints, `rank0.txt`
and so on; the last line of that is what happened, as JSON. It answers with the exit codes of the ranks.
"""

import dataclasses
import importlib
import importlib.machinery
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path

import torch

DOCUMENTS = (5, 11, 3, 7, 13, 2, 9, 14)  # lengths, the end-of-sequence token included; 64 tokens in all
END, SLOTS = 1, 16


def stand_in_for_a_gpu():
    torch.compile(lambda x: x)  # PyTorch has now looked for the real triton

    class Triton(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **_: args[0] if args else lambda f: f

    for name in ("triton", "triton.language"):
        sys.modules[name] = Triton(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["triton"].language = sys.modules["triton.language"]
    torch.cpu.get_device_name = lambda *_: "stand-in"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = lambda *_: None
    torch.cpu.empty_cache = lambda: None
    torch.cpu.current_device = lambda: 0
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu


class Rows(torch.utils.data.IterableDataset):
    """The documents laid end to end in rows of 16 slots, over and over; ranks take turns."""

    def __init__(self, rank, world, *, has_pixels):
        self.has_pixels = has_pixels
        tokens = [token for n in DOCUMENTS for token in [7] * (n - 1) + [END]]
        self.rows = torch.tensor(tokens).reshape(-1, SLOTS)
        self.mine = slice(rank, None, world)

    def __iter__(self):
        while True:
            for row in self.rows[self.mine]:
                yield {"input": row, **({"pixels": row} if self.has_pixels else {})}, row


def spec_of(settings, validations):
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.validate import BaseValidator
    from torchtitan.protocols.train_spec import get_train_spec

    class Validator(BaseValidator):
        def __init__(self, job_config, metrics_processor, **_):
            self.job_config, self.processor = job_config, metrics_processor

        def validate(self, model_parts, step):
            validations.append(time.perf_counter())
            model_parts[0].eval()
            with torch.no_grad():
                model_parts[0](torch.full((2, SLOTS), 7))
            time.sleep(0.3)
            self.processor.log_validation(loss=0.0, step=step)
            model_parts[0].train()

    def build_dataloader(dp_world_size, dp_rank, job_config, **_):
        rows = Rows(dp_rank, dp_world_size, has_pixels=settings.get("has_pixels", False))
        batch_size = job_config.training.local_batch_size
        return ParallelAwareDataloader(rows, dp_rank, dp_world_size, batch_size=batch_size)

    family = settings.get("family", "llama3")
    plain = get_train_spec(family)
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 64} if family == "llama3" else {}
    tiny = dataclasses.replace(plain.model_args["debugmodel"], **sizes, **settings.get("model", {}))
    return dataclasses.replace(
        plain,
        model_args={"tiny": tiny},
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=lambda _: types.SimpleNamespace(eos_id=END),
        build_validator_fn=Validator,
    )


def one_slot_short(inputs, labels):
    """Read a batch wrongly, as a function that was written for another dataloader would."""
    from headway import Workload

    return Workload([labels.numel() - 1])


def config_of(settings):
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor = "measured", "tiny"
    config.job.dump_folder = settings["folder"]
    config.training.seq_len, config.training.steps = SLOTS, settings["steps"]
    config.training.local_batch_size, config.training.global_batch_size = settings["batch_size"], 4
    config.metrics.log_freq, config.metrics.enable_tensorboard = 2, True
    config.validation.enable, config.validation.freq = settings.get("validates", False), 2
    config.comm.trace_buf_size = 0
    for section, changes in settings.get("config", {}).items():
        for name, value in changes.items():
            setattr(getattr(config, section), name, value)
    return config


def main(settings):
    if "depth" in settings:
        pretend(settings)
        return
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    import headway
    from headway.devices import Peak
    from headway.integrations import with_headway

    if settings.get("model"):  # flex attention has a backward on GPUs only, unless it runs as plain operations
        from torch.nn.attention import flex_attention

        torch.compiler.set_stance("force_eager")
        flex_attention._validate_device = lambda *_: None
    init_logger()
    windows, validations = [], []
    peak = Peak("test", 1e12, "bf16", "made up for a test")
    options = {"workload_of": one_slot_short} if settings.get("misread") else {}
    register_train_spec(
        "measured", with_headway(spec_of(settings, validations), peak=peak, on_window=windows.append, **options)
    )
    trainer = Trainer(config_of(settings))
    began_s = time.perf_counter()
    if first_last := settings.get("profile"):
        with headway.profile(None, settings["folder"], steps=range(*first_last)):
            trainer.train()
    else:
        trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    result = {
        "until_last_validation_s": max(validations, default=began_s) - began_s,
        "accumulation": trainer.gradient_accumulation_steps,
        "windows": [
            {
                "num_steps": w.num_steps,
                "total": w.flops.total,
                "recompute": w.flops.recompute,
                "tokens": w.tokens,
                "slots": w.slots,
                "segments": w.segments,
                "world_size": w.world_size,
                "wall_s": w.wall_s,
                "mfu": w.mfu,
            }
            for w in windows
        ],
    }
    sys.stdout.write(f"\n{json.dumps(result)}")


def pretend(settings):
    """Train on a pretended device, which does the work of the forward and of the optimizer, and hold it to the laws."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from headway.devices import Peak
    from headway.integrations import with_headway
    from helpers.device import DEVICE_S, HOST_S, HostMark, measured

    def run(device, **options):
        windows = []
        on_window = options.pop("on_window")
        options["on_window"] = lambda window: windows.append(window) or on_window(window)
        plain = spec_of(settings, [])
        register_train_spec("measured", with_headway(plain, peak=Peak("test", 1e12, "bf16", "made up"), **options))
        trainer = Trainer(config_of(settings))
        with (
            device.working(Transformer, "forward", host_s=HOST_S, device_s=0.8 * DEVICE_S),
            device.working(torch.optim.AdamW, "step", device_s=0.2 * DEVICE_S),
            device.working(CheckpointManager, "dcp_save", host_s=0.2),
            device.working(ParallelAwareDataloader, "__iter__", host_s=settings["load_s"]),
        ):
            trainer.train()
            trainer.close()
        torch.distributed.destroy_process_group()
        return windows[-1]

    init_logger()
    time.sleep = lambda _: None  # torchtitan waits for other ranks at the end
    found = measured(run, depth=settings["depth"], mark=HostMark if settings.get("defect") else None)
    if settings.get("defect"):
        try:
            found.hold()
        except AssertionError:
            found.seconds["caught"] = True
    else:
        found.hold()
    result = {"seconds": found.seconds, "num_steps": found.num_steps, "num_waits": found.device.num_waits}
    sys.stdout.write(f"\n{json.dumps(result)}")


def fork(run, rank):
    """Start one rank of a run, which prints into a file of its own; returns its process id."""
    if process := os.fork():
        return process
    code = 1
    try:
        file = os.open(Path(run["folder"], f"rank{rank}.txt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run["world"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run["port"])}
        main(run["settings"])
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter would show it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo may still be there


if __name__ == "__main__":
    stand_in_for_a_gpu()
    for name in (
        "torchtitan.models.llama3",
        "torchtitan.train",
        "headway.integrations.torchtitan",
        "helpers.device",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        run = json.loads(line)
        ranks = [fork(run, rank) for rank in range(run["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        sys.stdout.write(f"{json.dumps(codes)}\n")
        sys.stdout.flush()
