"""JAX with eight ranks: hierarchies on which ranks do different things in a round.

    python -m tests.conformance.eight_ranks OUT.json

Beside a fixed sample, the pairs whose fewest bytes are unevenly shared.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from keras_flow.boxing import plan
from keras_flow.layout import Layout
from tests.boxing.cases import all_nd_sbps, grid
from tests.conformance.boxing_worker import named, records

UNEVEN = ("P,S(0) -> S(0),B", "B,S(0) -> S(0),B", "S(1),P -> B,S(1)", "P,P -> P,B", "S(1),S(0) -> S(0),B")
SHAPE = (16, 24)


def pairs() -> list[tuple[Layout, Layout]]:
    found = [tuple(Layout(grid((2, 4)), sbp, SHAPE) for sbp in pair.split(" -> ")) for pair in UNEVEN]
    for hierarchy, count in (((2, 4), 30), ((4, 2), 15), ((2, 2, 2), 15)):
        layouts = [Layout(grid(hierarchy), sbp, SHAPE) for sbp in all_nd_sbps(len(hierarchy))]
        found += random.Random(0).sample(list(itertools.product(layouts, repeat=2)), count)
    return found  # type: ignore[return-value]


def parallel_tasks() -> dict[str, bool]:
    """Whether XLA cuts loops into parallel tasks, in a program of ours and in the same program compiled without
    options."""
    import jax
    import numpy as np

    from keras_flow.backends.jax import boxing
    from keras_flow.backends.jax.devices import rank_devices

    mesh = grid((2, 4))
    made = plan(Layout(mesh, "S(0),B", (512, 512)), Layout(mesh, "S(1),B", (512, 512)))
    program = boxing.program(made, rank_devices())
    given = jax.ShapeDtypeStruct(program.shape_of_all, np.float32, sharding=program.sharding)
    plain = jax.jit(program.body).lower(given).compile()
    return {
        name: "outer_dimension_partitions" in made.as_text()
        for name, made in (("ours", program.compiled(np.float32)), ("plain", plain))
    }


def main(out: str) -> None:
    import keras_flow as kf

    kf.init(8)
    Path(out).write_text(json.dumps({"records": records(named(pairs())), "parallel tasks": parallel_tasks()}))


if __name__ == "__main__":
    main(sys.argv[1])
