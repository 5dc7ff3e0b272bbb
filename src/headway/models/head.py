"""The loss of a pack, straight from the model's output layer, so that whole logits never exist.

`model_with_loss(model, chunk=...)` gives an object that runs the model on a pack and returns its losses. While it does,
the forward of the model's output layer computes losses instead of logits: inside that module's forward, where hooks
such as FSDP2's have gathered the weight, and whatever the module is (tied to the embedding, wrapped by LoRA). Outside,
the model is untouched: `model(**inputs).logits` and `generate` work as ever.

What a model does to its logits after the output layer is found out by trying, once, without weights or data.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from headway.config.sections import Section
from headway.errors import ConfigError, TrainingError
from headway.models.blocks import body_of, decoder_of
from headway.models.losses import (
    IGNORED,
    AfterHead,
    Compute,
    SummedLoss,
    Task,
    Weigh,
    labelled_slots,
    liger_losses,
    linear_losses,
    module_losses,
)
from headway.models.scores import SCORE, is_scorer
from headway.plugins import family_hook

_TRIED = (-40.0, -7.0, -1.0, -0.01, 0.0, 0.01, 1.0, 7.0, 40.0, 1e9)  # logits that the model is tried with


class PackLoss(NamedTuple):
    """The losses of a pack's T slots.

    Attributes:
        total: their sum [nats] divided by `per`, a scalar to differentiate, once.
        loss_T: each of them, times its `factor_T`, 0 where a slot is not supervised [nats], without gradient.
        right_T: whether the most likely token is the label; None unless asked for.
    """

    total: torch.Tensor
    loss_T: torch.Tensor
    right_T: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Options of the losses of a pack.

    Attributes:
        per: what the sum of the losses is divided by, such as the supervised tokens of a whole step.
        judge: whether to say which slots are right.
        factor_T: factor on each slot's loss, shape (T,); 1 when None.
        weigh: gives the factors where they follow from the losses of all slots, for which chunks of logits are made
            twice; the losses that come back are without it.
        labelled_K: the slots that have a label, shape (K,); None to look for them, which waits for the device.
    """

    per: int = 1
    judge: bool = False
    factor_T: torch.Tensor | None = None
    weigh: Weigh | None = None
    labelled_K: torch.Tensor | None = None

    def pack_loss(self, loss_T: torch.Tensor, right_T: torch.Tensor | None) -> PackLoss:
        """Weigh, sum and divide losses that have a gradient."""
        logged_T = loss_T if self.factor_T is None else loss_T * self.factor_T
        weighed_T = logged_T if self.weigh is None else loss_T * self.weigh(loss_T.detach())
        return PackLoss(weighed_T.sum() / self.per, logged_T.detach(), right_T)


class ModelWithLoss(ABC):
    """Runs a model on a pack and returns its losses.

    Attributes:
        model: what is run.
        skips_unlabelled: whether the output layer leaves out slots without a label.
    """

    skips_unlabelled = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self,
        inputs: dict[str, Any],
        labels_T: torch.Tensor,
        *,
        per: int = 1,
        judge: bool = False,
        factor_T: torch.Tensor | None = None,
        weigh: Weigh | None = None,
        labelled_K: torch.Tensor | None = None,
    ) -> PackLoss:
        """Run the model on a pack; see `run`, and `LossOptions` for the rest."""
        return self.run(inputs, labels_T, LossOptions(per, judge, factor_T, weigh, labelled_K))[0]

    @abstractmethod
    def run(self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions) -> tuple[PackLoss, Any]:
        """Run the model.

        Args:
            inputs: keywords of the model's forward.
            labels_T: the token that each slot is to predict, -100 where it is not supervised, shape (T,).
            options: of the losses.

        Returns:
            The losses, and what the model returned.
        """


def model_with_loss(
    model: PreTrainedModel, *, chunk: int | None, liger: bool = False, family: Section | None = None
) -> ModelWithLoss:
    """Choose how the losses of a model are computed.

    Args:
        model: with a language head; its output layer's forward is replaced on this instance if there are chunks.
        chunk: slots whose logits are in memory at a time [slots]; None for all of a pack at once.
        liger: whether Liger Kernel computes the chunks of a plain layer, whose size is then its own choice.
        family: settings of the model's own family; None for none.

    Raises:
        ConfigError: chunks were asked for, and the model does to its logits what is not known here.
    """
    if is_scorer(model.config):
        return ScoreLosses(model)
    around = family_hook(model.config, "losses")
    if around is None:
        return WholeLogits(model) if chunk is None else ChunkedLoss(model, chunk, liger=liger)
    words = WholeLogits(model) if chunk is None else ChunkedLoss(model, chunk, liger=liger, after=AfterHead())
    losses: ModelWithLoss = around(words, family)
    return losses


