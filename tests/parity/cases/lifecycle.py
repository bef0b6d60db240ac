"""Lives of models: callbacks, files, models made elsewhere, layouts given in other ways, inputs of other kinds."""

import os

import keras
import numpy as np
from keras import layers, ops

import keras_flow as kf
from tests.parity.cases import data
from tests.parity.cases.layers import MLP_RULES, crossentropy, mlp_model
from tests.parity.harness import Case, Run, make_distribution


def compiled_mlp() -> keras.Model:
    model = mlp_model()
    model.compile(keras.optimizers.Adam(1e-2), crossentropy(), metrics=["accuracy"])
    return model


def _callbacks(run: Run) -> None:
    folder = os.path.join(run.folder, run.layout)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "best.weights.h5")
    with run.scope():
        model = compiled_mlp()
        history = run.fit(
            model,
            data.FEATURES,
            data.LABELS,
            batch_size=data.BATCH,
            epochs=data.EPOCHS,
            validation_data=(data.FEATURES[:30], data.LABELS[:30]),
            callbacks=[
                keras.callbacks.EarlyStopping(patience=1, min_delta=10.0, restore_best_weights=True),
                keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
                keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
                keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")),
                keras.callbacks.TerminateOnNaN(),
            ],
        )
        run.record("exact", "epochs", len(history["loss"]))
        run.record_model(model)
        model.load_weights(path)
        run.record("value", "restored", model.predict(data.FEATURES[:16], verbose=0))
    with open(os.path.join(folder, "log.csv")) as file:
        run.record("exact", "lines of the log", len(file.read().splitlines()))


def _tensorboard(run: Run) -> None:
    folder = os.path.join(run.folder, run.layout, "board")
    with run.scope():
        model = compiled_mlp()
        run.fit(
            model, data.FEATURES, data.LABELS, batch_size=data.BATCH, callbacks=[keras.callbacks.TensorBoard(folder)]
        )
    run.record("exact", "event files", sum("events" in name for _, _, names in os.walk(folder) for name in names))


def _files(run: Run) -> None:
    """Files written under any layout are read by ordinary Keras and under any other layout."""
    whole = os.path.join(run.folder, f"{run.layout}.keras")
    weights = os.path.join(run.folder, f"{run.layout}.weights.h5")
    with run.scope():
        model = compiled_mlp()
        model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1, verbose=0)
        model.save(whole)
        model.save_weights(weights)
        loaded = keras.models.load_model(whole)
        run.check_split(loaded)
        loaded.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1, verbose=0, shuffle=False)
        run.record("value", "trained on", loaded.predict(data.FEATURES, batch_size=data.BATCH, verbose=0))
        fresh = compiled_mlp()
        fresh.load_weights(weights)
        run.check_split(fresh)
        run.record("value", "weights under the layout", fresh.predict(data.FEATURES[:16], verbose=0))
    plain = keras.models.load_model(whole)
    run.record("value", "ordinary Keras", plain.predict(data.FEATURES[:16], verbose=0))
    if run.distributed:
        single = os.path.join(run.folder, "1.keras")
        with run.scope():
            run.record_model(keras.models.load_model(single))
    else:
        run.record_model(plain)


def _elsewhere(run: Run) -> None:
    """Built, compiled or trained before the scope; moved from one placement to another."""

    def go(model: keras.Model, name: str) -> None:
        history = model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1, verbose=0, shuffle=False)
        run.record("value", name, history.history["loss"])

    for trained in (False, True):
        keras.utils.set_random_seed(7)
        model = compiled_mlp()
        if trained:
            model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, verbose=0, shuffle=False)
        with run.scope():
            go(model, f"trained before: {trained}")
        run.record_model(model)
    with run.scope():
        keras.utils.set_random_seed(7)
        model = mlp_model()
    model.compile(keras.optimizers.SGD(0.05), crossentropy())
    go(model, "compiled and trained outside")
    run.check_split(model)
    if run.distributed:
        other = make_distribution("2x2" if run.layout != "2x2" else "tp4", MLP_RULES)
        with other.scope():
            go(model, "moved to another placement")
    else:
        go(model, "moved to another placement")
    run.record_model(model)


