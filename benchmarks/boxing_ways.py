"""The ways that `benchmarks/boxing.py` compares on one engine: keras_flow's executor, and what the engine does itself.

Each way starts from the same shards and runs to its end. Bytes are counted by the engine's own means: the collectives
in XLA's compiled programs and in the programs that TensorFlow's DTensor made, a dispatch mode over torch's collectives.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.parts import torch_operations
from keras_flow.backends.execute import execute
from keras_flow.boxing import BoxingPlan
from keras_flow.layout import Layout
from keras_flow.sbp import PartialSum, Split
from tests.conformance.boxing_worker import JaxCounter, TorchCounter

OURS = "keras_flow"
#: a program in which ranks meet once and write what the target has, and nothing else: no way can take less
FLOOR = "floor"


class Refused(Exception):
    """The engine cannot do this pair; the text is its reason."""


@dataclass
class Way:
    """One way of changing the layout.

    Attributes:
        run: does it once and returns what the engine gave, finished.
        shards: rank -> value, from what `run` returned, for the ranks of this process.
        received: bytes received, summed over ranks.
        program: what it consists of, where the engine says so: `1 all-reduce, 2 fusion`, or in what it takes time:
            `12 ms gloo:all_reduce`.
    """

    run: Callable[[], object]
    shards: Callable[[object], dict[int, np.ndarray]]
    received: float = 0.0
    program: str = ""


def stacked(layout: Layout) -> tuple[tuple[int, ...], list[str | None]]:
    """A layout as an engine without partial sums holds it: one leading dim, split, for each axis with summands.

    Returns:
        The shape, and for each of its dims the name of the axis that splits it, or None (several axes on one dim are
        joined by a comma).
    """
    names, sizes = layout.placement.axis_names, layout.placement.hierarchy
    partial = [axis for axis, part in enumerate(layout.nd_sbp) if isinstance(part, PartialSum)]
    dims: list[list[str]] = [[] for _ in layout.shape]
    for axis, part in enumerate(layout.nd_sbp):
        if isinstance(part, Split):
            dims[part.dim].append(names[axis])
    shape = (*(sizes[axis] for axis in partial), *layout.shape)
    return shape, [*(names[axis] for axis in partial), *(",".join(axes) or None for axes in dims)]


def summed_axes(plan: BoxingPlan) -> tuple[int, ...]:
    """The leading dims of the stacked source that the target has no longer.

    Raises:
        Refused: the target has summands on an axis where the source has none.
    """
    pairs = list(zip(plan.source.nd_sbp, plan.target.nd_sbp, strict=True))
    if any(isinstance(after, PartialSum) and not isinstance(before, PartialSum) for before, after in pairs):
        raise Refused("no partial sums as a result")
    lasting = [isinstance(after, PartialSum) for before, after in pairs if isinstance(before, PartialSum)]
    return tuple(dim for dim, lasts in enumerate(lasting) if not lasts)


class OneProcess:
    """An engine whose ranks are all in this process."""

    def settle(self) -> None:
        """Nothing runs on after a way has ended."""

    def total(self, value: float) -> float:
        return value

    def everywhere(self, value: bool) -> bool:
        return value


class JaxWays(OneProcess):
    """`jax.jit` with `out_shardings`, under both partitioners; summands stand in a leading dim, which is summed."""

    def __init__(self) -> None:
        self.counter = JaxCounter()

    def shard(self, value: np.ndarray, rank: int):
        return self.counter.array(value, rank)

    def ways(self, plan: BoxingPlan, shards: Mapping[int, object]) -> dict[str, Way | str]:
        import jax

        from keras_flow.backends.jax import boxing
        from keras_flow.backends.jax.devices import rank_devices

        program = boxing.program(plan, rank_devices())
        held = boxing.Shards(plan.source, program.given(shards))  # one array, as what jax.jit is given
        ours = Way(
            lambda: jax.block_until_ready(execute(plan, held)),
            lambda out: {rank: np.asarray(value) for rank, value in out.items()},
        )
        if plan.steps:
            text = program.compiled(np.float32).as_text()
            ours.received = sum(self.counter.received(line, len(plan.ranks)) for line in text.splitlines())
            ours.program = self._operations(text)
        made: dict[str, Way | str] = {OURS: ours}
        if plan.total_bytes:
            made[FLOOR] = self._floor(plan, program, held.array)
        for name, shardy in (("jit, Shardy", True), ("jit, GSPMD", False)):
            try:
                made[name] = self._jitted(plan, shards, shardy)
            except Refused as reason:
                made[name] = str(reason)
        return made

    @staticmethod
    def _floor(plan: BoxingPlan, program, given) -> Way:
        import jax
        import jax.numpy as jnp

        def meet(block):
            return jnp.full(plan.target.local_shape(0), jax.lax.psum(block.reshape(-1)[0], program.grid.axes))

        spec = program.sharding.spec
        run = jax.jit(jax.shard_map(meet, mesh=program.sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        return Way(lambda: jax.block_until_ready(run(given)), lambda out: {})

    def _jitted(self, plan: BoxingPlan, shards: Mapping[int, object], shardy: bool) -> Way:
        import jax

        from keras_flow.backends.jax.layouts import mesh
        from tests.explainer.counting.jax import collectives

        axes = summed_axes(plan)
        on = mesh(plan.source.placement)
        shape, source = stacked(plan.source)
        _, target = stacked(plan.target)
        leading = len(shape) - len(plan.source.shape)
        blocks = [shards[rank].reshape((1,) * leading + shards[rank].shape) for rank in plan.ranks]
        given = jax.make_array_from_single_device_arrays(shape, self._sharding(on, source), blocks)
        before = jax.config.jax_use_shardy_partitioner
        jax.config.update("jax_use_shardy_partitioner", shardy)
        try:
            change = jax.jit(
                (lambda x: x.sum(axes)) if axes else (lambda x: x), out_shardings=self._sharding(on, target)
            )
            compiled = change.lower(given).compile()
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)
        text = compiled.as_text()
        ranks = {device: rank for rank, device in enumerate(jax.devices())}
        return Way(
            lambda: jax.block_until_ready(compiled(given)),
            lambda out: {
                ranks[shard.device]: np.asarray(shard.data).reshape(plan.target.local_shape(ranks[shard.device]))
                for shard in out.addressable_shards
            },
            received=sum(self._received(one, len(plan.ranks)) for one in collectives(text)),
            program=self._operations(text),
        )

    @staticmethod
    def _operations(text: str) -> str:
        """The operations of a compiled program that take time: collectives, fusions, copies, branches."""
        kinds = re.findall(r"= (?:\(.*?\)|\S+) ([a-z-]+)\(", text.partition("ENTRY")[2])
        free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id"}
        counts = Counter(kind for kind in kinds if kind not in free)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

    @staticmethod
    def _received(collective: dict, ranks: int) -> float:
        """Bytes over all ranks; a permute names its pairs, which are all ranks here or the changed ones."""
        return collective["received"] * (collective.get("pairs") or ranks)

    @staticmethod
    def _sharding(mesh, dims: list[str | None]):
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(mesh, PartitionSpec(*(tuple(dim.split(",")) if dim else None for dim in dims)))


class TensorFlowWays(OneProcess):
    """`dtensor.relayout` in a function; summands stand in a leading dim, which is summed."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["TF_DUMP_GRAPH_PREFIX"])  # DTensor writes its programs there

    def shard(self, value: np.ndarray, rank: int):
        import tensorflow as tf

        with tf.device(f"/device:CPU:{rank}"):
            return tf.identity(tf.constant(value))

    def ways(self, plan: BoxingPlan, shards: Mapping[int, object]) -> dict[str, Way | str]:
        def ours():
            out = execute(plan, shards)
            for value in out.values():
                self._wait(value)
            return out

        made: dict[str, Way | str] = {
            OURS: Way(
                ours,
                lambda out: {rank: value.numpy() for rank, value in out.items()},
                # what Recv operations received equals this for every pair: tests/conformance
                received=plan.total_bytes,
            )
        }
        try:
            made["dtensor.relayout"] = self._relayout(plan, shards)
        except Refused as reason:
            made["dtensor.relayout"] = str(reason)
        return made

    def _relayout(self, plan: BoxingPlan, shards: Mapping[int, object]) -> Way:
        import tensorflow as tf
        from tensorflow.experimental import dtensor

        from keras_flow.backends.tensorflow.layouts import mesh_view
        from tests.explainer.counting.tensorflow import collectives

        axes = summed_axes(plan)
        shape, source = stacked(plan.source)
        _, target = stacked(plan.target)
        if any(dim and "," in dim for dim in (*source, *target)):
            raise Refused("no two axes on one dim")
        mesh = mesh_view(plan.source.placement).mesh
        layouts = [
            dtensor.Layout([dim or dtensor.UNSHARDED for dim in dims], mesh) if dims else None
            for dims in (source, target)
        ]
        leading = len(shape) - len(plan.source.shape)
        blocks = []
        for rank in plan.ranks:
            with tf.device(f"/device:CPU:{rank}"):
                blocks.append(tf.reshape(shards[rank], (1,) * leading + tuple(shards[rank].shape)))
        given = dtensor.pack(blocks, layouts[0])

        @tf.function
        def change(x):
            return dtensor.relayout(tf.reduce_sum(x, axes) if axes else x, layouts[1])

        def run():
            out = change(given)
            for value in dtensor.unpack(out):
                self._wait(value)
            return out

        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        try:
            run()
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}") from error
        texts = [path.read_text() for path in self.folder.iterdir() if "BreakUpIslands" in path.name]
        return Way(
            run,
            lambda out: {
                rank: value.numpy().reshape(plan.target.local_shape(rank))
                for rank, value in zip(plan.ranks, dtensor.unpack(out), strict=True)
            },
            received=sum(one["received"] * len(plan.ranks) for text in texts for one in collectives(text)),
        )

    @staticmethod
    def _wait(value) -> None:
        """Until a tensor is there: one element of it is read."""
        import tensorflow as tf

        with tf.device(value.device):
            tf.reshape(value, [-1])[:1].numpy()


