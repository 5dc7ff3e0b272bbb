"""Cross-entropy of an output layer without the whole logits: values and gradients in one pass over chunks of slots.

Tensor letters: T slots of a pack, K of them with a label, C of a chunk, H hidden size, V vocabulary.

A slot without a label has no logits: neither its loss nor its gradients are computed.

The gradients of the summed loss are computed in the forward pass, while a chunk's logits are at hand: three matrix
products a chunk (logits, gradient of the hidden states, gradient of the weight) as without chunks, nothing computed
twice, and at most (C, V) logits in memory. Backward only multiplies what is there by the gradient of the sum.

Source: the scheme of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989, section 3.2), and
the ignored labels of Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009, section 4.3).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.devices.cpu_products import add_product_over_rows, linear, product
from headway.models.products import product_dtype

IGNORED = -100  # label of a slot that is not supervised


def labelled_slots(labels_T: torch.Tensor) -> torch.Tensor:
    """Slots that have a label, shape (K,); a wait for the device that the labels are on."""
    return (labels_T != IGNORED).nonzero()[:, 0]


@dataclass(frozen=True)
class AfterHead:
    """Function of the logits after the output layer: `cap * tanh(scale * logits / cap)`.

    Attributes:
        scale: factor on the logits.
        cap: their largest absolute value; None for no soft cap.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply it to a tensor of any shape."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


class HeadLosses(NamedTuple):
    """Losses of a pack's slots, and the gradients of their sum.

    Attributes:
        loss_T: cross-entropy of each slot, 0 where it has no label [nats], shape (T,).
        right_T: whether the most likely token is the label, False without one; None unless asked for, shape (T,).
        hidden_TH: gradient of the hidden states; None where it is not needed.
        parameters: gradients of the output layer's parameters, None where not needed.
    """

    loss_T: torch.Tensor
    right_T: torch.Tensor | None
    hidden_TH: torch.Tensor | None
    parameters: tuple[torch.Tensor | None, ...]


Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Gives the factor on each slot's loss, shape (T,), from all of them: loss_T without gradient."""

# (hidden_TH, whether its gradient is needed, whether those of the parameters are) -> losses
Compute = Callable[[torch.Tensor, bool, tuple[bool, ...]], HeadLosses]


