"""A training program for several processes, and for one device: `reading_job.py LAYOUT FOLDER` reads data of each kind.

LAYOUT: `one` (plain Keras), `dp` (data parallel) or `2x2` (data x model). The last rows do not divide by the ranks.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

import keras_flow as kf
from tests.parity.job import distribution

ROWS, BATCH = 71, 16
X = np.random.default_rng(0).standard_normal((ROWS, 6)).astype("float32")
Y = (np.arange(ROWS) % 4).astype("int32")

#: rows that were read at a time, of samples and of batches
read: list[int] = []


class Batches(keras.utils.PyDataset):
    """Reads the part of a batch that it is asked for."""

    num_batches = -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        return self.rows(index, slice)

    def rows(self, index: int, part: Any) -> Any:
        """See docs/data.md."""
        batch = slice(BATCH * index, BATCH * index + BATCH)
        own = part(len(X[batch]))
        read.append(len(X[batch][own]))
        return X[batch][own], Y[batch][own]


class Samples(torch.utils.data.Dataset):
    """Counts the samples that are fetched."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        read.append(1)
        return X[index], Y[index]


def mapped(folder: Path) -> np.ndarray:
    """The inputs in a file."""
    path = folder / f"x-{kf.env.process_index()}"
    np.memmap(path, "float32", "w+", shape=X.shape)[:] = X
    return np.memmap(path, "float32", "r", shape=X.shape)


def sources(folder: Path) -> dict[str, tuple[Any, ...]]:
    """name -> x, and y where it is apart."""
    pipeline = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3)
    loader = torch.utils.data.DataLoader(Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    return {
        "arrays": (X, Y),
        "memory map": (mapped(folder), Y),
        "PyDataset": (Batches(),),
        "tf.data": (pipeline.map(lambda x, y: (x * 2, y)).batch(BATCH).prefetch(1),),
        "DataLoader": (loader,),
        "generator": ((batch for _ in range(99) for batch in [(X[:BATCH], Y[:BATCH])]),),
    }


def trained(data: tuple[Any, ...]) -> dict[str, Any]:
    """Losses and weights."""
    keras.utils.set_random_seed(5)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((6,)), dense(8, "relu", name="up"), dense(4, "softmax", name="down")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    options: dict[str, Any] = {"batch_size": BATCH} if len(data) == 2 else {}
    options |= {"shuffle": False} if isinstance(data[0], np.memmap) else {}
    steps = 5 if type(data[0]).__name__ == "generator" else None
    history = model.fit(*data, epochs=2, verbose=0, steps_per_epoch=steps, **options).history
    options.pop("shuffle", None)
    numbers = {**history, "evaluated": model.evaluate(*data, verbose=0, steps=steps, **options)}
    if keras.backend.backend() == "torch":
        # loaders take numbers from torch's generator, from which a Dropout without a seed draws
        numbers["drawn next"] = torch.rand(4).numpy()
    return {**numbers, **{weight.path.partition("/")[2]: weight.numpy() for weight in model.weights}}


def main(layout: str, folder: Path) -> None:
    """Train with each source; write the numbers and the rows that were read."""
    kf.init()
    found: dict[str, Any] = {}
    with contextlib.nullcontext() if layout == "one" else distribution(layout).scope():
        for source, data in sources(folder).items():
            read.clear()
            found |= {f"{source}/{name}": value for name, value in trained(data).items()}
            found[f"read/{source}"] = sum(read)
    np.savez(folder / f"process-{kf.env.process_index()}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
