"""Files that all processes save under one path, of models that no distribution has laid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.ranks import Pool


def _saved_often(folder: str) -> list[list[float]]:
    """What ranks load of a model without variables, which all have saved under one path, time and again."""
    import keras

    import keras_flow as kf

    x = np.arange(7, dtype="float32").reshape(7, 1)
    found = []
    with kf.DataParallel().scope():
        for turn in range(8):
            mean = np.full((1,), float(turn))
            model = keras.Sequential([keras.Input((1,)), keras.layers.Normalization(mean=mean, variance=mean + 1)])
            assert model.variables == []
            path = Path(folder) / "model.keras"
            model.save(path)
            loaded = keras.models.load_model(path)
            found.append(np.ravel(loaded.predict(x, verbose=0)).tolist())
    return found


def test_a_model_without_variables_is_written_by_one_process(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    x = np.arange(7)
    for found in on_ranks("torch").on_each(_saved_often, str(tmp_path)):
        assert np.allclose(found, [(x - turn) / np.sqrt(turn + 1) for turn in range(8)], atol=1e-5)


def _checkpointed(folder: str) -> list[str]:
    """Return what is in the folder of a `ModelCheckpoint`, which no process has seen when it makes it."""
    from unittest import mock

    import keras

    import keras_flow as kf
    from keras_flow.current.keras_places import file_utils

    x = np.ones((8, 2), "float32")
    path = Path(folder) / "checkpoints"
    exists = file_utils.exists
    with (
        kf.DataParallel().scope(),
        # as each process that is a little later than the first one sees it
        mock.patch.object(file_utils, "exists", lambda each: str(each) != str(path) and exists(each)),
    ):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(x, x, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path / "model.keras")])
        (Path(folder) / "a file").touch()
        try:
            file_utils.makedirs(Path(folder) / "a file")
        except FileExistsError:
            return [each.name for each in path.iterdir()]
    raise AssertionError("a file was taken for a folder")


def test_all_processes_make_the_folder_of_a_checkpoint(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    assert on_ranks("torch").on_each(_checkpointed, str(tmp_path)) == [["model.keras"]] * 4


def _exported(folder: str) -> tuple[int, float, str]:
    """How often a rank writes a model without variables, what it computes, and an error's text."""
    from unittest import mock

    import keras
    import torch

    import keras_flow as kf

    path = Path(folder) / "model.pt2"
    with kf.DataParallel().scope(), mock.patch("torch.export.save", wraps=torch.export.save) as writes:
        inputs = keras.Input((2,))
        model = keras.Model(inputs, keras.layers.Rescaling(3.0)(inputs))
        model.export(path, format="torch", verbose=False)
        output = torch.export.load(path).module()(torch.ones(1, 2))
        try:
            model.export(Path(folder) / "model.other", format="torch", verbose=False)
        except (ValueError, kf.FlowError) as error:
            return writes.call_count, float(output.sum()), str(error)
    raise AssertionError("written under a name that the format does not have")


def test_a_model_without_variables_is_exported_by_one_process(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    for rank, (writes, output, error) in enumerate(on_ranks("torch").on_each(_exported, str(tmp_path))):
        assert (writes, output) == (1 if rank == 0 else 0, 6.0)
        assert str(tmp_path / "model.other") in error


def _edited(folder: str) -> tuple[int, list[np.ndarray], str]:
    """How often a rank writes a file that all edit, what it holds, and an error's text."""
    from unittest import mock

    import h5py
    import keras

    import keras_flow as kf

    path = Path(folder) / "edited.weights.h5"
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="dense")])
        model.save_weights(Path(folder) / "model.weights.h5")
        editor = keras.saving.KerasFileEditor(str(Path(folder) / "model.weights.h5"))
        editor.delete_weight("dense", "1")
        editor.add_weights("dense", {"1": np.arange(3.0)})
        with mock.patch("h5py.File", wraps=h5py.File) as files:
            for _ in range(3):
                editor.save(path)
        writes = sum("w" in str(call.args[1:]) + str(call.kwargs) for call in files.call_args_list)
        model.load_weights(path)
        try:
            editor.save(Path(folder) / "edited.h5")
        except (ValueError, kf.FlowError) as error:
            return writes, model.get_weights(), str(error)
    raise AssertionError("written under a name that the editor does not take")


