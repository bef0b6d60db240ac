"""A byte-level language model on real text: the source code of Python's own standard library (nothing is downloaded).

    python examples/bytes_lm.py                              # one device
    keras-flow launch --devices 4 examples/bytes_lm.py       # hybrid: rows over 2 ranks, heads and hidden units over 2
    keras-flow compare examples/bytes_lm.py --steps 20       # every backend, every layout
    keras-flow explain examples/bytes_lm.py --layout 2x2     # what each rank holds and receives, before anything runs

KERAS_BACKEND chooses the engine: jax, tensorflow or torch.
"""

import argparse
import sysconfig
from pathlib import Path

import keras
import numpy as np

import keras_flow as kf

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2
PROMPT = "def __init__(self"


def load_data(windows=2048):
    """Windows of CONTEXT bytes and, for each byte, the next one; the last eighth is for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), "uint8")
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT - 1, windows)
    rows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype("int32")
    x, y, cut = rows[:, :-1], rows[:, 1:], windows * 7 // 8
    return x[:cut], y[:cut], x[cut:], y[cut:]


def build_model():
    layers = keras.layers
    tokens = layers.Input((CONTEXT,), dtype="int32", name="tokens")
    places = tokens * 0 + keras.ops.arange(CONTEXT, dtype="int32")
    x = layers.Embedding(256, WIDTH, name="bytes")(tokens) + layers.Embedding(CONTEXT, WIDTH, name="places")(places)
    for block in range(BLOCKS):
        seen = layers.LayerNormalization(name=f"norm{block}a")(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{block}")(
            seen, seen, use_causal_mask=True
        )
        seen = layers.LayerNormalization(name=f"norm{block}b")(x)
        wide = layers.Dense(4 * WIDTH, activation="gelu", name=f"up{block}")(seen)
        x = x + layers.Dense(WIDTH, name=f"down{block}")(wide)
    logits = layers.Dense(256, name="logits")(layers.LayerNormalization(name="last")(x))
    model = keras.Model(tokens, logits, name="bytes_lm")
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def rules():
    """Megatron's: attention by heads, the two dense layers of a block as a column and row pair."""
    split = kf.sbp.split
    return {
        r"attention\d+/(query|key|value)/kernel": {"model": split(1)},
        r"attention\d+/(query|key|value)/bias": {"model": split(0)},
        r"attention\d+/attention_output/kernel": {"model": split(0)},
        r"up\d+/kernel": {"model": split(1)},
        r"up\d+/bias": {"model": split(0)},
        r"down\d+/kernel": {"model": split(0)},
    }


def generate(model, count, rows=4, temperature=0.7):
    """Continue PROMPT `rows` times, sampled by one numpy generator: the same text for every layout."""
    random = np.random.default_rng(0)
    text = np.tile(np.frombuffer((" " * CONTEXT + PROMPT).encode(), "uint8").astype("int32"), (rows, 1))
    for _ in range(count):
        logits = np.asarray(model.predict_on_batch(text[:, -CONTEXT:]))[:, -1].astype("float64") / temperature
        chances = np.exp(logits - logits.max(-1, keepdims=True))
        drawn = (chances.cumsum(-1) < random.random((rows, 1)) * chances.sum(-1, keepdims=True)).sum(-1)
        text = np.concatenate([text, drawn[:, None].astype("int32")], axis=1)
    return [bytes(row[CONTEXT:].astype("uint8")).decode("latin1") for row in text]


def main(windows, epochs, letters):
    x, y, x_val, y_val = load_data(windows)
    keras.utils.set_random_seed(0)
    if kf.env.get_world_size() == 4:
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        distribution = kf.ModelParallel(mesh, batch_axes="data", rules=rules())
    else:
        distribution = kf.DataParallel()
    with distribution.scope():
        model = build_model()
        model.fit(x, y, batch_size=64, epochs=epochs, validation_data=(x_val, y_val), verbose=2)
        loss, _ = model.evaluate(x_val, y_val, verbose=0)
        texts = generate(model, letters)
    if kf.env.is_main_process():
        print(f"{keras.backend.backend()}, {kf.env.get_world_size()} ranks: {loss / np.log(2):.3f} bits per byte")
        print(distribution.explain(model, batch_size=64).text(all_rows=True))
        print("generated:")
        for text in texts[:2]:
            print("    " + text.replace("\n", "\n    "))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=2048, help="windows of text, an eighth of them for validation")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--letters", type=int, default=120, help="bytes to generate")
    options = parser.parse_args()
    kf.run(main, args=(options.windows, options.epochs, options.letters))
