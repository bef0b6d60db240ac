"""Checks that operators on split tensors have the values and gradients of one device, whatever is split and how."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np

from tests.backends.torch.registry import check, on_all_ranks

#: ranks, layout and shape of a tensor: a square hierarchy, one with an axis of one rank, dims that do not divide
LAID = (
    (((0, 1), (2, 3)), "S(0),S(2)", (8, 4, 4)),
    (((0, 1), (2, 3)), "S(1),P", (8, 4, 4)),
    (((0, 1, 2, 3),), "B,S(0)", (8, 4, 4)),
    (((0, 1, 2, 3),), "S(1),S(2)", (6, 5, 3)),
)


def _constant(*shape: int):
    import torch

    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape).astype("float32"))


def _along_dims() -> Iterator[tuple[str, Callable]]:
    """Scans, orders, shifts: along each dim, counted from the front and from the back."""
    import torch
    from keras import ops

    for dim in (0, -1):
        yield f"cumsum {dim}", lambda x, dim=dim: ops.cumsum(x, axis=dim)
        yield f"cummax {dim}", lambda x, dim=dim: torch.cummax(x, dim)[0]
        yield f"sort {dim}", lambda x, dim=dim: ops.sort(x, axis=dim)
        yield f"flip {dim}", lambda x, dim=dim: ops.flip(x, axis=dim)
        yield f"take {dim}", lambda x, dim=dim: ops.take(x, np.array([0, 2, 1, 1]), axis=dim)
        yield f"select {dim}", lambda x, dim=dim: x.select(dim, 1)
        yield f"narrow {dim}", lambda x, dim=dim: x.narrow(dim, 1, 2)
        yield f"trapezoid {dim}", lambda x, dim=dim: ops.trapezoid(x, axis=dim)
        yield f"windows {dim}", lambda x, dim=dim: torch.unfold_copy(x, dim, 2, 1)
        yield f"std {dim}", lambda x, dim=dim: ops.std(x, axis=dim)
        yield f"median {dim}", lambda x, dim=dim: ops.median(x, axis=dim)
        yield f"quantile {dim}", lambda x, dim=dim: ops.quantile(x, [0.25, 0.4], axis=dim)
        yield f"topk {dim}", lambda x, dim=dim: [torch.topk(x, k, dim)[0] for k in (2, 3)]


def _that_write() -> Iterator[tuple[str, Callable]]:
    """Operators that write into a tensor, or into a view of one."""
    import torch
    from keras import ops

    def written(write: Callable) -> Callable:
        def call(x):
            y = x * 1.0
            write(x, y)
            return y * x

        return call

    places = np.array([[1, 0, 1], [0, 2, 2], [2, 1, 0]])
    yield "slice_update", lambda x: ops.slice_update(x, (1, 0, 0), x[:2] * 3)
    yield "slice_update of zeros", lambda x: ops.slice_update(ops.zeros(tuple(x.shape)), (0, 0, 1), x[:, :, :2])
    yield "scatter_update", lambda x: ops.scatter_update(x, places, np.array([1.0, 2.0, 3.0], "float32"))
    yield "scatter", lambda x: ops.scatter(np.array([[1], [3], [1]]), x[:3], (5, *x.shape[1:]))
    yield "y[1:3] = 7", written(lambda x, y: y.__setitem__(slice(1, 3), 7.0))
    yield "y[:, 1] = x[:, 0]", written(lambda x, y: y.__setitem__((slice(None), 1), x[:, 0]))
    yield "y[x > 0] = 0", written(lambda x, y: y.__setitem__(x > 0, 0.0))
    yield "y[:, [0, 2]] = x", written(lambda x, y: y.__setitem__((slice(None), [0, 2]), x[:, :2]))
    yield "y[1:3].mul_", written(lambda x, y: y[1:3].mul_(3.0))
    yield "y.transpose.[].copy_", written(lambda x, y: y.transpose(0, 2)[1:3].copy_(2.0 * x.transpose(0, 2)[:2]))
    yield "y.index_add_", written(lambda x, y: y.index_add_(1, torch.tensor([0, 2]), x[:, :2]))
    yield "y.scatter_add_", written(lambda x, y: y.scatter_add_(1, torch.zeros(x.shape, dtype=torch.int64), x))
    yield "y.pow_", lambda x: (x * x + 1).pow_(1.5)
    yield "y.transpose_", lambda x: (x * 1.0).transpose_(0, 2) * 2.0


def _windows() -> Iterator[tuple[str, Callable]]:
    """Poolings, paddings, windows: of pictures in rows, and of one picture without rows."""
    import torch
    from keras import ops

    nn = torch.nn.functional
    for rows, place in (
        ("rows", lambda x: ops.tile(x, (1, 2, 2))[:, None] * _constant(1, 4, 1, 1)),
        ("one", lambda x: x),
    ):
        yield f"average pool {rows}", lambda x, place=place: nn.avg_pool2d(place(x), 2)
        yield f"max pool {rows}", lambda x, place=place: nn.max_pool2d(place(x), 2)
        yield f"adaptive average {rows}", lambda x, place=place: nn.adaptive_avg_pool2d(place(x), 2)
        yield f"adaptive max {rows}", lambda x, place=place: nn.adaptive_max_pool2d(place(x), 2)
        yield f"replicated {rows}", lambda x, place=place: nn.pad(place(x), (1, 2, 2, 1), "replicate")
        yield f"reflected {rows}", lambda x, place=place: nn.pad(place(x), (1, 2, 2, 1), "reflect")
        yield f"columns {rows}", lambda x, place=place: nn.unfold(place(x), 2)
        yield f"folded {rows}", lambda x, place=place: nn.fold(nn.unfold(place(x), 2) ** 2, place(x).shape[-2:], 2)
        yield f"3d {rows}", lambda x, place=place: nn.adaptive_avg_pool3d(place(x)[..., None] * _constant(3), 2)
    yield "shrink", lambda x: [nn.hardshrink(x, 0.3), nn.softshrink(x, 0.3)]
    yield "isin", lambda x: ops.cast(ops.isin(ops.cast(x * 2, "int32"), np.array([1, -1])), "float32") * x
    yield "floor_divide", lambda x: ops.floor_divide(ops.cast(x * 9, "int32"), 2)


def _others() -> Iterator[tuple[str, Callable]]:
    """Indices, counts, losses, shapes, and those that DTensor has wrong."""
    import torch
    from keras import ops

    def small(x):
        return ops.cast(ops.abs(x[:, 0, 0]) * 2 % 4, "int32")

    def image(x):
        return ops.reshape(ops.tile(x, (1, 4, 4)), (x.shape[0], 4 * x.shape[1], 4, x.shape[2]))

    def routed(x):
        return ops.sum(ops.one_hot(ops.top_k(x, 2)[1], x.shape[-1]), axis=-2) * x

    indices = torch.tensor([[0, 1, 2], [1, 2, 2]])

    def square(x):
        return ops.matmul(x, ops.transpose(x, (0, 2, 1))) + 2.0 * ops.eye(x.shape[1])

    yield "triangular systems", lambda x: ops.solve_triangular(ops.tril(square(x)), x, lower=True)
    yield "systems", lambda x: ops.solve(square(x), x)
    yield "systems with one side", lambda x: ops.solve(square(x), x[:, :, 0])
    yield "systems with the same sides", lambda x: torch.linalg.solve(square(x), x[0])
    yield "one system", lambda x: torch.linalg.solve_triangular(torch.tril(square(x)[0]), x, upper=False)
    yield "maximum", lambda x: ops.max(x)
    yield "any", lambda x: [ops.cast(ops.any(x > -9, axis=axis), "float32") * 2 for axis in (None, 0, -1)]
    yield "any of numbers", lambda x: ops.any(x, axis=1)
    yield "all", lambda x: [ops.cast(ops.all(x > -1, axis=axis), "float32") * 2 for axis in (None, 0, -1, (0, 2))]
    yield "all, as Keras 3.13 asks", lambda x: torch.all(x > -9)
    yield "truth values side by side", lambda x: torch.stack([torch.all(x > -9), torch.any(x > 9), torch.tensor(True)])
    # the largest numbers of some ranks are zero where those of all are not, and the other way round
    yield (
        "any and all of extremes",
        lambda x: [
            function(extreme(torch.relu(sign * x), dim), dim)
            for function in (torch.any, torch.all)
            for extreme in (torch.amax, torch.amin)
            for sign in (1, -1)
            for dim in (0, 1)
        ],
    )
    yield "nansum", lambda x: torch.nansum(x + torch.tensor([float("nan"), *[0.0] * (x.shape[2] - 1)]), dim=1)
    yield "bincount", lambda x: ops.bincount(small(x), minlength=4)
    yield "segment_sum", lambda x: ops.segment_sum(x, np.arange(x.shape[0]) % 3, 3)
    yield "top-k routing", routed
    yield "embedding", lambda x: [torch.nn.functional.embedding(indices, x[:, 0]) * w for w in (1.0, 2.0)]
    yield "table and indices", lambda x: torch.nn.functional.embedding(small(x), ops.reshape(x, (-1, x.shape[2])))
    yield "rms_norm", lambda x: torch.nn.functional.rms_norm(x, (x.shape[2],), None, 1e-6)
    yield "argmax of joined dims", lambda x: ops.argmax(ops.reshape(x, (x.shape[0], -1)), axis=-1)
    yield "sparse loss", lambda x: ops.sparse_categorical_crossentropy(small(x) % 3, x[:, 0], from_logits=True)
    yield "relu6", lambda x: ops.relu6(x) + ops.elu(x)
    yield "masked_select", lambda x: torch.masked_select(x, x > 0)
    yield "pairs", lambda x: ops.abs(x[:, None] - x[None])
    yield "float", lambda x: x * float(ops.sum(x))
    yield "if", lambda x: x * 2 if ops.mean(x) > 0.001 else x * 3
    for dilation in (1, 2):
        yield (
            f"dilated by {dilation}",
            lambda x, dilation=dilation: ops.conv(
                image(x),
                _constant(2, 2, x.shape[2], 4),
                dilation_rate=dilation,
                padding="same",
                data_format="channels_last",
            ),
        )


def _attention() -> Iterator[tuple[str, Callable]]:
    """Attention with a mask that all ranks have whole, of rows and of heads."""
    from torch.nn.functional import scaled_dot_product_attention

    for name, dim in (("rows", 1), ("heads", 0)):

        def attend(x, dim=dim):
            x = x.unsqueeze(dim)
            mask = _constant(*x.shape[:3], x.shape[2])
            return scaled_dot_product_attention(x, x * 2.0, x, attn_mask=mask)

        yield f"a mask of {name}", attend


def _leaf(value: np.ndarray, layout: str, mesh):
    """A DTensor with gradient; ranks of a partial sum hold summands that differ."""
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import layouts, local_tensors
    from keras_flow.backends.torch.variables import from_logical

    placements = layouts.to_placements(kf.sbp.parse(layout))
    whole = tuple(torch.distributed.tensor.Replicate() if part.is_partial() else part for part in placements)
    local = from_logical(torch.from_numpy(value), mesh, whole)._local_tensor
    for axis, part in enumerate(placements):
        if part.is_partial():
            others = mesh.size(axis) - 1
            local = local * (1 + 2 * others) if mesh.get_local_rank(axis) == 0 else local * -2.0
    return local_tensors.from_local(local, value.shape, mesh, placements).detach().requires_grad_()


def _run(function: Callable, x) -> list[np.ndarray]:
    """Values, and the gradient of their weighted sum."""
    import torch
    from torch.distributed.tensor import DTensor

    made = function(x)
    outputs = list(made) if isinstance(made, list | tuple) else [made]
    held = [one for one in outputs if one.requires_grad]
    if held:
        # weighted by itself too, so that the gradient is split as the value is
        sum((one * (one.detach() + 1.0) * _constant(*one.shape)).sum() for one in held).backward()
    found = [*outputs, *([x.grad] if held else [])]
    with torch.no_grad():
        return [(one.full_tensor() if isinstance(one, DTensor) else one).numpy() for one in found]


@check
def operators_on_split_tensors_are_those_of_one_device() -> None:
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import layouts
    from keras_flow.backends.torch.step import RunningStep, running

    wrong = []
    for ranks, layout, shape in LAID:
        value = np.random.default_rng(7).normal(size=shape).astype("float32")
        distribution = kf.ModelParallel(kf.Placement(np.array(ranks)))
        for name, function in (*_along_dims(), *_that_write(), *_windows(), *_others(), *_attention()):
            expected = _run(function, torch.from_numpy(value).requires_grad_())
            with distribution.scope(), running(RunningStep(distribution, consistent=True)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                distribution.ensure_entered()
                leaf = _leaf(value, layout, layouts.mesh(distribution.placement))
                try:
                    found = _run(function, leaf)
                except RuntimeError as error:  # the others are looked at too
                    wrong.append((name, ranks, layout, shape, str(error)))
                    continue
            same = all(
                one.shape == other.shape and np.allclose(one, other, 1e-4, 1e-4)
                for one, other in zip(found, expected, strict=True)
            )
            if not same:
                wrong.append((name, ranks, layout, shape))
    everyone = on_all_ranks(wrong)
    assert not any(everyone), everyone


@check
def pictures_are_resized_by_the_ranks_that_hold_them() -> None:
    """With nothing gathered where rows and channels divide, and nothing said."""
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import layouts
    from keras_flow.backends.torch.step import RunningStep, running

    resize = torch.nn.functional.interpolate
    kinds = (("nearest", {}), ("nearest-exact", {}), ("bilinear", {}), ("bicubic", {"antialias": True}))
    distribution = kf.ModelParallel(kf.Placement([[0, 1], [2, 3]]))
    for layout, shape in (("S(0),S(1)", (4, 2, 3, 5)), ("S(0),P", (4, 2, 3, 5)), ("S(1),S(2)", (3, 5, 6, 4))):
        value = np.random.default_rng(7).normal(size=shape).astype("float32")
        for kind, more in kinds:

            def run(x, kind=kind, more=more):
                return resize(x, size=(5, 8), mode=kind, **more) * 1.0

            expected = _run(run, torch.from_numpy(value).requires_grad_())
            with distribution.scope(), running(RunningStep(distribution, consistent=True)), warnings.catch_warnings():
                warnings.simplefilter("error")
                distribution.ensure_entered()
                found = _run(run, _leaf(value, layout, layouts.mesh(distribution.placement)))
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@check
def a_maximum_of_a_partial_sum_has_a_gradient() -> None:
    """A sum over four ranks made twice, in two orders, is not equal to itself."""
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import layouts, local_tensors
    from keras_flow.backends.torch.step import RunningStep, running

    distribution = kf.ModelParallel(kf.Placement([[0, 1, 2, 3]]))
    value = np.random.default_rng(7).normal(size=(8, 4, 4)).astype("float32")
    expected = _run(lambda x: torch.amax(x, 1), torch.from_numpy(value).requires_grad_())
    with distribution.scope(), running(RunningStep(distribution, consistent=True)):
        distribution.ensure_entered()
        mesh = layouts.mesh(distribution.placement)
        noise = np.random.default_rng(layouts.this_rank()).normal(size=value.shape).astype("float32")
        noise -= np.sum([part for part in on_all_ranks(noise)], axis=0) / 4  # type: ignore[arg-type]
        local = torch.from_numpy(value / 4 + noise)
        placements = layouts.to_placements(kf.sbp.parse("S(1),P"))
        x = local_tensors.from_local(local, value.shape, mesh, placements).requires_grad_()
        found = _run(lambda x: torch.amax(x, 1), x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@check
def a_partial_sum_divided_by_zero_is_what_the_sum_is() -> None:
    """The ranks hold summands of both signs: inf and -inf would be no number."""
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import layouts, local_tensors
    from keras_flow.backends.torch.step import RunningStep, running

    distribution = kf.ModelParallel(kf.Placement([[0, 1, 2, 3]]))
    value = np.array([[3.0, -2.0, 0.0, 5.0]], "float32")
    divisor = np.array([[0.0, 0.0, 0.0, 2.0]], "float32")
    with np.errstate(all="ignore"):
        expected = value / divisor, value / np.float32(0)
    with distribution.scope(), running(RunningStep(distribution, consistent=True)):
        distribution.ensure_entered()
        mesh = layouts.mesh(distribution.placement)
        sign = -1.0 if layouts.this_rank() % 2 else 1.0
        local = torch.from_numpy(value / 4 + sign)
        x = local_tensors.from_local(local, value.shape, mesh, layouts.to_placements(kf.sbp.parse("B,P")))
        by = local_tensors.from_local(
            torch.from_numpy(divisor), divisor.shape, mesh, layouts.to_placements(kf.sbp.parse("B,B"))
        )
        found = (x / by).full_tensor().numpy(), (x / 0).full_tensor().numpy()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@check
def what_is_computed_whole_is_said_once_and_names_the_layer() -> None:
    import keras
    import torch

    import keras_flow as kf

    class Distances(keras.layers.Layer):
        def call(self, inputs):
            return torch.cdist(inputs, inputs)

    with kf.ModelParallel(kf.Placement(range(4), axis_names=("data",))).scope():
        model = keras.Sequential([keras.Input((2, 3)), Distances(name="distances")])
        model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.predict(np.ones((8, 2, 3), "float32"), verbose=0)
    said = [str(one.message) for one in caught if issubclass(one.category, kf.errors.ComputedWhole)]
    assert len(said) == 1 and "distances: " in said[0] and "_cdist_forward" in said[0], said
