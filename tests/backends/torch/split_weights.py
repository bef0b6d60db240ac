"""Checks of layers with split weights, which are computed on plain tensors with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check

PAIR = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
CONVOLUTIONS = {"up/kernel": -1, "up/bias": 0, "norm": 0, "down/kernel": -2}
KERNELS = {"attention/(query|key|value|gate)/kernel": 1, "attention_output/kernel": 0}
HEADS = {**KERNELS, "attention/(query|key|value)/bias": 0}
#: axes of the mesh -> ranks along them
MESHES = (
    {"model": 4},
    {"data": 2, "model": 2},
    {"data": 1, "model": 4},
    {"model": 2, "data": 2},
    {"data": 4, "model": 1},
)


def models() -> dict[str, tuple[Callable[[], Any], dict[str, int], tuple[int, ...], bool]]:
    """Name -> model, rules (dims are counted as in Python), shape of a row, whether on plain tensors."""
    import keras
    from keras import layers

    def sequential(*parts: Any) -> Callable[[], Any]:
        return lambda: keras.Sequential([part() for part in parts])

    def of_convolutions(kind: Any, **options: Any) -> Callable[[], Any]:
        axis = 1 if options.get("data_format") == "channels_first" else -1
        return sequential(
            lambda: kind(8, 3, padding="same", activation="silu", name="up", **options),
            lambda: layers.BatchNormalization(axis, name="norm"),
            lambda: kind(3, 2, name="down", **options),
            layers.Flatten,
        )

    def attends(**options: Any) -> Any:
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(11, 8, mask_zero=True, name="table")(tokens)
        other = layers.Dense(5, name="other")(x)
        attention = layers.MultiHeadAttention(4, 3, value_dim=2, output_shape=7, name="attention", **options)
        return keras.Model(tokens, layers.Dense(3, name="out")(attention(x, other, use_causal_mask=True)))

    def attends_by_masks_of_heads() -> Any:
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(11, 8, name="table")(tokens)
        seen = keras.ops.reshape(tokens, (-1, 1, 1, 6)) >= np.array([0, 3, 1, 2]).reshape(4, 1, 1)
        attention = layers.MultiHeadAttention(4, 3, name="attention")
        masks = keras.ops.concatenate([seen] * 6, axis=2)
        return keras.Model(tokens, layers.Dense(3, name="out")(attention(x, x, attention_mask=masks)))

    return {
        "dense": (
            sequential(lambda: layers.Dense(8, "gelu", name="up"), lambda: layers.Dense(3, name="down")),
            PAIR, (6,), True,
        ),
        "dense_with_a_whole_bias": (
            sequential(lambda: layers.Dense(8, "gelu", name="up"), lambda: layers.Dense(3, name="down")),
            {"up/kernel": 1, "down/kernel": 0}, (6,), True,
        ),
        "dense_of_sequences": (
            sequential(lambda: layers.Dense(8, "tanh", name="up"), lambda: layers.Dense(3, name="down")),
            PAIR, (5, 6), True,
        ),
        "activations_of_the_whole": (
            sequential(
                lambda: layers.Dense(8, "softmax", name="up"), lambda: layers.Dense(3, "relu", name="down")
            ), PAIR, (6,), False,
        ),
        "einsum": (
            sequential(
                lambda: layers.EinsumDense("abc,cde->abde", (None, 4, 2), activation="relu", bias_axes="de", name="up"),
                lambda: layers.EinsumDense("abde,def->abf", (None, 3), bias_axes="f", name="down"),
            ),
            PAIR, (5, 6), True,
        ),
        "conv1d": (of_convolutions(layers.Conv1D, dilation_rate=2), CONVOLUTIONS, (7, 4), True),
        "conv2d": (of_convolutions(layers.Conv2D), CONVOLUTIONS, (5, 5, 4), True),
        "einsum_of_dims_left_out": (
            sequential(
                lambda: layers.EinsumDense("...c,ce->...e", 8, activation="relu", bias_axes="e", name="up"),
                lambda: layers.EinsumDense("...e,ef->...f", 3, bias_axes="f", name="down"),
            ), PAIR, (5, 6), True,
        ),
        "channels_first": (
            of_convolutions(layers.Conv2D, data_format="channels_first"), CONVOLUTIONS, (4, 5, 5), True,
        ),
        "attention": (attends, HEADS, (6,), True),
        "gated_attention": (lambda: attends(use_gate=True, use_bias=False), KERNELS, (6,), True),
        "attention_by_masks_of_heads": (attends_by_masks_of_heads, KERNELS, (6,), True),
        "attention_with_dropout_for_0": (lambda: attends(dropout=1e-12), HEADS, (6,), True),
    }  # fmt: skip


def trained(make: Callable[[], Any], shape: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    """Outputs, weights and moving statistics after three steps of plain SGD."""
    import keras

    keras.utils.set_random_seed(3)
    model = make()
    random = np.random.default_rng(0)
    has_tokens = model.built and "int" in model.inputs[0].dtype
    x = random.integers(0, 11, (8, *shape)) if has_tokens else random.normal(size=(8, *shape))
    model(x[:4])
    for variable in model.trainable_variables:  # a bias of zeros would hide that it is added twice
        variable.assign(random.normal(size=variable.shape) * 0.5)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    y = random.normal(size=model(x).shape)
    for _ in range(3):
        model.train_on_batch(x, y)
    weights = [(each.path, keras.ops.convert_to_numpy(each)) for each in model.variables]
    return [("outputs", model.predict(x, verbose=0)), *weights]


def check_equal(found: list[tuple[str, np.ndarray]], wanted: list[tuple[str, np.ndarray]], what: str) -> None:
    for (_, ours), (path, theirs) in zip(found, wanted, strict=True):
        error = np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max())
        assert error < 2e-5, f"{what}: {path} differs by {error:.1e}"


@check
def layers_with_split_weights_have_the_numbers_of_one_device() -> None:
    """On plain tensors where they are understood, on every mesh; DTensor's operators compute the others."""
    import keras_flow as kf
    from keras_flow.backends.torch import split_layers

    for number, (name, (make, rules, shape, is_plain)) in enumerate(models().items()):
        wanted = trained(make, shape)
        for mesh in (MESHES[number % len(MESHES)], MESHES[(number + 2) % len(MESHES)]):
            placement = kf.Placement(np.arange(4).reshape(tuple(mesh.values())).tolist(), tuple(mesh))
            by_path = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in rules.items()}
            with (
                mock.patch.object(split_layers, "_of_mesh", wraps=split_layers._of_mesh) as counted,
                kf.ModelParallel(placement, rules=by_path).scope(),
            ):
                found = trained(make, shape)
            check_equal(found, wanted, f"{name} on {mesh}")
            assert bool(counted.call_count) == is_plain, f"{name} on {mesh}: {counted.call_count}"


