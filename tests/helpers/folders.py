"""Complete small model folders, written with transformers' own classes, and a family's model as two loaders build it.

All is saved as transformers saves it, so that everything opens these folders as it opens the real ones.
"""

import functools
import importlib
import json
import re
import wave
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from headway.count import Workload, drivers, masks
from headway.data import Encoder, read_samples
from headway.data.collate import Collator
from headway.models import attention, load_model, load_processor, rope_index
from headway.models.attention.masks import SegmentMask
from headway.models.video import VideoSettings
from headway.models.vision import patch_size_of, vision_geometry
from headway.synthetic.digits import write_reader
from headway.synthetic.processor import write_processor
from headway.tracing import trace
from headway.tracing.verify import verify
from helpers.families import FAMILIES, Family
from helpers.models import PATCH, built, tiny_config, vision_tokens

_TEMPLATE = """\
{%- macro body(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {{- 'IMAGE' -}}
            {%- elif part.type == 'audio' -%}
                {{- 'AUDIO' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- 'BEGIN' -}}
{%- for turn in messages -%}
    {{- turn.role + ': ' -}}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{- body(turn.content) + '<eos>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- body(turn.content) -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'assistant: ' -}}
{%- endif -%}
"""


_PIL = "image_processing_pil_"
_QWEN = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5_vl": "Qwen3VLProcessor",
}
VLM_FOLDERS = (*(f for f, family in FAMILIES.items() if all(find_spec(each) for each in family.needs)), *_QWEN)


