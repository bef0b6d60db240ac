"""Bytes for a reader, in one unit everywhere: 1 kB is 1,000 bytes, 1 MB is 1,000 kB (SI, as disks and networks)."""

from __future__ import annotations

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


def counted(number: int, what: str) -> str:
    """A number of things, with the noun in its number.

    Example:
        >>> counted(1, "place"), counted(3, "place")
        ('1 place', '3 places')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def megabytes(bytes_: float) -> str:
    """Bytes as a number of MB, for a column whose head names the unit.

    Example:
        >>> megabytes(138_240)
        '0.138'
        >>> megabytes(5_123)
        '0.0051'
    """
    return f"{bytes_ / 1e6:.3f}" if bytes_ >= 10_000 or not bytes_ else f"{bytes_ / 1e6:.4f}"
