"""Which names may be meant by one that there is not: for errors.

Names of variables are paths, whose parts most of them share. So names are compared part by part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

#: likeness, by `difflib`, from which a name may be meant
_NEAR = 0.6


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names like one that there is not, best first; empty where none is.

    Args:
        name: a path, the end of one, or a regular expression for either.
        names: paths.
        count: how many, at most.

    Example:
        >>> nearest("hiden/kernel", ["model/hidden/kernel", "model/hidden/bias", "model/out/kernel"])
        ['model/hidden/kernel']
    """
    # letters alone, as `SequenceMatcher` knows no regular expressions
    plain = re.sub(r"\\[a-zA-Z]|[\\^$.*+?()\[\]{}|]", "", re.sub(r"\.[*+]", "/", name))
    parts = [part for part in plain.split("/") if part]
    likeness = {each: _likeness(parts, each.split("/")) for each in names}
    near = [each for each, (alike, _) in likeness.items() if alike >= _NEAR]
    return sorted(near, key=likeness.__getitem__, reverse=True)[:count]


def or_examples(name: str, names: Sequence[str]) -> str:
    """What an error says of the names that there are: those like one that there is not, else some examples.

    Example:
        >>> or_examples("hiden/kernel", ["model/hidden/kernel", "model/hidden/bias", "model/out/kernel"])
        "the nearest path is 'model/hidden/kernel'"
        >>> or_examples("conv/kernel", ["model/hidden/kernel", "model/out/kernel"])
        "no path is like it; there are, for example, 'model/hidden/kernel', 'model/out/kernel'"
    """
    if near := nearest(name, names):
        return f"the nearest path{'s are' if len(near) > 1 else ' is'} {', '.join(map(repr, near))}"
    examples = ", ".join(map(repr, list(dict.fromkeys(names))[:3]))
    return f"no path is like it; there are, for example, {examples}" if examples else "there are no paths"


def _likeness(parts: Sequence[str], path: Sequence[str]) -> tuple[float, float]:
    """How alike the end of a name and a path are, 0 to 1, by their most different parts; then the whole of both.

    Of a name with several parts at least two must be alike, since the last one, as `kernel`, is that of many.
    """
    each = [1.0 if part in path else max((_ratio(part, other) for other in path), default=0.0) for part in parts]
    ends = [min(each[-length:]) for length in range(min(2, len(parts)), len(parts) + 1) if length]
    return max(ends, default=0.0), _ratio("/".join(parts), "/".join(path))


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()
