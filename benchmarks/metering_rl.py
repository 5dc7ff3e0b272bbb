"""What metering costs a GRPO step: time in all of HeadwayCallback's hooks, and steps with and without it, in turns.

    .venv/bin/python benchmarks/metering_rl.py      # some minutes

TRL's GRPO trains a small Qwen3 of random weights on one thread of the CPU, with a reference model and a reward
function, and logs every 5 steps. Runs with and without the callback alternate; their losses,
rewards and gradients must be the same bits. The difference of two runs is noise many times what is looked for, so the
time inside of the hooks is measured itself, in the same runs, around each entry to them. Times are the thread's own,
which what else the machine does hardly changes.

Writes benchmarks/results/metering_rl_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headway import Peak
from headway.integrations import HeadwayCallback
from headway.integrations.trainer_phases import TrainerCalls
from headway.meter import clock
from headway.meter.watch import ForwardWatch
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

VOCABULARY, PROMPT, ANSWER, ROWS = 2048, 64, 256, 8  # answers as long as TRL lets them be by itself
LOG_EVERY = 5  # steps
LIMIT = 0.005  # of a step


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=7, help="steps of a run, the first of which is left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of TRL about names that transformers gives up
    env = environment(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model(folder)
        runs = [run(folder, options.steps, metered=(i + j) % 2 == 1) for i in range(options.rounds) for j in (0, 1)]
    bare, metered = ([r for r in runs if r["metered"] is kind] for kind in (False, True))
    record = {
        "what": "metering_rl",
        "environment": env,
        "sizes": {"prompt": PROMPT, "answer": ANSWER, "rows": ROWS, "steps": options.steps, "rounds": options.rounds},
        "step_s": {"bare": spread(each(bare, "steps_s")), "metered": spread(each(metered, "steps_s"))},
        "hooks_s": spread(each(metered, "hooks_s")),
        "share": sum(each(metered, "hooks_s")) / sum(each(metered, "steps_s")),
        "same_bits": all(r["logs"] == runs[0]["logs"] for r in runs),
    }
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def each(runs: list[dict[str, Any]], key: str) -> list[float]:
    """List a number of all steps of all runs."""
    return [number for run in runs for number in run[key]]


def model(folder: str) -> None:
    """Write the policy, from which TRL loads the reference as well."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose words are numbers."""
    names = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{str(i): i for i in range(3, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def reward(completions: list[str], **_: Any) -> list[float]:
    """Prefer many different words."""
    return [float(len({*completion.split()})) for completion in completions]


class Hooks:
    """Adds up the time inside of everything that HeadwayCallback runs during training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a block, unless it is within one that is counted."""
        self._depth += 1
        start_s = time.thread_time()
        yield
        self._depth -= 1
        if not self._depth:
            self.seconds += time.thread_time() - start_s

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Take a block out of the one around it: what the trainer itself runs."""
        depth, self._depth = self._depth, 0
        start_s = time.thread_time()
        yield
        self._depth = depth
        self.seconds -= time.thread_time() - start_s

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Count calls of a function."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.inside():
                return call(*args, **kwargs)

        return counted

    def around(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Count what TrainerCalls puts around a call of the trainer's, the call itself aside."""

        def made(phases: TrainerCalls, call: Callable[..., Any], *args: Any) -> Any:
            def own(*own_args: Any, **own_kwargs: Any) -> Any:
                with self.outside():
                    return call(*own_args, **own_kwargs)

            with self.inside():
                result = make(phases, own, *args)
            return self.timed(result) if callable(result) else result

        return made


class Steps(TrainerCallback):
    """Notes the time of each step, and of the hooks in it [s]; a step ends where the next one begins."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.marks: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the begin of a step, and so the end of the one before, its log included."""
        self.marks.append((time.thread_time(), self.hooks.seconds))


def run(folder: str, steps: int, *, metered: bool) -> dict[str, Any]:
    """Run GRPO for some steps; gives times of all but the first, and what was logged."""
    hooks = Hooks()
    watch = Steps(hooks)
    headway = HeadwayCallback(peak=Peak("a test", 1e12, "fp32", "made up"), memory_bytes_per_s=1e11)
    prompts = [" ".join(str(3 + (7 * i + j) % 999) for j in range(PROMPT)) for i in range(64)]
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    arguments = GRPOConfig(
        folder, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", beta=0.1, seed=3,
        dataloader_pin_memory=False, max_completion_length=ANSWER, num_generations=4, max_steps=steps,
        per_device_train_batch_size=ROWS, gradient_checkpointing=False, log_level="error", logging_steps=LOG_EVERY,
    )  # fmt: skip
    events = ("on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end", "on_substep_end", "on_log")
    entries = [
        *((ForwardWatch, name) for name in ("begin", "end")),
        *((clock, name) for name in ("_before_forward", "_after_forward")),
        *((HeadwayCallback, name) for name in events),
    ]
    patches = [patch.object(owner, name, hooks.timed(getattr(owner, name))) for owner, name in entries]
    patches += [
        patch.object(TrainerCalls, name, hooks.around(getattr(TrainerCalls, name)))
        for name in ("_generated", "_of_rewards")
    ]
    for substitute in patches:
        substitute.start()
    trainer = GRPOTrainer(
        folder, reward, args=arguments, train_dataset=data, processing_class=tokenizer(),
        callbacks=[headway, watch] if metered else [watch],
    )  # fmt: skip
    trainer.train()
    for substitute in patches:
        substitute.stop()
    pairs = list(pairwise(watch.marks[1:]))
    keys = ("loss", "reward", "kl", "grad_norm")
    return {
        "metered": metered,
        "steps_s": [end[0] - begin[0] for begin, end in pairs],
        "hooks_s": [end[1] - begin[1] for begin, end in pairs],
        "logs": [{key: log[key] for key in keys} for log in trainer.state.log_history if "loss" in log],
    }


def render(record: dict[str, Any]) -> str:
    """Render the table from a record."""

    def cell(numbers: dict[str, float], unit: float = 1.0, digits: int = 3) -> str:
        median, low, high = (numbers[key] * unit for key in ("median", "min", "max"))
        return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"

    sizes, share = record["sizes"], record["share"]
    rows = [
        ["a step without the callback [s]", cell(record["step_s"]["bare"])],
        ["a step with it [s]", cell(record["step_s"]["metered"])],
        ["in its hooks, each step [ms]", cell(record["hooks_s"], 1e3)],
        ["in its hooks, of all steps [%]", f"{share:.3%}".removesuffix("%")],
    ]
    bits = "the same bits" if record["same_bits"] else "NOT the same bits"
    verdict = "met" if share < LIMIT else "missed"
    return f"""# What metering adds to a GRPO step

TRL's GRPO, {sizes["rows"]} answers of up to {sizes["answer"]} tokens to prompts of {sizes["prompt"]}, a reference
model, a reward function, a log every {LOG_EVERY} steps; {sizes["rounds"]} runs of {sizes["steps"]} steps each, with and
without HeadwayCallback in turns. Processor time of the thread that trains: median, and least to most.

{markdown_table(["", "processor time"], rows)}

Losses, rewards, KL and gradient norms of all runs: {bits}. Target: in the hooks less than {LIMIT:.1%} of all steps:
{verdict}. They do not grow with the model, nor with the length of answers.

{describe_environment(record)}
"""


if __name__ == "__main__":
    main()