def write_vlm(folder: Path, family: str | Family, *, weights: bool = False) -> Path:
    """Write a model's folder.

    Args:
        folder: made if missing.
        family: one of `VLM_FOLDERS`, or what a family's folder is made of.
        weights: whether random weights go with it, drawn from torch's global generator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(family, str) and family in _QWEN:
        config = _write_qwen(folder, family)
    else:
        config = _write_family(folder, FAMILIES[family] if isinstance(family, str) else family)
    if weights:
        name = type(config).__name__.removesuffix("Config")
        kind = getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(
            transformers, f"{name}ForCausalLM"
        )
        model = kind(config)
        with torch.no_grad():  # norms and biases start at one and zero, which hides mistakes
            for name, parameter in model.named_parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
                if name.endswith("A_log"):  # by default up to 16: states decay at once, gradients are rounding
                    parameter.uniform_(0.05, 0.5).log_()
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def _write_qwen(folder: Path, family: str) -> PreTrainedConfig:
    write_processor(folder, ["Which picture is it? It is the one."], PATCH, processor_class=_QWEN[family])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tiny_config(family, len(tokenizer), vision_tokens(tokenizer))


def _write_family(folder: Path, family: Family) -> PreTrainedConfig:
    tokenizer = _tokenizer(family)
    template = _TEMPLATE.replace("IMAGE", family.placeholder).replace("AUDIO", family.audio)
    template = template.replace("BEGIN", "<bos>")
    kind = getattr(transformers, family.processor)
    processor = _made(kind, family, tokenizer)
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    saved: dict[str, Any] = {"processor_class": family.processor}
    for part in ("image_processor", "feature_extractor", "audio_processor"):
        if hasattr(processor, part):
            settings = getattr(processor, part).to_dict()
            if "image_processor_type" in settings:
                settings["image_processor_type"] = settings["image_processor_type"].removesuffix("Pil")
            saved |= settings
    _write_json(folder / "preprocessor_config.json", saved)
    _write_json(folder / "processor_config.json", {"processor_class": family.processor, **family.options})
    config = built(family.config)
    rows = max(processor.tokenizer.get_vocab().values()) + 1
    text = config.get_text_config()
    text.vocab_size = rows
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2
    return config


def _made(kind: Any, family: Family, tokenizer: Any) -> Any:
    """The processor; without its video processor, which needs torchvision and is no part of these folders."""
    attributes = kind.get_attributes()
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    if family.image is not None:
        module, name, settings = family.image
        kind_of_file = _PIL if name.endswith("Pil") else "image_processing_"
        images = getattr(importlib.import_module(f"transformers.models.{module}.{kind_of_file}{module}"), name)
        parts["image_processor"] = images(**settings)
    for name in {"feature_extractor", "audio_processor"}.intersection(attributes):
        kind_of_sound = getattr(transformers, family.sound)
        options = {"chunk_length": 1} if family.sound.startswith("Whisper") else {}
        parts[name] = kind_of_sound(feature_size=16, **options)
    if "video_processor" not in attributes:
        return kind(**parts, **family.options)

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)
            return type(argument)

    WithoutVideos.__name__ = kind.__name__
    videos = VideoSettings(family.image[2] if family.image is not None else {})
    return WithoutVideos(**parts, video_processor=videos, **family.options)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Bytes as tokens, after the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>", *family.special]
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=1_000_000,
        extra_special_tokens=family.named or list(family.special),
        clean_up_tokenization_spaces=False,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}


def tiny_tokenizer(num_words: int = 150) -> PreTrainedTokenizerFast:
    """Build it; a word is a token, and nothing is added to a text."""
    vocabulary = SPECIAL | {f"w{i}": len(SPECIAL) + i for i in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


QUESTIONS = ("What is this?", "How many digits are there?")


def picture_reader(folder):
    """Write a Qwen3-VL of a million random weights; its answers are nonsense, and always the same."""
    write_reader(folder, [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    torch.manual_seed(3)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    return folder


def text_model(folder):
    """Write a Qwen3 of a few thousand random weights, whose tokenizer has no chat template."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **sizes
    )
    torch.manual_seed(4)
    load_model(config, random_init=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(path, size=(48, 32), color="red"):
    """Write a picture of one colour."""
    Image.new("RGB", size, color).save(path)
    return path


SPEECH = ("qwen2_audio", "qwen2_5_omni_thinker")
ONE_IMAGE = ("paligemma2",)  # models that are counted with one image for each text
_PICTURES = {"a.png": (40, 60), "b.png": (64, 33), "c.png": (30, 30), "d.png": (20, 64)}  # height, width [pixels]
_SOUNDS = {"a.wav": 8000, "b.wav": 12801, "c.wav": 5000, "d.wav": 3333}  # samples at 16 kHz
_MEDIA = (("a",), (), ("b", "c"), ("d",))
# Rounding of float32, which differs between processors: most families stay below 3e-6, DeepSeek-VL reaches 9e-6. Linear
# attention in chunks, and a tower of 630 patches whatever the image, add up more: 2.1e-5 on an AMD EPYC. In float64 all
# of them shrink by three, and no more, as norms and softmax go through float32.
CLOSE = 2e-5
TOLERANCES = {"qwen3_5_vl": 4e-5, "gemma4": 4e-5}
# Where a cost model bills otherwise than the step computes: sign of (counted - computed) attention, modules, reason.
COUNTED_OTHERWISE = {
    "paligemma2": (-1, r"language_model.*self_attn$", "the picture alone is counted as the prefix, not the prompt too"),
    "qwen2_audio": (1, "^$", "the padding of a clip is billed, as the tower computes it, although masked"),
    "pixtral": (0, "patch_conv", "what fills images up to the largest of a pack is not billed"),
    "gemma4": (-1, "vision_tower", "patches that fill every image up to the most it may have are not billed"),
    "mistral3": (0, "patch_conv", "what fills images up to the largest of a pack is not billed"),
    "lighton_ocr": (0, "patch_conv", "what fills images up to the largest of a pack is not billed"),
    "lfm2_vl": (-1, "vision_tower", "patches that fill tiles up to the most they may have are not billed"),
}
_VANISHED = 1e-3  # of the largest gradient's norm; smaller ones (key biases' are zero but for rounding) count as that


class FamilyPair:
    """A family's model twice, and the samples of a pack: one image, none, two, one.

    Args:
        family: one of `VLM_FOLDERS`.
        folder: where its files go.
    """

    def __init__(self, family, folder):
        torch.manual_seed(0)
        self.family = family
        model = write_vlm(folder / "model", family, weights=True)
        self.model, self.reference = load_model(model).train(), load_model(model, attention="eager").train()
        for module in [*self.model.modules(), *self.reference.modules()]:
            for name in ("p", "dropout", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        config = self.model.config
        self.encoder = Encoder(load_processor(model), rope_index(self.model), patch_size=patch_size_of(config))
        media = [names[:1] for names in _MEDIA] if family in ONE_IMAGE else _MEDIA
        self.chats = read_samples(_write_chats(folder, "audio" if family in SPEECH else "image", media))
        self.samples = [self.encoder.encode(chat) for chat in self.chats]
        self.collate = Collator(
            geometry=vision_geometry(self.model),
            pixel_scale=self.encoder.pixel_scale,
            position_rows=1 if self.encoder.rope_index is None else 3,
            blank=self.encoder.blank_image(),
        )
        self.batch = self.collate(self.samples)

    @functools.cached_property
    def cost(self):
        """The family's cost model."""
        return trace(self.reference)

    def alone(self):
        """Losses of the samples, each run by transformers alone, and gradients of their sum."""
        self.reference.zero_grad()
        losses = []
        for sample in self.samples:
            logits = self.reference(**self._arguments(sample), use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1].float(), sample.labels_S[1:], reduction="sum")
            loss.backward()
            losses.append(loss.item())
        return losses, _gradients(self.reference)

    def packed(self, batch=None):
        """Losses of a pack's samples as Headway computes them, and gradients of their sum."""
        batch = self.batch if batch is None else batch
        self.model.zero_grad()
        logits = self.model(**batch.model_inputs()).logits[0]
        losses_T = F.cross_entropy(logits.float(), batch.labels_1T[0], reduction="none")
        losses_T.sum().backward()
        parts = losses_T.detach().split(batch.cu_seqlens_N.diff().tolist())
        return [part.sum().item() for part in parts], _gradients(self.model)

    def packing_error(self):
        """Largest relative difference of a sample's loss or a parameter's gradient between pack and samples alone."""
        (losses, gradients), (expected, expected_gradients) = self.packed(), self.alone()
        assert gradients.keys() == expected_gradients.keys()
        assert all(loss > 0 for loss in expected)
        floor = _VANISHED * max(gradient.norm().item() for gradient in expected_gradients.values())
        found = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
        for name, gradient in expected_gradients.items():
            found.append((gradients[name] - gradient).norm().item() / max(gradient.norm().item(), floor))
        return max(found)

    def leak(self):
        """Largest relative change of the other samples' losses when the first sample's text and picture change."""
        first = self.samples[0]
        ids_1T = self.batch.input_ids_1T.clone()
        text_S = torch.ones(first.tokens, dtype=torch.bool)
        text_S[: first.media_end] = False
        ids_1T[0, : first.tokens][text_S] = ids_1T[0, : first.tokens][text_S].flip(0)
        inputs = {"input_ids_1T": ids_1T}
        if "pixel_values" in self.batch.processed:
            pixels = self.batch.processed["pixel_values"].clone()
            axis = first.processed["pixel_values"].rule.axis
            pixels.select(axis, 0).copy_(1 - pixels.select(axis, 0))
            inputs["processed"] = {**self.batch.processed, "pixel_values": pixels}
        (before, _), (after, _) = self.packed(), self.packed(replace(self.batch, **inputs))
        assert before[0] != after[0]
        return max(abs(a - b) / a for a, b in zip(before[1:], after[1:], strict=True))

    def wrong_lengths(self):
        """Samples whose measured lengths are not their encoded ones."""
        pairs = zip(self.chats, self.samples, strict=True)
        return [chat.where for chat, sample in pairs if self.encoder.measure(chat) != sample.lengths]

    def unexplained_flops(self):
        """Modules whose FLOPs PyTorch counts otherwise than the cost model, on the samples' own tensors.

        The pack's count has to be the sum of its samples' counts.
        """
        cost, workloads, lines = self.cost, [], []
        for sample in self.samples:
            arguments = {**self._arguments(sample), "use_cache": False}
            workload = self.collate([sample]).workload
            form = SimpleNamespace(arguments=lambda *_, given=arguments: given)
            traced = patch("headway.tracing.verify.trace", lambda *_, **__: cost)  # once for all samples
            with traced, patch("headway.tracing.verify.inputs_for", lambda *_, given=form: given):
                found, unseen = verify(self.reference, workload)
            assert unseen == set()
            known = COUNTED_OTHERWISE.get(self.family, (0, "^$", ""))[1]
            lines += [line for line in found if line.explanation is None and not re.search(known, line.module)]
            workloads.append(workload)
        assert cost.count(self.batch.workload).total == sum(cost.count(each).total for each in workloads)
        assert cost.count(self.batch.workload) == cost.count(Workload.total(workloads))
        return lines

    def attended_flops(self):
        """FLOPs of attention, forward: by the cost model of the pack's workload, and by every call's own mask."""
        workload, called = self.batch.workload, []

        def counting(module, query, key, value, attention_mask=None, **options):
            pairs = _pairs(module, query, key, attention_mask, options)
            called.append(2 * query.shape[1] * (query.shape[3] + value.shape[3]) * pairs)
            return attention.attend(module, query, key, value, attention_mask, **options)

        AttentionInterface.register(attention.backend.NAME, counting)
        try:
            self.model(**self.batch.model_inputs())
        finally:
            AttentionInterface.register(attention.backend.NAME, attention.attend)
        rows = [row for row in self.cost.rows if row.op == "attention"]
        return sum(drivers.parse_driver(row.driver)(workload) * row.forward for row in rows), sum(called)

    def _arguments(self, sample):
        """A sample's tensors as the model's own processor gives them, positions left to the model."""
        arguments = self.collate([sample]).model_inputs()
        given = {"input_ids", "pixel_values", "image_grid_thw", "input_features", "feature_attention_mask"}
        given |= {"mm_token_type_ids", "token_type_ids", *sample.processed}
        found = {name: value for name, value in arguments.items() if name in given}
        if "feature_attention_mask" in found or self.model.config.model_type.endswith("thinker"):
            found["attention_mask"] = torch.ones_like(sample.input_ids_S[None])
        return found


def _pairs(module, query, key, mask, options):
    """Query-key pairs that one call's mask allows."""
    causal = bool(options.get("is_causal") if options.get("is_causal") is not None else getattr(module, "is_causal", 1))
    cu_N = options.get("cu_seq_lens_q")
    if cu_N is None and (causal or (isinstance(mask, SegmentMask) and mask.is_packed)):
        cu_N = options.get("pack_cu_seqlens")
    if isinstance(mask, SegmentMask):
        return sum(int(mask.allowed(*group).sum()) for group in mask.groups(cu_N))
    if mask is not None and mask.numel():
        return int(mask.expand(query.shape[0], 1, query.shape[2], key.shape[2]).sum())
    if query.shape[2] != key.shape[2]:  # a Q-Former's queries read its picture
        return query.shape[0] * query.shape[2] * key.shape[2]
    lengths = [query.shape[2]] * query.shape[0] if cu_N is None else cu_N.diff().tolist()
    window = options.get("sliding_window")
    if causal and window is not None:
        return masks.sliding_pairs(lengths, window)
    return masks.causal_pairs(lengths) if causal else masks.full_pairs(lengths)


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _write_chats(folder, kind, media_of_chats):
    rng = np.random.default_rng(7)
    for name, (height, width) in _PICTURES.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
    for name, length in _SOUNDS.items():
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(rng.integers(-9000, 9000, length, dtype=np.int16).tobytes())
    end = ".wav" if kind == "audio" else ".png"
    lines = []
    for number, media in enumerate(media_of_chats):
        parts = [{"type": kind, kind: name + end} for name in media]
        question = [*parts, {"type": "text", "text": "What is it? " * (number + 1)}]
        answer = [{"type": "text", "text": "A cat. " * (number + 1)}]
        lines.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file
