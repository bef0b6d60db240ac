"""What Keras 3.13 and 3.14 have otherwise than 3.15, all in one place: deleted when their support ends.

Variables have no `_layout` but on JAX, and there it is the engine's sharding instead of the layout that a distribution
gave. Initialisers take no axes, and batches on JAX no None. Keras 3.13 looks into weights files by another method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras import initializers, tree
from keras.src.initializers.random_initializers import compute_fans
from keras.src.saving import saving_lib
from keras.src.version import __version__
from packaging.version import Version

from keras_flow.backends.hooking import Hook, always
from keras_flow.current.distribution import Distribution
from keras_flow.current.variable_layout import KerasLayout, keras_layout

if TYPE_CHECKING:
    import keras

#: whether variables of the Keras that is installed keep the layout that they are given
KEEPS_LAYOUTS = Version(__version__) >= Version("3.15")


def hooks() -> tuple[Hook, ...]:
    """The hooks of every engine; none where Keras needs none."""
    if KEEPS_LAYOUTS:
        return ()
    return (
        Hook(
            "keras.src.backend.common.variables",
            "Variable.__init__",
            _keep_layout,
            "slots get the layout of their variable; before 3.15 only variables on JAX have one",
            when=always,  # keeps what optimizers hand on, and changes nothing else
        ),
    )


def jax_hooks() -> tuple[Hook, ...]:
    """The hooks of JAX, which wrap Keras before all others do."""
    if KEEPS_LAYOUTS:
        return ()
    core = "keras.src.backend.jax.core"
    return (
        Hook(
            core,
            "JaxVariable._initialize_layout",
            _ask_for_layout,
            "a variable would keep the engine's sharding, which says nothing of rule, placement and distribution",
        ),
        Hook(
            core,
            "JaxVariable._initialize_with_initializer",
            _initialize_by_sharding,
            "hands `variable._layout` to jax.jit, which takes the engine's sharding only",
            when=_given_layout,
        ),
        Hook(
            "keras.src.backend.jax.trainer",
            "_distribute_data",
            _distribute_data,
            "asks None, which a batch without targets or weights may have, for its shape",
        ),
        Hook(
            "keras.src.backend.jax.trainer",
            "JAXEpochIterator._get_distributed_iterator",
            _distributed_iterator,
            "the same, once for an epoch",
        ),
    )


def _keep_layout(
    _: object, original: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    # JAX's variables take it out of the arguments and have set it
    variable._layout = kwargs.get("layout", getattr(variable, "_layout", None))
    original(variable, *args, **kwargs)


def _given_layout(variable: object, *args: object) -> KerasLayout | None:
    return keras_layout(variable)  # of one rank, too


def _ask_for_layout(distribution: Distribution, original: Callable[..., None], variable: keras.Variable) -> None:
    if variable._layout is None:
        variable._layout = distribution.get_variable_layout(variable)


def _initialize_by_sharding(
    layout: KerasLayout, original: Callable[..., None], variable: keras.Variable, initializer: object
) -> None:
    variable._layout = layout.backend_layout
    try:
        original(variable, initializer)
    finally:
        variable._layout = layout


def _distribute_data(
    distribution: Distribution, original: Callable[..., object], data: object, layouts: object = None
) -> object:
    def layout(leaf: Any) -> object:
        return None if leaf is None else distribution.get_data_layout(leaf.shape)

    return original(data, tree.map_structure(layout, data) if layouts is None else layouts)


def _distributed_iterator(
    distribution: Distribution, original: Callable[..., object], iterator: Any, *args: object
) -> Iterator[object]:
    from keras.src.backend.jax import trainer

    for batch in iterator.data_adapter.get_jax_iterator():
        yield trainer._distribute_data(batch)


def fans(initializer: initializers.VarianceScaling, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a unit, by which an initialiser scales; which axes they are can be said since 3.15."""
    axes = {name: getattr(initializer, name) for name in ("input_axes", "output_axes") if hasattr(initializer, name)}
    return compute_fans(shape, **axes)


def h5_dataset(store: Any, key: str) -> Any:
    """An entry of an open weights file, checked as Keras checks it."""
    checked = getattr(saving_lib, "safe_get_h5_dataset", None)  # since Keras 3.14
    return checked(store._h5_entry_group, key) if checked else store._verify_dataset(store._h5_entry_group[key])