class SummedLoss(torch.autograd.Function):
    """Sum of the losses of a pack, with gradients that its forward pass has made."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        task: "Task",
        hidden_TH: torch.Tensor,
        *parameters: torch.Tensor,  # noqa: ARG004 - autograd is to see what the gradients are of
    ) -> tuple[Any, ...]:
        """Compute losses and gradients.

        Returns:
            The sum of the losses, weighed and divided as the task says; a zero for each slot, shape (1, T, 1), that
            hangs on the same graph; the losses, shape (T,), and which slots are right, shape (T,) or None, both without
            gradient.
        """
        needs = ctx.needs_input_grad[2:]
        losses = compute(hidden_TH, needs[0], needs[1:])
        ctx.gradients = (losses.hidden_TH, *losses.parameters)
        loss_T, right_T = losses.loss_T, losses.right_T
        ctx.mark_non_differentiable(*(x for x in (loss_T, right_T) if x is not None))
        weighed_T = loss_T if task.factor_T is None else loss_T * task.factor_T
        return weighed_T.sum() / task.per, loss_T.new_zeros(1, len(loss_T), 1), loss_T, right_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sum: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients in place; a second backward pass would find them scaled already."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the loss of a pack is differentiated once"
        return None, None, *(None if g is None else g.mul_(grad_sum.to(g.dtype)) for g in gradients)


@dataclass(frozen=True)
class Task:
    """Labels and settings for computing the losses of a pack.

    Attributes:
        labels_T: token ids, read where a slot has a label, shape (T,).
        labelled_K: the slots that have one, shape (K,).
        per: what the sum of the losses is divided by.
        chunk: slots whose logits are in memory at a time [slots].
        after: what the model does to its logits.
        judge: whether `right_T` is wanted.
        factor_T: factor on each slot's gradient, shape (T,); None for 1.
    """

    labels_T: torch.Tensor
    labelled_K: torch.Tensor
    per: int
    chunk: int
    after: AfterHead
    judge: bool
    factor_T: torch.Tensor | None = None

    def chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the slots of each chunk, shape (C,), and their labels."""
        for start in range(0, len(self.labelled_K), self.chunk):
            slots_C = self.labelled_K[start : start + self.chunk]
            yield slots_C, self.labels_T[slots_C]

    @property
    def factor(self) -> float:
        """Factor from a slot's slopes along its logits to gradients: the logits' scale over the loss's divisor."""
        return self.after.scale / self.per

    def weights(self, slots_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Factor of each slot of a chunk beside `factor`, shape (C, 1); None for 1."""
        return None if self.factor_T is None else self.factor_T[slots_C, None].to(dtype)


def linear_losses(layer: nn.Linear, task: Task) -> Compute:
    """Losses of a plain linear layer (weight (V, H)), with the weight's gradient summed in float32."""

    def compute(hidden_TH: torch.Tensor, needs_hidden: bool, needs: tuple[bool, ...]) -> HeadLosses:
        device = hidden_TH.device.type
        dtype = product_dtype(hidden_TH, layer.weight)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            weight_VH, hidden_TH_ = layer.weight.to(dtype), hidden_TH.to(dtype)
            bias: nn.Parameter | None = layer.bias  # torch's annotation leaves None out
            bias_V = None if bias is None else bias.to(dtype)
            results = _Results(hidden_TH_, task)
            grad_hidden_TH = torch.zeros_like(hidden_TH_) if needs_hidden else None
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=sum_dtype) if needs[0] else None
            grad_bias_V = torch.zeros_like(bias_V, dtype=sum_dtype) if bias_V is not None and needs[1] else None
            for slots_C, labels_C in task.chunks():
                # One chunk's logits at a time: the whole pack's would be T x V.
                hidden_CH = hidden_TH_[slots_C]
                logits_CV = linear(hidden_CH, weight_VH, bias_V)
                slopes_CV = results.add(slots_C, logits_CV, labels_C, slopes=needs_hidden or any(needs))
                if slopes_CV is None:
                    continue
                weight_C1 = task.weights(slots_C, sum_dtype)  # on (C, H) rather than on (C, V)
                # Gradients at once, by the slopes dL/dlogits: bias sum(slopes), input slopes W, weight slopes^T x.
                if grad_bias_V is not None:
                    grad_bias_V += slopes_CV.sum(0) if weight_C1 is None else weight_C1[:, 0] @ slopes_CV
                slopes_CV = slopes_CV.to(dtype)
                if grad_hidden_TH is not None:
                    factor = task.factor if weight_C1 is None else weight_C1 * task.factor
                    grad_hidden_TH[slots_C] = (product(slopes_CV, weight_VH) * factor).to(dtype)
                if grad_weight_VH is not None:
                    weighted_CH = hidden_CH if weight_C1 is None else (hidden_CH * weight_C1).to(dtype)
                    _add_product(grad_weight_VH, slopes_CV, weighted_CH)
                del logits_CV, slopes_CV  # before the next chunk's come
        # The factor (scale of the logits by number of supervised tokens), once on the sums and not on each chunk.
        sums = (grad_weight_VH, grad_bias_V)[: len(needs)]
        gradients = tuple(None if g is None else g.mul_(task.factor).to(layer.weight.dtype) for g in sums)
        hidden = None if grad_hidden_TH is None else grad_hidden_TH.to(hidden_TH.dtype)
        return HeadLosses(results.loss_T, results.right_T, hidden, gradients)

    return compute


def liger_losses(layer: nn.Linear, task: Task) -> Compute:
    """Losses of a plain linear layer without bias, by Liger Kernel's fused linear cross-entropy; CUDA only."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    def compute(hidden_TH: torch.Tensor, needs_hidden: bool, needs: tuple[bool, ...]) -> HeadLosses:
        device = hidden_TH.device.type
        dtype = product_dtype(hidden_TH, layer.weight)
        scale = task.after.scale
        results, labels_K = _Results(hidden_TH, task), task.labels_T[task.labelled_K]
        grad_hidden_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        with torch.autocast(device, enabled=False), _Uncounted():
            loss_K, _, _, guess_K, grad_hidden_KH, grad_weight_VH, _ = fused_linear_cross_entropy_forward(
                hidden_TH[task.labelled_K].to(dtype) * scale,  # a factor on the logits of a layer without bias
                layer.weight.detach().to(dtype),
                labels_K,
                reduction="none",
                softcap=task.after.cap,
                accum_dtype=torch.float32,
                return_predicted_tokens=task.judge,
                compute_gradients=needs_hidden or needs[0],
                weight_requires_grad=needs[0],
            )
            results.loss_T[task.labelled_K] = loss_K.to(results.loss_T.dtype)
            if results.right_T is not None:
                results.right_T[task.labelled_K] = guess_K == labels_K
            if grad_hidden_TH is not None:
                grad_hidden_TH[task.labelled_K] = grad_hidden_KH.float().mul_(task.factor).to(hidden_TH.dtype)
            weight = grad_weight_VH.to(layer.weight.dtype) / task.per if needs[0] else None
        return HeadLosses(results.loss_T, results.right_T, grad_hidden_TH, (weight,))

    return compute


class _Uncounted(TorchFunctionMode):
    """Answers the one question that Liger's loss asks the device: by how many slots a mean is divided.

    The losses asked for here are a slot's each, and no mean is taken. One also is a number that Triton compiles once.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1 if func is torch.Tensor.item else func(*args, **(kwargs or {}))


