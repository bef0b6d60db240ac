"""The names under which a checkpoint holds the variables of a model: by path and slot, never by position.

    dense/kernel                      a weight, by its path
    dense/kernel@momentum             the slot "momentum" of the model's optimizer for it
    @optimizer/iteration              what the optimizer has beside slots
    dropout/seed_generator_state      the state of a seed generator

Paths that are taken get `#2`, `#3`, in the order in which the variables were made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from keras_flow.checkpoint.manifest import is_weight
from keras_flow.current import models
from keras_flow.current.distribution import active

if TYPE_CHECKING:
    import keras
    import numpy as np

#: how the names begin of what only a `fit` has: metrics in the middle of an epoch, and weights that callbacks keep
METRICS, CALLBACKS = OF_FIT = ("@metrics/", "@callbacks/")
#: Keras numbers layers of one class in a process: `dense`, `dense_1`
_NUMBER = re.compile(r"_\d+(?=/|$|@|#)")


def named(
    model: keras.Model, there: Iterable[str] = (), rename: Mapping[str, str] | None = None
) -> dict[str, keras.Variable]:
    """The variables that are saved: weights, states of seed generators, and those of all optimizers.

    The model's `optimizer` is built if it is not, as Keras does before it loads it. Others (a GAN's) are built by their
    first step with a part of the weights, and left out before; to load them, they are built with this part.

    Args:
        model: the model.
        there: names in a checkpoint that is to be loaded, with the slots of such optimizers.
        rename: as in `matched`.
    """
    found = _own(model)
    own = list(found.values())
    paths = {id(variable): name for name, variable in found.items()}
    for optimizer in models.optimizers_of(model):
        attribute = next(name for name, value in vars(model).items() if value is optimizer)
        if not optimizer.built:
            trained = model.trainable_variables
            if attribute != "optimizer":
                trained = _trained_by(attribute, trained, paths, list(there), rename)
            if not trained:
                continue
            with _scope_of(model):
                optimizer.build(trained)
        _add_optimizer(found, paths, own, attribute, optimizer)
    return found


def _trained_by(
    attribute: str,
    trainable: list[keras.Variable],
    paths: Mapping[int, str],
    there: list[str],
    rename: Mapping[str, str] | None,
) -> list[keras.Variable]:
    """Return the variables of which a checkpoint has slots of an optimizer; all where it has none, if it is there."""
    with_slots = {name.partition("@")[0] for name in there if f"@{attribute}." in name}
    if not with_slots:
        return trainable if any(name.startswith(f"@{attribute}/") for name in there) else []
    pairs = matched(paths.values(), [name for name in there if "@" not in name], rename)
    return [each for each in trainable if pairs.get(paths[id(each)]) in with_slots]


def weights_of(model: keras.Model) -> dict[str, keras.Variable]:
    """The weights of a model by their names: what `named` has without seed generators and optimizers."""
    weights = {id(variable) for variable in model.weights}
    return {name: variable for name, variable in _own(model).items() if id(variable) in weights}


def dtype_of(variable: keras.Variable | np.ndarray) -> str:
    """Keras's name of the dtype of a variable, or of an array."""
    import keras

    return keras.backend.standardize_dtype(variable.dtype)


def _own(model: keras.Model) -> dict[str, keras.Variable]:
    metrics = {id(variable) for variable in model.metrics_variables}
    found: dict[str, keras.Variable] = {}
    for variable in {id(variable): variable for variable in model.variables if id(variable) not in metrics}.values():
        _add(found, variable.path, variable)
    return found


def _scope_of(model: keras.Model) -> AbstractContextManager[object]:
    """Return the scope in which slots get the layouts of their variables; the one that is active where one is."""
    distribution = models.remembered(model) if active() is None else None
    return nullcontext() if distribution is None else distribution.scope()


def metrics_of(model: keras.Model) -> dict[str, keras.Variable]:
    """The variables of the model's metrics that are built, by `@metrics/` and their paths."""
    found: dict[str, keras.Variable] = {}
    for variable in model.metrics_variables:
        _add(found, f"{METRICS}{variable.path}", variable)
    return found


def metrics_are_built(model: keras.Model) -> bool:
    """Whether the metrics that a model is compiled with have their variables."""
    metrics = getattr(model, "_compile_metrics", None)
    return metrics is None or metrics.built


