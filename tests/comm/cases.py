"""What every collective of `kf.comm` must give, by numpy: run on the ranks of any job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import tensor_engine
from keras_flow.comm import repeated
from keras_flow.comm.group import dtype_name
from keras_flow.comm.work import Work
from keras_flow.tensors.dtypes import numpy_dtype

NUMPY_OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *FLOATS,
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64", "complex128"),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (5,), (3, 2), (2, 0, 3))


#: dtypes of a run that leaves some out
_chosen: list[str] = []


def dtypes() -> list[str]:
    """Those that the engine keeps as they are: JAX has 64 bits when it is told to."""
    engine = tensor_engine()
    rank = engine.world().local_ranks[0]
    return [name for name in _chosen or DTYPES if dtype_name(engine.put(np.zeros(1, numpy_dtype(name)), rank)) == name]


def values(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Small whole numbers, exact in every dtype."""
    drawn = np.random.default_rng(rank).integers(0, 3 if dtype != "bool" else 2, shape)
    return np.asarray(drawn).astype(numpy_dtype(dtype))


def give(of: Callable[[int], Any]) -> Any:
    """What this process gives: for its one rank, or rank -> value."""
    local = tensor_engine().world().local_ranks
    return of(local[0]) if len(local) == 1 else {rank: of(rank) for rank in local}


def taken(result: Any, group: kf.Placement) -> dict[int, Any]:
    """Rank -> result, of the ranks of this process that are in the group."""
    local = tensor_engine().world().local_ranks
    if len(local) == 1:
        return {local[0]: result} if group.contains(local[0]) else {}
    return dict(result or {})


def same(found: Any, expected: Any, what: str) -> None:
    """Compare with numpy, dtype and shape included."""
    if expected is None or found is None:
        assert found is None and expected is None, what
        return
    if isinstance(expected, list):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            same(one, other, what)
        return
    expected = np.asarray(expected)
    array = np.asarray(tensor_engine().as_numpy(found))
    assert array.dtype == expected.dtype, f"{what}: {array.dtype}, {expected.dtype}"
    assert array.shape == expected.shape, f"{what}: {array.shape}, {expected.shape}"
    if what.startswith("mean") and array.dtype.kind not in "iub":  # engines divide, or multiply by the inverse
        wide = "complex128" if array.dtype.kind == "c" else "float64"
        error = np.abs(array.astype(wide) - expected.astype(wide))
        assert np.all(error <= rounding(array.dtype) * np.abs(expected)), f"{what}: {array} is not {expected}"
        return
    assert np.array_equal(array, expected), f"{what}: {array} is not {expected}"


def rounding(dtype: np.dtype) -> float:
    """One unit in the last place."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def check(result: Any, expected: Callable[[int], Any], group: kf.Placement, what: str) -> None:
    """Compare every rank's result."""
    found = taken(result, group)
    assert set(found) == set(group.ranks) & set(tensor_engine().world().local_ranks), what
    for rank, value in found.items():
        same(value, expected(rank), f"{what} on rank {rank}")


def reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    """By numpy."""
    if op == "mean":
        return (reduced(parts, "sum") / len(parts)).astype(parts[0].dtype)
    return NUMPY_OPS[op].reduce(np.stack(parts), axis=0, dtype=parts[0].dtype)


def has(op: str, dtype: str) -> bool:
    """Whether numbers of a dtype are reduced so."""
    if op == "mean":
        return dtype in FLOATS or dtype.startswith("complex")
    return not (dtype.startswith("complex") and op in ("min", "max"))