def module_losses(
    forward: Callable[[torch.Tensor], torch.Tensor], parameters: tuple[nn.Parameter, ...], task: Task
) -> Compute:
    """Losses of any output layer (one with LoRA, say): each chunk goes through it and back under autograd.

    Args:
        forward: hidden states (C, H) to logits (C, V).
        parameters: what `forward` uses.
        task: what is asked.
    """

    def compute(hidden_TH: torch.Tensor, needs_hidden: bool, needs: tuple[bool, ...]) -> HeadLosses:
        results = _Results(hidden_TH, task)
        grad_hidden_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        learning = [parameter for parameter, need in zip(parameters, needs, strict=True) if need]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in learning]
        for slots_C, labels_C in task.chunks():
            hidden_CH = hidden_TH[slots_C].detach().requires_grad_(needs_hidden)
            with torch.set_grad_enabled(needs_hidden or any(needs)):
                logits_CV = forward(hidden_CH)
            slopes_CV = results.add(slots_C, logits_CV.detach(), labels_C, slopes=logits_CV.requires_grad)
            if slopes_CV is None:
                continue
            weight_C1 = task.weights(slots_C, slopes_CV.dtype)
            slopes_CV *= task.factor if weight_C1 is None else weight_C1 * task.factor
            wanted = [hidden_CH, *learning] if needs_hidden else learning
            grads = list(torch.autograd.grad(logits_CV, wanted, slopes_CV.to(logits_CV.dtype)))
            if grad_hidden_TH is not None:
                grad_hidden_TH[slots_C] = grads.pop(0)
            for total, gradient in zip(sums, grads, strict=True):
                total.add_(gradient)
        summed = iter([total.to(parameter.dtype) for total, parameter in zip(sums, learning, strict=True)])
        gradients = tuple(next(summed) if need else None for need in needs)
        return HeadLosses(results.loss_T, results.right_T, grad_hidden_TH, gradients)

    return compute


class _Results:
    def __init__(self, hidden_TH: torch.Tensor, task: Task) -> None:
        self._after = task.after
        self.loss_T = hidden_TH.new_zeros(len(hidden_TH), dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
        self.right_T = torch.zeros_like(self.loss_T, dtype=torch.bool) if task.judge else None

    def add(
        self, slots_C: torch.Tensor, logits_CV: torch.Tensor, labels_C: torch.Tensor, *, slopes: bool
    ) -> torch.Tensor | None:
        """Note a chunk's losses.

        Returns:
            The slope of each slot's loss along each of its logits, but for `Task.factor`, shape (C, V); None unless
            asked for.
        """
        after, labels_C1 = self._after, labels_C[:, None]
        shaped_CV = after(logits_CV)
        log_p_CV = torch.log_softmax(shaped_CV, dim=-1, dtype=self.loss_T.dtype)
        self.loss_T[slots_C] = -log_p_CV.gather(1, labels_C1)[:, 0]
        if self.right_T is not None:
            self.right_T[slots_C] = log_p_CV.argmax(-1) == labels_C
        if not slopes:
            return None
        slopes_CV = log_p_CV.exp_()  # softmax, in the same memory
        slopes_CV.scatter_add_(1, labels_C1, slopes_CV.new_full(labels_C1.shape, -1.0))
        if after.cap is not None:
            slopes_CV *= 1.0 - (shaped_CV.to(slopes_CV.dtype) / after.cap).square()
        return slopes_CV


def _add_product(total_VH: torch.Tensor, slopes_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    if total_VH.dtype == slopes_CV.dtype:
        add_product_over_rows(total_VH, slopes_CV, hidden_CH)
    elif total_VH.is_cuda:
        torch.addmm(total_VH, slopes_CV.T, hidden_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:  # products of half precision that add up in float32 exist on CUDA only
        total_VH.addmm_(slopes_CV.T.to(total_VH.dtype), hidden_CH.to(total_VH.dtype))
