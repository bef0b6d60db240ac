"""The text of a whole `rules()`: the suggested rules, then those of the user's that still match a variable.

The first rule that matches wins, and a rule that is never used is an error. So those that the suggested ones replace
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from keras_flow.distributions.distribution import is_seed
from keras_flow.distributions.rule_patterns import Splits, function_text, line, patterns, quoted
from keras_flow.explainer.explanation import Explanation


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
    lines = ["# suggested by keras-flow explain", *map(line, suggested.items())]
    if kept:
        lines += ["# yours", *map(line, kept.items())]
    if replaced:
        lines.append(f"# replaced by those above: {', '.join(map(quoted, replaced))}")
    if idle := [key for key in gone if key not in replaced]:
        lines.append(f"# left out, as they match no variable: {', '.join(map(quoted, idle))}")
    return function_text(lines)


def _first(rules: Mapping[str, Splits], path: str) -> str | None:
    return next((key for key in rules if re.search(key, path)), None)