def reductions(group: kf.Placement) -> None:
    """Op by dtype."""
    count = group.size
    for dtype in dtypes():
        for op in ("sum", "mean", "min", "max", "product"):
            if not has(op, dtype):
                continue
            for shape in SHAPES if dtype == "float32" else ((5,),):
                what = f"{op} of {dtype}{list(shape)} over {group.ranks}"
                of = lambda rank, dtype=dtype, shape=shape: values(dtype, shape, rank)  # noqa: E731
                total = reduced([of(rank) for rank in group.ranks], op)
                check(kf.comm.all_reduce(give(of), op, group), lambda _, total=total: total, group, what)
                handle = kf.comm.all_reduce(give(of), op, group, async_op=True)
                if handle is not None:
                    check(handle.wait(), lambda _, total=total: total, group, f"{what}, awaited")
                    assert handle.is_completed()
                last = group.ranks[-1]
                at_last = lambda rank, total=total, of=of, last=last: total if rank == last else of(rank)  # noqa: E731
                check(kf.comm.reduce(give(of), last, op, group), at_last, group, f"{what}, reduced to one")
            pieces = lambda rank, dtype=dtype: [values(dtype, (k + 1, 2), rank + k) for k in range(count)]  # noqa: E731
            own = lambda rank, pieces=pieces, op=op: reduced(  # noqa: E731
                [pieces(each)[group.ranks.index(rank)] for each in group.ranks], op
            )
            check(kf.comm.reduce_scatter(give(pieces), op, group), own, group, f"{op} of {dtype} by reduce_scatter")
            rows = lambda rank, dtype=dtype: values(dtype, (2 * count, 3), rank)  # noqa: E731
            total = reduced([rows(each) for each in group.ranks], op)
            part = lambda rank, t=total: t[2 * group.ranks.index(rank) : 2 * group.ranks.index(rank) + 2]  # noqa: E731
            check(
                kf.comm.reduce_scatter_tensor(give(rows), op, group),
                part,
                group,
                f"{op} of {dtype} by reduce_scatter_tensor",
            )


#: whether a call of `again` only begins, and which way one rank goes alone
TURNS = ((False, ""), (True, ""), (False, ""), (True, ""), (False, "followed"), (True, "followed"), (False, "numpy"))

#: calls of `again`: name, op, how a rank's own is given -> what is called, and what a rank must get of all parts
Again = tuple[str, str, str, Callable[[Any, bool], Any], Callable[[dict[int, Any], int], Any]]


def calls_again(group: kf.Placement, shape: tuple[int, ...], dtype: str) -> list[Again]:
    """Every collective of tensors."""
    last, place = group.ranks[-1], {rank: k for k, rank in enumerate(group.ranks)}

    def in_order(parts: dict[int, Any]) -> list[Any]:
        return [parts[rank] for rank in group.ranks]

    def row(parts: dict[int, Any], rank: int) -> list[Any]:
        return [part[place[rank]] for part in in_order(parts)]

    found: list[Again] = []
    for op in ("sum", "mean", "max", "product"):
        by = lambda parts, op=op: reduced(parts, op)  # noqa: E731
        found += [
            ("all_reduce", op, "tensor", lambda x, begins, op=op: kf.comm.all_reduce(x, op, group, begins),
             lambda parts, _, by=by: by(in_order(parts))),
            ("reduce", op, "tensor", lambda x, _, op=op: kf.comm.reduce(x, last, op, group),
             lambda parts, rank, by=by: by(in_order(parts)) if rank == last else parts[rank]),
            ("reduce_scatter", op, "list", lambda x, begins, op=op: kf.comm.reduce_scatter(x, op, group, begins),
             lambda parts, rank, by=by: by(row(parts, rank))),
            ("reduce_scatter_tensor", op, "rows",
             lambda x, begins, op=op: kf.comm.reduce_scatter_tensor(x, op, group, begins),
             lambda parts, rank, by=by: by(row({r: np.split(p, group.size) for r, p in parts.items()}, rank))),
        ]  # fmt: skip
    found += [
        ("all_gather_into_tensor", "", "tensor", lambda x, begins: kf.comm.all_gather_into_tensor(x, group, begins),
         lambda parts, _: np.concatenate(in_order(parts)) if shape else np.stack(in_order(parts))),
        ("broadcast", "", "tensor", lambda x, begins: kf.comm.broadcast(x, last, group, begins),
         lambda parts, _: parts[last]),
        ("all_gather", "", "tensor", lambda x, begins: kf.comm.all_gather(x, group, begins, same_shape=True),
         lambda parts, _: in_order(parts)),
        ("gather", "", "tensor", lambda x, _: kf.comm.gather(x, last, group, same_shape=True),
         lambda parts, rank: in_order(parts) if rank == last else None),
        ("all_to_all", "", "list", lambda x, begins: kf.comm.all_to_all(x, group, begins, same_shape=True), row),
        ("scatter", "", "list", lambda x, _: kf.comm.scatter(x, last, group, shape, dtype),
         lambda parts, rank: parts[last][place[rank]]),
    ]  # fmt: skip
    return found


