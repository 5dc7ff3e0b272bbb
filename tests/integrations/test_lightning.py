"""The monitor in real Lightning runs: accumulation, validation, checkpoints, resume, loggers, manual optimization."""

import csv
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from headway import Workload, trace
from headway.devices import Peak
from headway.errors import UsageError
from headway.integrations import HeadwayMonitor
from helpers.cases import some
from helpers.models import tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning",  # Lightning asks torch for it by its old name
)
PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [12, 12, 12, 12, 7, 7, 7, 7]  # four batches of two rows


def tiny():
    return tiny_model("qwen3", dtype=torch.float32)


def loader():
    rows = [{"input_ids": torch.full((length,), 7)} for length in LENGTHS]
    return torch.utils.data.DataLoader(rows, batch_size=2)


def module(package=lightning.pytorch, *, manual=False, optimizers=1):
    class Tiny(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny()
            self.automatic_optimization = not manual

        def training_step(self, batch, _index):
            loss = self.model(**batch, labels=batch["input_ids"]).loss
            self.log("loss", loss)
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers() if optimizers > 1 else [self.optimizers()]:
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch, _index):
            self.log("validation_loss", self.model(**batch, labels=batch["input_ids"]).loss)

        def configure_optimizers(self):
            return [torch.optim.SGD(part, lr=0.01) for part in self._parts()]

        def _parts(self):
            parameters = list(self.model.parameters())
            return [parameters[i::optimizers] for i in range(optimizers)]

    return Tiny()


def fit(
    path, monitor, *, package=lightning.pytorch, lightning_module=None, data=None, validate=True, ckpt_path=None,
    **options,
):  # fmt: skip
    """Run one epoch, unless the options say otherwise."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    options = quiet | {"max_epochs": 1, "enable_checkpointing": False, "log_every_n_steps": 1} | options
    options["callbacks"] = [monitor, *options.get("callbacks", ())]
    trainer = package.Trainer(default_root_dir=path, **options)
    lightning_module = lightning_module or module(package)
    trainer.fit(lightning_module, data or loader(), loader() if validate else None, ckpt_path=ckpt_path)
    return trainer


def read_csv(logger):
    with Path(logger.log_dir, "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
@pytest.mark.parametrize(
    ("accumulation", "steps"), some([(1, 4), (2, 2), (3, 2), (4, 1)], {(1, 4), (3, 2)}.__contains__)
)
def test_a_step_is_what_the_trainer_accumulates(tmp_path, package, accumulation, steps):
    monitor = HeadwayMonitor(peak=PEAK)
    fit(tmp_path, monitor, package=package, accumulate_grad_batches=accumulation)
    assert monitor.run.flops == trace(tiny()).count(Workload(LENGTHS))
    assert (monitor.run.num_steps, monitor.run.tokens) == (steps, sum(LENGTHS))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization_ends_a_step_with_the_batch_that_stepped(tmp_path, optimizers):
    monitor = HeadwayMonitor("model", peak=PEAK)
    fit(tmp_path, monitor, lightning_module=module(manual=True, optimizers=optimizers))
    assert (monitor.run.num_steps, monitor.run.tokens) == (4, sum(LENGTHS))


def test_a_frozen_language_model_behind_a_trained_projector(tmp_path):
    class FirstStage(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.language, self.projector = tiny().requires_grad_(False), nn.Linear(6, 32)

        def training_step(self, batch, _index):
            seen = nn.functional.one_hot(batch["input_ids"] % 6, 6).float()
            return self.language(inputs_embeds=self.projector(seen)).logits.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.projector.parameters(), lr=0.01)

    monitor = HeadwayMonitor("language", peak=PEAK)
    fit(tmp_path, monitor, lightning_module=FirstStage(), validate=False)
    count = trace(tiny()).count(Workload(LENGTHS))
    assert monitor.run.flops.forward == count.forward
    assert (monitor.run.flops.dgrad, monitor.run.flops.wgrad) == (count.dgrad, 0)  # as if its embeddings were trained


def test_loggers_get_each_window_beside_the_loss(tmp_path):
    windows = []
    monitor = HeadwayMonitor(peak=PEAK, names=("mfu", "tokens"), on_window=windows.append)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")]
    fit(tmp_path, monitor, logger=loggers, log_every_n_steps=2)
    mfus = [window.mfu for window in windows[:2]]

    rows = read_csv(loggers[0])
    measured = [row for row in rows if row["headway/mfu"]]
    assert [(int(row["step"]), int(row["headway/tokens"])) for row in measured] == [(1, 48), (3, 28)]
    assert [float(row["headway/mfu"]) for row in measured] == mfus
    assert [row["step"] for row in rows if row["loss"]] == ["1", "3"]

    events = EventAccumulator(loggers[1].log_dir).Reload()
    read = [(event.step, event.value) for event in events.Scalars("headway/mfu")]
    assert read == [(step, torch.tensor(mfu).item()) for step, mfu in zip([1, 3], mfus, strict=True)]


class Clock:
    """A clock that goes on a little whenever it is read."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        self.now_s += 1e-3
        return self.now_s


