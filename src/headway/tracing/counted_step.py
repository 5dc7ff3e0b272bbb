"""What PyTorch's own formulas count in a real step, by the module that ran it."""

import math
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headway.tracing.classify import inside
from headway.tracing.scores import HIDDEN

aten = torch.ops.aten
RECURRENCE = " (recurrence)"  # after a module's path: what it runs inside its recurrence
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}


class CountedStep(TorchDispatchMode):
    """Counts what PyTorch has a formula for, by the module whose forward, or whose forward's backward, runs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path_of = {id(module): path for path, module in model.named_modules()}
        self._stack: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self.forward: Counter[str] = Counter()  # FLOPs by module path
        self.backward: Counter[str] = Counter()  # FLOPs by module path
        self.outer: Counter[str] = Counter()  # FLOPs of outer products without parameters, by module path
        # FLOPs of convolutions that PyTorch counts and no token has, by module path and whether it is backward
        self.too_much: Counter[tuple[str, bool]] = Counter()
        self.unseen: set[str] = set()  # kernels that PyTorch's counter has no formula for
        self.fused: dict[str, str] = {}  # the same, by module path
        # forward FLOPs of each expert of a list, by the list's path and its own
        self.of_expert: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # places of each, those that no mask had hidden, and places for each query; by module path
        self.softmaxes: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)

    def __enter__(self) -> Any:
        def enter(module: nn.Module, _args: Any) -> None:
            self._stack.append(self._path_of.get(id(module), self._stack[-1]))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._stack.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def recurrence(self, function: Any) -> Any:
        """Wrap a function so that what it runs is told apart from the rest of the running module."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = self._stack[-1].removesuffix(RECURRENCE)
            self._stack.append(path + RECURRENCE)
            try:
                return function(*args, **kwargs)
            finally:
                self._stack.pop()

        return wrapped

    def gather(self, experts: set[str]) -> None:
        """Add what each expert of a list ran to the list, to which the ledger bills it."""
        for counter in (self.forward, self.backward):
            for path in list(counter):
                home = next((home for home in experts if inside(path, [home])), path)
                if home != path:
                    if counter is self.forward:
                        expert = path.removeprefix(f"{home}.").partition(".")[0]
                        self.of_expert[home][expert] += counter[path]
                    counter[home] += counter.pop(path)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        node: Any = torch._C._current_autograd_node()
        path = self._stack[-1]
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        if node is not None:
            path = self._module_of_node.get(node._sequence_nr(), path)
        elif any(a.requires_grad for a in operands):
            # the first operation after a node was made is its own; dropout, say, allocates before it makes one
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, path)
        if packet is aten._softmax and node is None:
            self.softmaxes[path].append((out.numel(), int(torch.count_nonzero(args[0] > HIDDEN)), out.shape[-1]))
        if packet not in flop_registry:
            if func.namespace != "aten" or packet.__name__.startswith("_scaled_dot_product"):
                self.fused[path] = str(func)
                self.unseen.add(f"{func} in {path or 'the model'}")
            return out
        flops = int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        if packet in _CONVOLUTIONS:
            self.too_much[path, node is not None] += flops - _convolved(packet, args, out)
        if node is not None:
            self.backward[path] += flops
        elif packet in _PRODUCTS and operands[-2].shape[-1] == 1 and not any(a.requires_grad for a in operands):
            self.outer[path] += flops
        else:
            self.forward[path] += flops
        return out


def _convolved(packet: Any, args: Any, out: Any) -> int:
    """Count a convolution's FLOPs: 2 per weight and output position, once forward and once per gradient it gives.

    A causal convolution pads its front and has more outputs than inputs; those outputs belong to no token. PyTorch's
    formula of the backward (2.13) takes a grouped convolution for a dense one.
    """
    if packet is aten.convolution:
        x, weight, y, transposed, times = args[0], args[1], out, args[6], 1
    else:
        y, x, weight, transposed, times = args[0], args[1], args[2], args[7], sum(args[10][:2])
    positions = min(math.prod(x.shape[2:]), math.prod(y.shape[2:])) if not transposed else math.prod(x.shape[2:])
    return int(2 * x.shape[0] * positions * weight.numel() * times)
