"""The process of one backend in a comparison: trains every layout, or evaluates the final weights of all runs.

python -m keras_flow.compare.worker train|evaluate job.json
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_flow import npz
from keras_flow.compare.options import CompareJob
from keras_flow.errors import FlowError

#: the final weights of a run, as every backend reads them
_FINAL = "final.weights.h5"
#: steps in a timeline: the first of them may still compile
_TRACED_STEPS = 3


def main(action: str, path: str) -> int:
    """Train or evaluate the job of a file on all ranks; returns the exit status, and writes the error of a failure."""
    job = CompareJob.read(path)
    os.environ["KERAS_BACKEND"] = job.backend
    import keras_flow as kf
    from keras_flow import user_file
    from keras_flow.backends import symbolic

    ranks = user_file.ranks_for(job.layouts, job.ranks)
    try:
        if action == "train":
            kf.run(train, devices=ranks, args=(path,), rehearse=False)
        else:
            kf.run(evaluate, devices=1, args=(path,))
    except FlowError as error:
        _failed(job, action, str(error))
        return 2
    except Exception as error:
        _failed(job, action, symbolic.misfit(error) or traceback.format_exc())
        return 3
    return 0


def _failed(job: CompareJob, action: str, text: str) -> None:
    (Path(job.folder) / f"failed-{job.backend}-{action}.txt").write_text(text)


def train(path: str) -> None:
    """Train the job's layouts one after the other. Runs on every rank."""
    from keras_flow import user_file
    from keras_flow.runtime import env

    job = CompareJob.read(path)
    module = user_file.load(job.file)
    makers = {layout: user_file.distribution_maker(module, layout) for layout in job.layouts}
    data = user_file.load_data(module)
    leads = env.process_index() == 0
    drawn = job.random or random_of_one_device(makers)
    for layout, make in makers.items():
        # only torch has other processes
        if make is None and not leads:
            continue  # one device: the other ranks' processes have nothing to do
        _train_one(job, module, data, layout, make, leads, drawn)


def random_of_one_device(makers: Mapping[str, Callable[[], Any] | None]) -> Any:
    """The `random=` of the run on one device: that of the layouts where they have one; else None, the default.

    Args:
        makers: layout -> makes its distribution; None for one device.
    """
    drawn = {make().random for make in makers.values() if make is not None}
    return drawn.pop() if len(drawn) == 1 else None


