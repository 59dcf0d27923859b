from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_toolkit.reporting import formatting as fmt

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
_DIGITS = {ord(s): str(d) for d, s in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {ord("⁻"): "-", 0x2212: "-"}


def spaced(text: str) -> str:
    return text.replace("\N{NARROW NO-BREAK SPACE}", " ")


def parsed(text: str) -> float:
    """Read back what the report writes."""
    plain = text.translate(_DIGITS).replace("\N{NARROW NO-BREAK SPACE}", "")
    mantissa, times, power = plain.partition("\N{MULTIPLICATION SIGN}10")
    return float(mantissa) * 10.0 ** int(power) if times else float(mantissa)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30))
def test_significant_digits_read_back_to_half_a_unit(value):
    back = parsed(fmt.significant(value))
    # Three significant digits are off by at most half a unit of the third: 0.5 %.
    assert math.isclose(back, value, rel_tol=5.001e-3, abs_tol=1e-300)


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
def test_a_share_strictly_between_never_reads_as_none_or_all(value):
    text = fmt.share(value).text
    number = re.sub(r"[^\d.]", "", text)
    assert text.startswith(("<", ">")) or 0 < float(number) < 100


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "100"),
        (0.5, "50.0"),
        (0.0512, "5.1"),
        (0.00123, "0.12"),
        (-0.02, "\N{MINUS SIGN}2.0"),
    ],
)
def test_shares(value, expected):
    assert fmt.share(value).text == f"{expected}\N{NARROW NO-BREAK SPACE}%"


@pytest.mark.parametrize(
    "write", [fmt.share, fmt.relative, fmt.decibel, fmt.factor, fmt.plain, fmt.microseconds]
)
@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_is_missing_is_a_dash_and_sorts_as_missing(write, missing):
    quantity = write(missing)
    assert (quantity.raw, quantity.text, quantity.sort_key) == (None, DASH, "")


@pytest.mark.parametrize("write", [fmt.share, fmt.decibel, fmt.factor, fmt.plain])
def test_infinities_are_written_and_sort(write):
    assert "∞" in write(math.inf).text
    assert write(math.inf).sort_key == "inf"
    assert write(-math.inf).text.startswith("\N{MINUS SIGN}")


def test_large_numbers_are_grouped_not_rounded():
    assert spaced(fmt.count(1234567).text) == "1 234 567"
    assert fmt.significant(1321) == "1321"
    assert spaced(fmt.significant(123456.7)) == "123 457"


def test_interval_needs_both_ends():
    assert spaced(fmt.interval(fmt.share(0.01), fmt.share(0.2))) == "[1.0 %, 20.0 %]"
    assert fmt.interval(fmt.share(None), fmt.share(0.2)) == ""
    assert spaced(fmt.interval(fmt.share(0.2), fmt.share(0.2))) == "[20.0 %]"


def test_shape_and_flops():
    assert fmt.shape(1, 4096, 1, 39) == "4096x1x39".replace("x", TIMES)
    assert fmt.shape(64, 50, 50, 32) == "64·(50x50x32)".replace("x", TIMES)
    assert spaced(fmt.flops(0.0)) == "0 FLOP"
    assert spaced(fmt.flops(9.4e11)) == "940 GFLOP"


def test_json_of_a_configuration_keeps_what_json_does_not_know():
    assert fmt.json_text({"b": 1, "a": {"c": math.pi}}).startswith('{\n  "a"')
    assert "object" in fmt.json_text({"odd": object()})