def own_of(kind: str, dtype: str, shape: tuple[int, ...], rank: int, turn: int, count: int) -> Any:
    """What a rank gives in a turn."""
    if kind == "list":
        return [values(dtype, shape, 10 * turn + 5 * rank + k) for k in range(count)]
    return values(dtype, (count * shape[0], *shape[1:]) if kind == "rows" else shape, rank + 10 * turn)


@contextlib.contextmanager
def followed(given: Any) -> Iterator[None]:
    """Where a gradient is asked for of these tensors: on a rank alone, its call goes another way than the others'."""
    tensors = [each for each in keras.tree.flatten(given) if has("mean", dtype_name(each))]
    if keras.backend.backend() == "torch":
        for each in tensors:
            each.requires_grad_()
        yield
    elif keras.backend.backend() == "tensorflow" and tensors:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            yield
    else:
        yield


def again(group: kf.Placement) -> None:
    """Calls of a loop: those after the first of the same dtypes and shapes go straight on, with new numbers.

    In some turns one rank alone goes another way: its gradient is asked for, or it gives NumPy's arrays.
    """
    engine, count = tensor_engine(), group.size
    local = engine.world().local_ranks
    for dtype, shape in [("float32", shape) for shape in ((), (0,), (3, 2))] + [(name, (5,)) for name in dtypes()]:
        for name, op, kind, call, expected in calls_again(group, shape, dtype):
            is_other = op in ("max", "product") and name != "all_reduce" and (dtype, shape) != ("float32", (3, 2))
            if not has(op, dtype) or is_other or (kind == "rows" and not shape):
                continue
            for turn, (begins, alone) in enumerate(TURNS if dtype == "float32" else TURNS[:3]):
                of = functools.partial(own_of, kind, dtype, shape, turn=turn, count=count)
                parts = {rank: of(rank) for rank in group.ranks}
                is_alone = local[:1] == group.ranks[:1]
                given = give(of)
                if not (is_alone and alone == "numpy"):
                    given = give(lambda rank, of=of: keras.tree.map_structure(lambda x: engine.put(x, rank), of(rank)))
                what = f"{op} {name} again: {dtype}{list(shape)}, turn {turn}"
                with followed(given if is_alone and alone == "followed" else []):
                    result = call(given, begins)
                    result = result.wait() if isinstance(result, Work) else result
                check(result, lambda rank, p=parts, e=expected: e(p, rank), group, what)
    kf.comm.barrier(group)
    kf.comm.barrier(group)
    if len(local) == 1 and local[0] in group.ranks and count > 1 and group.ranks == tuple(sorted(group.ranks)):
        kept = {key[0] for key, run in repeated._table.items() if run is not None and key[2] == group}
        assert kept == {name for name, *_ in calls_again(group, (), "")} | {"barrier"}, kept


def shapes_asked_for_and_told(group: kf.Placement) -> None:
    """A rank that finds the call of the first turn beside one that gives NumPy's array, which is compared anew."""
    local, last = tensor_engine().world().local_ranks, group.ranks[-1]
    of = functools.partial(values, "float32", (2, 4))
    everyone = [of(rank) for rank in group.ranks]
    for same_shape in (False, True):
        put = lambda rank, alone=same_shape: of(rank) if alone and rank == last else tensor_engine().put(of(rank), rank)  # noqa: E731
        given = give(put)
        result = kf.comm.all_gather(given, group, same_shape=same_shape)
        check(result, lambda _, a=everyone: a, group, f"all_gather, shapes told: {same_shape}")
        result = kf.comm.gather(given, last, group, same_shape=same_shape)
        check(result, lambda rank, a=everyone: a if rank == last else None, group, f"gather, told: {same_shape}")
    if keras.backend.backend() == "jax" and len(local) == 1 and local[0] in group.ranks and group.size > 1:
        import jax

        try:
            jax.jit(lambda: kf.comm.barrier(group))()
        except kf.FlowError as error:
            assert "inside jax.jit" in str(error)
        else:
            raise AssertionError("a barrier inside jax.jit was not refused")
        kf.comm.barrier(group)


