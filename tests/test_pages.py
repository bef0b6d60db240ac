"""The code of the how-to and migration pages is run, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.launch import programs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((*(DOCS / "howto").glob("*.md"), *(DOCS / "migrate").glob("*.md")))
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("engine", "page"), sampling.each_on_one(that_train(), PAGES, every=7), ids=lambda part: getattr(part, "stem", part)
)
def test_the_code_of_a_page_runs(engine: str, page: Path, tmp_path: Path) -> None:
    code = "\n".join(_CODE.findall(page.read_text()))
    assert "assert" in code or "raise_if_wrong" in code, "a page shows what is true"
    script = tmp_path / "page.py"
    script.write_text(code)
    started = programs.start(["-m", "keras_flow.launch", "--devices", "4", str(script)], engine)
    status, _, err = programs.finish(started, 220)
    assert status == 0, err
