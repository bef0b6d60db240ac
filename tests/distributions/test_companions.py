"""Variables that belong to a weight: scales, adapters and packed kernels have layouts that go with it."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import sbp
from keras_flow.distributions import companions
from keras_flow.layout import Layout
from tests.distributions import programs

MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))


@pytest.mark.parametrize(
    ("kernel", "split", "name", "shape", "expected"),
    [
        ((6, 8), "B,S(1)", "kernel_scale", (8,), "B,S(0)"),
        ((6, 8), "B,S(0)", "kernel_scale", (8,), "B,B"),
        ((6, 8), "B,S(1)", "kernel_scale", (3, 8), "B,S(1)"),
        ((8, 8), "B,S(0)", "kernel_scale", (4, 8), "B,S(0)"),
        ((6, 8), "B,S(0)", "kernel_scale", (3, 8), "B,B"),  # three groups do not divide
        ((6, 4), "B,S(1)", "kernel_zero", (1, 8), "B,S(1)"),  # a kernel packed two by two
        ((4, 6), "B,S(0)", "kernel_zero", (8, 3), "B,S(0)"),  # packed and transposed
        ((6, 8), "S(0),S(1)", "lora_kernel_a", (6, 2), "S(0),B"),
        ((6, 8), "S(0),S(1)", "lora_kernel_b", (2, 8), "B,S(1)"),
        ((6, 4, 8), "S(0),S(1)", "lora_kernel_a", (6, 4, 2), "S(0),S(1)"),
        ((6, 4, 8), "S(0),S(2)", "lora_kernel_b", (2, 8), "B,S(1)"),
        ((6, 4, 8), "B,S(1)", "kernel_scale", (1, 4, 8), "B,S(1)"),
        ((100, 8), "B,S(0)", "embeddings_scale", (100,), "B,S(0)"),
        ((8, 8), "B,S(1)", "embeddings_scale", (8,), "B,B"),
        ((6, 8), "S(1),S(1)", "kernel_scale", (8,), "S(0),S(0)"),
        ((6, 8), "B,S(1)", "kernel_amax_history", (1024,), "B,B"),
        ((6, 8), "B,S(1)", "g_idx", (6,), "B,B"),
        ((4, 6), "B,S(0)", "zero_point", (8, 3), "B,S(0)"),  # EinsumDense's name of it
    ],
)
def test_layouts_follow_the_weight(kernel: tuple, split: str, name: str, shape: tuple, expected: str) -> None:
    weight = Layout(MESH, sbp.parse(split), kernel)
    assert sbp.text(companions.layout_with(weight, f"h/{name}", shape).nd_sbp) == expected


@pytest.mark.parametrize(
    ("kernel", "split", "shape", "expected"),
    [
        ((6, 4, 8), "S(0),S(1)", (6, 16), "S(0),S(1)"),
        ((6, 4, 8), "B,S(2)", (6, 16), "B,B"),  # of heads and their features in one dim, only heads are blocks
        ((4, 8, 6), "B,S(0)", (32, 3), "B,S(0)"),
        ((6, 8), "S(0),S(1)", (4, 6), "S(1),S(0)"),
        ((6, 8), "S(0),S(1)", (5, 5), "B,B"),
    ],
)
def test_packed_kernels(kernel: tuple, split: str, shape: tuple, expected: str) -> None:
    assert sbp.text(companions.packed(Layout(MESH, sbp.parse(split), kernel), shape).nd_sbp) == expected


def test_attributes_of_a_layer_of_ones_own_say_nothing_of_packing() -> None:
    class Patches(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="patches")
            self.kernel_shape = (3, 3)

        def build(self, shape: tuple) -> None:
            self.kernel = self.add_weight(shape=(3, 3, 4, 8), name="kernel")

    with kf.ModelParallel(MESH, rules={"patches/kernel": {"model": sbp.split(3)}}).scope() as distribution:
        layer = Patches()
        layer.build((None, 4))
    assert not distribution.has_problems
    assert kf.layout_of(layer.kernel).layout.local_shape(0) == (3, 3, 4, 4)


def _layouts(rules: dict, mode: str | None, lora: bool) -> dict[str, str]:
    """Last name of each variable of the layer -> its nd_sbp."""
    with kf.ModelParallel(MESH, rules=rules, batch_axes="data").scope() as distribution:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="hidden")])
        model.compile("sgd", "mse")
        if mode is not None:
            model.get_layer("hidden").quantize(mode)
        if lora:
            model.get_layer("hidden").enable_lora(2)
        distribution.check(model)
        model.predict(np.ones((4, 8), "float32"), verbose=0)
    layer = model.get_layer("hidden")
    for variable in layer.variables:
        layout = kf.layout_of(variable).layout
        assert programs.held(variable) == {rank: layout.local_shape(rank) for rank in range(4)}
    return {each.path.rpartition("/")[2]: sbp.text(kf.layout_of(each).layout.nd_sbp) for each in layer.variables}


def test_a_rule_of_the_kernel_holds_after_quantization_and_lora() -> None:
    found = _layouts({"hidden/kernel": {"model": sbp.split(1)}}, "int8", lora=True)
    assert found == {
        **{"kernel": "B,S(1)", "kernel_scale": "B,S(0)", "bias": "B,B"},
        **{"lora_kernel_a": "B,B", "lora_kernel_b": "B,S(1)"},
    }


def test_a_rule_of_ones_own_wins() -> None:
    rules = {"kernel_scale": "B,B", "hidden/kernel": {"model": sbp.split(1)}}
    assert _layouts(rules, "int8", lora=False)["kernel_scale"] == "B,B"


def test_what_belongs_to_a_weight_of_another_name_follows_it() -> None:
    """A rule of a table also finds the numbers of groups beside it, which have one dim."""
    from keras.dtype_policies import Int4DTypePolicy

    with kf.ModelParallel(MESH, rules={"tokens": {"model": sbp.split(1)}}).scope() as distribution:
        policy = Int4DTypePolicy("int4/4", "float32")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(8, 8, name="tokens", dtype=policy)])
        distribution.check(model)
    layouts = {each.name: sbp.text(kf.layout_of(each).layout.nd_sbp) for each in model.variables}
    assert layouts == {
        "embeddings": "B,S(1)",
        "embeddings_scale": "B,S(1)",
        "embeddings_zero": "B,S(1)",
        "g_idx": "B,B",
    }


def test_histories_of_float8_are_broadcast() -> None:
    found = _layouts({"hidden/kernel": {"model": sbp.split(1)}}, "float8", lora=False)
    assert {name for name, layout in found.items() if layout != "B,B"} == {"kernel"}
    assert "kernel_amax_history" in found


def test_the_source_names_the_weight() -> None:
    with kf.ModelParallel(MESH, rules={"hidden/kernel": "B,S(0)"}).scope():
        layer = keras.layers.Dense(8, name="hidden")
        layer.build((None, 8))
        layer.enable_lora(2)
    assert str(kf.layout_of(layer.lora_kernel_a)) == (
        "B,S(0) (from its weight 'hidden/kernel', which has it from rule 'hidden/kernel')"
    )
