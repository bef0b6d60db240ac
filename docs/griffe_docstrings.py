"""What the reference changes of docstrings before they are shown.

mkdocstrings knows a session of Python by the heading "Examples:", where docstrings say "Example:". A page that a
docstring names by its file becomes a link.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_HEADING = re.compile(r"^(\s*)Example:$", re.MULTILINE)
_PAGE = re.compile(r"`?\bdocs/((?:\w+/)*)([\w-]+)\.md\b`?")


class Docstrings(Extension):
    """Puts sessions and links into docstrings."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _HEADING.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _PAGE.sub(
                lambda page: f"[{re.sub('[_-]', ' ', page[2])}](../{page[1]}{page[2]}.md)", text
            )
