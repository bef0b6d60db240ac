"""What the parity grid does not show of the TensorFlow backend, on four ranks."""

import pytest

from tests import sampling

ENGINE = "tensorflow"
NAMES = (
    "created_sharded",
    "steps",
    "layouts",
    "any_order_of_ranks",
    "operations",
    "mirrored",
    "replicas_of_changed_layers",
    "replicas_of_losses_that_compare_rows",
    "replicas_of_data_in_other_structures",
    "replicas_of_masks_that_name_the_rows",
    "replicas_without_rows",
    *(f"losses_without_rows, {each}" for each in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")),
    "copies_of_many_dims",
    "rows_of_an_embedding_that_repeat",
    "slices_of_ones_own",
    "variables_of_tensorflow",
    "draws_of_own_rows",
    "iterators_that_end",
    "scaled_losses",
)
UNSPLIT = (
    "split_classes",
    "sorted_features",
    "experts",
    "convolutions",
    "windows",
    "whole_on_every_rank",
    "on_one_device",
    "results_of_unknown_shape",
    "made_of_others",
    "shuffled_features",
    "counted_categories",
    "grouped_attention",
    "replicas_draw",
    "called_after_build",
    "layers_that_a_reading_thread_calls",
    "a_dict_that_a_layer_changes",
)
#: a step that fails may end the collectives of its process, so these have processes of their own
ENDING = ("failed_steps", "ended_collectives", "operations_that_fail_as_they_run")
FILES = ("files_that_say_jit_compile",)


def run(name: str) -> None:
    from tests.backends.tensorflow import programs

    programs.PROGRAMS[name]()


def names() -> list[str]:
    from tests.backends.tensorflow import programs

    return list(programs.PROGRAMS)


@pytest.mark.parametrize("name", sampling.some([*NAMES, *UNSPLIT, *FILES], every=6))
def test_program(name: str, on_ranks) -> None:
    on_ranks(ENGINE)(run, name)


@pytest.mark.parametrize("name", sampling.some(ENDING, every=5))
def test_program_that_may_end_collectives(name: str, on_ranks) -> None:
    pool = on_ranks(ENGINE)
    try:
        pool(run, name)
    finally:
        pool.close()


def test_every_program_is_run(on_ranks) -> None:
    assert sorted(on_ranks(ENGINE)(names)) == sorted((*NAMES, *UNSPLIT, *ENDING, *FILES))


@pytest.mark.timeout(200)
def test_a_forked_process_computes_on_one_device(on_ranks) -> None:
    """As `multiprocessing.Pool` starts it on Linux; under the distribution it would wait without end."""

    def program() -> list[float]:
        import multiprocessing

        import keras

        import keras_flow as kf

        def sums(values: multiprocessing.Queue) -> None:
            made = keras.Variable([1.0, 2.0])
            values.put([float(keras.ops.sum(made)), float(keras.distribution.distribution() is None)])

        forks = multiprocessing.get_context("fork")
        values = forks.Queue()
        with kf.DataParallel().scope():
            keras.Variable([1.0])
            child = forks.Process(target=sums, args=(values,))
            child.start()
            try:
                return values.get(timeout=60)
            finally:
                child.kill()

    assert on_ranks("tensorflow")(program) == [3.0, 1.0]


@sampling.one_in(2)
def test_steps_on_one_device_are_numbered_and_compared(on_ranks) -> None:
    def program() -> list[int]:
        from unittest import mock

        import keras
        import numpy as np
        import tensorflow as tf

        import keras_flow as kf
        from keras_flow.backends.reading.batch_watch import BatchWatch

        class Counting(keras.layers.Layer):
            """Changes a variable of TensorFlow's own."""

            def __init__(self):
                super().__init__()
                self.calls = tf.Variable(0)

            def call(self, x: tf.Tensor) -> tf.Tensor:
                self.calls.assign_add(1)
                return x

        x = np.ones((32, 4), "float32")
        with kf.DataParallel().scope(), mock.patch.object(BatchWatch, "see", autospec=True) as see:
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4), Counting()])
            model.compile("sgd", "mse", run_eagerly=True)
            counts = []
            for act in (model.fit, model.evaluate, lambda x, *_, **given: model.predict(x, **given)):
                act(x, x, batch_size=8, verbose=0)
                counts.append(see.call_count)
        return counts

    assert on_ranks("tensorflow")(program) == [4, 8, 12]


