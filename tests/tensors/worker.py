"""Checks of global tensors on one engine, on every rank: each says what is wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import keras_flow as kf
from keras_flow import sbp
from keras_flow.layout import Layout, combine
from tests.tensors.cases import CASES, Case

MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("a", "b"))


def close(found: np.ndarray, wanted: np.ndarray, dtype: str = "float32") -> bool:
    """Equal up to the rounding of sums."""
    if np.shape(found) != np.shape(wanted):
        return False
    if not np.issubdtype(np.asarray(wanted).dtype, np.floating):
        return bool(np.array_equal(found, wanted))
    limit = 2e-2 if dtype == "float16" else 2e-4
    return bool(np.allclose(np.asarray(found, "float64"), np.asarray(wanted, "float64"), rtol=limit, atol=limit))


# ---- the table


def wrong_rows() -> Iterator[str]:
    """Each signature of each case, run by each rank, combined, compared; on 2x2 and on 3 (uneven) on numpy alone."""
    import keras

    for case in CASES:
        for hierarchy in ((2,), (2, 2), (3,)) if keras.backend.backend() == "numpy" else ((2,),):
            yield from _wrong_rows(case, hierarchy)


def _wrong_rows(case: Case, hierarchy: tuple[int, ...]) -> Iterator[str]:
    import keras
    from keras import ops, tree

    from keras_flow.signatures import Call
    from keras_flow.signatures.choice import signatures
    from keras_flow.tensors import keras_operators, per_rank
    from keras_flow.tensors.global_tensor import GlobalTensor

    placement = kf.Placement(np.arange(np.prod(hierarchy)).reshape(hierarchy))
    function = getattr(ops, case.name)
    arguments = keras_operators.arguments_by_name(function, *_given(case))
    flat = [leaf for value in arguments.values() for leaf in tree.flatten(value)]
    arrays = [leaf for leaf in flat if isinstance(leaf, np.ndarray)]

    def symbol(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        layout = Layout(placement, (sbp.broadcast,) * len(hierarchy), leaf.shape)
        return GlobalTensor(layout, keras.backend.standardize_dtype(leaf.dtype), {})

    symbols = {key: tree.map_structure(symbol, value) for key, value in arguments.items()}
    wanted = [ops.convert_to_numpy(one) for one in tree.flatten(keras_operators.call(function, arguments))]
    names = tuple(
        key for key, value in symbols.items() for leaf in tree.flatten(value) if isinstance(leaf, GlobalTensor)
    )
    options = {key: value for key, value in arguments.items() if key not in names}
    call = Call(
        case.name, tuple(one.shape for one in arrays), tuple(tuple(one.shape) for one in wanted), options, names
    )
    found = list(signatures(call, hierarchy))
    if hierarchy == (2,) and len(found) < case.rows:
        yield f"{case}: {len(found)} signatures on {hierarchy}"
    rng = np.random.default_rng(1)
    for inputs, outputs in found:
        laid = [Layout(placement, part, one.shape) for part, one in zip(inputs, arrays, strict=True)]
        results = [Layout(placement, part, one.shape) for part, one in zip(outputs, wanted, strict=True)]
        shards = [_shards(layout, one, rng) for layout, one in zip(laid, arrays, strict=True)]
        held: list[dict[int, np.ndarray]] = [{} for _ in results]
        for rank in placement.ranks:
            compute = per_rank.function_of_rank(call, function, symbols, laid, results, rank)
            values = compute(*[ops.convert_to_tensor(one[rank]) for one in shards])
            for part, value in zip(held, values, strict=True):
                part[rank] = ops.convert_to_numpy(value)
        try:
            combined = [combine(layout, part) for layout, part in zip(results, held, strict=True)]
            right = all(
                close(one, other, call.options.get("dtype") or "") for one, other in zip(combined, wanted, strict=True)
            )
        except kf.FlowError as error:
            right = False
            yield f"{case}: {error}"
        if not right:
            yield f"{case}: ({'; '.join(map(sbp.text, inputs))}) -> ({'; '.join(map(sbp.text, outputs))})"


def _given(case: Case) -> tuple[list, dict]:
    """Positional and named arguments."""
    if case.name == "einsum":
        return [case.options["subscripts"], *case.tensors["operands"]], {}
    return [], {**case.tensors, **case.options}


def _shards(layout: Layout, value: np.ndarray, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Shards of a value; over a P axis random summands of it."""
    held = {rank: value[layout.local_slices(rank)] for rank in layout.placement.ranks}
    partial = [axis for axis, part in enumerate(layout.nd_sbp) if part == sbp.partial_sum]
    if not partial:
        return held
    families: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.placement.ranks:
        at = layout.placement.coordinates(rank)
        families.setdefault(tuple(-1 if axis in partial else at[axis] for axis in range(len(at))), []).append(rank)
    keys: dict[tuple, list[np.ndarray]] = {}
    for key, ranks in families.items():
        same = tuple(-1 if layout.nd_sbp[axis] == sbp.broadcast else index for axis, index in enumerate(key))
        if same not in keys:  # copies on a B axis have the same summands
            summands = [rng.normal(size=held[ranks[0]].shape).astype(value.dtype) for _ in ranks[1:]]
            keys[same] = [*summands, (held[ranks[0]] - sum(summands)).astype(value.dtype)]
        held |= dict(zip(ranks, keys[same], strict=True))
    return held


