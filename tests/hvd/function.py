"""A function that `hvd.run` calls in two processes."""

import keras
import numpy as np

import keras_flow.hvd as hvd


def main(factor: int, offset: int = 0) -> tuple[int, float]:
    hvd.init()
    total = hvd.allreduce(np.float32(hvd.rank() + 1), op=hvd.Sum)
    return factor * hvd.rank() + offset, float(keras.ops.convert_to_numpy(total))


if __name__ == "__main__":
    print(hvd.run(main, args=(10,), kwargs={"offset": 5}, np=2))
