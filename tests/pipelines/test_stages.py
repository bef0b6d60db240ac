"""Where a model is cut, where its weights are, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.errors import FlowError
from keras_flow.pipelines import cutting, graph

pytestmark = pytest.mark.usefixtures("four_ranks")
layers = keras.layers


def _pipeline(ranks: int = 2, **settings: Any) -> kf.PipelineParallel:
    return kf.PipelineParallel(kf.Placement(range(ranks), axis_names=("pipe",)), **settings)


def _transformer(blocks: int = 12) -> keras.Model:
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(512, 16)(inputs)
    for number in range(blocks):
        x = layers.Add()([x, layers.Dense(16, name=f"down_{number}")(layers.Dense(8 + 8 * (number % 3))(x))])
    return keras.Model(inputs, layers.Dense(512, name="head")(x))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_cut_by_cost_is_the_best_one(stages: int) -> None:
    calls = graph.of(_transformer())
    costs = [cutting.operations(calls, call) for call in calls.calls]
    chosen = cutting.by_cost(calls, stages)

    def slowest(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], len(costs))
        return max(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))

    best = min(slowest((0, *starts)) for starts in itertools.combinations(range(1, len(costs)), stages - 1))
    assert slowest(tuple(chosen.index(stage) for stage in range(stages))) == best


def test_a_cut_by_cost_counts_elements_of_any_size() -> None:
    costs = {}
    for policy in ("float32", "bfloat16"):
        keras.config.set_dtype_policy(policy)
        try:
            calls = graph.of(_transformer())
        finally:
            keras.config.set_dtype_policy("float32")
        costs[policy] = [cutting.operations(calls, call) for call in calls.calls]
    assert costs["bfloat16"] == costs["float32"]


def _operations(make: Any, *shape: int) -> int:
    inputs = keras.Input(shape)
    calls = graph.of(keras.Model(inputs, make(inputs)))
    return int(sum(cutting.operations(calls, call) for call in calls.calls))


def test_operations_of_layers_that_use_a_weight_many_times() -> None:
    """Multiplications, and one for each element that is made."""
    gates = 4 * 5 * (3 + 5)
    assert _operations(layers.LSTM(5), 10, 3) == 10 * gates + 5
    assert _operations(layers.LSTM(5, return_sequences=True), 10, 3) == 10 * gates + 10 * 5
    assert _operations(layers.Bidirectional(layers.LSTM(5)), 10, 3) == 2 * 10 * gates + 2 * 5
    images = 6 * 6 * 4 * (3 * 3 * 2) + 6 * 6 * 4
    assert _operations(layers.Conv2D(4, 3, data_format="channels_first"), 2, 8, 8) == images
    assert _operations(layers.Conv2D(4, 3, data_format="channels_last"), 8, 8, 2) == images
    for attends, widths in (
        (layers.MultiHeadAttention(2, 4, use_bias=False), 8 + 8 + 8 + 8),
        (layers.GroupQueryAttention(4, 2, 1, use_bias=False), 8 + 4 + 4 + 8),
    ):
        found = _operations(lambda x: attends(x, x), 64, 8)  # noqa: B023
        assert found == 64 * 8 * widths + 64 * 2 * 64 * 8 + 64 * 8


def test_weights_are_where_their_stage_is() -> None:
    with _pipeline(stages=[["up"], ["down"]]).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="up"), layers.Dense(2, name="down")])
        assert [kf.layout_of(weight).layout.placement.ranks for weight in model.weights] == [(0,), (0,), (1,), (1,)]
        model.compile("adam", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    assert [kf.layout_of(weight).layout.placement.ranks for weight in model.weights] == [(0,), (0,), (1,), (1,)]
    slots = [slot for slot in model.optimizer.variables if slot.path.endswith("momentum")]
    assert [kf.layout_of(slot).layout.placement.ranks for slot in slots] == [(0,), (0,), (1,), (1,)]


def test_a_model_made_outside_moves_to_its_stages() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])
    model.compile("sgd", "mse")
    with _pipeline().scope():
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    assert [kf.layout_of(weight).layout.placement.ranks for weight in model.weights] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize(
    ("first", "second", "held"),
    [
        (("cpu", "0:0"), (kf.Placement([1]),), [(0,), (0,), (1,), (1,)]),
        (("cpu", "0:0-1"), (kf.Placement([2, 3]),), [(0,), (0,), (2,), (2,)]),  # one process: on the first of a stage
    ],
)
def test_placed_by_hand(first: tuple[Any, ...], second: tuple[Any, ...], held: list[tuple[int, ...]]) -> None:
    inputs = keras.Input((4,))
    with kf.scope.placement(*first):
        hidden = layers.Dense(8)(inputs)
    with kf.scope.placement(*second):
        outputs = layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    before = model.evaluate(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), epochs=3, verbose=0)
    assert model.evaluate(np.ones((8, 4)), np.ones((8, 2)), verbose=0) < before
    assert [kf.layout_of(weight).layout.placement.ranks for weight in model.weights] == held


def test_stages_on_several_ranks() -> None:
    with kf.PipelineParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("data", "pipe"))).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    # one process drives all ranks: a weight is on the first of its stage's
    assert [kf.layout_of(weight).layout.placement.ranks for weight in model.weights] == [(0,), (0,), (1,), (1,)]


_SPLIT = kf.Placement([[0, 1], [2, 3]], axis_names=("pipe", "model"))


def test_weights_are_split_over_the_ranks_of_their_stage() -> None:
    rules = {"kernel": {"model": kf.sbp.split(1)}}
    with kf.PipelineParallel(_SPLIT, rules=rules).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    for number, layer in enumerate(model.layers):
        slots = [slot for slot in model.optimizer.variables if f"_{layer.name}_kernel_" in f"_{slot.path}_"]
        for each in (layer.kernel, *slots):
            layout = kf.layout_of(each).layout
            assert (layout.placement.ranks, kf.sbp.text(layout.nd_sbp)) == ((2 * number, 2 * number + 1), "S(1)")
            held = {shard.data.shape for shard in each.value.addressable_shards}
            assert held == {(layer.kernel.shape[0], layer.kernel.shape[1] // 2)}
        assert len(slots) == 2


def test_split_stages_placed_by_hand() -> None:
    with kf.PipelineParallel(_SPLIT, rules={"kernel": {"model": kf.sbp.split(1)}}).scope():
        inputs = keras.Input((4,))
        with kf.scope.placement("cpu", "0:2-3"):
            hidden = layers.Dense(8)(inputs)
        with kf.scope.placement("cpu", "0:0-1"):
            outputs = layers.Dense(2)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
        assert [kf.layout_of(layer.kernel).layout.placement.ranks for layer in model.layers[1:]] == [(2, 3), (0, 1)]
        said = r"is on the ranks \[0, 1\] or \[2, 3\], not on \[1\]"
        with pytest.raises(FlowError, match=said), kf.scope.placement("cpu", "0:1"):
            pass


def test_rules_of_split_stages() -> None:
    with pytest.raises(FlowError, match=r"axis 'model' is neither pipe_axis nor of batch_axes.*Say rules="):
        kf.PipelineParallel(_SPLIT)
    for rules, said in (
        ({"lost": {"model": kf.sbp.split(1)}}, "rule 'lost' matched no variable"),
        ({"kernel": {"pipe": kf.sbp.split(1)}}, r"'pipe'.*\['model'\]"),
    ):
        with kf.PipelineParallel(_SPLIT, rules=rules).scope(), pytest.raises(kf.LayoutError, match=said):
            model = _sequence()
            model.compile("sgd", "mse")
            model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)


def test_unlike_stages_placed_by_hand() -> None:
    inputs = keras.Input((4,))
    with kf.scope.placement("cpu", "0:0-1"):
        hidden = layers.Dense(8)(inputs)
    with kf.scope.placement("cpu", "0:2"):
        outputs = layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with pytest.raises(FlowError, match=r"one stage is on ranks \[0, 1\], another on \[2\]"):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)


class _LastMean(layers.Layer):
    """Keeps the mean of the rows that it saw."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.seen.assign(keras.ops.mean(x))
        return x


