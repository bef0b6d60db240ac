"""A training program for several processes, and for one device: `job.py LAYOUT FOLDER` writes its numbers to FOLDER.

LAYOUT: `one` (plain Keras), `dp` and `mirrored` (data parallel, by the engine's own strategy) or `2x2` (data x model).
Rows do not divide by the ranks.
"""

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np

import keras_flow as kf


def distribution(layout: str):
    """The distribution of a layout."""
    if layout in ("dp", "mirrored"):
        return kf.DataParallel(strategy=None if layout == "dp" else layout)
    split = kf.sbp.split
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"up/kernel": {"model": split(1)}, "up/bias": {"model": split(0)}, "down/kernel": {"model": split(0)}}
    return kf.ModelParallel(mesh, rules=rules, batch_axes="data")


def build() -> keras.Model:
    """Normalisation, dropout and a pair of dense layers that a hybrid layout splits."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, activation="relu", name="up"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(8, name="down"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(layout: str, folder: Path) -> None:
    """Train, evaluate, predict, save, load; callbacks write as on one device."""
    kf.init()
    keras.utils.set_random_seed(5)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((71, 6)).astype("float32")
    y = generator.integers(0, 8, 71).astype("int32")
    with contextlib.nullcontext() if layout == "one" else distribution(layout).scope():
        model = build()
        callbacks = [
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"),
            keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        ]
        history = model.fit(
            x, y, batch_size=16, epochs=2, validation_data=(x[:37], y[:37]), callbacks=callbacks, verbose=0
        ).history
        numbers = {f"history/{name}": values for name, values in history.items()}
        numbers["evaluate"] = model.evaluate(x, y, batch_size=16, verbose=0)
        numbers["predict"] = model.predict(x, batch_size=16, verbose=0)
        numbers["predict_on_batch"] = np.asarray(model.predict_on_batch(x[:13]))
        weights = {f"weight/{weight.path}": weight.numpy() for weight in model.weights}
        model.save_weights(folder / "last.weights.h5")
        model.set_weights([np.zeros_like(value) for value in weights.values()])
        model.load_weights(folder / "last.weights.h5")
        numbers["evaluate again"] = model.evaluate(x, y, batch_size=16, verbose=0)
        loaded = keras.saving.load_model(folder / "epoch-2.keras")
        numbers["loaded"] = loaded.predict(x, batch_size=16, verbose=0)
        for _ in range(2):
            numbers["train_on_batch"] = model.train_on_batch(x[:9], y[:9])
    np.savez(folder / f"process-{kf.env.process_index()}.npz", **numbers, **weights)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
