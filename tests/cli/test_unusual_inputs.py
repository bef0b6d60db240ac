"""Unusual input is answered by one clear line, and not by an accident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import unusual_inputs

pytestmark = pytest.mark.timeout(280)

#: inputs that are right, though they look odd
RIGHT = {'rules={"hidden/kernel": {"model": "split(0)"}}', "fit with batch_size=0"}


def logged(folder: str) -> list[tuple[str, str]]:
    return list(unusual_inputs.log(Path(folder)))


def test_every_answer_is_one_line_and_meant(on_ranks: Callable[[str], Any], tmp_path: Path) -> None:
    answers = dict(on_ranks("jax")(logged, str(tmp_path)))
    assert len(answers) > 100
    assert {text for text, said in answers.items() if said == unusual_inputs.TAKEN} == RIGHT
    wrong = {
        text: said
        for text, said in answers.items()
        if text not in RIGHT and (said.startswith(("RAW", "(exit")) or "\n" in said or not 15 < len(said) < 500)
    }
    assert wrong == {}
    for text, part in (
        ("kf.DataParallel(4)", "takes a kf.Placement, got 4; for example kf.DataParallel(kf.Placement(range(4)))"),
        ("kf.ModelParallel(4, rules=lambda mesh: None)", "kf.ModelParallel takes a kf.Placement, got 4; for example"),
        ("kf.run(7, devices=4)", "kf.run takes a function, got 7"),
        ("batch_axes=0", "batch_axes names an axis of the placement or several, got 0"),
        (
            "fit with batch_size=2.5",
            "fit was given batch_size=2.5; legal is a whole number of at least 1 (rows); 0 and ",
        ),
        ("fit of None", "fit was given no data: x is None; give at least one row"),
        ("keras-flow compare program.py --layouts dp0", "unknown layout 'dp0': it is 1, dpN, tpN, AxB"),
        ("keras-flow compare program.py --out program.py", "--out program.py cannot be a folder for the report"),
        (
            "keras-flow explain raises.py --layout 2x2",
            "raises.py fails as it is imported (raises.py, line 1): ",
        ),
        (
            "keras-flow explain ends.py --layout dp2",
            "ends.py ends the program as it is imported (ends.py, line 1): expl",
        ),
        ("keras-flow explain asks.py --layout 2x2", "rules() fails: TypeError: rules() missing 1 required positional"),
        ("keras-flow explain program.py --layout DP2", "unknown layout 'DP2': did you mean 'dp2'?"),
        ("keras-flow launch --nproc_per_node 1000000 program.py", "1000000 processes were asked for on this host"),
        ("kf.DataParallel(zero=4)", "zero=4: legal are 0 (nothing is split), 1 (slots)"),
        ('kf.trace(".")', "which is a folder; name a file in it"),
        ("kf.comm.all_reduce({0: x, ...}, 'avg')", "op is one of sum, mean, min, max, product; got 'avg'"),
        ("keras-flow explain broken.py --layout 2x2", "broken.py is not a Python file: line 1: invalid syntax"),
        ("keras-flow explain program.py --layout dp4 --ranks 2", "layout 'dp4' on 2 ranks; its name says 4"),
        ("keras-flow launch none.py --devices 2", "--devices stands behind none.py, so that the script is given it"),
        ("keras-flow launch --nproc_per_node 2 -m nosuchmodule", "the module nosuchmodule, which is not found"),
        ("keras-flow launch --devices 2 --print-k8s program.py", "--print-k8s needs --image"),
        ("keras-flow checkpoint verify folder", "(folder). Did you mean the option --verify?"),
        ("keras-flow checkpoint inspect folder", "(folder). keras-flow checkpoint takes {DIR} and options;"),
        ("keras-flow doctor jax", "(jax). keras-flow doctor takes options only; --help lists them."),
    ):
        assert part in answers[text], answers[text]
    # tests/cli/unusual_inputs.py says by which command the page is written
    assert unusual_inputs.PAGE.read_text() == unusual_inputs.page(tmp_path, answers)
