"""Rules as text: one pattern for the weights of blocks that are alike, and a line of `rules()` for each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

#: axis -> dim
Splits = Mapping[str, int]

_DIGITS = re.compile(r"\d+")
#: of more numbers in a path not all ways to leave some open are tried
_MOST_NUMBERS = 6


def patterns(rules: Mapping[str, Splits], paths: Collection[str]) -> dict[str, Splits]:
    r"""Rules of paths as patterns: where they are equal but for numbers in the path, one for all of them.

    Args:
        rules: path -> axis -> dim.
        paths: the paths of all variables of the model. A pattern matches only those of them that its rule is for.

    Example:
        >>> rules = {f"block{number}/up/kernel": {"model": 1} for number in range(3)}
        >>> patterns(rules, [*rules, "block0/down/kernel"])
        {'block\\d+/up/kernel$': {'model': 1}}
        >>> patterns(rules, [*rules, "block3/up/kernel"])
        {'block0/up/kernel$': {'model': 1}, 'block1/up/kernel$': {'model': 1}, 'block2/up/kernel$': {'model': 1}}
    """
    found: dict[str, Splits] = {}
    done: set[str] = set()
    for path, splits in rules.items():
        if path in done:
            continue
        best = f"^{re.escape(path)}$", {path}
        for pattern in _open_numbers(path):
            matched = {other for other in paths if re.search(pattern, other)}
            fits = all(other in rules and rules[other] == splits and other not in done for other in matched)
            # of equally many the plainest, which comes last
            if fits and len(matched) >= len(best[1]):
                best = pattern, matched
        found[best[0]] = splits
        done |= best[1]
    return found


def _open_numbers(path: str) -> Iterable[str]:
    """Patterns that match a path, those with most of its numbers left open first."""
    numbers = list(_DIGITS.finditer(path))[:_MOST_NUMBERS]
    for count in range(len(numbers), -1, -1):
        for chosen in itertools.combinations(numbers, count):
            text, end = "", 0
            for number in chosen:
                text += re.escape(path[end : number.start()]) + r"\d+"
                end = number.end()
            yield f"{text}{re.escape(path[end:])}$"


def function_text(lines: Iterable[str]) -> str:
    """The text of a file that has `rules()`, from the lines of its dict."""
    body = "\n".join(f"        {each}" for each in lines)
    return f"import keras_flow as kf\n\n\ndef rules():\n    return {{\n{body}\n    }}\n"


def line(rule: tuple[str, Splits]) -> str:
    """A rule as a line of the dict that `rules()` returns."""
    key, splits = rule
    spec = ", ".join(f'"{axis}": kf.sbp.split({dim})' for axis, dim in splits.items())
    return f"{quoted(key)}: {{{spec}}},"


def quoted(pattern: str) -> str:
    """The pattern as a literal, raw where it can be."""
    plain = '"' not in pattern and "\n" not in pattern and not pattern.endswith("\\")
    return f'r"{pattern}"' if plain else repr(pattern)