def _two_placements(run: Run) -> None:
    """Two models on two placements, trained in turn."""
    models = []
    for ranks in ([0, 1], [3, 2]):
        keras.utils.set_random_seed(7)
        if run.distributed:
            rules = {"hidden/kernel": {"model": kf.sbp.split(1)}}
            with kf.ModelParallel(kf.Placement(ranks, axis_names=("model",)), rules=rules).scope():
                models.append(compiled_mlp())
        else:
            models.append(compiled_mlp())
    for _ in range(2):
        for index, model in enumerate(models):
            history = model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, verbose=0, shuffle=False)
            run.record("value", f"loss of model {index}", history.history["loss"])


def _other_layouts(run: Run) -> None:
    """kf.shard, activations, a LayoutMap, two axes on one dim, a placement in another order, one rank."""

    def go(name: str) -> keras.Model:
        keras.utils.set_random_seed(7)
        model = compiled_mlp()
        model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1, verbose=0, shuffle=False)
        run.record("value", name, model.predict(data.FEATURES[:16], verbose=0))
        run.check_split(model)
        return model

    if not run.distributed:
        for name in ("shard", "activations", "LayoutMap", "two axes", "reordered", "one rank"):
            go(name)
        return
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    split = kf.sbp.split
    keras.utils.set_random_seed(7)
    with kf.ModelParallel(mesh).scope():
        model = compiled_mlp()
        kf.shard(model.get_layer("hidden"), kernel={"model": split(1)})
        model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1, verbose=0, shuffle=False)
        run.record("value", "shard", model.predict(data.FEATURES[:16], verbose=0))
        assert kf.layout_of(model.get_layer("hidden").kernel).source == "kf.shard"
        run.check_split(model)
    rules = {"hidden/kernel": {"model": split(1)}}
    with kf.ModelParallel(mesh, rules=rules, activations={"hidden": {"data": split(0), "model": split(1)}}).scope():
        go("activations")
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((2, 2), ["data", "model"], [f"cpu:{i}" for i in range(4)])
    )
    layout_map[".*hidden/kernel"] = (None, "model")
    layout_map[".*logits/kernel"] = ("model", None)
    with kf.ModelParallel(rules=layout_map).scope():
        go("LayoutMap")
    both = kf.Placement([[0, 1], [2, 3]], axis_names=("rows", "columns"))
    with kf.ModelParallel(both, rules={"hidden/kernel": {"rows": split(1), "columns": split(1)}}).scope():
        model = go("two axes")
        assert kf.layout_of(model.get_layer("hidden").kernel).layout.local_shape(0) == (16, 8)
    with kf.ModelParallel(kf.Placement([[3, 1], [0, 2]], axis_names=("data", "model")), rules=rules).scope():
        go("reordered")
    with kf.DataParallel(kf.Placement([2])).scope():
        go("one rank")


def _preprocessing(run: Run) -> None:
    import torch

    pairs = torch.utils.data.TensorDataset(torch.tensor(data.FEATURES), torch.tensor(data.LABELS))
    loader = torch.utils.data.DataLoader(pairs, batch_size=data.BATCH, shuffle=False)
    with run.scope():
        norm = layers.Normalization()
        norm.adapt(data.FEATURES)
        model = keras.Sequential([layers.Input((16,)), norm, layers.Dense(8, name="hidden")])
        model.compile(keras.optimizers.SGD(0.05), crossentropy())
        run.fit(model, loader, epochs=2)
    run.record_model(model)


def _replica_statistics(run: Run) -> None:
    """BatchNormalization with the statistics of each of four groups, checked against a model that does it by hand."""

    class Grouped(layers.BatchNormalization):
        """The balanced split of the rows into four groups, each with its own statistics."""

        def call(self, inputs, training=None, mask=None):
            from keras_flow.current.batch_statistics import by_groups

            if not training:
                return super().call(inputs, training=training, mask=mask)
            return by_groups(layers.BatchNormalization.call, self, inputs, 4, training, mask)

    make = Grouped if not run.distributed else layers.BatchNormalization
    with run.scope():
        x = layers.Input((16,))
        h = layers.Dense(16, name="hidden")(x)
        h = make(momentum=0.8, name="norm")(h)
        model = keras.Model(x, layers.Dense(8, name="logits")(h))
        # eagerly: the layer above wants to know its rows
        model.compile(keras.optimizers.SGD(0.05), crossentropy(), run_eagerly=not run.distributed)
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=2)
        run.record("value", "predict", model.predict(data.FEATURES, verbose=0))
    run.record_model(model)


