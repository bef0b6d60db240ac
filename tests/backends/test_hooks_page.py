"""docs/hooks.md lists what is wrapped."""

import pytest

from tests import hooks_page


@pytest.mark.timeout(300)
def test_the_page_is_what_the_modules_declare() -> None:
    assert hooks_page.PAGE.read_text() == hooks_page.page(), "python -m tests.hooks_page writes it"
