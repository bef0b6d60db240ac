"""A model in stages, on handwritten digits (scikit-learn's, no download).

    python examples/pipeline.py                          # one device
    keras-flow launch --devices 4 examples/pipeline.py   # two stages of two ranks
    keras-flow explain examples/pipeline.py --layout pp4 --schedule 1f1b --microbatches 8
    keras-flow compare examples/pipeline.py --layouts 1,pp2,pp4,pp2xdp2

KERAS_BACKEND chooses the engine: jax, tensorflow or torch.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_flow as kf


def load_data():
    """1,437 rows to train on and 360 to validate, 64 pixels in [0, 1]."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data / 16.0).astype("float32")[order], digits.target.astype("int32")[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def build_model():
    layers = keras.layers
    inputs = keras.Input((64,))
    x = layers.Dense(64, name="embed")(inputs)
    for block in range(6):
        hidden = layers.Dense(128, activation="gelu", name=f"up_{block}")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(64, name=f"down_{block}")(hidden))])
    model = keras.Model(inputs, layers.Dense(10, name="logits")(x), name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def pipeline():
    """Two stages of as many ranks as there are; or one device."""
    ranks = kf.init().size
    if ranks < 2:
        return kf.DataParallel()
    grid = np.arange(ranks // 2 * 2).reshape(2, -1)
    return kf.PipelineParallel(kf.Placement(grid, axis_names=("pipe", "data")), microbatches=8)


def main(epochs=8):
    x, y, x_val, y_val = load_data()
    keras.utils.set_random_seed(0)
    distribution = pipeline()
    with distribution.scope():
        model = build_model()
    first = kf.env.is_main_process()
    if first:
        print(distribution.explain(model, batch_size=64))
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=2 if first else 0)
    accuracy = model.evaluate(x_val, y_val, verbose=0, return_dict=True)["accuracy"]
    if first:
        for name in ("embed", "logits"):
            print(name, "is on ranks", kf.layout_of(model.get_layer(name).kernel).layout.placement.ranks)
        print(f"loss {history.history['loss'][-1]:.4f}, validation accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