@sampling.one_in(2)
def test_graphs_and_copies_live_as_long_as_their_steps(on_ranks) -> None:
    """A traced step ends with its model, though it holds a constant; a copy's variable lives as long as the copy."""

    def program() -> tuple[int, bool]:
        import gc
        import weakref

        import keras
        import numpy as np
        from tensorflow.python.framework.func_graph import FuncGraph

        import keras_flow as kf
        from keras_flow.backends.tensorflow.whole_step import WholeStep

        def holding_constants() -> list[weakref.ref]:
            graphs = [each for each in gc.get_objects() if isinstance(each, FuncGraph)]
            return [weakref.ref(graph) for graph in graphs if hasattr(graph, "_keras_flow_constants")]

        def trained() -> list[weakref.ref]:
            with kf.DataParallel().scope():
                inputs = keras.Input((4,))
                outputs = keras.layers.Dense(4)(inputs) + keras.ops.arange(4, dtype="float32")
                model = keras.Model(inputs, outputs)
                model.compile("sgd", "mse")
                model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
            return holding_constants()

        graphs = trained()
        assert graphs
        keras.utils.clear_session()
        gc.collect()
        distribution = kf.DataParallel()
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
            variable = keras.Variable(np.ones(3, "float32"))
        step = WholeStep(model, model.predict_step, distribution)
        step._copy(variable, np.ones(3, "float32"))
        kept = weakref.ref(variable)
        del variable
        gc.collect()
        return sum(graph() is not None for graph in graphs), kept() is not None

    assert on_ranks("tensorflow")(program) == (0, True)


@sampling.one_in(2)
def test_draws_of_many_shapes(on_ranks) -> None:
    """Those of the ninth number of rows, and of time steps that the graph of one rank does not know, are logical."""

    def program() -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        import keras_flow as kf
        from keras_flow.backends.tensorflow.trainer import MOST_TRACES

        def drawn(placement: kf.Placement) -> list[np.ndarray]:
            keras.utils.set_random_seed(0)
            with kf.DataParallel(placement, random="logical").scope():
                model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5, seed=1)])
                model.train_step = lambda data: {"sum": keras.ops.sum(model(data[0], training=True) * data[0])}
                model.compile("sgd", "mse")
                rows = range(4, 4 * (MOST_TRACES + 3), 4)
                steps = [np.arange(4.0 * count, dtype="float32").reshape(count, 4) for count in rows]
                return [model.train_on_batch(x, x[:, :1], return_dict=True)["sum"] for x in steps]

        np.testing.assert_allclose(drawn(kf.Placement(range(4))), drawn(kf.Placement([0])), rtol=1e-5)

        def fitted(placement: kf.Placement) -> list[float]:
            keras.utils.set_random_seed(0)
            with kf.DataParallel(placement, random="logical").scope():
                dropouts = [keras.layers.Dropout(0.5, seed=1), keras.layers.SpatialDropout1D(0.5, seed=2)]
                noise = [keras.layers.GaussianNoise(0.5, seed=3), keras.layers.GlobalAveragePooling1D()]
                model = keras.Sequential([keras.layers.Input((None, 4)), *dropouts, *noise])
                model.compile("sgd", "mse")
                x = tf.data.Dataset.from_tensor_slices(np.ones((12, 7, 4), "float32")).batch(4)
                # as padded batches are: of 5, 6 and 7 time steps
                x = x.enumerate().map(lambda number, rows: (rows[:, : 5 + number], rows[:, 0]))
                return model.fit(x, epochs=2, verbose=0).history["loss"]

        np.testing.assert_allclose(fitted(kf.Placement(range(4))), fitted(kf.Placement([0])), rtol=1e-5)

    on_ranks("tensorflow")(program)


def _slots() -> None:
    import keras

    import keras_flow as kf
    from keras_flow.backends.active import backend

    rules = {"hidden/kernel": {"model": kf.sbp.split(1)}}
    with kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules, batch_axes=()).scope():
        layer = keras.layers.Dense(8, name="hidden")
        layer.build((None, 4))
    with kf.DataParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("a", "b"))).scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(layer.trainable_variables)
    slot = optimizer.momentums[0]
    assert kf.layout_of(slot).layout == kf.layout_of(layer.kernel).layout
    assert [part.shape for part in backend().shards(slot).values()] == [(4, 2)] * 4


def test_slots_made_under_another_distribution_follow_their_variables(on_ranks) -> None:
    on_ranks("tensorflow")(_slots)
