import numpy as np
import pytest

from headway.count import Workload, load_cost_model
from headway.errors import WorkloadError
from headway.packing.budget import grid_costs, patch_costs, segment_costs, square_grid


def test_samples_cost_together_what_the_model_counts_for_the_pack():
    """Costs add up over segments and images, so the table's sum is the count of all at once."""
    model = load_cost_model("qwen2.5-vl-7b")
    segments, grids = [700, 3, 700, 41], [(1, 32, 48), (1, 16, 16), (1, 32, 48)]
    counted = model.count(Workload(segments, images=grids)).total
    planned = segment_costs(model, np.array(segments)).sum() + grid_costs(model, np.array(grids)).sum()
    assert planned == pytest.approx(counted, rel=1e-12)


def test_patches_alone_cost_what_a_square_picture_of_them_costs():
    model = load_cost_model("qwen2.5-vl-7b")
    text = model.count(Workload([1])).total
    square = model.count(Workload([1], images=[(1, 32, 32)])).total - text
    assert patch_costs(model, np.array([1024, 0, 1024])).tolist() == [square, 0, square]
    # 1000 patches fill no whole square: in proportion to the next picture that does
    assert patch_costs(model, np.array([1000]))[0] == pytest.approx(square * 1000 / 1024)


@pytest.mark.parametrize(
    ("patches", "side", "grid"), [(1, 2, (1, 2, 2)), (4, 2, (1, 2, 2)), (24, 2, (1, 4, 6)), (256, 1, (1, 16, 16))]
)
def test_the_square_picture(patches, side, grid):
    assert square_grid(patches, side) == grid


def test_patches_for_a_model_without_eyes_are_refused():
    with pytest.raises(WorkloadError, match="no vision tower"):
        patch_costs(load_cost_model("gpt2"), np.array([4]))
