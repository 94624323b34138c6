"""Numbers as people read them."""

from __future__ import annotations

from slot_cache.lab.stats import Sample, ratio


def milliseconds(value: float) -> str:
    """A time with about three digits: 4.56 ms, 45.6 ms, 456 ms, 45,600 ms."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} ms"


def span(values: Sample) -> str:
    """The median and, in brackets, the smallest and the largest value."""
    return f"{milliseconds(values.median)} ({milliseconds(values.low)} to {milliseconds(values.high)})"


def times(part: float, whole: float, *, digits: int = 1) -> str:
    """How many times as much: "3.2 x", "-" when there is nothing to compare with."""
    quotient = ratio(part, whole)
    return "-" if quotient is None else f"{quotient:.{digits}f} x"


def share(value: float | None) -> str:
    """A share of 1 with two digits, never rounded up to 1.00; "-" for None."""
    if value is None:
        return "-"
    return "1.00" if value >= 1 else f"{min(value, 0.994):.2f}"