def test_an_edited_file_is_written_by_one_process(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    for rank, (writes, weights, error) in enumerate(on_ranks("torch").on_each(_edited, str(tmp_path))):
        assert writes == (3 if rank == 0 else 0)
        assert weights[0].shape == (2, 3) and weights[1].tolist() == [0.0, 1.0, 2.0]
        assert "expected a `.weights.h5` extension" in error
    assert sorted(each.name for each in tmp_path.iterdir()) == ["edited.weights.h5", "model.weights.h5"]


def _preset(folder: str) -> tuple[list[list[str]], int]:
    """The files of a preset, as KerasHub's models write one, after a save, one that fails, and another one.

    Also how often this rank has written a layer, as tokenizers are.
    """
    import contextlib

    import keras

    import keras_flow as kf
    from keras_flow import comm

    class Own(keras.Sequential):
        def save_to_preset(self, path: str, text: str) -> None:
            Path(path).mkdir(exist_ok=True)
            Path(path, "config.json").write_text(text)
            if text == "half":
                raise OSError("no space left")

    class Words(keras.layers.Layer):
        written = 0

        def save_to_preset(self, path: str) -> None:
            self.written += 1

    path, found = Path(folder) / "preset", []
    with kf.DataParallel().scope():
        model = Own([keras.Input((2,)), keras.layers.Dense(3)])
        for text in ("old", "half", "new"):
            with contextlib.suppress(OSError, kf.FlowError):
                model.save_to_preset(str(path), text)
            found.append(sorted(f"{each.name}: {each.read_text()}" for each in path.iterdir()))
            comm.barrier()
            (path / "beside.txt").touch()
            comm.barrier()
        words = Words()
        words.save_to_preset(str(Path(folder) / "words"))
        return found, words.written


def test_a_preset_is_the_old_one_or_the_new_one(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    beside = "beside.txt: "
    expected = [["config.json: old"], [beside, "config.json: old"], [beside, "config.json: new"]]
    assert on_ranks("torch").on_each(_preset, str(tmp_path)) == [(expected, int(rank == 0)) for rank in range(4)]


def _of_bfloat16(folder: str) -> list[list[float]]:
    """Weights of bfloat16, split and in a wrapped module, as files have them that process 0 writes; and as they are."""
    import keras
    import torch

    import keras_flow as kf

    mesh = kf.Placement([range(4)], axis_names=("data", "model"))
    found = []
    with kf.ModelParallel(mesh, rules={"kernel|weight": "B,S(0)"}, batch_axes="data").scope():
        module = torch.nn.Linear(4, 8, dtype=torch.bfloat16)
        wrapped = keras.layers.TorchModuleWrapper(module, dtype="bfloat16", name="wrapped")
        dense = keras.layers.Dense(4, dtype="bfloat16", name="dense")
        model = keras.Sequential([keras.Input((8,), dtype="bfloat16"), dense, wrapped])
        expected = [weight.astype("float32") for weight in model.get_weights()]
        for name, settings in (("m.weights.h5", {}), ("m.weights.json", {"max_shard_size": 1.0})):
            model.save_weights(Path(folder) / name, **settings)
            for weight in model.weights:
                weight.assign(keras.ops.zeros_like(weight))
            model.load_weights(Path(folder) / name)
            pairs = zip(model.get_weights(), expected, strict=True)
            found.append([float(np.abs(weight.astype("float32") - value).max()) for weight, value in pairs])
        model.save(Path(folder) / "m.keras")
        copied = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(wrapped), safe_mode=False)
        found.append([float((copied.module.weight.detach().float() - torch.from_numpy(expected[2])).abs().max())])
    return found


def test_weights_of_bfloat16(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    assert on_ranks("torch")(_of_bfloat16, str(tmp_path)) == [[0.0] * 4, [0.0] * 4, [0.0]]


def _backed_up() -> int | None:
    """How many steps a backup says that weights have had, where four steps are an update."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.files import backups

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=4), "mse")
        model.fit(np.ones((24, 2)), np.ones((24, 3)), batch_size=4, verbose=0)
    return backups._iterations(model)


def test_a_backup_counts_steps_and_not_updates(on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks("torch")(_backed_up) == 6
