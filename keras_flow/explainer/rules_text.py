"""The text of a whole `rules()`: the suggested rules, then those of the user's that still match a variable.

The first rule that matches wins, and a rule that is never used is an error. So those that the suggested ones replace
are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from keras_flow.distributions.distribution import is_seed
from keras_flow.explainer.explanation import Explanation

#: axis -> dim
_Splits = Mapping[str, int]

_DIGITS = re.compile(r"\d+")
#: of more numbers in a path not all ways to leave some open are tried
_MOST_NUMBERS = 6


def rules_file(explanation: Explanation) -> str:
    """The text of a `rules()` with which the model can be built as it is."""
    # as `check` looks for rules that are never used
    paths = [row.path for row in explanation.variables if not is_seed(row.path)]
    own = explanation.rules
    now = {path: _first(own, path) for path in paths}
    # a rule that gives what a variable has already would only take the place of the user's
    changed = {
        path: splits
        for path, splits in explanation.suggested_rules.items()
        if splits != (own[key] if (key := now.get(path)) is not None else {})
    }
    suggested = patterns(changed, paths)
    used = {_first({**suggested, **own}, path) for path in paths}
    kept = {key: splits for key, splits in own.items() if key in used and key not in suggested}
    gone = [key for key in own if key not in kept]
    replaced = [key for key in gone if key in now.values()]
    lines = ["# suggested by keras-flow explain", *map(_line, suggested.items())]
    if kept:
        lines += ["# yours", *map(_line, kept.items())]
    if replaced:
        lines.append(f"# replaced by those above: {', '.join(map(_quoted, replaced))}")
    if idle := [key for key in gone if key not in replaced]:
        lines.append(f"# left out, as they match no variable: {', '.join(map(_quoted, idle))}")
    body = "\n".join(f"        {line}" for line in lines)
    return f"import keras_flow as kf\n\n\ndef rules():\n    return {{\n{body}\n    }}\n"


def patterns(rules: Mapping[str, _Splits], paths: Collection[str]) -> dict[str, _Splits]:
    r"""Rules of paths as patterns: where they are equal but for numbers in the path, one for all of them.

    Args:
        rules: path -> axis -> dim.
        paths: of all variables of the model. A pattern matches none of them but those whose rule it is.

    Example:
        >>> rules = {f"block{number}/up/kernel": {"model": 1} for number in range(3)}
        >>> patterns(rules, [*rules, "block0/down/kernel"])
        {'block\\d+/up/kernel$': {'model': 1}}
        >>> patterns(rules, [*rules, "block3/up/kernel"])
        {'block0/up/kernel$': {'model': 1}, 'block1/up/kernel$': {'model': 1}, 'block2/up/kernel$': {'model': 1}}
    """
    found: dict[str, _Splits] = {}
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


def _first(rules: Mapping[str, _Splits], path: str) -> str | None:
    return next((key for key in rules if re.search(key, path)), None)


def _line(rule: tuple[str, _Splits]) -> str:
    key, splits = rule
    spec = ", ".join(f'"{axis}": kf.sbp.split({dim})' for axis, dim in splits.items())
    return f"{_quoted(key)}: {{{spec}}},"


def _quoted(pattern: str) -> str:
    """The pattern as a literal, raw where it can be."""
    plain = '"' not in pattern and "\n" not in pattern and not pattern.endswith("\\")
    return f'r"{pattern}"' if plain else repr(pattern)