def in_another_order(group: kf.Placement) -> None:
    """What ranks that name a group in different orders get: what does not depend on it, or an error."""
    local, last = tensor_engine().world().local_ranks, group.ranks[-1]
    if group.size == 1 or not set(local) & set(group.ranks):
        return
    mine = group if last in local else kf.Placement(group.ranks[::-1])
    of = lambda rank: values("float32", (3,), rank)  # noqa: E731
    total = reduced([of(rank) for rank in group.ranks], "sum")
    for _ in range(2):
        kf.comm.barrier(mine)
        check(kf.comm.all_reduce(give(of), group=mine), lambda _: total, group, "all_reduce in another order")
        check(
            kf.comm.reduce(give(of), last, group=mine),
            lambda rank: total if rank == last else of(rank),
            group,
            "reduce in another order",
        )
    if len(set(group.ranks) & set(local)) == group.size:
        return  # one process names one order
    try:
        kf.comm.all_gather_into_tensor(give(lambda rank: values("float32", (7, 1), rank)), mine)
    except kf.FlowError as error:
        assert "in the order" in str(error)
    else:
        raise AssertionError("ranks that name a group in different orders were not told")


def movements(group: kf.Placement) -> None:
    """Gathers, exchanges, scatters and broadcasts."""
    count, last = group.size, group.ranks[-1]
    for dtype in dtypes():
        for shape in SHAPES if dtype in ("float32", "bool") else ((3,),):
            of = lambda rank, dtype=dtype, shape=shape: values(dtype, shape, rank)  # noqa: E731
            everyone = [of(rank) for rank in group.ranks]
            joined = np.concatenate(everyone) if shape else np.stack(everyone)
            what = f"{dtype}{list(shape)} over {group.ranks}"
            check(kf.comm.all_gather(give(of), group), lambda _, a=everyone: a, group, f"all_gather {what}")
            check(kf.comm.all_gather_into_tensor(give(of), group), lambda _, a=joined: a, group, f"joined {what}")
            from_last = lambda _, of=of: of(last)  # noqa: E731
            check(kf.comm.broadcast(give(of), last, group), from_last, group, f"broadcast {what}")
            at_last = lambda rank, a=everyone: a if rank == last else None  # noqa: E731
            check(kf.comm.gather(give(of), last, group), at_last, group, f"gather {what}")
        # sizes that differ, some without elements
        uneven = lambda rank, dtype=dtype: values(dtype, (rank % 3, 2), rank)  # noqa: E731
        check(kf.comm.all_gather(give(uneven), group), lambda _, u=uneven: [u(r) for r in group.ranks], group, "uneven")
        # and dims that differ, the first rank with one
        ragged = lambda rank, dtype=dtype: values(dtype, (1, 3) if rank % 2 else (2,), rank)  # noqa: E731
        all_of_them = [ragged(rank) for rank in group.ranks]
        check(kf.comm.all_gather(give(ragged), group), lambda _, a=all_of_them: a, group, "other dims")
        check(
            kf.comm.gather(give(ragged), last, group),
            lambda rank, a=all_of_them: a if rank == last else None,
            group,
            "other dims, gathered",
        )
        for sizes in (lambda rank, k: (rank + k) % 3, lambda rank, k: 2, lambda rank, k: 0):
            sent = lambda rank, s=sizes, dtype=dtype: [  # noqa: E731
                values(dtype, (s(rank, k), 2), 7 * rank + k) for k in range(count)
            ]
            arrives = lambda rank, sent=sent: [sent(each)[group.ranks.index(rank)] for each in group.ranks]  # noqa: E731
            check(kf.comm.all_to_all(give(sent), group), arrives, group, f"all_to_all {dtype}")
            handle = kf.comm.all_to_all(give(sent), group, async_op=True)
            if handle is not None:
                check(handle.wait(), arrives, group, f"awaited all_to_all {dtype}")
        pieces = [values(dtype, (k, 2), k) for k in range(count)]
        check(
            kf.comm.scatter(give(lambda rank, p=pieces: p if rank == last else None), last, group),
            lambda rank, p=pieces: p[group.ranks.index(rank)],
            group,
            f"scatter {dtype}",
        )
    long = lambda rank: values("float32", (40_001,), rank)  # noqa: E731
    check(kf.comm.broadcast(give(long), group.ranks[0], group), lambda _: long(group.ranks[0]), group, "long broadcast")


