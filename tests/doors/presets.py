"""Programs that fine-tune a preset of KerasHub, against one device: adapters, files of them, generation, images."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
TEXTS = [" ".join(WORDS[(row + step * (row + 1)) % len(WORDS)] for step in range(2 + row % 4)) for row in range(10)]


LAYOUTS = ("data", "2x2", "1x2")


@dataclass(frozen=True)
class Case:
    """A program: when adapters are added, how the model is quantized before that, and the layout.

    `lora` "images" is the program of a classifier of images, whose preprocessor runs in `tf.data`.
    """

    lora: str
    mode: str | None
    layout: str

    def __str__(self) -> str:
        return f"adapters {self.lora}, {self.mode}, {self.layout}"


def cases() -> list[Case]:
    """All cases."""
    found = itertools.product(("none", "before compile", "after compile"), (None, "int8"), LAYOUTS)
    calibrated = itertools.product(("none",), ("gptq", "awq"), LAYOUTS)
    return [*itertools.starmap(Case, (*found, *calibrated)), *(Case("images", None, layout) for layout in LAYOUTS)]


def rules_of(first: str, second: str) -> dict[str, dict[str, kf.sbp.SBP]]:
    """Rules that split attention by heads over the axis `model`, and its two dense layers of these names."""
    return {
        "(query|key|value)/kernel": {"model": kf.sbp.split(1)},
        "attention_output/kernel": {"model": kf.sbp.split(0)},
        f"{first}/kernel": {"model": kf.sbp.split(1)},
        f"{second}/kernel": {"model": kf.sbp.split(0)},
    }


def rules_of_text() -> dict[str, dict[str, kf.sbp.SBP]]:
    """Rules for a model of text whose class has no `get_layout_map`; keras-hub 0.32 has none for GPT-2 and Mistral."""
    tables = {"token_embedding/embeddings": {"model": kf.sbp.split(1)}}
    return {**rules_of("(intermediate|gate)_dense", "output_dense"), **tables}


def scope(layout: str, of_images: bool) -> AbstractContextManager[Any]:
    """A distribution as people would choose it for such a model."""
    ranks = kf.env.get_world_size()
    if layout == "data":
        return kf.DataParallel().scope()
    shape = np.arange(ranks).reshape(ranks // 2, 2) if layout == "2x2" else np.arange(ranks).reshape(1, ranks)
    rules = rules_of("mlp/dense_1", "mlp/dense_2") if of_images else rules_of_text()
    mesh = kf.Placement(shape, axis_names=("batch", "model"))
    return kf.ModelParallel(mesh, batch_axes="batch", rules=rules).scope()


def write_presets(folder: Path) -> None:
    """Write preset folders of a small GPT-2 with its tokenizer, and of a classifier of images; of random weights."""
    import keras_hub

    converter = keras_hub.layers.ViTImageConverter(image_size=(8, 8), scale=1 / 255.0)
    classifier = keras_hub.models.ViTImageClassifier(
        backbone=keras_hub.models.ViTBackbone(
            image_shape=(8, 8, 3),
            patch_size=4,
            num_layers=1,
            num_heads=4,
            hidden_dim=16,
            mlp_dim=32,
            dropout_rate=0.0,
            attention_dropout=0.0,
        ),
        num_classes=3,
        preprocessor=keras_hub.models.ViTImageClassifierPreprocessor(converter),
        dropout=0.0,
    )
    classifier.save_to_preset(str(folder / "images"))
    letters = sorted({letter for word in WORDS for letter in word} | {"Ġ"})
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *letters])}
    merges = [f"Ġ {word[0]}" for word in WORDS]
    merged = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(merged)}
    keras.utils.set_random_seed(5)
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=list(dict.fromkeys(merges)))
    model = keras_hub.models.GPT2CausalLM(
        backbone=keras_hub.models.GPT2Backbone(
            vocabulary_size=len(vocabulary) // 4 * 4 + 4,
            num_layers=1,
            num_heads=4,
            hidden_dim=16,
            intermediate_dim=32,
            max_sequence_length=32,
            dropout=0.0,
        ),
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12),
    )
    for variable in model.trainable_variables:  # initial weights are too small to prefer a token
        variable.assign(keras.ops.convert_to_numpy(variable) * 4)
    model.save_to_preset(str(folder / "text"))


def _together(value: Any) -> Any:
    """What the first process has; all wait for it."""
    return backend().agree_on(dict.fromkeys(kf.env.local_ranks(), value))[0]


def _text_model(preset: str) -> tuple[Any, Any]:
    """A model of a preset folder, and its preprocessor, apart: in `tf.data` tokenizers need tensorflow-text."""
    import keras_hub

    model = keras_hub.models.CausalLM.from_preset(preset)
    preprocessor, model.preprocessor = model.preprocessor, None
    return model, preprocessor


def _fit(model: keras.Model, rows: Any) -> list[float]:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    return model.fit(dataset, epochs=2, verbose=0).history["loss"]


def _quantize(model: keras.Model, mode: str, tokenizer: Any) -> None:
    if mode == "int8":
        model.quantize(mode)
        return
    kind = keras.quantizers.GPTQConfig if mode == "gptq" else keras.quantizers.AWQConfig
    model.quantize(
        mode, config=kind(dataset=TEXTS, tokenizer=tokenizer, num_samples=4, sequence_length=8, group_size=8)
    )


def _compile(model: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, sampler="greedy")


def _run_images(presets: Path, folder: Path, held: AbstractContextManager[Any]) -> dict[str, Any]:
    import keras_hub
    import tensorflow as tf

    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 255, (10, 12, 10, 3)).astype("float32"), np.arange(10) % 3
    with held:
        model = keras_hub.models.ImageClassifier.from_preset(str(presets / "images"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
        found = dict(model.fit(dataset, epochs=2, verbose=0).history)
        found["evaluated"] = model.evaluate(images, labels, batch_size=4, verbose=0)
        found["prediction"] = model.predict(images, batch_size=4, verbose=0)
        model.save_to_preset(str(folder / "preset"))
        again = keras_hub.models.ImageClassifier.from_preset(str(folder / "preset"))
        found["prediction of a saved preset"] = again.predict(images, batch_size=4, verbose=0)
    return found


def _run(case: Case, presets: Path, folder: Path, held: AbstractContextManager[Any]) -> dict[str, Any]:
    import keras_hub

    if case.lora == "images":
        return _run_images(presets, folder, held)
    preset = str(presets / "text")
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    found: dict[str, Any] = {}
    with held:
        model, preprocessor = _text_model(preset)
        if case.mode is not None:
            _quantize(model, case.mode, preprocessor.tokenizer)
        if case.lora == "before compile":
            model.backbone.enable_lora(2)
        _compile(model)
        if case.lora == "after compile":
            model.backbone.enable_lora(2)
            _compile(model)
        samples = keras.tree.map_structure(keras.ops.convert_to_numpy, preprocessor(TEXTS))
        if case.lora != "none" or case.mode is None:  # what is quantized is not trained
            found["loss"] = _fit(model, samples)
        rows = {name: value[:5] for name, value in samples[0].items()}
        found["prediction"] = model.predict(rows, batch_size=4, verbose=0)
        if case.lora != "none":
            file = str(folder / "adapters.lora.h5")
            model.backbone.save_lora_weights(file)
            again, _ = _text_model(preset)
            if case.mode is not None:
                _quantize(again, case.mode, preprocessor.tokenizer)
            again.backbone.load_lora_weights(file)
            found["prediction of loaded adapters"] = again.predict(rows, batch_size=4, verbose=0)
        if case.mode is None:  # a file of weights has adapters merged
            file = str(folder / "merged.weights.h5")
            model.save_weights(file)
            again = keras_hub.models.CausalLM.from_preset(preset)
            again.load_weights(file)
            again.compile(sampler="greedy")
            found["text"] = again.generate(TEXTS[:5], max_length=12)
            again.save_to_preset(str(folder / "preset"))
            saved, _ = _text_model(str(folder / "preset"))
            found["prediction of a saved preset"] = saved.predict(rows, batch_size=4, verbose=0)
        prompts = {**rows, "padding_mask": rows["padding_mask"] * (np.arange(12) < 6)}
        found["tokens"] = model.generate(prompts, stop_token_ids=None)["token_ids"]
    return found


def deviations(chosen: Sequence[Case]) -> dict[str, str]:
    """Case -> how it differs from one device; those that are equal are left out. Runs on every rank."""
    bad = {}
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that cannot be quantized, of rules that find nothing
        shared = Path(_together(own))
        if kf.env.is_main_process():
            write_presets(shared)
        _together(True)
        for number, case in enumerate(chosen):
            alone = Path(own) / f"alone {number}"
            alone.mkdir()
            expected = _run(case, shared, alone, contextlib.nullcontext())
            folder = shared / str(number)
            folder.mkdir(exist_ok=True)
            try:
                got = _run(case, shared, folder, scope(case.layout, case.lora == "images"))
            except Exception as error:
                bad[str(case)] = f"{type(error).__name__}: {error}"
                continue
            finally:
                _together(True)
            assert expected.keys() == got.keys(), case
            for name, value in expected.items():
                if name == "text":
                    over = "" if list(value) == list(got[name]) else f"{got[name]}, one device: {value}"
                else:
                    difference = np.abs(np.asarray(got[name], "float64") - np.asarray(value, "float64")).max()
                    largest = np.abs(value).max()
                    over = f"off by {difference:.2g} of {largest:.2g}" if difference > 1e-5 * max(1.0, largest) else ""
                if over:
                    bad[str(case)] = f"{name}: {over}"
                    break
        _together(True)
    keras.utils.clear_session()
    return bad
