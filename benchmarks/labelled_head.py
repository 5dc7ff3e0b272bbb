"""Time of a pack whose head runs on labelled tokens alone, beside the same pack with the head on every token.

    .venv/bin/python benchmarks/labelled_head.py         # one minute

Models of one width whose head has the share of the work that the named model's has, by their ledgers. A third of each
segment has labels. Both sides compute the same loss and gradients: the side with the head on every token has a factor
of 0 on tokens without a label. Rounds in turn, processor time of one thread.

Writes benchmarks/results/labelled_head_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.count import Workload, load_cost_model
from headway.models.head import ModelWithLoss, model_with_loss
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

MODELS = ("qwen2.5-0.5b", "qwen3-0.6b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen2.5-7b")
SEGMENTS, LENGTH, LABELLED = 8, 144, 48
WIDTH, LAYERS = 256, 4
CHUNK = 1024


def head_share(name: str) -> float:
    """Share of the head among the FLOPs of a model's step, by its ledger."""
    count = load_cost_model(name).count(Workload([LENGTH] * SEGMENTS))
    return count.share("language.head")


def scaled(share: float) -> Qwen3ForCausalLM:
    """A model whose head has a share of the work, up to attention's pairs."""
    blocks = LAYERS * WIDTH * (4 * WIDTH + 3 * 3 * WIDTH)  # four projections, three products of an MLP of 3 x width
    vocabulary = round(share / (1 - share) * blocks / WIDTH)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
        )
    ).train()


def step(
    losses: ModelWithLoss, ids_1T: torch.Tensor, labels_T: torch.Tensor, factor_T: torch.Tensor | None
) -> tuple[float, float, torch.Tensor]:
    """Take one forward and backward; its processor time [s], loss, and gradient of the embedding."""
    losses.model.zero_grad()
    positions_1T = torch.arange(LENGTH).repeat(SEGMENTS)[None]
    start_s = time.thread_time()
    loss = losses({"input_ids": ids_1T, "position_ids": positions_1T}, labels_T, per=100, factor_T=factor_T)
    loss.total.backward()
    gradient = losses.model.get_input_embeddings().weight.grad
    return time.thread_time() - start_s, loss.loss_T.sum().item(), gradient.clone()


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one model, both sides in turn."""
    share = head_share(name)
    model = scaled(share)
    losses = model_with_loss(model, chunk=CHUNK)
    ids_1T = torch.randint(0, model.config.vocab_size, (1, SEGMENTS * LENGTH))
    is_labelled_T = (torch.arange(LENGTH) >= LENGTH - LABELLED).repeat(SEGMENTS)
    every_T = ids_1T[0].roll(-1)
    labelled_T = torch.where(is_labelled_T, every_T, -100)
    sides: dict[str, Any] = {"every": (every_T, is_labelled_T.float()), "labelled": (labelled_T, None)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    results = {}
    for number in range(rounds + 1):
        for side, (labels_T, factor_T) in sides.items():
            spent_s, *results[side] = step(losses, ids_1T, labels_T, factor_T)
            if number:  # the first is warm-up
                times[side].append(spent_s)
    (loss, gradient), (other_loss, other_gradient) = results.values()
    return {
        "model": name,
        "head_share": share,
        "every_s": statistics.median(times["every"]),
        "labelled_s": statistics.median(times["labelled"]),
        "loss_difference": abs(loss - other_loss) / abs(loss),
        "gradient_difference": float((gradient - other_gradient).norm() / gradient.norm()),
    }


def render(record: dict[str, Any]) -> str:
    """Render the table."""
    rows = [
        [
            row["model"], f"{row['head_share']:.1%}", f"{1e3 * row['every_s']:.0f}", f"{1e3 * row['labelled_s']:.0f}",
            f"{row['every_s'] / row['labelled_s']:.2f} x", f"{row['loss_difference']:.0e}",
            f"{row['gradient_difference']:.0e}",
        ]
        for row in record["rows"]
    ]  # fmt: skip
    columns = (
        "head's share of", "share of the step", "head on every token [ms]", "on labelled tokens [ms]", "tokens/s",
        "loss differs by", "gradient by",
    )  # fmt: skip
    return "\n".join(
        [
            f"# The head on labelled tokens alone, {record['environment']['date']}", "",
            f"{describe_environment(record)} `benchmarks/labelled_head.py`: forward and backward of "
            f"{SEGMENTS} segments of {LENGTH} tokens, of which {LABELLED} have labels; float32; median of "
            f"{record['rounds']} rounds in turn, processor time of one thread.", "",
            markdown_table(columns, rows), "",
        ]
    )  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {"what": "labelled_head", "environment": environment(torch.device("cpu")), "rounds": options.rounds}
    record["rows"] = [measure(name, options.rounds) for name in MODELS]
    table = render(record)
    print(table)
    write(result_paths(RESULTS, record), record, table)


if __name__ == "__main__":
    main()
