"""What DTensor makes of control flow and of tapes, without keras_flow: the evidence of docs/adr/023.

    python -m tests.engine_bugs.dtensor_flow

computes each program on rows that are split over four ranks, by its value and by its gradient, and on one device, and
prints its result: right, off by how much, refused (the operation that DTensor has no rule for, or the first line
of the error), or the signal that ended the process. What was refused for want of a rule is computed again with each
such operation whole on every rank, by DTensor's own flags. A process that ends is followed by another one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tests.engine_bugs.tensorflow import X, _split_by_rows

_NO_RULE = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
#: what a branch or a loop does with its rows; repeated it does not grow
BODIES: dict[str, Callable[[Any], Any]] = {
    "row-wise": lambda x: tf.tanh(x),
    "reduces": lambda x: 0.5 * (x - tf.reduce_max(x, 0)),
    "indexes": lambda x: 0.3 * (x + tf.tanh(x[1])),
}


def _scan(body: Callable, x: Any) -> Any:
    return tf.scan(lambda carry, factor: body(carry) * factor, tf.constant([0.5, 0.7]), initializer=x)[-1]


#: primitive -> body, x -> result
FLOWS: dict[str, Callable[[Callable, Any], Any]] = {
    "tf.cond": lambda body, x: tf.cond(tf.reduce_mean(x) > -9.0, lambda: body(x), lambda: 2.0 * x),
    "tf.switch_case": lambda body, x: tf.switch_case(
        tf.cast(tf.reduce_mean(x) > -9.0, tf.int32), [lambda: 2.0 * x, lambda: body(x)]
    ),
    "tf.while_loop": lambda body, x: tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, body(v)), (0, x))[1],
    "tf.scan": _scan,
    "tf.map_fn": lambda body, x: tf.map_fn(lambda factor: body(x * factor), tf.constant([0.5, 0.7]))[1],
    "tf.vectorized_map": lambda body, x: tf.vectorized_map(lambda factor: body(x * factor), tf.constant([0.5, 0.7]))[1],
}


def _value(flow: Callable, body: Callable) -> Callable:
    return lambda x: flow(body, tf.sin(x))


def _gradient(flow: Callable, body: Callable) -> Callable:
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(flow(body, tf.sin(x)) ** 2)
        return tape.gradient(total, x)

    return gradient


def _layer(x: Any) -> Any:
    kernel = tf.reshape(tf.range(12.0), (4, 3)) / 10.0
    return tf.tanh(tf.matmul(tf.sin(x), kernel))


def _twice(x: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        inner = _by_input(x)
        total = tf.reduce_sum(inner**2)
    return outer.gradient(total, x)


def _by_input(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(_layer(x) ** 2)
    return tape.gradient(total, x)


def _jacobian(x: Any, **options: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        out = tf.reduce_sum(_layer(x), 0)
    return tape.jacobian(out, x, **options)


def _batch_jacobian(x: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        out = _layer(x)
    return tape.batch_jacobian(out, x)


def _forward(x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        out = _layer(x)
    return accumulator.jvp(out)


#: what tapes are asked for
TAPES: dict[str, Callable[[Any], Any]] = {
    "gradient": _by_input,
    "gradient of a gradient": _twice,
    "jacobian": _jacobian,
    "jacobian without pfor": lambda x: _jacobian(x, experimental_use_pfor=False),
    "batch_jacobian": _batch_jacobian,
    "ForwardAccumulator": _forward,
}
#: name -> function of x, and whether it is compiled
PROGRAMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    **{
        f"{primitive}, {body}, {kind}": (make(FLOWS[primitive], BODIES[body]), True)
        for primitive in FLOWS
        for body in BODIES
        for kind, make in {"value": _value, "gradient": _gradient}.items()
    },
    **{
        f"{name}, {'compiled' if is_compiled else 'one operation after the other'}": (tape, is_compiled)
        for name, tape in TAPES.items()
        for is_compiled in (True, False)
    },
}


def outcome(name: str, mesh: dtensor.Mesh, x: tf.Tensor, whole: bool) -> str:
    """The result of a program on rows that are split; `whole`: operations without a rule run whole on every rank."""
    program, is_compiled = PROGRAMS[name]
    expected = program(tf.constant(X)).numpy()
    while True:
        run = tf.function(program) if is_compiled else program  # traced anew: one that was refused ends the process
        try:
            with dtensor.default_mesh(mesh):
                gathered = dtensor.relayout(run(x), dtensor.Layout.replicated(mesh, len(expected.shape)))
                found = dtensor.unpack(gathered)[0].numpy()
        except Exception as error:
            said = str(error).split(" error: ", 1)[-1].splitlines()[0]
            without_rule = _NO_RULE.search(said)
            if without_rule is None:
                return f"refused: {said[:90]}"
            flag = f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{without_rule[1].upper()}"
            if not whole or flag in os.environ:
                return f"refused: no rule for {without_rule[1]}"
            os.environ[flag] = "1"
            continue
        off = float(np.max(np.abs(found - expected)))
        return "right" if off < 1e-5 else f"off by {off:.2g}"


def compute(whole: bool, names: list[str]) -> None:
    """Print the outcomes of some programs, one line of JSON for each.

    Args:
        whole: whether operations without a rule run whole on every rank.
        names: of PROGRAMS.
    """
    mesh, x = _split_by_rows()
    for name in names:
        print(json.dumps([name, "begun"]), flush=True)
        print(json.dumps([name, outcome(name, mesh, x, whole)]), flush=True)


def outcomes(names: list[str], whole: bool) -> dict[str, str]:
    """Program -> its result, in processes of their own."""
    found: dict[str, str] = {}
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "DTENSOR_USE_ALL_TO_ALL_RELAYOUT": "0"}
    while left := [name for name in names if name not in found]:
        command = [sys.executable, "-m", "tests.engine_bugs.dtensor_flow", str(int(whole)), *left]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        if not lines:
            raise RuntimeError(done.stderr[-2000:])
        found |= dict(lines)
        if done.returncode:
            how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
            found[lines[-1][0]] = f"ends the process ({how})"
    return found


def main() -> None:
    """Print all outcomes, and how many there are of each."""
    plain = outcomes(list(PROGRAMS), whole=False)
    again = outcomes([name for name, outcome in plain.items() if "no rule for" in outcome], whole=True)
    for name, outcome in plain.items():
        print(f"{name:45s} {outcome}" + (f"; then {again[name]}" if name in again else ""))
    for found in (plain, again):
        print(Counter(re.split("[:(]| by ", outcome)[0].strip() for outcome in found.values()))


if __name__ == "__main__":
    if sys.argv[1:]:
        compute(sys.argv[1] == "1", sys.argv[2:])
    else:
        main()
