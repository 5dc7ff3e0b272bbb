"""AdamW in one pass: which parameters, when the kernel is taken, and what it computes and is compiled to."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fake_cuda.device import pretend_cuda
from headway.config import OptimConfig
from headway.count.updating import ONE_PASS_FROM, UpdateOf, adamw_bytes
from headway.models.parallel.ranks import Ranks
from headway.optim import Optimizer
from headway.optim.adamw import fits_one_pass, numbers_of, why_not
from headway.optim.optimizer import take_step
from headway.optim.parts import round_stochastically_

BF16, FP32 = torch.bfloat16, torch.float32
GROUP = {"lr": 3e-4, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}


def optimizer_of(parameters, held=None, rule="adamw"):
    groups = [{"params": parameters, "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    return Optimizer(groups, OptimConfig(steps=1, lr=0.01, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))


def test_large_parameters_whose_memory_is_whole_fit_one_pass():
    def tensors(shape=(512, 512), weight=BF16, moment=BF16):
        return [torch.zeros(shape, dtype=dtype) for dtype in (weight, weight, moment, moment)]

    assert ONE_PASS_FROM == 512 * 512
    for types in ((BF16, BF16), (BF16, FP32), (FP32, BF16)):
        assert fits_one_pass(tensors((512, 512), *types), "cpu")
    assert not fits_one_pass(tensors(), "cuda")
    assert not fits_one_pass(tensors((511, 513)), "cpu")
    assert not fits_one_pass(tensors(moment=torch.uint8), "cpu")
    assert not fits_one_pass(tensors(weight=torch.float16), "cpu")
    for place in range(4):
        strided = tensors()
        strided[place] = strided[place].T
        assert not fits_one_pass(strided, "cpu")


def test_numbers_of_a_step_are_those_of_double_precision():
    steps = [torch.tensor(float(count)) for count in (1, 2, 1000, 10**6)]
    for found_inf, factor in ((None, None), (torch.tensor(1.0), torch.tensor(0.3))):
        last = [0.0, 1.0] if found_inf is None else [1.0, 0.3]
        for step, numbers in zip(steps, numbers_of(steps, GROUP, found_inf, factor), strict=True):
            expected = [3e-4 / (1 - 0.9 ** int(step)), (1 - 0.999 ** int(step)) ** -0.5, 3e-5, *last]
            assert numbers.dtype is FP32
            assert numbers.tolist() == pytest.approx(expected, rel=1e-7)


@pytest.fixture
def on_cuda():
    with pretend_cuda() as device, FakeTensorMode():
        yield lambda *shape, dtype=BF16: torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


class Two(Ranks):
    """Two processes, of which the other has an outcome of its own."""

    def gather_all(self, value):
        return [value, (True, "it failed there")]


@pytest.mark.parametrize(
    ("held", "dtype", "shape", "problem", "ranks", "note"),
    [
        (None, BF16, (512, 512), None, Ranks(0, 1), "in one pass over weights, gradients and moments (Triton)"),
        ("float32", BF16, (512, 512), None, Ranks(0, 1), "in one pass over weights, gradients and moments (Triton)"),
        ("bfloat16", FP32, (512, 512), None, Ranks(0, 1), "in one pass over weights, gradients and moments (Triton)"),
        (
            None, BF16, (512, 512), "Triton is not installed", Ranks(0, 1),
            "with float32 copies, several times slower than in one pass, because Triton is not installed",
        ),
        (
            None, BF16, (512, 512), None, Two(0, 2),
            "with float32 copies, several times slower than in one pass, because it failed there",
        ),
        (None, FP32, (512, 512), None, Ranks(0, 1), None),
        ("8bit", BF16, (512, 512), None, Ranks(0, 1), None),
        (None, BF16, (512, 511), None, Ranks(0, 1), None),
    ],
)  # fmt: skip
def test_a_run_is_told_which_way_its_update_goes(held, dtype, shape, problem, ranks, note, on_cuda, monkeypatch):
    kinds = []
    monkeypatch.setattr("headway.optim.optimizer.why_not", lambda these, _: kinds.extend(these) or problem)
    optimizer = optimizer_of([on_cuda(*shape, dtype=dtype), on_cuda(7, dtype=dtype)], held)
    optimizer.choose_update(ranks)
    assert optimizer.notes == (() if note is None else (f"AdamW on CUDA: {note}",))
    assert optimizer.one_pass_on == ("cuda" if note and "Triton)" in note else None)
    assert kinds == ([] if note is None else [(dtype, BF16 if held != "float32" else FP32)])


def test_on_a_cpu_and_for_muon_nothing_is_chosen(on_cuda):
    parameter = on_cuda(512, 512)
    for optimizer in (optimizer_of([torch.nn.Parameter(torch.zeros(1))]), optimizer_of([parameter], rule="muon")):
        optimizer.choose_update(Ranks(0, 1))
        assert (optimizer.one_pass_on, optimizer.notes) == (None, ())


def test_a_kernel_that_fails_says_why(monkeypatch):
    cpu, kinds = torch.device("cpu"), [(BF16, BF16)]
    monkeypatch.setattr("headway.optim.adamw.find_spec", lambda _: None)
    assert why_not(kinds, cpu) == "Triton is not installed"
    monkeypatch.setattr("headway.optim.adamw.find_spec", lambda _: True)

    def fails(*_):
        raise RuntimeError("at 8:4:\nno compiler")

    monkeypatch.setattr("headway.optim.adamw.update_", fails)
    assert why_not(kinds, cpu) == "it failed with RuntimeError: no compiler"
    monkeypatch.setattr("headway.optim.adamw.update_", lambda *_: None)
    expected = "its result for torch.bfloat16 with moments in torch.bfloat16 is not that of PyTorch's AdamW"
    assert why_not(kinds, cpu) == expected


def test_small_parameters_alone_are_planned_copies():
    sizes = (ONE_PASS_FROM, ONE_PASS_FROM - 1)
    for moment_bytes, one_pass, shards, expected in [
        (2, False, 1, 20 * (2 * ONE_PASS_FROM - 1)),
        (2, True, 1, 20 * (ONE_PASS_FROM - 1)),
        (2, True, 2, 20 * ONE_PASS_FROM),  # slices of which are small
        (1, True, 1, 27 * (2 * ONE_PASS_FROM - 1)),  # codes
    ]:
        held = [(-(-size // shards), size) for size in sizes]
        assert adamw_bytes(held, UpdateOf(2, moment_bytes, shards, one_pass)) == expected


def test_nan_of_any_bits_is_rounded_to_nan():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32).repeat(1000, 1)
    values = bits.view(FP32)
    round_stochastically_(values, torch.Generator().manual_seed(0))
    assert values[:, :3].isnan().all()
    assert (values[:, 3] == torch.inf).all()
    assert (values[:, 4] == -torch.inf).all()


@pytest.mark.slow
def test_the_kernel_keeps_its_laws_where_triton_interprets_it():
    pytest.importorskip("triton")
    laws = Path(__file__).with_name("one_pass_interpreted.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", laws],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_the_kernel_is_compiled_to_wide_accesses_and_no_local_memory(types, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headway.optim.one_pass_kernel import HALF, adamw_one_pass

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    weight, moment = (f"*{name}" for name in types)
    pointers = {"weights": weight, "gradients": weight, "first": moment, "second": moment, "numbers": "*fp32"}
    numbers = {"numel": "i64", "seed": "i64"} | dict.fromkeys(("beta1", "beta2", "rest1", "rest2", "eps"), "fp32")
    source = ASTSource(
        adamw_one_pass,
        signature=pointers | numbers | {"HALF": "constexpr"},
        constexprs={"HALF": HALF},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(pointers))},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    # Of each half of a block that has no mask: 16 bytes are 8 of a thread's 8 values in bfloat16, 4 in float32.
    loads, stores = (
        2 * sum({"bf16": 1, "fp32": 2}[t] for t in held) for held in (types * 2, (types[0], *types[1:] * 2))
    )
    assert ptx.count("ld.global.v4.b32") == loads
    assert ptx.count("st.global.v4.b32") >= stores
    assert "ld.local" not in ptx
    assert "st.local" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "held"), [(BF16, None), (BF16, "float32"), (FP32, "bfloat16")])
def test_on_cuda_the_kernel_and_copies_come_to_the_same(dtype, held):
    """The same mean after some steps, up to rounding; and a step that is left out leaves everything."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(1)
    shapes = [(7,), (1024, 1537), (ONE_PASS_FROM,), (3, 512, 515)]
    values = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    both = [[torch.nn.Parameter(value.clone()) for value in values] for _ in range(2)]
    optimizers = [optimizer_of(parameters, held) for parameters in both]
    optimizers[0].choose_update(Ranks(0, 1))
    assert optimizers[0].one_pass_on == "cuda"
    for number, norm in enumerate((1.0, 1.0, float("nan"), 1.0)):
        before = [p.detach().clone() for p in both[0]]
        for place in range(len(shapes)):
            gradient = torch.randn(shapes[place], generator=generator).to("cuda", dtype)
            for parameters in both:
                parameters[place].grad = gradient.clone()
        for optimizer in optimizers:
            factor = torch.tensor(0.3 * norm, device="cuda")
            take_step(optimizer, torch.tensor([norm], device="cuda"), factor=factor, skips=True)
        assert all(torch.equal(a, b) for a, b in zip(before, both[0], strict=True)) == math.isnan(norm), number
    for one, other in zip(*both, strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (one, other), strict=True)]
        assert torch.equal(states[0]["step"], states[1]["step"])
        moments = [[state[name] for name in ("exp_avg", "exp_avg_sq")] for state in states]
        for result, expected in zip([one, *moments[0]], [other, *moments[1]], strict=True):
            # some roundings of bfloat16 at magnitudes up to 4 apart, without a bias
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.02)
            if one.numel() >= ONE_PASS_FROM:
                assert (result.double() - expected.double()).mean().abs() < 1e-4