class TorchWays:
    """`DTensor.redistribute` with its default planner and with the one of least cost."""

    def __init__(self) -> None:
        self.counter = TorchCounter()

    def shard(self, value: np.ndarray, rank: int):
        return self.counter.array(value, rank)

    def ways(self, plan: BoxingPlan, shards: Mapping[int, object]) -> dict[str, Way | str]:
        from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan

        _, moved = self.counter.run(plan, dict(shards))
        made: dict[str, Way | str] = {
            OURS: Way(
                lambda: execute(plan, shards),
                lambda out: {rank: value.numpy() for rank, value in out.items()},
                received=moved,
                program=self._profile(lambda: execute(plan, shards)),
            )
        }
        for name, least in (("redistribute", False), ("redistribute, min-cost", True)):
            with use_min_cost_redistribution_plan(least):
                try:
                    made[name] = self._redistribute(plan, shards, least)
                except (Refused, NotImplementedError, RuntimeError) as error:
                    made[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return made

    def _redistribute(self, plan: BoxingPlan, shards: Mapping[int, object], least: bool) -> Way:
        from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan

        from keras_flow.backends.torch.layouts import engine_layout
        from keras_flow.backends.torch.tensors import to_engine
        from tests.explainer.counting.torch import watching

        target = engine_layout(plan.target)
        given = to_engine(plan.source, shards)
        (rank,) = shards

        def run():
            with use_min_cost_redistribution_plan(least):
                return given.redistribute(placements=target).to_local()

        with watching() as found:
            run()
        received = sum(one["received"] for one in found)
        return Way(run, lambda out: {rank: out.numpy()}, received, self._profile(run))

    @staticmethod
    def _profile(run: Callable[[], object]) -> str:
        """The operations that take most of the time, with milliseconds on rank 0."""
        times = sorted(torch_operations(run).items(), key=lambda item: -item[1])
        return ", ".join(f"{time:.0f} ms {name}" for name, time in times[:4] if time >= 1)

    def settle(self) -> None:
        """Every rank waits for the others."""
        import torch.distributed

        torch.distributed.barrier()

    def total(self, value: float) -> float:
        """The sum over ranks."""
        return self._reduced(value, "SUM")

    def everywhere(self, value: bool) -> bool:
        """Whether it holds on every rank."""
        return self._reduced(float(value), "MIN") == 1.0

    @staticmethod
    def _reduced(value: float, operation: str) -> float:
        import torch
        import torch.distributed as dist

        held = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(held, getattr(dist.ReduceOp, operation))
        return held.item()


ENGINES = {"jax": JaxWays, "tensorflow": TensorFlowWays, "torch": TorchWays}


def timed(engine, way: Way) -> float:
    """Seconds of one run, on the slowest rank."""
    engine.settle()
    start = time.perf_counter()
    way.run()
    engine.settle()
    return time.perf_counter() - start


def source_shards(layout: Layout, ranks: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Shards of a tensor of small integers; summands are drawn one by one."""
    out = {}
    for rank in ranks:
        at = layout.placement.coordinates(rank)
        summand = [at[axis] for axis, part in enumerate(layout.nd_sbp) if isinstance(part, PartialSum)]
        random = np.random.default_rng(summand)
        whole = random.integers(-8, 8, math.prod(layout.shape), "int8").reshape(layout.shape)
        out[rank] = np.ascontiguousarray(whole[layout.local_slices(rank)].astype("float32"))
    return out