def objects(group: kf.Placement) -> None:
    """Objects, also one whose keys are numbers of ranks, and a barrier."""
    for of in (
        lambda rank: {"rank": rank, "text": "ü" * rank},
        lambda rank: {each: rank for each in range(kf.env.get_world_size())},
    ):
        everyone = [of(rank) for rank in group.ranks]
        for found in taken(kf.comm.all_gather_object(give(of), group), group).values():
            assert found == everyone
        for found in taken(kf.comm.broadcast_object(give(of), group.ranks[-1], group), group).values():
            assert found == everyone[-1]
    kf.comm.barrier(group)


def point_to_point() -> None:
    """From the first rank to the last, and back, between processes."""
    world = tensor_engine().world()
    if world.process_count == 1:
        return
    first, last = 0, world.size - 1
    for dtype in dtypes():
        for shape in ((), (0,), (3, 2)):
            x = values(dtype, shape, 5)
            if first in world.local_ranks:
                kf.comm.send({first: x}, last)
                same(kf.comm.recv(last, shape, dtype, rank=first), x + x, f"recv {dtype}{shape}")
            elif last in world.local_ranks:
                found = kf.comm.recv(first, rank=last)
                same(found, x, f"recv {dtype}{shape}")
                kf.comm.send({last: x + x}, first, send_meta=False)
    # of a loop: what is named is not asked for
    for turn in range(3):
        x = values("float32", (3, 2), turn)
        if first in world.local_ranks:
            kf.comm.send({first: tensor_engine().put(x, first)}, last, send_meta=False)
            if len(world.local_ranks) == 1:
                kf.comm.send(tensor_engine().put(x + x, first), last, send_meta=False)
        elif last in world.local_ranks:
            same(kf.comm.recv(first, (3, 2), "float32", rank=last), x, f"recv, turn {turn}")
            if len(world.local_ranks) == 1:
                same(kf.comm.recv(first, [3, 2], "float32"), x + x, f"recv again, turn {turn}")  # type: ignore[arg-type]


