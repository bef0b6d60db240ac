"""OneFlow's MLP, on one machine or several, with its import lines changed, and digits in place of MNIST.

    keras-flow launch --devices 2 examples/older_worlds/oneflow_mlp.py

KERAS_BACKEND chooses the engine. On GPUs: "gpu" for "cpu", and `flow.config.gpu_device_num(2)`.
"""

import sys

from sklearn.datasets import load_digits

import keras_flow.compat.oneflow as flow  # was: import oneflow as flow
import keras_flow.compat.oneflow.typing as tp  # was: import oneflow.typing as tp

BATCH_SIZE = 100


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
    return config


@flow.global_function(type="train", function_config=get_train_config())
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 8, 8), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict")
def eval_job(images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 8, 8), dtype=flow.float)) -> tp.Numpy:
    return mlp(images)


def config_distributed():
    """Say the machines, on each of which the program is started."""
    flow.config.cpu_device_num(1)
    flow.env.ctrl_port(9988)
    flow.env.machine([{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}])


def main(epochs):
    if "--machines" in sys.argv:
        config_distributed()
    train, test = load_batches()
    for epoch in range(epochs):
        for i, (images, labels) in enumerate(train):
            loss = train_job(images, labels)
            if i % 10 == 0:
                print(f"epoch {epoch}: loss {loss.mean():.4f}")
    correct = sum((eval_job(images).argmax(1) == labels).sum() for images, labels in test)
    print(f"accuracy {correct / (BATCH_SIZE * len(test)):.4f}")


if __name__ == "__main__":
    main(2 if "--small" in sys.argv else 10)
