"""Losses computed in the output layer equal those of whole logits, in value and in every gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headway.count import Workload
from headway.errors import ConfigError, TrainingError
from headway.models.head import ChunkedLoss, model_with_loss, what_follows
from headway.models.losses import AfterHead, Task
from headway.tracing import trace
from helpers.models import RECURRENT_FAMILIES, TEXT_FAMILIES, tiny_config

LENGTH = 23


def build(config, dtype=torch.float64):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def granite():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.GraniteConfig(vocab_size=160, num_key_value_heads=2, logits_scaling=6.0, **sizes)


def gemma2():
    config = tiny_config("gemma2_softcap")
    config.final_logit_softcapping = 1.5  # low enough to bend the logits of a tiny model
    return config


def pack(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, 160, (1, LENGTH), generator=generator)
    labels_T = torch.randint(0, 160, (LENGTH,), generator=generator)
    labels_T[torch.rand(LENGTH, generator=generator) < 0.4] = -100
    return {"input_ids": ids}, labels_T


def reference(model, inputs, labels_T, per):
    """Loss, losses and right tokens, by PyTorch's own functions on the logits that the model returns."""
    logits_TV = model(**inputs).logits[0]
    total = F.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="sum") / per
    total.backward()
    losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="none")
    return total.detach(), losses_T.detach(), logits_TV.argmax(-1) == labels_T


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_equal(model, chunk, per=11):
    inputs, labels_T = pack()
    other = copy.deepcopy(model)
    total, losses_T, right_T = reference(model, inputs, labels_T, per)
    found = model_with_loss(other, chunk=chunk)(inputs, labels_T, per=per, judge=True)
    found.total.backward()
    torch.testing.assert_close(found.total.detach(), total, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found.loss_T, losses_T, rtol=1e-12, atol=0.0)
    assert torch.equal(found.right_T, right_T)
    wanted, got = gradients(model), gradients(other)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("chunk", [1, 8, LENGTH, 100, None])
def test_losses_and_gradients_are_those_of_whole_logits(chunk):
    check_equal(build(tiny_config("qwen3")), chunk)


