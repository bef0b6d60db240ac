"""`kf.checkpoint.load`: each rank reads the rows that it holds, whatever layout the checkpoint was saved in."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow import atomic, near_names
from keras_flow.backends import random_states
from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.checkpoint import manifest, names, store
from keras_flow.checkpoint.reader import Reader
from keras_flow.checkpoint.store import Place
from keras_flow.current import models
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

#: differences that an error shows
_SHOWN = 10


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        step: the number of the checkpoint.
        extra: the `extra` that was given to `save`.
        training: epoch, batch and the like, where `fit` was running.
        bytes_read: bytes that this process has read.
        left_out: what `strict=False` left as it was, in words.
    """

    step: int
    extra: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    bytes_read: int = 0
    left_out: tuple[str, ...] = ()


def load(
    directory: str | os.PathLike[str],
    model: keras.Model,
    *,
    step: int | str = "latest",
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    check: bool = True,
) -> Loaded:
    """Load a checkpoint into a model, under whatever layout, engine and number of ranks it is used.

    All processes of a job call it. Random states are those of the checkpoint, too. Layers are found by name; where
    Keras has numbered layers of a class otherwise (`dense_2` for `dense`), by their order.

    Args:
        directory: directory of checkpoints, or one checkpoint's folder.
        model: a built model; an optimizer that it is compiled with is built.
        step: the number of a checkpoint, or `"latest"`.
        strict: everything is in both, with one shape; otherwise the rest is left as it is, and named in `left_out`.
        rename: name in the checkpoint -> name in the model, of a variable, or of what comes before a `/`.
        check: compare the hash of each chunk that is read, so that whole chunks are.

    Raises:
        FlowError: there is no such checkpoint, it is of another model, or a file is damaged. Nothing of the model has
            changed, except where a file was found damaged.

    Example:
        >>> import keras, tempfile, keras_flow as kf
        >>> ranks, folder = kf.init(4), tempfile.mkdtemp()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="out")], name="net")
        >>> saved = kf.checkpoint.save(folder, model, step=3, extra={"note": "good"})
        >>> kf.checkpoint.load(folder, model).extra
        {'note': 'good'}
    """
    where = store.at(directory)
    meeting.meet("kf.checkpoint.load")
    if step == "latest":
        there = newest(where)
        step = "latest" if there is None else there
    folder, found = manifest.read(where, step)
    return load_from(Reader(folder, found, check), model, strict, rename)


def newest(directory: Place) -> int | None:
    """Return the newest step of a directory, which process 0 looks up for all; None where there is none."""
    there: list[int] = []
    if backend().world().process_index == 0:
        if isinstance(directory, Path):  # one that was killed while two folders changed places had the newest
            atomic.remove_left_over(directory)
        there = manifest.steps(directory)
    said = agreement.first_says(str(there[-1]) if there else "")
    return int(said) if said else None


def load_from(
    reader: Reader, model: keras.Model, strict: bool = True, rename: Mapping[str, str] | None = None
) -> Loaded:
    """Do as `load` with a reader of the checkpoint."""
    what = f"the checkpoint {str(reader.folder)!r} is of another model than {model.name!r}"
    left_out = fill_model(built(model), reader, what, strict, rename)
    found = reader.manifest
    if found.random:  # another program's checkpoint has none
        random_states.set_states(found.random)
    return Loaded(found.step, found.extra, found.training, reader.bytes_read, left_out)


