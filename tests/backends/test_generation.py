"""KerasHub's `generate` gives the tokens of one device, on every engine and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.doors import presets
from tests.one_device import one_device

pytestmark = pytest.mark.timeout(600)
ENGINES = ("jax", "tensorflow", "torch")
STOPS = [7, 9, 20, 41]
#: name of a model -> what its backbone needs to be small
MODELS = {
    "Gemma": {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "Llama": {"num_query_heads": 4, "num_key_value_heads": 2},
    "Mistral": {"num_query_heads": 4, "num_key_value_heads": 2},
    "Qwen": {"num_query_heads": 4, "num_key_value_heads": 2},
    "GPT2": {"num_heads": 4, "max_sequence_length": 16},
}
SAMPLERS = {
    "Greedy": {},
    "TopK": {"k": 5, "seed": 3},
    "TopP": {"p": 0.8, "seed": 3},
    "Random": {"temperature": 0.7, "seed": 3},
    "Beam": {"num_beams": 3},
    "Contrastive": {"k": 3},
}


def prompts(rows: int, length: int = 10) -> dict[str, np.ndarray]:
    """Prompts of 3 to 5 tokens."""
    mask = (np.arange(length) < 3 + np.arange(rows)[:, None] % 3).astype("int32")
    return {
        "token_ids": np.random.default_rng(rows).integers(1, 64, (rows, length)).astype("int32") * mask,
        "padding_mask": mask,
    }


def distribution(layout: str, name: str) -> Any:
    """A layout's distribution, by the rules of the model's class, or those of people where it has none."""
    import keras_hub

    import keras_flow as kf

    if layout == "2x2":
        square = kf.Placement([[0, 1], [2, 3]], axis_names=("batch", "model"))
        maps = getattr(getattr(keras_hub.models, f"{name}Backbone"), "get_layout_map", None)
        return kf.ModelParallel(square, batch_axes="batch", rules=maps or presets.rules_of_text())
    return kf.DataParallel(kf.Placement([0])) if layout == "one" else kf.DataParallel()


def generated(layout: str, name: str, samplers: list[str], rows: tuple[int, ...]) -> dict[str, list]:
    """What a model of random weights generates under a layout: sampler and number of rows -> tokens."""
    import keras
    import keras_hub

    backbone_class = getattr(keras_hub.models, f"{name}Backbone")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with distribution(layout, name).scope():
        backbone = backbone_class(vocabulary_size=64, num_layers=1, hidden_dim=16, intermediate_dim=32, **MODELS[name])
        for variable in backbone.trainable_variables:  # initial weights are too small to prefer a token
            variable.assign(keras.ops.convert_to_numpy(variable) * 4)
        model = getattr(keras_hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
        found = {}
        for sampler in samplers:
            model.compile(sampler=getattr(keras_hub.samplers, f"{sampler}Sampler")(**SAMPLERS[sampler]))
            for count in rows:
                stops = None if sampler in ("Beam", "Contrastive") else STOPS
                tokens = [model.generate(prompts(count), stop_token_ids=stops)["token_ids"] for _ in range(2)]
                found[f"{sampler} {count}"] = np.asarray(tokens).tolist()
        return found


def compared(name: str, samplers: list[str], rows: tuple[int, ...], layouts: tuple[str, ...]) -> None:
    """On each rank: the same tokens under each layout; not only the prompt, nor twice the same where they are drawn."""
    one = generated("one", name, samplers, rows)
    for layout in layouts:
        assert generated(layout, name, samplers, rows) == one, (name, layout)
    for key, (first, second) in one.items():
        assert np.any(np.asarray(first) != prompts(len(first))["token_ids"])
        assert (first != second) == key.startswith(("Top", "Random")), key


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_one_device(on_ranks: Callable, engine: str) -> None:
    """Rows that divide and not, drawn by logical index; the loop ends when all rows have ended."""
    on_ranks(engine)(compared, "Gemma", ["TopP"], (8, 5), ("1x4", "2x2"))


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_every_sampler(on_ranks: Callable, engine: str, name: str) -> None:
    on_ranks(engine)(compared, name, list(SAMPLERS), (8, 5), ("1x4", "2x2"), timeout=550)


def test_caches_are_split_by_rows_and_heads_on_torch(on_ranks: Callable) -> None:
    def program() -> list[object]:
        import keras_hub

        seen = []
        loop = keras_hub.samplers.Sampler.run_loop

        def run_loop(*args, **kwargs):
            outputs = loop(*args, **kwargs)
            seen.append(tuple(outputs[1].to_local().shape))
            return outputs

        keras_hub.samplers.Sampler.run_loop = run_loop
        try:
            generated("2x2", "Gemma", ["Greedy"], (8,))
        finally:
            keras_hub.samplers.Sampler.run_loop = loop
        return seen

    # of [rows 8, layers 1, keys and values 2, length 10, heads 2, head_dim 8]
    assert on_ranks("torch")(program) == [(4, 1, 2, 10, 1, 8)] * 2


def test_compiled_once_for_prompts_of_any_length(on_ranks: Callable) -> None:
    def program() -> int:
        import keras
        import keras_hub

        import keras_flow as kf

        traces = []
        with kf.DataParallel().scope():
            backbone = keras_hub.models.GemmaBackbone(
                vocabulary_size=64, num_layers=1, hidden_dim=16, intermediate_dim=32, **MODELS["Gemma"]
            )
            model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
            model.compile(sampler="greedy")
            step = model.generate_step

            def counted(*args, **kwargs):
                traces.append(1)
                return step(*args, **kwargs)

            model.generate_step = counted
            for length in (2, 3, 4):
                batch = prompts(4)
                mask = (np.arange(10) < length).astype("int32")[None] * np.ones((4, 1), "int32")
                model.generate({"token_ids": batch["token_ids"] * mask, "padding_mask": mask}, stop_token_ids=None)
        keras.utils.clear_session()
        return len(traces)

    assert on_ranks("jax")(program) == 1
    assert on_ranks("tensorflow")(program) == 1


def _small() -> Any:
    import keras_hub

    settings = {"vocabulary_size": 64, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
    backbone = keras_hub.models.GPT2Backbone(**settings, **MODELS["GPT2"])
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def test_other_prompts_on_each_rank_are_refused(on_ranks: Callable) -> None:
    """They were mixed in silence: each rank took its rows of its own prompts."""

    def program(alike: bool) -> str:
        import keras_flow as kf

        with kf.DataParallel().scope():
            model = _small()
            batch = prompts(8)
            own = {name: value if alike else value[kf.env.get_rank() :: 4] for name, value in batch.items()}
            for _ in range(4):  # each call is compared
                model.generate(own if alike else batch, stop_token_ids=None)
            try:
                model.generate(own, stop_token_ids=None)
            except kf.FlowError as error:
                return str(error)
        return "generated"

    assert on_ranks("torch").on_each(program, True) == ["generated"] * 4
    for said in on_ranks("torch").on_each(program, False):
        assert "the ranks are fed different batches: input \"x['inputs']" in said, said


def test_one_process_alone_generates(on_ranks: Callable) -> None:
    """Under data parallel it has all weights. The others go on, and all meet again."""

    def program() -> list:
        import keras

        import keras_flow as kf

        found = []
        for scope in (one_device(), kf.DataParallel().scope()):
            keras.utils.clear_session()
            keras.utils.set_random_seed(1)
            with scope:
                model = _small()
            if kf.env.is_main_process():
                found.append(np.asarray(model.generate(prompts(5), stop_token_ids=None)["token_ids"]).tolist())
            kf.comm.barrier()
        found.append(np.asarray(model.generate(prompts(5), stop_token_ids=None)["token_ids"]).tolist())
        return found

    first, *others = on_ranks("torch").on_each(program)
    assert first == [first[0]] * 3
    assert others == [[first[0]]] * 3


def test_a_rank_that_has_a_part_of_the_weights_refuses(on_ranks: Callable) -> None:
    """Ranks but the first gave other tokens, from what they had."""

    def program() -> list[str]:
        import keras

        import keras_flow as kf

        said = []
        pipe = kf.PipelineParallel(kf.Placement(range(2), ("pipe",)), stages=2, microbatches=2)
        for distribution in (kf.CentralStorage(), pipe):
            keras.utils.clear_session()
            with distribution.scope():
                model = _small()
                try:
                    model.generate(prompts(4), stop_token_ids=None)
                    said.append("generated")
                except kf.FlowError as error:
                    said.append(str(error))
        return said

    for storage, pipe in on_ranks("torch").on_each(program):
        assert storage.startswith("kf.CentralStorage does not generate"), storage
        assert pipe.startswith("kf.PipelineParallel does not generate"), pipe


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_exported_to_transformers(on_ranks: Callable, engine: str, tmp_path: Path) -> None:
    """One process writes, from whole weights: the exporter computes with them."""

    def program(folder: str) -> int:
        from unittest import mock

        import safetensors.numpy

        import keras_flow as kf
        from keras_flow import comm

        mesh = kf.Placement([range(4)], axis_names=("data", "model"))
        rules = {"dense/kernel": "B,S(1)"}
        with kf.ModelParallel(mesh, rules=rules, batch_axes="data").scope():
            backbone = _small().backbone
            expected = {weight.shape: weight for weight in backbone.get_weights()}
            with mock.patch("builtins.open", wraps=open) as opened:
                backbone.export_to_transformers(f"{folder}/exported")
            comm.barrier()
        found = safetensors.numpy.load_file(f"{folder}/exported/model.safetensors")
        table = next(value for name, value in found.items() if name.endswith("wte.weight"))
        np.testing.assert_array_equal(table, expected[table.shape])
        return sum("config.json" in str(call.args[0]) for call in opened.call_args_list)

    assert on_ranks(engine).on_each(program, str(tmp_path)) == [1, 0, 0, 0][: 4 if engine == "torch" else 1]
