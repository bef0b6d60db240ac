"""A program without any seed trains in several processes: all shuffle, initialise and drop as process 0 does."""

import json
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

#: no seed in it; data and a model that are made before the scope
PROGRAM = """
import json, random
import numpy as np, keras
import torch, tensorflow as tf
import keras_flow as kf
kf.init()
x, y = np.random.rand(45, 6, 6, 1).astype("float32"), np.random.rand(45, 3).astype("float32")
class Files(keras.utils.PyDataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return self.rows(index, slice)
    def rows(self, index, part):
        batch = slice(15 * index, 15 * index + 15)
        return x[batch][part(15)], y[batch][part(15)]
def augmented():
    while True:
        chosen = np.random.randint(0, 45, 16)
        yield x[chosen] * random.random(), y[chosen]
def model():
    more = [
        keras.layers.RandomRotation(0.2), keras.layers.RandomTranslation(0.2, 0.2), keras.layers.RandomZoom(0.2),
        keras.layers.RandomContrast(0.3), keras.layers.RandomBrightness(0.2, value_range=(0, 1)),
        keras.layers.GaussianNoise(0.1), keras.layers.SpatialDropout2D(0.2)]
    made = keras.Sequential([
        keras.layers.Input((6, 6, 1)), keras.layers.RandomFlip(), *(more if MORE else []), keras.layers.Flatten(),
        keras.layers.Dense(4, name="h"), keras.layers.Dropout(0.3), keras.layers.Dense(3)])
    made.compile("adam", "mse")
    return made
pairs = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(45).batch(16)
# what a map draws has a seed of its own too, and so has each of several shuffles
noisy = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20).map(
    lambda a, b: (tf.image.random_brightness(a, 0.2) + tf.random.normal((6, 6, 1)), b)
).shuffle(45, reshuffle_each_iteration=False).batch(16)
flip = keras.layers.RandomFlip()
mapped = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).map(lambda a, b: (flip(a, training=True), b))
tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
outside, losses = model(), {}
def train(name, *data, **options):
    for made in (outside, model()):
        losses.setdefault(name, []).extend(made.fit(*data, epochs=2, verbose=0, **options).history["loss"])
ranks = np.arange(kf.env.get_world_size())
if LAYOUT == "dp":
    dist = kf.DataParallel(random=RANDOM)
else:
    grid = kf.Placement(ranks.reshape(2, -1), axis_names=("data", "model"))
    rules = {"h/kernel$": {"model": kf.sbp.split(1)}}
    dist = kf.ModelParallel(grid, batch_axes="data", rules=rules, random=RANDOM)
with dist.scope():
    train("arrays", x, y, batch_size=16)
    train("arrays, rows of a batch", x, y, batch_size=16, shuffle="batch")
    train("PyDataset", Files(workers=2), shuffle=True)
    train("tf.data", pairs)
    if MORE:
        train("tf.data, shuffled twice", noisy)
        train("tf.data, augmented by a layer", mapped)
    train("DataLoader", torch.utils.data.DataLoader(tensors, batch_size=16, shuffle=True))
    train("generator", augmented(), steps_per_epoch=2)
print(f"losses of {kf.env.process_index()}: {json.dumps(losses)}", flush=True)
"""


#: engine, `random=`, layout, whether more layers draw and more data are shuffled, options of the launcher
CASES = [
    (engine, random, "dp", False, options)
    for random in ("stock", "logical")
    for engine, options in (
        ("tensorflow", ("--nproc_per_node", "2")),
        ("jax", ("--nproc_per_node", "2", "--devices_per_proc", "2")),
        ("torch", ("--nproc_per_node", "2")),
    )
]
MORE = [
    (engine, random, "2x2", True, options)
    for random in ("stock", "logical")
    for engine, options in (
        ("tensorflow", ("--nproc_per_node", "2", "--devices_per_proc", "2")),
        ("jax", ("--nproc_per_node", "2", "--devices_per_proc", "2")),
        ("torch", ("--nproc_per_node", "4")),
    )
]


@pytest.mark.parametrize("case", sampling.some(CASES, 3))
def test_no_seed_is_needed(case: tuple[str, str, str, bool, tuple[str, ...]], tmp_path: Path) -> None:
    train_without_a_seed(case, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MORE)
def test_no_seed_is_needed_by_more(case: tuple[str, str, str, bool, tuple[str, ...]], tmp_path: Path) -> None:
    train_without_a_seed(case, tmp_path)


def train_without_a_seed(case: tuple[str, str, str, bool, tuple[str, ...]], tmp_path: Path) -> None:
    engine, random, layout, more, options = case
    program = tmp_path / "program.py"
    program.write_text(f"RANDOM, LAYOUT, MORE = {(random, layout, more)!r}\n{PROGRAM}")
    command = [
        "-m",
        "keras_flow.launch",
        *options,
        "--timeout",
        "600" if more else "100",
        "--tee",
        "--logdir",
        str(tmp_path),
        str(program),
    ]
    code, _, err = programs.finish(programs.start(command, engine), 800 if more else 170)
    assert code == 0, err
    printed = "".join(path.read_text() for path in tmp_path.glob("local_rank_*/*"))
    assert "random states differed" not in printed
    # the logs of a step are those of the logical batch
    one, other = (json.loads(part.splitlines()[0].partition(": ")[2]) for part in printed.split("losses of ")[1:3])
    assert one == other
    assert len(one) == (8 if more else 6)
    assert all(len(losses) == 4 and max(losses) < 10 for losses in one.values())


def test_processes_with_seeds_of_their_own_take_the_first_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import keras, random, os\nimport numpy as np\nimport keras_flow as kf\n"
        "kf.init()\nrank = int(os.environ['RANK'])\nkeras.utils.set_random_seed(5 + rank)\n"
        "with kf.DataParallel().scope():\n"
        "    print('drawn', random.random(), np.random.rand(), keras.random.randint((), 0, 10**6), flush=True)\n"
    )
    command = [
        "-m",
        "keras_flow.launch",
        "--nproc_per_node",
        "2",
        "--timeout",
        "60",
        "--tee",
        "--logdir",
        str(tmp_path),
    ]
    code, _, err = programs.finish(programs.start([*command, str(program)], "torch"), 100)
    assert code == 0, err
    printed = "".join(path.read_text() for path in tmp_path.glob("local_rank_*/*"))
    drawn = [line for line in printed.splitlines() if line.startswith("drawn")]
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
    assert "all take process 0's" in printed
