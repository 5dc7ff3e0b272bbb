"""A training step on answers that share prompts, on a pretended CUDA device: the kernels are called, no host waits."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from fake_cuda import steps
from fake_cuda.device import instead_of_flex, pretend_cuda
from fake_cuda.watch import Watch
from headway.data.collate import Collator
from headway.data.encoded import with_prompt_once
from headway.models.load import rope_index
from headway.models.precision import choose_precision
from headway.models.vision import vision_geometry


def preference(config, rule, *lengths):
    """Answers of so many tokens behind a picture and a few words."""
    answers = [steps.encoded(config, rule, length, [[1, 8, 8]], is_video=False) for length in lengths]
    prompt = answers[0].media_end + 3
    for answer in answers:
        answer.labels_S[: prompt + 1] = -100
    return with_prompt_once([replace(answer) for answer in answers], prompt)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_does_not_wait_for_the_device(recompute):
    settings = steps.recipe("qwen2.5-vl-7b-dpo-32768", f"speed.recompute={recompute}")
    config = steps.shallow(steps.model_of(settings), 2)
    with pretend_cuda() as device, steps._environment(ahead=True):
        precision = choose_precision(settings.run, device)
        trained = steps._trained(settings, config, precision, device)
        rule = rope_index(trained.model)
        collate = Collator(
            geometry=vision_geometry(trained.model), pixel_scale=steps._scale(trained.model.config), bucket_tokens=128
        )
        batch = collate([preference(config, rule, 60, 50, 70), preference(config, rule, 90, 40)]).dealt(None)
        assert batch.workload.num_images == 2
        calls = []

        def flex(*tensors, **how):
            calls.append(how["block_mask"])
            return instead_of_flex(*tensors, **how)

        with Watch() as watch, patch("headway.models.attention.splits._flex", lambda: flex):
            watch.sites = None
            steps._place(trained.model, device)
            found = steps._step(settings, trained, precision, batch, device, watch)
    assert found.waits == ()
    assert len(calls) == 2 * (2 if recompute == "full" else 1)  # of each layer
    assert len({id(mask) for mask in calls}) == 1
    assert torch.equal(batch.splits.place_4T.unique(dim=1)[0].unique(), torch.arange(3))  # and the padding
