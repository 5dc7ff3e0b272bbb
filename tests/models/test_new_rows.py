"""Rows of new tokens, on models of many families: as a resized model has them, and beside frozen ones the same."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.load import load_model
from headway.models.new_rows import (
    NEW_ROWS,
    SPREAD,
    add_new_rows,
    embedding_rows,
    grow,
    grown,
    initialise_new_rows,
    resize,
)
from helpers.folders import VLM_FOLDERS, write_vlm


def built(kind, tmp_path):
    torch.manual_seed(3)
    return load_model(str(write_vlm(tmp_path, kind, weights=True)), attention="eager")


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("kind", [kind for kind in VLM_FOLDERS if kind != "qwen2_5_omni_thinker"])
def test_rows_beside_frozen_ones_compute_and_learn_as_rows_of_a_resized_model(kind, tmp_path):
    model = built(kind, tmp_path)
    rows = embedding_rows(model.config)
    grow(model, rows + 2, seed=1)
    assert embedding_rows(model.config) == rows + 2
    # the saved configuration alone builds a model of the same shapes
    again = load_model(copy.deepcopy(model.config), random_init=True, device="meta")
    shapes = {name: parameter.shape for name, parameter in again.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes

    beside = copy.deepcopy(model)
    beside.requires_grad_(False)
    add_new_rows(beside, [rows, rows + 1])
    initialise_new_rows(beside, "cpu")
    learning = [parameter for parameter in beside.parameters() if parameter.requires_grad]
    assert sum(map(len, learning)) in (2, 4)  # of the embedding, and of a head that is not tied to it

    ids = torch.tensor([[10, rows, 11, rows + 1, 12, rows]])
    plain, own = (each(input_ids=ids, use_cache=False).logits for each in (model, beside))
    torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(plain)
    (plain * weights).sum().backward()
    (own * weights).sum().backward()
    for get in (PreTrainedModel.get_input_embeddings, PreTrainedModel.get_output_embeddings):
        whole, part = get(model).weight.grad, getattr(get(beside), NEW_ROWS).weight.grad
        torch.testing.assert_close(part, whole[rows:], rtol=1e-3, atol=1e-3)
        assert get(beside).weight.grad is None


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_rows_that_the_embedding_has_to_spare_learn_where_they_are(kind, tmp_path):
    """As Qwen's, whose embedding is longer than the tokenizer: the tokens' ids are not the last."""
    model = built(kind, tmp_path)
    ids = [embedding_rows(model.config) - 5, embedding_rows(model.config) - 4]
    given = torch.tensor([[10, ids[0], 11, ids[1], ids[1] + 1, ids[0] - 1]])
    plain = model(input_ids=given, use_cache=False).logits
    beside = copy.deepcopy(model).requires_grad_(False)
    add_new_rows(beside, ids)
    initialise_new_rows(beside, "cpu")
    torch.testing.assert_close(beside(input_ids=given, use_cache=False).logits, plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        getattr(beside.get_input_embeddings(), NEW_ROWS).weight.add_(1.0)
        model.get_input_embeddings().weight[ids] += 1.0
        if beside.get_output_embeddings().weight is not beside.get_input_embeddings().weight:
            getattr(beside.get_output_embeddings(), NEW_ROWS).weight.add_(1.0)
            model.get_output_embeddings().weight[ids] += 1.0
    changed = model(input_ids=given, use_cache=False).logits
    torch.testing.assert_close(beside(input_ids=given, use_cache=False).logits, changed, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(changed, plain)


@pytest.mark.parametrize("length", [2000, 3])  # more rows than columns, and fewer, where the covariance has no factor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_new_rows_have_the_mean_and_the_covariance_of_the_old_ones(length, dtype):
    torch.manual_seed(0)
    old = torch.randn(length, 4, dtype=dtype) @ torch.tensor(
        [[9.0, 8, 0, 0], [0, 4, 0, 0], [0, 0, 2, -2], [0, 0, 0, 1]]
    ).to(dtype)
    before = old.clone()
    rows = grown("embedding", old, length + 20_000, seed=5)
    assert torch.equal(old, before)
    assert torch.equal(rows[:length], before)
    assert rows.dtype == dtype
    drawn = rows[length:].double()
    # the mean of 20,000 draws is within 5 standard errors, which are far above the rounding of float32 at these values
    covariance = SPREAD * torch.cov(before.double().T, correction=0)
    error = (covariance.diag() / 20_000).sqrt()
    assert ((drawn.mean(0) - before.double().mean(0)).abs() < 5 * error + 2e-7).all()
    scale = covariance.diag().sqrt()
    correlations = torch.cov(drawn.T) / torch.outer(scale, scale)
    torch.testing.assert_close(correlations, covariance / torch.outer(scale, scale), rtol=0, atol=0.05)


def test_new_rows_need_nothing_of_transformers_that_may_be_renamed(tmp_path, monkeypatch):
    for name in [name for name in vars(PreTrainedModel) if name.startswith("_init_added_")]:
        monkeypatch.delattr(PreTrainedModel, name)
    model = built("qwen3_vl", tmp_path)
    rows = embedding_rows(model.config)
    grow(model, rows + 2, seed=1)
    again = load_model(str(tmp_path), rows=rows + 2, seed=1)
    weight = model.get_input_embeddings().weight
    assert weight[rows:].std(0).max() > 0
    torch.testing.assert_close(again.get_input_embeddings().weight, weight, rtol=0, atol=0)


def test_a_model_with_as_many_rows_already_stays_as_it_is(tmp_path):
    model = built("qwen3_vl", tmp_path)
    before = model.get_input_embeddings().weight.detach().clone()
    for rows in (0, len(before) - 3, len(before)):
        grow(model, rows, seed=1)
        assert torch.equal(model.get_input_embeddings().weight, before)


def test_a_model_that_transformers_cannot_resize_is_refused_by_name(tmp_path, monkeypatch):
    model = built("qwen3_vl", tmp_path)

    def refuse(*_, **__):
        raise NotImplementedError("not here")

    monkeypatch.setattr(model, "resize_token_embeddings", refuse)
    with pytest.raises(ConfigError, match=r"transformers cannot resize the embedding of Qwen3VL.*: not here"):
        resize(model, 10_000)
