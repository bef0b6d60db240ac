"""`keras_flow.compat.oneflow` against NumPy and plain Keras, on four ranks of every engine."""

from __future__ import annotations

import inspect
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_flow as kf
import keras_flow.compat.oneflow as flow
import keras_flow.compat.oneflow.typing as tp
from keras_flow.backends.engines import that_train
from tests import ranks, sampling
from tests.compat import programs
from tests.launch import programs as jobs

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "older_worlds"


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_the_reference_programs(backend: str, on_ranks: Callable) -> None:
    on_ranks(backend)(programs.small)


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize(
    "program",
    [
        programs.consistent_lenet,
        programs.mirrored_lenet,
        programs.variables_of_ones_own,
        programs.batch_normalization,
        programs.micro_batches,
        programs.one_placement,
        programs.images_of_ones_own,
        programs.grid_of_devices,
        programs.optimizers,
        programs.older_config,
    ],
)
def test_more_programs(backend: str, program: Callable, on_ranks: Callable) -> None:
    on_ranks(backend)(program)


@pytest.mark.full
@pytest.mark.parametrize("backend", [name for name in that_train() if name != "torch"])
def test_the_reference_programs_in_two_processes_of_two_devices(backend: str, tmp_path: Path) -> None:
    """On torch each rank is a process in every test."""
    pool = ranks.Pool(backend, tmp_path, processes=2)
    try:
        pool(programs.on_all_ranks)
    finally:
        pool.close()


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
def test_checkpoints(backend: str, on_ranks: Callable, tmp_path: object) -> None:
    on_ranks(backend)(programs.checkpoints, str(tmp_path))


