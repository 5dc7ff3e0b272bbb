"""Logs of diffusion: torchtitan's FLUX, whose rule is written out here, and the progress bar of diffusers' scripts."""

import json

import pytest
import torch

from headway.conventions import Step, architecture, get_convention
from headway.count import Workload
from headway.tracing import trace
from helpers.denoisers import denoiser, titans_flux

HEADS, DOUBLE, SINGLE, TEXT = 24, 2, 3, 256
HIDDEN = HEADS * 128
CONFIG = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
    "joint_attention_dim": 4096, "num_attention_heads": HEADS, "num_layers": DOUBLE, "num_single_layers": SINGLE,
    "pooled_projection_dim": 768,
}  # fmt: skip


def titans_parameters(monkeypatch):
    """Parameters of torchtitan's own FLUX of these sizes."""
    flux = titans_flux(monkeypatch)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "depth": DOUBLE, "depth_single_blocks": SINGLE}
    with torch.device("meta"):
        model = flux.FluxModel(flux.FluxModelArgs(context_in_dim=4096, **sizes))
    return sum(parameter.numel() for parameter in model.parameters())


def titans_flops_per_token(parameters, row):
    """FluxModel.Config.get_nparams_and_flops of pytorch/torchtitan b5bcd76c6 (21 Aug 2026), in its own order."""
    flops = 6 * parameters
    flops -= 6 * int(HIDDEN * HIDDEN * (4 + 2 * 4.0)) * DOUBLE
    modulation = 12 * HIDDEN * HIDDEN * DOUBLE + 3 * HIDDEN * HIDDEN * SINGLE + 2 * HIDDEN * HIDDEN
    flops -= 6 * modulation * (row - 1) // row
    return flops + 6 * HIDDEN * row * SINGLE + 6 * HIDDEN * row * DOUBLE


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("side", [16, 32])  # patches of pictures of 256 and 512 pixels
def test_a_log_of_titans_flux_is_identified_and_restated(headway, folder, monkeypatch, side):
    row = side * side + TEXT
    per_token = titans_flops_per_token(titans_parameters(monkeypatch), row)
    rate, peak = 20_000, 989e12
    lines = [
        f"[titan] 2026-08-22 10:00:{10 + i},000 - root - INFO - step: {10 * i}  loss:  1.20000  grad_norm:  0.5000  "
        f"memory: 60.00GiB(75.00%)  tps: {rate:,}  tflops: {per_token * rate / 1e12:,.2f}  "
        f"mfu: {100 * per_token * rate / peak:.2f}%\n"
        for i in (1, 2)
    ]
    (folder / "train.log").write_text("".join(lines))
    options = ("--images", f"1x{side}x{side}", "--sources", TEXT, "--device", "H100", "--json")
    result = headway("audit", folder / "train.log", "--model", folder, *options)
    record = json.loads(result.out)
    assert record["identified"]["convention"] == "torchtitan-flux"
    assert record["identified"]["seq_len"] == row
    assert record["reported_mfu_mean"] == pytest.approx(per_token * rate / peak, abs=1e-4)
    # useful FLOPs of one picture and its text, by the formula of a FLUX that is traced in tests/tracing
    useful = trace(on_shapes()).count(Workload([side * side], images=[(1, side, side)], sources=[TEXT])).total
    assert record["useful_mfu_mean"] == pytest.approx(useful / row * rate / 989.4e12, rel=1e-6)
    assert {"causal", "other weights"} >= {factor["name"] for factor in record["factors"]} - {"peak"}


def on_shapes():
    from headway.models.denoisers import denoiser_on_shapes

    return denoiser_on_shapes(CONFIG)


def test_titans_rule_is_of_flux_alone():
    config = {"_class_name": "DiTTransformer2DModel", "num_layers": 2}
    cost_model = trace(denoiser("DiTTransformer2DModel"))
    step = Step(Workload([16], images=[(1, 4, 4)]), 16)
    bill = get_convention("torchtitan-flux").bill(architecture(config, "DiT", cost_model), step)
    assert bill.flops is None
    assert "of FLUX alone" in bill.reason


def test_a_progress_bar_of_diffusers_is_restated_by_its_times(headway, folder):
    # tqdm 4.67: a bar that is written again and again into one line, for each of three updates
    bar = "Steps:   0%|          | "
    text = f"{bar}0/9 [00:00<?, ?it/s]\r{bar}1/9 [00:05<00:40,  5.00s/it, loss=0.5, lr=0.0001]\r"
    text += f"{bar}2/9 [00:07<00:17,  2.50s/it, step_loss=0.4, lr=0.0001]\r" * 2
    text += f"{bar}3/9 [00:08<00:03,  2.00it/s, loss=0.31, lr=0.0001]\n"
    (folder / "train.log").write_text(text)
    options = ("--images", "1x64x64*2", "--sources", "512", "--device", "H100", "--json")
    record = json.loads(headway("audit", folder / "train.log", "--model", folder, *options).out)
    assert record["tool"] == "diffusers"
    work = Workload([4096] * 2, images=[(1, 64, 64)] * 2, sources=[512] * 2)
    useful = trace(on_shapes()).count(work).total
    assert [row["step"] for row in record["rows"]] == [1, 2, 3]
    assert [row["useful"]["mfu"] for row in record["rows"]] == pytest.approx(
        [useful / seconds / 989.4e12 for seconds in (5.0, 2.5, 0.5)]
    )
    assert any("without the encoders" in note for note in record["notes"])
