"""Every public name of Keras has a piece in the sweep, or a written reason why it has none."""

from __future__ import annotations

import pytest

from tests.sweep.cases import PIECES, WITHOUT
from tests.sweep.design import MESHES, ROWS, RULES, covering
from tests.sweep.names import MODULES, public


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_a_piece_or_a_reason(module: str) -> None:
    have = {piece.public for piece in PIECES.values()} | set(WITHOUT)
    assert [name for name in public(module) if name not in have] == []


def test_no_piece_and_no_reason_is_of_a_name_that_is_gone() -> None:
    names = {name for module in MODULES for name in public(module)}
    own = {name for name in WITHOUT if name not in names}
    own |= {
        piece.name for piece in PIECES.values() if piece.public not in names and not piece.name.startswith("program.")
    }
    assert own == set()


@pytest.mark.parametrize("number", range(12))
def test_the_design_covers_meshes_rows_and_rules(number: int) -> None:
    settings = covering(number)
    assert {setting.mesh for setting in settings} == set(MESHES)
    assert {setting.rows for setting in settings} == set(ROWS)
    assert {setting.rules for setting in settings} == set(RULES)
    assert any(setting.mesh == "(2,2)" and setting.rows == "uneven" for setting in settings)
