"""TRL's trainers that generate, score and learn within a step: each phase to the FLOP, by the lengths that really came.

What each rollout gave is noted by the test itself, row by row, as transformers' `generate` returns it; what rows cost
is the law of docs/integrations.md, written out in helpers/rollouts.py.
"""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationMixin
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer

from headway import Workload, trace
from headway.count import FlopCount
from headway.integrations import HeadwayCallback
from helpers.rollouts import (
    EOS,
    GROUPS,
    PEAK,
    PROMPTS,
    check_sums,
    flops,
    folder,
    generated,
    learnt,
    length_reward,
    metered,
    policy,
    prompts,
    scorer,
    shared,
    tokenizer,
    train,
    words,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # TRL asks

ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def rows(monkeypatch):
    """Lengths (prompt, answer) of each row that transformers generates, in their order."""
    noted = []
    generate = GenerationMixin.generate

    def recorded(self, **kwargs):
        sequences = generate(self, **kwargs)
        ids = sequences if torch.is_tensor(sequences) else sequences.sequences
        for mask, row in zip(
            kwargs["attention_mask"].tolist(), ids[:, kwargs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            noted.append((sum(mask), row.index(EOS) + 1 if EOS in row else len(row)))
        return sequences

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    return noted


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="each rollout is one step"),
        pytest.param(
            {"gradient_accumulation_steps": 2}, id="each rollout is a step of two batches", marks=pytest.mark.slow
        ),
        pytest.param({"steps_per_generation": 2}, id="each rollout is two steps", marks=pytest.mark.slow),
        pytest.param({"num_iterations": 2}, id="each rollout is learnt twice", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("trainer", [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["GRPO", "RLOO"])
def test_a_step_is_its_rollout_scores_and_update(tmp_path, rows, trainer, options):
    model = policy()
    ledger = trace(model)
    steps = {"max_steps": 4} if options else {}
    run, ran = metered(
        *trainer, tmp_path, folder(tmp_path / "policy", model), length_reward, beta=0.1, **GROUPS | options | steps
    )
    times = options.get("num_iterations", 1)
    assert min(a for _, a in rows) < max(a for _, a in rows)  # some ended early
    scores = ledger.count(learnt(rows), forward_only=True)
    expected = {
        "rollout": generated(ledger, rows),
        "reference": scores,
        "reward": FlopCount(()),
        "update": sum([ledger.count(learnt(rows))] * times, start=FlopCount(())),
        "rest": FlopCount(()),
    }
    # log-probabilities of the policy before an update, where they are not those of the update itself
    if trainer[0] is RLOOTrainer or "steps_per_generation" in options or times > 1:
        expected["policy"] = scores
    assert {n: f.total for n, f in flops(run).items()} == {n: f.total for n, f in expected.items()}
    assert flops(run)["update"] == expected["update"]
    check_sums(run)
    rollout, update = run.phases["rollout"], run.phases["update"]
    assert (rollout.prompt_tokens, rollout.generated_tokens) == (sum(p for p, _ in rows), sum(a for _, a in rows))
    assert update.tokens == run.tokens == times * sum(p + a for p, a in rows)
    assert update.supervised == times * sum(a for _, a in rows)
    assert rollout.bytes_moved > 0
    assert run.phases["reference"].bytes_moved > 0
    logs = [log for log in ran.state.log_history if "loss" in log]
    assert sum(log["headway/phases/rollout/wall_s"] for log in logs if "headway/phases/rollout/wall_s" in log) == (
        pytest.approx(rollout.loop_s)
    )


@pytest.mark.slow
def test_products_of_a_rollout_are_those_that_torch_counts(tmp_path, monkeypatch):
    """Rows of one length that no token ends: torch's counter of eager products, attention's scores aside."""
    model = policy()
    ledger = trace(model)
    model.generation_config.eos_token_id = None
    counted, generate = [], GenerationMixin.generate

    def recorded(self, **kwargs):
        with FlopCounterMode(display=False) as counter:
            sequences = generate(self, **kwargs)
        counted.append(
            sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
        )
        return sequences

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    data = Dataset.from_list([{"prompt": words(5)}] * 4)
    options = GROUPS | {"generation_kwargs": {"eos_token_id": 999, "min_new_tokens": 7}}
    run, _ = metered(GRPOTrainer, GRPOConfig, tmp_path, model, length_reward, data=data, **options)
    rollout = run.phases["rollout"]
    assert rollout.generated_tokens == 3 * 4 * 7
    attention = sum(f for name, f in rollout.flops.by_component().items() if name.endswith("attention"))
    assert rollout.flops.total - attention == sum(counted)
    assert ledger.count(Workload([1])).total > 0


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["GRPO", "RLOO"])
def test_adapters_are_off_in_the_reference(tmp_path, rows, trainer):
    adapted, bare = trace(get_peft_model(policy(), ADAPTERS)), trace(policy())
    run, _ = metered(*trainer, tmp_path, policy(), length_reward, beta=0.1, given={"peft_config": ADAPTERS}, **GROUPS)
    phases = flops(run)
    assert phases["rollout"].total == generated(adapted, rows).total
    assert phases["reference"].total == bare.count(learnt(rows), forward_only=True).total
    assert phases["update"] == adapted.count(learnt(rows))
    assert phases["update"].total < adapted.count(learnt(rows), forward_only=True).total * 3  # the base is frozen
    check_sums(run)
    assert run.phases["reference"].bytes_moved > 0


@pytest.mark.slow
def test_a_policy_that_had_adapters_has_a_reference_of_the_same(tmp_path, rows):
    model = get_peft_model(policy(), ADAPTERS)
    adapted = trace(model)
    run, _ = metered(GRPOTrainer, GRPOConfig, tmp_path, model, length_reward, beta=0.1, **GROUPS)
    phases = flops(run)
    assert phases["reference"].total == adapted.count(learnt(rows), forward_only=True).total
    assert phases["update"] == adapted.count(learnt(rows))


@pytest.mark.slow
def test_reward_models_and_functions_are_one_phase(tmp_path, rows):
    model, judge = policy(), scorer(num_hidden_layers=1)
    lengths = []
    judge.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.extend(kwargs["attention_mask"].sum(1).tolist()), with_kwargs=True
    )
    cost = trace(judge)
    given = {"reward_processing_classes": [None, tokenizer()]}
    run, _ = metered(GRPOTrainer, GRPOConfig, tmp_path, model, [length_reward, judge], given=given, **GROUPS)
    assert len(lengths) == len(rows)
    assert flops(run)["reward"].total == cost.count(Workload(lengths), forward_only=True).total > 0
    assert run.phases["reward"].bytes_moved > 0
    check_sums(run)


@pytest.mark.slow
def test_a_slow_reward_on_the_host_is_its_own_phase(tmp_path, rows):
    async def slow(completions, **_):
        import asyncio

        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    run, _ = metered(GRPOTrainer, GRPOConfig, tmp_path, policy(), slow, **GROUPS | {"max_steps": 1})
    assert run.phases["reward"].loop_s >= 0.2


@pytest.mark.slow
def test_a_reward_trainer_costs_what_its_pairs_cost(tmp_path):
    model = scorer()
    cost = trace(model)
    lengths = [(3, 5), (4, 2), (6, 1), (2, 7)]
    data = Dataset.from_list([{"chosen_ids": [5] * c, "rejected_ids": [6] * r} for c, r in lengths])
    run, _ = metered(
        RewardTrainer, RewardConfig, tmp_path, model, data=data, per_device_train_batch_size=2, num_train_epochs=1
    )
    assert run.flops == cost.count(Workload([n for pair in lengths for n in pair]))
    assert not run.phases  # it learns from its data alone


@pytest.mark.slow
def test_metering_changes_no_loss_and_no_reward(tmp_path):
    model = policy()
    callbacks = (None, HeadwayCallback(peak=PEAK))
    logs = []
    for callback in callbacks:
        ran = train(
            GRPOTrainer, GRPOConfig, tmp_path, folder(tmp_path / "p", copy.deepcopy(model)), length_reward,
            callback=callback, beta=0.1, learning_rate=1e-2, seed=7, **GROUPS,
        )  # fmt: skip
        state = {name: value.tolist() for name, value in ran.model.state_dict().items()}
        logs.append(
            (
                [
                    [log[k] for k in ("loss", "reward", "kl", "grad_norm")]
                    for log in ran.state.log_history
                    if "loss" in log
                ],
                state,
            )
        )
        assert "generate" not in vars(ran.model)  # and the model is as it was
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_an_evaluation_that_generates_is_no_part_of_the_steps(tmp_path, rows):
    model = policy()
    ledger = trace(model)
    given = {"eval_dataset": prompts()}
    options = GROUPS | {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "per_device_eval_batch_size": 4}
    run, _ = metered(GRPOTrainer, GRPOConfig, tmp_path, model, length_reward, given=given, **options)
    assert len(rows) == 2 * (4 + 8)  # a step's four rows, then an evaluation of four prompts
    trained = rows[:4] + rows[12:16]
    assert flops(run)["rollout"].total == generated(ledger, trained).total
    assert flops(run)["update"] == ledger.count(learnt(trained))
    check_sums(run)


@pytest.mark.slow
def test_online_dpo_generates_two_answers_to_each_prompt(tmp_path, rows):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    model, reference = policy(), policy(5, num_hidden_layers=1)
    ledger, anchor = trace(model), trace(reference)
    given = {"ref_model": reference, "reward_funcs": length_reward}
    options = {"max_new_tokens": 7, "per_device_train_batch_size": 2, "max_steps": 2, "disable_dropout": True}
    run, _ = metered(OnlineDPOTrainer, OnlineDPOConfig, tmp_path, model, given=given, **options)
    phases = flops(run)
    assert len(rows) == 2 * 2 * 2
    assert phases["rollout"].total == generated(ledger, rows).total
    assert phases["reference"].total == anchor.count(learnt(rows), forward_only=True).total
    assert phases["update"] == ledger.count(learnt(rows))
    assert "reward" in phases
    check_sums(run)


@pytest.mark.slow
@pytest.mark.parametrize("seq_kd", [False, True], ids=["the student answers", "the teacher answers"])
def test_gkd_has_a_teacher(tmp_path, rows, seq_kd):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    model, teacher = policy(), policy(5, num_hidden_layers=3)
    student_cost, teacher_cost = trace(model), trace(teacher)
    chats = [[{"role": "user", "content": words(n)}, {"role": "assistant", "content": words(4)}] for n in PROMPTS]
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    names = tokenizer()
    names.chat_template = template
    options = {"max_new_tokens": 7, "per_device_train_batch_size": 2, "max_steps": 2, "max_length": 64}
    given = {"teacher_model": teacher, "processing_class": names}
    run, _ = metered(
        GKDTrainer, GKDConfig, tmp_path, model, data=Dataset.from_list([{"messages": chat} for chat in chats]),
        given=given, lmbda=0.0 if seq_kd else 1.0, seq_kd=seq_kd, **options,
    )  # fmt: skip
    phases = flops(run)
    assert phases["rollout"].total == generated(teacher_cost if seq_kd else student_cost, rows).total
    assert phases["teacher"].total == teacher_cost.count(learnt(rows), forward_only=True).total
    assert phases["update"] == student_cost.count(learnt(rows))
    assert run.phases["teacher"].bytes_moved > 0
    check_sums(run)


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, ADAPTERS], ids=["all weights", "adapters"])
def test_distillation_runs_its_models_without_their_heads(tmp_path, rows, peft):
    from trl import DistillationConfig, DistillationTrainer

    model, teacher = policy(), policy(5, num_hidden_layers=3)
    student_cost = trace(get_peft_model(policy(), peft) if peft is not None else model)
    teacher_cost = trace(teacher)
    options = {
        "max_completion_length": 7,
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
    }
    given = {"teacher_model": teacher, "peft_config": peft}
    run, _ = metered(DistillationTrainer, DistillationConfig, tmp_path, model, given=given, **options)
    phases = flops(run)
    answers = learnt(rows).with_counts(logits=sum(a for _, a in rows))  # of which TRL asks with `logits_to_keep`
    assert phases["rollout"].total == generated(student_cost, rows).total
    assert phases["teacher"].total == teacher_cost.count(answers, forward_only=True).total
    assert phases["update"] == student_cost.count(answers)
    check_sums(run)