@pytest.mark.filterwarnings("ignore:.*is a custom layer")
def test_state_that_depends_on_rows_is_refused_on_several_ranks() -> None:
    with kf.PipelineParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("pipe", "data"))).scope():
        model = _sequence(_LastMean())
        model.compile("sgd", "mse")
        with pytest.raises(FlowError, match="has state that depends on the rows that it sees"):
            model.fit(np.arange(32.0).reshape(8, 4), np.ones((8, 2)), verbose=0)


@pytest.mark.filterwarnings("ignore:.*is a custom layer")
def test_state_that_depends_on_rows_is_refused_on_one_rank() -> None:
    x, y = np.arange(32.0).reshape(8, 4), np.ones((8, 2))
    for parts in (4, 1):  # the whole batch at once leaves the state of one device
        with _pipeline(microbatches=parts).scope():
            model = _sequence(_LastMean())
            model.compile("sgd", "mse")
            refuses = pytest.raises(FlowError, match=r"\(.*\), and each micro-batch leaves another")
            with refuses if parts > 1 else contextlib.nullcontext():
                model.fit(x, y, batch_size=8, verbose=0)


def test_frozen_weights_are_no_state_that_a_call_changes() -> None:
    model = _sequence()
    model.layers[0].trainable = False
    _fit(model, microbatches=4)