@pytest.mark.parametrize(
    ("nodes", "port", "text"),
    [
        (["10.1.1.1", "10.1.1.1"], 9988, "two nodes have the address 10.1.1.1"),
        (["10.1.1.1", "10.1.1.2"], None, "say the port of 10.1.1.1 by flow.env.ctrl_port"),
        (["10.1.1.1", "10.1.1.2"], 9988, "this machine has none of the addresses ['10.1.1.1', '10.1.1.2']"),
        (["127.0.0.1", "127.0.0.2"], 9988, "this machine has ['127.0.0.1', '127.0.0.2'] of the addresses"),
        (["127.0.0.1"], 70000, "flow.env.ctrl_port(70000): legal is a whole number from 1 to 65535"),
        ([{"address": "127.0.0.1"}], None, "takes nodes like"),
    ],
)
def test_machines_are_checked(nodes: list, port: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    flow.clear_default_session()
    with pytest.raises(kf.FlowError, match=re.escape(text)):
        if port is not None:
            flow.env.ctrl_port(port)
        flow.env.machine([{"addr": node} if isinstance(node, str) else node for node in nodes])
        flow.env.init()
    flow.clear_default_session()


def test_the_number_of_machines_is_that_of_the_names() -> None:
    flow.clear_default_session()
    flow.config.machine_num(3)
    flow.config.ctrl_port(9988)
    flow.env.machine([{"addr": "10.1.1.1"}, {"addr": "10.1.1.2"}])
    with pytest.raises(kf.FlowError, match=r"machine_num says 3 machines, flow\.env\.machine names 2"):
        flow.env.init()
    flow.clear_default_session()


_BY_HAND = """
import numpy as np
import keras
import keras_flow.compat.oneflow as flow, keras_flow.compat.oneflow.typing as tp

flow.config.cpu_device_num(1)
flow.env.ctrl_port({port})
flow.env.machine([{{"addr": "127.0.0.1"}}, {{"addr": "127.0.0.2"}}])


@flow.global_function(type="train")
def job(x: tp.Numpy.Placeholder((5, 4))) -> tp.Numpy:
    y = flow.layers.dense(x, 1, kernel_initializer=flow.ones_initializer(), name="out")
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.5]), momentum=0).minimize(y)
    return y


x = np.arange(20, dtype="float32").reshape(5, 4)
assert job(x)[:, 0].tolist() == x.sum(1).tolist()
np.testing.assert_allclose(job(x)[:, 0], x @ (1 - 0.5 * x.mean(0)) - 0.5, rtol=1e-6)
import keras_flow as kf
print("ranks", kf.env.get_world_size(), "processes", kf.env.process_count())
"""


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_two_machines_started_by_hand(backend: str, tmp_path: Path) -> None:
    """Each machine starts the same program; here two addresses of one host, so NODE_RANK says which is which."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "job.py"
    file.write_text(_BY_HAND.format(port=port))
    started = [jobs.start([str(file)], backend, PYTHONPATH=str(ROOT), NODE_RANK=str(node)) for node in range(2)]
    for process in started:
        code, out, err = jobs.finish(process, 200)
        assert code == 0, err[-4000:]
        assert "ranks 2 processes 2" in out


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
def test_machines_of_a_program_that_the_launcher_starts(backend: str, tmp_path: Path) -> None:
    """The launcher has said who is who, so no address has to be of this host."""
    file = tmp_path / "job.py"
    file.write_text(_BY_HAND.format(port=9988).replace("127.0.0.", "10.1.1."))
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--timeout", "120", str(file)]
    code, out, err = jobs.finish(jobs.start(command, backend, PYTHONPATH=str(ROOT)), 200)
    assert code == 0, err[-4000:]
    assert "ranks 2 processes 2" in out


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_a_port_in_use_is_named(backend: str, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        file = tmp_path / "job.py"
        file.write_text(_BY_HAND.format(port=port))
        code, _, err = jobs.finish(jobs.start([str(file)], backend, PYTHONPATH=str(ROOT), NODE_RANK="0"), 100)
    assert code != 0 and f"cannot listen at 127.0.0.1:{port}" in err, err[-3000:]


# ---- names and formulas, on four ranks of JAX in pytest's own process


def _is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(kf.FlowError) as caught:
        call()
    assert text in str(caught.value), caught.value


def _kernel(kind: str, step: int, steps: int, lr: float, *args: Any) -> float:
    """OneFlow's learning_rate_schedule_kernel.cpp."""
    p = step / steps
    if kind in ("ExponentialScheduler", "InverseTimeScheduler", "NaturalExpScheduler"):
        rate, staircase = args
        p = math.floor(p) if staircase else p
        by_kind = {"E": lambda: lr * rate**p, "I": lambda: lr / (1 + rate * p), "N": lambda: lr * math.exp(-rate * p)}
        return by_kind[kind[0]]()
    if kind == "CosineScheduler":
        (alpha,) = args
        return lr * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * min(p, 1.0))) + alpha)
    end, power, cycles = args
    if cycles:
        batch = step or 1
        return (lr - end) * (1 - batch / (steps * math.ceil(batch / steps))) ** power + end
    return (lr - end) * (1 - min(p, 1.0)) ** power + end


def test_names_that_are_not_there_say_what_is() -> None:
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: tp.ListListNumpy,
            "flow.typing.ListListNumpy of OneFlow 0.x is not in keras_flow.compat.oneflow",
        ),
        (lambda: flow.env.get_rank, "Instead: kf.env has what programs ask for"),
        (lambda: flow.env.data_port, "Instead: leave it out: ctrl_port is the coordinator's port"),
        (lambda: flow.scope.mirrored_view().__enter__(), "with flow.scope.mirrored_view(): is not in"),
    ]
    for call, text in refused:
        _is_refused(call, text)


