"""What `keras.distribution` answers, on every engine, before a distribution of ours and under one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_devices_meshes_and_layouts_are_those_of_the_ranks(on_ranks: Callable, engine: str) -> None:
    def program() -> None:
        import keras
        import numpy as np
        from keras.distribution import DeviceMesh, LayoutMap, TensorLayout, distribute_tensor, list_devices

        import keras_flow as kf

        keras.distribution.initialize()
        assert list_devices() == [f"cpu:{rank}" for rank in range(4)]
        assert keras.distribution.get_device_count() == 4
        assert keras.distribution.get_device_count("cpu") == 4
        mesh = DeviceMesh((2, 2), ("batch", "model"))
        assert mesh.backend_mesh is not None and TensorLayout(("batch", None), mesh).backend_layout is not None
        x = keras.ops.reshape(keras.ops.arange(8, dtype="float32"), (4, 2))
        by_rows = TensorLayout(("batch", None), mesh)
        assert keras.ops.convert_to_numpy(distribute_tensor(x, by_rows)).sum() == 28

        layout_map = LayoutMap(mesh)
        layout_map[".*up/kernel"] = (None, "model")
        theirs = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        ours = kf.ModelParallel(theirs)
        assert ours.batch_axes == ("batch",) and ours.placement.ranks == (0, 1, 2, 3)
        assert kf.DataParallel(keras.distribution.DataParallel(DeviceMesh((4,), ("rows",)))).batch_axes == ("rows",)
        ones = np.ones((6, 4), "float32")

        class Laid(keras.layers.Layer):
            def call(self, x):
                return distribute_tensor(2 * x, by_rows)

        with ours.scope():
            assert keras.ops.convert_to_numpy(distribute_tensor(x, ours.get_data_layout(x.shape))).sum() == 28
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8, kernel_initializer="ones", name="up"), Laid()]
            )
            assert kf.layout_of(model.layers[0].kernel).layout.local_shape(3) == (4, 4)
            assert (model.predict(ones, batch_size=6, verbose=0) == 8).all()

    on_ranks(engine)(program)


@pytest.mark.parametrize("engine", ["tensorflow", "torch"])
def test_a_layout_on_other_ranks_is_refused(on_ranks: Callable, engine: str) -> None:
    """JAX moves a tensor to any mesh by itself."""

    def program() -> None:
        import keras
        import pytest
        from keras.distribution import DeviceMesh, TensorLayout, distribute_tensor

        import keras_flow as kf

        line = TensorLayout(("x",), DeviceMesh((4,), ("x",)))
        square = kf.Placement([[0, 1], [2, 3]], axis_names=("batch", "model"))
        with kf.ModelParallel(square, batch_axes="batch").scope():
            with pytest.raises(kf.FlowError, match=r"a layout on the mesh .*'x'.* the active distribution's ranks"):
                distribute_tensor(keras.ops.ones(4), line)
        with pytest.raises(kf.FlowError, match="has no device_mesh and no distribution is active"):
            distribute_tensor(keras.ops.ones(4), TensorLayout(("x",)))

    on_ranks(engine)(program)


ASKS_FIRST = """
import keras
import keras_flow as kf
from keras.distribution import DeviceMesh, LayoutMap, list_devices
layout_map = LayoutMap(DeviceMesh((2,), ("model",), list_devices()))
layout_map["hidden/kernel"] = (None, "model")
with kf.ModelParallel(rules=layout_map).scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name="hidden")])
    model.compile("sgd", "mse")
    try: model.evaluate([[1.0] * 8], [[1.0] * 16], verbose=0)
    except kf.LayoutError as error: print(" ".join(str(error).split()))
"""


def test_a_program_may_ask_before_kf_init(tmp_path) -> None:
    """Under `keras-flow launch`, which imports keras_flow before the program imports Keras."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS_FIRST)
    code, out, err = programs.finish(
        programs.start(["-m", "keras_flow.cli.app", "launch", "--devices", "2", str(script)], "torch"), 200
    )
    assert code == 0, err
    assert "rule 'hidden/kernel' matched no variable; the nearest path is 'sequential/hidden/kernel'" in out
    assert "a key of a LayoutMap must match a path whole, as in Keras: '.*hidden/kernel' where" in out


ASKS_FOR_THE_SPEC = """
import importlib.util, sys
import keras_flow as kf
assert importlib.util.find_spec("keras") is not None and "keras" not in sys.modules
waits = lambda: [finder for finder in sys.meta_path if type(finder).__module__.startswith("keras_flow")]
assert len(waits()) == 1
import keras
assert not waits(), "it has done its work"
print(keras.distribution.list_devices())

def train():
    mesh = keras.distribution.DeviceMesh((4,), ("batch",), keras.distribution.list_devices())
    with kf.DataParallel(keras.distribution.DataParallel(mesh)).scope():
        pass
    return len(keras.distribution.list_devices())

from keras_flow.distributions.dry_run import dry_run
with dry_run(4):
    print(train())
"""


def test_who_asks_for_the_spec_of_keras_alone_changes_nothing(tmp_path) -> None:
    """And in a dry run, as `kf.run` makes one, devices are those of its ranks."""
    script = tmp_path / "spec.py"
    script.write_text(ASKS_FOR_THE_SPEC)
    code, out, err = programs.finish(programs.start([str(script)], "torch"), 100)
    assert code == 0, err
    assert out.splitlines() == ["['cpu:0']", "4"]
