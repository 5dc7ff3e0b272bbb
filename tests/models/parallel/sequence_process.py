"""Run by several processes over gloo: one pack computed together is what one process makes of it.

Each process first computes the pack alone, then shares it with the others: the losses of its slots and, summed over the
processes, the gradient of every parameter must be the same. Cases differ in where images stand and how heads divide.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from headway.answer.evaluate import exact_match
from headway.data import EncodedSample
from headway.data.collate import Collator
from headway.data.media.tensors import MediaTensors
from headway.data.samples import Origin
from headway.models import load_model
from headway.models.head import model_with_loss
from headway.models.parallel.sequence import local_slots, share_packs
from headway.models.vision import vision_geometry
from helpers.models import SPECIAL_TOKENS, VISION_FAMILIES, tiny_config

TOLERANCE = 1e-5  # float32, relative
IMAGE, VIDEO = SPECIAL_TOKENS["image_token_id"], SPECIAL_TOKENS["video_token_id"]
VALUES_PER_PATCH = 3 * 2 * 8 * 8
UNCHANGED: Mapping[str, Any] = MappingProxyType({})

# A pack is its segments; a segment is numbers of text tokens, and grids of images (1, h, w) or videos (t, h, w).
TEXT = ([5], [23], [1], [14])
LAYOUTS: dict[str, tuple[list[Any], ...]] = {
    "text": TEXT,
    "first": ([(1, 4, 8), 9], [17], [4]),
    "last": ([12], [11, (1, 6, 4)]),
    "many over the borders": ([3, (1, 8, 8), 2, (1, 2, 2), 4], [2, (1, 4, 4), (1, 4, 12), 3], [2, (1, 10, 6), 1]),
    "one token's image": ([9, (1, 2, 2), 12],),
    "as many slots as channels": ([2, (1, 8, 8), 3], [(1, 4, 8), 3]),
    "films": ([2, (3, 4, 4), 6, (1, 4, 4), 5], [8, (2, 6, 4), 3]),
}


class Case(NamedTuple):
    """A model and a pack.

    Attributes:
        family: as in `helpers.models`.
        layout: of the pack.
        language: changes to the language model's configuration.
        vision: changes to the vision tower's.
        ready_made: whether the collator computes what the tower derives from grids.
        recompute: whether layers are recomputed in backward.
    """

    family: str
    layout: str
    language: Mapping[str, Any] = UNCHANGED
    vision: Mapping[str, Any] = UNCHANGED
    ready_made: bool = True
    recompute: bool = False


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1}
THREE_HEADS = {"num_heads": 3}
CASES = [
    Case("gpt2", "text"),
    Case("qwen3", "text", SIX_HEADS),
    Case("qwen3", "text", FIVE_HEADS, recompute=True),
    Case("gpt_oss_sinks", "text", SIX_HEADS),
    Case("gemma2_softcap", "text"),
    Case("deepseek_v3", "text"),
    *(Case("qwen2_5_vl", layout) for layout in LAYOUTS),
    *(Case("qwen3_vl", layout, SIX_HEADS, THREE_HEADS) for layout in LAYOUTS),
    Case("qwen2_5_vl", "many over the borders", ready_made=False),
    Case("qwen3_vl", "many over the borders", recompute=True),
    Case("qwen3_vl", "films", ready_made=False),
    Case("qwen3_vl_moe", "many over the borders", SIX_HEADS, THREE_HEADS),
]


def sample(segment, number, sees):
    """One segment as an encoder would give it, every token supervised; positions of three rows all differ."""
    ids, grids, film_grids = [], [], []
    for part in segment:
        if isinstance(part, int):
            ids += [(7 + 31 * number + 3 * i) % 140 + 10 for i in range(part)]
        else:
            ids += [VIDEO if part[0] > 1 else IMAGE] * (part[0] * part[1] * part[2] // 4)
            (film_grids if part[0] > 1 else grids).append(part)
    ids_S, places_S = torch.tensor(ids), torch.arange(len(ids))
    sizes = {"images": grids, "videos": film_grids}
    by_kind = {name: torch.tensor(each, dtype=torch.long).reshape(-1, 3) for name, each in sizes.items()}

    def pixels(each_M3):
        return torch.randn(int(each_M3.prod(1).sum()), VALUES_PER_PATCH)

    return EncodedSample(
        input_ids_S=ids_S,
        labels_S=ids_S,
        position_ids_RS=torch.stack([places_S, places_S // 2, places_S % 5]) if sees else places_S[None],
        origin=Origin("made", "memory", number, f"segment {number}"),
        token_types_S=((ids_S == IMAGE).int() + 2 * (ids_S == VIDEO).int()) if sees else None,
        media={name: MediaTensors(each_M3, pixels(each_M3)) for name, each_M3 in by_kind.items() if len(each_M3)},
    )


def build(case):
    """The case's model and pack, the same in every process."""
    torch.manual_seed(0)
    sees = case.family in VISION_FAMILIES
    config = tiny_config(case.family)
    parts = [(config.get_text_config(), case.language)] + ([(config.vision_config, case.vision)] if sees else [])
    for part, changes in parts:
        for name, value in changes.items():
            setattr(part, name, value)
    model = load_model(config, random_init=True)
    with torch.no_grad():  # norms, biases and sinks start at one and zero, which hides mistakes in their gradients
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    collator = Collator(geometry=vision_geometry(model) if case.ready_made else None)
    return model.train(), collator([sample(each, i, sees) for i, each in enumerate(LAYOUTS[case.layout])])


