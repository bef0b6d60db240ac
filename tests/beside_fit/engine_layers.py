"""Layers that wrap what an engine's own libraries make: modules of torch, functions of JAX, SavedModels of TensorFlow.

Each is made in a scope or before it, trained, saved, loaded and called, on several ranks and on one device.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers as L

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.current.distribution import active
from tests.one_device import one_device

#: rows of a batch: on four ranks 5 do not divide
ROWS = (5, 8)
LAYOUTS = ("dp4", "dp4z3", "2x2", "1x4")
#: where the layer is made; an attribute of a subclassed model is wrapped by Keras itself on torch
MADE = ("within", "before", "attribute")


def modules() -> dict[str, Callable[[], Any]]:
    """Modules of torch: with buffers, with tied weights, with weights of one tensor, frozen, that write in place."""
    import torch
    from torch import nn

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x) + self.second(x).tanh()
            return h - h.mean(0)  # rows meet

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.steps(x.reshape(-1, 2, 3))[0].mean(1)

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.norm(self.conv(x.reshape(-1, 1, 2, 3)))).mean((2, 3))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)
            self.linear.bias.requires_grad = False
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            if self.training:
                self.seen += h.detach().abs().sum(0)
            return h * 0.5

    return {
        "statistics": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()),
        "tied": Tied,
        "recurrent": Recurrent,
        "images": Images,
        "a frozen weight": Counting,
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        "attention": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        ),
    }


def functions() -> dict[str, Callable[[], Any]]:
    """Functions of JAX: stateless, and with state that a call assigns."""

    def weights(rng: Any, inputs: Any) -> dict[str, Any]:
        import jax

        return {"w": jax.random.normal(rng, (6, 8)) * 0.3, "b": jax.numpy.zeros(8)}

    def stateless(params: dict[str, Any], inputs: Any) -> Any:
        import jax

        return jax.numpy.tanh(inputs @ params["w"] + params["b"])

    def with_mean(rng: Any, inputs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        import jax

        return weights(rng, inputs), {"mean": jax.numpy.zeros(8)}

    def centred(
        params: dict[str, Any], state: dict[str, Any], inputs: Any, training: bool
    ) -> tuple[Any, dict[str, Any]]:
        h = inputs @ params["w"] + params["b"]
        mean = h.mean(0) if training else state["mean"]  # rows meet
        return h - mean, {"mean": 0.9 * state["mean"] + 0.1 * mean}

    return {
        "stateless": lambda: L.JaxLayer(stateless, weights, seed=1),
        "state": lambda: L.JaxLayer(centred, with_mean, seed=1),
    }


def kinds(engine: str) -> list[str]:
    """The names of what is wrapped on an engine."""
    return {
        "torch": list(modules()),
        "jax": list(functions()),
        "tensorflow": ["a SavedModel", *functions()],  # functions of JAX are converted
    }[engine]


def is_possible(engine: str, kind: str, made: str) -> bool:
    """Whether one device can have such a layer there: Keras cannot build a JaxLayer inside a function of TensorFlow."""
    return engine != "tensorflow" or kind == "a SavedModel" or made != "attribute"


def _saved_model() -> Any:
    folder = Path(tempfile.mkdtemp()) / "saved"
    with one_device():
        inner = keras.Sequential([L.Input((6,)), L.Dense(8, "tanh")])
        inner.export(folder, verbose=False)
    return L.TFSMLayer(str(folder), call_endpoint="serve", trainable=False)


def refusal_of_training() -> str:
    """What `fit` says where the layer around a SavedModel would be trained."""
    with _distribution("dp4").scope():
        layer = _saved_model()
        layer.trainable = True
        model = keras.Sequential([L.Input((6,)), layer, L.Dense(3)])
        model.compile("sgd", "mse")
        found = model.predict(np.ones((5, 6)), verbose=0)
        try:
            model.fit(np.ones((5, 6)), np.ones((5, 3)), verbose=0)
        except kf.FlowError as error:
            return f"{found.shape} {error}"
    return ""


def _agreed(value: str) -> str:
    """Rank 0's value; on one device, which every process is for itself, the own."""
    return value if active() is None else backend().agree_on(dict.fromkeys(kf.env.local_ranks(), value))[0]


