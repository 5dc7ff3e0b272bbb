"""Drawing with guidance: equal to each request alone, put together by the published formulas."""

import itertools

import pytest
import torch

from bagels import contents, dense_mask, tiny_bagel
from headway.count import splits
from headway.packing.parts import SamplePart
from headway_bagel.layout import lay_out
from headway_bagel.sampling import Guidance, Request, draw_images

AROUND = (5, 6)
EDIT = (SamplePart("clean", rows=2, columns=2), SamplePart("image", rows=2, columns=1), SamplePart("text", 5))
TEXT = (SamplePart("text", 5),)
IMAGES = EDIT[:2]
IMAGE = SamplePart("noised", rows=2, columns=3)


@pytest.fixture(scope="module")
def model():
    return tiny_bagel().eval()


def request(parts, config, seed=0):
    held = contents(EDIT, config, seed)
    has_images, ids = len(parts) > 1, held["input_ids"].tolist()
    text = ids[-5:] if parts[-1].kind == "text" else []
    images = ids[:-5] if has_images else []
    return Request(
        parts, tuple(images + text), held["pixel_values"] if has_images else None,
        held["latents"] if has_images else None,
    )  # fmt: skip


def mask_of(workload):
    runs = workload.splits
    masks, start, ends = [], 0, runs[:, 1].cumsum()
    for length in workload.segments.cumsum():
        last = int((ends <= length).sum())
        masks.append(torch.from_numpy(splits.mask_of_runs(runs[start:last])))
        start = last
    return torch.block_diag(*masks).bool()[None, None]


@torch.no_grad()
def velocity(model, one, x_RC, time):
    """Of a request alone."""
    parts = [*one.parts, IMAGE]
    given, _ = lay_out([parts], model.config)
    given["input_ids"] = torch.tensor([[*one.ids, AROUND[0], *[0] * 6, AROUND[1]]])
    clean = x_RC if one.latents is None else torch.cat([one.latents, x_RC])
    times = torch.tensor([time] if one.latents is None else [0.0, time])
    mask = dense_mask([parts], model.config)
    held = {"latents": clean, "noise": clean, "timesteps": times, "pixel_values": one.pixels}
    return model(**given, **held, attention_mask=mask).flow


def draw(model, seeds, guidance, steps=3, shift=2.0, **kinds):
    full, text, images = ([request(parts, model.config, s) for s in seeds] for parts in (EDIT, TEXT, IMAGES))
    how = {"around": AROUND, "guidance": guidance, "steps": steps, "shift": shift, "seed": 9}
    return draw_images(model, full, 2, 3, mask_of, no_text=images, no_images=text, **how)


@pytest.mark.parametrize("renorm", ["none", "global", "channel", "text-channel"])
def test_it_is_eulers_method_on_the_published_combination_of_single_requests(model, renorm):
    # Bagel._forward_flow: text first, images on what it gives, then no longer than the whole request's velocity
    scales = Guidance(text=3.0, image=1.5, interval=(0.6, 1.0), renorm=renorm)
    drawn = draw(model, [0], scales)
    full, text, images = (request(parts, model.config) for parts in (EDIT, TEXT, IMAGES))
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(9))
    even = [1.0, 2 / 3, 1 / 3, 0.0]
    times = [2 * t / (1 + t) for t in even]  # shifted by 2: 1, 0.8, 0.5, 0
    for now, following in itertools.pairwise(times):
        v = velocity(model, full, x, now)
        if now > 0.6:
            without = velocity(model, images, x, now)
            led = without + 3.0 * (v - without)
            if renorm == "text-channel":
                led = led * (v.norm(dim=-1, keepdim=True) / led.norm(dim=-1, keepdim=True)).clamp(max=1)
            alone = velocity(model, text, x, now)
            led = alone + 1.5 * (led - alone)
            if renorm == "global":
                led = led * (v.norm() / led.norm()).clamp(max=1)
            if renorm == "channel":
                led = led * (v.norm(dim=-1, keepdim=True) / led.norm(dim=-1, keepdim=True)).clamp(max=1)
            v = led
        x = x - (now - following) * v
    expected = x.view(2, 3, 2, 2, 3).permute(4, 0, 2, 1, 3).reshape(1, 3, 4, 6)
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=1e-5)


def test_images_do_not_depend_on_what_is_drawn_beside_them(model):
    scales = Guidance(text=2.0, image=2.0, renorm="global")
    one, two = draw(model, [0], scales), draw(model, [0, 1], scales)
    torch.testing.assert_close(two[:1], one, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(two[1], two[0])


def test_weights_in_bfloat16_draw_too(model):
    half = tiny_bagel().eval().to(torch.bfloat16)
    ours = draw(half, [0], Guidance())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, draw(model, [0], Guidance()), atol=0.1, rtol=0.1)