def step(model, batch, local):
    """The losses of some slots and every parameter's gradient of their sum."""
    model.zero_grad()
    logits_LV = model(**batch.model_inputs()).logits[0]
    loss_L = F.cross_entropy(logits_LV, batch.labels_1T[0, local], reduction="none")
    loss_L.sum().backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    return loss_L.detach(), zeros | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check(case):
    group = dist.group.WORLD
    model, batch = build(case)
    losses_T, gradients = step(model, batch, slice(0, batch.slots))
    share_packs(model, group)
    local = local_slots(batch.slots, group)
    own_losses_L, own_gradients = step(model, batch, local)
    torch.testing.assert_close(own_losses_L, losses_T[local], rtol=TOLERANCE, atol=TOLERANCE, msg=f"losses of {case}")
    total = torch.cat([own_gradients[name].flatten() for name in gradients])
    dist.all_reduce(total)
    largest = max(gradient.norm() for gradient in gradients.values())
    parts = torch.split(total, [gradient.numel() for gradient in gradients.values()])
    for (name, expected), part in zip(gradients.items(), parts, strict=True):
        # gradients that vanish, such as key biases', are rounding noise
        norm = max(expected.norm(), 1e-6 * largest)
        assert (part.view_as(expected) - expected).norm() < TOLERANCE * norm, f"{name} of {case}"


def every_answer_is_judged_once_and_whole():
    """Three of four segments are answered exactly; the longest lies on several processes and fails on one of them."""
    group = dist.group.WORLD
    model, batch = build(Case("qwen3", "text"))
    right_T = model.eval()(**batch.model_inputs()).logits[0].argmax(-1)
    labels_T = torch.where(batch.labels_1T[0] >= 0, right_T, -100)
    labels_T[batch.cu_seqlens_N[1] + 2] = (right_T[batch.cu_seqlens_N[1] + 2] + 1) % 160
    batch = replace(batch, labels_1T=labels_T[None])
    with torch.no_grad():
        head = model_with_loss(model, chunk=8)
        expected = exact_match(head, batch, nullcontext, None)
        assert expected[:2].tolist() == [4, 3]
        share_packs(model, group)
        found = exact_match(head, batch.dealt(group), nullcontext, group)
    dist.all_reduce(found)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=0)


def what_is_no_pack_is_left_alone():
    model, _ = build(Case("qwen3", "text"))
    ids = torch.arange(10, 22).view(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.eval().generate(ids, **options)
    share_packs(model, dist.group.WORLD)
    assert torch.equal(model.generate(ids, **options), expected)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        check(case)
    every_answer_is_judged_once_and_whole()
    what_is_no_pack_is_left_alone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
