"""Run on several ranks: trains on text, where time is made of sleep alone; each rank writes what it saw.

python tests/helpers/uneven_ranks.py CONFIG FOLDER SECONDS...    each rank's: what a layer sleeps per token [s]
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from headway.meter import Meter
from headway.train.config import load_config
from headway.train.loop import train


def main(config, folder, *seconds):
    rank = int(os.environ["RANK"])
    per_token_s = float(seconds[rank])
    forward, merge = Qwen3DecoderLayer.forward, Meter.merge
    walls_s = []

    def slow_forward(layer, hidden_states, *args, **kwargs):
        if layer.training:
            time.sleep(per_token_s * hidden_states.shape[1])
        return forward(layer, hidden_states, *args, **kwargs)

    def seen_merge(meter, every):
        for _, *numbers in every[rank]:
            walls_s.append(meter._pending.sums(numbers).totals["wall_ns"] / 1e9)
        return merge(meter, every)

    with patch.object(Qwen3DecoderLayer, "forward", slow_forward), patch.object(Meter, "merge", seen_merge):
        train(load_config(Path(config)))
    Path(folder, f"walls-{rank}.json").write_text(json.dumps(walls_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
