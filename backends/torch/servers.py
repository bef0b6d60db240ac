"""Parameter servers on torch: processes that answer the chief's questions; the chief's process is the program's.

A variable of the chief is a `tables.ServedTensor`, which says where its elements are. A worker is sent the stage that
it computes, pickled, and for each batch its rows; it reads the weights from their servers. A server is sent the
optimizer, and for each update gradients, which it applies to the variables and slots that it has.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import keras
import numpy as np
import torch

from keras_flow.backends import active, installing, leaves
from keras_flow.backends.mail import calls
from keras_flow.backends.optimizer_slots import updates_by_element
from keras_flow.backends.torch import devices, parcels, stages, tables, tensors
from keras_flow.current.distribution import Distribution, applied, as_under
from keras_flow.placements import Placement

#: seconds after which the chief tries again to reach a worker that was lost
_RETURN_SECONDS = 1.0
_programs = itertools.count()


# ---- workers and servers


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> None:
    """Begin to serve in this process: a worker computes what the chief sends, a server holds variables."""
    calls.require_secret()
    installing.install(active.backend())
    answers = _worker(cluster) if job == "worker" else {**tables.serve(index), **_optimizers()}
    lock = threading.Lock()

    def answer(told: Mapping[str, Any], value: Any) -> Any:
        with lock:
            if job == "worker":
                return answers[told["what"]](told, value)
            tables.forget(told["gone"])
            with keras.device("cpu"), torch.no_grad():
                return answers[told["what"]](told, value)

    calls.answer(cluster[job][index], answer)


def _lines(cluster: Mapping[str, Sequence[str]], job: str, name: str) -> list[calls.Line]:
    return [calls.Line(f"{name} {number}", address) for number, address in enumerate(cluster[job])]


def _worker(cluster: Mapping[str, Sequence[str]]) -> Mapping[str, Callable[..., Any]]:
    """What a worker answers."""
    tables.join(_lines(cluster, "ps", "parameter server"))
    known: dict[int, _WorkerStep] = {}

    def learn(told: Mapping[str, Any], value: np.ndarray) -> None:
        for number in told["gone"]:
            known.pop(number, None)
        known[told["program"]] = parcels.unpacked(value)

    def compute(told: Mapping[str, Any], value: Any) -> Any:
        return known[told["program"]].compute(value)

    return {"program": learn, "compute": compute}


class _WorkerStep:
    """A step of a worker: it runs a function on a part of a batch, and computes the gradients of its loss.

    Args:
        function: of weights, tensors and others, as `stage_program` takes it.
        stage: whose weights it reads.
        learns: whether gradients are taken.
        random: `"logical"` or `"stock"`.
    """

    def __init__(self, function: Callable[..., Any], stage: Any, learns: bool, random: str):
        self._function, self.weights, self._learns, self._random = function, list(stage.trainable), learns, random
        found = [layer for layer in stage.inner_layers if isinstance(layer, keras.layers.Embedding)]
        of_layers = {id(weight) for layer in found for weight in layer.trainable_variables}
        self._looked_up = [id(weight) in of_layers and len(weight.shape) > 1 for weight in self.weights]

    def compute(self, others: Any) -> Any:
        """Gradients, and the rest."""
        places = [weight._value.place for weight in self.weights]
        read = tables.read_all([each for each, is_table in zip(places, self._looked_up, strict=True) if not is_table])
        known = iter(read)
        weights: list[Any] = [
            tables.ServedTensor(place, tables.Read(is_kept=True)) if is_table else next(known)
            for place, is_table in zip(places, self._looked_up, strict=True)
        ]
        weights = [weight.requires_grad_(self._learns) for weight in weights]
        lookups = {
            id(weight): tables.Lookups(place)
            for weight, place, is_table in zip(self.weights, places, self._looked_up, strict=True)
            if is_table
        }
        distribution = Distribution.__new__(Distribution)
        distribution.placement, distribution.random = Placement([0]), self._random
        with as_under(distribution), tables.looking_up(lookups), torch.set_grad_enabled(self._learns):
            others = stages.on(0, {**others, "start": int(others["start"])})
            outputs, rest = self._function(weights, [], others)
            gradients = self._gradients(outputs[-1] * others["scale"], weights, list(lookups.values()))
        return leaves.mapped(_host, [gradients, rest], none_is_leaf=False)

    def _gradients(self, loss: torch.Tensor, weights: Sequence[Any], lookups: Sequence[Any]) -> list[Any]:
        if not self._learns:
            return []
        inputs = [*weights, *(rows for each in lookups for rows in each.rows)]
        found = list(torch.autograd.grad(loss, inputs, allow_unused=True)) if loss.requires_grad else []
        found += [None] * (len(inputs) - len(found))
        of_rows = iter(found[len(weights) :])
        of_table = {each.place.key: (each.numbers, [next(of_rows) for _ in each.rows]) for each in lookups}
        gradients: list[Any] = []
        for weight, gradient in zip(weights, found[: len(weights)], strict=True):
            numbers, rows = of_table.get(weight.place.key, ((), ())) if hasattr(weight, "place") else ((), ())
            used = [pair for pair in zip(numbers, rows, strict=True) if pair[1] is not None]
            if used:
                numbers, rows = tables.summed(*zip(*used, strict=True))
                gradient = (
                    {"numbers": numbers, "rows": rows} if gradient is None else gradient.index_add(0, numbers, rows)
                )
            gradients.append(gradient)
        return gradients


def _host(leaf: Any) -> np.ndarray:
    return tensors.as_numpy(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def _optimizers() -> Mapping[str, Callable[..., Any]]:
    """What a server answers to questions of updates."""

    def learn(told: Mapping[str, Any], value: np.ndarray) -> None:
        optimizer, home = parcels.unpacked(value)
        optimizer._trainable_variables_indices = {
            optimizer._var_key(variable): number for number, variable in enumerate(optimizer._trainable_variables)
        }
        for variable in (*optimizer._trainable_variables, *optimizer.variables):
            variable._shape = tuple(variable._value.shape)  # of a table a part is here
        optimizer._use_weight_decay = lambda variable: True  # the chief has asked
        tables.hold(told["optimizer"], (optimizer, home))

    def update(told: Mapping[str, Any], value: Any) -> Any:
        optimizer, home = tables.held(told["optimizer"])
        for variable, each in zip(home, value["home"], strict=True):
            variable.assign(each)
        variables = [optimizer._trainable_variables[number] for number in told["numbers"]]
        gradients = [_dense(*pair) for pair in zip(value["gradients"], variables, strict=True)]
        decayed = [
            variable for variable, number in zip(variables, told["numbers"], strict=True) if number in told["decayed"]
        ]
        if decayed:
            optimizer._apply_weight_decay(decayed)
        _update_step(optimizer)(gradients, variables, tensors.put(value["rate"], 0).cpu())
        return [_host(variable._value) for variable in home]

    return {"optimizer": learn, "update": update}


def _dense(gradient: Any, variable: keras.Variable) -> torch.Tensor:
    """A gradient as a tensor: rows that a batch has not used have none, and move by what optimizers remember."""
    if not isinstance(gradient, dict):
        return tensors.put(gradient, 0).cpu().reshape(tuple(variable.shape))
    rows, numbers = tensors.put(gradient["rows"], 0).cpu(), torch.from_numpy(gradient["numbers"])
    return torch.zeros(tuple(variable.shape), dtype=rows.dtype).index_add_(0, numbers, rows)


def _update_step(optimizer: Any) -> Callable[[Sequence[Any], Sequence[Any], Any], None]:
    """Keras's own update of some variables."""
    together = getattr(optimizer, "_parallel_update_step", None)
    if together is not None:
        return together

    def one_by_one(gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            optimizer.update_step(gradient, variable, rate)

    return one_by_one


# ---- the chief


def connect_servers(cluster: Mapping[str, Sequence[str]]) -> WorkerQueue:
    """Make this process the chief of workers and servers that listen; the servers become its ranks from 1 on."""
    calls.require_secret()
    servers = _lines(cluster, "ps", "parameter server")
    devices.serve_with(len(servers))
    tables.join(servers)
    return WorkerQueue(cluster["worker"])


class SentProgram:
    """A function of a batch's part that a worker runs, reading the variables from their servers."""

    def __init__(self, step: _WorkerStep):
        self.number, self.parcel = next(_programs), parcels.packed(step)
        self.shapes = [tuple(weight.shape) for weight in step.weights]


class WorkerQueue:
    """What schedules programs on workers.

    A worker that is lost loses no call: another one runs it, or the worker itself when it is back.
    """

    #: whether a call may be given to a second worker: one that hangs keeps its own thread here, and nothing else
    can_repeat = True

    def __init__(self, workers: Sequence[str]):
        self._tasks: queue.Queue[_Task] = queue.Queue()
        self._programs: WeakValueDictionary[int, SentProgram] = WeakValueDictionary()
        for number, address in enumerate(workers):
            threading.Thread(target=self._run, args=(number, address), daemon=True).start()

    def program(self, function: Callable[..., Any], stage: Any, learns: bool) -> SentProgram:
        """A function of weights, tensors and others as what workers run."""
        distribution = applied()
        made = SentProgram(
            _WorkerStep(function, stage, learns, "stock" if distribution is None else distribution.random)
        )
        self._programs[made.number] = made
        return made

    def schedule(self, program: SentProgram, others: Any) -> Callable[[], tuple[Any, int]]:
        """Begin to compute a program on a worker; what waits for what it gives, and says which worker it was."""
        task = _Task(program, leaves.mapped(_host, others, none_is_leaf=False))
        self._tasks.put(task)
        return task.wait

    def _run(self, number: int, address: str) -> None:
        """Give tasks to a worker, one after the other."""
        line, known = calls.Line(f"worker {number}", address), set[int]()
        while True:
            task = self._tasks.get()
            try:
                if task.program.number not in known:
                    gone = [each for each in known if each not in self._programs]
                    line.ask("program", task.program.parcel, program=task.program.number, gone=gone)
                    known.difference_update(gone)
                    known.add(task.program.number)
                task.end((line.ask("compute", task.others, program=task.program.number), number))
            except calls.LostProcessError:
                self._tasks.put(task)
                line, known = calls.Line(f"worker {number}", address), set[int]()
                while not line.is_there():
                    time.sleep(_RETURN_SECONDS)
            except BaseException as error:  # the step that waits for it raises it
                task.end(error)

    def settle(self) -> None:
        """Nothing is kept of a step that failed."""

    @staticmethod
    def total(gradients: Sequence[Any]) -> Any:
        """The sum of gradients of one variable; None where there are none."""
        found = [each for each in gradients if each is not None]
        if not found:
            return None
        if all(each.is_sparse for each in found):
            numbers, rows = tables.summed([each.indices()[0] for each in found], [each.values() for each in found])
            return tables.rows_of_table(numbers, rows, found[0].shape)
        return sum(each.to_dense() if each.is_sparse else each for each in found)

    @staticmethod
    def update_on_servers(optimizer: Any) -> AbstractContextManager[None]:
        """Inside, an optimizer updates each variable on its server."""
        return _updating(optimizer)

    @staticmethod
    def is_lost(error: BaseException) -> bool:
        """Errors of torch's servers say themselves which is gone."""
        return False


class _Task:
    """A call of a program, which some worker will have computed."""

    def __init__(self, program: SentProgram, others: Any):
        self.program, self.others = program, others
        self._results: queue.Queue[Any] = queue.Queue()

    def end(self, result: Any) -> None:
        """It was computed, or failed."""
        self._results.put(result)

    def wait(self) -> tuple[Any, int]:
        """Gradients and the rest, and which worker it was."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        (gradients, rest), worker = result
        rest = leaves.mapped(lambda leaf: tensors.put(leaf, 0), rest, none_is_leaf=False)
        return ([self._gradient(*pair) for pair in zip(gradients, self.program.shapes, strict=False)], rest), worker

    @staticmethod
    def _gradient(found: Any, shape: tuple[int, ...]) -> Any:
        if not isinstance(found, dict):
            return None if found is None else tensors.put(found, 0)
        return tables.rows_of_table(tensors.put(found["numbers"], 0), tensors.put(found["rows"], 0), shape)


# ---- updates


class _Updates:
    """How the variables of an optimizer are updated on their servers.

    Args:
        optimizer: built.
    """

    def __init__(self, optimizer: Any):
        self.key = f"optimizer {next(_programs)}"
        self._sent = _facts(optimizer)
        self._home = [each for each in optimizer.variables if not isinstance(each._value, tables.ServedTensor)]
        self._parcel, self._told = parcels.packed((optimizer, self._home)), set[int]()
        self._numbers = {id(variable): number for number, variable in enumerate(optimizer._trainable_variables)}
        self._decayed: list[int] = []

    def fits(self, optimizer: Any) -> bool:
        """Whether the optimizer is still what the servers were sent."""
        return self._sent == _facts(optimizer)

    def on_chief(self) -> list[np.ndarray]:
        """Values of the variables of the optimizer that no server has."""
        return [_host(variable._value).copy() for variable in self._home]

    def decay(self, variables: Sequence[keras.Variable]) -> None:
        """Let the weights of some variables decay with the update that follows."""
        self._decayed = [self._numbers[id(variable)] for variable in variables]

    def run(self, gradients: Sequence[Any], variables: Sequence[keras.Variable], rate: Any, home: Any) -> None:
        """Update some variables; `home`: what `on_chief` was before the step."""
        parts: dict[int, tuple[list[int], list[Any]]] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            place = variable._value.place
            for number, server in enumerate(place.servers):
                numbers, of_server = parts.setdefault(server, ([], []))
                part = place.part(number, gradient)
                numbers.append(self._numbers[id(variable)])
                of_server.append(
                    {"numbers": _host(part.indices()[0]), "rows": _host(part.values())}
                    if part.is_sparse
                    else _host(part)
                )
        rate = np.asarray(keras.ops.convert_to_numpy(rate))
        waits = []
        for server, (numbers, of_server) in parts.items():
            if server not in self._told:
                tables.ask(server, "optimizer", self._parcel, optimizer=self.key)()
                self._told.add(server)
                tables.forget_with(self, self.key, [server])
            value = {"gradients": of_server, "home": home, "rate": rate}
            told = {"optimizer": self.key, "numbers": numbers, "decayed": self._decayed}
            waits.append(tables.ask(server, "update", value, **told))
        self._decayed = []
        # Nadam counts its updates, and Adafactor's slots have no variable's shape: they are here
        for found in [wait() for wait in waits]:
            for variable, before, after in zip(self._home, home, found, strict=True):
                if (before != after).any():
                    variable.assign(after)


def _facts(optimizer: Any) -> list[Any]:
    """Variables and where they are, and the numbers and texts among an optimizer's attributes, `momentum` say."""
    every = (*optimizer._trainable_variables, *optimizer.variables)
    places = [getattr(getattr(variable._value, "place", None), "key", None) for variable in every]
    settings = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
    return [[id(variable) for variable in every], places, settings]


_known: WeakKeyDictionary[Any, _Updates] = WeakKeyDictionary()
#: the methods of an optimizer that are others while a model on servers is trained
_METHODS = ("_backend_update_step", "_apply_weight_decay", "apply")


def _updates_of(optimizer: Any) -> _Updates:
    """How servers update for the optimizer as it is now; a callback may have changed it."""
    if optimizer not in _known or not _known[optimizer].fits(optimizer):
        # servers have the class's methods
        own = {name: optimizer.__dict__.pop(name) for name in _METHODS}
        try:
            _known[optimizer] = _Updates(optimizer)
        finally:
            optimizer.__dict__.update(own)
    return _known[optimizer]


@contextmanager
def _updating(optimizer: Any) -> Iterator[None]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    on_chief, decay_on_chief = _update_step(inner), inner._apply_weight_decay

    def is_joined(variable: keras.Variable) -> bool:
        """Whether a table's update is by the norms of all its rows: it is joined here."""
        return len(variable._value.place.servers) > 1 and not updates_by_element(inner)

    def decay(variables: Sequence[keras.Variable]) -> None:
        if inner.weight_decay is not None:
            chosen = [variable for variable in variables if inner._use_weight_decay(variable)]
            _updates_of(inner).decay([variable for variable in chosen if not is_joined(variable)])
            joined = [variable for variable in chosen if is_joined(variable)]
            if joined:
                decay_on_chief(joined)

    def update(gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        pairs = list(zip(gradients, variables, strict=True))
        served = [pair for pair in pairs if not is_joined(pair[1])]
        joined = [(each.to_dense() if each.is_sparse else each, one) for each, one in pairs if is_joined(one)]
        updates = _updates_of(inner)
        # before both: Nadam's product of momenta moves once in a step
        home = updates.on_chief()
        if joined:
            on_chief([each for each, _ in joined], [each for _, each in joined], rate)
        if served:
            updates.run([each for each, _ in served], [each for _, each in served], rate, home)

    def apply(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Keras's own, which adds gradients up and clips them as whole ones."""
        settings = (inner.gradient_accumulation_steps, inner.clipnorm, inner.clipvalue, inner.global_clipnorm)
        if any(each is not None for each in settings):
            gradients = [each.to_dense() if each.is_sparse else each for each in gradients]
        type(inner).apply(inner, gradients, variables)

    inner.__dict__.update(zip(_METHODS, (update, decay, apply), strict=True))
    try:
        yield
    finally:
        for name in _METHODS:
            del inner.__dict__[name]
