import pytest

from headway.errors import ConfigError
from headway.explain.products import OTHERS, gemms_of
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, two_kernels_a_step

pytestmark = pytest.mark.own_peak


def products(tmp_path, **options):
    """Two products of 512 x 256 x 128 in 10 us each, a batch of 4 in 5 us, and attention in 20 us."""
    trace = WrittenTrace()
    bf16 = "c10::BFloat16"
    for i in (0, 1):
        operands = [[512, 128], [128, 256]], bf16
        trace.launched("gemm", 10 * i * US, (100 + 10 * i) * US, 10 * US, 1 + i, operator="aten::mm", operands=operands)
    operands = [[4, 64, 32], [4, 32, 16]], bf16
    trace.launched("gemm", 30 * US, 120 * US, 5 * US, 3, operator="aten::bmm", operands=operands)
    trace.launched("flash", 40 * US, 125 * US, 20 * US, 4, operator="aten::_scaled_dot_product_flash_attention")
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H200"}])
    return explain([read_trace(path)], as_one_step=True, **options)


def test_products_are_joined_by_size_and_have_a_rate(tmp_path):
    found = products(tmp_path).steps[0]
    one, batch, rest = gemms_of(found)
    flops = 2 * 512 * 256 * 128
    assert (one.name, one.calls, one.ns) == ("512x256x128", 2, 20 * US)
    assert one.flops_per_s == pytest.approx(2 * flops / 20e-6)
    assert one.of_ceiling == pytest.approx(one.flops_per_s / 989.4e12, rel=1e-3)  # the H200's peak in bf16
    assert (batch.name, batch.calls, batch.ns) == ("4*64x16x32", 1, 5 * US)
    assert (rest.name, rest.ns, rest.flops_per_s) == (OTHERS, 20 * US, None)
    assert one.to_dict()["flops"] == 2 * flops


def test_a_stated_peak_takes_the_place_of_the_tables(tmp_path):
    found = gemms_of(products(tmp_path, device="1e13").steps[0])
    assert found[0].of_ceiling == pytest.approx(found[0].flops_per_s / 1e13)


@pytest.mark.parametrize("markdown", [True, False])
def test_products_are_a_table_of_their_own(tmp_path, markdown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = as_text(products(tmp_path), "gemm", markdown=markdown)
    assert "of ceiling" in text
    assert "512x256x128" in text
    assert "67.1 MFLOP" in text


def test_a_trace_without_shapes_is_an_error_with_a_way_out(tmp_path):
    found = explain([read_trace(two_kernels_a_step(3).write(tmp_path / "t.json"))])
    with pytest.raises(ConfigError, match=r"t\.json has no shapes.*record_shapes=True.*by='kernel'"):
        gemms_of(found.steps[0])
