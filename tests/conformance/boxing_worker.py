"""Runs boxing plans on one engine: for each pair of layouts, what came out and what moved."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np

from keras_flow.boxing import BoxingPlan, plan, simulate
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from tests.boxing.cases import all_nd_sbps, grid, logical_tensor, shards_of

#: reduce-scatters over axes of which one has one rank
THIN = (((2, 1), "P,P -> S(1),S(1)"), ((1, 2), "P,P -> S(1),S(1)"), ((2, 1, 2), "S(1),P,P -> B,B,B"))


def pairs() -> list[tuple[Layout, Layout]]:
    """Every pair on 2x2 and on 4, uneven too; a fixed sample between different placements, and of names of axes."""
    found = []
    for hierarchy, shape in (((2, 2), (8, 12)), ((4,), (5, 7))):
        for before in all_nd_sbps(len(hierarchy)):
            for after in all_nd_sbps(len(hierarchy)):
                found.append((Layout(grid(hierarchy), before, shape), Layout(grid(hierarchy), after, shape)))
    placements = [
        Placement(ranks) for ranks in ([0, 1, 2], [1, 3], [2], [0, 1, 2, 3], [[0, 1], [2, 3]], [[2], [3]], [3, 1])
    ]
    asymmetric = [
        (Layout(one, before, (5, 7)), Layout(other, after, (5, 7)))
        for one in placements
        for other in placements
        if one != other
        for before in all_nd_sbps(one.ndim)
        for after in all_nd_sbps(other.ndim)
    ]
    found += random.Random(0).sample(asymmetric, 40)
    for hierarchy, pair in THIN:
        before, after = pair.split(" -> ")
        found.append((Layout(grid(hierarchy), before, (8, 12)), Layout(grid(hierarchy), after, (8, 12))))
    # of a shape of their own: names do not count where plans are compared, and bytes are counted in a first run
    named = Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    return found + [(Layout(named, "P,B", (4, 8)), Layout(grid((2, 2)), after, (4, 8))) for after in ("S(1),B", "B,B")]


def wrong_values() -> BoxingPlan:
    """The steps of a plan that takes the placement's axes for each other: shapes fit, values do not."""
    mesh = grid((2, 2))
    made = plan(Layout(mesh, "S(0),S(1)", (8, 8)), Layout(mesh, "S(0),B", (8, 8)))
    swapped = Layout(mesh, tuple(reversed(made.target.nd_sbp)), made.target.shape)
    return BoxingPlan(made.source, made.target, made.dtype, plan(made.source, swapped, made.dtype).steps)


def wrong_bytes() -> BoxingPlan:
    """Right values by way of whole tensors: more bytes than a plan between these layouts receives."""
    mesh = grid((2, 2))
    source, target = Layout(mesh, "S(0),B", (8, 8)), Layout(mesh, "S(1),B", (8, 8))
    whole = Layout(mesh, "B,B", (8, 8))
    return BoxingPlan(source, target, "float32", (*plan(source, whole).steps, *plan(whole, target).steps))


def main() -> list[dict]:
    """One record for each pair."""
    return records([*named(pairs()), ("wrong values", wrong_values()), ("wrong bytes", wrong_bytes())])


def named(pairs: Sequence[tuple[Layout, Layout]]) -> list[tuple[str, BoxingPlan]]:
    """The plans of pairs of layouts."""
    return [(f"{source} -> {target}", plan(source, target)) for source, target in pairs]


def records(plans: Sequence[tuple[str, BoxingPlan]]) -> list[dict]:
    """What each plan gave and moved."""
    from keras_flow.backends.active import backend

    engine = backend()
    here = engine.world().local_ranks
    counter = COUNTERS[engine.name]()
    found = []
    for name, made in plans:
        shards = {
            rank: value.astype("float32")
            for rank, value in shards_of(made.source, logical_tensor(made.source.shape)).items()
        }
        right_plan = plan(made.source, made.target)
        expected = simulate(right_plan, shards)
        out, moved = counter.run(made, {rank: counter.array(shards[rank], rank) for rank in shards if rank in here})
        right = all(np.array_equal(np.asarray(out[rank]), value) for rank, value in expected.items() if rank in here)
        found.append({"pair": name, "right": right, "moved": moved, "planned": right_plan.total_bytes})
    return counter.finished(found)


