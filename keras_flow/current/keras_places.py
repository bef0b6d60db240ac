"""Places inside Keras: this one file knows its private modules.

A place is found by what it is, asked of Keras's public objects: the class behind `keras.Model.fit`, the modules that
the function `keras.ops.conv` asks, the module in which `keras.Model.fit` is written. So a module of Keras may be
renamed or moved. A hook names its place, and `owner` finds the module or class that has the name:

    keras.Model, keras.layers.Dense    a public name: of its classes the one that defines the attribute
    keras:nn                           a place of `_PLACES`: a private module or class
    torch.distributed.tensor           a module of an engine, by its own name

What is used of Keras's private names without being wrapped is got by `private` and stands in `PRIVATE`, with the reason
that no public name does. Both are compared with tested versions in the same way (`backends/fingerprints`).

Example:
    >>> owner("keras.layers.Conv2D", "call").__name__  # where it is defined, for each kind of convolution
    'BaseConv'
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import keras

from keras_flow import settings
from keras_flow.errors import FlowError


@dataclass(frozen=True)
class Private:
    """A private name of Keras, or of an engine, that is used and not wrapped.

    Attributes:
        module: its place.
        name: its name there; empty for the place itself.
        why: what it is used for, and why no public name does.
        engine: the one on which it is used; empty for all.
    """

    module: str
    name: str
    why: str
    engine: str = ""


#: what is raised where a place, or a name at it, is missing
MISSING = (AttributeError, KeyError, StopIteration, ImportError)
#: what is used without being wrapped
PRIVATE: list[Private] = []


def _written_in(function: object) -> dict[str, Any]:
    """The names of the module in which a function is written, below hooks and other decorators."""
    return inspect.unwrap(function).__globals__  # type: ignore[arg-type]


def _module_of(function: object) -> ModuleType:
    return sys.modules[_written_in(function)["__name__"]]


def writer(cls: type, name: str) -> type:
    """The class, or base, whose package wrote a method; a program may have put its own over it.

    Args:
        cls: the class.
        name: the method: after `keras.Model.fit = timed_fit`, `fit` of `keras.Model` is the engine's trainer's.

    Returns:
        That class; where a program has put its own method in the very place of the original, the class that has it.

    Raises:
        StopIteration: no class has the name.
    """
    having = [base for base in cls.__mro__ if name in vars(base)]
    return next((base for base in having if _is_original(base, vars(base)[name])), next(iter(having)))


def _is_original(cls: type, method: object) -> bool:
    module = getattr(inspect.unwrap(method), "__module__", None) if callable(method) else None
    return module is None or module.partition(".")[0] == cls.__module__.partition(".")[0]


def _of_model(name: str) -> Callable[..., Any]:
    return vars(writer(keras.Model, name))[name]


def _backend() -> ModuleType:
    return _written_in(keras.ops.conv)["backend"]


def _operations(name: str) -> Callable[[], ModuleType]:
    """The module of the engine's functions of one kind: `backend.ops.nn`, before Keras 3.16 `backend.nn`."""
    return lambda: getattr(getattr(_backend(), "ops", _backend()), name)


