"""Fine-tuning by LoRA on handwritten digits (scikit-learn's, no download): a saved model, loaded in pieces.

    python examples/finetune_lora.py                             # one device
    keras-flow launch --devices 4 examples/finetune_lora.py      # 2 x 2: weights over 2 ranks, rows over 2

A model learns the digits 0 to 4, data parallel, and is saved. Under a layout with split kernels it is loaded and
adapted to the digits 5 to 9 by LoRA: the kernels stay as they are, small factors beside them are trained. KERAS_BACKEND
chooses the engine.
"""

import argparse
import os
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_flow as kf


def load_data(first, last):
    """Digits `first` to `last`, images in [0, 1]."""
    digits = load_digits()
    chosen = np.flatnonzero((digits.target >= first) & (digits.target <= last))
    chosen = np.random.default_rng(0).permutation(chosen)
    return (digits.data[chosen] / 16.0).astype("float32"), digits.target[chosen].astype("int32")


def build_model():
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(256, activation="relu", name="wide"),
            layers.Dense(64, activation="relu", name="narrow"),
            layers.Dense(10, name="logits"),
        ],
        name="digits",
    )
    compile_model(model, 1e-3)
    return model


def compile_model(model, learning_rate):
    model.compile(
        keras.optimizers.Adam(learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def rules():
    """A column and row pair; LoRA's factors (`lora_kernel_a`, `lora_kernel_b`) are split as their kernel."""
    return {
        "wide/kernel": {"model": kf.sbp.split(1)},
        "wide/bias": {"model": kf.sbp.split(0)},
        "narrow/kernel": {"model": kf.sbp.split(0)},
    }


def pretrain(path, epochs):
    """Train on the digits 0 to 4, data parallel over all ranks, which write one file."""
    with kf.DataParallel().scope():
        model = build_model()
        model.fit(*load_data(0, 4), batch_size=64, epochs=epochs, verbose=0)
        model.save(path)


def adapt(path, epochs):
    """Load under the layout, add LoRA, train on the digits 5 to 9."""
    model = keras.models.load_model(path)
    before = {variable.path: variable.numpy() for variable in model.weights}
    for name in ("wide", "narrow"):
        model.get_layer(name).enable_lora(4)
    compile_model(model, 1e-2)
    x, y = load_data(5, 9)
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=2)
    for name in ("wide", "narrow"):
        layer = model.get_layer(name)
        assert np.array_equal(before[layer._kernel.path], layer._kernel.numpy()), "LoRA leaves the kernel as it is"
    return model, history.history["accuracy"][-1]


def main(path, epochs):
    keras.utils.set_random_seed(0)
    pretrain(path, epochs)
    if kf.env.get_world_size() == 4:
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        distribution = kf.ModelParallel(mesh, rules=rules())
    else:
        distribution = kf.DataParallel()
    with distribution.scope():
        model, accuracy = adapt(path, epochs)
    if kf.env.is_main_process():
        trained = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
        print(f"{keras.backend.backend()}, {kf.env.get_world_size()} ranks: accuracy {accuracy:.3f} on the new digits")
        print(f"trained {trained:,} of {model.count_params():,} parameters")
        for variable in model.weights:
            print(f"  {variable.path}: {kf.layout_of(variable)}{'' if variable.trainable else ' (frozen)'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--file", default=os.path.join(tempfile.gettempdir(), "keras_flow_digits.keras"))
    options = parser.parse_args()
    kf.run(main, args=(options.file, options.epochs))
