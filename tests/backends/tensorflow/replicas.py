"""Programs of the tests of `strategy="mirrored"`: what a replica must not compute alone."""

import contextlib
import functools
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.row_wise import row_interaction
from keras_flow.backends.tensorflow.mirrored.step import MirroredSteps
from keras_flow.backends.tensorflow.trainer import MOST_TRACES
from keras_flow.current.models import distribution_of as model_distribution


def replicas_of_changed_layers() -> None:
    """What is made of a layer between two fits is looked at again; and what no table knows is refused."""
    layers, ops = keras.layers, keras.ops
    x, y = np.random.RandomState(0).rand(8, 6).astype("float32"), np.ones((8, 5), "float32")

    def patched_class(_: keras.Model) -> None:
        stock = layers.Dense._int8_call  # a method of Keras's class; nothing of the layer itself changes
        stack.callback(setattr, layers.Dense, "_int8_call", stock)
        layers.Dense._int8_call = lambda layer, *args: stock(layer, *args)  # type: ignore[method-assign]

    def activated(model: keras.Model) -> None:
        model.layers[0].activation = lambda x: x - ops.mean(x, axis=0, keepdims=True)

    def called(model: keras.Model) -> None:
        call = model.layers[0].call
        model.layers[0].call = lambda x: call(x) - ops.mean(x, axis=0)[:5]

    def eager(model: keras.Model) -> None:
        model.layers[0].activity_regularizer = keras.regularizers.L2()
        model.run_eagerly = True

    changes = {
        "the method '_int8_call'": patched_class,
        "a custom activation function": activated,
        "the method 'call'": called,
        "along dimension 0": lambda model: setattr(model.layers[1], "axis", 0),
        "quantized to float8": lambda model: setattr(model.layers[0], "dtype_policy", "float8_from_float32"),
        "not known to be a sum over rows": lambda model: setattr(
            model.layers[0], "activity_regularizer", keras.regularizers.OrthogonalRegularizer()
        ),
        "has its own compute_loss": lambda model: setattr(model, "compute_loss", lambda **_: ops.mean(model(x))),
        "with run_eagerly=True": eager,
    }
    for text, change in changes.items():
        with contextlib.ExitStack() as stack, kf.DataParallel(strategy="mirrored").scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu"), layers.Softmax()])
            model.compile("sgd", "mse")
            model.fit(x, y, batch_size=8, verbose=0)
            change(model)
            for act in (functools.partial(model.fit, x, y, batch_size=8), functools.partial(model.predict, x)):
                said = str(_refusal(functools.partial(act, verbose=0)))
                assert text in said, (text, said)
    # a layer of Keras that scales by the largest value of all rows, and is in no table
    spectra = layers.MelSpectrogram(16, 4, 8, sampling_rate=100, max_freq=50, min_freq=1)
    signal = np.random.RandomState(0).randn(8, 64).astype("float32") * np.arange(1.0, 9.0)[:, None]
    with kf.DataParallel(strategy="mirrored").scope():
        model = keras.Sequential([keras.Input((64,)), spectra])
        model.compile("sgd", "mse")
        said = str(_refusal(lambda: model.predict(signal, verbose=0)))
        assert "(MelSpectrogram) is not known to act row by row" in said, said
        # seeded: were it believed, its numbers would be wrong
        with mock.patch.object(row_interaction, "of_layer_itself", lambda _: None):
            believed = model.predict(signal, batch_size=8, verbose=0)
    assert np.max(np.abs(believed - np.asarray(spectra(signal)))) > 1e-3


