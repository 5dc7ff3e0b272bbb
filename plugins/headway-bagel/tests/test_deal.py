"""Packs dealt to processes: every slot once, and every kind of token in equal parts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagels import EDIT, PICTURE, QUESTION, bagel_config, pack
from headway_bagel.deal import deal

KINDS = ("understood_slots", "supervised_rows", "image_rows", "latent_slots")


@given(st.lists(st.sampled_from([QUESTION, PICTURE, EDIT]), min_size=1, max_size=5), st.integers(1, 6))
def test_every_slot_is_dealt_once_and_every_kind_in_equal_parts(samples, degree):
    whole, workload = pack(samples, bagel_config())
    whole = {name: value for name, value in whole.items() if value is not None}
    parts = [deal(whole, rank, degree) for rank in range(degree)]
    slots = torch.cat([part.slots_H for part in parts])
    assert sorted(slots.tolist()) == list(range(workload.slots))
    for kind, number in {name: len(whole[name]) for name in KINDS if name in whole}.items():
        dealt = [len(part.arguments[kind]) for part in parts]
        assert sum(dealt) == number
        assert max(dealt) - min(dealt) <= 1, kind
    for part in parts:
        assert torch.equal(part.order_T, slots)
        own, place = part.arguments, part.slots_H
        assert torch.equal(own["input_ids"], whole["input_ids"][:, place])
        assert torch.equal(own["position_ids"], whole["position_ids"][:, place])
        assert set(place[own["understood_slots"]].tolist()) <= set(whole["understood_slots"].tolist())
    if "latent_slots" in whole:
        for name in ("latents", "noise", "latent_grids", "latent_places"):
            assert torch.equal(torch.cat([part.arguments[name] for part in parts]), whole[name])


def test_images_that_are_encoded_go_to_the_processes_that_hold_a_part_of_them():
    # Grids of 6, 4, 4 and 6 latent patches behind 37 understood tokens: as 37 = 3 x 12 + 1, the second process is next,
    # and parts are of 6, 7 and 7: the first grid; the second with three of the third; its last with the fourth.
    whole, _ = pack([PICTURE, EDIT, PICTURE], bagel_config())
    del whole["latents"]
    whole["latent_pixels"] = [torch.full((1,), float(number)) for number in range(4)]
    found = [deal(whole, rank, 3).arguments for rank in range(3)]
    assert [[int(image) for image in each["latent_pixels"]] for each in found] == [[0], [1, 2], [2, 3]]
    assert [each["latents_before"] for each in found] == [0, 0, 3]


def test_fewer_patches_than_processes_get_a_blank_image_beside_them():
    whole, _ = pack([EDIT], bagel_config())  # of two patches
    parts = [deal(whole, rank, 4) for rank in range(4)]
    found = [part.arguments for part in parts]
    assert [len(each["pixel_values"]) for each in found] == [1] * 4
    assert [len(each["image_rows"]) for each in found] == [1, 1, 0, 0]
    assert not torch.cat([each["pixel_values"] for each in found[2:]]).any()
    assert all(each["image_cu_seqlens"].tolist() == [0, 2, 4] for each in found)
    assert {part.patches for part in parts} == {4}
