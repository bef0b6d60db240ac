"""`kf.init(4, simulate=True)`: one process plays the ranks of torch."""

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(120)

NUMBERS = """
import itertools
import numpy as np
import keras_flow as kf
kf.init(4, simulate=True)
grid = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
value = np.arange(35, dtype="float32").reshape(5, 7)
kinds = ("S(0)", "S(1)", "B", "P")
layouts = [f"{one},{other}" for one, other in itertools.product(kinds, kinds)]
wrong = []
for before, after in itertools.product(layouts, layouts):
    x = kf.tensor(value, placement=grid, sbp=before).to_global(sbp=after)
    if x.layout.local_shape(3) != tuple(x.to_local(rank=3).shape) or (x.numpy() != value).any():
        wrong.append((before, after))
print(len(layouts), wrong)
x = kf.tensor(value, placement=grid, sbp="S(0),S(1)")
loss, gradient = kf.value_and_grad(lambda x: kf.ops.sum(x @ kf.ops.transpose(x)))(x)
print(float(loss.numpy()) == (value @ value.T).sum(), np.allclose(gradient.numpy(), 2 * value.sum(0)))
summed = kf.comm.all_reduce({rank: np.full(2, rank, "float32") for rank in range(4)})
print([value.tolist() for value in summed.values()] == [[6.0, 6.0]] * 4)
print(kf.visualize(x))
for refused in (kf.DataParallel, lambda: kf.ModelParallel(grid), lambda: kf.init(3), lambda: kf.init(simulate=True)):
    try:
        refused()
    except kf.FlowError as error:
        print(error)
"""


def test_numbers_and_refusals() -> None:
    code, out, err = programs.finish(programs.start(["-c", NUMBERS], "torch"), 110)
    assert code == 0, err
    moved, gradient, summed, *lines = out.splitlines()
    assert moved == "16 []"
    assert gradient == "True True"
    assert summed == "True"
    assert lines[:5] == [
        "Layout(S(0),S(1) of [5, 7] on Placement([[0, 1], [2, 3]], axis_names=('data', 'model')))",
        "  rank 0: [0:3, 0:4]",
        "  rank 1: [0:3, 4:7]",
        "  rank 2: [3:5, 0:4]",
        "  rank 3: [3:5, 4:7]",
    ]
    one, other, fewer, no_number = lines[5:]
    assert one.startswith("kf.DataParallel, like all that trains, needs ranks that are processes")
    assert other.startswith("kf.ModelParallel, like all that trains,")
    assert "kf.notebook.start(4) in a notebook, kf.run(main, devices=4) or `keras-flow launch --devices 4" in one
    assert "To look at global tensors in one process: kf.init(3, simulate=True)" in fewer
    assert "need a number, for example kf.init(4, simulate=True)" in no_number


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_virtual_devices_are_simulated_ranks(backend: str) -> None:
    program = "import keras_flow as kf; print(kf.init(3, simulate=True)); kf.DataParallel()"
    code, out, err = programs.finish(programs.start(["-c", program], backend), 100)
    assert code == 0, err
    assert out.startswith("World(size=3, type='cpu', local_ranks=(0, 1, 2)")