@pytest.mark.usefixtures("four_ranks")
def test_schedulers_are_those_of_oneflows_kernel() -> None:
    of = flow.optimizer
    cases: list[tuple[str, tuple]] = [
        ("CosineScheduler", (0.1,)),
        ("PolynomialScheduler", (0.01, 2.0, False)),
        ("PolynomialScheduler", (0.01, 2.0, True)),
    ]
    cases += [
        (f"{name}Scheduler", (0.5, staircase))
        for name in ("Exponential", "InverseTime", "NaturalExp")
        for staircase in (False, True)
    ]
    for kind, args in cases:
        # the warm-up is the last argument of OneFlow's list
        plain, warm = (getattr(of, kind)(0.2, 4, *args, *more) for more in ((), (of.warmup.linear(2, 0.5),)))
        wanted = [_kernel(kind, step, 4, 0.2, *args) for step in range(10)]
        begun = [0.1, 0.15, *wanted[2:]]
        for scheduler, rates in ((plain, wanted), (warm, begun)):
            np.testing.assert_allclose(scheduler(np.arange(10)), rates, rtol=1e-5, err_msg=f"{kind}{args}")
    scaled = of.PiecewiseScalingScheduler(0.1, [2, 5], [0.5, 0.3], of.warmup.constant(1, 0.1))
    np.testing.assert_allclose(scaled(np.arange(8)), [0.01, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.03], rtol=1e-6)
    assert float(of.PiecewiseScalingScheduler(0.1, [2, 5], 0.5)(9)) == pytest.approx(0.05)


def _begin() -> None:
    flow.clear_default_session()
    flow.config.cpu_device_num(4)


def _computed(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """What a predict job of these arrays returns."""
    _begin()
    named = {f"x{number}": array for number, array in enumerate(arrays)}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=tp.Numpy.Placeholder(each.shape))
        for name, each in named.items()
    ]
    job = lambda **given: function(*given.values())  # noqa: E731
    job.__signature__ = inspect.Signature(parameters, return_annotation=tp.Bundle[list])
    return flow.global_function()(job)(*arrays)


@pytest.mark.usefixtures("four_ranks")
def test_operators_and_what_they_return() -> None:
    x = np.float32([[1, -2, 3], [4, 5, -6], [7, 8, 9], [0.5, 0, 1], [2, 2, 2]])
    y = np.where(np.arange(15).reshape(5, 3) % 2, x, x + 1).astype("float32")
    reduce = flow.math
    found = _computed(
        lambda a, b: [
            a == b,
            a != b,
            a < b,
            a <= b,
            a > 1.0,
            a >= b,
            a % 3.0,
            reduce.reduce_sum(a == b),
            reduce.reduce_mean(flow.cast(a, flow.int32)),
            reduce.reduce_sum(flow.cast(a, flow.int32)),
            flow.math.gelu(a),
            flow.math.top_k(a, -1, 2),
            flow.nn.dropout(a, 0.5, None, 1),
        ],
        *(x, y),
    )
    gelu = [[0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in row] for row in x.tolist()]
    whole = x.astype("int32")
    wanted = [x == y, x != y, x < y, x <= y, x > 1, x >= y, x % 3, (x == y).sum(), whole.mean(), whole.sum(), gelu]
    for value, expected in zip(found, [*wanted, np.argsort(-x, 1)[:, :2], x], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    _is_refused(lambda: _computed(lambda a: [row for row in a], x), "has no items to go through")
    assert len(_computed(lambda a: list({a: "a value", a + 1.0: "another"}), x)) == 2


@pytest.mark.usefixtures("four_ranks")
def test_slices_of_all_rows_keep_them() -> None:
    x = np.arange(15, dtype="float32").reshape(5, 3)
    kept: list[bool] = []

    def sliced(a: Any) -> list:
        row = a[:, 0]
        found = [a[0:5], a[::1, 1], a[..., 0], row[...], a[0:2], row[..., 1]]
        kept.extend(each.rows == 5 for each in found)
        return found

    found = _computed(sliced, x)
    assert kept[-6:] == [True, True, True, True, False, False]
    for value, wanted in zip(found, [x, x[:, 1], x[:, 0], x[:, 0], x[:2], x[1, 0]], strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.usefixtures("four_ranks")
def test_several_losses_are_minimized_by_the_sum_of_their_means() -> None:
    _begin()

    @flow.global_function("train")
    def job(x: tp.Numpy.Placeholder((5, 3))) -> tp.Numpy:
        weight = flow.get_variable("w", (3,), initializer=flow.constant_initializer(2.0))
        losses = [x * weight, flow.math.reduce_mean(4.0 * x[:, 0] * weight[0])]
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.5]), momentum=0).minimize(losses)
        return x * weight

    x = np.arange(15, dtype="float32").reshape(5, 3)
    job(x)
    after = job(x)[1] / x[1]
    np.testing.assert_allclose(after, 2.0 - 0.5 * (x.mean(0) / 3 + 4 * x.mean(0) * [1, 0, 0]), rtol=1e-5)


