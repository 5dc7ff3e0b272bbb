"""Ledgers of models whose text hears clips, against PyTorch's counter on real steps, and hand counts."""

import functools

import pytest
import torch

from headway.count import Workload
from headway.tracing import attention, trace
from headway.tracing.inputs.model_inputs import Inputs
from headway.tracing.verify import verify
from helpers.counter import count_forward
from helpers.models import SPEECH_FAMILIES, tiny_model

CPU = torch.device("cpu")


def real(family):
    torch.manual_seed(0)
    return tiny_model(family)


@functools.cache
def ledger(family):
    return trace(real(family))


def differences(model, run):
    lines, unseen = verify(model, Inputs(model).workloads()[run])
    assert unseen == set()
    assert sum(line.ledger[0] for line in lines) > 0
    return [line for line in lines if line.explanation is None]


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen2_audio" else pytest.param(name, marks=pytest.mark.slow)  # one length, and no window
        for name in SPEECH_FAMILIES
    ],
)
def test_clips_in_a_text_count_what_pytorch_dispatches(family):
    assert differences(real(family), 2) == []  # three clips: forward and backward, module by module


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("qwen2_audio", "granite_speech") else pytest.param(name, marks=pytest.mark.long)
        for name in SPEECH_FAMILIES
    ],
)
@pytest.mark.slow
def test_a_frozen_text_still_sends_gradients_to_what_hears(family):
    model = real(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("audio" in name or "encoder" in name or "projector" in name)
    assert differences(model, 1) == []


def test_positions_of_a_text_are_not_taken_for_those_of_a_clip(monkeypatch):
    """All pairs of 32,768 positions are a gigabyte, and a tower of clips of one length refuses them late."""
    seam, positions = attention._mask_seam, []
    monkeypatch.setattr(attention, "_mask_seam", lambda **sizes: positions.append(sizes["kv_length"]) or seam(**sizes))
    model = real("qwen2_audio")
    model.config.text_config.max_position_embeddings = 32_768
    Inputs(model)
    assert 50 <= max(positions) < 20_000


@pytest.mark.parametrize("family", ["qwen2_audio", pytest.param("granite_speech", marks=pytest.mark.slow)])
def test_the_forward_is_what_flop_counter_mode_counts(family):
    model = real(family)
    model.set_attn_implementation("eager")
    made = Inputs(model)
    workload = made.workloads()[0]
    arguments = made.arguments(workload, CPU)
    _, counted = count_forward(model, arguments)
    cost = ledger(family)
    # two layers of eager attention run the whole square of the text's scores: 2 x 2 products of 4 heads x 8
    n = workload.tokens
    hidden = 2 * (n * n - n * (n + 1) // 2) * 2 * 2 * 32
    assert cost.count(workload).forward == sum(counted.values()) - hidden


def test_attention_in_blocks_costs_its_blocks():
    rows = {row.module.removeprefix("model."): row for row in ledger("granite_speech").rows}
    # blocks of 10: a clip of 23 frames has 2 x 100 + 3 x 3 pairs in each of 2 layers, 4 products of 2 heads x 12
    block = rows["encoder.layers.1.attn"]
    assert (block.driver, block.forward) == ("audio_pairs:block:10", 2 * 2 * 2 * 12)
    # 3 queries for every 6 positions, begun ones too: 2 products of 2 heads x 10, 3 x 6 pairs or 3 x 3
    crossing = rows["projector.qformer.encoder.layer.0.crossattention.attention"]
    assert (crossing.driver, crossing.forward) == ("audio/6", 3 * 6 * 2 * 2 * 20)
    own = rows["projector.qformer.encoder.layer.1.attention.attention"]
    assert (own.driver, own.forward) == ("audio/6", 3 * 3 * 2 * 2 * 20)
    # what learnt queries do before they meet a clip is done once in a forward pass
    assert rows["projector.qformer.encoder.layer.0.attention.attention"].driver == "packs"


def test_a_clip_that_is_added_to_its_text_says_how_long_that_is():
    model = real("voxtral_realtime")
    workload = Inputs(model).workloads()[1]
    assert workload.tokens * 8 == int(workload.audio.sum())
    rows = {row.module.removeprefix("model."): row for row in ledger("voxtral_realtime").rows}
    # conv1 has a stride of 1, conv2 one of 2; each text position takes 4 of what is left
    assert rows["audio_tower.embedder.conv1"].driver == "audio"
    assert rows["audio_tower.layers.0.mlp.up_proj"].driver == "audio/2:2"
    assert rows["audio_tower.layers.0.self_attn"].driver == "audio_pairs:sliding:100/2:2"
    assert rows["multi_modal_projector.linear_1"].forward == 2 * 4 * 24 * 32
    # no clip of the trace exceeds the text's window, which the model hands to its attention
    assert rows["language_model.layers.1.self_attn"].driver == "pairs:sliding:4096"


@pytest.mark.skipif("dots3_note" not in SPEECH_FAMILIES, reason="transformers 5.17 has no Dots-3-Note")
@pytest.mark.slow
def test_convolutions_over_time_and_frequency_leave_an_eighth_of_the_frames():
    rows = {row.module.removeprefix("model.audio_tower."): row for row in ledger("dots3_note").rows}
    # 3 x 3 weights of 12 x 12 channels at each eighth frame, begun ones too, and 2 of the 16 bands
    last = rows["conv_stem.convs.2"]
    assert (last.driver, last.forward) == ("audio/8", 2 * 2 * 9 * 12 * 12)
    assert (rows["conv_stem.conv_out"].driver, rows["adapter.fc1"].driver) == ("audio/8", "audio/8")
    assert rows["layers.1.self_attn"].driver == "audio_pairs:full/8"


@pytest.mark.slow
def test_convolutions_over_whole_pieces_are_billed_for_the_frames_that_a_clip_has():
    cost = ledger("qwen2_5_omni_thinker")
    rows = {row.module.rpartition("audio_tower.")[2]: row for row in cost.rows}
    # pieces of 20 frames, of which transformers fills the last one up: 3 frames of 16 bands, then every second of 24
    assert (rows["conv1"].driver, rows["conv1"].forward) == ("audio/1:1:20", 2 * 3 * 16 * 24)
    assert (rows["conv2"].driver, rows["conv2"].forward) == ("audio/2:1:20", 2 * 3 * 24 * 24)


def test_clips_add_up():
    cost = ledger("granite_speech")
    text = cost.count(Workload([400])).forward
    one, other = (cost.count(Workload([400], audio=[n])).forward - text for n in (60, 90))
    both = cost.count(Workload([400], audio=[60, 90])).forward - text
    assert one + other == both > 0
