"""Training: custom models and losses, optimizer options, metrics, precision, other ways of training."""

import keras
import numpy as np
from keras import layers, ops

from tests.parity.cases import data
from tests.parity.cases.layers import MLP_RULES, crossentropy, mlp_model
from tests.parity.harness import Case, Run, StepLosses


@keras.saving.register_keras_serializable("tests")
class CentreRows(layers.Layer):
    """Mixes rows: takes the mean row of the batch off every row."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


@keras.saving.register_keras_serializable("tests")
class Penalised(keras.Model):
    """A subclassed model with `add_loss` and an activity regulariser."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(16, activation="tanh", name="hidden", activity_regularizer="l2")
        self.centre = CentreRows()
        self.score = layers.Dense(4, name="score")

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.add_loss(0.01 * ops.mean(ops.square(hidden)))
        return self.score(self.centre(hidden))


def _scalar_loss(true, predicted):
    """A loss that gives one number for the batch: rows are compared with the other rows (in-batch negatives)."""
    logits = ops.matmul(predicted, ops.transpose(true))
    return -ops.mean(ops.diagonal(ops.log_softmax(logits, axis=-1)))


def _subclassed(run: Run) -> None:
    with run.scope():
        model = Penalised()
        model.compile(keras.optimizers.Adam(1e-2), _scalar_loss)
        run.fit(model, data.FEATURES, data.TARGETS, batch_size=data.BATCH, epochs=data.EPOCHS)
        run.record("value", "predict", model.predict(data.FEATURES, batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def _optimizer_options(run: Run) -> None:
    optimizers = {
        "ema": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        "accumulation": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=256.0),
        "two optimizers": lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(0.05, clipnorm=0.1), {".*hidden.*": keras.optimizers.SGD(0.02, momentum=0.9)}
            )
        ),
    }
    for name, make in optimizers.items():
        keras.utils.set_random_seed(7)
        with run.scope():
            model = mlp_model()
            model.compile(make(), crossentropy())
            history = model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=2, verbose=0).history
            run.record("value", f"{name} loss", history["loss"])
        run.record_model(model)


