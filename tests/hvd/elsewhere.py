"""A job that launchers of others start: Horovod's formulas in NumPy, then its own example for Keras.

`mpirun -n 2 python tests/hvd/elsewhere.py FOLDER NODES` prints `done` on rank 0.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import keras_flow.hvd as hvd
from tests.hvd import job

EXAMPLE = Path(__file__).parents[2] / "examples" / "older_worlds" / "horovod_digits.py"


def ranks(nodes: int) -> None:
    """Ranks are counted node by node, as `mpirun` and `srun` do."""
    local = hvd.size() // nodes
    assert (hvd.local_size(), hvd.cross_size()) == (local, nodes)
    assert hvd.rank() == hvd.cross_rank() * local + hvd.local_rank()
    assert hvd.allgather_object((hvd.cross_rank(), hvd.local_rank())) == [
        (node, place) for node in range(nodes) for place in range(local)
    ]


if __name__ == "__main__":
    hvd.init()
    ranks(int(sys.argv[2]))
    job.collectives()
    job.training()
    job.callbacks(Path(sys.argv[1]))
    sys.argv = [str(EXAMPLE), "--small"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    if hvd.rank() == 0:
        print("done")
