"""Experts spread over processes: as one process would have it, and errors where they cannot be."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Llama4TextConfig

from headway.errors import ConfigError
from headway.models.parallel.experts import spread_experts
from helpers.models import tiny_config
from helpers.processes import run_processes


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "degree"), [(2, 2), (4, 4), (4, 2)], ids=["2", "4", "2 and FSDP2 over 2"])
def test_losses_and_gradients_are_those_of_one_process(processes, degree, tmp_path):
    run_processes([sys.executable, Path(__file__).with_name("experts_process.py"), degree, tmp_path], processes)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_a_model_without_experts_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no experts .* Set parallel\.expert to 1\."):
        spread_experts(build(tiny_config("qwen3")), mesh)


def test_experts_that_transformers_does_not_dispatch_are_named(mesh):
    config = Llama4TextConfig(
        vocab_size=160, hidden_size=32, intermediate_size=16, intermediate_size_mlp=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, interleave_moe_layer_step=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"does not dispatch the experts in .*experts \(Llama4TextExperts\)"):
        spread_experts(build(config), mesh)


def test_experts_with_a_norm_of_their_own_are_refused(mesh):
    model = build(tiny_config("qwen3_moe"))
    experts = model.model.layers[1].mlp.experts
    experts.post_expert_norm = torch.nn.RMSNorm(32)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts .* post_expert_norm\.weight is not a tensor with a row"
    ):
        spread_experts(model, mesh)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers the old way
def test_experts_with_adapters_are_refused(mesh):
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_config(tiny_config("qwen3_moe")),
        LoraConfig(r=4, target_modules=[], target_parameters=targets),
    )
    with pytest.raises(ConfigError, match="have adapters, which cannot be spread over processes"):
        spread_experts(model, mesh)


def test_what_is_frozen_stays_frozen_and_keeps_its_name(mesh):
    model = build(tiny_config("gpt_oss_sinks"))
    names = [name for name, _ in model.named_parameters()]
    frozen = model.model.layers[0].mlp.experts.requires_grad_(requires_grad=False)
    spread_experts(model, mesh)
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert all(parameter.requires_grad for parameter in model.model.layers[1].mlp.experts.parameters())
