"""Count the forwards of attention's kernels that really run."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from headway.models.attention import segments

_KERNELS = {"aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"}


@contextmanager
def attention_calls(*, compiled):
    """Count while active: yields an object whose `count` says how many ran.

    Uncompiled, what a checkpoint answers from what it kept does not come as far as the operations that are counted. The
    backward of compiled code must not see such a mode (torch 2.11 would not run it), and calls Headway's own operator.
    """
    calls = SimpleNamespace(count=0)

    def counted(*args, real=segments._kernel, **kwargs):
        calls.count += 1
        return real(*args, **kwargs)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.count += func._schema.name in _KERNELS
            return func(*args, **(kwargs or {}))

    with mock.patch.object(segments, "_kernel", counted) if compiled else Mode():
        yield calls