class WholeLogits(ModelWithLoss):
    """Losses from the logits of a whole pack, as the model returns them."""

    def run(self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions) -> tuple[PackLoss, Any]:
        """Run the model; see `ModelWithLoss`."""
        output = self.model(**inputs)
        logits_TV = output.logits.flatten(0, -2)
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        loss_T = F.cross_entropy(logits_TV.to(wide), labels_T, ignore_index=IGNORED, reduction="none")
        right_T = logits_TV.argmax(-1) == labels_T if options.judge else None
        return options.pack_loss(loss_T, right_T), output


class ChunkedLoss(ModelWithLoss):
    """Losses from the logits of a chunk of slots at a time, and of none without a label."""

    skips_unlabelled = True

    def __init__(
        self, model: PreTrainedModel, chunk: int, *, liger: bool = False, after: AfterHead | None = None
    ) -> None:
        layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it so
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"{type(model).__name__} has no output layer that predicts tokens. {_FULL_LOGITS_HINT}")
        super().__init__(model)
        self._layer, self._chunk = layer, chunk
        self._is_linear = type(layer) is nn.Linear and "forward" not in vars(layer)
        self._liger = liger and getattr(layer, "bias", None) is None
        self._plain_forward = layer.forward
        self._after = after or what_follows(model, layer)
        self._task: Task | None = None
        self._options = LossOptions()
        self._losses: list[PackLoss] = []
        layer.forward = self._forward

    def run(self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions) -> tuple[PackLoss, Any]:
        """Run the model; see `ModelWithLoss`.

        Raises:
            TrainingError: the model does not call its output layer once, with a hidden state for each label.
        """
        self._options, self._losses = options, []
        labelled_K = options.labelled_K
        if labelled_K is None:
            labelled_K = labelled_slots(labels_T)
        self._task = Task(labels_T, labelled_K, options.per, self._chunk, self._after, options.judge, options.factor_T)
        try:
            output = self.model(**inputs)
        finally:
            self._task = None
        if not self._losses:
            raise TrainingError(f"{type(self.model).__name__} has not called its output layer. {_FULL_LOGITS_HINT}")
        loss = self._losses.pop()
        # The zeros bring no gradient, but backward then passes through every module's outputs, where hooks wait for it.
        return loss._replace(total=loss.total + 0.0 * output.logits.sum()), output

    def _forward(self, hidden_1TH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return logits; or, while losses are wanted, compute and keep them and return a zero for each slot."""
        if self._task is None:
            logits: torch.Tensor = self._plain_forward(hidden_1TH, *args, **kwargs)
            return logits
        labels_T = self._task.labels_T
        if self._losses or hidden_1TH.shape[:-1].numel() != len(labels_T):
            raise TrainingError(
                f"{type(self.model).__name__} calls its output layer on {tuple(hidden_1TH.shape[:-1])} slots, for "
                f"the {'second' if self._losses else 'first'} time, but {len(labels_T)} slots have labels. "
                f"{_FULL_LOGITS_HINT}"
            )
        parameters = tuple(self._layer.parameters())
        hidden_TH, task = hidden_1TH.flatten(0, -2), self._task
        if self._options.weigh is not None:
            # A first pass for the losses alone; a second makes gradients with the factors that follow from them.
            with torch.no_grad():
                losses = self._compute(task)(hidden_TH.detach(), False, (False,) * len(parameters))
            task = replace(task, factor_T=self._options.weigh(losses.loss_T))
        summed: Any = SummedLoss.apply  # torch leaves it untyped
        total, zeros_1T1, loss_T, right_T = summed(self._compute(task), task, hidden_TH, *parameters)
        factor_T = self._options.factor_T
        self._losses.append(PackLoss(total, loss_T if factor_T is None else loss_T * factor_T, right_T))
        # No view where the model's own shape is that already: FSDP2 warns of models that return one.
        zeros: torch.Tensor = zeros_1T1 if hidden_1TH.ndim == 3 else zeros_1T1.view(*hidden_1TH.shape[:-1], 1)
        return zeros

    def _compute(self, task: Task) -> Compute:
        if self._is_linear:
            assert isinstance(self._layer, nn.Linear)
            # Liger's kernel knows no factor on a slot.
            is_ligers = self._liger and self._options.weigh is None and task.factor_T is None
            return liger_losses(self._layer, task) if is_ligers else linear_losses(self._layer, task)
        return module_losses(self._plain_forward, tuple(self._layer.parameters()), task)


class ScoreLosses(ModelWithLoss):
    """Scores of a reward model in place of losses, with their sign turned, of L slots that this process computes.

    So a score stands where losses read the log-probability of an answer, and packs and ranks are those of such losses.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        layer: Any = model.get_submodule(SCORE)
        self._plain_forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        self._slots: int | None = None
        self._scores: list[torch.Tensor] = []
        layer.forward = self._forward

    def run(self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions) -> tuple[PackLoss, Any]:
        """Run the model; see `ModelWithLoss`.

        Raises:
            TrainingError: the model does not score each slot of the pack, once.
        """
        self._slots, self._scores = inputs["input_ids"].shape[-1], []
        try:
            output = self.model(**inputs)
        finally:
            self._slots = None
        if len(self._scores) != 1 or len(self._scores[0]) != len(labels_T):
            sizes = [len(score_L) for score_L in self._scores]
            raise TrainingError(
                f"{type(self.model).__name__} scores {sizes} slots, but the pack has {len(labels_T)}. Headway cannot "
                "train such a model on packs."
            )
        loss_L = -self._scores.pop()
        right_L = torch.zeros_like(loss_L, dtype=torch.bool) if options.judge else None
        # The zero brings no gradient, but backward then passes through every module's outputs, where hooks wait for it.
        loss = options.pack_loss(loss_L, right_L)
        return loss._replace(total=loss.total + 0.0 * output.logits.sum()), output

    def _forward(self, hidden_1LH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return scores; or, while a pack is scored, keep them and return a zero for each of all its slots."""
        scores_1L1: torch.Tensor = self._plain_forward(hidden_1LH, *args, **kwargs)
        if self._slots is None:
            return scores_1L1
        scores_L = scores_1L1.flatten()
        self._scores.append(scores_L.to(torch.promote_types(scores_L.dtype, torch.float32)))
        # The model picks one score by its slot in the whole pack, and this process may have only a part of the slots.
        return (0.0 * scores_1L1.sum()).expand(1, self._slots, 1)


def what_follows(model: PreTrainedModel, layer: nn.Module) -> AfterHead:
    """Find the function that a model applies to its logits after the output layer: none, a factor or a soft cap.

    The model's forward is run once with its body left out, or its decoder where it calls that, and an output layer that
    returns known numbers on the CPU, so weights may be anywhere, or on the meta device.

    Raises:
        ConfigError: neither nothing, nor a factor, nor a soft cap.
    """
    # Known logits on both sides of zero, from tiny to huge, in place of what the output layer would give.
    vocabulary = int(getattr(layer, "out_features", 0)) or len(layer.weight)  # type: ignore[arg-type]
    tried_1TV = torch.zeros(1, 1, max(vocabulary, len(_TRIED)), dtype=torch.float64)
    tried_1TV[0, 0, : len(_TRIED)] = torch.tensor(_TRIED, dtype=torch.float64)
    width = getattr(model.config.get_text_config(), "hidden_size", 1)
    skipped = _Body(torch.zeros(1, 1, width, dtype=model.dtype, device=model.device))
    with ExitStack() as changed, torch.no_grad():
        changed.enter_context(_instead(layer, lambda *_, **__: tried_1TV.clone()))
        for part in {body_of(model), decoder_of(model)}:
            changed.enter_context(_instead(part, lambda *_, **__: skipped))
        try:
            got = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        except Exception as error:
            raise ConfigError(_not_known(model, f"trying it raised {type(error).__name__}: {error}")) from error
    if got.shape != tried_1TV.shape:
        raise ConfigError(_not_known(model, f"it turns {tuple(tried_1TV.shape)} logits into {tuple(got.shape)}"))
    result = got.double()
    # A factor shows at 1, a soft cap at 1e9; either must then explain all that was tried.
    factor, cap = (float(result[0, 0, _TRIED.index(value)]) for value in (1.0, 1e9))
    candidates = [AfterHead(scale=factor)]
    if 0.0 < factor < cap:  # tanh(1e9 / cap) is 1
        candidates.append(AfterHead(round(cap * math.atanh(factor / cap), 6), cap))
    for after in candidates:
        if after.scale > 0.0 and torch.allclose(after(tried_1TV), result, rtol=1e-5, atol=0.0):
            return after
    raise ConfigError(_not_known(model, "it is neither a factor nor a soft cap by tanh"))


@contextmanager
def _instead(module: nn.Module, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@dataclass(frozen=True)
class _Body:
    """Output of a body that was skipped: a hidden state, and None for any other attribute that a model passes on."""

    last_hidden_state: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


_FULL_LOGITS_HINT = "Set speed.loss_chunk=null to compute the logits of a whole pack at once."


def _not_known(model: PreTrainedModel, reason: str) -> str:
    name = type(model).__name__
    return f"Headway does not know how {name} changes its logits after the output layer: {reason}. {_FULL_LOGITS_HINT}"