class JaxCounter:
    """Bytes of the collectives in the compiled program."""

    def array(self, value: np.ndarray, rank: int):
        import jax

        return jax.device_put(value, jax.devices()[rank])

    def run(self, made: BoxingPlan, shards: dict):
        import jax

        from keras_flow.backends.jax import boxing
        from keras_flow.backends.jax.devices import rank_devices

        out = boxing.redistribute(made, shards)
        if not made.steps:
            return out, 0
        text = boxing.program(made, rank_devices()).compiled(jax.numpy.float32).as_text()
        return out, sum(self.received(line, len(made.ranks)) for line in text.splitlines())

    def received(self, line: str, ranks: int) -> int:
        kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
        match = re.search(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", line)
        if match is None:
            return 0
        pieces = re.findall(r"f32\[([\d,]*)\]", match[1])  # several where a tuple is exchanged
        elements = sum(int(np.prod([int(n) for n in dims.split(",") if n], dtype=int)) for dims in pieces)
        if match[2] == "collective-permute":
            listed = line.split("source_target_pairs=")[1].split("}}")[0] + "}"
            return 4 * elements * sum(one != other for one, other in re.findall(r"\{(\d+),(\d+)\}", listed))
        groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])", line)
        assert groups, line
        group = len(groups[1].split(",")) if groups[1] else int(groups[3])
        share = elements * (group - 1) / group
        per_rank = {"all-reduce": 2 * share, "reduce-scatter": elements * (group - 1)}.get(match[2], share)
        return round(4 * ranks * per_rank)

    def finished(self, records: list[dict]) -> list[dict]:
        return records


class TensorFlowCounter:
    """Bytes of what the Recv operations of the partitioned graphs received in a run."""

    def array(self, value: np.ndarray, rank: int):
        import tensorflow as tf

        with tf.device(f"/device:CPU:{rank}"):
            return tf.constant(value)

    def run(self, made: BoxingPlan, shards: dict):
        from tensorflow.python.eager import context

        from keras_flow.backends.tensorflow import boxing

        if not made.steps:
            return boxing.redistribute(made, shards), 0
        ordered = [shards[rank] for rank in made.source.placement.ranks]
        function = boxing.program(made, ordered[0].dtype)
        context.enable_run_metadata()
        function(*ordered)
        traced = context.export_run_metadata()
        context.disable_run_metadata()
        moved = 0
        for functions in traced.function_graphs:
            for graph in functions.partition_graphs:
                for node in graph.node:
                    if node.op == "_Recv":
                        moved += self.received(node, function.graph)
        return boxing.redistribute(made, shards), moved

    def received(self, node, graph) -> int:
        """Bytes of the tensor that a Recv names: `edge_NUMBER_NAME`, NAME being the operation that made it."""
        name = re.fullmatch(r"edge_\d+_(.*)", node.attr["tensor_name"].s.decode())[1]
        made = graph.get_operation_by_name(name).outputs[0]
        return made.shape.num_elements() * made.dtype.size

    def finished(self, records: list[dict]) -> list[dict]:
        return records


class TorchCounter:
    """Bytes that torch.distributed was asked to receive on this rank; summed over ranks at the end."""

    def __init__(self):
        import torch.distributed as dist

        self.dist, self.moved = dist, 0
        names = ("all_to_all_single", "all_reduce", "all_gather_single")
        self.originals = {name: getattr(dist, name) for name in names}
        for name, original in self.originals.items():
            setattr(dist, name, self.counted(name, original))

    def counted(self, name: str, original):
        def call(*arguments, **options):
            group = options.get("group")
            size, place = self.dist.get_world_size(group), self.dist.get_rank(group)
            if name == "all_to_all_single":
                counts = arguments[2]
                self.moved += arguments[0].element_size() * (sum(counts) - counts[place])
            elif name == "all_reduce":
                self.moved += arguments[0].nbytes * 2 * (size - 1) / size
            else:
                self.moved += arguments[0].nbytes * (size - 1) / size
            return original(*arguments, **options)

        return call

    def array(self, value: np.ndarray, rank: int):
        import torch

        return torch.from_numpy(value)

    def run(self, made: BoxingPlan, shards: dict):
        from keras_flow.backends.execute import execute

        self.moved = 0
        out = execute(made, shards)
        return out, self.moved

    def finished(self, records: list[dict]) -> list[dict]:
        import torch

        for name, original in self.originals.items():
            setattr(self.dist, name, original)
        table = torch.tensor([[record["moved"], float(not record["right"])] for record in records])
        self.dist.all_reduce(table)
        for record, (moved, wrong) in zip(records, table.tolist(), strict=True):
            record.update(moved=round(moved), right=wrong == 0)
        return records


COUNTERS = {"jax": JaxCounter, "tensorflow": TensorFlowCounter, "torch": TorchCounter}
