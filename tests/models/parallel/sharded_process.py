"""Run by several processes of a group: python tests/models/parallel/sharded_process.py CHECK [ARGUMENT...]."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headway.meter.environment import largest_memory
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.init_weights import init_weights
from headway.models.load import load_model
from headway.models.materialise import read_weights
from headway.models.parallel.mesh import Mesh, build_mesh, clipping_factor, gradient_norm
from headway.models.parallel.shard import reduce_gradients, shard_model
from headway.models.precision import gather_in_float8, use_float8
from headway.models.recompute import recompute_blocks
from headway.models.vision import vision_tower
from headway.packing.mesh import MeshShape
from headway.tracing import trace
from helpers.models import tiny_config


def sharded(spec, mesh: Mesh, dtype=torch.float32):
    """A model without weights over all processes."""
    model = load_model(spec, device="meta", dtype=dtype, random_init=True)
    shard_model(model, mesh, compute_dtype=dtype, vision=vision_tower(model))
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model, plain):
    """The same parameters, bit for bit, and the same buffers; tied where it is tied; and it computes the same."""
    assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for name, value in plain.named_parameters():
        found = model.get_parameter(name)
        assert found.dtype == value.dtype, name
        assert found.requires_grad == value.requires_grad, name
        assert torch.equal(whole(found), value), name
    buffers = dict(plain.named_buffers())
    for name, value in model.named_buffers():
        assert torch.equal(value, buffers[name]), name
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        # not bit for bit: kernels differ with where in memory the same numbers lie
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def drawn(mesh, *families):
    for family in families:
        torch.manual_seed(3)
        plain = load_model(tiny_config(family), random_init=True)
        after = torch.get_rng_state()
        model = sharded(tiny_config(family), mesh)
        torch.manual_seed(3)
        init_weights(model, "cpu")
        assert torch.equal(torch.get_rng_state(), after)
        assert_same(model, plain)


def read(mesh, *folders):
    for folder in folders:
        for dtype in (torch.float32, torch.bfloat16):
            plain = load_model(folder, dtype=dtype)
            model = sharded(folder, mesh, dtype)
            first = next(iter(model.parameters()))
            first.requires_grad_(False)
            read_weights(model, folder, "cpu")
            assert not next(iter(model.parameters())).requires_grad
            next(iter(plain.parameters())).requires_grad_(False)
            assert_same(model, plain)


def clipped(mesh):
    """Gradients over the whole mesh, half of it, replicas, and whole ones, against torch's norm of them all."""
    half = build_mesh(MeshShape.of(dist.get_world_size(), expert=2), "cpu")
    replicas = build_mesh(MeshShape.of(dist.get_world_size(), replicate=2), "cpu")
    spreads = [(mesh.fsdp, [Shard(0)]), (half.expert, [Shard(0)]), (replicas.fsdp, [Replicate(), Shard(1)]), None]
    for max_norm in (0.5, 100.0, float("inf")):
        generator = torch.Generator().manual_seed(1)
        plain, parameters = [], []
        for spread in spreads:
            value, grad = torch.randn(2, 6, 8, generator=generator)
            plain.append(torch.nn.Parameter(value.clone()))
            plain[-1].grad = grad.clone()
            parts = [value, grad] if spread is None else [distribute_tensor(each, *spread) for each in (value, grad)]
            parameters.append(torch.nn.Parameter(parts[0]))
            parameters[-1].grad = parts[1]
        parameters.append(torch.nn.Parameter(torch.zeros(3)))  # no gradient
        expected = torch.nn.utils.clip_grad_norm_(plain, max_norm)
        norm = gradient_norm(parameters)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        for one, other in zip(parameters, plain, strict=False):
            clipped_grad = clipping_factor(norm, max_norm) * whole(one.grad)
            torch.testing.assert_close(clipped_grad, other.grad, rtol=1e-6, atol=0.0)


def unused(mesh):
    """A tower of the root that one process has a use for: the sums are the gradients of all packs on one process."""
    config = tiny_config("qwen2_5_vl")
    torch.manual_seed(3)
    plain = load_model(config, random_init=True)
    model = load_model(config, device="meta", random_init=True)
    shard_model(model, mesh, compute_dtype=torch.float32)  # no tower is named, so the root holds the vision tower
    torch.manual_seed(3)
    init_weights(model, "cpu")
    text = {"input_ids": torch.arange(20, 26)[None]}
    image = {"input_ids": torch.tensor([[20, 5, 3, 6, 21, 22]]), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    image["pixel_values"] = torch.linspace(-1, 1, 4 * 3 * 2 * 64).view(4, -1)
    for now in (False, True):  # gradients are kept back once, as in a step of several packs
        reduce_gradients(model, now)
        for rank, inputs in enumerate((image, text)):
            plain(**inputs).logits.square().sum().backward()
            if rank == dist.get_rank():
                model(**inputs).logits.square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad, msg=name)


def float8(mesh, *options):
    """Weights are gathered as a byte a number, each the cast of the whole weight as the last update left it."""
    config, losses = tiny_config("qwen3"), {}
    ids = torch.arange(20, 40)[None] + 3 * dist.get_rank()
    for gathers in (False, True):
        model = load_model(config, device="meta", random_init=True)
        names = use_float8(model, trace(model), emulate=True)
        if "compiled" in options:
            recompute_blocks(model, "full")
            compile_blocks(model, CompileWatch(), backend="aot_eager")
        shard_model(model.train(), mesh, compute_dtype=torch.bfloat16)
        torch.manual_seed(3)
        init_weights(model, "cpu")
        assert not gathers or gather_in_float8(model) == len(names)
        weights = {name: model.get_parameter(f"{name}.weight") for name in names}
        assert all(type(weight._local_tensor) is torch.Tensor for weight in weights.values())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        group = model.model.layers[0]._get_fsdp_state()._fsdp_param_group
        losses[gathers] = []
        for _ in range(3):
            whole_weights = {name: weight.full_tensor() for name, weight in weights.items()}
            loss = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean()
            if gathers:
                for parameter in group.fsdp_params:
                    gathered = parameter._unsharded_param
                    name = f"model.layers.0.{parameter._param_fqn.partition('layers.0.')[2]}".removesuffix(".weight")
                    if name in names:
                        (inputs,) = parameter.all_gather_inputs
                        assert (inputs.dtype, inputs.itemsize) == (torch.float8_e4m3fn, 1)
                        scale = torch.finfo(torch.float8_e4m3fn).max / whole_weights[name].abs().max()
                        torch.testing.assert_close(gathered._scale, scale, rtol=1e-6, atol=0)
                        expected = (whole_weights[name] * gathered._scale).to(torch.float8_e4m3fn)
                        mine = expected.chunk(dist.get_world_size())[dist.get_rank()].flatten()
                        assert torch.equal(inputs[: len(mine)].float(), mine.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[gathers].append(loss.item())
        assert losses[gathers][2] < losses[gathers][0]
    assert losses[True] != losses[False]  # weights are rounded once, not to bfloat16 first
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=3e-2, atol=0)


def memory(mesh, way, folder):
    """Print the most that the process grew by while it came to its slices, pages of the files included [bytes]."""
    model = sharded(f"{folder}/config.json" if way == "draw" else folder, mesh)
    before = largest_memory(torch.device("cpu"))
    if way == "draw":
        init_weights(model, "cpu")
    else:
        read_weights(model, folder, "cpu")
    sys.stdout.write(f"{largest_memory(torch.device('cpu')) - before}\n")


def main(check, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[check](build_mesh(MeshShape.of(dist.get_world_size()), "cpu"), *arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