def _asked_by(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Find an object by its name in a function's module."""
    return lambda: _written_in(function())[name]


def _epoch_iterator() -> type:
    """The engine's class that reads the batches of an epoch."""
    names = _written_in(_of_model("fit"))
    found = {name: value for name, value in names.items() if name.endswith("EpochIterator")}
    return next((found[name] for name in found if name != "EpochIterator"), found["EpochIterator"])


def _adapters() -> ModuleType:
    base = next(base for base in _epoch_iterator().__mro__ if "_get_iterator" in vars(base) and "reset" in vars(base))
    return _written_in(base.__init__)["data_adapters"]


def _adapter(name: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(f"{_adapters().__name__}.{name}")


def _archive() -> type:
    """The engine's class of archives; `ExportArchive` only chooses one by the format."""
    found = _written_in(keras.export.ExportArchive.write_out)
    # until Keras 3.15, and after
    return found.get("BackendSavedModelExportArchive") or found["SavedModelExportArchive"]


def _torch_optimizers(name: str = "") -> Callable[[], ModuleType]:
    """The package of torch's optimizers, or a module in it: Keras chooses a class of it as an optimizer is made."""

    def found() -> ModuleType:
        engine = next(base for base in keras.Optimizer.__mro__ if base.__name__ == "TorchOptimizer")
        return importlib.import_module(engine.__module__.rpartition(".")[0] + name)

    return found


_PLACES: dict[str, Callable[[], Any]] = {
    # engines
    "keras:backend": _backend,
    **{f"keras:{name}": _operations(name) for name in ("core", "image", "linalg", "math", "nn", "numpy")},
    "keras:random": lambda: _written_in(keras.random.normal)["backend"].random,
    "keras:rnn": lambda: _module_of(_backend().rnn) if callable(_backend().rnn) else _backend().rnn,
    "keras:engine.distribution": lambda: _backend().distribution_lib,
    "keras:trainer": lambda: _module_of(_of_model("fit")),
    "keras:EpochIterator": _epoch_iterator,
    "keras:torch_optimizers": _torch_optimizers(),
    "keras:torch_adam": _torch_optimizers(".torch_adam"),
    "keras:torch_parallel_optimizer": _torch_optimizers(".torch_parallel_optimizer"),
    # what all engines share
    "keras:AnyTrainer": lambda: writer(keras.Model, "compile"),
    "keras:KerasSaveable": lambda: keras.Loss.__mro__[1],
    "keras:AnyOptimizer": lambda: writer(keras.Optimizer, "apply"),
    "keras:AnyVariable": lambda: next(base for base in keras.Variable.__mro__ if "trainable" in vars(base)),
    "keras:variables": lambda: _module_of(_PLACES["keras:AnyVariable"]().__init__),
    # data
    "keras:adapters": _adapters,
    **{
        f"keras:{name}": _adapter(name)
        for name in (
            "array_slicing",
            "data_adapter_utils",
            "tf_dataset_adapter",
        )
    },
    # training
    "keras:compile_utils": lambda: _module_of(_written_in(_of_model("compile"))["CompileMetrics"].__init__),
    "keras:losses": lambda: _module_of(keras.Loss.__call__),
    "keras:metrics_utils": _asked_by(lambda: keras.metrics.AUC.__init__, "metrics_utils"),
    # files
    "keras:saving": lambda: _module_of(keras.saving.load_model),
    "keras:saving_lib": _asked_by(lambda: keras.saving.load_model, "saving_lib"),
    "keras:file_utils": lambda: _module_of(keras.utils.get_file),
    "keras:ExportArchive": _archive,
    "keras:io_utils": lambda: _module_of(keras.config.enable_interactive_logging),
    # states
    "keras:global_state": lambda: _module_of(keras.utils.clear_session),
    "keras:distribution": lambda: _module_of(keras.distribution.set_distribution),
    "keras:seeds": lambda: _module_of(keras.random.SeedGenerator.__init__),
    "keras:rng_utils": lambda: _module_of(keras.utils.set_random_seed),
    # the rest
    "keras:tensorflow": _asked_by(lambda: keras.utils.set_random_seed, "tf"),
    "keras:dtypes": lambda: _module_of(keras.backend.result_type),
    "keras:initializers": lambda: _module_of(keras.initializers.VarianceScaling.__init__),
    "keras:sequential": lambda: _module_of(keras.Sequential.__init__),
    "keras:masking": lambda: _module_of(
        _written_in(keras.layers.Masking.call).get("set_keras_mask") or _backend().set_keras_mask
    ),
    "keras:name_scope": lambda: _module_of(_backend().name_scope.__mro__[-2].__init__),
    "keras:python_utils": _asked_by(lambda: keras.callbacks.CallbackList.__init__, "python_utils"),
    "keras:traceback_utils": lambda: _module_of(keras.config.enable_traceback_filtering),
    "keras:tf_utils": _asked_by(lambda: keras.layers.StringLookup.__mro__[1].__init__, "tf_utils"),
}


def find(place: str) -> Any:
    """The module or class at a place.

    Raises:
        AttributeError, KeyError, StopIteration, ModuleNotFoundError: this Keras, or engine, has no such place.
    """
    if ":" in place:
        return _PLACES[place]()
    if place.partition(".")[0] != "keras":
        return importlib.import_module(place)
    found: Any = keras
    for part in place.split(".")[1:]:
        found = getattr(found, part)
    return found


def owner(place: str, name: str) -> Any:
    """The module or class at a place that has the name; of a class of Keras and its bases, the one that defines it.

    Args:
        place: where.
        name: an attribute; of a module it may be `Class.method`.

    Raises:
        AttributeError, KeyError, StopIteration, ModuleNotFoundError: it is not there.
    """
    found = find(place)
    *path, attribute = name.split(".")
    for part in path:
        found = getattr(found, part)
    if not inspect.isclass(found) or not place.startswith("keras"):
        getattr(found, attribute)
        return found
    for base in found.__mro__:
        if attribute in vars(base):
            return base
    raise AttributeError(f"{found.__name__} has no {attribute}")


def private(module: str, name: str, why: str) -> Any:
    """Return the object of a private name that is used without being wrapped, and note the reason.

    Args:
        module: its place.
        name: its name there; empty for the place itself.
        why: what it is used for.

    Raises:
        FlowError: it is not there. With KERAS_FLOW_UNTESTED=allow what is returned raises this when it is used.
    """
    PRIVATE.append(Private(module, name, why))
    try:
        return getattr(owner(module, name), name) if name else find(module)
    except MISSING as error:
        missing = FlowError(
            f"keras_flow uses {module}.{name} ({why}), which keras {keras.__version__} does not have. Use a version "
            "named in docs/versions.md, or a newer keras_flow; KERAS_FLOW_UNTESTED=allow goes on at your own risk."
        )
        if settings.allows_untested():
            return _Absent(missing)
        raise missing from error


class _Absent:
    """What this version of Keras does not have: raises its error where it is used."""

    def __init__(self, error: FlowError):
        self._error = error

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise self._error

    def __getattr__(self, name: str) -> object:
        raise self._error


#: what is wrapped when a program asks for it, after the other hooks: compared with them
WRAPPED_LATER = (
    Private("keras:EpochIterator", "_enumerate_iterator", "kf.callbacks.Checkpoint"),
    Private("keras.callbacks.CallbackList", "on_train_begin", "kf.callbacks.Checkpoint"),
)


def privates() -> tuple[Private, ...]:
    """Private names that are used, on Keras's present engine, without being wrapped, or that are wrapped later."""
    return (*(each for each in PRIVATE if each.engine in ("", keras.config.backend())), *WRAPPED_LATER)


def is_of_keras(thing: type | Callable[..., object], kind: str = "") -> bool:
    """Whether a class or a function is one of Keras's, and of a kind: `"layers"`, `"layers.preprocessing"`, `"losses"`.

    The folder of Keras says the kind.
    """
    return f"{thing.__module__}.".startswith(f"keras.src.{kind}." if kind else "keras.")


def explained(
    error: Exception, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> Exception:
    """Return an error of a function in Keras's words, with the arguments of the call.

    Args:
        error: what the function raised.
        function: the function.
        args: its arguments.
        kwargs: the same by name.
        name: what Keras calls it.
    """
    module = find("keras:traceback_utils")
    if hasattr(module, "inject_argument_info_in_error"):  # since Keras 3.16
        return module.inject_argument_info_in_error(error, function, args, kwargs, name)

    @functools.wraps(function)
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    try:
        module.inject_argument_info_in_traceback(fails, name)(*args, **kwargs)
    except Exception as worded:
        return worded
    return error


@contextlib.contextmanager
def tensorflow_unasked() -> Iterator[None]:
    """Let Keras not load TensorFlow inside, to ask whether a value is of one of its types.

    Where it is not loaded no value is. Loading it takes seconds and some 400 MB.
    """
    before = tensorflow._available
    if before is None and tensorflow.name not in sys.modules:
        tensorflow._available = False
    try:
        yield
    finally:
        tensorflow._available = before


class _EngineModule:
    """Functions of a module that engines have, and that keras_flow calls: those that are listed, found as Keras would.

    Args:
        engine: the one for which they are called.
        place: the module.
        names: name -> what it is used for.
    """

    def __init__(self, engine: str, place: str, names: dict[str, str]):
        self._place, self._names = place, names
        PRIVATE.extend(Private(place, name, why, engine) for name, why in names.items())

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"{self._place}.{name} is not in the list of what keras_flow uses of it")
        # not kept: a hook may be put there
        return getattr(find(self._place), name)


# ---- what is used of Keras's private names, on every engine

_ITSELF = "Keras asks itself so"
_MASK = "masks travel as attributes of tensors"

KerasDistribution = private("keras:distribution", "Distribution", "the base class of ours; Keras does not export it")
current_distribution = private("keras:distribution", "distribution", "which one is active is asked by every hook")
lay_outputs = private("keras:distribution", "distribute_tensor", "a layer's outputs get their layout as in Keras")
compute_output_spec = private("keras:backend", "compute_output_spec", "shapes of a function's results")
in_stateless_scope = private("keras:backend", "in_stateless_scope", _ITSELF)
get_stateless_scope = private("keras:backend", "get_stateless_scope", _ITSELF)
in_symbolic_scope = private("keras:backend", "in_symbolic_scope", f"{_ITSELF}; inference of shapes draws nothing")
get_autocast_scope = private("keras:variables", "get_autocast_scope", _ITSELF)
is_float_dtype = private("keras:variables", "is_float_dtype", _ITSELF)
standardize_data_format = private("keras:backend", "standardize_data_format", "functions of an engine take None")
BIT64_TO_BIT32_DTYPE: dict[str, str] = private("keras:dtypes", "BIT64_TO_BIT32_DTYPE", "Keras has no setting for it")
get_keras_mask = private("keras:masking", "get_keras_mask", _MASK)
set_keras_mask = private("keras:masking", "set_keras_mask", _MASK)
current_path = private("keras:name_scope", "current_path", "the path of a layer that is called")
private("keras:traceback_utils", "", "an error of a layer that is called the short way, in Keras's words")
is_default = private("keras:python_utils", "is_default", "whether a method of a base class was overridden")
get_global_attribute = private("keras:global_state", "get_global_attribute", "scopes and generators that Keras keeps")
set_global_attribute = private("keras:global_state", "set_global_attribute", "a generator that is taken back")
draw_seed = private("keras:seeds", "draw_seed", "the words of a seed, as Keras's own draws take them")
GLOBAL_SEED_GENERATOR: str = private("keras:seeds", "GLOBAL_SEED_GENERATOR", "by this name Keras keeps its generator")
GLOBAL_RANDOM_SEED: str = private("keras:rng_utils", "GLOBAL_RANDOM_SEED", "by this name Keras keeps the seed")
get_random_seed = private("keras:rng_utils", "get_random_seed", "the seed of `set_random_seed` has no public name")
safe_get_h5_dataset = private("keras:saving_lib", "safe_get_h5_dataset", "an entry is checked as Keras checks it")
Functional = private("keras:sequential", "Functional", "a model whose graph says which layers it calls")
KerasSaveable = private("keras:KerasSaveable", "", "the base of layers, metrics, losses and optimizers")
Trainer = private("keras:AnyTrainer", "", "what has `compile`, in whatever class a model is")
file_utils = private("keras:file_utils", "", "the folder of a callback may be in a store")
ask_to_overwrite = private("keras:io_utils", "ask_to_proceed_with_overwrite", "`save` asks once")
array_slicing = private("keras:array_slicing", "", "arrays of any kind are sliced as Keras slices them")
data_adapter_utils = private("keras:data_adapter_utils", "", "how many batches Keras reads to learn of shapes")
squeeze_or_expand_to_same_rank = private("keras:losses", "squeeze_or_expand_to_same_rank", "weights as Keras has them")
tensorflow = private("keras:tensorflow", "", "TensorFlow beside other engines, loaded when it is used")

# ---- ... and on one engine

_WITH_SEED = "the words of a seed, as this engine takes them"
engine_core = _EngineModule(
    "torch",
    "keras:core",
    {
        "get_device": "the device that Keras computes on has no public name",
        "to_torch_dtype": "torch's dtype of a name",
        "convert_to_tensor": "without the scope of `keras.ops`",
        "convert_to_numpy": "without the scope of `keras.ops`",
    },
)
engine_numpy = _EngineModule("torch", "keras:numpy", {"divide_no_nan": "as Keras's losses divide"})
engine_nn = _EngineModule(
    "tensorflow", "keras:nn", {name: "below the hook on it" for name in ("conv", "depthwise_conv")}
)
tensorflow_random = _EngineModule(
    "tensorflow",
    "keras:random",
    {"_cast_seed": _WITH_SEED, "_get_concrete_noise_shape": "noise as Keras shapes it", "draw_seed": _WITH_SEED},
)
torch_optimizers = _EngineModule("torch", "keras:torch_adam", {"Adam": "whose formula is the fused kernel's"})