def test_stages_by_hand_for_which_a_schedule_has_no_order() -> None:
    with _pipeline(4, schedule="zbv").scope():
        x = inputs = keras.Input((4,))
        for rank in (0, 1, 2):
            with kf.scope.placement("cpu", f"0:{rank}"):
                x = layers.Dense(2)(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        said = r"schedule='zbv' has no order for stages on the ranks \[0\], \[1\], \[2\].*schedule=\"gpipe\""
        with pytest.warns(UserWarning, match=said):
            model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)


def test_stages_are_compiled_whatever_compile_is_told() -> None:
    with _pipeline().scope():
        model = _sequence()
        model.compile("sgd", "mse", jit_compile=False)
        with pytest.warns(UserWarning, match="compiles its stages also with jit_compile=False"):
            model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)


@pytest.mark.parametrize(("settings", "parts"), [({}, 4), ({"schedule": "interleaved"}, 8), ({"stages": 2}, 4)])
def test_twice_as_many_micro_batches_as_stages(settings: dict[str, Any], parts: int) -> None:
    assert _pipeline(**settings).schedule.microbatches == parts


def _fit(model: keras.Model, rows: int = 8, **settings: Any) -> None:
    with _pipeline(**settings).scope():
        model.compile("sgd", "mse")
        model.fit(np.ones((rows, 4)), np.ones((rows, 2)), batch_size=rows, verbose=0)


def _sequence(*inner: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(4, name="first"), *inner, layers.Dense(2, name="last")])


class _Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class _Doubled(keras.Sequential):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs, training=training, mask=mask)


def _computed_mask() -> keras.Model:
    return _sequence(layers.Reshape((2, 2)), layers.Masking(), layers.GlobalAveragePooling1D())


def _shared(layer: keras.Layer) -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layer(layers.Dense(4)(layers.Dense(4)(inputs)))
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(layer(layers.Dense(4)(hidden)))))


