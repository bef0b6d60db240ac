"""What one engine saves under one layout is loaded by every engine under every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import keras_flow as kf
from tests.checkpoint import programs
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
OPTIMIZERS = ("Adam", "RMSprop", "Adafactor", "Nadam", "Lion")


def _equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value.astype(found[name].dtype), err_msg=name)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_saved_under_one_layout_is_loaded_under_all(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = on_ranks(engine)
    for saved_under in ("dp4", "2x2"):
        folder = str(tmp_path / saved_under)
        expected = pool(programs.saved, folder, saved_under)
        assert kf.checkpoint.verify(folder) == kf.checkpoint.inspect(folder).bytes
        for layout in programs.LAYOUTS:
            found, _ = pool(programs.loaded, folder, layout)
            _equal(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_thread_writes_the_values_of_the_call(engine: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    """JAX's and TensorFlow's buffers are held while the steps after it make new ones; torch's are copied."""
    pool, folder = on_ranks(engine), str(tmp_path)
    expected, copied = pool(programs.saved_in_a_thread, folder, "2x2")
    _equal(pool(programs.loaded, folder, "2x2")[0], expected)
    assert (copied > 0) == (engine == "torch")


@pytest.mark.parametrize("engine", ENGINES)
def test_states_are_saved_in_the_dtype_that_was_asked_for(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """JAX holds int64 in int32, and torch uint16 in int32."""
    for asynchronous in (False, True):
        folder = str(tmp_path / str(asynchronous))
        found = on_ranks(engine)(programs.of_all_dtypes, folder, asynchronous)
        assert found == {name: [1.0] * 8 for name in programs.Dtypes.names}
        assert kf.checkpoint.verify(folder) == kf.checkpoint.inspect(folder).bytes
        for name in programs.Dtypes.names[:3]:
            assert kf.checkpoint.read_tensor(folder, f"net/states/{name}").dtype == name


@pytest.mark.parametrize("engine", ENGINES)
def test_slots_that_are_split_further_than_their_variable(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """Each rank writes its part of a slot or a weight, and reads it (`zero=`); other layouts read the whole."""
    pool = on_ranks(engine)
    for saved_under, loaded_under in (("dp4z3", "2x2"), ("dp4z1", "dp4z2"), ("2x2z2", "dp4"), ("dp4", "2x2z3")):
        folder = str(tmp_path / f"{saved_under}-{loaded_under}")
        expected = pool(programs.saved, folder, saved_under)
        _equal(pool(programs.loaded, folder, loaded_under)[0], expected)
        tensors = kf.checkpoint.inspect(folder).tensors
        is_split = any(
            len(tensor.chunks) > len(tensors[name.split("@")[0]].chunks)
            for name, tensor in tensors.items()
            if name.split("@")[0] in tensors
        )
        assert is_split == (saved_under[-2:] in ("z1", "z2"))  # with zero=3 slots have the layout of their variables
        if saved_under == "dp4z3":
            assert len(next(each for name, each in tensors.items() if name.endswith("up/kernel")).chunks) == 4


@pytest.mark.parametrize("engine", ["torch", *(pytest.param(each, marks=pytest.mark.full) for each in ENGINES[:2])])
def test_integers_and_statistics(engine: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    """Torch holds them whole whatever the rules say: each rank wrote its first rows as those of its place."""
    for zero in (0, 3):
        folder = str(tmp_path / str(zero))
        expected = on_ranks(engine)(programs.of_what_torch_holds_whole, folder, zero)
        _equal({name: kf.checkpoint.read_tensor(folder, name) for name in expected}, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layouts", "layout"),
    [(layouts, layout) for layouts in (programs.LAYOUTS, programs.MATRIX) for layout in layouts],
    ids=[f"{name}-{layout}" for name in ("LAYOUTS", "MATRIX") for layout in getattr(programs, name)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_loads_what_another_saved(
    engine: str, layouts: tuple[str, ...], layout: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    expected = on_ranks(engine)(programs.saved, folder, layout)
    for other in ENGINES:
        for under in layouts:
            found, _ = on_ranks(other)(programs.loaded, folder, under)
            _equal(found, expected)


@pytest.mark.parametrize(
    "layout",
    [
        "2x2",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in sorted({*programs.LAYOUTS, *programs.MATRIX} - {"2x2"})
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_byte_is_read_twice_or_in_vain(
    engine: str, layout: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool, folder = on_ranks(engine), str(tmp_path)
    pool(programs.saved, folder, "1x4")
    for read, needed in pool.on_each(programs.read_and_needed, folder, layout):
        assert read == needed


def test_torch_loads_what_jax_saved(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    expected = on_ranks("jax")(programs.saved, str(tmp_path), "2x2")
    found, bytes_read = on_ranks("torch")(programs.loaded, str(tmp_path), "2x2")
    _equal(found, expected)
    # of what is split by columns whole rows are read, to be checked
    assert bytes_read <= kf.checkpoint.inspect(tmp_path).bytes


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_slots_of_an_optimizer(optimizer: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    pool = on_ranks("torch")
    expected = pool(programs.saved, str(tmp_path), "2x2", optimizer)
    assert sum("@" in name and not name.startswith("@") for name in expected) >= 6
    for layout in ("dp4", "1x4"):
        _equal(pool(programs.loaded, str(tmp_path), layout, optimizer)[0], expected)
