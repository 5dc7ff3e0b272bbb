"""A pretended CUDA device: whole training steps at full size, on shapes, with the code that only runs on a GPU.

Tensors on the device are torch's fake tensors: they carry a dtype, a size and the device "cuda", and no data of floats.
Operators run their schemas and shape functions, so a wrong keyword, arity, dtype or a tensor on the wrong device fails
as it would on a GPU. Integers and booleans keep their values beside them, so masks, boundaries and indices are real.

* `device.pretend_cuda`: what torch asks of a driver, answered.
* `watch.Watch`: sees every operation; counts what makes the host wait for the device, and the bytes that are alive.
* `backward.backward`: autograd's own nodes, run one by one; torch's engine asks for a driver.
* `steps`: a recipe's model, its fullest pack and its training step.

Not covered: what kernels compute and how fast, Triton kernels (Liger), compiled blocks, NCCL, the memory that a kernel
takes for itself, and what the allocator wastes.
"""
