"""The laws that a family of models has to keep before it may be trained on packs.

A small model of the family's own classes is built twice, with the same weights: as transformers made it, with eager
attention, and as Headway trains it. The first never sees a pack, nor Headway's attention, positions or lengths.
"""

import functools
import json
import re
import wave
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AttentionInterface

from headway.count import Workload, drivers, masks
from headway.data import Encoder, read_samples
from headway.data.collate import Collator
from headway.models import attention, load_model, load_processor, rope_index
from headway.models.attention.masks import SegmentMask
from headway.models.vision import patch_size_of, vision_geometry
from headway.tracing import trace
from headway.tracing.verify import verify
from helpers.vlm_folders import write_vlm

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
        family: one of `vlm_folders.VLM_FOLDERS`.
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
        return sum(drivers.parse(row.driver)(workload) * row.forward for row in rows), sum(called)

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
    if cu_N is None and causal:
        cu_N = options.get("pack_cu_seqlens")
    if isinstance(mask, SegmentMask):
        return sum(int(mask.allowed(*group).sum()) for group in mask.groups(cu_N))
    if mask is not None and mask.numel():
        return int(mask.expand(query.shape[0], 1, query.shape[2], key.shape[2]).sum())
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
