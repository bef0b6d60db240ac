"""What each process of `benchmarks/processes.py` runs: WAY RESULT CASE..., a case being `family:millions`.

Only what a way needs is imported, so that a start is that of a script of this way.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: an epoch, given how many steps of data to make
Make = Callable[[str, float, int], Callable[[], object]]

_STEPS, _EPOCHS = {1.0: 20, 10.0: 5}, 7


def main(way: str, result: Path, cases: list[str]) -> None:
    make, is_first = _way(way)
    make(*_case(cases[0]), 1)()
    first = time.time()
    steps = {}
    if way != "one process":
        for case in cases:
            family, size = _case(case)
            count = _STEPS.get(float(size), 20)
            epoch = make(family, size, count)
            epoch()
            seconds = []
            for _ in range(_EPOCHS):
                begun = time.perf_counter()
                epoch()
                seconds.append((time.perf_counter() - begun) / count)
            steps[case] = statistics.median(seconds)
    if is_first:
        result.write_text(json.dumps({"first": first, "steps": steps}))


def _case(text: str) -> tuple[str, float]:
    family, _, size = text.partition(":")
    return family, int(size) if size.isdigit() else float(size)


def _way(way: str) -> tuple[Make, bool]:
    """What makes an epoch, and whether this is the first process."""
    if way == "one process":
        return lambda *case: _fit(*case, contextlib.nullcontext()), True
    if way.startswith("keras_flow"):
        import keras_flow as kf

        kf.init()
        strategy = "mirrored" if way.endswith('"mirrored"') else None
        return lambda *case: _fit(*case, kf.DataParallel(strategy=strategy).scope()), kf.env.is_main_process()
    return {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[os.environ["KERAS_BACKEND"]]()


def _fit(
    family: str, size: float, steps: int, scope: contextlib.AbstractContextManager[object]
) -> Callable[[], object]:
    from benchmarks.fit_models import BATCH, build, data

    x, y = data(family, steps)
    with scope:
        model = build(family, size)
    return lambda: model.fit(x, y, batch_size=BATCH[family], shuffle=False, verbose=0)


def _torch() -> tuple[Make, bool]:
    """torchrun and DistributedDataParallel."""
    import torch.distributed as dist

    from benchmarks.fit_models import build, data
    from benchmarks.fit_torch import data_parallel

    dist.init_process_group("gloo")
    return lambda family, size, steps: data_parallel(build(family, size), family, *data(family, steps)), (
        dist.get_rank() == 0
    )


def _jax() -> tuple[Make, bool]:
    """`jax.distributed` and a jitted step over a mesh of all processes' devices."""
    import jax

    cluster = json.loads(os.environ["TF_CONFIG"])
    addresses, index = cluster["cluster"]["worker"], cluster["task"]["index"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(addresses[0], len(addresses), index)
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.fit_jax import jitted_step
    from benchmarks.fit_models import BATCH, build, data

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))

    def make(family: str, size: float, steps: int) -> Callable[[], object]:
        x, y = data(family, steps)
        model = build(family, size)
        model.optimizer.build(model.trainable_variables)
        held = tuple(
            [jax.make_array_from_process_local_data(whole, np.asarray(one.value)) for one in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
        )

        compiled = jitted_step(model)
        batch, own = BATCH[family], BATCH[family] // len(addresses)

        def epoch() -> object:
            nonlocal held
            for start in range(index * own, len(x), batch):
                inputs, labels = (
                    jax.make_array_from_process_local_data(rows, part[start : start + own]) for part in (x, y)
                )
                held, loss = compiled(held, inputs, labels)
            return jax.block_until_ready((held, loss))

        return epoch

    return make, index == 0


def _tensorflow() -> tuple[Make, bool]:
    """`TF_CONFIG`, MultiWorkerMirroredStrategy and a step in a `tf.function`: Keras's own `fit` dies under it."""
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    from benchmarks.fit_models import BATCH, build, data

    def make(family: str, size: float, steps: int) -> Callable[[], object]:
        x, y = data(family, steps)
        with strategy.scope():
            model = build(family, size)
            model.optimizer.build(model.trainable_variables)
        batches = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH[family])
        )

        def each(inputs, labels):
            with tf.GradientTape() as tape:
                # the optimizer adds gradients up over the processes
                loss = model.loss(labels, model(inputs, training=True)) / strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_weights)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def step(inputs, labels):
            return strategy.run(each, (inputs, labels))

        def epoch() -> object:
            for inputs, labels in batches:
                loss = step(inputs, labels)
            return float(loss)

        return epoch

    return make, json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