# ---- operators on global tensors


def _layouts(shape: tuple[int, ...], dtype: Any, chooser: random.Random) -> tuple[Any, Any]:
    parts = [sbp.broadcast, *(sbp.split(dim) for dim in range(len(shape)))]
    if np.issubdtype(dtype, np.floating):
        parts.append(sbp.partial_sum)
    return chooser.choice(parts), chooser.choice(parts)


def wrong_operators() -> Iterator[str]:
    """Each case through `kf.ops` with a random combination of layouts, and its gradients; with three on numpy."""
    import keras
    from keras import ops, tree

    chooser = random.Random(3)
    repeats = 3 if keras.backend.backend() == "numpy" else 1
    # numpy runs them all; on JAX each rank's device compiles each primitive anew, so it runs the fewest
    every = {"numpy": 1, "jax": 8}.get(keras.backend.backend(), 2)
    for case in CASES[::every]:
        args, kwargs = _given(case)
        function = getattr(ops, case.name)
        wanted = [ops.convert_to_numpy(one) for one in tree.flatten(function(*args, **kwargs))]
        weights = [np.cos(np.arange(one.size, dtype="float32")).reshape(one.shape) for one in wanted]
        reference = None
        for _ in range(repeats):
            layouts: list[str] = []

            def spread(leaf: Any, layouts: list[str] = layouts) -> Any:
                if not isinstance(leaf, np.ndarray):
                    return leaf
                chosen = _layouts(leaf.shape, leaf.dtype, chooser)
                layouts.append(sbp.text(chosen))
                return kf.tensor(leaf, placement=MESH, sbp=chosen)

            given = tree.map_structure(spread, (args, kwargs))
            operator = getattr(kf.ops, case.name)
            found = tree.flatten(operator(*given[0], **given[1]))
            for one, other in zip(found, wanted, strict=True):
                if any(keras.backend.standardize_dtype(part.dtype) != one.dtype for part in one._shards.values()):
                    yield f"{case} {layouts}: dtype {one.dtype}"
                if not close(one.numpy(), other, one.dtype):
                    yield f"{case} {layouts}: value"
            rounds = keras.backend.backend() == "numpy" and any(one.dtype.endswith("float16") for one in found)
            if not case.smooth or rounds or reference:  # numpy refuses: differences would be rounded away
                continue

            leaves = [leaf for leaf in tree.flatten(given) if _is_float(leaf)]
            _, gradients = kf.value_and_grad(_weighted(operator, given, weights))(*leaves)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            if reference is None:
                reference = _reference_gradients(function, args, kwargs, weights)
            for leaf, gradient, other in zip(leaves, gradients, reference, strict=True):
                if gradient.sbp != tuple(sbp.broadcast if part == sbp.partial_sum else part for part in leaf.sbp):
                    yield f"{case} {layouts}: gradient of {sbp.text(leaf.sbp)} lies as {sbp.text(gradient.sbp)}"
                if not close(gradient.numpy(), other):
                    yield f"{case} {layouts}: gradient of an input of shape {leaf.shape}"