def _add(found: dict[str, keras.Variable], name: str, variable: keras.Variable) -> None:
    number, free = 1, name
    while free in found:
        number += 1
        free = f"{name}#{number}"
    found[free] = variable


def _add_optimizer(
    found: dict[str, keras.Variable],
    paths: Mapping[int, str],
    own: Iterable[keras.Variable],
    attribute: str,
    optimizer: keras.optimizers.Optimizer,
) -> None:
    """Name the variables of an optimizer.

    Keras names a slot by its variable's path with `_` for `/`, and the slot's name; two paths may become the same
    (`a_b/c` and `a/b_c`), and then slots are in the order of the variables.
    """
    before = "" if attribute == "optimizer" else f"{attribute}."
    flat: dict[str, list[keras.Variable]] = {}
    for variable in own:
        flat.setdefault(variable.path.replace("/", "_") + "_", []).append(variable)
    seen: Counter[str] = Counter()
    listed = _listed(optimizer)
    mine = {id(variable) for variable in own}
    for slot in {id(each): each for each in optimizer.variables if id(each) not in mine}.values():
        starts = [head for head in flat if slot.name.startswith(head)]
        if not starts:
            path, name = listed.get(id(slot), (0, ""))
            _add(found, f"{paths[path]}@{before}{name}" if path else f"@{attribute}/{slot.name}", slot)
            continue
        head = max(starts, key=len)
        references = [each for each in flat[head] if tuple(each.shape) == tuple(slot.shape)] or flat[head]
        reference = references[min(seen[slot.name], len(references) - 1)]
        seen[slot.name] += 1
        _add(found, f"{paths[id(reference)]}@{before}{slot.name[len(head) :]}", slot)


def _listed(optimizer: keras.optimizers.Optimizer) -> dict[int, tuple[int, str]]:
    """id of a slot -> id of its variable, and the name of the list in which it is at the variable's place.

    Adafactor names its factors by the variable alone, without its layer.
    """
    trained = optimizer._trainable_variables
    lists = {
        name: each for name, each in vars(optimizer).items() if isinstance(each, list) and len(each) == len(trained)
    }
    return {
        id(slot): (id(variable), name.strip("_"))
        for name, slots in lists.items()
        for slot, variable in zip(slots, trained, strict=True)
        if slot is not variable
    }


def matched(model: Iterable[str], there: Iterable[str], rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names that model and checkpoint share: name in the model -> name in the checkpoint.

    Names are equal, or equal but for the model's own name before all of them, or for the numbers that Keras gives to
    layers of one class, where these come in the same order: a notebook makes `dense_2` where the program that saved
    made `dense`.

    Args:
        model: names in the model, in order.
        there: names in the checkpoint, in order.
        rename: (name in the checkpoint, or a path before a `/`) -> the same in the model.
    """
    mine, theirs = list(model), {_renamed(name, rename or {}): name for name in there}
    # a Sequential model that is read from a file has paths without its own name
    ways = [_pairs(mine, theirs)]
    if len(ways[0]) < len(mine):
        ways.append(_pairs(mine, dict(zip(_without_model(theirs), theirs.values(), strict=True))))
        bare = _without_model(mine)
        found = _pairs(bare, theirs)
        ways.append({name: found[short] for name, short in zip(mine, bare, strict=True) if short in found})
    return max(ways, key=len)


def _without_model(names: Iterable[str]) -> list[str]:
    """Names without what comes before the first `/`, where that is the same in all weights and slots."""
    listed = list(names)
    heads = {name.partition("/")[0] for name in listed if "@" in name[1:] or is_weight(name)}
    head = f"{heads.pop()}/" if len(heads) == 1 else ""
    return [name.removeprefix(head) for name in listed]


def _pairs(names: Iterable[str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Pair names with those of `theirs`: equal ones, or by their order among names that differ only in numbers."""
    mine = list(names)
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for side, each in enumerate((mine, theirs)):
        for name in each:
            groups.setdefault(_NUMBER.sub("", name), ([], []))[side].append(name)
    found = {}
    for ours, others in groups.values():
        # as a whole: with `dense_1, dense_2` here and `dense, dense_1` there an equal name is another layer
        in_order = set(ours) != set(others) and len(ours) == len(others)
        pairs = zip(ours, others, strict=True) if in_order else ((name, name) for name in ours if name in others)
        found.update((name, theirs[other]) for name, other in pairs)
    return found


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if name == old or name.startswith((f"{old}/", f"{old}@")):
            return new + name[len(old) :]
    return name
