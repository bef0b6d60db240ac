"""docs/hooks.md lists what is wrapped."""

import fnmatch
import re
from pathlib import Path

import pytest

from keras_flow.backends import fingerprints, hooking, keras_hooks, object_hooks
from keras_flow.checkpoint import callback, positions
from keras_flow.current import keras_places
from tests import hooks_page

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_page_is_what_the_modules_declare() -> None:
    assert hooks_page.PAGE.read_text() == hooks_page.page(), "python -m tests.hooks_page writes it"


def test_each_reason_says_more_than_the_name() -> None:
    hooks = hooks_page.PAGE.read_text().partition("\n## Methods of objects")[0]
    rows = re.findall(r"^\| `(.+)` \| [a-z, ]+ \| (.+) \|$", hooks, re.MULTILINE)
    assert len(rows) == hooks.count("\n| `")
    # the least that names a behaviour and what is wrong with it: "fails along a split dim"
    assert [name for name, why in rows if len(why.split()) < 5 or why.endswith(".")] == []


def test_what_keras_could_have_is_said_of_each_hook_that_there_is() -> None:
    page, versions = hooks_page.PAGE.read_text(), (ROOT / "backends" / "fingerprints.json").read_text()
    hooks = set(re.findall(r"^\| `(keras[.:].+?)` \|", page, re.MULTILINE))
    hooks |= set(re.findall(r'^  "(keras\.[^"]+)"', versions, re.MULTILINE)) & {"keras.Model._initialize_ddp"}  # 3.16
    table, _, kinds = (ROOT / "docs" / "upstream.md").read_text().partition("A `*` stands for any letters.")
    cells = [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("| ")][1:]
    patterns = re.findall(r"`(.+?)`", " ".join(cells)) + re.findall(r"`(keras[.:].+?)`", kinds)
    assert [each for each in patterns if not fnmatch.filter(hooks, each)] == []
    assert [each for each in sorted(hooks) if not any(fnmatch.fnmatchcase(each, one) for one in patterns)] == []


def test_what_is_wrapped_later_is_compared_with_the_rest() -> None:
    assert keras_hooks.hooks()  # whose modules declare methods of objects too
    later = {fingerprints.name_of(hook) for hook in hooking.declared(callback, positions)}
    methods: dict[bool, set[str]] = {True: set(), False: set()}
    for each in object_hooks.declared():
        is_of_backends = each.replacement.__module__.startswith("keras_flow.backends.")
        methods[is_of_backends].add(fingerprints.name_of(each))
    assert methods[False]
    later |= methods[False] - methods[True]
    compared = {fingerprints.name_of(place) for place in keras_places.WRAPPED_LATER}
    assert compared == later - {"keras:adapters.get_data_adapter"}  # which every engine wraps as well
