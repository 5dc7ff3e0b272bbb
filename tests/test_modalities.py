"""A kind of input that nobody here knows is a row, and a file each to read, encode and trace it.

The rows of `headway.count.modalities` stand before what loops over them is imported, so it is tried in a process of its
own: readings of a sensor, of 3 values each, of which a model merges 4 into a token.
"""

import subprocess
import sys

from helpers.processes import ROOT

ROW = """
from headway.count.modalities import LENGTH, Modality, register

register(
    Modality(
        name="sensors", kind="sensor", noun="sensor series", plural="sensor series", tower="sensors",
        shape="lengths", unit="readings",
        items_key="sensor_series", units_key="sensor_readings", items_driver="series", column="sensor_lengths",
        extensions=("npy",), metavar=LENGTH, help="Series of readings that lie in the segments.", example="400*2",
    )
)
"""
READ_AND_ENCODE = """
import numpy as np
import torch

from headway.data.media import media_reader, tensors
from headway.data.samples import MediaPart


class SensorPart(MediaPart):
    __slots__ = ()
    kind = "sensor"


class Series(tensors.MediaLayout):
    rope_argument = "sensor_lengths"

    def joined(self, parts):
        values = [part.features for part in parts]
        return tensors.MediaTensors(torch.cat([part.sizes for part in parts]), torch.cat(values))

    def arguments(self, media, scale):
        return {"sensor_values": media.features, "sensor_lengths": media.sizes}


def opener_of(processor):
    return open_series if getattr(processor, "sensor_token", None) else None


def open_series(media, at):
    series = []
    for each in media:
        with each.open() as file:
            series.append(torch.from_numpy(np.load(file)).float())
    lengths = tuple(len(values) for values in series)
    words = [at.processor.sensor_token * -(-length // 4) for length in lengths]
    return media_reader.OpenedKind(lengths, words, lambda: torch.cat(series))


tensors.LAYOUTS["sensors"] = Series()
media_reader.OPENERS["sensors"] = opener_of
"""
TRACE = """
import torch
from torch import nn

from headway.tracing.inputs import model_inputs
from headway.tracing.inputs.form import InputForm


class SensorValues(InputForm):
    takes = "sensor_values"
    drivers = ("sensors/4", "sensors", "series")
    strided = ("sensors",)

    @classmethod
    def of(cls, model):
        return cls(model) if cls.takes in model_inputs.inspect.signature(model.forward).parameters else None

    def sizes(self, run):
        return {"sensors": [[40], [52, 36], [100], [24, 20, 68]][run]}

    def positions(self, workload):
        return sum(-(-length // 4) for length in workload.sizes("sensors").tolist())

    def fill(self, batch, start, workload, floats):
        lengths = workload.sizes("sensors")
        batch["input_ids"][:, start : start + self.positions(workload)] = 7
        batch["sensor_values"] = floats([int(lengths.sum()), 3])
        batch["sensor_lengths"] = torch.tensor(lengths)


model_inputs.FORMS.append(SensorValues)


class Model(nn.Module):
    def __init__(self, vocabulary=200, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.sensors = nn.Linear(12, width)  # of 4 readings, 3 values each
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, sensor_values=None, sensor_lengths=None, position_ids=None):
        states = self.embed(input_ids)
        if sensor_values is not None:
            tokens = self.sensors(sensor_values.reshape(-1, 12))
            states = states.masked_scatter((input_ids == 7)[..., None], tokens)
        return self.head(states)
"""
USE = """
import json
import sys


import row
import read_and_encode
import trace_sensors
import torch
from helpers.folders import tiny_tokenizer

from headway import Workload, trace
from headway.cli.app import main
from headway.errors import WorkloadError
from headway.data import Collator, Encoder, read_samples
from headway.data.index import build_index
from headway.data.sources import open_source

# counted, to the FLOP: 12 x 8 products of each 4 readings, and the head on every token
cost = trace(trace_sensors.Model())
step = Workload([50], sensors=[40, 24]) + Workload([30])
linear, head = 2 * 12 * 8 * (40 + 24) // 4, 2 * 8 * 200 * 80
assert step.sizes("sensors").tolist() == [40, 24], step
assert cost.count(step).forward == linear + head, cost.count(step)
assert cost.count(step).total == 2 * linear + 3 * head, cost.count(step)  # readings need no gradient
assert cost.towers == {"language", "sensors"}, cost.towers
try:
    trace(torch.nn.Linear(2, 2), inputs=lambda w: torch.zeros(w.tokens, 2)).count(step)
except WorkloadError as error:
    assert "has no sensors tower" in str(error), error
else:
    raise AssertionError("a model without a tower took sensors")


# read from rows, encoded, indexed and packed
class Processor:
    sensor_token, chat_template, model_input_names = "w3", None, ()
    tokenizer = tiny_tokenizer()


Processor.tokenizer.chat_template = (
    "{% for turn in messages %}{% for part in turn.content %}"
    "{{ ' w3 ' if part.type == 'sensor' else part.text }}{% endfor %}<eos>{% endfor %}"
)
Processor.tokenizer.add_special_tokens({"additional_special_tokens": ["w3"]})
samples = list(read_samples("rows.jsonl"))
assert samples[0].media("sensor")[0].path.endswith("a.npy"), samples[0]
encoder = Encoder(Processor())
encoded = [encoder.encode(sample) for sample in samples]
assert [encoder.measure(sample).media for sample in samples] == [each.lengths.media for each in encoded]
index = build_index(open_source("rows.jsonl"), encoder, workers=0)
assert index.media["sensors"].values.tolist() == [40, 24], index.media
assert index.summary().items["sensors"] == 2
batch = Collator()(encoded)
assert batch.workload.sizes("sensors").tolist() == [40, 24]
inputs = batch.model_inputs()
assert inputs["sensor_values"].shape == (64, 3)
assert (inputs["input_ids"] == 7).sum() == 10 + 6
out = trace_sensors.Model()(inputs["input_ids"], inputs["sensor_values"], inputs["sensor_lengths"])
assert out.shape == (1, batch.slots, 200)

# and typed
sys.argv = ["headway", "flops", "qwen3-0.6b", "--segments", "64", "--sensors", "400*2"]
main()
"""


def test_a_made_up_kind_of_input_is_counted_read_packed_and_typed(tmp_path):
    import numpy as np

    for name, length in (("a", 40), ("b", 24)):
        np.save(tmp_path / f"{name}.npy", np.ones((length, 3), np.float32))
    turns = '[{"role": "user", "content": "<sensor>w9"}, {"role": "assistant", "content": "w8 w9"}]'
    rows = [f'{{"messages": {turns}, "sensors": ["{name}.npy"]}}\n' for name in "ab"]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    scripts = {"row": ROW, "read_and_encode": READ_AND_ENCODE, "trace_sensors": TRACE, "use": USE}
    for name, script in scripts.items():
        (tmp_path / f"{name}.py").write_text(script)
    environment = {
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}:{ROOT / 'tests'}",
        "PATH": "",
        "HF_HUB_OFFLINE": "1",
        "HEADWAY_CACHE": str(tmp_path / "cache"),
    }
    run = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 2, run.stderr
    assert "has no sensors tower, but the workload holds 2 sensor series. Leave" in run.stderr
