"""TRL's trainers, metered: what a step of SFT or DPO computes, to the FLOP, reference forwards included."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from headway import Workload, trace
from headway.devices import Peak
from headway.integrations import HeadwayCallback
from headway.tracing.build import model_class
from helpers.folders import tiny_tokenizer
from helpers.models import checkpointing_name, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [5, 9, 6, 11] * 4  # one epoch of samples [tokens]
PROMPT, CHOSEN, REJECTED = [3, 4, 2, 5] * 2, [2, 6, 3, 1] * 2, [5, 1, 7, 2] * 2  # [words]
END = 1  # TRL ends each answer with a token of its own
PAIRS = [p + c + END for p, c in zip(PROMPT, CHOSEN, strict=True)]
PAIRS += [p + r + END for p, r in zip(PROMPT, REJECTED, strict=True)]


def tiny():
    return tiny_model("qwen3", dtype=torch.float32)


def words(number):
    return "".join(f" w{i}" for i in range(number))


def train(trainer_class, config_class, path, model, data, callback, *, given=None, **options):
    """Run one epoch, with what else is given to the trainer and its arguments."""
    arguments = config_class(
        str(path), num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False,
        dataloader_pin_memory=False, logging_steps=1, **{checkpointing_name(): False} | options,
    )  # fmt: skip
    trainer = trainer_class(
        model,
        args=arguments,
        train_dataset=data,
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
        **(given or {}),
    )
    trainer.train()
    return trainer


SFT = {
    "packed": ({"packing": True, "max_length": 24}, 0),
    "padding_free": ({"padding_free": True, "max_length": None}, 0),
    "padded": ({}, 1),
}


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batches", SFT)
def test_sft_costs_what_its_samples_cost(tmp_path, batches, accumulation):
    options, padded = SFT[batches]
    model = tiny()
    expected = trace(model).count(Workload(LENGTHS))
    callback = HeadwayCallback(peak=PEAK)
    data = Dataset.from_list([{"input_ids": [7] * length} for length in LENGTHS])
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    train(SFTTrainer, SFTConfig, tmp_path, model, data, callback, **sizes, **options)
    run = callback.run
    assert run.flops == expected
    assert (run.tokens, run.segments) == (sum(LENGTHS), len(LENGTHS))
    assert (run.slots > run.tokens) == padded


def pairs():
    rows = zip(PROMPT, CHOSEN, REJECTED, strict=True)
    return Dataset.from_list([{"prompt": words(p), "chosen": words(c), "rejected": words(r)} for p, c, r in rows])


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dpo_runs_its_reference_forward_only(tmp_path, accumulation):
    model, reference = tiny(), tiny()
    cost = trace(model)
    callback = HeadwayCallback(peak=PEAK)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    train(DPOTrainer, DPOConfig, tmp_path, model, pairs(), callback, given={"ref_model": reference}, **sizes)
    expected = cost.count(Workload(PAIRS)) + cost.count(Workload(PAIRS), forward_only=True)
    assert callback.run.flops.total == expected.total
    assert (callback.run.flops.forward, callback.run.flops.wgrad) == (expected.forward, expected.wgrad)
    assert (callback.run.tokens, callback.run.segments) == (sum(PAIRS), len(PAIRS))


@pytest.mark.slow
def test_a_reference_of_another_size_has_its_own_ledger(tmp_path):
    model, config = tiny(), tiny_config("qwen3")
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    reference = model_class(config)._from_config(config, dtype=torch.float32)
    expected = trace(model).count(Workload(PAIRS)) + trace(reference).count(Workload(PAIRS), forward_only=True)
    callback = HeadwayCallback(peak=PEAK)
    train(DPOTrainer, DPOConfig, tmp_path, model, pairs(), callback, given={"ref_model": reference})
    assert callback.run.flops.total == expected.total


ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.slow
def test_new_adapters_are_off_in_their_reference(tmp_path):
    policy, bare = trace(get_peft_model(tiny(), ADAPTERS)), trace(tiny())
    callback = HeadwayCallback(peak=PEAK)
    train(DPOTrainer, DPOConfig, tmp_path, tiny(), pairs(), callback, given={"peft_config": ADAPTERS})
    expected = policy.count(Workload(PAIRS)) + bare.count(Workload(PAIRS), forward_only=True)
    assert callback.run.flops.total == expected.total
    assert callback.run.tokens == sum(PAIRS)
    assert policy.count(Workload(PAIRS)).forward > bare.count(Workload(PAIRS)).forward


@pytest.mark.slow
def test_adapters_trained_further_have_their_first_state_as_reference(tmp_path):
    model = get_peft_model(tiny(), ADAPTERS)
    policy = trace(model)
    callback = HeadwayCallback(peak=PEAK)
    train(DPOTrainer, DPOConfig, tmp_path, model, pairs(), callback)
    expected = policy.count(Workload(PAIRS)) + policy.count(Workload(PAIRS), forward_only=True)
    assert callback.run.flops.total == expected.total


@pytest.mark.slow
def test_log_probabilities_that_were_computed_before_are_not_part_of_the_steps(tmp_path):
    model = tiny()
    expected = trace(model).count(Workload(PAIRS))
    callback = HeadwayCallback(peak=PEAK)
    train(
        DPOTrainer,
        DPOConfig,
        tmp_path,
        model,
        pairs(),
        callback,
        given={"ref_model": tiny()},
        precompute_ref_log_probs=True,
    )
    assert callback.run.flops == expected


@pytest.mark.slow
def test_an_evaluation_of_dpo_is_left_out_reference_included(tmp_path):
    model = tiny()
    cost = trace(model)
    callback = HeadwayCallback(peak=PEAK)
    given = {"ref_model": tiny(), "eval_dataset": pairs()}
    trainer = train(DPOTrainer, DPOConfig, tmp_path, model, pairs(), callback, given=given, eval_strategy="epoch")
    assert any("eval_loss" in log for log in trainer.state.log_history)
    expected = cost.count(Workload(PAIRS)) + cost.count(Workload(PAIRS), forward_only=True)
    assert callback.run.flops.total == expected.total


# TRL switches it off around the reference by the name that transformers 5.17 knows
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated:FutureWarning")
def test_checkpointing_enters_hfu_and_leaves_the_reference_alone(tmp_path):
    model = tiny()
    cost = trace(model)
    callback = HeadwayCallback(peak=PEAK)
    given = {"ref_model": tiny()}
    train(DPOTrainer, DPOConfig, tmp_path, model, pairs(), callback, given=given, **{checkpointing_name(): True})
    trained, reference = cost.count(Workload(PAIRS), recompute="full"), cost.count(Workload(PAIRS), forward_only=True)
    assert trained.recompute > 0
    assert callback.run.flops == trained + reference
