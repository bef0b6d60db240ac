"""Layers: dense, convolutional, attention and recurrent models, and models of several inputs and outputs."""

import keras
import numpy as np
from keras import layers, ops

from tests.parity.cases import data
from tests.parity.gradient64 import largest_gradients
from tests.parity.harness import Case, Run


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(32, activation="relu", name="hidden", kernel_regularizer="l2"),
            layers.BatchNormalization(name="norm", momentum=0.8),
            layers.Dropout(0.3),
            layers.Dense(8, name="logits"),
        ],
        name="mlp",
    )


MLP_RULES = {"hidden/kernel": 1, "hidden/bias": 0, "norm/": 0, "logits/kernel": 0}


def _mlp(run: Run) -> None:
    with run.scope():
        model = mlp_model()
        model.compile(keras.optimizers.Adam(1e-2), crossentropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
        run.fit(
            model,
            data.FEATURES,
            data.LABELS,
            sample_weight=data.WEIGHTS,
            batch_size=data.BATCH,
            epochs=data.EPOCHS,
            validation_split=0.1,
        )
        run.record("value", "evaluate", model.evaluate(data.FEATURES, data.LABELS, batch_size=data.BATCH, verbose=0))
        run.record("value", "predict", model.predict(data.FEATURES, batch_size=data.BATCH, verbose=0))
        first = (data.FEATURES[:16], data.LABELS[:16], data.WEIGHTS[:16])  # with the shapes of `fit`: no step is traced
        run.record("value", "train_on_batch", model.train_on_batch(*first))
        run.record("value", "test_on_batch", model.test_on_batch(*first[:2]))
        run.record("value", "predict_on_batch", model.predict_on_batch(first[0]))
        run.record("value", "model(x)", ops.convert_to_numpy(model(data.FEATURES[:8])))
    # the model remembers its distribution
    run.record("value", "predict outside", model.predict(data.FEATURES[:20], batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def cnn_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 4)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.SeparableConv2D(8, 3, padding="same", name="separable"),
            layers.SpatialDropout2D(0.2),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(8, name="logits"),
        ]
    )


