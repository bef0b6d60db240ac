"""Random states of the processes of a job: all have process 0's, so that a program needs no seed.

Keras draws seeds of layers and weights from Python's generator, shuffles arrays by NumPy's, torch's or TensorFlow's,
and a `tf.data` shuffle or a DataLoader without a seed draws from TensorFlow's or torch's, whatever the engine is.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.engines import ENGINES
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.errors import FlowError, warn

if TYPE_CHECKING:
    import keras

    from keras_flow.placements import Placement

_SEED, _TENSORFLOW = "keras.utils.set_random_seed", "TensorFlow's"
_PLACEMENT = "the placement"
_OF_DEVICE = "torch's on its device"
#: the seed that TensorFlow takes where only an operation has one (`random_seed.DEFAULT_GRAPH_SEED`): `shuffle(seed=3)`
#: orders rows alike with it and without any
_WITHOUT_SEED = 87654321


def align(begins: bool = False, placement: Placement | None = None) -> None:
    """Give all processes process 0's random states: Python's, NumPy's, Keras's, and those of loaded engines.

    Unaligned, each process would shuffle, initialise and drop in its own way.

    Args:
        begins: the program begins (`kf.init`), and who gave no seed is told nothing. Later, or where the processes
            called `set_random_seed` with different numbers, there is a warning.
        placement: one that must be the same in all processes, where an engine makes its groups together.

    Raises:
        FlowError: the processes have different placements.
    """
    if tensor_engine().world().process_count == 1:
        return
    meeting.enter("kf.init()" if begins else "entering the scope of a distribution")
    mine = states()
    # checksums first: states are kilobytes, and processes that were seeded alike need send none
    sums = {name: zlib.crc32(json.dumps(state).encode()) for name, state in mine.items()}
    unlike = agreement.differing(sums if placement is None else {**sums, _PLACEMENT: str(placement)})
    if _PLACEMENT in unlike:
        said = agreement.exchange(str(placement))
        each = "; ".join(f"process {number}: {text}" for number, text in enumerate(said[:8]))
        raise FlowError(
            f"the processes enter the scopes of distributions of different placements ({each}"
            f"{'; ...' if len(said) > 8 else ''}): every process enters the scope of the same one. For trainings that "
            "know nothing of each other start a job for each"
        )
    if not unlike:
        _seed_tensorflow(mine)
        return
    others = [json.loads(text) for text in agreement.exchange(json.dumps(sums))]
    names = [name for name in sums if len({other.get(name) for other in others}) > 1]
    first = json.loads(agreement.first_says(json.dumps(mine)))
    set_states(first)
    names = [name for name in names if name != _TENSORFLOW]
    if names and (not begins or _SEED in names):
        warn(
            f"random states differed between the processes ({', '.join(names)}): all take process 0's. Call "
            "keras.utils.set_random_seed(...) at the start of the program, in all processes with one number, to "
            "choose them"
        )


@contextmanager
def unchanged() -> Iterator[None]:
    """Draw inside, and go on afterwards as if nothing had been drawn: the other processes do not draw it."""
    before = states()
    try:
        yield
    finally:
        after = states()
        if all(after.get(name) == before.get(name) for name in (_SEED, "Keras's seed generator")):
            before.pop(_SEED, None)  # a variable is left alone
        if any(after.get(name) != state for name, state in before.items()):
            set_states(before)


def states() -> dict[str, Any]:
    """Name -> state, as JSON has it, of the generators that this process has loaded."""
    version, state, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "Python's random": [version, list(state), gauss],
        "NumPy's": [numpy_state[0], numpy_state[1].tolist(), *map(float, numpy_state[2:])],
    }
    if "keras" in sys.modules:
        generator = _keras_generator()
        found[_SEED] = _keras_seed()
        found["Keras's seed generator"] = (
            None if generator is None else [int(part) for part in np.asarray(generator.state)]
        )
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch's"] = _as_text(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found[_OF_DEVICE] = _as_text(torch.cuda.get_rng_state())
    if "tensorflow.python.eager.context" in sys.modules:
        # without a seed each of TensorFlow's shuffles has one from the hardware: one that follows from Python's state
        seed = _tensorflow_seed()
        found[_TENSORFLOW] = [seed, zlib.crc32(repr(random.getstate()).encode()) if seed is None else 0]
    return found


def set_states(given: Mapping[str, Any], loads: bool = False) -> None:
    """Give generators the states that `states` returned, here or elsewhere.

    Args:
        given: what it returned.
        loads: load what a program has seeded there; else what is not loaded here is left out.
    """
    for name, engine in (("torch's", ENGINES["torch"]), (_TENSORFLOW, ENGINES["tensorflow"])) if loads else ():
        if given.get(name, [None])[0] is not None:
            importlib.import_module(engine.module)
    here = states()
    _set_states({name: state for name, state in given.items() if name in here})


def _set_states(states: dict[str, Any]) -> None:
    name, keys, position, has_gauss, gauss_of_numpy = states["NumPy's"]
    np.random.set_state((name, np.array(keys, np.uint32), int(position), int(has_gauss), gauss_of_numpy))
    if _SEED in states:
        _set_keras_states(states[_SEED], states["Keras's seed generator"])
    if "torch's" in states:
        torch = sys.modules["torch"]
        torch.set_rng_state(_from_text(states["torch's"]))
        if _OF_DEVICE in states:
            torch.cuda.set_rng_state(_from_text(states[_OF_DEVICE]))
    _seed_tensorflow(states)
    # last, because making a generator of Keras's draws from it
    version, state, gauss = states["Python's random"]
    random.setstate((version, tuple(state), gauss))


def _as_text(state: Any) -> str:
    """A tensor of torch, which a job on another engine may not have, as text."""
    return state.numpy().tobytes().hex()


def _from_text(text: str) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def _set_keras_states(seed: int | None, generator_state: list[int] | None) -> None:
    from keras_flow.current import keras_places  # loads Keras

    if seed != _keras_seed():  # `row_order` counts epochs under the object that is there
        keras_places.set_global_attribute(keras_places.GLOBAL_RANDOM_SEED, seed)
    if generator_state is None:
        keras_places.set_global_attribute(keras_places.GLOBAL_SEED_GENERATOR, None)
        return
    generator = _keras_generator()
    if generator is None:
        generator = sys.modules["keras"].random.SeedGenerator()
        keras_places.set_global_attribute(keras_places.GLOBAL_SEED_GENERATOR, generator)
    generator.state.assign(np.asarray(generator_state, generator.state.dtype))


def _keras_generator() -> keras.random.SeedGenerator | None:
    from keras_flow.current import keras_places  # loads Keras

    return keras_places.get_global_attribute(keras_places.GLOBAL_SEED_GENERATOR)


def _keras_seed() -> int | None:
    from keras_flow.current import keras_places  # loads Keras

    return keras_places.get_global_attribute(keras_places.GLOBAL_RANDOM_SEED)


def _tensorflow_seed() -> int | None:
    # private: TensorFlow has no public name for the number of `tf.random.set_seed` (checked with 2.21)
    return sys.modules["tensorflow.python.eager.context"].global_seed()


def _seed_tensorflow(states: dict[str, Any]) -> None:
    """Give TensorFlow its seed; where it has none, one by which only draws without a seed change."""
    if _TENSORFLOW not in states:
        return
    seed, drawn = states[_TENSORFLOW]
    if seed is None:
        if _tensorflow_seed() is not None:
            return
        seed = _WITHOUT_SEED
    elif _tensorflow_seed() == seed:
        return
    sys.modules["tensorflow"].random.set_seed(seed)
    if drawn:  # private: the generator of seeds for operations without one, which a public seed would fix for every run
        sys.modules["tensorflow.python.eager.context"].context()._rng.seed(drawn)
