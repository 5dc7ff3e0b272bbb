"""Bagel as its own trainer and others bill it, and the models of its family that ship with their ledgers."""

import tomllib
from pathlib import Path

from headway.conventions import listed
from headway.conventions.architecture import Architecture
from headway.conventions.convention import Convention, Parts, Step
from headway.conventions.listed import Formula, Formulas

LEDGERS = Path(__file__).parent / "ledgers"
_BAGEL: Formulas = {"bagel": Formula()}


def bagel(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each sample; the padding of a pack is one more sample.

    Head and embedding are billed for every token, though the head runs on supervised text alone. Not billed: the tower
    that reads, the autoencoder, the connector and the latents' projections. The filling of several packs is taken as
    equally long in each.

    Source: ByteDance-Seed/Bagel, train/pretrain_unified_navit.py, qwen2_flop_coefficients, and data/dataset_base.py,
    to_tensor (commit 056b5fd, 27 Oct 2025).
    """
    formula = listed.chosen(model, _BAGEL, "Bagel's trainer")
    tokens, squares = step.workload.tokens, step.square_sum + step.filling_square_sum
    head = listed.table(model, tokens)
    attention = listed.attention(model, formula, model.layers * squares, rate=6)
    return {**listed.weights(model, formula, tokens), "head": head, "embedding": head, "attention": attention}


CONVENTIONS = (
    Convention(
        "bagel", "2025-10", "bagel",
        "real tokens, full square of each sample and of padding, the embedding as a second head; vision free",
        bagel, "real", "segments", only="bagel",
    ),
)  # fmt: skip
# LMMs-Engine takes a pack for one row, whose square it bills: src/lmms_engine/datasets/collator/bagel_collator.py
# (release 0.1.4, 6 Aug 2026).
FORMULAS: dict[str, Formulas] = {"LMMs-Engine": {"bagel": Formula(whole_packs=True)}}
TOOL_PEAKS = tomllib.loads(Path(__file__).with_name("tool_peaks.toml").read_text("utf-8"))
