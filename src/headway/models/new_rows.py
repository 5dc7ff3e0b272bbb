"""Rows of the embedding and the head for tokens that a model did not have.

They are drawn as transformers' `resize_token_embeddings` does: from a normal distribution with the mean of the old
rows and a billionth of their covariance (Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html). The numbers
depend on the seed and the parameter's name alone, not on how many processes hold it, nor on transformers' version.

Beside adapters the old rows are frozen, and the new ones are a small matrix of their own, which is looked up, and
multiplied, in their place. peft's layer for this (`trainable_token_indices`) writes the new rows into a copy of the
whole matrix in each forward, so that backward makes the gradient of all of it, for the head a product as large as that
of the logits; here there are no more gradients than rows that learn. Files are peft's all the same.

Tensor letters: V rows of the vocabulary, N new ones, H hidden size.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from headway.count.adapters import NEW_ROWS
from headway.errors import ConfigError
from headway.models.parallel.mesh import fill

SPREAD = 1e-9
"""Covariance of new rows, as a share of that of the old ones."""


def resize(model: PreTrainedModel, rows: int) -> None:
    """Give a model's embedding and head more rows, which have no values yet, and its configuration their number.

    Args:
        model: on any device.
        rows: of the vocabulary from now on; a model that has as many stays as it is.

    Raises:
        ConfigError: transformers cannot resize this model.
    """
    if rows <= len(model.get_input_embeddings().weight):  # type: ignore[arg-type]  # transformers leaves it untyped
        return
    try:
        model.resize_token_embeddings(rows, mean_resizing=False)
    except Exception as error:  # models forbid it in ways of their own
        raise ConfigError(
            "model.new_tokens need more rows in the embedding, but transformers cannot resize the embedding of "
            f"{type(model).__name__}: {str(error) or type(error).__name__}. Leave model.new_tokens out."
        ) from error


@torch.no_grad()
def grow(model: PreTrainedModel, rows: int, seed: int) -> None:
    """Give a model that holds its weights more rows of the vocabulary, with first values.

    Args:
        model: changed in place.
        rows: of the vocabulary from now on.
        seed: of the run.

    Raises:
        ConfigError: as `resize`.
    """
    old_rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]  # transformers leaves it untyped
    if rows <= old_rows:
        return
    resize(model, rows)
    for name in set(vocabulary_names(model).values()):
        parameter = model.get_parameter(name)
        parameter.copy_(grown(name, parameter[:old_rows], rows, seed))


def embedding_rows(config: PreTrainedConfig) -> int:
    """Rows of a model's embedding, by its configuration [tokens]."""
    return int(config.get_text_config().vocab_size)


def vocabulary_names(model: PreTrainedModel) -> dict[str, str]:
    """Parameters of the embedding and the head, which have a row for each token: by each of its names the first."""
    hf_model: Any = model  # transformers leaves these untyped
    parts = [part for part in (hf_model.get_input_embeddings(), hf_model.get_output_embeddings()) if part is not None]
    first = {id(weight): "" for part in parts for weight in part.parameters(recurse=False)}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            first[id(parameter)] = names[name] = first[id(parameter)] or name
    return names