def _metrics(run: Run) -> None:
    with run.scope():
        model = keras.Sequential(
            [
                layers.Input((16,)),
                layers.Dense(16, activation="relu", name="hidden"),
                layers.Dense(1, "sigmoid", name="p"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            "binary_crossentropy",
            metrics=[
                keras.metrics.AUC(name="auc"),
                keras.metrics.F1Score(threshold=0.5, name="f1"),
                keras.metrics.Precision(name="precision"),
                keras.metrics.TruePositives(name="tp"),
            ],
        )
        run.fit(
            model,
            data.FEATURES,
            data.BINARY,
            batch_size=data.BATCH,
            epochs=2,
            class_weight={0: 1.0, 1: 2.0},
            validation_data=(data.FEATURES[:32], data.BINARY[:32]),
        )
        run.record_model(model)
        classes = keras.Sequential([layers.Input((16,)), layers.Dense(8, name="hidden")])
        classes.compile(
            keras.optimizers.SGD(0.05),
            crossentropy(),
            metrics=[
                keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3"),
                keras.metrics.MeanIoU(8, sparse_y_pred=False, name="iou"),
            ],
        )
        run.fit(classes, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1)
    run.record_model(classes)


def _tf_data(run: Run) -> None:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((data.FEATURES, data.LABELS)).batch(data.BATCH)
    with run.scope():
        model = mlp_model()
        model.compile(keras.optimizers.Muon(1e-2), crossentropy())
        run.fit(model, dataset, epochs=data.EPOCHS, validation_data=dataset)
    run.record_model(model)


def _compiled(run: Run, **options: object) -> None:
    with run.scope():
        model = mlp_model()
        model.compile(keras.optimizers.SGD(0.05), crossentropy(), metrics=["accuracy"], **options)
        history = model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=2, verbose=0).history
        run.record("value", "loss", history["loss"])
        run.record("value", "predict", model.predict(data.FEATURES[:64], batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def _half(run: Run) -> None:
    with run.scope():
        model = keras.Sequential(
            [
                layers.Input((16,)),
                layers.Dense(32, activation="relu", name="hidden"),
                layers.Dense(16, activation="relu", name="middle"),
                layers.Dense(8, name="logits", dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), crossentropy())
        steps = StepLosses()
        model.fit(data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=data.EPOCHS, verbose=0, callbacks=[steps])
        run.record("loss", "loss of each step", steps.losses)
        run.record("value", "predict", model.predict(data.FEATURES, batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def _lora(run: Run) -> None:
    with run.scope():
        model = keras.Sequential(
            [layers.Input((16,)), layers.Dense(16, activation="tanh", name="hidden"), layers.Dense(8, name="logits")]
        )
        model.get_layer("hidden").enable_lora(4)
        model.compile(keras.optimizers.Adam(1e-2), crossentropy())
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=2)
        model.compile(keras.optimizers.Adam(1e-2), crossentropy())
        model.get_layer("logits").trainable = False  # flipped after compile, before the optimizer is built
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1)
        model.get_layer("logits").trainable = True
        model.compile(keras.optimizers.Adam(1e-2), crossentropy())
        run.fit(model, data.FEATURES, data.LABELS, batch_size=data.BATCH, epochs=1)
    run.record_model(model)


class Adversaries(keras.Model):
    """Two models and two optimizers in one train_step, written with what every backend's step offers."""

    def __init__(self, maker, judge):
        super().__init__()
        self.maker, self.judge = maker, judge
        self.seeds = keras.random.SeedGenerator(5)
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, inputs):
        return self.judge(inputs)

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile(optimizer=None, loss=None)
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer
        maker_optimizer.build(self.maker.trainable_variables)
        judge_optimizer.build(self.judge.trainable_variables)

    def _judge_loss(self, real, noise):
        bce = keras.losses.BinaryCrossentropy(from_logits=True)
        right, wrong = self.judge(real), self.judge(self.maker(noise))
        return bce(ops.ones_like(right), right) + bce(ops.zeros_like(wrong), wrong)

    def _maker_loss(self, noise):
        judged = self.judge(self.maker(noise))
        return keras.losses.BinaryCrossentropy(from_logits=True)(ops.ones_like(judged), judged)


def _torch_adversaries():
    class Torch(Adversaries):
        def train_step(self, batch):
            noise = keras.random.normal((int(ops.shape(batch)[0]), 4), seed=self.seeds)
            for loss_of, network, optimizer in (
                (lambda: self._judge_loss(batch, noise), self.judge, self.judge_optimizer),
                (lambda: self._maker_loss(noise), self.maker, self.maker_optimizer),
            ):
                self.zero_grad()
                loss = loss_of()
                loss.backward()
                weights = network.trainable_weights
                import torch

                with torch.no_grad():
                    optimizer.apply([w.value.grad for w in weights], weights)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    return Torch


def _tensorflow_adversaries():
    class TensorFlow(Adversaries):
        def train_step(self, batch):
            import tensorflow as tf

            noise = keras.random.normal((ops.shape(batch)[0], 4), seed=self.seeds)
            for loss_of, network, optimizer in (
                (lambda: self._judge_loss(batch, noise), self.judge, self.judge_optimizer),
                (lambda: self._maker_loss(noise), self.maker, self.maker_optimizer),
            ):
                with tf.GradientTape() as tape:
                    loss = loss_of()
                weights = network.trainable_weights
                optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    return TensorFlow


def _jax_adversaries():
    import jax

    class Jax(Adversaries):
        def _get_jax_state(self, **kwargs):
            state = super()._get_jax_state(**{**kwargs, "optimizer_variables": False})
            if kwargs.get("optimizer_variables"):
                values = [v.value for o in (self.maker_optimizer, self.judge_optimizer) for v in o.variables]
                state = (*state[:2], values, *state[2:])
            return state

        def _get_state_sharding_spec(self):  # Keras looks at the one optimizer that a model usually has
            trainable, other, _, metrics = super()._get_state_sharding_spec()
            slots = [v.value.sharding for o in (self.maker_optimizer, self.judge_optimizer) for v in o.variables]
            return trainable, other, slots, metrics

        def train_step(self, state, batch):
            trainable, other, slots, metrics = state
            count = len(self.maker.trainable_variables)
            first = len(self.maker_optimizer.variables)
            variables = dict(zip((v.path for v in self.trainable_variables), trainable, strict=True))

            def call(loss_of, network, values, others):
                mapping = list(zip(network.trainable_variables, values, strict=True)) + others
                with keras.StatelessScope(state_mapping=mapping) as scope:
                    loss = loss_of()
                return loss, scope

            fixed = list(zip(self.non_trainable_variables, other, strict=True))
            with keras.StatelessScope(state_mapping=fixed) as scope:
                noise = keras.random.normal((batch.shape[0], 4), seed=self.seeds)
            other = [
                scope.get_current_value(v) if scope.get_current_value(v) is not None else v.value
                for v in self.non_trainable_variables
            ]
            maker = [variables[v.path] for v in self.maker.trainable_variables]
            judge = [variables[v.path] for v in self.judge.trainable_variables]
            rest = list(zip(self.maker.trainable_variables, maker, strict=True))
            _, grads = jax.value_and_grad(
                lambda values: call(lambda: self._judge_loss(batch, noise), self.judge, values, rest)[0]
            )(judge)
            judge, judge_slots = self.judge_optimizer.stateless_apply(slots[first:], grads, judge)
            rest = list(zip(self.judge.trainable_variables, judge, strict=True))
            loss, grads = jax.value_and_grad(
                lambda values: call(lambda: self._maker_loss(noise), self.maker, values, rest)[0]
            )(maker)
            maker, maker_slots = self.maker_optimizer.stateless_apply(slots[:first], grads, maker)
            with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics, strict=True))) as scope:
                self.tracker.update_state(loss)
                logs = {"loss": self.tracker.result()}
            metrics = [scope.get_current_value(v) for v in self.metrics_variables]
            assert count == len(maker)
            by_path = {v.path: value for v, value in zip(self.maker.trainable_variables, maker, strict=True)}
            by_path |= {v.path: value for v, value in zip(self.judge.trainable_variables, judge, strict=True)}
            trainable = [by_path[v.path] for v in self.trainable_variables]
            return logs, (trainable, other, [*maker_slots, *judge_slots], metrics)

        def jax_state_sync(self):
            state = getattr(self, "_jax_state", None)
            if state and not self._jax_state_synced and "optimizer_variables" not in state:
                super().jax_state_sync()  # after evaluate or predict
            elif state and not self._jax_state_synced:
                optimizer_variables = [v for o in (self.maker_optimizer, self.judge_optimizer) for v in o.variables]
                for variables, values in (
                    (self.trainable_variables, state["trainable_variables"]),
                    (self.non_trainable_variables, state["non_trainable_variables"]),
                    (optimizer_variables, state["optimizer_variables"]),
                    (self.metrics_variables, state["metrics_variables"]),
                ):
                    for variable, value in zip(variables, values, strict=True):
                        variable.assign(value)
                self._jax_state_synced = True

    return Jax


