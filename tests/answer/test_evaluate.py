import math

import pytest
import torch

from headway.answer.evaluate import EvalSet
from headway.config import parse_config
from headway.data import Budget, Encoder, read_samples
from headway.errors import DataError
from headway.models.head import model_with_loss
from headway.models.load import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.models.video import normalised
from headway.train.run import train

ALONE = Ranks(0, 1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reader(digits, tmp_path_factory):
    """A model that reads some of its training digits right and others wrong, and its encoder."""
    raw = {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {
            "train": [{"path": str(digits / "data/train.jsonl")}],
            "tokens_per_pack": 512,
            "workers": 0,
            "prefetch_bytes": 0,
        },
        "optim": {"steps": 60, "lr": 5e-3, "warmup_steps": 5, "betas": [0.9, 0.99]},
        "run": {
            "folder": str(tmp_path_factory.mktemp("reader") / "run"),
            "device": "cpu",
            "threads": 1,
            "log_every": 60,
        },
    }
    summary = train(parse_config(raw))
    model = load_model(str(summary.model)).eval()
    return model, Encoder(load_processor(str(summary.model)), rope_index(model))


def _is_exact_token_by_token(model, encoder, sample):
    """Greedy generation as plainly as it can be written: the whole sequence again for every token."""
    gold = encoder.tokenizer(sample.answer + "<|im_end|>").input_ids
    prompt = encoder.encode_prompt(sample)
    written = []
    for _ in gold:
        words = torch.tensor(written, dtype=torch.long)
        places = prompt.position_ids_RS.max() + 1 + torch.arange(len(written))
        logits_1SV = model(
            input_ids=torch.cat([prompt.input_ids_S, words])[None],
            position_ids=torch.cat([prompt.position_ids_RS, places.expand(3, -1)], dim=1)[:, None],
            mm_token_type_ids=torch.cat([prompt.token_types_S, torch.zeros_like(words)])[None],
            pixel_values=normalised(prompt.media["images"].features, encoder.pixel_scale),
            image_grid_thw=prompt.media["images"].sizes,
        ).logits
        written.append(logits_1SV[0, -1].argmax().item())
    return written == gold


def test_exact_match_is_what_greedy_generation_gives(digits, reader):
    model, encoder = reader
    samples = read_samples(digits / "data/train.jsonl")[:40]
    generated = [_is_exact_token_by_token(model, encoder, sample) for sample in samples]
    assert 0 < sum(generated) < len(generated), "a test on all right or all wrong answers would say nothing"
    judged = [
        EvalSet([s], encoder, Budget(512), ALONE).evaluate(model_with_loss(model, chunk=7), CPU).exact for s in samples
    ]
    assert judged == generated
    packed = EvalSet(samples, encoder, Budget(512), ALONE).evaluate(model_with_loss(model, chunk=7), CPU)
    assert packed.exact == sum(generated)
    assert packed.samples == len(samples)


def test_the_loss_is_the_mean_over_supervised_tokens(digits, reader):
    model, encoder = reader
    samples = read_samples(digits / "data/eval.jsonl")
    summed, tokens = 0.0, 0
    for sample in samples:  # one by one, by the definition
        prompt = encoder.encode_prompt(sample).tokens
        encoded = encoder.encode(sample)
        gold = encoder.tokenizer(sample.answer + "<|im_end|>").input_ids
        logits_SV = model(
            input_ids=encoded.input_ids_S[None],
            position_ids=encoded.position_ids_RS[:, None],
            mm_token_type_ids=encoded.token_types_S[None],
            pixel_values=normalised(encoded.media["images"].features, encoder.pixel_scale),
            image_grid_thw=encoded.media["images"].sizes,
        ).logits[0]
        log_probs_SV = logits_SV.log_softmax(-1)
        summed -= sum(log_probs_SV[prompt - 1 + i, token].item() for i, token in enumerate(gold))
        tokens += len(gold)
    found = EvalSet(samples, encoder, Budget(300), ALONE).evaluate(model_with_loss(model, chunk=7), CPU)
    assert found.loss == pytest.approx(summed / tokens, rel=1e-5)


def test_evaluating_leaves_the_model_in_training_mode(digits, reader):
    model, encoder = reader
    model.train()
    EvalSet(read_samples(digits / "data/eval.jsonl")[:2], encoder, Budget(300), ALONE).evaluate(
        model_with_loss(model, chunk=7), CPU
    )
    assert model.training
    model.eval()


def test_a_held_out_sample_longer_than_a_pack_is_an_error(digits, reader):
    _, encoder = reader
    with pytest.raises(DataError, match="held-out sample"):
        EvalSet(read_samples(digits / "data/eval.jsonl"), encoder, Budget(12), ALONE)


def test_no_held_out_samples_is_an_error(reader):
    with pytest.raises(DataError, match="no held-out sample"):
        EvalSet([], reader[1], Budget(100), ALONE)


def test_a_document_has_no_answer_that_could_be_exact(reader, tmp_path):
    model, encoder = reader
    (tmp_path / "text.jsonl").write_text('{"text": "Which digits are these?"}\n')
    judged = EvalSet(read_samples(tmp_path / "text.jsonl"), encoder, Budget(64), ALONE).evaluate(
        model_with_loss(model, chunk=7), CPU
    )
    assert (judged.to_dict()["exact"], judged.to_dict()["exact_match"]) == (None, None)
    assert math.isfinite(judged.loss)