def _train_one(
    job: CompareJob, module: object, data: object, layout: str, make: object, leads: bool, drawn: Any
) -> None:
    import keras

    import keras_flow as kf
    from keras_flow import user_file
    from keras_flow.compare.order import Ordered
    from keras_flow.current.distribution import as_under
    from keras_flow.user_file import length_of

    folder = job.of_run(layout)
    folder.mkdir(parents=True, exist_ok=True)
    # names begin anew, so that variables have the same paths in each run
    keras.utils.clear_session()
    keras.utils.set_random_seed(job.seed)
    distribution = make() if make is not None else None  # type: ignore[operator]
    alone = kf.DataParallel(kf.Placement([0]), random=drawn)
    # one device is stock Keras, which draws what the distributions draw
    with distribution.scope() if distribution is not None else as_under(alone):
        model = user_file.built_model(module, lambda: data.x)  # type: ignore[arg-type, attr-defined]
        initial = Path(job.folder) / "initial.weights.h5"
        # the first run of all, on the first backend, writes the weights that all others load
        if not initial.exists():
            model.save_weights(initial)
        model.load_weights(initial)
        if job.perturbed:
            model.set_weights([_next(value, index) for index, value in enumerate(model.get_weights())])
        elif layout == "1":
            _write_weights(job.of_backend / "initial.npz", model.get_weights())
        per_epoch = -(-length_of(data.x) // job.batch_size)  # type: ignore[attr-defined]
        steps = min(job.steps or per_epoch * (job.epochs or 1), per_epoch * job.epochs if job.epochs else sys.maxsize)
        batches = Ordered(data.x, data.y, job.batch_size, job.seed, steps)  # type: ignore[attr-defined]
        watch = _watch(job, layout, steps, leads)
        # Keras's loss log is a mean over its epoch: epochs of one step give the loss of each step, to the last bit
        model.fit(iter(batches), epochs=steps, steps_per_epoch=1, verbose=0, shuffle=False, callbacks=[watch])  # type: ignore[arg-type]
        rows = (data.x_val, data.y_val) if data.x_val is not None else (data.x, data.y)  # type: ignore[attr-defined]
        logs = model.evaluate(*rows, batch_size=job.batch_size, verbose=0, return_dict=True)  # type: ignore[arg-type]
        _loss(logs)
        model.save_weights(folder / _FINAL)
        # on torch a collective: all ranks call it, one writes
        weights = model.get_weights()
    explained = _explained(distribution, model, job.batch_size)
    computed = distribution.computed_on(model) if isinstance(distribution, kf.PipelineParallel) else ()
    _write_shards(folder, layout, model, computed)
    if job.traces is not None and distribution is not None:
        # after all that is compared: these steps train on
        more = Ordered(data.x, data.y, job.batch_size, job.seed, _TRACED_STEPS)  # type: ignore[attr-defined]
        with kf.trace(Path(job.traces) / f"trace-{job.backend}-{layout.replace('/', '_')}.json"):
            model.fit(iter(more), epochs=1, steps_per_epoch=_TRACED_STEPS, verbose=0, shuffle=False)  # type: ignore[arg-type]
    if not leads:
        return
    _write_weights(folder / "final.npz", weights)
    (folder / "run.json").write_text(
        json.dumps(
            {
                "backend": job.backend,
                "layout": layout,
                "losses": watch.losses,
                # a metric may be an array: F1Score has a number for each class
                "evaluation": {name: float(value) for name, value in logs.items() if np.ndim(value) == 0},
                "step_seconds": watch.median_seconds(),
                **explained,
                "steps": len(watch.losses),
                "random_layers": (distribution or alone).random == "stock"
                and any("seed_generator" in v.path for v in model.variables),
                "model": _in_words(model),
                "program": _program(model, data, job.batch_size, (distribution or alone).random),
                "placement": _placement(distribution),
                "batch_axes": list(getattr(distribution, "batch_axes", ())),
                "paths": [v.path for v in model.weights],
                "versions": _versions(job.backend),
            }
        )
    )


def _write_weights(path: Path, weights: Iterable[np.ndarray]) -> None:
    npz.write(path, {str(number): weight for number, weight in enumerate(weights)})


def _next(weight: np.ndarray, seed: int) -> np.ndarray:
    """A weight, each element moved to the next number above or below it; 0 stays."""
    from keras_flow.tensors.dtypes import is_float

    if not is_float(weight.dtype.name):
        return weight
    towards = np.where(np.random.default_rng(seed).random(weight.shape) < 0.5, -np.inf, np.inf).astype(weight.dtype)
    return np.where(weight == 0, weight, np.nextafter(weight, towards))


def _explained(distribution: object, model: object, batch_size: int) -> dict[str, int | None]:
    """Bytes that a rank receives in a step, and at most holds in it, as `explain` says; None where it cannot say."""
    import keras_flow as kf
    from keras_flow.distributions.dry_run import dry_run

    try:
        with dry_run(1) if distribution is None else contextlib.nullcontext():
            explanation = (distribution or kf.DataParallel(kf.Placement([0]))).explain(model, batch_size)  # type: ignore[attr-defined]
    except Exception:  # of a model that `explain` does not know; it has been trained, and is compared
        return {"received_per_step": None, "peak_per_rank": None}
    return {
        "received_per_step": explanation.received,
        "peak_per_rank": max(memory.peak for memory in explanation.memory.values()),
    }


def _program(model: Any, data: Any, batch_size: int, random: str) -> dict[str, object]:
    """The fields of `known_differences.ProgramFacts`."""
    from keras_flow.backends.active import backend
    from keras_flow.user_file import length_of

    optimizer = model.optimizer
    # a loss for all outputs or one for each
    outputs = len(model.outputs) if getattr(model, "outputs", None) else 1
    return {
        "layers": sorted({type(layer).__name__ for layer in model._flatten_layers()}),
        "optimizer": type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
        "clips": any(getattr(optimizer, how, None) for how in ("clipnorm", "global_clipnorm", "clipvalue")),
        "outputs": outputs,
        "short_batch": length_of(data.x) % batch_size,
        "dtypes": sorted({str(layer.compute_dtype) for layer in model._flatten_layers() if layer.compute_dtype}),
        "device": backend().world().type,
        "random": random if any("seed_generator" in variable.path for variable in model.variables) else "",
    }


def _in_words(model: Any) -> dict[str, str]:
    """The model, its optimizer and its loss, as a reader of the report knows them."""
    import keras

    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    losses = [each for each in keras.tree.flatten(model.loss) if each is not None]
    return {
        "model": f"{model.name}, {model.count_params():,} parameters",
        "optimizer": f"{type(optimizer).__name__}, {_rate(optimizer)}",
        "loss": ", ".join(dict.fromkeys(map(_name, losses))) or "added by the model",
    }


def _rate(optimizer: Any) -> str:
    """The learning rate: a number, the class of a schedule, or a function."""
    rate = optimizer.get_config().get("learning_rate")
    if isinstance(rate, float):
        return f"learning rate {rate:.4g}"
    # as Keras writes it down; a function is of one of these classes
    name = rate["class_name"] if isinstance(rate, dict) else "function"
    return "learning rate by a function" if name in ("function", "__lambda__") else name


def _name(loss: Any) -> str:
    """The name of a loss that is a string, a `keras.losses.Loss` or a function."""
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def _placement(distribution: object) -> dict | None:
    if distribution is None:
        return None
    placement = distribution.placement  # type: ignore[attr-defined]
    return {"hierarchy": placement.hierarchy, "axis_names": placement.axis_names, "ranks": placement.ranks}


def _versions(backend: str) -> dict[str, str]:
    from keras_flow.runtime import versions

    return {name: versions.installed(name) or "" for name in ("keras", backend)}


def _write_shards(folder: Path, layout: str, model: object, computed: Iterable[int]) -> None:
    """Write the shapes and bytes that the ranks of this process hold, read from the engine's live arrays.

    Also of the ranks that have `computed` and hold no weights between steps.

    Raises:
        FlowError: the shape of a shard is not that of its layout.
    """
    from keras_flow.backends.active import backend as engine
    from keras_flow.current.variable_layout import keras_layout
    from keras_flow.runtime import env

    shapes: dict[str, dict[str, list[int]]] = {str(rank): {} for rank in computed}
    declared: dict[str, str] = {}
    placements: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    bytes_of: dict[str, int] = dict.fromkeys(shapes, 0)
    for variable in model.weights:  # type: ignore[attr-defined]
        layout_of = keras_layout(variable)
        # one device has no layout to ask
        shards = {0: variable.numpy()} if layout == "1" else engine().shards(variable)
        declared[variable.path] = "one device"
        if layout_of:
            of_job = layout_of.of_job.layout
            declared[variable.path] = repr(list(of_job.nd_sbp))
            placements[variable.path] = of_job.placement.ranks, of_job.placement.hierarchy
        for rank, shard in shards.items():
            shapes.setdefault(str(rank), {})[variable.path] = list(shard.shape)
            bytes_of[str(rank)] = bytes_of.get(str(rank), 0) + shard.nbytes
            # what is declared and what is held are two things
            if layout_of and tuple(shard.shape) != layout_of.layout.local_shape(rank):
                raise FlowError(
                    f"{variable.path}: rank {rank} holds {shard.shape}, its layout says "
                    f"{layout_of.layout.local_shape(rank)}: the declared split is not physical"
                )
    path = folder / f"held-{env.process_index()}.json"
    held = {"shapes": shapes, "bytes_per_rank": bytes_of, "declared": declared, "placements": placements}
    path.write_text(json.dumps(held))


def _watch(job: CompareJob, layout: str, steps: int, leads: bool):
    """A callback that keeps losses and times of steps, and writes the progress for the parent process."""
    import keras
    import numpy as np

    events = Path(job.folder) / f"events-{job.backend}.jsonl"

    class StepTimes(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.seconds: list[float] = []
            self._began = 0.0
            self._tell()

        def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
            self._began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.losses.append(_loss(logs or {}))  # reading it waits for the step
            self.seconds.append(time.perf_counter() - self._began)
            # every fifth step: the parent reads the file a few times a second
            if len(self.losses) % 5 == 0 or len(self.losses) == steps:
                self._tell()

        def _tell(self) -> None:
            if leads:
                line = {"layout": layout, "step": len(self.losses), "steps": steps, "loss": (self.losses or [0.0])[-1]}
                with events.open("a") as file:
                    file.write(json.dumps(line) + "\n")

        def median_seconds(self) -> float:
            """Median over the second half of the steps: without compilation."""
            return float(np.median(self.seconds[len(self.seconds) // 2 :]))

    return StepTimes()


def _loss(logs: Mapping[str, Any]) -> float:
    if "loss" not in logs:
        raise FlowError(
            f"the model logs no 'loss' but {', '.join(logs) or 'nothing'}. A comparison judges the loss of each step: "
            "add 'loss' to what its train_step and test_step return"
        )
    return float(logs["loss"])


def evaluate(path: str) -> None:
    """Load the final weights of every run and evaluate them on one device of this backend."""
    import keras

    from keras_flow import user_file

    job = CompareJob.read(path)
    folder = Path(job.folder)
    module = user_file.load(job.file)
    data = user_file.load_data(module)
    rows = (data.x_val, data.y_val) if data.x_val is not None else (data.x, data.y)
    keras.utils.set_random_seed(job.seed)
    model = user_file.built_model(module, lambda: data.x)
    losses = {}
    for file in sorted(folder.glob(f"*/*/{_FINAL}")):
        model.load_weights(file)
        logs = model.evaluate(*rows, batch_size=job.batch_size, verbose=0, return_dict=True)  # type: ignore[arg-type]
        losses[file.parent.relative_to(folder).as_posix()] = _loss(logs)
    (folder / f"evaluated-{job.backend}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
