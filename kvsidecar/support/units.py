"""Parses and formats sizes, rates and durations.

Sizes follow the notation of Kubernetes: ``KiB``/``Ki`` and so on are powers of 1024, ``KB``/``K`` and so on powers of
1000. ``64g`` is neither: Docker and Java mean 64 GiB by it. Sizes are printed in binary units, rates in decimal ones
(GB/s), as is usual for links and drivers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_AMBIGUOUS = re.compile(r"\s*([\d.]+)\s*([kmgt])b?\s*", re.ASCII)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``64GiB``, ``1.5 GiB``, ``16Gi``, ``10GB`` or ``4096``.

    Raises:
        ValueError: not a size, an ambiguous one, or not a whole number of bytes. The text starts with the value's
            ``repr``.
    """
    nbytes = parse_count(text)
    if isinstance(text, str) and (found := _AMBIGUOUS.fullmatch(text)):
        number, letter = found[1], found[2].upper()
        decimal = f"{number}{letter}B ({format_size(nbytes)})"
        raise ValueError(f"{text!r} is ambiguous: write {number}{letter}iB, or {decimal}")
    return nbytes


def parse_count(text: str | int) -> int:
    """A number of tokens such as ``128k``, which is 128,000, or ``128Ki``; or of bytes.

    Raises:
        ValueError: see `parse_size`; but nothing is ambiguous.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text!r} is not a size: it is negative")
        return text
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size: use a number with KiB, MiB, GiB or TiB")
    nbytes = Decimal(found[1]) * unit
    if nbytes != int(nbytes):
        raise ValueError(f"{text!r} is not a size: it is not a whole number of bytes")
    return int(nbytes)


@dataclass(frozen=True, slots=True)
class Size:
    """A size in bytes, or a percentage of a size that is known later: exactly one of the two."""

    nbytes: int | None = None
    percent: float | None = None
    """More than 0, at most 100."""

    @classmethod
    def parse(cls, text: str | int) -> Size:
        """A size as `parse_size` reads it, or a percentage such as ``80%``.

        Raises:
            ValueError: it is neither. The text starts with the value's ``repr``.
        """
        found = _PERCENT.fullmatch(text) if isinstance(text, str) else None
        if found:
            percent = float(found[1])
            if not 0 < percent <= 100:
                raise ValueError(f"{text!r} is not a size: a percentage is more than 0 and at most 100")
            return cls(percent=percent)
        try:
            return cls(nbytes=parse_size(text))
        except ValueError as error:
            hint = ", or a percentage such as 80%" if str(error).endswith("TiB") else ""
            raise ValueError(f"{error}{hint}") from None

    def of(self, whole: int) -> int:
        """Bytes, rounded down; ``whole`` is 100 %."""
        if self.nbytes is not None:
            return self.nbytes
        return int(whole * Decimal(str(self.percent)) / 100)

    def __str__(self) -> str:
        return format_size(self.nbytes) if self.nbytes is not None else f"{self.percent:g}%"


def format_size(nbytes: int) -> str:
    """``64 GiB``, ``1.5 GiB``, ``512 B``: at most two decimals, so two close sizes may look the same."""
    return _in_units(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), decimals=2)


def format_rate(bytes_per_second: float) -> str:
    """``55.3 GB/s``: decimal units."""
    return _in_units(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"), decimals=1)


def format_duration(seconds: float) -> str:
    """``58 µs``, ``1.3 ms``, ``2.8 s``, ``2 min 5 s``, ``1 h 2 min``."""
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s")):
        if seconds < limit:
            return f"{_short(seconds * factor, 1)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def count(number: int, noun: str) -> str:
    """``1 job``, ``2,000 jobs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _in_units(value: float, step: int, units: tuple[str, ...], *, decimals: int) -> str:
    exponent = 0
    # 1023.995 rounds to 1024, which belongs to the next unit.
    while round(abs(value), decimals) >= step and exponent < len(units) - 1:
        value, exponent = value / step, exponent + 1
    return f"{_short(value, decimals)} {units[exponent]}"


def _short(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
