"""Who writes what: each element once, and about as many bytes for each rank; and reading any part of it back."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_flow as kf
from keras_flow.checkpoint import manifest, pieces, writer
from keras_flow.checkpoint.manifest import Manifest, Tensor
from keras_flow.checkpoint.reader import Reader

_MESHES = ((4,), (2, 2), (1, 4), (3,), (2, 3), (2, 1, 2))


@st.composite
def layouts(draw: st.DrawFn) -> kf.Layout:
    """A layout of a tensor of up to three dims, splits that do not divide and more ranks than rows included."""
    mesh = draw(st.sampled_from(_MESHES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    splits = [f"S({dim})" for dim in range(len(shape))]
    nd_sbp = ",".join(draw(st.sampled_from(["B", *splits])) for _ in mesh)
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    return kf.Layout(kf.Placement(ranks, axis_names=tuple("abc"[: len(mesh)])), nd_sbp, shape)


@settings(max_examples=200, deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=5), st.data())
def test_every_element_is_written_once_and_any_part_is_read(found: list[kf.Layout], data: st.DataObject) -> None:
    import tempfile

    ranks = range(max(layout.placement.size for layout in found))
    tensors = {f"t{i}": (layout, layout.shape, 4) for i, layout in enumerate(found)}
    who = pieces.assigned(tensors, ranks)
    values = {name: np.arange(math.prod(each[1]), dtype="float32").reshape(each[1]) for name, each in tensors.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chunks: dict[str, list[manifest.Chunk]] = {name: [] for name in tensors}
        for rank in ranks:
            mine = [(name, piece) for name, each in who.items() for piece in each if piece.rank == rank]
            blocks = [writer.FileBlock(n, "float32", p.start, p.shape, values[n].shape) for n, p in mine]
            file = writer.File(folder / f"rank-{rank}.safetensors", blocks)
            for block, (name, piece) in zip(blocks, mine, strict=True):
                layout = tensors[name][0]
                shard = values[name][layout.local_slices(rank)]
                file.add(block, piece.cut(shard))
            file.close(False)
            for name, each in file.chunks.items():
                chunks[name] += each
        whole = Manifest(1, {n: Tensor("float32", v.shape, "", tuple(chunks[n])) for n, v in values.items()})
        (folder / manifest.NAME).write_text(whole.to_json())
        folder, again = manifest.read(folder)
        assert again == whole
        for name, value in values.items():
            assert sum(math.prod(chunk.shape) for chunk in chunks[name]) == value.size
            index = [slice(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in value.shape]
            for check in (True, False):
                np.testing.assert_array_equal(Reader(folder, again, check).read(name, index), value[tuple(index)])


def test_what_all_hold_is_spread_over_them_by_bytes() -> None:
    mesh = kf.Placement(range(8))
    sizes = np.random.default_rng(0).integers(1, 1000, 200)
    tensors = {f"t{i}": (kf.Layout(mesh, "B", (int(n),)), (int(n),), 4) for i, n in enumerate(sizes)}
    loads = np.zeros(8)
    for each in pieces.assigned(tensors, range(8)).values():
        for piece in each:
            loads[piece.rank] += piece.shape[0]
    assert loads.max() < 1.01 * sizes.sum() / 8


def test_a_large_tensor_that_all_hold_is_cut_by_rows() -> None:
    mesh = kf.Placement(range(4))
    rows = 3 * (pieces.LARGEST >> 10)
    found = pieces.assigned({"t": (kf.Layout(mesh, "B", (rows, 256)), (rows, 256), 4)}, range(4))["t"]
    assert sorted((piece.start[0], piece.shape[0]) for piece in found) == [
        (0, rows // 3),
        (rows // 3, rows // 3),
        (2 * rows // 3, rows // 3),
    ]
    assert len({piece.rank for piece in found}) == 3


def test_a_thousand_ranks_are_assigned_in_seconds() -> None:
    import time

    mesh = kf.Placement(np.arange(1024).reshape(128, 8), axis_names=("data", "model"))
    tensors = {f"t{i}": (kf.Layout(mesh, {"model": "S(1)"}, (512, 512)), (512, 512), 4) for i in range(300)}
    # over all ranks: as with zero=3
    split = (kf.Layout(mesh, "S(0),S(0)", (32768, 8)), (32768, 8), 4)
    tensors |= {f"s{i}": split for i in range(20)}
    begun = time.process_time()
    found = pieces.assigned(tensors, range(1024))
    assert time.process_time() - begun < 20
    assert all(len(each) == (8 if name.startswith("t") else 1024) for name, each in found.items())
    assert pieces.assigned(dict(tensors), range(1024)) is found  # each save asks for it again