@pytest.mark.usefixtures("four_ranks")
def test_a_job_without_arguments() -> None:
    def own() -> list:
        weight = flow.get_variable("w", (3,), initializer=flow.constant_initializer(2.0))
        return [weight * 2.0, flow.math.reduce_sum(weight)]

    vector, total = _computed(own)
    assert (vector.tolist(), float(total)) == ([4.0] * 3, 6.0)


@pytest.mark.usefixtures("four_ranks")
def test_rows_in_the_mirrored_view_are_those_of_a_device() -> None:
    """As the placeholder declares them: reference programs reshape to [50, -1]."""
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    def job_of(shape: Callable[[Any], Any]) -> Any:
        _begin()

        @flow.global_function("predict", config)
        def job(x: tp.ListNumpy.Placeholder((3, 2, 2))) -> tp.ListNumpy:
            return flow.reshape(x, shape(x))

        return job

    x = np.arange(40, dtype="float32").reshape(10, 2, 2)
    for shape in (lambda x: [3, -1], lambda x: [x.shape[0], 4]):
        found = job_of(shape)(np.array_split(x, 4))
        np.testing.assert_array_equal(np.concatenate(found), x.reshape(10, 4))
    _is_refused(lambda: job_of(lambda x: [2, 6])(np.array_split(x, 4)), "in the mirrored view the rows stay first")


@pytest.mark.usefixtures("four_ranks")
def test_namespaces_keep_names_apart() -> None:
    def network(x: Any) -> list:
        for name in ("first", "second"):
            with flow.scope.namespace(name):
                x = flow.layers.dense(x, 3, kernel_initializer=flow.ones_initializer(), name="dense")
                with flow.scope.namespace("inner"):
                    x = x + flow.get_variable("bias", (3,), model_name="bias")
        return [x]

    _computed(network, np.ones((4, 3), "float32"))
    kinds = ("dense/bias", "dense/kernel", "inner-bias/value")
    assert sorted(flow.get_all_variables()) == [f"{name}-{kind}" for name in ("first", "second") for kind in kinds]


@pytest.mark.usefixtures("four_ranks")
def test_initial_values() -> None:
    """A variable has its own draws; fans are those of OneFlow's order of dims."""
    normal = flow.random_normal_initializer(0.0, 1.0)
    shape = (6, 40, 5, 5)
    options: list[tuple[Any, float]] = [
        (flow.variance_scaling_initializer(2.0, "fan_in"), math.sqrt(2 / (40 * 25))),
        (flow.variance_scaling_initializer(2.0, "fan_out", "random_normal", "NCHW"), math.sqrt(2 / (6 * 25))),
        (flow.variance_scaling_initializer(2.0, "fan_out", "random_normal", "NHWC"), math.sqrt(2 / (6 * 40 * 5))),
        (flow.xavier_uniform_initializer("NCHW"), math.sqrt(2 / (46 * 25))),
        (flow.kaiming_initializer(shape), math.sqrt(2 / (40 * 25))),
        (flow.kaiming_initializer(shape, "random_uniform", "fan_out", "tanh"), 5 / 3 / math.sqrt(6 * 25)),
        (flow.kaiming_initializer(shape, nonlinearity="relu", negative_slope=2.0), math.sqrt(2 / (40 * 25))),
        (flow.kaiming_initializer(shape, nonlinearity=None), 1 / math.sqrt(40 * 25)),
    ]

    def network(x: Any) -> list:
        for name in ("one", "other"):
            x = flow.layers.dense(x, 3, kernel_initializer=normal, bias_initializer=normal, name=name)
            x = x + flow.get_variable(f"{name}_own", (3,), initializer=normal)
        for number, (initializer, _) in enumerate(options):
            flow.get_variable(f"w{number}", shape, initializer=initializer)
        return [flow.layers.dense(x, 2, kernel_initializer=None, name="zeros")]

    _computed(network, np.ones((4, 3), "float32"))
    values = flow.get_all_variables()
    drawn = [values[f"{name}{of}"] for name in ("one", "other") for of in ("/kernel", "/bias", "_own/value")]
    assert len({float(value.ravel()[0]) for value in drawn}) == len(drawn)
    for number, (_, deviation) in enumerate(options):
        assert float(values[f"w{number}/value"].std()) == pytest.approx(deviation, rel=0.05), number
    assert not values["zeros/kernel"].any()