@check
def a_penalty_on_gradients_has_the_update_of_one_device() -> None:
    """Gradients of gradients go through split layers, and through their sums."""
    import keras
    import torch

    import keras_flow as kf

    class Penalised(keras.Model):
        def train_step(self, data):
            x, y = (keras.ops.convert_to_tensor(part) for part in data[:2])
            self.zero_grad()
            x = x.detach().requires_grad_()
            outputs = self(x, training=True)
            variables = self.trainable_variables
            inputs = [x, *(variable.value for variable in variables)]
            gradients = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
            penalty = sum(gradient.square().sum() for gradient in gradients)
            (self.compute_loss(x=x, y=y, y_pred=outputs) + 1e-4 * penalty).backward()
            with torch.no_grad():
                self.optimizer.apply([variable.value.grad for variable in variables], variables)
            return {}

    def make() -> keras.Model:
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, "tanh", name="up")(keras.layers.Dense(5, "tanh", name="whole")(inputs))
        outputs = keras.layers.Dense(3, name="last")(keras.layers.Dense(4, name="down")(hidden))
        return Penalised(inputs, outputs)

    wanted = trained(make, (6,))
    for rules in (PAIR, {"up/kernel": 1, "down/kernel": 0}):
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        by_path = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in rules.items()}
        with kf.ModelParallel(mesh, rules=by_path).scope():
            found = trained(make, (6,))
        check_equal(found, wanted, str(rules))


@check
def a_bias_that_every_rank_adds_is_seen() -> None:
    """What the checks above would say of a layer whose bias counts as often as there are ranks."""
    import keras_flow as kf
    from keras_flow.backends.torch import split_layers

    make, rules, shape, _ = models()["dense"]
    wanted = trained(make, shape)
    by_path = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in rules.items()}
    with (
        mock.patch.object(split_layers._OnOneRank, "apply", lambda value, is_first: value),
        kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=by_path).scope(),
    ):
        found = trained(make, shape)
    assert np.abs(found[0][1] - wanted[0][1]).max() > 1e-2


@check
def heads_whose_output_is_split_another_way_have_the_numbers_of_one_device() -> None:
    """By columns over a second axis: the gradient of the heads is a sum over it. Inputs are given by name, too."""
    import keras

    import keras_flow as kf

    def make() -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(11, 8, name="table")(tokens)
        seen = keras.layers.MultiHeadAttention(4, 3, name="attention")(query=x, value=x)
        return keras.Model(tokens, keras.layers.Dense(3, name="out")(seen))

    wanted = trained(make, (6,))
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("model", "other"))
    split = {"(query|key|value)/kernel": {"model": 1}, "attention_output/kernel": {"model": 0, "other": 2}}
    for rules in (split, {pattern: {"model": dims["model"]} for pattern, dims in split.items()}):
        by_path = {f"attention/{k}": {axis: kf.sbp.split(d) for axis, d in dims.items()} for k, dims in rules.items()}
        with kf.ModelParallel(mesh, rules=by_path).scope():
            found = trained(make, (6,))
        check_equal(found, wanted, str(rules))