def test_validation_and_checkpoints_take_no_time_of_the_steps(tmp_path):
    clock = Clock()

    class Slow(lightning.pytorch.Callback):
        def on_validation_batch_end(self, *_):
            clock.now_s += 1000.0

        def on_save_checkpoint(self, *_):
            clock.now_s += 1000.0

    monitor = HeadwayMonitor(peak=PEAK, clock=clock)
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = fit(
        tmp_path, monitor, callbacks=[Slow(), checkpoints], enable_checkpointing=True,
        val_check_interval=2,
    )  # fmt: skip
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    assert clock.now_s > 100 + 1000 * (4 + 8)
    assert monitor.run.wall_s < 1
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_resumed_run_measures_its_own_steps(tmp_path):
    saving = {"enable_checkpointing": True}
    first = HeadwayMonitor(peak=PEAK)
    fit(tmp_path, first, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], **saving)
    second, logger = HeadwayMonitor(peak=PEAK, names=("tokens",)), CSVLogger(tmp_path)
    saving |= {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "logger": logger}
    fit(tmp_path, second, ckpt_path=tmp_path / "last.ckpt", max_epochs=2, **saving)
    assert (first.run.tokens, second.run.tokens) == (sum(LENGTHS), sum(LENGTHS))
    logged = [(int(r["step"]), int(r["headway/tokens"])) for r in read_csv(logger) if r["headway/tokens"]]
    assert logged == [(4, 24), (5, 24), (6, 14), (7, 14)]


class Perceptron(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 5)
        self.nets = nn.ModuleDict({"main": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))})

    def training_step(self, batch, _index):
        return self.nets["main"](batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.nets.parameters(), lr=0.1)


def fit_perceptron(path, monitor, perceptron=None):
    data = torch.utils.data.DataLoader(torch.randn(10, 8), batch_size=4)
    fit(path, monitor, lightning_module=perceptron or Perceptron(), data=data, validate=False)


class Tokens(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

    def training_step(self, batch, _index):
        return self(**batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_that_is_the_model_itself(tmp_path):
    monitor = HeadwayMonitor("", peak=PEAK)
    fit(tmp_path, monitor, lightning_module=Tokens(), validate=False)
    assert monitor.run.flops.total == sum(LENGTHS) * 3 * 2 * 8 * 30  # forward, dgrad to the embedding, wgrad


def test_a_model_without_token_ids_is_measured_with_a_workload_of_its_own(tmp_path):
    lightning_module = Perceptron()
    net = lightning_module.nets["main"]
    cost = trace(net, inputs=lambda workload: (torch.zeros(workload.tokens, 8),))
    monitor = HeadwayMonitor(
        "nets.main", cost_model=cost, peak=PEAK, workload=lambda given: Workload([len(given["input"])])
    )
    fit_perceptron(tmp_path, monitor, lightning_module)
    # 10 rows; both layers forward and wgrad, the second alone dgrad: the data need no gradient
    assert monitor.run.flops.total == 10 * 2 * (2 * 8 * 32 + 3 * 32 * 3)


def test_mistakes_are_named(tmp_path):
    monitor = HeadwayMonitor(peak=PEAK)
    with pytest.warns(RuntimeWarning, match="Perceptron holds encoder, nets: which one HeadwayMonitor is to measure"):
        fit_perceptron(tmp_path, monitor)
    assert isinstance(monitor.failure, UsageError)
    cost = trace(nn.Linear(8, 5), inputs=lambda workload: (torch.zeros(workload.tokens, 8),))
    monitor = HeadwayMonitor("encoder", cost_model=cost, peak=PEAK)
    with pytest.warns(RuntimeWarning, match="ran no forward in step 1 of Perceptron: name the one.*Training goes on"):
        fit_perceptron(tmp_path, monitor)
