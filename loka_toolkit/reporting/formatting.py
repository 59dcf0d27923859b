"""How numbers are written in a report: every rounding is decided here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

MISSING = "\N{EN DASH}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_MINUS = "\N{MINUS SIGN}"
_THIN = "\N{NARROW NO-BREAK SPACE}"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number and how it is written.

    Attributes:
        raw: The number; None where there is none.
        text: How it is written.
    """

    raw: float | None
    text: str

    @property
    def sort_key(self) -> str:
        """The number for sorting, or an empty string where there is none."""
        return "" if self.raw is None else f"{self.raw:.8g}"


def known(value: float | None) -> float | None:
    """Return the value if it is a number: NaN counts as missing, infinities do not."""
    return None if value is None or math.isnan(value) else float(value)


def significant(value: float | None, digits: int = 3) -> str:
    """Write a number with ``digits`` significant digits, as plainly as it allows."""
    number = known(value)
    if number is None:
        return MISSING
    if math.isinf(number):
        return f"{_MINUS if number < 0 else ''}∞"
    if number == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{number:.{digits - 1}e}"))))
    if -4 <= exponent < 6:
        decimals = max(0, digits - 1 - exponent)
        return _signed(f"{number:.{decimals}f}", grouped=exponent >= 4)
    mantissa, _, power = f"{number:.{digits - 1}e}".partition("e")
    return f"{_signed(mantissa)}{_TIMES}10{str(int(power)).translate(_SUPERSCRIPTS)}"


def share(value: float | None) -> Quantity:
    """Write a share in [0, 1] in per cent; what is neither 0 nor 1 never reads 0 % or 100 %."""
    number = known(value)
    if number is None or math.isinf(number):
        return Quantity(number, significant(number))
    percent = 100.0 * number
    if percent in (0.0, 100.0):
        return Quantity(number, f"{percent:.0f}{_THIN}%")
    if 0.0 < percent < 0.01:
        return Quantity(number, f"<{_THIN}0.01{_THIN}%")
    if 99.99 < percent < 100.0:
        return Quantity(number, f">{_THIN}99.99{_THIN}%")
    far = min(percent, 100.0 - percent)
    decimals = 2 if 0 < far < 1 else 1 if percent < 99.95 else 2
    return Quantity(number, f"{_signed(f'{percent:.{decimals}f}')}{_THIN}%")


def relative(value: float | None) -> Quantity:
    """Write a relative change (of the loss) in per cent, two significant digits."""
    number = known(value)
    if number is None:
        return Quantity(None, MISSING)
    return Quantity(number, f"{significant(100.0 * number, 2)}{_THIN}%")


def decibel(value: float | None) -> Quantity:
    """Write decibels with one decimal."""
    number = known(value)
    if number is None or math.isinf(number):
        return Quantity(number, significant(number))
    return Quantity(number, f"{_signed(f'{number:.1f}')}{_THIN}dB")


def factor(value: float | None) -> Quantity:
    """Write a speed-up."""
    number = known(value)
    if number is None or math.isinf(number):
        return Quantity(number, significant(number))
    return Quantity(number, f"{number:.2f}{_TIMES}")


def plain(value: float | None, digits: int = 3) -> Quantity:
    """Write a number with significant digits."""
    return Quantity(known(value), significant(value, digits))


def microseconds(value: float | None) -> Quantity:
    """Write a time given in microseconds."""
    number = known(value)
    return Quantity(number, MISSING if number is None else f"{significant(number)}{_THIN}µs")


def count(value: int) -> Quantity:
    """Write a whole number, thousands grouped."""
    return Quantity(float(value), f"{value:,}".replace(",", _THIN).replace("-", _MINUS))


def flops(value: float) -> str:
    """Write a number of floating-point operations with its prefix."""
    if not math.isfinite(value):
        return f"{significant(value)} FLOP"
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{significant(value / limit)}{_THIN}{prefix}FLOP"
    return f"{significant(value)}{_THIN}FLOP"


def interval(low: Quantity, high: Quantity) -> str:
    """Write an interval; empty where an end is missing."""
    if low.raw is None or high.raw is None:
        return ""
    if low.text == high.text:
        return f"[{low.text}]"
    return f"[{low.text}, {high.text}]"


def shape(batch: int, m: int, n: int, k: int) -> str:
    """Write the dimensions of a product as M x N x K, with the batch before it unless it is 1."""
    dims = _TIMES.join(map(str, (m, n, k)))
    return dims if batch == 1 else f"{batch}·({dims})"


def tick(value: float) -> str:
    """Write the label of an axis: short, and exact for the round numbers that ticks are."""
    if value == 0 or abs(value) < 1e-15:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.6g}".replace("-", _MINUS)
    return significant(value, 2)


def extent(rows: int, columns: int) -> str:
    """Write the dimensions of a matrix."""
    return f"{rows}{_TIMES}{columns}"


def power_of_two(exponent: int) -> str:
    """Write a power of two with its exponent raised."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """Write a count and its noun."""
    return f"{count(number).text} {one if number == 1 else many or one + 's'}"


def listing(items: list[str]) -> str:
    """Join words with commas and a final ``and``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def json_text(value: Mapping[str, Any]) -> str:
    """Write a configuration as indented JSON; what JSON does not know is written as text."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True, default=str)


def _signed(text: str, *, grouped: bool = False) -> str:
    if grouped:
        text = f"{float(text):,.{len(text.partition('.')[2])}f}".replace(",", _THIN)
    return text.replace("-", _MINUS)
