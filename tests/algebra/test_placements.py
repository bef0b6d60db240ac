"""Placement: order of ranks, names, equality, device strings, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_flow import FlowError, Placement, placement

hierarchies = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(hierarchies, st.randoms(use_true_random=False))
def test_the_order_of_ranks_is_kept(hierarchy: list[int], random: object) -> None:
    size = int(np.prod(hierarchy))
    ranks = random.sample(range(2 * size), size)  # type: ignore[attr-defined]
    array = np.asarray(ranks).reshape(hierarchy)
    mesh = Placement(array.tolist())
    assert mesh.ranks == tuple(ranks)
    assert mesh.hierarchy == tuple(hierarchy)
    assert (mesh.size, mesh.ndim) == (size, len(hierarchy))
    assert mesh.axis_names == tuple(f"axis{i}" for i in range(len(hierarchy)))
    for rank in ranks:
        assert array[mesh.coordinates(rank)] == rank
    assert eval(repr(mesh), {"Placement": Placement}) == mesh


def test_equality_is_by_type_ranks_and_hierarchy() -> None:
    mesh = Placement([[0, 1], [2, 3]], type="cpu")
    same = Placement(np.arange(4).reshape(2, 2), type="CPU")
    assert mesh == same
    assert len({mesh, same}) == 1
    assert mesh != Placement([[0, 1], [2, 3]], type="gpu")
    assert mesh != Placement([[0, 1], [2, 3]]), "a type that is not known yet"
    assert mesh != Placement([[1, 0], [2, 3]], type="cpu"), "another order"
    assert mesh != Placement([0, 1, 2, 3], type="cpu"), "another hierarchy"
    assert mesh != Placement([[0, 1, 2, 3]], type="cpu")
    assert mesh != "cpu"
    assert mesh == Placement([[0, 1], [2, 3]], axis_names=("data", "model"), type="cpu"), "names do not count"


def test_cuda_is_gpu() -> None:
    assert Placement([0], type="cuda") == Placement([0], type="gpu")
    assert Placement([0], type="cuda").type == "gpu"


def test_any_sequence_and_no_number() -> None:
    with pytest.raises(FlowError, match=r"write kf.Placement\(range\(4\)\) for four ranks, kf.Placement\(\[3\]\) for"):
        Placement(3)
    assert Placement(range(2)).ranks == Placement((0, 1)).ranks == Placement(np.arange(2, dtype="int8")).ranks == (0, 1)


def test_axis_size() -> None:
    mesh = Placement([[0, 1, 2], [3, 4, 5]], axis_names=("data", "model"))
    assert (mesh.axis_size("data"), mesh.axis_size("model")) == (2, 3)


@pytest.mark.parametrize(
    ("device", "ranks"), [("0:0-3", (0, 1, 2, 3)), ("0:2", (2,)), (["0:0-1", "0:3"], (0, 1, 3)), ([4, 2], (4, 2))]
)
def test_spelling_of_oneflow(device: object, ranks: tuple[int, ...]) -> None:
    mesh = placement("cuda", device)
    assert (mesh.ranks, mesh.type) == (ranks, "gpu")


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("1:0-3", "names machine 1; device strings are read for one host (machine 0). Give the ranks themselves"),
        ("0:3-1", "ends before it begins: write the smaller device first"),
        ("gpu0", 'cannot read the device string \'gpu0\': it is "machine:first-last", for example "0:0-3"'),
    ],
)
def test_wrong_device_strings(device: str, text: str) -> None:
    with pytest.raises(FlowError) as error:
        placement("cpu", device)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "names", "text"),
    [
        ([0, 1, 1, 0], None, "each rank may stand once in a placement; [0, 1] stand more than once in [0, 1, 1, 0]"),
        ([-1, 0], None, "ranks are numbered from 0, got -1 in [-1, 0]"),
        ([], None, "needs at least one rank, got none"),
        (
            [[0, 1], [2]],
            None,
            "ranks must be a rectangular array of ints, got [[0, 1], [2]]; for example [[0, 1], [2, 3]]",
        ),
        ([0.5], None, "ranks must be a rectangular array of ints"),
        ([True, False], None, "ranks must be a rectangular array of ints"),
        ("0-3", None, "ranks must be a rectangular array of ints"),
        ([0, 1], ("a", "b"), "one for each axis of the ranks (2,): axis_names=('data',); got ('a', 'b')"),
        ([[0, 1]], ("a", "a"), "one for each axis of the ranks (1, 2): axis_names=('data', 'model')"),
        ([0, 1], "a", "axis_names is a tuple of different names, one for each axis of the ranks (2,)"),
        ([0, 1], 5, "axis_names=('data',); got 5"),
        ([0, 1], ("a b",), "axis names must be identifiers (letters, digits, underscore), got ('a b',)"),
        ([0, 1], (1,), "axis names must be identifiers"),
    ],
)
def test_mistakes(ranks: object, names: object, text: str) -> None:
    with pytest.raises(FlowError) as error:
        Placement(ranks, names)  # type: ignore[arg-type]
    assert text in str(error.value)


def test_unknown_type_axis_and_rank() -> None:
    with pytest.raises(
        FlowError, match=r"""unknown device type 'npu': legal are "cpu", "gpu" \(or "cuda"\) and "tpu"\Z"""
    ):
        Placement([0], type="npu")
    with pytest.raises(FlowError, match=r"no axis 'rows': the placement's axes are \['axis0'\]"):
        Placement([0]).axis_size("rows")
    with pytest.raises(FlowError, match=r"rank 5 is not in the placement of ranks \[0, 1\]"):
        Placement([0, 1]).coordinates(5)
