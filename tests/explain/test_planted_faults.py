"""Faults that are planted in real runs on a CPU: the first finding names each, and nothing is found in a clean run.

What is found is a matter of time, which other processes take as well, so these are run by hand and on a quiet machine:
`pytest -m long tests/explain/test_planted_faults.py`. `findings/` holds each rule to written traces of known times.

PYTHONPATH=tests python tests/explain/test_planted_faults.py    print the table: planted fault, first finding, its share
"""

import io
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from transformers import GPT2Config, GPT2LMHeadModel

import headway
from headway.config import parse_config
from headway.data.media.images import Picture
from headway.data.sources import Source
from headway.devices import Peak
from headway.explain.findings.device import unfused_chains
from headway.explain.findings.evidence import StepEvidence
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import Meter
from headway.models.recompute import recompute_blocks
from headway.synthetic.digits import write_digits, write_reader
from headway.tracing import trace
from headway.train.run import train
from helpers.processes import run_processes

pytestmark = pytest.mark.long
PEAK = Peak("test CPU", 100e9, "fp32", "made up for a test")
LENGTH = 256  # [tokens]
WINDOW = range(2, 4)
SIZES = {
    "vocab_size": 512, "n_positions": 512, "n_embd": 128, "n_layer": 2, "n_head": 2, "activation_function": "gelu",
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    "loss_type": "ForCausalLM",
}  # fmt: skip


def small_model(**sizes):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**SIZES, **sizes})).train()


@cache
def cost_model():
    return trace(small_model())