def _made(engine: str, kind: str, as_module: bool) -> Any:
    if engine == "torch":
        import torch

        torch.manual_seed(0)
        made = modules()[kind]()
        return made if as_module else L.TorchModuleWrapper(made)
    return functions()[kind]() if kind in functions() else _saved_model()


class Around(keras.Model):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.flat, self.out = body, L.Flatten(), L.Dense(3, name="o")

    def call(self, x: Any) -> Any:
        return self.out(self.flat(self.body(x)))


def _distribution(layout: str) -> Any:
    if layout.startswith("dp4"):
        return kf.DataParallel(zero=3 if layout == "dp4z3" else 0, zero_min_size=1)
    mesh = kf.Placement([[0, 1], [2, 3]] if layout == "2x2" else [[0, 1, 2, 3]], axis_names=("data", "model"))
    chosen = kf.ModelParallel(mesh, rules={"": {"model": "S(0)"}}, batch_axes="data")
    chosen.check = lambda model: None  # type: ignore[method-assign]  # of a SavedModel nothing is split
    return chosen


def _run(engine: str, kind: str, made: str, rows: int) -> Generator[Any, Any, None]:
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(13, width)).astype("float32") for width in (6, 3))
    early = _made(engine, kind, False) if made == "before" else None
    scope: Any = yield
    with scope:
        if made == "attribute":
            body = _made(engine, kind, engine == "torch")
            model = Around(body)
        else:
            body = early or _made(engine, kind, False)
            model = keras.Sequential([L.Input((6,)), body, L.Flatten(), L.Dense(3, name="o")])
        model.compile("sgd", "mse")
        fit = {"batch_size": rows, "shuffle": False, "verbose": 0}
        found = [model.predict(x, batch_size=rows, verbose=0), model.fit(x, y, epochs=2, **fit).history["loss"]]
        path = Path(_agreed(tempfile.mkdtemp())) / "w.weights.h5"
        model.save_weights(path)
        found += [model.get_weights(), _state_of(body), model.fit(x, y, **fit).history["loss"]]
        model.load_weights(path)
        found += [model.predict(x, batch_size=rows, verbose=0), model.fit(x, y, **fit).history["loss"]]
        model.set_weights([0.5 * value for value in model.get_weights()])
        found += [model.predict(x, batch_size=rows, verbose=0)]
        # torch.save writes a module by the name of its class: those of functions have none, nor has a parametrized one
        if engine == "torch" and made != "attribute" and type(body.module).__module__.startswith("torch.nn.modules"):
            whole = path.with_name("m.keras")
            model.save(whole)
            loaded = keras.models.load_model(whole, safe_mode=False)
            found += [loaded.predict(x, verbose=0), loaded.fit(x, y, **fit).history["loss"]]
    found += [keras.ops.convert_to_numpy(keras.ops.stop_gradient(model(x, training=False))), _state_of(body)]
    yield [np.asarray(value) for value in keras.tree.flatten(found)]


def _state_of(body: Any) -> list[np.ndarray]:
    """What torch's own way to save a module finds."""
    module = getattr(body, "module", body)
    state = module.state_dict() if hasattr(module, "state_dict") else {}
    return [np.array(value.detach()) for value in state.values()]  # a copy: training goes on in its memory


def outcomes(engine: str, cases: list[tuple[str, str, str, int]]) -> list[str]:
    """Return what differs from one device.

    Args:
        engine: whose layers they are.
        cases: kind, where it is made, layout, rows of a batch.
    """
    wrong = []
    for kind, made, layout, rows in cases:
        results = []
        for scope in (one_device, lambda layout=layout: _distribution(layout).scope()):
            keras.utils.clear_session()
            keras.utils.set_random_seed(0)
            program = _run(engine, kind, made, rows)
            next(program)  # what is made before the scope
            results.append(program.send(scope()))
        for place, (one, other) in enumerate(itertools.zip_longest(*results)):
            if one is None or other is None or not np.allclose(one, other, rtol=1e-4, atol=2e-5):
                said = f"value {place} is {np.ravel(other)[:6]} and not {np.ravel(one)[:6]}"
                wrong.append(f"{kind} made {made}, {layout}, {rows} rows: {said}")
                break
    return wrong
