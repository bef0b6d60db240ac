"""OneFlow's MLP in the mirrored view: a job takes a list with an array for each device.

    keras-flow launch --devices 2 examples/older_worlds/oneflow_mirrored.py

KERAS_BACKEND chooses the engine. On GPUs: "gpu" for "cpu", and `flow.config.gpu_device_num(2)`.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import keras_flow.compat.oneflow as flow  # was: import oneflow as flow
import keras_flow.compat.oneflow.typing as tp  # was: import oneflow.typing as tp

BATCH_SIZE = 100
DEVICES = 2


def load_batches():
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16.0).astype("float32"), digits.target.astype("int32")
    batches = [
        (images[begin : begin + BATCH_SIZE], labels[begin : begin + BATCH_SIZE])
        for begin in range(0, len(images) - BATCH_SIZE + 1, BATCH_SIZE)
    ]
    return batches[:-3], batches[-3:]


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(
        hidden,
        10,
        kernel_initializer=initializer,
        name="dense2",
    )


def get_train_config():
    config = flow.function_config()
    config.default_data_type(flow.float)
    config.default_logical_view(flow.scope.mirrored_view())
    return config


@flow.global_function(type="train", function_config=get_train_config())
def train_job(
    images: tp.ListNumpy.Placeholder((BATCH_SIZE // DEVICES, 1, 8, 8), dtype=flow.float),
    labels: tp.ListNumpy.Placeholder((BATCH_SIZE // DEVICES,), dtype=flow.int32),
) -> tp.ListNumpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


def main(epochs):
    train, _ = load_batches()
    for epoch in range(epochs):
        for i, (images, labels) in enumerate(train):
            loss = np.concatenate(train_job(np.split(images, DEVICES), np.split(labels, DEVICES)))
            if i % 10 == 0:
                print(f"epoch {epoch}: loss {loss.mean():.4f}")


if __name__ == "__main__":
    main(2 if "--small" in sys.argv else 10)
