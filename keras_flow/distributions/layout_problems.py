"""Problems of a model's layouts, as lines of one error: wrong rules, and rules that no path matches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from keras_flow import near_names
from keras_flow.distributions.fallbacks import first_of
from keras_flow.distributions.rules import Rules, matched_key, takers


def of_model(problems: Mapping[str, Sequence[str]], rules: Rules, paths: Sequence[str]) -> list[str]:
    """The recorded problems of a model; those of one rule that are alike are one line.

    Args:
        problems: path of a variable, or of a layer's output -> its problems. One of an output may be any model's.
        rules: the distribution's.
        paths: the model's variables.
    """
    alike: dict[tuple[str | None, str], list[str]] = {}
    for path, texts in problems.items():
        if path not in paths and not path.endswith("/output"):
            continue
        for text in texts:
            known = text.startswith(f"{path}: ")
            alike.setdefault((matched_key(rules, path), text.removeprefix(f"{path}: ")), []).append(
                path if known else ""
            )
    return [f"{first_of(of)}: {text}" if of[0] else text for (_, text), of in alike.items()]


class RuleUse:
    """Which rules of a distribution are the first match of some path; the others are problems.

    Args:
        rules: layouts of variables.
        activations: layouts of layer outputs.
        maps_outputs: whether keys of `rules` may also name layer outputs, as `path/output`.

    Attributes:
        matched: keys that were the first match of some path.
    """

    def __init__(self, rules: Rules, activations: Rules, maps_outputs: bool):
        self._rules, self._activations, self._maps_outputs = rules, activations, maps_outputs
        self.matched: set[str] = set()

    def unmatched(self, layers: Sequence[str], paths: Sequence[str]) -> list[str]:
        """Return the keys that are not the first match of any path, in this model or an earlier one.

        Args:
            layers: paths of the model's layers.
            paths: those of its variables. Ones that were made before the distribution were not looked up by it.
        """
        found = {matched_key(self._rules, path) for path in self._candidates(layers, paths)}
        found |= {matched_key(self._activations, path) for path in layers}
        self.matched.update(key for key in found if key)
        return [key for key in (*self._rules.keys, *self._activations.keys) if key not in self.matched]

    def idle(self, unmatched: Sequence[str], layers: Sequence[str], paths: Sequence[str]) -> list[str]:
        """Return those of the unmatched keys of `rules` that fit no path of this model, even behind other rules."""
        candidates = self._candidates(layers, paths)
        return [key for key in unmatched if key in self._rules.keys and not takers(self._rules, key, candidates)]

    @staticmethod
    def only_inside(keys: Sequence[str], paths: Sequence[str]) -> list[str]:
        """Return the keys that are the end of a path and match no path whole, as `hidden/kernel` in a LayoutMap."""
        return [key for key in keys if any(re.search(f"(?:{key})$", path) for path in paths)]

    def why_unmatched(self, key: str, layers: Sequence[str], paths: Sequence[str]) -> str:
        """Say why a rule is not used: other rules match all its paths first, or it matches no path."""
        for rules, candidates in ((self._rules, self._candidates(layers, paths)), (self._activations, layers)):
            shadowed = takers(rules, key, candidates) if key in rules.keys else {}
            if shadowed:
                path, taker = next(iter(shadowed.items()))
                more = f" (and {len(shadowed) - 1} more that it matches)" if len(shadowed) > 1 else ""
                return (
                    f"rule '{key}' is never used: rule '{taker}' comes before it and takes {path!r}{more}; "
                    f"{rules.shadowed_advice}"
                )
        if key in self._rules.keys:
            return f"rule '{key}' matched no variable; {near_names.or_examples(key, paths)}"
        return f"activations '{key}' matched no layer; {near_names.or_examples(key, layers)}"

    def _candidates(self, layers: Sequence[str], paths: Sequence[str]) -> list[str]:
        """The paths that keys of `rules` may match."""
        return [*paths, *(f"{path}/output" for path in layers if self._maps_outputs)]
