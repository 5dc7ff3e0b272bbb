"""Memory of a CUDA device that no tensor holds: what can be counted, and named allowances for what cannot.

A plan adds up tensors. Beside them a process has CUDA's context, buffers of its communicators and a workspace of
cuBLAS, and the allocator cannot use all of what it takes from the driver. None of this was measured here: it is why a
run may fill nine tenths of a device by its plan, and it is listed so that a reader can set it against that tenth.
"""

MIB = 2**20

CONTEXT = 512 * MIB
"""Allowance for CUDA's context and the kernels that are loaded with it, which differ by driver and device [bytes]."""

COMMUNICATOR = 256 * MIB
"""Allowance for the buffers of one NCCL communicator [bytes]: 4 MiB for each channel and each protocol that uses them.

Source: NCCL_BUFFSIZE, 4 MiB by default, docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

WORKSPACE = 32 * MIB
"""Workspace of cuBLAS for a stream, as PyTorch gives it on Hopper; less on older devices [bytes].

Source: docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces".
"""

LARGE_SEGMENT, SMALL_SEGMENT = 20 * MIB, 2 * MIB
"""What the allocator takes from the driver for one request of up to 10 MiB, and for those up to 1 MiB [bytes].

The rest of the last one of each is what it cannot use at worst, where segments grow; tensors themselves are rounded up
to 512 bytes. Source: c10/core/AllocatorConfig.h of torch 2.13, kLargeBuffer and kSmallBuffer.
"""


def allowances(communicators: int) -> dict[str, int]:
    """List what a CUDA device holds beside tensors [bytes].

    Attention needs no entry: what its backward works on, in float32 and of the queries' shape, exists when the gated
    product of the same block is gone, which is larger.

    Args:
        communicators: groups of processes that this one exchanges with; 0 for a lone one.

    >>> sum(allowances(communicators=0).values()) // 2**20
    566
    """
    found = {"CUDA context": CONTEXT, "cuBLAS workspace": WORKSPACE}
    if communicators:
        found["communicators"] = communicators * COMMUNICATOR
    return {**found, "allocator's last segments": LARGE_SEGMENT + SMALL_SEGMENT}