def replicas_of_losses_that_compare_rows() -> None:
    """A loss or a metric that compares rows is refused, by whichever name or argument; those of rows are not."""
    losses, metrics = keras.losses, keras.metrics
    x, y = np.random.RandomState(0).rand(8, 6).astype("float32"), np.eye(5, dtype="float32")[np.arange(8) % 5]
    classes = np.arange(8) % 5

    def own(y_true: object, y_pred: object) -> object:
        return keras.ops.max(y_pred, axis=0)

    refused = {
        "loss 'circle'": {"loss": "circle"},
        "loss 'circle_loss'": {"loss": losses.Circle(name="circle_loss")},
        "loss 'cosine'": {"loss": losses.CosineSimilarity(axis=0, name="cosine")},
        "loss 'dice'": {"loss": "dice"},
        "loss 'own'": {"loss": own},
        "metric 'cosine_of_all'": {"loss": "mse", "metrics": [metrics.CosineSimilarity("cosine_of_all", axis=0)]},
        "metric 'circle'": {"loss": "sparse_categorical_crossentropy", "weighted_metrics": [losses.circle]},
        "metric 'own'": {"loss": "mse", "weighted_metrics": [own]},
    }
    for text, settings in refused.items():
        with kf.DataParallel(strategy="mirrored").scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "softmax")])
            model.compile("sgd", **settings)
            targets = classes if "circle" in text else y
            said = str(_refusal(lambda model=model, targets=targets: model.fit(x, targets, batch_size=8, verbose=0)))
            assert "rows may interact" in said and text in said, (text, said)
    with kf.DataParallel(strategy="mirrored").scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "softmax")])
        weighted = [metrics.AUC(), losses.categorical_hinge, metrics.categorical_accuracy]
        model.compile("sgd", "crossentropy", metrics=["accuracy", losses.dice], weighted_metrics=weighted)
        said = str(_refusal(lambda: model.fit(x, y, batch_size=8, verbose=0)))
        assert "metric 'dice' works along dimension 0" in said, said
        model.compile("sgd", "crossentropy", metrics=["accuracy"], weighted_metrics=weighted)
        model.fit(x, y, batch_size=8, verbose=0)
        model.compile("sgd", losses.MeanSquaredError(reduction=None))
        said = str(_refusal(lambda: model.fit(x, y, batch_size=8, verbose=0)))
        assert "a loss with reduction=None" in said, said


def replicas_of_data_in_other_structures() -> None:
    """Arrays in a dict have another order than in a list; and functions of many sizes are not all kept."""
    with kf.DataParallel(strategy="mirrored").scope():
        first, second = keras.Input((2,), name="z_in"), keras.Input((2,), name="c_in")
        difference = keras.layers.Subtract()([first, second])
        model = keras.Model([first, second], keras.layers.Dense(1, kernel_initializer="ones")(difference))
        model.compile(keras.optimizers.SGD(0.0), "mae")
    one, two, y = np.full((8, 2), 3.0), np.ones((8, 2)), np.full((8, 1), 4.0)
    for x in ([one, two], {"z_in": one, "c_in": two}, {"c_in": two, "z_in": one}):
        assert abs(model.fit(x, y, batch_size=8, verbose=0).history["loss"][0]) < 1e-5, x
    steps = MirroredSteps(model, model.test_step, model_distribution(model), joined=False)
    for rows in range(4, 16):
        data = np.ones((rows, 2), "float32")
        steps(([data, data], np.ones((rows, 1), "float32")))
    assert len(steps._functions) == MOST_TRACES


def replicas_of_masks_that_name_the_rows() -> None:
    """A noise shape may have the rows of the batch; a replica, also one without rows, takes its own."""

    def losses(distribution: kf.DataParallel, rows: int) -> list[float]:
        keras.utils.set_random_seed(0)
        with distribution.scope():
            masks = [keras.layers.Dropout(0.5, (rows, *inner), seed=3) for inner in ((1, 4), (5, 1))]
            model = keras.Sequential([keras.Input((5, 4)), *masks, keras.layers.Flatten(), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            data = np.ones((rows, 5, 4), "float32"), np.ones((rows, 2), "float32")
            return [model.train_on_batch(*data) for _ in range(2)]

    for random, rows in (("logical", 8), ("logical", 3), ("stock", 8), ("stock", 7)):
        wanted = losses(kf.DataParallel(kf.Placement([0]), random=random), rows)
        found = losses(kf.DataParallel(strategy="mirrored", random=random), rows)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=f"{random}, {rows}")


def _refusal(act: Callable[[], object]) -> kf.FlowError | None:
    try:
        act()
    except kf.FlowError as error:
        return error
    return None


PROGRAMS = {
    program.__name__: program
    for program in (
        replicas_of_changed_layers,
        replicas_of_losses_that_compare_rows,
        replicas_of_data_in_other_structures,
        replicas_of_masks_that_name_the_rows,
    )
}