def _complex() -> keras.Model:
    inputs = keras.Input((4,))
    numbers = keras.ops.view_as_complex(layers.Reshape((2, 2))(layers.Dense(4, name="first")(inputs)))
    return keras.Model(inputs, layers.Dense(2, name="last")(keras.ops.real(numbers)))


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (lambda: _sequence(layers.BatchNormalization()), {}, 'batch_normalization="microbatch"'),
        (lambda: _sequence(), {"stages": [["first"], ["lost"]]}, "'lost' of stage 1 matches no layer"),
        (lambda: _sequence(), {"stages": [["last"], ["first"]]}, "reads what '.*first' of the later stage 1 makes"),
        (lambda: _sequence(), {"stages": [["first", "last"], []]}, r"stages \[1\] have no layers"),
        (lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]), {}, "2 stages of a model with 1 layer that"),
        (_computed_mask, {}, "makes a mask of what an earlier layer computes"),
        (lambda: _shared(layers.Dropout(0.5)), {}, "is called on ranks 0 and 1 and has state that a call may change"),
        (_complex, {"stages": [["first", "reshape"], ["last", "real"]]}, "complex numbers, which go from stage 0"),
        (lambda: _sequence(), {"rows": 3, "microbatches": 4}, "a batch of 3 rows cannot be cut into 4 micro-batches"),
    ],
)
def test_refused_in_fit(make: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FlowError, match=said):
        _fit(make(), **settings)


def _contrast(y_true: Any, y_pred: Any) -> Any:
    """A number for all rows."""
    return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_true)))


