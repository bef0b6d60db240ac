"""A job that rank 1 ends in its third epoch, once; it goes on from the commit and has the weights of one that did not.

`keras-flow launch --nproc_per_node 2 --max_restarts 1 tests/hvd/elastic_job.py`
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

import keras_flow.hvd as hvd

EPOCHS = 4


def model_of(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


class Ends(keras.callbacks.Callback):
    """Ends the process in the first attempt."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and state.epoch == 2 and batch == 1 and os.environ["KERAS_FLOW_RESTARTS"] == "0":
            os._exit(7)


hvd.init()
x = np.random.default_rng(hvd.rank()).normal(size=(12, 3)).astype("float32")
y = x.sum(1, keepdims=True)
wanted = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))
wanted.fit(x, y, batch_size=4, epochs=EPOCHS, shuffle=False, verbose=0)

model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    if hvd.rank() == 0:
        print(f"began at epoch {state.epoch} batch {state.batch}", flush=True)
    state.model.fit(
        x,
        y,
        batch_size=4,
        epochs=EPOCHS,
        initial_epoch=state.epoch,
        shuffle=False,
        verbose=0,
        callbacks=[
            Ends(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )


train(state)
for found, right in zip(model.get_weights(), wanted.get_weights(), strict=True):
    np.testing.assert_allclose(found, right, rtol=1e-6)
assert float(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 3 * EPOCHS
print("done")
