"""OneFlow's pipelined LeNet: `scope.placement` says which device computes which layers.

    keras-flow launch --devices 2 examples/older_worlds/oneflow_pipeline.py

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


def lenet(data, train=False):
    initializer = flow.truncated_normal(0.1)
    conv1 = flow.layers.conv2d(
        data, 32, 5, padding="SAME", activation=flow.nn.relu, kernel_initializer=initializer, name="conv1"
    )
    pool1 = flow.nn.max_pool2d(conv1, ksize=2, strides=2, padding="SAME", name="pool1", data_format="NCHW")
    conv2 = flow.layers.conv2d(
        pool1, 64, 5, padding="SAME", activation=flow.nn.relu, kernel_initializer=initializer, name="conv2"
    )
    pool2 = flow.nn.max_pool2d(conv2, ksize=2, strides=2, padding="SAME", name="pool2", data_format="NCHW")
    reshape = flow.reshape(pool2, [pool2.shape[0], -1])
    with flow.scope.placement("cpu", "0:0"):
        hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden")
    if train:
        hidden = flow.nn.dropout(hidden, rate=0.5, name="dropout")
    with flow.scope.placement("cpu", "0:1"):
        return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="outlayer")


def get_train_config():
    config = flow.function_config()
    config.default_data_type(flow.float)
    return config


@flow.global_function(type="train", function_config=get_train_config())
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 8, 8), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = lenet(images, train=True)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict")
def eval_job(images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 8, 8), dtype=flow.float)) -> tp.Numpy:
    return lenet(images)


def main(epochs):
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