@pytest.mark.usefixtures("four_ranks")
def test_arguments_as_oneflow_lists_them() -> None:
    """Arguments that Keras's work has no place for are refused by name."""
    of, x = flow.optimizer, np.ones((4, 3), "float32")
    schedule = of.PiecewiseConstantScheduler([], [0.1])

    made = of.SGD(schedule, None, 0.5, of.grad_clipping.by_global_norm(clip_norm=2.0))._make()
    assert (made.momentum, made.global_clipnorm) == (0.5, 2.0)
    made = of.Adam(schedule, 0.8, 0.9, 1e-3, True, 1)._make()
    assert (made.beta_1, made.beta_2, made.epsilon) == (0.8, 0.9, 1e-3)
    shared = lambda a: [flow.get_variable("w", (3,)), flow.get_variable("w", (3,), reuse=True)]  # noqa: E731
    one, other = _computed(shared, x)
    assert one.tolist() == other.tolist() == [0.0] * 3
    layers, nn = flow.layers, flow.nn
    dense = _computed(lambda a: [layers.dense(a, 2, None, False, flow.ones_initializer(), None, None, None)], x)[0]
    assert dense.tolist() == [[3.0, 3.0]] * 4
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: of.SGD(schedule, variables=["w"]), "variables=['w'] is not in keras_flow.compat.oneflow"),
        (lambda: of.Adam(schedule, loss_scale_factor=8), "loss_scale_factor: use keras.optimizers.LossScaleOptimizer"),
        (lambda: _computed(lambda a: [nn.dropout(a, 0.5, [4, 1])], x), "flow.nn.dropout: noise_shape=[4, 1] is not in"),
        (
            lambda: _computed(lambda a: [flow.get_variable("w", (3,)), flow.get_variable("w", (3,), reuse=False)], x),
            "has two layers named 'w'",
        ),
    ]
    for call, text in refused:
        _is_refused(call, text)
    config = flow.function_config()
    config.train.primary_lr(0.1)
    config.train.model_update_conf({"naive_conf": {}, "weight_decay_conf": {"weight_decay_rate": 0.1}})
    _is_refused(config.train.optimizer, "got 0.1 and ['naive_conf', 'weight_decay_conf']; flow.optimizer has schedules")


# ---- examples


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize("ranks", ["--devices", "--nproc_per_node"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "mirrored", "hybrid", "pipeline"])
def test_examples(name: str, ranks: str, backend: str, tmp_path: Path) -> None:
    """Two ranks of one process on JAX and TensorFlow, and of two."""
    command = ["-m", "keras_flow.launch", ranks, "2", "--timeout", "120", str(EXAMPLES / f"oneflow_{name}.py")]
    save = ["--save", str(tmp_path / "models")] if name == "lenet" else []
    code, out, err = jobs.finish(jobs.start([*command, "--small", *save], backend, PYTHONPATH=str(ROOT)), 250)
    assert code == 0, err[-4000:]
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
    assert losses[-1] < 0.75 * losses[0], out
    assert not save or "'outlayer/kernel'" in out