def adversaries(maker: keras.Model, judge: keras.Model, losses: type = object) -> Adversaries:
    """A model that trains `maker`, of 4 random numbers a row, against `judge`, by the losses of another class."""
    make = {"jax": _jax_adversaries, "tensorflow": _tensorflow_adversaries, "torch": _torch_adversaries}
    kind = make[keras.backend.backend()]()
    return type(kind.__name__, (losses, kind) if losses is not object else (kind,), {})(maker, judge)


def _adversaries(run: Run) -> None:
    with run.scope():
        maker = keras.Sequential([layers.Input((4,)), layers.Dense(16, "tanh", name="made"), layers.Dense(16)])
        judge = keras.Sequential([layers.Input((16,)), layers.Dense(16, "tanh", name="judged"), layers.Dense(1)])
        model = adversaries(maker, judge)
        model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.05))
        run.fit(model, data.FEATURES, batch_size=data.BATCH, epochs=2)
    run.record_model(model)


def _masks(run: Run) -> None:
    """Random layers: identical masks for every layout."""
    with run.scope():
        model = keras.Sequential(
            [layers.Input((8,)), layers.Dropout(0.5), layers.GaussianNoise(0.1, seed=3), layers.Dense(4, name="hidden")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
        drop = keras.layers.Dropout(0.5, seed=11)
        ones = np.ones((16, 8), "float32")
        for _ in range(2):
            run.record("exact", "mask", ops.convert_to_numpy(drop(ones, training=True)) == 0)
        run.fit(model, np.ones((32, 8), "float32"), np.ones((32, 4), "float32"), batch_size=16, epochs=2)
    run.record_model(model)


CASES = (
    Case(
        "subclassed",
        _subclassed,
        (
            "subclassed models",
            "add_loss",
            "activity regularizers",
            "a layer that mixes rows",
            "custom losses returning a scalar",
        ),
        {"hidden/kernel": 1, "hidden/bias": 0, "score/kernel": 0},
        mirrored=True,
    ),
    Case(
        "optimizer options",
        _optimizer_options,
        ("EMA", "gradient accumulation", "loss scaling"),
        MLP_RULES,
        mirrored=True,
    ),
    Case("metrics", _metrics, ("AUC, TopK, F1, MeanIoU", "class_weight"), {"hidden/kernel": 1}, mirrored=True),
    Case("tf.data", _tf_data, ("fit from tf.data", "Muon"), MLP_RULES),
    Case(
        "steps_per_execution",
        lambda run: _compiled(run, steps_per_execution=2),
        ("steps_per_execution",),
        MLP_RULES,
        mirrored=True,
    ),
    Case("run_eagerly", lambda run: _compiled(run, run_eagerly=True), ("run_eagerly",), MLP_RULES),
    Case(
        "jit_compile",
        lambda run: _compiled(run, **({"jit_compile": True} if run.distributed else {})),
        ("jit_compile",),
        MLP_RULES,
    ),
    Case(
        "mixed_bfloat16",
        _half,
        ("mixed_bfloat16",),
        {"hidden/kernel": 1, "middle/kernel": 0},
        half="mixed_bfloat16",
        mirrored=True,
    ),
    Case(
        "mixed_float16",
        _half,
        ("mixed_float16",),
        {"hidden/kernel": 1, "middle/kernel": 0},
        half="mixed_float16",
        mirrored=True,
    ),
    Case("lora", _lora, ("LoRA", "trainable flipped after compile"), {"hidden/kernel": 1, "logits/kernel": 0}),
    Case(
        "adversaries",
        _adversaries,
        ("custom train_step, two models and two optimizers",),
        {"made/kernel": 1},
        mirrored=True,
    ),
    Case("masks", _masks, ("Dropout masks equal for every layout",), {"hidden/kernel": 1}),
)