@pytest.mark.parametrize("labelled", [0, 1, 9])
def test_the_head_runs_on_labelled_slots_alone_and_its_flops_are_the_ledgers(labelled):
    """PyTorch's own counter leaves out one of three products: the weight's, which adds up in place."""
    model = build(tiny_config("qwen3"))
    head = model_with_loss(model, chunk=4)

    def flops(count):
        model.zero_grad()
        inputs, labels_T = pack()
        labels_T[:] = -100
        labels_T[2 : 2 + 2 * count : 2] = 7
        with FlopCounterMode(display=False) as counter:
            head(inputs, labels_T).total.backward()
        return counter.get_total_flops(), labels_T

    ledger = trace(copy.deepcopy(model))
    work = Workload([LENGTH])
    counted = [ledger.count(work.with_counts(logits=count)).total for count in (labelled, 0)]
    without, _ = flops(0)
    seen, labels_T = flops(labelled)
    assert 3 * (seen - without) == 2 * (counted[0] - counted[1]) == 2 * 3 * 2 * labelled * 32 * 160
    wanted = build(tiny_config("qwen3"))
    reference(wanted, pack()[0], labels_T, per=1)
    for name, gradient in gradients(wanted).items():
        assert torch.allclose(gradients(model)[name], gradient, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("chunk", [8, None])
def test_factors_that_are_known_beforehand_are_in_gradient_and_losses_and_cost_no_second_head(chunk, monkeypatch):
    """Factors of 1 over the targets of a sample make the loss a mean over samples, as by PyTorch's own functions."""
    model, (inputs, labels_T) = build(tiny_config("qwen3")), pack()
    other = copy.deepcopy(model)
    factor_T = torch.rand(LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses_T = F.cross_entropy(model(**inputs).logits[0], labels_T, ignore_index=-100, reduction="none") * factor_T
    (losses_T.sum() / 3).backward()
    parts, chunks = [], Task.chunks
    monkeypatch.setattr(Task, "chunks", lambda task: parts.append(task) or chunks(task))
    found = model_with_loss(other, chunk=chunk)(inputs, labels_T, per=3, factor_T=factor_T)
    found.total.backward()
    assert len(parts) == (chunk is not None)
    torch.testing.assert_close(found.loss_T, losses_T.detach(), rtol=1e-12, atol=0.0)
    wanted, got = gradients(model), gradients(other)
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("config", [tiny_config("qwen3_tied"), gemma2(), granite()], ids=lambda c: c.model_type)
def test_tied_capped_and_scaled_heads_are_exact(config):
    check_equal(build(config), chunk=8)


def test_a_head_with_bias_is_exact():
    model = build(tiny_config("qwen3"))
    model.lm_head = nn.Linear(32, 160, dtype=torch.float64)
    check_equal(model, chunk=8)


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_what_is_frozen_has_no_gradient_and_the_rest_its_own(frozen):
    model = build(tiny_config("qwen3"))
    model.get_submodule(frozen).requires_grad_(False)
    check_equal(model, chunk=8)


def test_a_head_with_lora_is_exact():
    model = inject_adapter_in_model(LoraConfig(r=3, target_modules=["lm_head", "q_proj"]), build(tiny_config("qwen3")))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and so would the gradient of lora_A be
            nn.init.normal_(parameter)
    check_equal(model.to(torch.float64), chunk=8)


def test_float32_losses_are_within_a_millionth():
    model = build(tiny_config("qwen3"), torch.float32)
    inputs, labels_T = pack()
    _, losses_T, _ = reference(model, inputs, labels_T, per=1)
    found = model_with_loss(model, chunk=8)(inputs, labels_T)
    torch.testing.assert_close(found.loss_T, losses_T, rtol=1e-6, atol=0.0)


def test_the_gradient_under_autocast_is_that_of_the_model_under_autocast():
    model = build(tiny_config("qwen3"), torch.float32)
    other = copy.deepcopy(model)
    inputs, labels_T = pack()
    with torch.autocast("cpu", torch.bfloat16):
        logits_TV = model(**inputs).logits[0]
        found = model_with_loss(other, chunk=8)(inputs, labels_T)
    F.cross_entropy(logits_TV.float(), labels_T, ignore_index=-100, reduction="sum").backward()
    found.total.backward()
    got, wanted = other.lm_head.weight.grad, model.lm_head.weight.grad
    assert got.dtype == wanted.dtype == torch.float32
    assert (got - wanted).norm() < 0.01 * wanted.norm()  # bfloat16 keeps 8 bits: 2**-8 is 0.004


def test_logits_are_never_whole(monkeypatch):
    """The largest tensor that any operation of forward and backward makes is the weight's gradient."""
    config = tiny_config("qwen3", vocabulary=4096)
    model = build(config, torch.float32)
    labels_T = torch.randint(0, 4096, (512,))
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    head = model_with_loss(model, chunk=16)
    with Sizes():
        head({"input_ids": labels_T[None]}, labels_T).total.backward()
    assert largest == 4096 * 32  # the whole logits would be 4096 * 512


def test_outside_a_loss_the_model_is_what_it_was():
    model = build(tiny_config("qwen3"))
    inputs, labels_T = pack()
    before = model(**inputs).logits
    head = model_with_loss(model, chunk=8)
    with torch.no_grad():
        found = head(inputs, labels_T)
    assert not found.total.requires_grad
    assert torch.equal(model(**inputs).logits, before)
    assert model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False).shape == (1, LENGTH + 2)


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *(f for f in RECURRENT_FAMILIES if not f.endswith("vl"))])
def test_what_a_family_does_to_its_logits_is_found_on_the_meta_device(family):
    config = tiny_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    caps = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
    wanted = AfterHead(cap=caps[0]) if caps else AfterHead()  # none of them scales
    assert what_follows(model, model.get_output_embeddings()) == wanted


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("BertConfig", {"is_decoder": True}),  # layers between its body and its output layer
        ("RemBertConfig", {"is_decoder": True}),  # of another width
        ("ModernBertDecoderConfig", {}),
        ("OPTConfig", {}),  # which call the decoder in their body
        ("WhisperConfig", {}),
        ("BartConfig", {"is_decoder": True}),
    ],
)
def test_what_stands_between_a_body_and_its_output_layer_is_no_hindrance(config, settings):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
    assert what_follows(model, model.get_output_embeddings()) == AfterHead()


@pytest.mark.parametrize(
    ("name", "scale"), [("granite", 1 / 8), ("cohere", 1 / 8), ("hyperclovax", 8.0), ("falcon_h1", 8.0)]
)
def test_scales_are_found_whatever_their_setting_means(name, scale):
    """One setting of the same name divides (Granite) or multiplies (HyperCLOVA X)."""
    kind = {"granite": "Granite", "cohere": "Cohere", "hyperclovax": "HyperCLOVAX", "falcon_h1": "FalconH1"}[name]
    setting = {"cohere": {"logit_scale": scale}, "falcon_h1": {"lm_head_multiplier": scale}}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=160, num_key_value_heads=2, pad_token_id=0, **sizes, **setting.get(name, {"logits_scaling": 8.0})
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert what_follows(model, model.get_output_embeddings()) == AfterHead(scale=scale)


def test_a_head_whose_logits_are_changed_otherwise_is_refused():
    model = build(tiny_config("qwen3"))
    plain = type(model).forward

    class Shifted(type(model)):
        def forward(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.logits = output.logits + 1.0
            return output

    model.__class__ = Shifted
    with pytest.raises(ConfigError, match=r"neither a factor nor a soft cap.*speed.loss_chunk=null"):
        model_with_loss(model, chunk=8)


def test_a_model_that_cuts_its_logits_short_is_refused_when_it_runs():
    model = build(tiny_config("qwen3"))
    inputs, labels_T = pack()
    head = model_with_loss(model, chunk=8)
    with pytest.raises(TrainingError, match=r"on \(1, 1\) slots, for the first time, but 23 slots have labels"):
        head(inputs | {"logits_to_keep": 1}, labels_T)
    assert isinstance(head, ChunkedLoss)
    assert model(**inputs).logits.shape == (1, LENGTH, 160)  # a failed call leaves nothing behind
