"""docs/hooks.md lists what is wrapped."""

import pytest

from keras_flow.backends import fingerprints, hooking, object_hooks
from keras_flow.checkpoint import callback, positions
from keras_flow.current import keras_places
from tests import hooks_page


@pytest.mark.timeout(300)
def test_the_page_is_what_the_modules_declare() -> None:
    assert hooks_page.PAGE.read_text() == hooks_page.page(), "python -m tests.hooks_page writes it"


def test_what_is_wrapped_later_is_compared_with_the_rest() -> None:
    later = {fingerprints.name_of(hook) for hook in hooking.declared(callback, positions)}
    methods: dict[bool, set[str]] = {True: set(), False: set()}
    for each in object_hooks.declared():
        is_of_backends = each.replacement.__module__.startswith("keras_flow.backends.")
        methods[is_of_backends].add(fingerprints.name_of(each))
    assert methods[False]
    later |= methods[False] - methods[True]
    compared = {fingerprints.name_of(place) for place in keras_places.WRAPPED_LATER}
    assert compared == later - {"keras:adapters.get_data_adapter"}  # which every engine wraps as well