@torch.no_grad()
def grown(name: str, old: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """A matrix of the vocabulary, or a bias, with more rows, on the CPU.

    Args:
        name: of the parameter.
        old: its values so far, (V, H) or (V,).
        rows: that it is to have.
        seed: of the run.

    Source: Hewitt 2021, with the scale of transformers 5.23 (`resize_token_embeddings`, `mean_resizing`).
    """
    old, added = old.cpu(), rows - len(old)
    if added <= 0:
        return old
    mean = old.float().mean(0)
    if old.ndim == 1:
        return torch.cat([old, mean.to(old.dtype).expand(added)])
    # Weights of a standard normal on the old rows' deviations have V times their covariance, also where that has no
    # factor, as it has none where there are fewer rows than columns.
    deviations_VH = old.float() - mean
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    fresh = [old]
    for start in range(0, added, 64):  # 64 at a time: the weights of thousands of rows would be as large as the matrix
        weights_NV = torch.randn(min(64, added - start), len(old), generator=generator)
        fresh.append((mean + math.sqrt(SPREAD / len(old)) * weights_NV @ deviations_VH).to(old.dtype))
    return torch.cat(fresh)


class NewRows(nn.Embedding):
    """Rows of new tokens that stand beside a frozen embedding or head.

    Args:
        first: id of the first token.
        *args: of `nn.Embedding`.
        **kwargs: likewise.
    """

    def __init__(self, first: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = first


def add_new_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Have the rows of tokens that follow one another learn beside the frozen ones; they have no values yet."""
    hf_model: Any = model
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    first, count = ids[0], len(ids)
    tied = head is not None and head.weight is embedding.weight
    _attach(embedding, _rows_of(embedding.weight, first, count))
    if head is not None:
        _attach(head, getattr(embedding, NEW_ROWS) if tied else _rows_of(head.weight, first, count))


def _rows_of(weight_VH: torch.Tensor, first: int, count: int) -> NewRows:
    return NewRows(first, count, weight_VH.shape[1], device="meta", dtype=weight_VH.dtype)


def _attach(module: Any, rows: NewRows) -> None:
    setattr(module, NEW_ROWS, rows)
    module.forward = _Forward(module, type(module))


class _Forward:
    def __init__(self, module: nn.Module, kind: Any) -> None:
        self.module, self.kind = module, kind

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        frozen: torch.Tensor = self.kind.forward(self.module, inputs)
        rows: NewRows | None = getattr(self.module, NEW_ROWS, None)
        if rows is None:  # taken away for a while: the frozen matrix has the first values of these rows
            return frozen
        rows_NH, first, last = rows.weight, rows.first, rows.first + rows.num_embeddings
        if inputs.is_floating_point():  # hidden states, of which logits are made
            bias: torch.Tensor | None = getattr(self.module, "bias", None)
            fresh = F.linear(inputs, rows_NH, None if bias is None else bias[first:last])
            return torch.cat([frozen[..., :first], fresh.to(frozen.dtype), frozen[..., last:]], -1)
        places = (inputs - first).clamp(0, last - first - 1)
        fresh = F.embedding(places, rows_NH)
        scale: torch.Tensor | None = getattr(self.module, "embed_scale", None)  # Gemma scales what it embeds
        if scale is not None:
            fresh = fresh * scale.to(fresh.dtype)
        is_new = (inputs >= first) & (inputs < last)
        return torch.where(is_new[..., None], fresh.to(frozen.dtype), frozen)


def new_rows(model: nn.Module) -> Iterator[tuple[str, Any, NewRows]]:
    """Yield each module beside which new rows stand: its name, itself, and the rows; tied rows once."""
    reported = set()
    for name, module in model.named_modules():
        rows = getattr(module, NEW_ROWS, None)
        if rows is not None and id(rows) not in reported:
            reported.add(id(rows))
            yield name, module, rows


@contextmanager
def without_new_rows(model: nn.Module) -> Iterator[None]:
    """Take the rows away for a while, so that what gives weights to a model does not see them."""
    holders = [(module, getattr(module, NEW_ROWS)) for module in model.modules() if hasattr(module, NEW_ROWS)]
    for module, _ in holders:
        delattr(module, NEW_ROWS)
    try:
        yield
    finally:
        for module, rows in holders:
            setattr(module, NEW_ROWS, rows)


@torch.no_grad()
def initialise_new_rows(model: nn.Module, device: torch.device | str) -> None:
    """Give new rows that stand beside frozen ones the values of the rows that they stand for."""
    for _, module, rows in new_rows(model):
        if rows.weight.is_meta:
            rows.to_empty(device=device)
        weight_VH = module.weight.full_tensor() if isinstance(module.weight, DTensor) else module.weight
        fill(rows.weight, weight_VH[rows.first : rows.first + rows.num_embeddings].to(rows.weight.device))
