"""The table of engines: read without loading one, and all that it takes to add one."""

from __future__ import annotations

from pathlib import Path

from keras_flow.backends import engines
from tests.backends.test_active import tell

#: a fourth engine: numpy under another name, with the part of the interface that layouts need
FOLDER = """
from keras_flow.backends.engine_records import Capabilities
from keras_flow.backends.numpy import (
    agree_on, as_numpy, from_engine, init, on_rank, put, redistribute, to_engine, vjp, world,
)

name = "fourth"
capabilities = Capabilities(
    drives_all_ranks=True,
    several_axes_on_one_dim=True,
    uneven_batches="parallel",
    whole_variables={"Dense": (("kernel",), "for this test")},
)


def hooks():
    return ()


def privates():
    return ()


def enter(distribution):
    pass
"""

#: Keras has no fourth backend: it is on numpy, and says another name
PROGRAM = """
import sys

import keras

import keras_flow.backends
from keras_flow.backends.engines import ENGINES, Engine

ENGINES["fourth"] = Engine("fourth", ">=2", ("numpy",), "numpy", "keras-flow", drives_all_ranks=True)
keras_flow.backends.__path__.append(sys.argv[1])
keras.config.backend = lambda: "fourth"

import inspect

import keras_flow as kf
from keras_flow.backends import active
from keras_flow.cli.doctor import doctor
from keras_flow.compare.runner import chosen_backends
from keras_flow.doctor import host
from keras_flow.runtime import versions

print(kf.init(4).size, active.backend().name, active.drives_all_ranks())
versions.check("fourth")
assert host.found_versions()["fourth"] == versions.installed("numpy")
assert inspect.signature(doctor).parameters["backends"].default == "jax,tensorflow,torch,fourth"
assert chosen_backends(["fourth"]) == (["fourth"], {})
assert "fourth" in chosen_backends(None)[0]

grid = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
rows = kf.ones((8, 4), placement=grid, sbp={"data": kf.sbp.split(0)})
columns = kf.ones((4, 6), placement=grid, sbp={"model": kf.sbp.split(1)})
print((rows @ columns).numpy().sum())

distribution = kf.ModelParallel(grid, rules={"kernel": {"model": kf.sbp.split(1)}})
print(distribution.layout_for("dense/kernel", (8, 4)).given)
print(distribution.layout_for("dense/kernel", (8, 4), keras.layers.Dense(4)).given)
"""


def test_adding_an_engine_takes_a_row_and_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "fourth"
    folder.mkdir()
    (folder / "__init__.py").write_text(FOLDER)
    program = f"import sys; sys.argv.append({str(tmp_path)!r})\n" + PROGRAM
    world, product, split, whole = tell(program, "numpy").split("\n")
    assert world == "4 fourth True"
    assert float(product) == 8 * 6 * 4
    assert split == "B,S(1) (from rule 'kernel')"
    assert whole.startswith("B,B (from rule 'kernel'; ")
    assert "for this test" in whole


def test_the_table_is_read_without_an_engine() -> None:
    program = (
        "import sys\nfrom keras_flow.backends import engines\n"
        "assert not {'keras', *engines.ENGINES} & set(sys.modules)\nprint(engines.in_words(engines.that_train()))"
    )
    assert tell(program) == "jax, tensorflow or torch"


def test_each_row_has_its_folder() -> None:
    root = Path(engines.__file__).parent
    folders = {path.parent.name for path in root.glob("*/devices.py")}  # what every engine has
    assert folders == set(engines.ENGINES)
    assert all(name == engine.name for name, engine in engines.ENGINES.items())