def _cnn(run: Run) -> None:
    with run.scope():
        model = cnn_model()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), crossentropy(), metrics=["accuracy"])
        run.fit(model, data.IMAGES, data.LABELS, batch_size=data.BATCH, epochs=data.EPOCHS)
        run.record("value", "predict", model.predict(data.IMAGES, batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def _odd_batches(run: Run) -> None:
    """A batch_size that no layout divides."""
    with run.scope():
        model = mlp_model()
        model.compile(keras.optimizers.SGD(0.05, clipnorm=0.1), crossentropy(), metrics=["accuracy"])
        run.fit(model, data.FEATURES, data.LABELS, batch_size=13, epochs=data.EPOCHS)
        run.record("value", "predict", model.predict(data.FEATURES, batch_size=13, verbose=0))
        run.record("value", "train_on_batch", model.train_on_batch(data.FEATURES[:13], data.LABELS[:13]))
        run.record("value", "test_on_batch", model.test_on_batch(data.FEATURES[:7], data.LABELS[:7]))
        run.record("value", "predict_on_batch", model.predict_on_batch(data.FEATURES[:5]))
    run.record_model(model)


def transformer_model() -> keras.Model:
    tokens = layers.Input((12,), dtype="int32")
    x = layers.Embedding(32, 16, name="embedding")(tokens)
    normed = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 4, dropout=0.1, name="attention")(normed, normed, use_causal_mask=True)
    normed = layers.LayerNormalization()(x)
    x = x + layers.GroupQueryAttention(4, 4, 2, use_bias=False, name="grouped")(normed, normed)
    x = x + layers.Dense(16, name="down")(layers.Dense(32, activation="gelu", name="up")(x))
    x = layers.EinsumDense("btf,fv->btv", output_shape=(None, 32), name="vocabulary")(x)
    return keras.Model(tokens, x, name="transformer")


def _transformer(run: Run) -> None:
    with run.scope():
        model = transformer_model()
        schedule = keras.optimizers.schedules.CosineDecay(3e-3, 20)
        model.compile(
            keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
            crossentropy(),
            metrics=["accuracy"],
        )
        # the longest program of the grid: the rows divide here, and not where it predicts
        run.fit(model, data.FULL_TOKENS[:64], data.NEXT_TOKENS[:64], batch_size=data.BATCH, epochs=5)
        run.record("value", "predict", model.predict(data.FULL_TOKENS, batch_size=data.BATCH, verbose=0))
    run.record_model(model)


TRANSFORMER_RULES = {
    "embedding/embeddings": 1,
    "attention/(query|key|value)/kernel": 1,
    "attention/(query|key|value)/bias": 0,
    "attention/attention_output/kernel": 0,
    "grouped/query/kernel": 1,
    "up/kernel": 1,
    "up/bias": 0,
    "down/kernel": 0,
    "vocabulary/kernel": 1,
}


class Batches(keras.utils.PyDataset):
    """Batches of tokens in a fixed order."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(16 * index, 16 * index + 16)
        return data.SHORT_TOKENS[rows], data.LABELS[rows]


def rnn_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((4,), dtype="int32"),
            layers.Embedding(32, 8, mask_zero=True, name="embedding"),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True, dropout=0.1, name="lstm")),
            layers.GRU(8, name="gru"),
            layers.Dense(8, name="logits"),
        ]
    )


def _rnn(run: Run) -> None:
    with run.scope():
        model = rnn_model()
        model.compile(keras.optimizers.RMSprop(3e-3, clipnorm=0.5), crossentropy(), metrics=["accuracy"])
        run.fit(model, Batches(), epochs=data.EPOCHS, shuffle=False)
        run.record("value", "predict", model.predict(data.SHORT_TOKENS[:64], batch_size=data.BATCH, verbose=0))
    run.record_model(model)


def _several(run: Run) -> None:
    """Dict inputs and outputs, shared layers, an output without batch dimension, class-free losses on two outputs."""

    def batches():
        while True:
            # whole batches only: on one TensorFlow device Keras's loss of an output does not weigh a smaller last batch
            for start in range(0, 64, data.BATCH):
                rows = slice(start, start + data.BATCH)
                yield (
                    {"left": data.FEATURES[rows], "right": data.FEATURES[rows][:, ::-1].copy()},
                    {"score": data.TARGETS[rows], "kind": data.LABELS[rows]},
                )

    with run.scope():
        left, right = layers.Input((16,), name="left"), layers.Input((16,), name="right")
        shared = layers.Dense(16, activation="tanh", name="shared")
        joined = layers.Concatenate()([shared(left), shared(right)])
        summed = layers.Add()([shared(left), shared(right)])
        grid = layers.Reshape((4, 8))(joined)
        score = layers.Dense(4, name="score")(layers.Flatten()(grid))
        kind = layers.Dense(8, name="kind")(summed)
        model = keras.Model({"left": left, "right": right}, {"score": score, "kind": kind})
        model.compile(
            keras.optimizers.Adafactor(1e-2),
            {"score": "mse", "kind": crossentropy()},
            metrics={"kind": ["accuracy"]},
            loss_weights={"score": 0.5, "kind": 1.0},
        )
        run.fit(model, batches(), steps_per_epoch=4, epochs=5)
        predicted = model.predict({"left": data.FEATURES, "right": data.FEATURES}, batch_size=data.BATCH, verbose=0)
        run.record("value", "predict score", predicted["score"])
        run.record("value", "predict kind", predicted["kind"])
    run.record_model(model)


def _no_batch_dim(run: Run) -> None:
    """An output without batch dimension: the model gives predictions, and means over the batch."""

    with run.scope():
        x = layers.Input((16,))
        hidden = layers.Dense(8, activation="tanh", name="hidden")(x)
        model = keras.Model(x, [layers.Dense(4, name="logits")(hidden), ops.mean(ops.square(hidden), axis=0)])
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mse"], loss_weights=[1.0, 0.1])
        for start in (0, 16, 32):
            rows = slice(start, start + 16)
            logs = model.train_on_batch(data.FEATURES[rows], [data.TARGETS[rows], np.zeros((8,), "float32")])
            run.record("loss", "loss", np.ravel(logs)[0])
    run.record_model(model)


CASES = (
    Case(
        "mlp",
        _mlp,
        (
            "Dense",
            "BatchNormalization",
            "Dropout",
            "Adam",
            "regularization losses",
            "sample_weight",
            "fit from numpy",
            "validation",
            "evaluate, predict",
            "train_on_batch, test_on_batch, predict_on_batch",
            "model(x)",
        ),
        MLP_RULES,
        mirrored=True,
    ),
    Case(
        "cnn",
        _cnn,
        ("Conv2D", "SeparableConv2D", "pooling", "SGD with momentum"),
        {"logits/kernel": 0},
    ),
    Case(
        "transformer",
        _transformer,
        (
            "Embedding",
            "MultiHeadAttention (causal)",
            "GroupQueryAttention",
            "LayerNormalization",
            "EinsumDense",
            "AdamW, weight decay",
            "global_clipnorm",
            "learning-rate schedules",
        ),
        TRANSFORMER_RULES,
        zero_gradient=("attention/key/bias",),  # a constant added to all scores of a query leaves the softmax as it is
        gradient64=lambda: largest_gradients(
            transformer_model, data.FULL_TOKENS, data.NEXT_TOKENS, crossentropy, ("attention/key/bias",)
        ),
    ),
    Case(
        "odd batches",
        _odd_batches,
        ("batch_size that does not divide", "clipnorm of batches that do not divide"),
        MLP_RULES,
        mirrored=True,
    ),
    Case(
        "rnn",
        _rnn,
        ("Embedding mask", "LSTM, GRU, Bidirectional", "RMSprop", "clipnorm", "fit from PyDataset"),
        {"gru/.*kernel": 1, "logits/kernel": 0},
    ),
    Case(
        "several inputs and outputs",
        _several,
        ("several inputs and outputs", "dict inputs and outputs", "shared layers", "Adafactor", "fit from generators"),
        {"shared/kernel": 1, "score/kernel": 0},
    ),
    Case("output without batch dim", _no_batch_dim, ("an output without batch dim",), {"hidden/kernel": 1}),
)
