"""What the processes of a job tell each other beside tensors: short texts, through the key-value store of the engine.

Every process calls these functions in the same order; a number that all of them count tells the exchanges apart.
"""

from __future__ import annotations

import ast
import json
import random as python_random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow.backends.active import backend
from keras_flow.current import joining, last_call
from keras_flow.errors import FlowError, warn

if TYPE_CHECKING:
    from keras.src.random import seed_generator

#: exchanges so far, and how often they were counted anew: the same numbers in all processes
_exchanges = _begun_anew = 0
#: process 0 removes what it said so many exchanges ago: no other one is so far behind
_LAG = 1000


def exchange(text: str) -> list[str]:
    """The texts of all processes, in their order, in each. Short facts only: what all read grows with the processes.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    return json.loads(judged(text, json.dumps))


def judged(text: str, judge: Callable[[list[str]], str]) -> str:
    """What process 0 makes of the texts of all processes, in their order; the others read no more than that.

    Args:
        text: what this process says.
        judge: called in process 0, with all texts; it must not raise, or the others wait for it.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    engine, here, key = backend(), backend().world(), _next()
    if here.process_count == 1:
        return judge([text])
    last_call.enter("an exchange of facts between processes (random states, files)")
    texts = [text]
    if here.process_index != 0:
        engine.put_text(f"{key}/{here.process_index}", f":{text}")
    else:
        limit = joining.waiting_seconds()
        for index in range(1, here.process_count):
            theirs = f"{key}/{index}"
            texts.append(engine.get_text(theirs, limit)[1:])
            engine.delete_text(theirs)
    return first_says(judge(texts) if here.process_index == 0 else "")


def first_says(text: str) -> str:
    """The text of process 0, in all of them.

    Raises:
        FlowError: process 0 did not say anything within KERAS_FLOW_TIMEOUT.
    """
    engine, key = backend(), _next()
    if engine.world().process_index != 0:
        return engine.get_text(f"{key}/0", joining.waiting_seconds())[1:]
    engine.put_text(f"{key}/0", f":{text}")  # stores take an empty text for none
    engine.delete_text(f"{_key(_exchanges - _LAG)}/0")
    return text


def begin_anew(times: int) -> None:
    """Count exchanges from the start, after processes were stopped in different ones.

    Args:
        times: how often this was done before, the same in all processes.
    """
    global _exchanges, _begun_anew
    _exchanges, _begun_anew = 0, times


def agree_on(facts: Mapping[int, Any]) -> dict[int, Any]:
    """Facts by rank, of all processes; made of numbers, texts, None, tuples, lists and dicts."""
    if backend().world().process_count == 1:
        return dict(facts)
    texts = exchange(repr(dict(facts)))
    return {rank: fact for text in texts for rank, fact in ast.literal_eval(text).items()}


def require_equal(facts: Mapping[str, object], what: str) -> None:
    """Check that something is the same in all processes.

    Args:
        facts: name -> value, which has a text of its own.
        what: what the facts are about, for the error.

    Raises:
        FlowError: a fact differs between process 0 and another one.
    """
    if backend().world().process_count == 1:
        return

    def judge(texts: list[str]) -> str:
        first, *others = (json.loads(text) for text in texts)
        for index, other in enumerate(others, 1):
            differing = [name for name in first if first[name] != other.get(name)]
            pairs = ", ".join(f"{name} is {first[name]} in process 0 and {other.get(name)} in it" for name in differing)
            if pairs:
                return f"process {index} of the job has {what} of its own: {pairs}. Make them equal on all hosts."
        return ""

    wrong = judged(json.dumps({name: str(value) for name, value in facts.items()}), judge)
    if wrong:
        raise FlowError(wrong)


@dataclass(frozen=True)
class EngineRandom:
    """Random numbers of the engine's own, beside Keras's seeds.

    Attributes:
        name: whose they are, for the message.
        state: the state as a text.
        set_state: gives a state back.
    """

    name: str
    state: str
    set_state: Callable[[str], None]


def align_random_states(engine: EngineRandom | None = None) -> None:
    """Give all processes process 0's states of Python's, NumPy's, Keras's and the engine's random numbers.

    Keras draws seeds from these: unaligned, each process would shuffle, initialise and drop in its own way. Where they
    differed there is a warning.
    """
    if backend().world().process_count == 1:
        return
    states = _states()
    if engine is not None:
        states[engine.name] = engine.state
    # checksums first: states are kilobytes, and processes that were seeded alike need send none
    sums = [zlib.crc32(json.dumps(state).encode()) for state in states.values()]

    def judge(texts: list[str]) -> str:
        columns = zip(*(json.loads(text) for text in texts), strict=True)
        return json.dumps([name for name, column in zip(states, columns, strict=True) if len(set(column)) > 1])

    differ = json.loads(judged(json.dumps(sums), judge))
    if not differ:
        return
    states = json.loads(first_says(json.dumps(states)))
    _set_states(states)
    if engine is not None:
        engine.set_state(states[engine.name])
    warn(
        f"random states differed between the processes ({', '.join(differ)}): all take process 0's. Call "
        "keras.utils.set_random_seed(...) at the start of the program to choose them"
    )


def _states() -> dict[str, Any]:
    version, state, gauss = python_random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    generator = _keras_generator()
    return {
        "Python's random": [version, list(state), gauss],
        "NumPy's": [numpy_state[0], numpy_state[1].tolist(), *map(float, numpy_state[2:])],
        "Keras's seed generator": None if generator is None else [int(part) for part in np.asarray(generator.state)],
    }


def _set_states(states: dict[str, Any]) -> None:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    version, state, gauss = states["Python's random"]
    name, keys, position, has_gauss, gauss_of_numpy = states["NumPy's"]
    np.random.set_state((name, np.array(keys, np.uint32), int(position), int(has_gauss), gauss_of_numpy))
    seeds = states["Keras's seed generator"]
    if seeds is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        generator = _keras_generator()
        if generator is None:
            generator = seed_generator.SeedGenerator()
            global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)
        generator.state.assign(np.asarray(seeds, generator.state.dtype))
    # last, because making a generator draws from it
    python_random.setstate((version, tuple(state), gauss))


def _keras_generator() -> seed_generator.SeedGenerator | None:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def _next() -> str:
    """The key of the next exchange."""
    global _exchanges
    _exchanges += 1
    return _key(_exchanges)


def _key(number: int) -> str:
    return f"keras_flow/{_begun_anew}/{number}"
