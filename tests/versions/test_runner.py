"""The rows of `make test-versions`: which versions they have, and the page that they write."""

from __future__ import annotations

import re

import pytest

from keras_flow.backends import fingerprints
from tests.parity import support
from tests.versions import runner
from tests.versions.runner import CASES, Case, Outcome

pytestmark = pytest.mark.check


def test_every_version_that_is_supported_has_a_row_and_the_oldest_are_run_together() -> None:
    rows = {(case.engine, case.versions[case.engine], case.versions["keras"]) for case in CASES}
    assert {("jax", "0.8.0", "3.15.1"), ("tensorflow", "2.20.0", "3.15.1"), ("torch", "2.13.0", "3.15.1")} <= rows
    lines = runner.PAGE.read_text().splitlines()
    with_another_python = {row.split(" | ")[1] for row in lines if row.startswith("| 20")}
    for engine in runner.TRAINING:
        versions = {version for name, version, _ in rows if name == engine}
        assert {f"{engine} {each}" for each in set(fingerprints.tested(engine)) - versions} <= with_another_python
        assert {keras for name, _, keras in rows if name == engine} >= {
            text for text in fingerprints.tested("keras") if "dev" not in text
        }


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_pages_name_the_versions_that_are_tested(page: str) -> None:
    text = (runner.ROOT / page).read_text()
    for name, package in (("JAX", "jax"), ("TensorFlow", "tensorflow"), ("torch", "torch")):
        first, last = re.search(rf"{name} (\d+\.\d+) (?:to|and) (\d+\.\d+)", text).groups()  # type: ignore[union-attr]
        tested = [each.split(".") for each in fingerprints.tested(package)]
        assert [first, last] == [".".join(version[:2]) for version in (tested[0], tested[-1])], name


def test_packages_of_one_version_share_a_folder() -> None:
    case = Case("jax", ("keras==3.13.2", "jax==0.8.0", "jaxlib==0.8.0"))
    assert case.parts == [("keras==3.13.2",), ("jax==0.8.0", "jaxlib==0.8.0")]
    assert [runner.folder_of(part).name for part in case.parts] == ["keras-3.13.2", "jax-0.8.0_jaxlib-0.8.0"]
    assert Case("torch").parts == []


def test_page() -> None:
    older = Case("jax", runner.jax("0.9.2"))
    before = "| torch 2.14.1 | 3.15.1 | passes | 32 | 40% |  |\n| jax 0.1.0 | 3.15.1 | passes | 32 | 1% |  |\n"
    text = runner.page({Case("jax"): Outcome(32, 0.394, 99.0), older: Outcome(3, 2.0, 9.0, "mlp, tp4: a|b")}, before)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:-2]  # heads of three tables
    newest = Case("jax").versions
    assert rows == [
        f"| jax {newest['jax']} | {newest['keras']} | passes | 32 | 39% |  |",
        f"| jax 0.9.2 | {newest['keras']} | fails | 3 | 200% | mlp, tp4: a/b |",
        "| torch 2.14.1 | 3.15.1 | passes | 32 | 40% |  |",  # not run: from the page before; the others are no rows
    ]
    old = "| 2026-01-02 | jax 0.10.2 | 3.99.0.dev1 | passes | 32 | 6% |  |"
    other = "| 2026-01-02 | jax 0.11.0 | 3.13 | 3.15.1 | passes | 32 | 6% |  |"
    kept = runner.page({}, f"{old}\n{other}").splitlines()
    assert (kept.count(old), kept.count(other)) == (1, 1)
    assert runner.CANARY[0].parts == [("keras-nightly",)]
    assert all(f"`{name}`" in text for name in support.SMALL)
