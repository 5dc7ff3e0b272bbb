"""Float8 converts the blocks' linear layers, keeps their names, and changes a loss a little."""

import copy

import pytest
import torch
import transformers

from headway.config import RunConfig
from headway.errors import ConfigError
from headway.models.head import model_with_loss
from headway.models.load import load_model
from headway.models.precision import check_float8, choose_precision, use_float8
from headway.tracing import trace
from helpers.models import tiny_config


def build(family, **sizes):
    config = tiny_config(family)
    for name, value in sizes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return load_model(config, random_init=True)


def test_a_device_without_float8_is_refused(monkeypatch, tmp_path):
    run = RunConfig(folder=tmp_path, dtype="float8")
    with pytest.raises(ConfigError, match=r"run\.dtype 'float8'.*8\.9 or newer, but the run is on cpu\. Use float32"):
        choose_precision(run, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match=r"NVIDIA A100-SXM4-80GB has 8\.0\. Use bfloat16-autocast"):
        check_float8(torch.device("cuda"))


def test_float8_is_judged_by_the_peak_of_float8(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    precision = choose_precision(RunConfig(folder=tmp_path, dtype="float8"), torch.device("cuda"))
    assert (precision.params, precision.compute) == (torch.float32, torch.bfloat16)
    assert precision.peak_dtype == torch.float8_e4m3fn


def test_layers_of_blocks_whose_sizes_fit_are_converted_and_keep_their_names():
    model = build("qwen3", intermediate_size=40)  # 40 is no multiple of 16
    before = [name for name, _ in model.named_parameters()]
    names = use_float8(model, trace(model), emulate=True)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(names) == 2 * 4
    assert [name for name, _ in model.named_parameters()] == before
    assert type(model.lm_head) is torch.nn.Linear


def test_routers_stay_as_they_are():
    model = build("qwen3_moe")
    cost_model = trace(model)
    routers = {p.name.removesuffix(".weight") for p in cost_model.parameters if p.component.endswith(".router")}
    assert routers
    assert not routers & set(use_float8(model, cost_model, emulate=True))


def test_a_loss_in_float8_is_near_and_its_gradients_are_finite():
    """e4m3 keeps 4 bits of a number: a relative error of up to 2**-4 in each product, which largely averages out."""
    model = build("qwen3")
    other = copy.deepcopy(model)
    assert len(use_float8(other, trace(model), emulate=True)) == 2 * 7
    ids = torch.randint(7, 160, (1, 21), generator=torch.Generator().manual_seed(0))  # not a multiple of 16 slots
    plain, found = (model_with_loss(m, chunk=8)({"input_ids": ids}, ids[0], per=21) for m in (model, other))
    assert found.total.item() != plain.total.item()
    assert found.total.item() == pytest.approx(plain.total.item(), rel=0.1)
    found.total.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in other.parameters())


def test_a_model_without_fitting_layers_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("gpt2"))  # its layers are convolutions of width 1
    with pytest.raises(ConfigError, match=r"multiples of 16, but GPT2LMHeadModel has none in its blocks"):
        use_float8(model, trace(model))
