"""`fit` with its default `shuffle=True` gives one training on every engine and number of ranks, by one seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from keras_flow.backends.reading import row_order
from tests import sampling
from tests.launch import programs

#: name -> how its data are given; epochs are three
CASES = ("rows", "rows again", "batches", "steps", "PyDataset")


def losses(ranks: int) -> dict[str, list[float]]:
    import keras
    import numpy as np

    import keras_flow as kf

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(45, 6)).astype("float32"), rng.normal(size=(45, 3)).astype("float32")

    class Parts(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int):
            return x[5 * index : 5 * index + 5], y[5 * index : 5 * index + 5]

    found: dict[str, list[float]] = {}

    def train(name: str, *data: object, **options: object) -> None:
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
        model = keras.Sequential([keras.layers.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found[name] = model.fit(*data, epochs=3, verbose=0, **options).history["loss"]

    with kf.DataParallel(kf.Placement(list(range(ranks))), random="logical").scope():
        keras.utils.set_random_seed(3)
        train("rows", x, y, batch_size=8)
        train("rows again", x, y, batch_size=8)
        train("batches", x, y, batch_size=8, shuffle="batch")
        train("steps", x, y, batch_size=8, steps_per_epoch=3)
        train("PyDataset", Parts(), shuffle=True)
    return found


@pytest.fixture(scope="module")
def expected(on_ranks) -> dict[str, list[float]]:
    found = on_ranks("jax")(losses, 4)
    assert found["rows"] != found["rows again"]
    return found


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [("jax", 1), ("tensorflow", 4), ("tensorflow", 1), ("torch", 4), ("torch", 3), ("torch", 2)],
)
def test_one_seed_is_one_training(engine: str, ranks: int, on_ranks, expected: dict[str, list[float]]) -> None:
    found = on_ranks(engine)(losses, ranks)
    for name in CASES:
        assert np.allclose(found[name], expected[name], rtol=0, atol=1e-5), (name, found[name], expected[name])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_two_processes_train_so_too(engine: str, tmp_path: Path, expected: dict[str, list[float]]) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json\nimport keras_flow as kf\nfrom tests.backends.reading.test_row_order import losses\n"
        "kf.init()\nfound = losses(2)\n"
        "if kf.env.is_main_process():\n    print('losses', json.dumps(found), flush=True)\n"
    )
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--timeout", "100", str(program)]
    started = programs.start(command, engine, PYTHONPATH=str(Path(__file__).parents[3]))
    code, out, err = programs.finish(started, 170)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("losses ")]
    found = json.loads(line.removeprefix("losses "))
    for name in CASES:
        assert np.allclose(found[name], expected[name], rtol=0, atol=1e-5), (name, found[name], expected[name])


def test_a_pass_of_tf_data_has_one_order(on_ranks) -> None:
    """Batches that are shuffled in their place are made by threads, perhaps as the next epoch runs."""

    def program() -> list[int]:
        from unittest import mock

        import keras
        import numpy as np
        from keras.src.trainers.data_adapters import array_data_adapter

        from keras_flow.backends.reading import row_order
        from keras_flow.backends.tensorflow import reading

        adapter = array_data_adapter.ArrayDataAdapter(np.arange(22), batch_size=4, shuffle="batch")
        epochs = iter(range(100))
        with mock.patch.object(row_order, "_of_epoch", lambda: (1, next(epochs))):
            batches = reading.ordered(lambda numbers: numbers.get_tf_dataset(), adapter)
            passes = [np.concatenate([*map(keras.ops.convert_to_numpy, keras.tree.flatten([*batches]))]) for _ in "ab"]
            assert all(sorted(rows) == [*range(22)] for rows in passes)
            return [next(epochs), *map(int, passes[0] != passes[1])]

    made, *differ = on_ranks("tensorflow")(program)
    assert made == 2 and any(differ)


def test_the_fit_of_a_callback_leaves_the_seed_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_is_ordering", False), ("_epoch", None), ("_seed", 0)):
        monkeypatch.setattr(row_order, name, value)
    with row_order.ordering():
        row_order._epoch, row_order._seed = 2, 5
        with row_order.ordering():
            row_order._epoch, row_order._seed = 0, 9  # drawn: the program has set no seed
        assert (row_order._epoch, row_order._seed) == (2, 5)


def test_an_epoch_has_its_order_wherever_training_begins(on_ranks) -> None:
    def program() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        import keras
        import numpy as np

        import keras_flow as kf

        x = np.arange(20, dtype="float32")[:, None]

        def orders(random: str, **epochs: int) -> list[list[int]]:
            """The sums of the rows of each batch, of each epoch."""
            seen: dict[int, list[int]] = {}

            class Sees(keras.callbacks.Callback):
                def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
                    self.sums = seen.setdefault(epoch, [])
                    self.before = 0.0

                def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
                    total = float(logs["loss"]) * (batch + 1)  # type: ignore[index]  # the mean over batches of 4
                    self.sums.append(round(4 * (total - self.before)))
                    self.before = total

            keras.utils.set_random_seed(1)
            with kf.DataParallel(random=random).scope():
                model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
                model.compile(keras.optimizers.SGD(0.0), lambda y, out: out)
                model.fit(x, x, batch_size=4, verbose=0, callbacks=[Sees()], **epochs)
            return [seen[epoch] for epoch in sorted(seen)]

        return orders("logical", epochs=4), orders("logical", epochs=4, initial_epoch=2), orders("stock", epochs=4)

    whole, resumed, stock = on_ranks("jax")(program)
    assert all(sum(epoch) == sum(range(20)) for epoch in whole)
    assert len({tuple(epoch) for epoch in whole}) == 4
    assert resumed == whole[2:]
    assert stock != whole


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
def test_what_is_made_after_a_fit_begins_as_on_one_device(engine: str, on_ranks) -> None:
    def program() -> tuple[list[list[float]], list[float]]:
        import random

        import keras
        import numpy as np

        import keras_flow as kf

        x = np.arange(20, dtype="float32")[:, None] / 20
        kernels, losses = [], []

        def model() -> keras.Model:
            made = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            made.compile(keras.optimizers.SGD(0.1), "mse")
            return made

        with kf.DataParallel(random="logical").scope():
            for is_trained in (False, True, True):
                keras.utils.set_random_seed(1)
                first = model()
                state = random.getstate()
                if is_trained:
                    losses.append(first.fit(x, x, batch_size=4, verbose=0).history["loss"][0])
                    assert random.getstate() == state
                kernels.append(model().layers[0].get_weights()[0].ravel().tolist())
            losses.append(first.fit(x, x, batch_size=4, verbose=0).history["loss"][0])
        return kernels, losses

    (fresh, *others), (one, again, on) = on_ranks(engine)(program)
    assert others == [fresh, fresh]
    assert one == again != on  # a seed that is set anew begins the orders of epochs anew


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
def test_stock_shuffles_as_keras_on_one_device(engine: str, on_ranks) -> None:
    def program() -> list[list[float]]:
        from contextlib import nullcontext

        import keras
        import numpy as np

        import keras_flow as kf

        x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")

        def trained(scope: object) -> list[float]:
            keras.utils.set_random_seed(3)
            with scope:  # type: ignore[attr-defined]
                model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
                return model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0).history["loss"]

        ways = kf.DataParallel(random="stock"), kf.DataParallel(random="logical")
        return [trained(nullcontext()), *(trained(way.scope()) for way in ways)]

    plain, stock, logical = on_ranks(engine)(program)
    assert np.allclose(stock, plain, rtol=0, atol=1e-5), (stock, plain)
    assert not np.allclose(logical, plain, rtol=0, atol=1e-4)