def _strings(run: Run) -> None:
    with run.scope():
        lookup = layers.StringLookup(vocabulary=["a", "b", "c"])
        model = keras.Sequential([lookup, layers.Embedding(4, 4, name="hidden"), layers.Flatten(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        words = np.array([["a", "b"], ["c", "d"]] * 8)
        run.fit(model, words, np.ones((16, 2), "float32"), batch_size=8)
    run.record_model(model)


def _remat(run: Run) -> None:
    with run.scope():
        with keras.RematScope(mode="full"):
            model = keras.Sequential([layers.Input((16,)), layers.Dense(16, "tanh", name="hidden"), layers.Dense(8)])
        model.compile(keras.optimizers.SGD(0.1), crossentropy())
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH)
    run.record_model(model)


def _sparse(run: Run) -> None:
    import scipy.sparse

    with run.scope():
        model = keras.Sequential(
            [layers.Input((16,), sparse=keras.backend.backend() != "torch"), layers.Dense(8, name="hidden")]
        )
        model.compile(keras.optimizers.SGD(0.1), crossentropy())
        run.fit(
            model,
            scipy.sparse.csr_matrix(np.maximum(data.FEATURES, 0)),
            data.LABELS,
            batch_size=data.BATCH,
            shuffle=False,
        )
        run.record("value", "predict", model.predict(data.FEATURES, verbose=0))
    run.record_model(model)


def _ragged(run: Run) -> None:
    import tensorflow as tf

    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]] * 4)
    with run.scope():
        model = keras.Sequential(
            [
                layers.Input((None,), dtype="int32", ragged=True),
                layers.Embedding(8, 4, name="hidden"),
                layers.GlobalAveragePooling1D(),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        run.fit(model, tf.data.Dataset.from_tensor_slices((rows, np.ones((16, 2), "float32"))).batch(8))
    run.record_model(model)


def _row_layers(run: Run) -> None:
    """A custom layer with random numbers of its own."""

    @keras.saving.register_keras_serializable("tests")
    class Noisy(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seeds = keras.random.SeedGenerator(9)

        def call(self, inputs):
            return inputs + 0.1 * keras.random.normal(ops.shape(inputs), seed=self.seeds)

    with run.scope():
        model = keras.Sequential([layers.Input((16,)), Noisy(), layers.Dense(8, name="hidden")])
        model.compile(keras.optimizers.SGD(0.05), crossentropy())
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=2)
    run.record_model(model)


CASES = (
    Case(
        "callbacks",
        _callbacks,
        ("EarlyStopping, ModelCheckpoint, LearningRateScheduler, CSVLogger, BackupAndRestore",),
        MLP_RULES,
    ),
    Case("tensorboard", _tensorboard, ("TensorBoard",), MLP_RULES, layouts=("dp4", "2x2")),
    Case("files", _files, ("save, load_model, save_weights, load_weights",), MLP_RULES, mirrored=True),
    Case("made elsewhere", _elsewhere, ("a model built, compiled or trained elsewhere",), MLP_RULES),
    Case("two placements", _two_placements, ("two models on two placements",), layouts=("tp4",)),
    Case(
        "other layouts",
        _other_layouts,
        ("kf.shard, activations, LayoutMap, several axes on one dim",),
        layouts=("2x2",),
    ),
    Case("preprocessing", _preprocessing, ("Normalization.adapt", "fit from torch DataLoader"), {"hidden/kernel": 1}),
    Case("custom random layer", _row_layers, ("a custom layer with random numbers",), {"hidden/kernel": 1}),
    Case(
        "replica statistics",
        _replica_statistics,
        ('batch_statistics="replica"',),
        layouts=("dp4",),
        data_parallel=lambda: kf.DataParallel(batch_statistics="replica"),
    ),
    Case("strings", _strings, ("StringLookup inside a model",), {"hidden": 1}),
    Case("remat", _remat, ("keras.remat",), {"hidden/kernel": 1}),
    Case("sparse", _sparse, ("sparse inputs",), {"hidden/kernel": 1}),
    Case("ragged", _ragged, ("ragged inputs",), {"hidden": 1}),
)
