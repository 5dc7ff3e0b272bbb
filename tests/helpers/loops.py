"""A few steps of a tiny model in the real loop of each integration, on a real clock or on a pretended device.

On a pretended device, what the loops really compute takes no pretended time; `Device.working` patches what stands for
work.
"""

import functools
from contextlib import ExitStack
from dataclasses import replace

import torch

from headway import Generation, Workload, trace
from headway.devices import Peak
from headway.meter import Meter
from helpers.device import COST_MODEL, DEVICE_S, HOST_S, Clock
from helpers.models import tiny_model

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [5, 9, 14, 3, 8, 8, 21, 1]
ROWS = [{"input_ids": [7] * length} for length in LENGTHS]


def tiny():
    """Build a Qwen3 with the same weights on every rank."""
    return tiny_model("qwen3", dtype=torch.float32)


def collate(rows):
    """Pad rows of token ids to the longest."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(value, padding):
        return torch.tensor([[value] * len(r["input_ids"]) + [padding] * (width - len(r["input_ids"])) for r in rows])

    return {"input_ids": padded(7, 0), "attention_mask": padded(1, 0), "labels": padded(7, -100)}


def loader(rows, batch_size):
    return torch.utils.data.DataLoader(rows, batch_size=batch_size, collate_fn=collate)


def run_accelerate(accelerator, batches):
    """Run a loop around `accelerator.accumulate`; returns the metered run."""
    from headway.integrations import AccelerateMeter

    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    meter = AccelerateMeter(accelerator, model, peak=PEAK)
    for batch in meter.batches(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        meter.step()
    return meter.close()


def trainer_arguments(folder, batch_size, accumulation):
    """What both of Hugging Face's trainers are told."""
    return {
        "output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip


@functools.cache
def lightning_module():
    """Make the class of the model in Lightning's form, which takes a class of optimizers."""
    import lightning.pytorch

    class Lit(lightning.pytorch.LightningModule):
        def __init__(self, optimizer):
            super().__init__()
            self.model = tiny()
            self.optimizer = optimizer

        def training_step(self, batch, _index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return self.optimizer(self.model.parameters(), lr=0.01)

    return Lit


def run_lightning(batches, accumulation, *, monitor=None, module=None, optimizer=torch.optim.SGD, **options):
    """Run an epoch of Lightning's Trainer; returns the metered run."""
    import lightning.pytorch

    from headway.integrations import HeadwayMonitor

    monitor = monitor or HeadwayMonitor(peak=PEAK)
    trainer = lightning.pytorch.Trainer(
        callbacks=[monitor], accumulate_grad_batches=accumulation, max_epochs=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit((module or lightning_module())(optimizer), batches)
    return monitor.run


STEPS, EVALUATE_AT, SAVE_AT = 6, 3, 4  # one evaluation after step 3, one checkpoint after step 4 and one at the end
LOGGING_S, SAVING_S = 0.03, 0.2


@functools.cache
def tiny_cost_model():
    return trace(tiny())


class Rows(list):
    """Rows that take their time."""

    def __init__(self, device, load_s):
        super().__init__([{"input_ids": [7] * 12}] * STEPS)
        self._device, self._load_s = device, load_s

    def __getitem__(self, index):
        self._device.work(self._load_s)
        return super().__getitem__(index)


def paced_loader(device, load_s):
    return torch.utils.data.DataLoader(Rows(device, load_s), batch_size=1, collate_fn=collate)


def work_of_a_step(device, optimizer=torch.optim.SGD):
    """Patch a model's forward and its optimizer."""
    from transformers import Qwen3ForCausalLM

    stack = ExitStack()
    stack.enter_context(device.working(Qwen3ForCausalLM, "forward", host_s=HOST_S, device_s=0.8 * DEVICE_S))
    stack.enter_context(device.working(optimizer, "step", device_s=0.2 * DEVICE_S))
    return stack


def hugging_face(folder, *, load_s=0.0, steps=STEPS, resume=None, callback=None, **arguments):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from headway.integrations import HeadwayCallback

    class SlowTracker(TrainerCallback):
        def __init__(self, device):
            self._device = device

        def on_log(self, *_, **__):
            self._device.work(LOGGING_S)

    def run(device, **options):
        measuring = HeadwayCallback(cost_model=tiny_cost_model(), peak=PEAK) if callback is None else callback()
        measuring._options |= options
        settings = TrainingArguments(
            str(folder), per_device_train_batch_size=1, max_steps=steps, logging_steps=1, eval_strategy="steps",
            eval_steps=EVALUATE_AT, save_steps=SAVE_AT, report_to=[], use_cpu=True, disable_tqdm=True,
            remove_unused_columns=False, dataloader_pin_memory=False, logging_nan_inf_filter=False, **arguments,
        )  # fmt: skip
        trainer = Trainer(
            tiny(), settings, train_dataset=Rows(device, load_s), eval_dataset=Rows(device, 0.0)[:2],
            data_collator=collate, callbacks=[measuring, SlowTracker(device)],
        )  # fmt: skip
        with work_of_a_step(device, torch.optim.AdamW), device.working(Trainer, "save_model", host_s=SAVING_S):
            trainer.train(resume_from_checkpoint=resume)
        return measuring.run

    return run


def in_accelerate(_folder, *, load_s=0.0, steps=STEPS):
    from accelerate import Accelerator

    from headway.integrations import AccelerateMeter

    def run(device, **options):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
        model = tiny()
        model, optimizer, batches = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01), paced_loader(device, load_s)
        )
        meter = AccelerateMeter(accelerator, model, cost_model=tiny_cost_model(), peak=PEAK, log_every=1, **options)
        with work_of_a_step(device):
            for number, batch in enumerate(meter.batches(batches), start=1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                meter.step(skipped=number == 2)
                evaluate_and_save(device, meter, number)
                if number == steps:
                    break
        return meter.close()

    return run


def evaluate_and_save(device, meter, number):
    if number == EVALUATE_AT:
        with meter.away():
            device.launch(0.4)
    if number in (SAVE_AT, STEPS):
        with meter.away("checkpoint"):
            device.work(SAVING_S)


def in_lightning(folder, *, load_s=0.0, steps=STEPS, resume=None):
    import lightning.pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from headway.integrations import HeadwayMonitor

    def run(device, **options):
        monitor = HeadwayMonitor(cost_model=tiny_cost_model(), peak=PEAK, **options)

        class Evaluated(lightning_module()):
            def validation_step(self, batch, _index):
                self.model(**batch)

            def on_train_batch_end(self, *_):
                device.work(LOGGING_S)  # what other callbacks and loggers do between two steps

        trainer = lightning.pytorch.Trainer(
            callbacks=[monitor, ModelCheckpoint(folder, every_n_train_steps=SAVE_AT, save_last=True, save_top_k=-1)],
            max_steps=steps, max_epochs=9, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, val_check_interval=EVALUATE_AT, limit_val_batches=2, log_every_n_steps=1,
            default_root_dir=folder,
        )  # fmt: skip
        with (
            work_of_a_step(device),
            device.working(trainer.strategy, "save_checkpoint", host_s=SAVING_S),
        ):
            trainer.fit(
                Evaluated(torch.optim.SGD), paced_loader(device, load_s), paced_loader(device, 0.0), ckpt_path=resume
            )
        return monitor.run

    return run


def by_hand(device, meter, load_s, steps, step):
    """A loop of one's own, of which `step` is the part that computes and ends a step."""
    for number in range(1, steps + 1):
        meter.await_data()
        device.work(load_s)
        meter.got_data()
        step(number)
        evaluate_and_save(device, meter, number)
    return meter.close()


def compute(device):
    device.work(HOST_S)
    device.launch(DEVICE_S)


def in_megatron(_folder, *, load_s=0.0, steps=STEPS):
    from headway.integrations import FlopsAccumulator

    def run(device, **options):
        accumulator = FlopsAccumulator(Meter(tiny_cost_model(), peak=PEAK, log_every=1, **options))

        def step(number):
            accumulator.accumulate(torch.zeros(1, 12, dtype=torch.long))
            compute(device)
            accumulator.step(skipped=number == 2)

        return by_hand(device, accumulator.meter, load_s, steps, step)

    return run


TOKEN_S, DECODE_STEP_S = 0.001, 0.020
RL_PEAK = Peak("a test", 1e5, "fp32", "made up")  # 30 FLOPs a token and forward: 30 % of it where nothing waits
REFERENCE = replace(COST_MODEL, name="a reference")
HEALTHY_RL = {
    "prompts": [64] * 4, "answers": [25] * 16, "batch": 16, "prefix": "computed once", "updates": 1, "references": 1,
    "reward_s": 0.01, "rest_s": 0.01, "server": None, "ahead": False,
}  # fmt: skip


def metered_rl_loop(path, num_steps=6, log_every=1, **options):
    """Write the records of a loop of reinforcement learning whose times follow a law; returns the time of a step [s].

    A forward takes 1 ms a token, backward twice that, and each decode step 20 ms besides. Idle rows take what others
    do. So what a fault costs is known exactly.

    Args:
        path: of the records.
        num_steps: of the loop.
        log_every: steps in a record.
        options: what differs from `HEALTHY_RL`: lengths of prompts and answers, answers decoded together, what a group
            shares, updates of a rollout, runs of the reference, time of the reward and in no phase [s]; `server`:
            devices that answer in place of the loop's; `ahead`: whether they do so during the update.
    """
    o = {**HEALTHY_RL, **options}
    clock = Clock()
    work = Generation(
        o["prompts"], o["answers"], group=len(o["answers"]) // len(o["prompts"]), batch_size=o["batch"],
        prefix=o["prefix"],
    )  # fmt: skip
    quantities = work.quantities()
    rollout_s = (quantities["prefill_tokens"] + quantities["decode_slots"]) * TOKEN_S
    rollout_s += quantities["decode_steps"] * DECODE_STEP_S
    tokens = quantities["sequence_tokens"]
    others_s = o["reward_s"] + o["rest_s"] + o["references"] * tokens * TOKEN_S + o["updates"] * 3 * tokens * TOKEN_S
    waited_s = max(0.0, rollout_s - others_s) if o["ahead"] else rollout_s
    sequences = Workload([tokens // len(o["answers"])] * len(o["answers"]))
    with Meter(
        COST_MODEL, others=[REFERENCE], peak=RL_PEAK, clock=clock, memory_bytes_per_s=1e9, log_every=log_every,
        log_to=[path],
    ) as meter:  # fmt: skip
        for _ in range(num_steps):
            with meter.phase("rollout", forward_only=True, num_devices=o["server"]) as phase:
                meter.count(work)
                clock.now_s += waited_s
                if o["server"]:
                    phase.busy_s = rollout_s
            with meter.phase("reward"):
                clock.now_s += o["reward_s"]
            for _ in range(o["references"]):
                with meter.phase("reference", forward_only=True):
                    meter.count(sequences, cost_model=REFERENCE)
                    clock.now_s += tokens * TOKEN_S
            for _ in range(o["updates"]):
                with meter.phase("update"):
                    meter.count(sequences)
                    clock.now_s += 3 * tokens * TOKEN_S
            clock.now_s += o["rest_s"]
            meter.step()
    return waited_s + others_s
