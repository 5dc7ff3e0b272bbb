"""Train GPT-2 on random tokens with Hugging Face's Trainer, and see MFU, HFU, MBU and tokens/s in its log.

    python examples/hf_trainer_mfu.py --dtype bf16 --batch-size 16
    WANDB_PROJECT=my-project python examples/hf_trainer_mfu.py --wandb

Weights are random and nothing is downloaded. On a CPU the model is a small one.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback

ON_CPU = torch.accelerator.current_accelerator(check_available=True) is None
SEQ_LEN = 64 if ON_CPU else 512
NUM_ROWS = 512


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, which are their own labels."""

    def __init__(self, vocabulary: int) -> None:
        self._rows = torch.randint(vocabulary, (NUM_ROWS, SEQ_LEN))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype",
        choices=["fp16", "bf16", "fp32"],
        default="fp32" if ON_CPU else "bf16",
        help="of autocast, or fp32 without (default here: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step and device (default: %(default)s)")
    parser.add_argument("--logging-steps", type=int, default=20, help="steps between two logs (default: %(default)s)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="checkpoint activations: HFU above MFU")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases too")
    parser.add_argument("--metric-prefix", default="throughput", help="of the names in the log (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, and print the log."""
    args = parse_args()
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256} if ON_CPU else {}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch_size,
                logging_steps=args.logging_steps,
                save_strategy="no",
                report_to=["wandb"] if args.wandb else [],
                fp16=args.dtype == "fp16",
                bf16=args.dtype == "bf16",
                use_cpu=ON_CPU,
                dataloader_pin_memory=not ON_CPU,
            ),
            train_dataset=RandomTokens(model.config.vocab_size),
            callbacks=[MFUCallback(dtype=args.dtype, metric_prefix=args.metric_prefix)],
        )
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable()
        trainer.train()


if __name__ == "__main__":
    main()
