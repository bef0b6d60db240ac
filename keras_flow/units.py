"""Numbers for a reader: bytes in one unit everywhere, counts and ranks with their noun.

1 kB is 1,000 bytes, 1 MB is 1,000 kB (SI, as disks and networks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def amount(bytes_: float) -> str:
    """Bytes as text, in the largest unit that they fill.

    Example:
        >>> amount(512), amount(2048), amount(1.5e9)
        ('512 B', '2.048 kB', '1.5 GB')
    """
    for unit, size in _UNITS:
        if bytes_ >= size:
            return f"{bytes_ / size:.4g} {unit}"
    return f"{bytes_:g} B"


def finite(value: Any) -> Any:
    """A structure for JSON, which has no number for what is not finite: those are None.

    Example:
        >>> finite({"share": [0.5, float("inf")]})
        {'share': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(part) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [finite(part) for part in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, what: str) -> str:
    """A number of things, with the noun in its number.

    Example:
        >>> counted(1, "place"), counted(3, "place")
        ('1 place', '3 places')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def numbered(numbers: Sequence[int], what: str = "rank", whats: str = "", most: int | None = None) -> str:
    """The noun in its number, and the numbers.

    Args:
        numbers: the numbers to show.
        what: one of them.
        whats: several of them; empty: `what` with an s.
        most: numbers that are shown, at most; None: all.

    Example:
        >>> numbered([3]), numbered([3, 4], "process", "processes"), numbered(range(20), most=2)
        ('rank 3', 'processes 3, 4', 'ranks 0, 1 ...')
    """
    shown = ", ".join(map(str, numbers[:most])) + (" ..." if most is not None and len(numbers) > most else "")
    return f"{what if len(numbers) == 1 else whats or what + 's'} {shown}"


def megabytes(bytes_: float) -> str:
    """Bytes as a number of MB, for a column whose head names the unit.

    Example:
        >>> megabytes(138_240)
        '0.138'
        >>> megabytes(5_123), megabytes(40)
        ('0.0051', '0.000040')
    """
    return f"{bytes_ / 1e6:.{3 if bytes_ >= 10_000 or not bytes_ else 4 if bytes_ >= 50 else 6}f}"


def decimal(value: float, digits: int = 4) -> str:
    """A loss or a metric, for a column: with so many decimals, or where these say little with so many digits.

    Example:
        >>> decimal(0.25), decimal(3e-5), decimal(1e8), decimal(float("inf"))
        ('0.2500', '3e-05', '1e+08', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.{digits}f}" if not value or 1e-3 <= abs(value) < 1e6 else f"{value:.{digits}g}"
