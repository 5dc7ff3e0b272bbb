"""Run by several processes over gloo: a pack that draws, computed together, is what one process makes of it.

Each process first computes the pack alone, then its own slots of it: the losses of words and of drawn patches, and the
gradient of every parameter, add up over the processes to those of one. Cases differ in what the samples hold, in which
is always less than a process's share of something, and in how heads divide.

python drawing_process.py FOLDER    a folder with a model and data, as `drawing_data` writes them
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from headway.answer.evaluate import exact_match
from headway.data import read_samples
from headway.data.blank_media import with_blanks
from headway.data.encoders import collator_of
from headway.models import load_model
from headway.models.head import LossOptions, model_with_loss
from headway.models.load import load_model_config, load_processor
from headway.models.parallel.exchange import shares
from headway.models.parallel.sequence import share_packs
from headway_bagel.encoding import DrawingEncoder

TOLERANCE = 1e-5  # float32, relative
FIVE_HEADS = {"text": {"num_attention_heads": 5, "num_key_value_heads": 1}, "vision": {"num_attention_heads": 3}}
ALL = [0, 26, 1, 2, 3, 4, 5, 26, 7]
CASES = {
    "all kinds": ("model", ALL, {}),
    "heads that do not divide, padded, recomputed": (
        "model",
        ALL,
        {**FIVE_HEADS, "slots": 192, "recompute": True},
    ),
    "pictures of an autoencoder": ("latents", [0, 1, 3, 4, 6], {}),
    "one picture of an autoencoder": ("latents", [0], {}),
    "a picture of one latent patch": ("model", [24], {}),
    "an image of one patch": ("model", [25], {}),
    "nothing to read, beside a pack with an image": ("model", [0, 3], {"blank": True}),
}


def build(folder, rows, model, text=None, vision=None, slots=None, recompute=False, blank=False):
    """A case's model and pack, the same in every process."""
    config = load_model_config(folder / model)
    for part, changes in ((config.text_config, text), (config.vision_config, vision)):
        for name, value in (changes or {}).items():
            setattr(part, name, value)
    torch.manual_seed(0)
    made = load_model(config, random_init=True)
    with torch.no_grad():  # norms, biases and the flow's answer start at one and zero, which hides mistakes
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    if recompute:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    encoder = DrawingEncoder(load_processor(folder / "model"), config)
    samples = read_samples(folder / "data" / "every.jsonl")
    collator = collator_of(encoder, bucket_tokens=slots)
    batch = collator([encoder.encode(samples[row]) for row in rows])
    if blank:
        batch = with_blanks(batch, frozenset({"images"}), collator)
    return made.train(), batch.noised(0, 1)


def step(model, batch, group):
    """The losses of this process's slots, and every parameter's gradient of their weighted sum."""
    model.zero_grad()
    batch = batch.dealt(group)
    labels = batch.labels_1T[0, batch.local_slots(group)]
    found, errors, _ = model_with_loss(model, chunk=None).of_pack(batch.model_inputs(), labels, LossOptions(7), 5)
    found.total.backward()
    drawn = torch.zeros(()) if errors is None else errors.sum()
    losses = torch.stack([found.total.detach(), found.loss_T.sum(), drawn])
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return losses, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in learning}


def check(name, folder):
    which, rows, changes = CASES[name]
    group, (model, batch) = dist.group.WORLD, build(folder, rows, which, **changes)
    expected, gradients = step(model, batch, None)
    share_packs(model, group)
    losses, own = step(model, batch, group)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=f"losses of {name}")
    largest = max(gradient.norm() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        dist.all_reduce(own[parameter])
        # gradients that vanish, such as key biases', are rounding noise
        norm = max(gradient.norm(), 1e-4 * largest)
        assert (own[parameter] - gradient).norm() < TOLERANCE * norm, f"{parameter} of {name}"


def every_process_has_its_share_of_every_kind(folder):
    group, (_, batch) = dist.group.WORLD, build(folder, ALL, "model")
    degree, rank = group.size(), group.rank()
    part = batch.dealt(group).family_inputs.inputs
    whole = batch.family_inputs.inputs
    assert part["input_ids"].shape[1] == shares(batch.slots, degree)[rank]
    for name in ("understood_slots", "supervised_rows", "image_rows", "latent_slots", "latents"):
        assert len(whole[name]) // degree <= len(part[name]) <= -(-len(whole[name]) // degree), name


def every_answer_is_judged_once_and_whole(folder):
    """A mistake in one answer of several: who holds the token and who counts samples may be different processes."""
    group, (model, batch) = dist.group.WORLD, build(folder, ALL, "model")
    with torch.no_grad():
        logits_SV = model.eval()(**batch.model_inputs()).logits
        labels_T = batch.labels_1T[0].clone()
        slots_S = batch.family_inputs.inputs["understood_slots"][batch.family_inputs.inputs["supervised_rows"]]
        labels_T[slots_S] = logits_SV.argmax(-1)
        labels_T[slots_S[1]] = (labels_T[slots_S[1]] + 1) % 5
        batch = replace(batch, labels_1T=labels_T[None])
        head = model_with_loss(model, chunk=8)
        expected = exact_match(head, batch, nullcontext, None)
        assert expected[:2].tolist() == [9, 8]
        share_packs(model, group)
        found = exact_match(head, batch.dealt(group), nullcontext, group)
    dist.all_reduce(found)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=0)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in CASES:
        check(name, folder)
    every_process_has_its_share_of_every_kind(folder)
    every_answer_is_judged_once_and_whole(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
