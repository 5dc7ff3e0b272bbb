"""Modules that a plain forward pass leaves alone: what reaches them is named, what nothing reaches costs nothing."""

import pytest
import torch

from headway.tracing import trace
from headway.tracing.build import model_class
from headway.tracing.inputs.model_inputs import Inputs
from headway.tracing.verify import verify
from helpers.counter import count_forward
from helpers.models import IMAGE_FAMILIES, tiny_config

CPU = torch.device("cpu")


def real(family, **options):
    torch.manual_seed(0)
    config = tiny_config(family)
    for name, value in options.items():
        setattr(config, name, value)
    return model_class(config)._from_config(config, dtype=torch.float32)


def all_equal(model):
    lines, unseen = verify(model, Inputs(model).workloads()[2])
    return not unseen and all(line.explanation is not None for line in lines)


@pytest.mark.skipif("granite_docling" not in IMAGE_FAMILIES, reason="transformers 5.17 has no Granite-Docling")
def test_a_route_that_an_argument_chooses_is_left_out_by_its_name():
    model = real("granite_docling")
    cost = trace(model)
    assert (cost.unknown, cost.source["without"]) == ((), "tile_fine_mask")
    assert all_equal(model)  # a real step without the argument runs the coarse route, and no other
    ((name, fine),) = Inputs(model).routed()
    (workload, *_) = fine.workloads()
    _, seen = count_forward(model, fine.arguments(workload, CPU))
    # 16 tokens of a tile of 8 x 8 patches in place of 4: positions are asked of the model on this route
    assert name == "tile_fine_mask"
    assert fine.positions(workload) == 4 * (Inputs(model).positions(workload) - 1) + 1
    assert any("connector.fine" in path for path in seen)
    assert not any("connector.coarse" in path for path in seen)


@pytest.mark.slow
@pytest.mark.skipif("minicpm_ocr" not in IMAGE_FAMILIES, reason="transformers 5.17 has no MiniCPM-OCR")
def test_a_merger_that_the_configuration_passes_by_is_unused():
    passed, taken = real("minicpm_ocr"), real("minicpm_ocr", downsample_mode="16x")
    cost = trace(passed)
    assert (cost.unknown, cost.source["unused"]) == ((), "model.vision_tower.vit_merger")
    assert all_equal(passed)
    cost = trace(taken)
    assert "unused" not in cost.source
    assert any("vit_merger" in row.module for row in cost.rows)
    assert all_equal(taken)
