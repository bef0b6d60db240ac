"""A model that is made in a scope and gets its weights after it: by its first call, whichever that is."""

from __future__ import annotations

from typing import Any

import pytest

ENGINES = ("jax", "tensorflow", "torch")
FIRST = ("fit", "train_on_batch", "evaluate", "predict", "build", "call")


def _off(first: tuple[str, ...], layouts: tuple[str, ...] = ("data", "2x2")) -> list[str]:
    import warnings

    import keras
    import numpy as np

    import keras_flow as kf

    x = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
    y = x[:, :2]

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.last(self.first(inputs))

    makes = {
        "Sequential": lambda: keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]),
        "subclass": Own,
    }
    distributions = {
        "data": lambda: kf.DataParallel(kf.Placement(range(4)), random="logical"),
        "2x2": lambda: kf.ModelParallel(
            kf.Placement([[0, 1], [2, 3]], ("data", "model")),
            rules={"kernel": {"model": kf.sbp.split(1)}},
            batch_axes="data",
            random="logical",
        ),
    }
    found = []

    def trained(make: Any, distribution: Any, way: str) -> tuple[list[float], str]:
        keras.utils.set_random_seed(0)
        scope = distribution.scope()
        with scope:
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
            if way == "inside":
                model.build((None, 6))
                model(x[:2])
        calls = {
            "train_on_batch": lambda: model.train_on_batch(x[:8] * 0, y[:8]),
            "evaluate": lambda: model.evaluate(x, y, batch_size=8, verbose=0),
            "predict": lambda: model.predict(x[:4], verbose=0),
            "build": lambda: model.build((None, 6)),
            "call": lambda: model(x[:2]),
        }
        if way in calls:
            calls[way]()
        loss = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return loss, str(kf.layout_of(model.layers[0].kernel))

    for layout in layouts:
        of = distributions[layout]
        for name, make in makes.items():
            expected = trained(make, of(), "inside")
            for way in first:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "model .* is trained outside of every distribution")
                    got = trained(make, of(), way)
                # a step before is one more update
                if got[1] != expected[1] or (way != "train_on_batch" and not np.allclose(got[0], expected[0], 1e-5)):
                    found.append(f"{layout}, {name}, {way}: {got} for {expected}")
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fixed_part(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("fit", "predict"), ("data",)) == []


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_the_scope_of_its_making_holds(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, FIRST) == []
