"""A model told of its placeholders finds what it would have found, to the bit; what is on the host stays there."""

import pytest
import torch
from torch import nn

from headway.data.collate import Collator
from headway.models import load_model
from headway.models.losses import AfterHead, Task, labelled_slots, liger_losses
from headway.models.vision import vision_geometry
from headway.models.waits import PlacedMask, Placeholders, Places, answer_ahead, keep_on_host
from helpers.models import tiny_config

T, H = 12, 3
IMAGES, VIDEOS = [1, 2, 3, 8], [5, 6]


def masks():
    """A mask of images and one of videos, real and placed, of shape (1, T, 1)."""
    real, placed = [], []
    for places in (IMAGES, VIDEOS):
        mask = torch.zeros(1, T, 1, dtype=torch.bool)
        mask[0, places] = True
        real.append(mask)
        placed.append(PlacedMask(Places.of(mask[0, :, 0]), lambda: pytest.fail("the real mask was asked for")))
    return real, placed


def scattered(x, masks, rows):
    image, video = masks
    return x.masked_scatter(image, rows[0]).masked_scatter(video, rows[1])


def deepstacked(x, masks, rows):
    """What Qwen3-VL does with images and videos in one batch."""
    image, video = (mask[..., 0] for mask in masks)
    both = image | video
    image_joint, video_joint = image[both], video[both]
    joint = rows[0].new_zeros(both.sum(), H)
    joint[image_joint, :] = rows[0]
    joint[video_joint, :] = rows[1]
    both = both.to(x.device)
    x = x.clone()
    local = x[both, :] + joint
    x[both, :] = local
    return x


@pytest.mark.parametrize("use", [scattered, deepstacked])
def test_a_placed_mask_selects_and_scatters_as_the_real_one_does(use):
    found = []
    for kind in masks():
        torch.manual_seed(0)
        x = torch.randn(1, T, H, requires_grad=True)
        rows = [torch.randn(len(places), H, requires_grad=True) for places in (IMAGES, VIDEOS)]
        out = use(x * 1.0, kind, rows)
        out.square().sum().backward()
        found.append((out, x.grad, *(row.grad for row in rows)))
    for real, placed in zip(*found, strict=True):
        assert torch.equal(real, placed)


def test_a_placed_mask_is_the_real_one_for_anything_else():
    real = masks()[0][0]
    placed = PlacedMask(Places.of(real[0, :, 0]), lambda: real)
    x = torch.arange(float(T)).view(1, T, 1)
    assert torch.equal(torch.where(placed, x, -1.0), torch.where(real, x, -1.0))
    assert torch.equal(x.masked_fill(placed, 7.0), x.masked_fill(real, 7.0))
    assert placed.shape == real.shape
    assert torch.equal(placed[..., 0].mask, real[..., 0])
    assert torch.equal((placed[..., 0] | masks()[0][1][..., 0]), real[..., 0] | masks()[0][1][..., 0])


@pytest.mark.parametrize("local", [slice(0, 2), slice(2, 9), slice(9, 12)])
def test_a_part_of_the_slots_keeps_its_part_of_the_features(local):
    real, (images, _) = masks()
    cut, among = images[..., 0].cut(local)
    inside = real[0][0, local, 0]
    assert cut.places.host_V.tolist() == inside.nonzero()[:, 0].tolist()
    assert IMAGES[among] == [place for place in IMAGES if local.start <= place < local.stop]


def test_features_that_do_not_fit_their_placeholders_are_an_error():
    _, (images, _) = masks()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        torch.zeros(1, T, H).masked_scatter(images, torch.zeros(len(IMAGES) + 1, H))


class _Moves(nn.Module):
    """A model in front of which something moves every tensor, as FSDP2 does."""

    base_model_prefix = ""

    def __init__(self):
        super().__init__()
        answer_ahead(self)
        self.register_forward_pre_hook(self._move, prepend=True, with_kwargs=True)

    @property
    def base_model(self):
        return self

    @staticmethod
    def _move(_module, args, kwargs):
        return args, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    def forward(self, **kwargs):
        return kwargs


def test_what_lies_on_the_host_stays_there_in_a_sharded_model():
    model, grids = _Moves(), torch.ones(2, 3)
    assert model(image_grid_thw=grids)["image_grid_thw"].is_meta
    keep_on_host(model)
    assert model(image_grid_thw=grids)["image_grid_thw"] is grids


def test_outside_of_a_pack_a_model_looks_for_itself():
    model = load_model(tiny_config("qwen3_vl"), random_init=True)
    geometry = vision_geometry(model)
    ids = torch.tensor([[5, geometry.image_token, 6]])
    given = Placeholders.of(ids[0], geometry.image_token, geometry.video_token)
    embeds = torch.zeros(1, 3, model.config.text_config.hidden_size)
    seen = []

    def look(*_, **__):
        seen.append(model.model.get_placeholder_mask(ids, inputs_embeds=embeds)[0])
        raise InterruptedError

    handle = model.model.register_forward_pre_hook(look)
    pack = {"pack_cu_seqlens": torch.tensor([0, 3], dtype=torch.int32), "pack_max_seqlen": 3}
    for more in ({**pack, "pack_placeholders": given}, pack, {}):
        with pytest.raises(InterruptedError):
            model(input_ids=ids, **more)
    handle.remove()
    assert [type(mask) for mask in seen] == [PlacedMask, torch.Tensor, torch.Tensor]
    assert seen[0].places.host_V.tolist() == [1]
    assert "get_placeholder_mask" not in vars(model.model)


def test_padding_patches_have_placeholders_too():
    geometry = vision_geometry(load_model(tiny_config("qwen3_vl"), device="meta", random_init=True))
    batch = Collator(geometry, bucket_tokens=8)([])
    assert batch.placeholders.images.host_V.numel() == 0
    assert batch.model_inputs()["pack_placeholders"] is batch.placeholders


def test_ligers_loss_is_not_asked_how_many_slots_are_supervised(monkeypatch):
    asked = []

    class Stub:
        @staticmethod
        def fused_linear_cross_entropy_forward(hidden, weight, target, **_):
            asked.append((target != -100).sum().item())  # as the package does
            logits = hidden @ weight.T
            loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
            return loss, None, None, None, None, None, None

    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", Stub)
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel.ops", Stub)
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel.ops.fused_linear_cross_entropy", Stub)
    labels = torch.tensor([1, -100, 0, 2])
    layer = nn.Linear(H, 5, bias=False)
    compute = liger_losses(layer, Task(labels, labelled_slots(labels), 3, 4, AfterHead(), False))
    losses = compute(torch.randn(4, H), False, (False,))
    assert asked == [1]
    assert losses.loss_T.shape == (4,)
    assert (labels != -100).sum().item() == 3  # elsewhere numbers are read as ever