def _weighted(operator: Any, structure: Any, weights: list[np.ndarray]) -> Callable[..., Any]:
    """The weighted sum of an operator's results, as a function of the float tensors in `structure`."""
    from keras import tree

    def loss(*tensors: Any) -> Any:
        filled = _filled(structure, _is_float, tensors)
        total: Any = 0.0
        for one, weight in zip(tree.flatten(operator(*filled[0], **filled[1])), weights, strict=True):
            if one.dtype.startswith("float"):
                total = total + kf.ops.sum(kf.ops.cast(one, "float32") * weight)
        return total

    return loss


def _filled(structure: Any, chosen: Callable[[Any], bool], values: Any) -> Any:
    """The structure with other values for the leaves that are chosen, in the order of `tree.flatten`."""
    from keras import tree

    rest = iter(values)
    return tree.pack_sequence_as(structure, [next(rest) if chosen(leaf) else leaf for leaf in tree.flatten(structure)])


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, kf.GlobalTensor) and leaf.dtype.startswith("float")


def _reference_gradients(function: Any, args: list, kwargs: dict, weights: list[np.ndarray]) -> list[np.ndarray]:
    """By the engine, on one device."""
    import keras
    from keras import ops, tree

    from keras_flow.backends.active import tensor_engine
    from keras_flow.tensors.ranks import local_ranks

    engine = tensor_engine()

    flat = [leaf for leaf in tree.flatten((args, kwargs)) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"]
    exact = "float64" if keras.backend.backend() == "numpy" else "float32"  # numpy's are differences

    def run(*values: Any) -> list[Any]:
        filled = _filled((args, kwargs), lambda leaf: isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f", values)
        total: Any = 0.0
        for one, weight in zip(tree.flatten(function(*filled[0], **filled[1])), weights, strict=True):
            if "float" in str(one.dtype):
                total = total + ops.sum(ops.cast(one, exact) * ops.convert_to_tensor(weight))
        return [total]

    rank = local_ranks()[0]
    _, pullback = engine.vjp(run, [engine.put(one, rank) for one in flat])
    return [engine.as_numpy(one) for one in pullback(engine.put(np.ones((), "float32"), rank))]


# ---- arrays, creation, conversions


def wrong_arrays() -> Iterator[str]:
    """Indexing, creation, behaviour as an array, errors."""
    import keras
    import pytest

    value = np.arange(60, dtype="float32").reshape(5, 12)
    every = [sbp.broadcast, sbp.partial_sum, sbp.split(0), sbp.split(1)]
    keys = (np.s_[1], np.s_[-1, 3], np.s_[1:4], np.s_[::2, 1:9:3], np.s_[:, ::-1], np.s_[4:1:-2, None, ...], np.s_[3:3])
    pairs = list(itertools.product(every, repeat=2))
    if keras.backend.backend() != "numpy":
        pairs = pairs[6:7] if keras.backend.backend() == "jax" else pairs[6::9]
    for nd_sbp in pairs:
        for key in keys:
            x = kf.tensor(value, placement=MESH, sbp=nd_sbp)
            if not np.array_equal(x[key].numpy(), value[key]):
                yield f"{sbp.text(nd_sbp)}[{key}]"
            if None in (key if isinstance(key, tuple) else ()):
                continue
            changed = value.copy()
            changed[key] = -1
            x[key] = -1
            if x.sbp != nd_sbp or not np.array_equal(x.numpy(), changed):
                yield f"{sbp.text(nd_sbp)}[{key}] = -1"
    drawn = {}
    for nd_sbp in ("B,B", "S(0),S(1)", "S(1),B", "P,S(0)"):
        for name, made in (
            ("rand", lambda lies: kf.rand(5, 7, placement=MESH, sbp=lies, seed=11)),
            ("randn", lambda lies: kf.randn(5, 7, placement=MESH, sbp=lies, seed=11)),
            ("randint", lambda lies: kf.randint(-3, 90, (5, 7), placement=MESH, sbp=lies, seed=11)),
        ):
            found = made(nd_sbp).numpy()
            if not np.array_equal(drawn.setdefault(name, found), found):
                yield f"{name} as {nd_sbp} has other values"
    seeds = keras.random.SeedGenerator(5)
    one, two = (kf.rand(4, placement=MESH, sbp="B,B", seed=seeds).numpy() for _ in range(2))
    if np.array_equal(one, two):
        yield "a SeedGenerator gave the same numbers twice"
    unseeded = []
    for number in (3, 3, 4):
        keras.utils.set_random_seed(number)
        unseeded.append(kf.rand(4, placement=MESH, sbp="B,B").numpy())
    if not np.array_equal(unseeded[0], unseeded[1]) or np.array_equal(unseeded[0], unseeded[2]):
        yield "without a seed, keras.utils.set_random_seed should decide"
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    half = kf.tensor(np.asarray([1, 2], "float16"), placement=MESH, sbp="S(0),B")
    tests: dict[str, Callable[[], bool]] = {
        "arange": lambda: x.numpy().tolist() == [0, 1, 2, 3, 4, 5] and x.dtype == "int32",
        "len": lambda: len(x) == 6 and [int(one) for one in x] == list(range(6)),
        "numbers": lambda: np.allclose((2.5 * x - np.float32(1)).numpy(), 2.5 * np.arange(6) - 1),
        "arrays": lambda: np.array_equal((np.ones(6, "int32") + x).numpy(), np.arange(6) + 1),
        "a numpy number has a dtype": lambda: (
            np.allclose((half * np.float32(1e5)).numpy(), [1e5, 2e5]) and (half * 3.0).dtype == "float16"
        ),
        "one of 64 bits has 32": lambda: (x + np.int64(1)).dtype == "int32" and (x + np.float64(1)).dtype == "float32",
        "an index": lambda: list(range(x[3])) == [0, 1, 2] and x[x[2]].numpy() == 2,
        "in, ~, round, format, T": lambda: (
            5 in x
            and 6 not in x
            and (~(x > 2)).numpy().tolist() == [True] * 3 + [False] * 3
            and f"{round(x[1] / 3, 1):.2f}" == "0.30"
            and kf.ones(2, 3, placement=MESH, sbp="S(0),B").T.shape == (3, 2)
        ),
        "truth": lambda: bool(kf.ops.all(x < 6)) and float(kf.ops.sum(x)) == 15.0,
        "comparison": lambda: np.array_equal((x == 3).numpy(), np.arange(6) == 3),
        "promotion": lambda: (x + kf.ones(6, placement=MESH, sbp="B,B", dtype="float16")).dtype == "float16",
        "repr": lambda: "S(0),B" in repr(x) and f"rank {kf.env.local_ranks()[0]}" in repr(x),
        "full": lambda: np.array_equal(kf.full((2, 3), 7, placement=MESH, sbp="P,S(1)").numpy(), np.full((2, 3), 7)),
        "explain": lambda: "matmul" in str(kf.explain(kf.ops.matmul, x[None], x[:, None])),
        "same object": lambda: x.to_global(sbp="S(0),B") is x,
        "softmax over a split dim sends two numbers for each row": lambda: (
            kf.explain(kf.ops.softmax, kf.rand(2, 4096, placement=MESH, sbp="B,S(1)", seed=1)).bytes < 200
        ),
        "keepdims with axis None": lambda: kf.ops.sum(x, keepdims=True).numpy().tolist() == [15],
        "maximum of partial sums": lambda: np.allclose(
            kf.ops.max(kf.tensor(value, placement=MESH, sbp="S(1),P"), axis=1).numpy(), value.max(1)
        ),
        "empty": lambda: kf.zeros(0, 3, placement=MESH, sbp="S(0),S(1)").numpy().shape == (0, 3),
        "other placement": lambda: np.array_equal(
            x.to_global(kf.Placement([3, 1, 0]), sbp="S(0)").numpy(), np.arange(6)
        ),
    }
    for name, test in tests.items():
        if not test():
            yield name
    small = kf.tensor(value, placement=kf.Placement([0, 1]), sbp="S(0)")
    errors: tuple[tuple[str, Callable[[], object]], ...] = (
        ("two placements", lambda: small + kf.tensor(value, placement=MESH, sbp="B,B")),
        ("split", lambda: x.to_global(sbp="S(1),B")),
        ("2 axes", lambda: x.to_global(sbp="B")),
        ("ranks \\[4\\]", lambda: x.to_global(kf.Placement([0, 4]), sbp="B")),
        ("layouts only", lambda: kf.explain(kf.value_and_grad(lambda a: kf.ops.sum(a) * float(a[0])), half)),
        ("ranks \\[9\\]", lambda: kf.zeros(3, placement=kf.Placement([0, 9]), sbp="B")),
        ("kf.ops", lambda: kf.explain(len, x)),
        ("no global tensor", lambda: kf.ops.add(1, 2)),
    )
    for text, call in errors:
        with pytest.raises(kf.FlowError, match=text):
            call()
    with pytest.raises(TypeError, match="numpy"):
        import pickle

        pickle.dumps(x)
    with pytest.raises(IndexError):
        x[6]
    yield from _wrong_locals(value)


def _wrong_locals(value: np.ndarray) -> Iterator[str]:
    import pytest

    from keras_flow.backends.active import tensor_engine
    from keras_flow.tensors.ranks import local_ranks

    engine = tensor_engine()

    here = local_ranks()
    for nd_sbp in ("S(0),S(1)", "B,S(0)", "P,B"):
        layout = Layout(MESH, nd_sbp, value.shape)
        shards = _shards(layout, value, np.random.default_rng(2))
        local: Any = {rank: engine.put(np.array(shards[rank]), rank) for rank in here}
        x = kf.to_global(local if len(here) > 1 else local[here[0]], MESH, nd_sbp)
        if x.layout != layout or not close(x.numpy(), value):
            yield f"to_global of shards as {nd_sbp}"
        for rank in here:
            if not np.array_equal(engine.as_numpy(x.to_local(rank)), shards[rank]):
                yield f"to_local of {nd_sbp}"
    outside = kf.tensor(value, placement=kf.Placement([0]), sbp="B")
    if any(engine.as_numpy(outside.to_local(rank)).shape != (0, 0) for rank in here if rank):
        yield "to_local outside the placement"
    wrong = {rank: engine.put(np.zeros((2 + rank, 3), "float32"), rank) for rank in here}
    with pytest.raises(kf.FlowError, match=r"rank \d has a shard"):
        kf.to_global(wrong if len(here) > 1 else wrong[here[0]], MESH, "S(0),B")
    mixed = {rank: engine.put(np.zeros(2, "float32" if rank else "int32"), rank) for rank in here}
    with pytest.raises(kf.FlowError, match="int32 on rank 0"):
        kf.to_global(mixed if len(here) > 1 else mixed[here[0]], MESH, "B,B")


def wrong_engine() -> Iterator[str]:
    """To the engine's own array and back, variables made under a scope, and what gradients refuse."""
    import keras
    import pytest

    x = kf.randn(8, 4, placement=MESH, sbp="S(0),S(1)", seed=1)

    def passes(w: kf.GlobalTensor) -> kf.GlobalTensor:
        return kf.ops.sum(kf.ops.square(w.to_global(grad_sbp="S(1),B")))

    value, gradient = kf.value_and_grad(passes)(x)
    right = close(gradient.numpy(), 2 * x.numpy()) and close(value.numpy(), np.sum(x.numpy() ** 2))
    if gradient.sbp != x.sbp or not right:
        yield "grad_sbp"
    for wrong in (lambda w: kf.value_and_grad(passes)(w)[0], lambda w: w.__setitem__(0, 1.0) or passes(w), lambda w: w):
        with pytest.raises(kf.FlowError):
            kf.value_and_grad(wrong)(x)
    yield from _wrong_gradients()
    if keras.backend.backend() == "numpy":
        return
    back = kf.global_tensor(x.to_engine())
    if back.layout != x.layout or not np.array_equal(back.numpy(), x.numpy()):
        yield "the engine's own array and back"
    if any(_address(value) != _address(x._shards[rank]) for rank, value in back._shards.items()):
        yield "the engine's own array and back copies"
    if kf.env.process_index() == 0 and "sbp=(S(0),S(1))" not in repr(x):  # other processes do not take part
        yield "repr"
    if keras.backend.backend() == "jax":
        yield from _wrong_order_of_axes()
    distribution = kf.ModelParallel(
        kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")), rules={"kernel": {"model": sbp.split(1)}}
    )
    with distribution.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
    kernel = kf.global_tensor(model.weights[0])
    if sbp.text(kernel.sbp) != "B,S(1)" or kernel.shape != (4, 6):
        yield f"a variable under a scope is {kernel!r}"
    if not np.array_equal(kernel.numpy(), keras.ops.convert_to_numpy(model.weights[0])):
        yield "the value of a variable under a scope"


def _address(value: Any) -> int:
    """Where an engine's array lies in memory."""
    import keras

    if keras.backend.backend() == "jax":
        return value.unsafe_buffer_pointer()
    if keras.backend.backend() == "torch":
        return value.data_ptr()
    return np.frombuffer(memoryview(value), "uint8").__array_interface__["data"][0]


def _wrong_order_of_axes() -> Iterator[str]:
    """An array of JAX that is split by the inner axis of its mesh first."""
    import jax

    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("a", "b"))
    value = np.arange(8, dtype="float32")
    array = jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("b", "a"))))
    if not np.array_equal(kf.global_tensor(array).numpy(), value):
        yield "a jax.Array split by its mesh's inner axis first"


