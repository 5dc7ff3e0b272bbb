"""Moments in fewer bits: the arithmetic against torchao's, and training against moments in full."""

import pytest
import torch
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map
from torchao.optim.subclass_8bit import OptimState8bit

from headway.config import OptimConfig
from headway.count.updating import RULES
from headway.models.load import load_model
from headway.optim import Optimizer, make_optimizer
from headway.optim.parts import block_size, code_table, round_stochastically_
from headway.tracing import trace
from helpers.cases import some
from helpers.models import tiny_config

CPU = torch.device("cpu")


def adamw(parameter, held):
    groups = [{"params": [parameter], "rule": "adamw", "lr_factor": 1.0, "weight_decay": 0.1}]
    return Optimizer(groups, OptimConfig(steps=1, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state=held or "auto"))


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_stand_for_torchaos_values(signed):
    assert torch.equal(code_table(signed=signed, device=CPU), torch.tensor(create_dynamic_map(signed)))


def test_eight_bit_adamw_is_torchaos():
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(48, 512))  # rows of two blocks, which are torchao's flat blocks too
    theirs = ours.detach().clone()
    optimizer = adamw(ours, "8bit")
    step = torch.tensor(0.0)
    first, second = (OptimState8bit.zeros(theirs.shape, signed, 256, dtype=torch.float32) for signed in (True, False))
    for _ in range(20):
        ours.grad = torch.randn(ours.shape) * torch.logspace(-4, 0, 512)
        optimizer.step()
        step += 1
        settings = (torch.tensor(1e-2), 0.9, 0.95, 0.1, 1e-8, True, False)
        single_param_adam(theirs, ours.grad, step, first, second, None, *settings)
    # Sums in another order end on the other side of a boundary between two codes now and then: never further.
    state = optimizer.state[ours]
    for codes, witness in ((state["exp_avg"], first.codes), (state["exp_avg_sq"], second.codes)):
        difference = (codes.int() - witness.int()).abs()
        assert difference.max() <= 1
        assert difference.float().mean() < 1e-3
    close = torch.isclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert (~close).float().mean() < 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-3)  # a tenth of a step
    assert state["exp_avg"].nbytes + state["exp_avg_scale"].nbytes == ours.numel() * (1 + 4 / 256)


@pytest.mark.parametrize("shape", [(8, 512), (4096,), (1280, 3420), (64, 61), (3, 40, 192)])
def test_blocks_lie_within_rows(shape):
    block = block_size(torch.Size(shape))
    assert block == {(8, 512): 256, (4096,): 0, (1280, 3420): 228, (64, 61): 0, (3, 40, 192): 192}[shape]


def rounded(values, noise):
    round_stochastically_(values, noise)
    return values


def test_stochastic_rounding_is_right_on_average_and_leaves_what_needs_none():
    noise = torch.Generator().manual_seed(0)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(exact.float(), noise), exact.float())
    # bfloat16 has steps of 2**-7 from 1 to 2: a quarter of a step is rounded up once in four times
    for value in (1 + 2**-9, -1 - 2**-9):
        found = rounded(torch.full((100_000,), value), noise).double()
        assert set(found.abs().tolist()) == {1.0, 1 + 2**-7}
        # the standard deviation of the mean is 2**-7 sqrt(0.25 * 0.75 / 100,000) = 1.1e-5
        assert found.mean().item() == pytest.approx(value, abs=5e-5)


def test_moments_in_bfloat16_see_changes_below_half_a_step():
    """With beta2 = 0.999 a second moment moves by 0.1 % a step, and bfloat16 rounds 0.2 % away."""
    parameter = torch.nn.Parameter(torch.zeros(200, 100))
    groups = [{"params": [parameter], "rule": "adamw", "lr_factor": 1.0, "weight_decay": 0.0}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=1e-30, betas=(0.9, 0.999), eps=1e-8, state="bfloat16"))
    for _ in range(1500):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    expected = 1 - 0.999**1500  # of a constant gradient of 1: 0.777
    assert optimizer.state[parameter]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, rel=1e-3)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(1500):
        nearest = nearest.float().lerp_(torch.ones(1), 0.001).bfloat16()
    assert nearest.item() < 0.5 * expected  # what rounding to nearest would have made of it


def test_a_parameter_in_bfloat16_learns_from_steps_below_its_own():
    parameter = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    groups = [{"params": [parameter], "rule": "adamw", "lr_factor": 1.0, "weight_decay": 0.0}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, state="float32"))
    for _ in range(50):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    # each step is 1e-4, a fortieth of bfloat16's step of 2**-8 below 1; rounding to nearest would never move
    assert parameter.double().mean().item() == pytest.approx(1 - 50e-4, abs=2e-4)


@pytest.mark.parametrize("name", some(RULES, "adamw".__eq__))
@pytest.mark.parametrize(("held", "tolerance"), some([("bfloat16", 0.01), ("8bit", 0.03)], ("8bit", 0.03).__eq__))
def test_training_with_held_moments_goes_as_with_full_ones(name, held, tolerance):
    config = tiny_config("qwen3")
    config.hidden_size, config.intermediate_size = 64, 128
    ids = torch.randint(160, (1, 48), generator=torch.Generator().manual_seed(1))

    def last_losses(state):
        torch.manual_seed(3)
        model = load_model(config, random_init=True)
        optimizer = make_optimizer(model, OptimConfig(steps=50, lr=3e-3, name=name, state=state), trace(model))
        losses = []
        for _ in range(50):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    full, few = last_losses("float32"), last_losses(held)
    assert full[-1] < 0.5 * full[0]
    assert few[0] == full[0]
    assert few != full
    assert max(abs(a - b) for a, b in zip(full, few, strict=True)) < tolerance * full[0]


@pytest.mark.parametrize("held", ["float32", "bfloat16", "8bit"])
def test_a_saved_state_goes_on_to_the_bit(held, tmp_path):
    def build():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(64, 128).to(torch.bfloat16))
        return parameter, adamw(parameter, held)

    def steps(parameter, optimizer, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            optimizer.step()

    whole, optimizer = build()
    steps(whole, optimizer, range(3))
    torch.save((whole.detach(), optimizer.state_dict()), tmp_path / "state.pt")
    steps(whole, optimizer, range(3, 6))

    parameter, resumed = build()
    weights, state = torch.load(tmp_path / "state.pt")
    parameter.data.copy_(weights)
    resumed.load_state_dict(state)
    steps(parameter, resumed, range(3, 6))
    assert torch.equal(parameter, whole)