def _of_rows(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def _trained_with(distribution: Any, loss: Any, y: Any) -> list[Any]:
    with distribution.scope():
        model = _sequence()
        model.compile("sgd", loss)
        model.fit(np.ones((8, 4)), y, batch_size=8, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda: keras.losses.Dice(), "loss 'dice' works along dimension 0"),
        (lambda: "tversky", "loss 'tversky' works along dimension 0"),
        (lambda: keras.losses.Circle(), "loss 'circle' is not known to add up rows"),
        (lambda: "circle", "loss 'circle' is not known to add up rows"),
        (lambda: keras.losses.CosineSimilarity(axis=0), "loss 'cosine_similarity' works along dimension 0"),
        (lambda: _contrast, "loss '_contrast' returns one number for the rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*loss '_contrast' is not known to add up rows")
def test_losses_that_compare_rows(loss: Any, said: str) -> None:
    y = np.zeros(8, int) if "circle" in said else np.ones((8, 2))
    for distribution in (_pipeline(microbatches=4), kf.CentralStorage()):
        with pytest.raises(FlowError, match=said):
            _trained_with(distribution, loss(), y)
    keras.utils.set_random_seed(1)
    whole = _trained_with(_pipeline(microbatches=1), loss(), y)  # a batch that is not cut
    keras.utils.set_random_seed(1)
    for one, other in zip(whole, _trained_with(kf.DataParallel(), loss(), y), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loss_of_ones_own_is_named() -> None:
    keras.utils.set_random_seed(1)
    with pytest.warns(UserWarning, match="loss '_of_rows' is not known to add up rows. It is given a part"):
        parts = _trained_with(_pipeline(microbatches=4), _of_rows, np.ones((8, 2)))
    keras.utils.set_random_seed(1)
    for one, other in zip(parts, _trained_with(kf.DataParallel(), "mae", np.ones((8, 2))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_models_that_cannot_be_cut() -> None:
    model = _Own()
    model(np.ones((1, 4)))
    with pytest.raises(FlowError, match="has a `call` of its own"):
        _fit(model)
    # Keras makes a graph of a Sequential's layers, whatever its `call` does with them
    with pytest.raises(FlowError, match="has a `call` of its own"):
        _fit(_Doubled(_sequence().layers))
    patched = _sequence()
    patched.call = lambda inputs, **_: 2 * inputs
    with pytest.raises(FlowError, match="has a `call` of its own"):
        _fit(patched)
    inputs = keras.Input((4,))
    for name in ("train_step", "test_step", "predict_step", "compute_loss"):
        own = type("OwnStep", (keras.Model,), {name: lambda *args, **kwargs: {}})
        with pytest.raises(FlowError, match=f"has a {name} of its own"):
            _fit(own(inputs, layers.Dense(2)(layers.Dense(3)(inputs))))
    states = keras.Input(batch_shape=(8, 4, 3))
    with pytest.raises(FlowError, match="is stateful: its rows go on with those of the batch before"):
        with _pipeline().scope():
            model = keras.Model(states, layers.Dense(2)(layers.LSTM(3, stateful=True)(states)))
            model.compile("sgd", "mse")
            model.fit(np.ones((8, 4, 3)), np.ones((8, 2)), batch_size=8, verbose=0)


def test_a_sequential_without_an_input_is_built_for_its_data() -> None:
    weights = []
    for first in ([], [keras.Input((4,))]):
        keras.utils.set_random_seed(1)
        with _pipeline().scope():
            model = keras.Sequential([*first, layers.Dense(4), layers.Dense(2)])
        _fit(model)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
    with _pipeline().scope(), pytest.raises(FlowError, match=r"Begin it with keras.Input\(shape\)"):
        other = keras.Sequential([layers.Dense(4), layers.Dense(2)])
        other.compile("sgd", "mse")
        other.fit((each for each in [(np.ones((8, 4)), np.ones((8, 2)))]), verbose=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "2f2b"}, "none of 'gpipe', '1f1b'"),
        ({"stages": 3}, "3 stages on 2 ranks"),
        ({"stages": 4}, "gives each rank one stage, not 2"),
        ({"schedule": kf.schedules.gpipe(3, 3)}, "is for 3 ranks, the placement has 2"),
        ({"schedule": kf.schedules.gpipe(2, 3), "microbatches": 4}, "is for 3 micro-batches, microbatches=4"),
        ({"remat": "blocks"}, 'remat is None, "stage", "block"'),
        ({"remat": ["("]}, "is not a regular expression"),
        ({"memory": "10 GB"}, "memory is a number of bytes"),
        ({"batch_normalization": "global"}, 'is "refuse" or "microbatch"'),
        ({"pipe_axis": "stages"}, "takes a placement with the axis 'stages'"),
        ({"zero": 2}, r"zero=2\) on jax: .*Leave zero= out, or use torch, where a pipeline splits slots alone, zero=1"),
        ({"zero": 1}, r"zero=1\) on jax: a process has slots once.*Leave zero= out, or use torch"),
    ],
)
def test_refused_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FlowError, match=said):
        _pipeline(**settings)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("cpu", "0:9"), "there is no rank 9; the job has ranks 0 to 3"),
        (("gpu", "0:0"), "is asked for, and this job runs on 'cpu' devices"),
        ((), "takes a kf.Placement, or a device type and ranks"),
    ],
)
def test_placements_that_are_refused(where: tuple[Any, ...], said: str) -> None:
    with pytest.raises(FlowError, match=said), kf.scope.placement(*where):
        pass


def test_a_placement_needs_a_pipeline() -> None:
    with (
        kf.DataParallel().scope(),
        pytest.raises(FlowError, match="places the stages of a pipeline"),
        kf.scope.placement(0),
    ):
        pass


def test_statistics_of_micro_batches_on_request() -> None:
    model = _sequence(layers.BatchNormalization())
    _fit(model, batch_normalization="microbatch", microbatches=4)
    # once for each micro-batch of ones: the mean moves as one device's does in four steps
    other = _sequence(layers.BatchNormalization())
    assert not np.allclose(model.layers[1].moving_mean, other.layers[1].moving_mean)


def test_a_model_is_freed_before_its_distribution() -> None:
    distribution = _pipeline()

    def fitted() -> weakref.ref[keras.Model]:
        with distribution.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 8)), np.ones((8, 2)), verbose=0)
        return weakref.ref(model)

    model = fitted()
    keras.utils.clear_session()
    gc.collect()
    assert model() is None
