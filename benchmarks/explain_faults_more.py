"""Ten more faults of `explain_faults.py` (`--of more`), on none of which a rule was made, and two healthy runs."""

import copy
import hashlib
import io
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from explain_faults_cases import CASES, DATA, READS, Case, after, case, healthy, healthy_step
from explain_faults_loops import Batch, Lengths, Loop, batches, run_ddp, small_model, train_step

_BEFORE = set(CASES)
GAP = "host-pause"  # from records, with the line of code

DEEP = {"num_hidden_layers": 10, "hidden_size": 64, "intermediate_size": 128}


@case("a reference model that nobody counts", "uncounted-products", GAP)
def reference_model(is_faulty: bool) -> Loop:
    """Compare logits with those of a frozen copy."""
    model = small_model()
    reference = copy.deepcopy(model).eval()

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        train_step(loop, batch, count)
        with torch.no_grad():
            reference(**batch)

    return Loop(model, step=healthy_step(is_faulty, step))


@case("the loss once more behind the update", "uncounted-products")
def loss_after_update(is_faulty: bool) -> Loop:
    """Tell the loss that the update has led to."""

    def look(loop: Loop) -> None:
        with torch.no_grad():
            loop.model(**loop.last)  # type: ignore[attr-defined]

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        loop.last = batch  # type: ignore[attr-defined]
        train_step(loop, batch, count)
        look(loop)

    return Loop(small_model(), step=healthy_step(is_faulty, step))


@case("a text sampled in each step", "uncounted-products", "small-gemms", *READS)
def samples_each_step(is_faulty: bool) -> Loop:
    """Append the likeliest token 24 times."""

    def sample(loop: Loop) -> None:
        loop.model.eval()
        ids = torch.ones(1, 8, dtype=torch.long)
        with torch.no_grad():
            for _ in range(24):
                ids = torch.cat([ids, loop.model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        loop.model.train()

    return Loop(small_model(), step=healthy_step(is_faulty, after(sample)))


@case("a digest of the weights in each step", GAP, "checkpoint", "parameter-loop")
def digests_weights(is_faulty: bool) -> Loop:
    """Compute SHA-256 over all weights, three times."""

    def digest(loop: Loop) -> None:
        for _ in range(3):
            file = io.BytesIO()
            for parameter in loop.model.parameters():
                file.write(parameter.detach().numpy().tobytes())
            hashlib.sha256(file.getvalue()).hexdigest()

    return Loop(small_model(vocab_size=20_000), batches(Lengths(64), 2), step=healthy_step(is_faulty, after(digest)))


@case("a sampler that sorts all lengths for each batch", *DATA)
def sampler_sorts(is_faulty: bool) -> Loop:
    """Draw the order of the whole data set anew for each batch."""

    class Sorting(Sampler[list[int]]):
        """Batches of similar lengths."""

        def __iter__(self) -> Iterator[list[int]]:
            lengths = torch.randint(1, 1000, (400_000,)).tolist()
            for number in range(100):
                order = sorted(range(len(lengths)), key=lengths.__getitem__) if is_faulty else range(400)
                yield [index % 400 for index in order[4 * number : 4 * number + 4]]

        def __len__(self) -> int:
            return 100

    loader = torch.utils.data.DataLoader(Lengths(), batch_sampler=Sorting(), collate_fn=_stacked)
    return Loop(small_model(), loader)


def _stacked(rows: list[torch.Tensor]) -> Batch:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


@case("an average of the weights, by name", "parameter-loop", GAP)
def averages_by_name(is_faulty: bool) -> Loop:
    """Average the state's tensors, each through three operators."""
    model = small_model(**DEEP)
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def update(loop: Loop) -> None:
        for _ in range(3):
            for name, tensor in loop.model.state_dict().items():
                average[name] = 0.999 * average[name] + 0.001 * tensor

    return Loop(model, batches(Lengths(32), 1), step=healthy_step(is_faulty, after(update)))


@case("norms of all gradients, read one by one", *READS, "parameter-loop", GAP)
def norms_one_by_one(is_faulty: bool) -> Loop:
    """Log a norm, a mean and a largest element of each gradient."""
    model = small_model(**DEEP)

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        count(batch)
        loop.model(**batch).loss.backward()
        for parameter in loop.model.parameters():
            float(parameter.grad.norm()), float(parameter.grad.mean()), float(parameter.grad.abs().max())
        loop.update()

    return Loop(model, batches(Lengths(32), 1), step=healthy_step(is_faulty, step))


@case("RMSprop one tensor at a time", "optimizer-loop")
def rmsprop_by_tensor(is_faulty: bool) -> Loop:
    """Update with foreach=False; healthy: in lists."""
    model = small_model(**DEEP)
    options = {"foreach": not is_faulty, "momentum": 0.9, "centered": True}
    return Loop(model, batches(Lengths(32), 1), torch.optim.RMSprop(model.parameters(), lr=1e-4, **options))


@case("a line of log over a slow connection", "logging", GAP)
def logs_slowly(is_faulty: bool) -> Loop:
    """Write to a stream that takes 60 ms a line."""

    class Slow(io.StringIO):
        """A terminal far away."""

        def write(self, text: str) -> int:
            """Wait."""
            time.sleep(0.06)
            return len(text)

    logger = logging.getLogger("far")
    logger.handlers, logger.propagate = [logging.StreamHandler(Slow())], False
    logger.setLevel("INFO")
    return Loop(small_model(), step=healthy_step(is_faulty, after(lambda _: logger.info("a step"))))


@case("DDP: objects gathered from all ranks in each step", "exposed-communication", GAP, run=run_ddp, num_ranks=2)
def ddp_gathers_objects(is_faulty: bool) -> Loop:
    """Gather a dictionary of metrics from each rank 30 times."""

    def gather(_: Loop) -> None:
        for number in range(30):
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, {"loss": float(number), "names": ["a"] * 200})

    step = healthy_step(is_faulty, after(gather))
    return Loop(DistributedDataParallel(small_model()), batches(Lengths(128), 4), step=step)


def _nesterov() -> Loop:
    model = small_model()
    options = {"momentum": 0.9, "nesterov": True, "fused": True}
    return Loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, **options))


healthy("nesterov", _nesterov)
healthy("wider_vocabulary", lambda: Loop(small_model(vocab_size=3000, hidden_size=256), batches(rows=4)))

MORE: dict[str, Case] = {name: CASES.pop(name) for name in [*CASES] if name not in _BEFORE}
