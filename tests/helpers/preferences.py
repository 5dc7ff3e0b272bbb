"""Preferences as rows and packs, and TRL's own trainers on the same tokens."""

import json
from contextlib import nullcontext

import torch
from datasets import Dataset

from headway.config.preference import PreferenceConfig
from headway.data import Encoder, read_samples
from headway.data.collate import Collator
from headway.models.attention import use_attention
from headway.models.head import model_with_loss
from headway.models.load import load_model, load_processor, rope_index
from headway.models.vision import vision_geometry
from headway.train.preference import PackWeights, preferring_of
from headway.train.reference import Scoring, with_reference


def turn(role, content):
    return [{"role": role, "content": content}]


def pair(number):
    """A question, a right answer and a wrong one, of lengths that differ from row to row."""
    question = "Which picture is it? " * (1 + number % 3)
    right, wrong = f"It is {number}.", f"Is it the one {number + 1}? " * (1 + number * 7 % 5)
    return {"prompt": turn("user", question), "chosen": turn("assistant", right), "rejected": turn("assistant", wrong)}


def write_pairs(path, rows=20, row=pair):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row(number)) for number in range(rows)) + "\n")
    return path


def write_pictured_pairs(digits, path, rows=None):
    """The rows of a folder of digits as pairs: the right reading is better than a wrong one."""
    lines = []
    for line in (digits / "data/train.jsonl").read_text().splitlines()[:rows]:
        question, answer = json.loads(line)["messages"]
        right = answer["content"]
        wrong = "".join(str((int(digit) + 3) % 10) for digit in right)
        lines.append({"prompt": [question], "chosen": turn("assistant", right), "rejected": turn("assistant", wrong)})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def opened(folder, *, shift=0.0):
    """The model in a folder with attention of packs, and weights moved at random by so much of their size."""
    torch.manual_seed(0)
    model = load_model(str(folder), random_init=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.abs().mean(), alpha=shift)
    return model


def packed(folder, data, model):
    """The encoded rows of a file, and the pack of all of them."""
    encoder = Encoder(load_processor(str(folder)), rope_index(model))
    samples = [encoder.encode(sample) for sample in read_samples(data)]
    collator = Collator(
        geometry=vision_geometry(model),
        pixel_scale=encoder.pixel_scale,
        position_rows=1 if encoder.rope_index is None else 3,
    )
    return samples, collator(samples)


def our_loss(model, batch, settings, reference=None, *, chunk=7):
    """Loss of a pack, its gradients by parameter, and the numbers of its pairs."""
    use_attention(model, "headway_flash")
    losses = model_with_loss(model, chunk=chunk)
    if reference is not None:
        use_attention(reference, "headway_flash")
        scoring = Scoring(model_with_loss(reference, chunk=chunk), torch.device("cpu"), nullcontext)
        batch = with_reference(batch, scoring.log_probabilities(batch))
    preferring = preferring_of(PreferenceConfig.model_validate(settings))
    weights = PackWeights(preferring, batch, None, batch.answers.num_pairs, batch.answers.best_tokens)
    model.zero_grad()
    losses(batch.model_inputs(), batch.labels_1T[0], weigh=weights).total.backward()
    numbers = weights.numbers
    loss = numbers.loss_P.mean() + preferring.sft * numbers.nll / batch.answers.best_tokens
    return loss.item(), gradients(model), numbers


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def ids_of(samples):
    """The tokens of each pair as TRL's collators take them, up to the last that is learnt."""
    rows = []
    for sample in samples:
        row = {}
        parts = (x.split(sample.answers) for x in (sample.input_ids_S, sample.labels_S))
        for name, ids, labels in zip(("chosen", "rejected"), *parts, strict=True):
            learnt = (labels != -100).nonzero()[:, 0].tolist()
            assert learnt == list(range(learnt[0], learnt[-1] + 1))
            row |= {"prompt_ids": ids[: learnt[0]].tolist(), f"{name}_ids": ids[learnt[0] : learnt[-1] + 1].tolist()}
        rows.append(row)
    return rows


def trainer_of(kind, config, path, model, tokenizer, **given):
    """A trainer of TRL with a row of its own; what it computes losses of is handed to it."""
    options = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None, "disable_tqdm": True}
    options |= given.pop("options", {})
    words = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    return kind(
        model=model, args=config(str(path), **options), train_dataset=words, processing_class=tokenizer, **given
    )


def their_loss(trainer, model, inputs):
    """Loss and gradients as a trainer of TRL computes them."""
    model.zero_grad()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return loss.item(), gradients(model)


def assert_same(ours, theirs):
    """Losses and gradients are equal to 1e-5, gradients relative to the largest of their parameter."""
    (loss, grads), (their, their_grads) = ours, theirs
    assert abs(loss - their) <= 1e-5 * max(1.0, abs(their))
    assert grads.keys() == their_grads.keys()
    for name, grad in grads.items():
        assert (grad - their_grads[name]).abs().max() <= 1e-5 * max(1e-3, their_grads[name].abs().max()), name
