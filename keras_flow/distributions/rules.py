"""Rules: from the path of a variable or layer output to the nd_sbp that it gets.

`PatternRules` are regular expressions in order, `LayoutMapRules` a `keras.distribution.LayoutMap`. The functions below
them find out, for error messages, why a rule is never used and which paths are like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from keras_flow import sbp
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Match:
    """A rule that matched a path.

    Attributes:
        key: the rule as the user wrote it.
        spec: what it asks for, in any form that `sbp.nd_sbp` reads.
    """

    key: str
    spec: sbp.SbpSpec


class Rules(Protocol):
    """A set of rules, each a key and what it asks for."""

    keys: tuple[str, ...]
    #: advice in the error about a rule whose paths all match another rule first
    shadowed_advice: str
    #: how keys are compared with paths, for errors
    matching: str
    #: whether some rules may match nothing: a map that a library ships is for all variants of a model
    may_be_unmatched: bool

    def match(self, path: str) -> Match | None:
        """The rule of `path`, or None.

        Raises:
            FlowError: the rules contradict each other.
        """
        ...

    def finds(self, key: str, path: str) -> bool:
        """Whether the rule `key` would match `path` if it were the only one."""
        ...

    def patterns(self) -> Iterable[tuple[str, sbp.SbpSpec]]:
        """Every legal rule, as a regular expression to search in paths, and its nd_sbp."""
        ...

    def specs(self) -> Iterable[sbp.SbpSpec]:
        """The nd_sbp of every legal rule."""
        return [spec for _, spec in self.patterns()]


class PatternRules(Rules):
    """An ordered mapping of regular expressions; searched in the path, first match wins.

    Args:
        rules: pattern -> nd_sbp.
        what: name of the argument, for errors.

    Raises:
        FlowError: a key that is no regular expression, or not a mapping.
    """

    shadowed_advice = "the first match wins: put it earlier, or leave it out"
    matching = "rules are regular expressions searched in them, first match wins"
    may_be_unmatched = False

    def __init__(self, rules: Mapping[str, sbp.SbpSpec] | None, what: str = "rules"):
        if rules is not None and not isinstance(rules, Mapping):
            raise FlowError(
                f"{what} must be a mapping of regular expressions to sbp or a keras.distribution.LayoutMap, got "
                f'{type(rules).__name__}; for example {{"hidden/kernel": {{"model": kf.sbp.split(1)}}}}'
            )
        self._rules: list[tuple[re.Pattern[str], sbp.SbpSpec]] = []
        for key, spec in (rules or {}).items():
            try:
                # compiled here, so that a mistake is told where the rules are written
                self._rules.append((re.compile(key), spec))
            except (re.error, TypeError) as error:
                raise FlowError(f"{what}: {key!r} is not a regular expression: {error}") from error
        self.keys = tuple(pattern.pattern for pattern, _ in self._rules)

    def match(self, path: str) -> Match | None:
        """The first rule whose pattern is found in `path`, or None."""
        for pattern, spec in self._rules:
            if pattern.search(path):
                return Match(pattern.pattern, spec)
        return None

    def finds(self, key: str, path: str) -> bool:
        """Whether the pattern `key` is found in `path`."""
        return re.search(key, path) is not None

    def patterns(self) -> Iterable[tuple[str, sbp.SbpSpec]]:
        """Every rule, and its nd_sbp."""
        return [(pattern.pattern, spec) for pattern, spec in self._rules]


class LayoutMapRules(Rules):
    """A `keras.distribution.LayoutMap` with Keras's own matching: the exact key, otherwise one full match.

    Its keys may mean variables or, with the ending `/output`, layer outputs.
    """

    shadowed_advice = "a key that is the exact path wins: leave it out"
    matching = (
        "a key of a LayoutMap must match a path whole, as in Keras: '.*hidden/kernel' where 'hidden/kernel' is only "
        "the end of it"
    )
    may_be_unmatched = True

    def __init__(self, layout_map: keras.distribution.LayoutMap):
        self._map = layout_map

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys that the map has now: as in Keras, it may be filled after the distribution was made."""
        return tuple(self._map)

    def match(self, path: str) -> Match | None:
        """The key that is `path` or fully matches it, or None.

        Raises:
            FlowError: several keys match.
        """
        if path in self.keys:
            key = path
        else:
            # as `keras.distribution.LayoutMap` does: another matching would move a user's variables
            matches = [key for key in self.keys if re.fullmatch(key, path)]
            if len(matches) > 1:
                raise FlowError(
                    f"{path!r} matches several keys of the LayoutMap: {matches}; let each path match one key"
                )
            if not matches:
                return None
            key = matches[0]
        return Match(key, self._spec(key))

    def finds(self, key: str, path: str) -> bool:
        """Whether the key is `path` or fully matches it."""
        return key == path or re.fullmatch(key, path) is not None

    def _spec(self, key: str) -> dict[str, sbp.Split]:
        layout = self._map[key]
        return sbp.of_axes(layout.axes if layout is not None else (), f"LayoutMap key {key!r}")

    def patterns(self) -> Iterable[tuple[str, sbp.SbpSpec]]:
        """Every key that has a legal nd_sbp, as the expression that finds what the key matches whole."""
        out = []
        for key in self.keys:
            try:
                out.append((f"^(?:{key})$", self._spec(key)))
            except FlowError:
                continue  # reported when a path matches it
        return out


def matched_key(rules: Rules, path: str) -> str | None:
    """The key of the rule of a path; None where no rule matches, or the rules contradict each other."""
    try:
        match = rules.match(path)
    except FlowError:
        return None
    return match.key if match else None


def takers(rules: Rules, key: str, paths: Iterable[str]) -> dict[str, str]:
    """The paths that the rule `key` would match if it were the only one -> the rule that matches them first.

    Example:
        >>> takers(PatternRules({"hidden/kernel": "S(1)", "kernel": "S(0)"}), "kernel", ["top/hidden/kernel"])
        {'top/hidden/kernel': 'hidden/kernel'}
    """
    rule_of = {path: matched_key(rules, path) for path in paths if rules.finds(key, path)}
    return {path: taker for path, taker in rule_of.items() if taker is not None and taker != key}
