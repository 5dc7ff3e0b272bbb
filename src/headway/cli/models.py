"""`headway models` and `headway new-model`: models that ship with their costs, and small ones to write."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import ColumnOption, JsonOption, column_names
from headway.cli.output import needs_extra, print_result
from headway.errors import UsageError
from headway.log.working import working
from headway.report import Column, format_bytes, format_count, render_pairs, render_table
from headway.report.quantity import parse_number
from headway.stores import shown

if TYPE_CHECKING:
    from headway.count import CostModel


def models(as_json: JsonOption = False) -> None:
    """List the shipped models: name, kind, and parameters in total and active for one token.

    Example: headway models --json
    """
    from headway.count import load_cost_model, shipped_models

    shipped = [(name, load_cost_model(name)) for name in shipped_models()]
    entries = [
        {
            "name": name,
            "kind": kind(cost_model),
            "params": {"total": cost_model.params.total, "active": cost_model.params.active},
        }
        for name, cost_model in shipped
    ]
    columns = [Column("name", "left"), Column("kind", "left"), Column("parameters"), Column("active per token")]
    rows = [
        [name, kind(cost_model), format_count(cost_model.params.total), format_count(cost_model.params.active)]
        for name, cost_model in shipped
    ]
    print_result(lambda: {"models": entries}, lambda: render_table(columns, rows), as_json=as_json)


def kind(cost_model: "CostModel") -> str:
    """Say what a model is made of: "text" or "vision-language", and "experts" where it has any."""
    base = "vision-language" if cost_model.has_vision else "text"
    return f"{base}, experts" if any(row.op == "experts" for row in cost_model.rows) else base


_LEAST, _MOST = 10_000, 2_000_000_000
_LEAST_VOCABULARY = 300  # the 256 bytes, the special tokens, and some words

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The model folder to write.")]
DataOption = Annotated[
    list[str],
    typer.Option("--data", metavar="D", help="Dataset that the tokenizer learns from, of any form. Repeatable."),
]
LikeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help=(
            "Structure of the model: a model_type of transformers, such as qwen3 or qwen3-vl. Default: qwen3-vl for "
            "data with pictures or videos, qwen2-audio for data with sounds, qwen3 otherwise."
        ),
    ),
]
SizeOption = Annotated[
    str, typer.Option(metavar="N", help=("Approximate number of parameters, such as 1M, 30M or 0.5B."))
]
VocabOption = Annotated[
    int, typer.Option("--vocab", metavar="N", min=_LEAST_VOCABULARY, help="Most entries of the vocabulary [tokens].")
]
SeedOption = Annotated[int, typer.Option(metavar="S", min=0, help="Seed of the weights.")]


def new_model(
    folder: FolderArgument,
    data: DataOption,
    like: LikeOption = None,
    size: SizeOption = "3M",
    vocab: VocabOption = 2048,
    seed: SeedOption = 0,
    column: ColumnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a small model with random weights, for experiments: a folder that `headway train` takes as it is.

    Layers and width grow with --size. The command prints the real numbers. Pictures are shrunk to 256 tokens at most.

    Example: headway new-model models/tiny --data chats.jsonl --size 3M
    """
    wanted = _parameters(size)
    with needs_extra("making a model"):
        from headway.data.sources import open_source

        sources = [
            open_source(path, columns=column_names(column)) for path in data
        ]  # a typo is told before torch is imported
        from headway.synthetic.new_model import TRAINING_BYTES, write_new_model

    with working(f"making a model in {folder}"):
        model = write_new_model(folder, sources, like=like, size=wanted, vocab_size=vocab, seed=seed)
    record = {
        "folder": shown(model.folder),
        "like": model.like,
        "parameters": model.parameters,
        "vocabulary": model.vocabulary,
        "layers": model.layers,
        "width": model.width,
        "samples": model.samples,
        "weight_bytes": 4 * model.parameters,
        "training_bytes": TRAINING_BYTES * model.parameters,
    }
    data_options = [part for path in data for part in ("--data", path)]
    data_options += [part for name in column or () for part in ("--column", name)]
    pairs = [
        ("model", f"{shown(model.folder)}, like {model.like}"),
        ("parameters", f"{format_count(model.parameters)} ({model.layers} layers of width {model.width})"),
        ("vocabulary", f"{format_count(model.vocabulary)} tokens, learned from {format_count(model.samples)} samples"),
        ("weights", f"{format_bytes(4 * model.parameters)}, random, float32"),
        ("to train", f"{format_bytes(TRAINING_BYTES * model.parameters)} with AdamW in float32, and activations"),
        ("next", shlex.join(["headway", "init", "--model", shown(model.folder), *data_options, "-o", "train.yaml"])),
    ]
    print_result(lambda: record, lambda: render_pairs(pairs), as_json=as_json)


def _parameters(text: str) -> int:
    count = round(parse_number(text, whole=True) or 0)
    if not _LEAST <= count <= _MOST:
        raise UsageError(
            f"--size {text[:40]!r} is not a number of parameters from {_LEAST:,} to {_MOST:,}. Write 1M, 30M or 0.5B."
        )
    return count