@pytest.mark.long
def test_continuous_batching_is_counted_by_lengths(tmp_path):
    model = policy()
    ledger = trace(model)
    rows = []

    def noted(prompts, completion_ids, **_):
        rows.extend((len(prompt.split()), len(ids)) for prompt, ids in zip(prompts, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    run, _ = metered(
        GRPOTrainer,
        GRPOConfig,
        tmp_path,
        model,
        noted,
        use_transformers_continuous_batching=True,
        **GROUPS | {"max_steps": 1},
    )
    phases = flops(run)
    assert run.phases["rollout"].generated_tokens == sum(a for _, a in rows)
    assert phases["update"] == ledger.count(learnt(rows))
    pairs = [(p, [a, b]) for (p, a), (_, b) in zip(rows[::2], rows[1::2], strict=True)]
    assert phases["rollout"].total == shared(ledger, pairs).total


class Untraceable(torch.nn.Module):
    """A reward model whose forward depends on the values of its weights."""

    def __init__(self):
        super().__init__()
        self.inner = scorer()
        self.config = self.inner.config

    def forward(self, input_ids, **inputs):
        torch.linalg.svdvals(self.inner.score.weight).tolist()
        return self.inner(input_ids, **inputs)


def with_failure(*args, **options):
    """Run to the end; gives the only warning of Headway."""
    callback = HeadwayCallback(peak=PEAK)
    with pytest.warns(RuntimeWarning, match="HeadwayCallback measures this training no further") as caught:
        trainer = train(*args, callback=callback, **options)
    assert trainer.state.global_step == 3
    assert "generate" not in vars(trainer.model)
    assert callback.run is None
    messages = [str(w.message) for w in caught if "HeadwayCallback" in str(w.message)]
    assert len(messages) == 1
    return messages[0]


@pytest.mark.slow
def test_a_reward_model_that_cannot_be_traced_is_named_and_training_goes_on(tmp_path):
    rewards = [length_reward, Untraceable()]
    given = {"reward_processing_classes": [None, tokenizer()]}
    message = with_failure(GRPOTrainer, GRPOConfig, tmp_path, policy(), rewards, given=given, **GROUPS)
    assert "the reward model of this trainer, a Untraceable" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "name"),
    [
        (lambda ids: ids[:1], "returned 1 x"),
        (lambda ids: ids.tolist(), "returned a list"),
        (lambda ids: ids[0], "a tensor of ["),
    ],
    ids=["too few rows", "a list", "one row"],
)
def test_a_generate_that_returns_something_odd_is_named_and_training_goes_on(tmp_path, monkeypatch, result, name):
    generate = GenerationMixin.generate

    class Odd:
        """Shows Headway, which looks first, something else than TRL."""

        def __init__(self, ids):
            self.ids, self.sequences = ids, result(ids)

        def __getitem__(self, places):
            return self.ids[places]

    monkeypatch.setattr(GenerationMixin, "generate", lambda self, **kwargs: Odd(generate(self, **kwargs)))
    message = with_failure(GRPOTrainer, GRPOConfig, tmp_path, policy(), length_reward, **GROUPS)
    assert name in message
    assert "generate of Qwen3ForCausalLM" in message


@pytest.mark.slow
def test_a_search_with_beams_is_named_and_training_goes_on(tmp_path):
    options = GROUPS | {"generation_kwargs": {"num_beams": 2}}
    message = with_failure(GRPOTrainer, GRPOConfig, tmp_path, policy(), length_reward, **options)
    assert "2 beams" in message
