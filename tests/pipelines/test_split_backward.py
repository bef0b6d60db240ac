"""A backward pass in two parts is the whole one: its gradients, each product of matrices once, and not all in one part.

Stages are random graphs: weights that are used once, twice or not, in a branch that no received tensor reaches, in a
tensor that is received and sent; several outputs, among them one that is given no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

ENGINES = ("jax", "tensorflow", "torch")
ROWS, WIDTH, WEIGHTS = 4, 6, 9


def _stage(seed: int) -> Callable[[Any, Any, Any], Any]:
    """A function of weights, two received tensors and a constant, as a pipeline has them."""
    from keras import ops

    draw = random.Random(seed)
    words = [draw.choice(("linear", "linear", "scale", "add", "tanh", "normal")) for _ in range(draw.randint(3, 14))]
    steps = [(word, draw.random(), draw.random(), draw.randrange(WEIGHTS)) for word in words]
    ends = [draw.random() for _ in range(draw.randint(1, 3))]

    def compute(weights: Any, tensors: Any, others: Any) -> Any:
        values = [others["x"], *tensors]
        for word, one, other, number in steps:
            # later values are drawn more often, so that graphs are deep
            value, more = (values[int(len(values) * each**0.5)] for each in (one, other))
            if word == "linear":
                value = value @ weights[number]
            elif word == "scale":
                value = value * ops.mean(weights[number], 0)
            elif word == "add":
                value = value + more
            elif word == "normal":
                value = value - ops.mean(value, -1, keepdims=True)
            values.append(ops.tanh(value))
        sent = [values[int(len(values) * end)] for end in ends]
        return [*sent, ops.sum(values[-1] ** 2)], {"loss": None}

    return compute


def _arrays(seed: int) -> tuple[Any, ...]:
    import numpy as np

    drawn = np.random.default_rng(seed)

    def array(*shape: int) -> Any:
        return drawn.normal(size=shape).astype("float32")

    return [array(WIDTH, WIDTH) for _ in range(WEIGHTS)], [array(ROWS, WIDTH) for _ in range(2)], array(ROWS, WIDTH)


def _off(seeds: list[int]) -> list[str]:
    """What differs between the whole backward pass and its two parts."""
    import keras
    import numpy as np

    from keras_flow.backends.active import backend

    def same(one: Any, other: Any) -> bool:
        # an engine may give zeros where another gives none
        one, other = (np.zeros(()) if each is None else keras.ops.convert_to_numpy(each) for each in (one, other))
        return np.allclose(one, other, rtol=2e-5, atol=1e-5)

    found = []
    for seed in seeds:
        weights, tensors, x = backend().on(0, _arrays(seed))
        # JAX compiles each part of each stage, which takes long
        program: Any = backend().stage_program(_stage(seed), 0, compiled=seed % 8 == 0)
        is_whole = seed % 8 == 1  # as JAX does where it does not compile
        program._splits = not is_whole

        def held(program: Any = program, given: tuple[Any, ...] = (weights, tensors, {"x": x})) -> tuple[Any, Any]:
            outputs, _, kept = program.forward(*given)
            gradients = [None, *(keras.ops.ones_like(each) for each in outputs[1:-1])]
            return kept, gradients if len(outputs) > 2 else [keras.ops.ones_like(outputs[0])]

        by_weights, by_received = program.backward(*held(), 0.5)
        received, later = program.backward_inputs(*held(), 0.5)
        pairs = [
            *zip(by_weights, program.backward_weights(later), strict=True),
            *zip(by_received, received, strict=True),
        ]
        assert not (is_whole and getattr(program, "_parts", None)), "kept for each micro-batch"
        assert any(each is not None for each, _ in pairs), f"seed {seed} tests nothing"
        found += [f"seed {seed}, gradient {number}" for number, pair in enumerate(pairs) if not same(*pair)]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parts_are_the_whole(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, list(range(40 if engine == "torch" else 8))) == []


def _products(seeds: list[int]) -> list[tuple[int, int, int]]:
    """How many products of matrices the whole has, and its two parts."""
    import keras

    from keras_flow.backends.active import backend

    if keras.backend.backend() == "torch":
        from torch.utils.flop_counter import FlopCounterMode

        def counted(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
            with FlopCounterMode(display=False) as counter:
                result = function(*args)
            return counter.get_total_flops() // (2 * ROWS * WIDTH * WIDTH), result
    else:
        import jax

        def counted(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
            return str(jax.make_jaxpr(function)(*args)).count("dot_general["), function(*args)

    found = []
    for seed in seeds:
        weights, tensors, x = backend().on(0, _arrays(seed))
        program: Any = backend().stage_program(_stage(seed), 0, compiled=False)
        program._splits = True
        kept = [program.forward(weights, tensors, {"x": x}) for _ in range(2)]
        given = [keras.ops.ones_like(each) for each in kept[0][0][:-1]]
        if keras.backend.backend() == "torch":
            whole, _ = counted(program.backward, kept[0][2], given, 1.0)
            first, (_, later) = counted(program.backward_inputs, kept[1][2], given, 1.0)
            second, _ = counted(program.backward_weights, later)
        else:
            whole, _ = counted(program._backward, *program._cotangents(kept[0][2], given, 1.0))
            _, (last, arguments) = program.backward_inputs(kept[1][2], given, 1.0)
            ((early, *_),) = program._parts.values()
            first, _ = counted(early, *jax.tree.leaves(program._cotangents(kept[1][2], given, 1.0)))
            second, _ = counted(last, *arguments)
        found.append((whole, first, second))
    return found


@pytest.mark.parametrize("engine", ("jax", "torch"))
def test_no_product_is_computed_twice(engine: str, on_ranks: Any) -> None:
    found = on_ranks(engine)(_products, list(range(40 if engine == "torch" else 10)))
    assert all(whole == first + second for whole, first, second in found), found
    assert sum(second for *_, second in found) > sum(whole for whole, *_ in found) / 4, found


def _costs() -> Any:
    from keras_flow.pipelines import asked_schedule

    return asked_schedule.costs([3.0, 1.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_schedule_is_chosen_by_what_the_engine_computes(engine: str, on_ranks: Any) -> None:
    whole = ([3.0, 1.0], [6.0, 2.0], [0.0, 0.0])
    assert on_ranks(engine)(_costs) == (whole if engine == "tensorflow" else ([3.0, 1.0],) * 3)