def batch_of(length=LENGTH, rows=2, padding=0):
    ids = torch.arange(rows * length).reshape(rows, length) % 499
    labels = ids.clone()
    if padding:
        labels[:, -padding:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


def loop(folder, *, model=None, optimizer=None, batches=None, recompute="none", call=None, before_backward=None,
         after_step=None, ranks=(0,)):  # fmt: skip
    """Train for five steps, the last three profiled; returns the trace's path."""
    model = small_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if optimizer is None else optimizer(model)
    meter = Meter(model, cost_model=cost_model(), peak=PEAK, recompute=recompute, log_every=100)
    with headway.profile(meter, folder, steps=WINDOW, ranks=ranks, report=lambda _: None) as window:
        for batch in meter.batches([batch_of()] * WINDOW.stop if batches is None else batches):
            meter.count(batch)
            output = (model if call is None else call)(**batch)
            if before_backward is not None:
                before_backward(output, batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if after_step is not None:
                after_step(meter, model, optimizer)
            meter.step()
            if meter.num_steps == WINDOW[-1]:
                break
    return window.path


def clean(folder):
    return loop(folder)


def item_in_the_loop(folder):
    def count_right_answers(output, batch):
        best = output.logits.detach().argmax(-1).flatten()
        right = 0
        for answer, label in zip(best, batch["labels"].flatten(), strict=True):
            right += answer.item() == label.item()

    batches = [batch_of(128, 1)] * WINDOW.stop
    return loop(folder, model=small_model(n_embd=32), batches=batches, before_backward=count_right_answers)


def tiny_matmuls(folder):
    class EachToken(nn.Module):
        """A linear layer that is called for one token after the other."""

        def __init__(self, width):
            super().__init__()
            self.gate = nn.Linear(width, 8, bias=False)

        def forward(self, x):
            return torch.cat([self.gate(token) for token in x.flatten(0, 1).split(1)])

    model = small_model()
    model.gate = EachToken(SIZES["n_embd"])

    def call(**batch):
        output = model(**batch, output_hidden_states=True)
        output.loss = output.loss + model.gate(output.hidden_states[-1]).square().mean()
        return output

    return loop(folder, model=model, call=call, batches=[batch_of(64, 1)] * WINDOW.stop)


def written_out_norms(folder):
    class Norm(nn.Module):
        """Operator by operator."""

        def forward(self, x):
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    model = small_model()
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = Norm(), Norm()
    model.transformer.ln_f = Norm()
    return loop(folder, model=model)


def padding(folder):
    return loop(folder, batches=[batch_of(padding=LENGTH * 6 // 10)] * WINDOW.stop)


def recomputation(folder):
    model = small_model()
    recompute_blocks(model, "full")
    return loop(folder, model=model, recompute="full")


def unfused_optimizer(folder):
    """Short packs, so that the update of each tensor by itself weighs."""

    def one_by_one(model):
        return torch.optim.AdamW(model.parameters(), foreach=False, fused=False)

    return loop(folder, optimizer=one_by_one, batches=[batch_of(64, 1)] * WINDOW.stop)


def checkpoint_each_step(folder):
    def save(meter, model, optimizer):
        with meter.away("checkpoint"), (Path(folder) / "state.pt").open("wb") as file:
            for _ in range(5):
                torch.save([model.state_dict(), optimizer.state_dict()], file)
            os.fsync(file.fileno())

    return loop(folder, after_step=save)


def recompile_each_step(folder):
    """A loss that is compiled for each length anew, and lengths that never come again."""
    torch._dynamo.reset()

    def entropy(logits):
        return torch.special.entr(logits.softmax(-1)).sum(-1).mean()

    compiled = torch.compile(entropy, backend="eager", dynamic=False)
    model = small_model(n_embd=32)

    def call(**batch):
        output = model(**batch)
        output.loss = output.loss - 0.01 * compiled(output.logits)
        return output

    return loop(folder, model=model, call=call, batches=[batch_of(length, 1) for length in (48, 49, 50)])


def logging_each_step(folder):
    def log(_meter, model, optimizer):
        with record_function("phase:logging"), (Path(folder) / "norms.txt").open("a") as file:
            for name, parameter in model.named_parameters():
                counts = torch.histc(parameter.detach(), 64)
                print(name, parameter.detach().norm().item(), *(count.item() for count in counts), file=file)
            file.flush()
            os.fsync(file.fileno())

    return loop(folder, model=small_model(n_embd=32), after_step=log)


def two_ranks(folder, rank, fault):
    """One of two processes that train together; ranks exchange gradients over gloo. Rank 1 has the fault, if any."""
    dist.init_process_group("gloo")
    try:
        model = small_model()
        begin = time.perf_counter()
        model(**batch_of()).loss.backward()
        a_step_s = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        model = DistributedDataParallel(model)
        batch = batch_of()
        if fault == "heavy_pack":
            batch = batch_of(512) if rank == 1 else batch_of(32, 1)

        def hold_up(_output, _batch):
            if rank == 1 and fault == "sleep_on_one_rank":
                time.sleep(max(0.5, 5 * a_step_s))

        loop(folder, model=model, batches=[batch] * WINDOW.stop, before_backward=hold_up, ranks=(0, 1))
    finally:
        dist.destroy_process_group()


def slow_loader(folder):
    def batches():
        for _ in range(WINDOW.stop):
            time.sleep(0.3)
            yield batch_of()

    return loop(folder, batches=batches())


def train_with(folder, owner, name):
    """A real `headway train` whose feed takes its time over each call of one method."""
    write_digits(folder / "data", num_one_digit=4, num_train=12, num_eval=2, renderings=1)
    write_reader(folder / "model")
    config = parse_config(
        {
            "model": {"path": str(folder / "model"), "random_init": True},
            "data": {
                "train": [{"path": str(folder / "data/train.jsonl")}],
                "tokens_per_pack": 160,
                "workers": 0,
                "prefetch_bytes": 0,
            },
            "optim": {"steps": 3, "lr": 2e-3},
            "run": {
                "folder": str(folder / "run"),
                "device": "cpu",
                "threads": 1,
                "profile": {"start": 2, "steps": 2},
            },
        }
    )
    method = getattr(owner, name)

    def held_up(*args):
        time.sleep(0.05)
        return method(*args)

    with patch.object(owner, name, held_up), redirect_stderr(io.StringIO()):
        train(config)
    (path,) = (folder / "run/profile").iterdir()
    return path


def slow_reader(folder):
    return train_with(folder, Source, "__getitem__")


def slow_decoder(folder):
    return train_with(folder, Picture, "decode")


FAULTS = {
    item_in_the_loop: "read-back",
    tiny_matmuls: "small-gemms",
    padding: "padding",
    recomputation: "recomputation",
    unfused_optimizer: "optimizer-loop",
    checkpoint_each_step: "checkpoint",
    recompile_each_step: "recompilation",
    logging_each_step: "logging",
    slow_loader: "data-bound",
    slow_reader: "data-storage",
    slow_decoder: "data-decoding",
}
NO_CAUSE = {"largest-loss", "shared-cores"}  # they name no fault of the loop
FAULTS_OF_A_RANK = {"sleep_on_one_rank": "slow-rank", "heavy_pack": "heavy-pack"}


def found_in(plant, folder):
    """Findings of a loop of this process."""
    return explain([read_trace(plant(folder))]).findings


def found_in_ranks(fault, folder):
    """Findings of two processes of which rank 1 has a fault."""
    run_processes([sys.executable, __file__, folder, fault], 2)
    return explain([read_trace(path) for path in sorted(folder.glob("*.json.gz"))]).findings


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As a rank of several has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_first_finding_names_the_planted_fault(tmp_path, plant):
    found = found_in(plant, tmp_path)
    found = [finding for finding in found if finding.id not in NO_CAUSE]
    assert [one.id for one in found][:1] == [FAULTS[plant]]
    assert 0 < found[0].share < 1
    assert found[0].mfu_from < found[0].mfu_to


@pytest.mark.parametrize("fault", FAULTS_OF_A_RANK)
def test_the_first_finding_names_the_fault_of_a_rank(tmp_path, fault):
    found = found_in_ranks(fault, tmp_path)
    assert [one.id for one in found][:1] == [FAULTS_OF_A_RANK[fault]]
    assert "waited for rank 1" in found[0].seen


def test_nothing_is_found_in_a_clean_run(tmp_path):
    assert [finding.id for finding in found_in(clean, tmp_path) if finding.id not in NO_CAUSE] == []


@pytest.mark.parametrize(("plant", "modules"), [(clean, None), (written_out_norms, "5 ")])
def test_a_norm_of_one_operator_is_no_chain_of_kernels_and_one_that_is_written_out_is(tmp_path, plant, modules):
    seen = unfused_chains(StepEvidence(explain([read_trace(plant(tmp_path))]).steps))
    assert (seen and seen.message[:2]) == modules


def main():
    """Print what is found first of each fault."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        two_ranks(sys.argv[1], int(os.environ["RANK"]), sys.argv[2])
        return
    sys.stdout.write("| planted fault | first finding | share |\n| --- | --- | ---: |\n")
    looks = {"clean": partial(found_in, clean)}
    looks |= {plant.__name__: partial(found_in, plant) for plant in FAULTS}
    looks |= {fault: partial(found_in_ranks, fault) for fault in FAULTS_OF_A_RANK}
    for name, look in looks.items():
        with tempfile.TemporaryDirectory() as folder:
            found = look(Path(folder))
        first = f"{found[0].id} | {found[0].share:.0%}" if found else "none | -"
        sys.stdout.write(f"| {name.replace('_', ' ')} | {first} |\n")


if __name__ == "__main__":
    main()
