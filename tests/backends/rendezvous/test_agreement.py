"""Processes that are fed alike send each other no more than that."""

from __future__ import annotations

import pytest

from tests import sampling


@sampling.one_in(2)
def test_processes_that_are_fed_alike_send_no_more(on_ranks) -> None:
    def program(rows: int) -> str:
        import keras
        import numpy as np

        import keras_flow as kf
        from keras_flow.backends.rendezvous import agreement

        def refused(text: str) -> list[str]:
            raise AssertionError(f"exchanged: {text}")

        keras.utils.set_random_seed(0)  # states that differ are exchanged
        original, agreement.exchange = agreement.exchange, refused
        try:
            x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
            with kf.DataParallel().scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                model.fit(x, np.ones((rows, 1), "float32"), batch_size=8, shuffle=False, verbose=0)
        except AssertionError as error:
            return str(error)
        finally:
            agreement.exchange = original
        return "alike"

    assert on_ranks("torch")(program, 24) == "alike"
    assert on_ranks("torch")(program, 21) == "alike"
    with pytest.raises(AssertionError, match="fed different batches"):
        _ = on_ranks("torch")(_fed_differently, 24)


def _fed_differently(rows: int) -> None:
    import keras
    import numpy as np

    import keras_flow as kf

    x = np.zeros((rows, 4), "float32")
    if kf.env.get_rank() == 2:
        x[5] += 1  # of rows that it computes itself, and another one compares
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, np.ones((rows, 1), "float32"), batch_size=8, shuffle=False, verbose=0)