def gradients(group: kf.Placement) -> None:
    """Of the sum over ranks of weight * result, by the engine.

    Weights differ by rank and place, so that a cotangent that goes astray is seen.
    """
    mine = [rank for rank in group.ranks if rank in tensor_engine().world().local_ranks]
    count, place = group.size, {rank: k for k, rank in enumerate(group.ranks)}
    if not mine:
        return

    def weight(rank: int, size: int) -> np.ndarray:
        return np.arange(1, size + 1, dtype="float32") * (rank + 1)

    def summed(size: int) -> np.ndarray:
        return np.sum([weight(each, size) for each in group.ranks], 0)

    def joined(size: int) -> np.ndarray:
        return np.concatenate([weight(each, size) for each in group.ranks])

    size, ends = 2 * count, np.cumsum(range(1, count + 1))
    given = np.arange(size, dtype="float32")

    def cut(own: Any) -> list[Any]:
        return [own[end - k - 1 : end] for k, end in enumerate(ends)]

    #: what is called -> of a rank's tensor, and the gradient on a rank
    cases: dict[str, tuple[Callable[[Any], Any], np.ndarray, Callable[[int], np.ndarray]]] = {
        "all_reduce": (lambda x: kf.comm.all_reduce(x, group=group), given, lambda _: summed(size)),
        "all_reduce mean": (lambda x: kf.comm.all_reduce(x, "mean", group), given, lambda _: summed(size) / count),
        "all_gather": (
            lambda x: kf.comm.all_gather(x, group),
            given,
            lambda rank: sum((each + 1) for each in group.ranks) * weight(0, size) * (place[rank] + 1),
        ),
        "all_gather_into_tensor": (
            lambda x, begins: kf.comm.all_gather_into_tensor(x, group, begins),
            given,
            lambda rank: summed(size * count)[size * place[rank] : size * (place[rank] + 1)],
        ),
        "reduce_scatter_tensor": (lambda x: kf.comm.reduce_scatter_tensor(x, group=group), given, lambda _: joined(2)),
        "reduce_scatter_tensor mean": (
            lambda x: kf.comm.reduce_scatter_tensor(x, "mean", group),
            given,
            lambda _: joined(2) / count,
        ),
        # rank r sends k + 1 elements to the k-th member, which weighs what came from r by r's place + 1
        "all_to_all": (
            lambda x: kf.comm.all_to_all(each_of(cut, x), group),
            np.arange(ends[-1], dtype="float32"),
            lambda rank: np.concatenate(
                [weight(each, k + 1) * (place[rank] + 1) for k, each in enumerate(group.ranks)]
            ),
        ),
        # the gradient of what was reduced is reduced once more
        "all_reduce of a square": (
            lambda x: kf.comm.all_reduce(each_of(lambda own: own * own, x), group=group),
            given,
            lambda _: 2 * given * summed(size),
        ),
    }
    for name, (collective, x, expected) in cases.items():

        def loss(tensors: Mapping[int, Any], collective: Callable = collective) -> Any:
            results = taken(collective(give(lambda rank: tensors[rank])), group)
            total = 0.0
            for rank, result in results.items():
                pieces = result if isinstance(result, list) else [result]
                for k, piece in enumerate(pieces):
                    with tensor_engine().on_rank(rank):
                        weights = tensor_engine().put(weight(rank, piece.shape[0]) * (k + 1), rank)
                        total = total + to_first(keras.ops.sum(piece * weights), mine[0])
            return total

        world = tensor_engine().world()
        tensors = {rank: tensor_engine().put(x, rank) for rank in world.local_ranks}
        found = differentiated(loss, tensors)
        for rank in mine:
            np.testing.assert_allclose(
                tensor_engine().as_numpy(found[rank]), expected(rank), rtol=1e-6, err_msg=f"{name} on rank {rank}"
            )


def each_of(function: Callable[[Any], Any], x: Any) -> Any:
    """Of this process's tensor, or of those of its ranks."""
    return {rank: function(value) for rank, value in x.items()} if isinstance(x, Mapping) else function(x)


def to_first(value: Any, rank: int) -> Any:
    """On one device: JAX adds up no values of several."""
    if keras.backend.backend() != "jax":
        return value
    import jax

    from keras_flow.backends.jax.devices import rank_devices

    return jax.device_put(value, rank_devices()[rank])


def differentiated(loss: Callable[[Mapping[int, Any]], Any], tensors: Mapping[int, Any]) -> Mapping[int, Any]:
    """By the engine itself."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.grad(loss)(tensors)
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(list(tensors.values()))
            value = loss(tensors)
        return dict(zip(tensors, tape.gradient(value, list(tensors.values())), strict=True))
    for value in tensors.values():
        value.requires_grad_(True)
    loss(tensors).backward()
    return {rank: value.grad for rank, value in tensors.items()}


def everything(groups: list[list[int]], is_short: bool = False) -> int:
    """All of it on each group; how many groups. Short: of the second and later groups float32 alone."""
    for number, ranks in enumerate(groups):
        _chosen[:] = (
            ["float32"] if is_short and number else ["bfloat16", "float32", "bool", "int32"] if is_short else []
        )
        group = kf.Placement(ranks)
        with followed(give(lambda rank: tensor_engine().put(np.ones(1, "float32"), rank))):
            kf.comm.barrier(group)  # nothing is given, so no gradient is asked for
        reductions(group)
        again(group)
        shapes_asked_for_and_told(group)
        in_another_order(group)
        movements(group)
        objects(group)
    _chosen.clear()
    point_to_point()
    return len(groups)
