"""Sizes are read and printed as people mean them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.support.units import (
    GiB,
    KiB,
    MiB,
    Size,
    TiB,
    format_duration,
    format_rate,
    format_size,
    parse_count,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("17B", 17),
        ("64GiB", 64 * GiB),
        (" 64 GiB ", 64 * GiB),
        ("64gib", 64 * GiB),
        ("64Gi", 64 * GiB),
        ("1.5GiB", 3 * GiB // 2),
        ("2TiB", 2 * TiB),
        ("3Mi", 3 * MiB),
        ("3KiB", 3 * KiB),
        ("10GB", 10 * 1000**3),
        ("10G", 10 * 1000**3),
        ("1.5K", 1500),
        ("7MB", 7 * 1000**2),
        ("1T", 1000**4),
        ("64kB", 64000),
    ],
)
def test_a_size_is_binary_with_an_i_and_decimal_without(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "lots", "64 gallons", "GiB", "-1", "1e9", "1_000", "0x10", "64GiB!", "٣GiB", "80%", "1,5GiB", True, 1.5],
)
def test_what_is_not_a_size_is_refused_with_what_would_be_one(text: object) -> None:
    with pytest.raises(ValueError) as raised:
        parse_size(text)  # type: ignore[arg-type]
    assert str(raised.value) == f"{text!r} is not a size: use a number with KiB, MiB, GiB or TiB"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64g", "'64g' is ambiguous: write 64GiB, or 64GB (59.6 GiB)"),
        ("64 gb", "'64 gb' is ambiguous: write 64GiB, or 64GB (59.6 GiB)"),
        ("1.5m", "'1.5m' is ambiguous: write 1.5MiB, or 1.5MB (1.43 MiB)"),
        ("2048t", "'2048t' is ambiguous: write 2048TiB, or 2048TB (1862.65 TiB)"),
    ],
)
def test_a_size_that_others_read_otherwise_is_refused(text: str, said: str) -> None:
    for parse in (parse_size, Size.parse):
        with pytest.raises(ValueError) as raised:
            parse(text)
        assert str(raised.value) == said
    assert parse_count("128k") == 128_000


@pytest.mark.parametrize("text", ["0.5", "0.0001KiB", -1])
def test_a_size_is_a_whole_number_of_bytes_and_not_negative(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a size: it is"):
        parse_size(text)


def test_a_pool_size_may_be_a_percentage() -> None:
    assert Size.parse("80%") == Size(percent=80.0)
    assert Size.parse("12.5 %").of(1000) == 125
    assert Size.parse("100%").of((1 << 60) + 1) == (1 << 60) + 1
    assert Size.parse("64GiB") == Size(nbytes=64 * GiB)
    assert Size.parse("64GiB").of(5) == 64 * GiB
    assert (str(Size.parse("80%")), str(Size.parse("1536MiB"))) == ("80%", "1.5 GiB")


@pytest.mark.parametrize("text", ["0%", "100.1%", "0.0%"])
def test_a_percentage_is_more_than_0_and_at_most_100(text: str) -> None:
    with pytest.raises(ValueError, match="a percentage is more than 0 and at most 100"):
        Size.parse(text)


def test_a_bad_pool_size_is_told_that_a_percentage_would_do() -> None:
    with pytest.raises(ValueError) as raised:
        Size.parse("64 gallons")
    said = "'64 gallons' is not a size: use a number with KiB, MiB, GiB or TiB, or a percentage such as 80%"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (64 * GiB, "64 GiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (GiB - 1, "1 GiB"),
        (10_000_000_000, "9.31 GiB"),
        (3000 * TiB, "3000 TiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back_to_within_its_two_decimals(nbytes: int) -> None:
    text = format_size(nbytes)
    unit = parse_size("1" + text.split()[1])
    number = float(text.split()[0])
    assert abs(number * unit - nbytes) <= 0.00501 * unit + nbytes * 1e-9
    assert number < 1024 or unit == TiB


@given(st.integers(0, 1 << 50), st.sampled_from(["B", "KiB", "Mi", "GB", "T"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * parse_size(f"1{unit}")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0 B/s"), (55.3e9, "55.3 GB/s"), (999.96e6, "1 GB/s"), (4.2e5, "420 kB/s"), (2.0e15, "2000 TB/s")],
)
def test_rates_are_printed_in_decimal_units(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (58e-6, "58 µs"),
        (0.0013, "1.3 ms"),
        (0.99999, "1 s"),
        (2.8, "2.8 s"),
        (59.96, "1 min"),
        (125.0, "2 min 5 s"),
        (3599.6, "1 h"),
        (3720.0, "1 h 2 min"),
        (90_000.0, "25 h"),
    ],
)
def test_durations_are_printed_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
