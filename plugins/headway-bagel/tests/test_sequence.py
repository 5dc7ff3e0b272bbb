"""Several processes share a pack of a model that draws: what each computes is in drawing_process.py."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image
from torch.testing._internal.distributed.fake_pg import FakeStore

from bagels import VAE, chat, image, tiny_bagel, write_data, write_model
from headway.errors import ConfigError
from headway.models import use_attention
from headway.models.parallel.sequence import share_packs
from helpers.processes import run_processes


@pytest.fixture(scope="module")
def drawings(tmp_path_factory):
    """Models that draw, and samples of each kind; the last are one latent patch, one patch to read, and twelve."""
    folder = tmp_path_factory.mktemp("drawings")
    write_model(folder / "model")
    write_model(folder / "latents", VAE)
    path, _ = write_data(folder / "data")
    for name, sides in (("least", (2, 2)), ("large", (24, 18))):
        Image.effect_noise(sides, 99).convert("RGB").save(folder / "data" / f"{name}.png")
    rows = [chat("Draw a red square.", [image("least.png")]), chat([image("least.png")], "a square")]
    rows.append(chat([image("large.png"), {"type": "text", "text": "What is this?"}], "a circle"))
    (folder / "data" / "every.jsonl").write_text(path.read_text() + "".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_packs_that_draw_have_the_losses_and_gradients_of_one_process(drawings, degree):
    run_processes([sys.executable, Path(__file__).with_name("drawing_process.py"), drawings], degree)


@pytest.fixture
def group_of():
    """Torch's stand-in for a group of several processes, of which this is the second; nothing is exchanged."""

    def make(degree):
        dist.init_process_group("fake", rank=1, world_size=degree, store=FakeStore())
        return dist.group.WORLD

    yield make
    dist.destroy_process_group()


def test_a_model_that_draws_is_refused_likewise(group_of):
    model, group = tiny_bagel(), group_of(5)
    with pytest.raises(ConfigError, match="BagelModel does not attend through the backend 'headway_flash'"):
        share_packs(model, group)
    use_attention(model)
    with pytest.raises(ConfigError, match=r"parallel\.sequence is 5, but the model has 4 query heads.* at most 4"):
        share_packs(model, group)
