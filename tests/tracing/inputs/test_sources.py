"""Encoder-decoders and audio towers: ledgers against PyTorch's counter, and against figures derived by hand."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from headway.count import Workload, drivers
from headway.errors import WorkloadError
from headway.tracing import trace

TEXT = {"vocab_size": 160, "pad_token_id": 0, "decoder_start_token_id": 1}
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_mel_bins": 16, "max_source_positions": 50,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = {
    "T5": ("T5ForConditionalGeneration", T5, 37, 53),
    "Bart": ("BartForConditionalGeneration", BART, 37, 53),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER, 37, 100),
}


def built(family):
    name, options, _, _ = CASES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TEXT, **options)
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").train()


@pytest.mark.parametrize("family", CASES)
def test_forward_counts_what_pytorch_dispatches(family):
    model = built(family)
    _, _, target, source = CASES[family]
    batch = {"decoder_input_ids": torch.randint(3, 160, (1, target)), "use_cache": False}
    if family == "Whisper":
        batch["input_features"] = torch.randn(1, 16, source)
    else:
        batch["input_ids"] = torch.randint(3, 160, (1, source))
    counter = FlopCounterMode(display=False)
    with counter:
        model(**batch)
    workload = Workload([target], sources=[source])
    cost = trace(model)
    assert cost.unknown == ()
    causal, square = target * (target + 1) // 2, target**2  # eager attention computes scores that the mask hides
    ours = 0
    for row in cost.rows:
        units = square if row.driver == "pairs:causal" else drivers.parse_driver(row.driver)(workload)
        ours += units * row.forward
    assert ours == counter.get_total_flops()
    assert any(row.driver == "pairs:causal" for row in cost.rows)
    assert causal < square


@pytest.mark.slow
def test_a_whisper_of_the_large_size_costs_what_its_layers_say():
    config = transformers.WhisperConfig(
        d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128, vocab_size=51866,
    )  # fmt: skip
    count = trace(config).count(Workload([1], sources=[3000]), forward_only=True)
    audio = sum(row.forward for row in count.rows if row.name.startswith("audio."))
    # two convolutions of width 3, the second with a stride of 2; then 32 layers of 4 d^2 + 2 d ffn weights, and pairs
    stem = 3000 * 2 * 3 * 128 * 1280 + 1500 * 2 * 3 * 1280 * 1280
    layer = 1500 * 2 * (4 * 1280**2 + 2 * 1280 * 5120) + 1500**2 * 4 * 1280
    assert audio == stem + 32 * layer


def test_an_encoder_of_one_length_refuses_another():
    cost = trace(built("Whisper"))
    with pytest.raises(WorkloadError, match="Give 100 for each segment"):
        cost.count(Workload([5], sources=[60]))


@pytest.mark.parametrize(
    ("driver", "lengths", "expected"),
    [
        ("audio/2", [7, 8], 4 + 4),
        ("audio/4:3", [8, 9, 11], 2 + 2 + 3),  # two in a pair, pairs of the halves that are whole
        ("audio/8:0", [15, 16], 2 + 3),  # floor(L / 8) + 1
        ("audio/8:1:100", [201], 2 * 13 + 1),  # 13 of each 100 frames, 1 of the frame that is left
        ("audio_pairs:block:26/8:1:100", [201], 26**2 + 1),
        ("audio_offsets/2", [7], 2 * 4 - 1),
    ],
)
def test_what_convolutions_make_of_frames_is_exact(driver, lengths, expected):
    assert drivers.parse_driver(driver)(Workload([5], audio=lengths)) == expected


@pytest.mark.parametrize("kernel_stride_padding", [(3, 2, 1), (8, 8, 4), (7, 3, 0), (5, 4, 2)])
def test_shortened_lengths_are_those_of_torch_convolutions(kernel_stride_padding):
    kernel, stride, padding = kernel_stride_padding
    convolution = torch.nn.Conv1d(1, 1, kernel, stride, padding)
    first = 1 + kernel - 1 - 2 * padding
    for length in range(kernel, 40):
        made = convolution(torch.zeros(1, 1, length)).shape[-1]
        assert drivers.parse_driver(f"audio/{stride}:{first}")(Workload([1], audio=[length])) == made
