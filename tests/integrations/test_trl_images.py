"""GRPO of models that see: prompts with images, generated, scored and learnt from to the FLOP."""

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationMixin
from trl import GRPOConfig, GRPOTrainer

from headway import Workload, trace
from headway.models import load_processor
from helpers.folders import write_vlm
from helpers.rollouts import check_sums, flops, metered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # TRL asks for it
]

SIZES = [(64, 48), (96, 64), (40, 80), (64, 64)]  # width, height of each prompt's picture [pixels]
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_pictures_of_prompts_are_seen_in_each_phase(tmp_path, monkeypatch, family):
    rows, grids = [], []  # lengths of prompts and answers; grids of their pictures, in order [patches]
    generate = GenerationMixin.generate
    torch.manual_seed(1)
    model_folder = str(write_vlm(tmp_path / "model", family, weights=True))
    processor = load_processor(model_folder)
    processor.tokenizer.padding_side = "left"  # as TRL loads it
    end = processor.tokenizer.eos_token_id

    def recorded(self, **kwargs):
        ids = generate(self, **kwargs)
        answers = ids[:, kwargs["input_ids"].shape[1] :].tolist()
        for mask, row in zip(kwargs["attention_mask"].tolist(), answers, strict=True):
            rows.append((sum(mask), row.index(end) + 1 if end in row else len(row)))
        grids.extend(kwargs["image_grid_thw"].tolist())
        return ids

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    prompt = [{"role": "user", "content": "Which picture is it?"}]
    run, _ = metered(
        GRPOTrainer, GRPOConfig, tmp_path, model_folder, lambda completions, **_: [len(str(c)) for c in completions],
        data=Dataset.from_list([{"prompt": prompt, "image": Image.new("RGB", size)} for size in SIZES]),
        given={"processing_class": processor}, max_completion_length=6, num_generations=2, beta=0.1, max_steps=2,
        per_device_train_batch_size=4,
        # marks of media in an answer would be taken for media
        generation_kwargs={"suppress_tokens": processor.tokenizer.convert_tokens_to_ids([*MARKS])},
    )  # fmt: skip
    ledger = trace(AutoModelForImageTextToText.from_pretrained(model_folder))
    assert len(rows) == len(grids) == 8
    answers = sum(a for _, a in rows)
    rollout = Workload([p + a - 1 for p, a in rows], images=grids, logits=answers)
    learnt = Workload([p + a for p, a in rows], images=grids)
    phases = flops(run)
    assert phases["rollout"].total == ledger.count(rollout, forward_only=True).total
    assert phases["reference"].total == ledger.count(learnt, forward_only=True).total
    assert phases["update"] == ledger.count(learnt)
    assert run.entries["images"] == 8
    assert any(name.startswith("vision") for name in phases["rollout"].by_component())
    check_sums(run)