def _wrong_gradients() -> Iterator[str]:
    """Of a tensor that is given twice or used beside the arguments, and what an explanation says of them."""
    import pytest

    x = kf.tensor(np.asarray([1, 2, 3], "float32"), placement=MESH, sbp="S(0),B")
    _, (one, two) = kf.value_and_grad(lambda a, b: kf.ops.sum(a * b * b))(x, x)
    if one.numpy().tolist() != [1, 4, 9] or two.numpy().tolist() != [2, 8, 18]:
        yield "gradients of a tensor that is given twice"
    if kf.value_and_grad(lambda a: kf.ops.sum(a * x))(x)[1].numpy().tolist() != [1, 2, 3]:
        yield "the gradient beside a tensor of the program"
    with pytest.raises(kf.FlowError, match="argument 1"):
        kf.value_and_grad(lambda a: a, argnums=1)(x)

    v = kf.randn(8, 6, placement=MESH, sbp="S(0),B", seed=1)
    w = kf.randn(6, 4, placement=MESH, sbp="B,S(1)", seed=2)
    differentiated = kf.value_and_grad(lambda v, w: kf.ops.sum(kf.ops.square(kf.ops.matmul(v, w))))
    explained = kf.explain(differentiated, v, w)
    came = [sbp.text(line.unreduced.nd_sbp) for line in explained.gradients if line.unreduced is not None]
    if came != ["S(0),P", "P,S(1)"] or explained.bytes != 0 or explained.gradient_bytes != 4 * (48 * 2 + 24 * 2):
        yield f"the explanation: {explained}"
    if [line.returned for line in explained.gradients] != [one.layout for one in differentiated(v, w)[1]]:
        yield "the gradients do not lie as the explanation says"
    if "of [6, 4] comes as (P,S(1)), is laid as (B,S(1)), 192 bytes" not in str(kf.explain(kf.ops.matmul, v, w)):
        yield f"the explanation of an operator: {kf.explain(kf.ops.matmul, v, w)}"


CHECKS = {"rows": wrong_rows, "operators": wrong_operators, "arrays": wrong_arrays, "engine": wrong_engine}


def drawn() -> list[str]:
    """Some draws of a seed with more than 32 bits, to their last bit."""
    values = kf.randn(6, placement=MESH, sbp="S(0),B", seed=2**40 + 1).numpy()
    return [float.hex(float(value)) for value in values]
