import pytest

from headway.report import format_bytes, format_count, format_duration, format_flops, format_rate, format_share


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1000, "1.0 kFLOP"),
        (999_960, "1.0 MFLOP"),
        (421651971833856, "421.7 TFLOP"),
        (3e30, "3000000.0 YFLOP"),
    ],
)
def test_flops_get_a_decimal_prefix(flops, text):
    assert format_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.000999, "999 us"),
        (0.9999e-3, "1 ms"),
        (0.9996, "1.00 s"),
        (59.994, "59.99 s"),
        (59.996, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
    ],
)
def test_durations_never_print_a_full_next_unit(seconds, text):
    assert format_duration(seconds) == text


def test_the_other_formatters():
    assert format_rate(66.9e12) == "66.9 TFLOP/s"
    assert format_share(1) == "100.0 %"
    assert format_count(1234567) == "1,234,567"
    assert format_count(1234.56) == "1,234.6"
    assert [format_bytes(n) for n in (0, 1023, 1024, 1024**2 - 1, 80 * 2**30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "80.0 GiB",
    ]  # fmt: skip