def fill_model(
    model: keras.Model, reader: Reader, what: str, strict: bool = True, rename: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Fill the variables of a model and of its optimizer from a checkpoint; arguments as those of `put`."""
    there = [name for name in reader.manifest.tensors if not name.startswith(names.OF_FIT)]
    return put(reader, there, names.named(model, there, rename), what, strict, rename)


def built(model: keras.Model) -> keras.Model:
    """Return the model, if it is built; otherwise raise."""
    if not models.is_built(model):
        raise FlowError(f"model {model.name!r} is not built: call it on a batch, or build it, before it is loaded")
    return model


def put(
    reader: Reader,
    there: Sequence[str],
    variables: Mapping[str, keras.Variable],
    what: str,
    strict: bool,
    rename: Mapping[str, str] | None,
) -> tuple[str, ...]:
    """Fill variables with the tensors of their names.

    Args:
        reader: reads the tensors.
        there: names of those that are wanted.
        variables: name -> variable.
        what: how the message begins where names or shapes differ.
        strict: an error where they do.
        rename: as in `load`.

    Returns:
        What was left as it is, in words.
    """
    pairs = names.matched(variables, there, rename)
    differences = _differences(reader, variables, there, pairs)
    if differences and strict:
        shown = "\n".join(f"  {text}" for text in list(differences.values())[:_SHOWN])
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise FlowError(
            f"{what}:\n{shown}{more}\n"
            "Load what fits by strict=False, or say what has another name: rename={'name in the file': 'name'}"
        )
    for name, other in pairs.items():
        if name not in differences:
            try:
                fill(variables[name], reader, other, not strict)
            except FlowError as error:
                if strict:
                    raise
                differences[name] = str(error)
    return tuple(differences.values())


def fill(variable: keras.Variable, reader: Reader, name: str, agrees: bool = False) -> None:
    """Fill a variable with a tensor, of which the part of each rank is read by itself.

    Args:
        variable: the variable.
        reader: reads the tensor.
        name: its name.
        agrees: where a process cannot read its part, all leave the variable as it is, with the same error.
    """
    dtype = manifest.numpy_dtype(names.dtype_of(variable))

    # several ranks of this process may hold the same part
    @functools.cache
    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return reader.read(name, [slice(*each) for each in bounds]).astype(dtype, copy=False)

    def part(index: Sequence[slice]) -> np.ndarray:
        return read(tuple(each.indices(n)[:2] for each, n in zip(index, variable.shape, strict=True)))

    failure, give = "", None
    try:
        give = backend().fill(variable, part)
    except FlowError as error:
        if not agrees:
            raise
        failure = str(error)
    failure = agreement.first_failure(failure) if agrees else ""
    if failure or give is None:
        raise FlowError(failure)
    give()


def _differences(
    reader: Reader, variables: Mapping[str, keras.Variable], there: Sequence[str], pairs: Mapping[str, str]
) -> dict[str, str]:
    """Return the differences of model and checkpoint, name -> text, weights before slots."""
    found: dict[str, str] = {}

    def near(name: str, others: Sequence[str]) -> str:
        """Return a hint at names that are near to one that the other side does not have; they are compared slowly."""
        alike = near_names.nearest(name, others, 2) if len(found) < _SHOWN else ()
        return f" (nearest: {', '.join(map(repr, alike))})" if alike else ""

    used, here = set(pairs.values()), "checkpoint" if reader.manifest.saved else "file"
    left = [other for other in there if other not in used]
    for name in sorted(variables, key=lambda name: "@" in name):
        if name not in pairs:
            found[name] = f"{name!r} is not in the {here}{near(name, left)}"
            continue
        tensor, shape = reader.manifest.tensors[pairs[name]], tuple(variables[name].shape)
        if tensor.shape != shape:
            found[name] = f"{name!r} has shape {list(shape)}, and {list(tensor.shape)} in the {here}"
            continue
        # the integers of quantized weights are no values of others
        dtype = names.dtype_of(variables[name])
        if ("float" in dtype) != ("float" in tensor.dtype):
            hint = "`quantize` the model before it is loaded" if "float" in dtype else "`quantize` it after loading"
            found[name] = f"{name!r} is {dtype}, and {tensor.dtype} in the {here}: {hint}"
    missing = [name for name in variables if name not in pairs]
    for name in there:
        if name not in used and name not in found:
            found[name] = f"{name!r} is in the {here} and not in the model{near(name, missing)}"
    return found
