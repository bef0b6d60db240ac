"""The same layouts said in two ways: keras_flow's rules, and a `keras.distribution.LayoutMap` as KerasHub gives one.

    keras-flow launch --devices 4 examples/custom_rules.py

A transformer that reads a row of a handwritten digit (scikit-learn's, no download) as a token. It is trained twice,
under the rules and under the LayoutMap: the layouts and the losses are the same. KERAS_BACKEND chooses the engine.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_flow as kf

HEADS, WIDTH = 4, 32


def load_data():
    """Digits as 8 tokens of 8 numbers in [0, 1]."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.images[order] / 16.0).astype("float32"), digits.target[order].astype("int32")


def build_model():
    layers = keras.layers
    rows = layers.Input((8, 8))
    x = layers.EinsumDense("btf,fw->btw", (8, WIDTH), bias_axes="w", name="rows")(rows)
    seen = layers.LayerNormalization(name="norm")(x)
    x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="self_attention")(seen, seen)
    x = layers.Dense(4 * WIDTH, activation="gelu", name="feedforward_up")(x)
    x = layers.Dense(WIDTH, name="feedforward_down")(x)
    logits = layers.Dense(10, name="logits")(layers.Flatten()(x))
    model = keras.Model(rows, logits, name="reader")
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def rules():
    """keras_flow's: an axis of the placement -> how the variable lies on it."""
    split = kf.sbp.split
    return {
        "self_attention/(query|key|value)/kernel": {"model": split(1)},
        "self_attention/(query|key|value)/bias": {"model": split(0)},
        "self_attention/attention_output/kernel": {"model": split(0)},
        "feedforward_up/kernel": {"model": split(1)},
        "feedforward_up/bias": {"model": split(0)},
        "feedforward_down/kernel": {"model": split(0)},
    }


def layout_map(placement):
    """Keras's: for each dim of the variable the axis that splits it, or None; so does KerasHub's `get_layout_map`."""
    mesh = keras.distribution.DeviceMesh(
        placement.hierarchy, placement.axis_names, [f"cpu:{rank}" for rank in placement.ranks]
    )
    made = keras.distribution.LayoutMap(mesh)
    made[".*self_attention/(query|key|value)/kernel"] = (None, "model", None)
    made[".*self_attention/(query|key|value)/bias"] = ("model", None)
    made[".*self_attention/attention_output/kernel"] = ("model", None, None)
    made[".*feedforward_up/kernel"] = (None, "model")
    made[".*feedforward_up/bias"] = ("model",)
    made[".*feedforward_down/kernel"] = ("model", None)
    return made


def train(distribution, epochs):
    """Losses of the epochs, and variable -> layout and where it comes from."""
    x, y = load_data()
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = build_model()
        losses = model.fit(x, y, batch_size=64, epochs=epochs, verbose=0).history["loss"]
    return losses, {variable.path: kf.layout_of(variable) for variable in model.trainable_variables}


def main(epochs):
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    by_rules, said = train(kf.ModelParallel(placement, rules=rules()), epochs)
    by_map, mapped = train(kf.ModelParallel(rules=layout_map(placement)), epochs)
    assert all(layout.layout == mapped[path].layout for path, layout in said.items())
    if kf.env.is_main_process():
        for path, layout in said.items():
            print(f"  {path}: {layout}")
        print(f"losses under the rules:     {', '.join(f'{loss:.6f}' for loss in by_rules)}")
        print(f"losses under the LayoutMap: {', '.join(f'{loss:.6f}' for loss in by_map)}")
    assert np.allclose(by_rules, by_map, rtol=1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    kf.run(main, devices=4, args=(parser.parse_args().epochs,))
