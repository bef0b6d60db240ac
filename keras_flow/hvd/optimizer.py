"""`DistributedOptimizer`: an optimizer of Keras whose `apply` takes the mean of the ranks' gradients first.

It is a class made from the optimizer's own, as in Horovod, so that Keras, its loss scale and its files see an SGD or
an Adam. Gradients of one dtype travel joined, 64 MiB at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.installing import install
from keras_flow.comm.distributed_data_parallel import buckets
from keras_flow.comm.group import parts_of, shape_of
from keras_flow.current.distribution import active
from keras_flow.current.models import with_inner
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks
from keras_flow.hvd.collectives import Average, AverageOfPresent, Sum, checked_op, reduced
from keras_flow.hvd.compression import Compression
from keras_flow.hvd.ranks import ProcessSet, global_process_set

#: bytes of gradients that travel together, Horovod's HOROVOD_FUSION_THRESHOLD
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Settings:
    """The arguments of a `DistributedOptimizer`."""

    op: str
    compression: Any
    passes: int
    averages_passes: bool
    predivide: float
    groups: int | Sequence[Sequence[keras.Variable]] | None
    process_set: ProcessSet
    local: frozenset[int] = frozenset()
    scales_local: bool = True
    #: id of a variable -> the sum of its gradients so far; Keras would track an attribute of the optimizer
    sums: dict[int, keras.Variable] = field(default_factory=dict)
    #: id of each variable that had a gradient in a pass: where a later pass has none, the sum still counts
    reached: set[int] = field(default_factory=set)


class DistributedMethods:
    """Methods that the class of a distributed optimizer has beside those of its optimizer."""

    #: tells the engines that a step waits for other processes inside
    keras_flow_calls_in_step = True
    _hvd: _Settings

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer sets this of what it is wrapped around, as compile does under "mixed_float16". Around this
        # optimizer each rank would look at its own gradients, and one that overflows would leave the others waiting.
        if name == "loss_scale_factor" and value is None and hasattr(self, "_hvd"):
            raise FlowError(
                'a LossScaleOptimizer around hvd.DistributedOptimizer (compile adds one under "mixed_float16"): the '
                "loss scale goes inside: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make slots, and sums of gradients where several passes are one step."""
        if getattr(self, "built", False):
            return
        super().build(variables)  # type: ignore[misc]
        _refuse_distributions(variables)
        if self._hvd.passes > 1:
            add: Any = self.add_variable_from_reference  # type: ignore[attr-defined]
            self._hvd.sums.update({id(each): add(each, name="hvd_sum") for each in variables})

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        """Update weights by the reduced gradients."""
        if not self.built and trainable_variables is not None:  # type: ignore[attr-defined]
            self.build(list(trainable_variables))
        variables = self._known() if trainable_variables is None else list(trainable_variables)
        base: Any = super()
        if self._hvd.passes == 1:
            base.apply(self._reduced(list(grads), variables), variables)
            return
        sums = [self._hvd.sums[id(each)] for each in variables]
        ops = keras.ops
        totals: list[Any] = []
        for variable, kept, new in zip(variables, sums, grads, strict=True):
            if new is not None:
                self._hvd.reached.add(id(variable))
                totals.append(ops.add(kept, backend().dense(new)))
            else:
                totals.append(kept.value if id(variable) in self._hvd.reached else None)
        is_due = ops.equal((self.iterations + 1) % self._hvd.passes, 0)  # type: ignore[attr-defined]
        gradients = self._reduced(totals, variables, is_due)
        if self._hvd.averages_passes:
            gradients = [None if each is None else each / self._hvd.passes for each in gradients]
        others = {id(each) for each in (*sums, self.iterations)}  # type: ignore[attr-defined]
        moved = [each for each in (*variables, *self.variables) if id(each) not in others]  # type: ignore[attr-defined]
        before = [ops.copy(each.value) for each in moved]
        base.apply(gradients, variables)
        for variable, value in zip(moved, before, strict=True):
            variable.assign(ops.where(is_due, variable.value, value))
        for kept, total in zip(sums, totals, strict=True):
            if total is not None:
                kept.assign(ops.where(is_due, ops.zeros_like(total), total))

    def save_own_variables(self, store: Any) -> None:
        """Save what the optimizer has without hvd, so that a file is one of stock Keras."""
        for number, variable in enumerate(self._saved()):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` wrote."""
        saved = self._saved()
        if len(store.keys()) != len(saved):
            super().load_own_variables(store)  # type: ignore[misc]  # which warns
            return
        for number, variable in enumerate(saved):
            variable.assign(store[str(number)])

    def _saved(self) -> list[Any]:
        sums = {id(each) for each in self._hvd.sums.values()}
        return [each for each in self.variables if id(each) not in sums]  # type: ignore[attr-defined]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return new values, on JAX; a loss scale looks whether the reduced gradients are finite."""
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            grads = self._reduced(list(grads), self._known())
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all ranks' gradients are finite, for a loss scale: those of local layers are each rank's own."""
        is_finite = super().check_finite(grads)  # type: ignore[misc]
        if not self._hvd.local or self._hvd.process_set.size() == 1:
            return is_finite
        # a sum, which ranks in `join` serve: that of the ranks that overflow
        overflows = keras.ops.cast(keras.ops.logical_not(is_finite), "int32")
        total = backend().call_in_step(lambda values: [reduced(values[0], Sum, self._hvd.process_set)], [overflows])[0]
        return keras.ops.equal(total, 0)

    def _known(self) -> list[keras.Variable]:
        """The variables that the optimizer was built for."""
        return self._trainable_variables  # type: ignore[attr-defined]

    def _reduced(self, gradients: list[Any], variables: Sequence[keras.Variable], is_due: Any = None) -> list[Any]:
        """Gradients reduced over the ranks.

        Args:
            gradients: this rank's gradients; None where a weight has none.
            variables: the weights that they belong to.
            is_due: a boolean tensor: whether this pass is one that reduces; None: it is.
        """
        _refuse_distributions(variables)
        settings, count = self._hvd, self._hvd.process_set.size()
        found: list[Any] = [None if each is None else backend().dense(each) for each in gradients]
        sent = [
            place for place, each in enumerate(found) if each is not None and id(variables[place]) not in settings.local
        ]
        if settings.scales_local:
            for place, each in enumerate(found):
                if each is not None and id(variables[place]) in settings.local:
                    found[place] = each / count
        if not sent or count == 1:
            return found
        packed = {place: settings.compression.compress(found[place] / settings.predivide) for place in sent}
        # Average: before / f, after * f / n; here the mean divides by n
        after = settings.predivide
        bundles = self._bundles(sent, [packed[place][0] for place in sent], variables)
        ops = keras.ops
        flat = [ops.concatenate([ops.reshape(packed[place][0], (-1,)) for place in bundle]) for bundle in bundles]
        if is_due is None:
            results = backend().call_in_step(self._exchange, flat)
        else:
            due = ops.cast(is_due, "int32")
            results = backend().call_in_step(
                lambda values: [values[0], *(self._exchange(values[1:]) if int(values[0]) else values[1:])],
                [due, *flat],
            )[1:]
        for bundle, joined in zip(bundles, results, strict=True):
            parts = parts_of(joined, [shape_of(packed[place][0]) for place in bundle])
            for place, part in zip(bundle, parts, strict=True):
                found[place] = settings.compression.decompress(part, packed[place][1]) * after
        return found

    def _exchange(self, values: list[Any]) -> list[Any]:
        factors = (1.0 / self._hvd.predivide, self._hvd.predivide)
        return [reduced(each, self._hvd.op, self._hvd.process_set, factors) for each in values]

    def _bundles(self, places: list[int], values: list[Any], variables: Sequence[keras.Variable]) -> list[list[int]]:
        """Places of gradients that travel joined: as `groups` says, of one dtype, up to 64 MiB."""
        groups, owned = self._hvd.groups, dict[int, list[int]]()
        named = {} if groups is None or isinstance(groups, int) else groups
        owners = {id(each): number for number, group in enumerate(named) for each in group}
        for at, place in enumerate(places):
            owner = 0 if groups is None else owners.get(id(variables[place]), -1 - place)
            owned.setdefault(at * groups // len(places) if isinstance(groups, int) else owner, []).append(at)
        return [
            [places[own[at]] for at in bundle]
            for own in owned.values()
            for bundle in buckets([values[at] for at in own], BUCKET_BYTES)
        ]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[keras.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> keras.optimizers.Optimizer:
    """An optimizer like the given one, which takes the mean (or sum) of the ranks' gradients before it updates.

    Every rank's mean counts alike, whatever its number of rows.

    Args:
        optimizer: an optimizer of Keras. One that was used already keeps its slots, and is changed itself.
        name: the name of the new optimizer.
        device_dense, device_sparse: not needed.
        compression: `hvd.Compression.fp16` halves what travels.
        sparse_as_dense: gradients always travel dense.
        gradient_predivide_factor: the mean divides by this before the sum, and by the rest after it.
        op: `hvd.Average`, `hvd.Sum` or `hvd.AverageOfPresent`.
        backward_passes_per_step: so many batches are one update; their gradients are added up.
        average_aggregated_gradients: take the mean of those gradients, not the sum.
        groups: how many bundles of gradients travel, or lists of variables that travel together.
        process_set: the ranks that take part.

    Raises:
        FlowError: it is distributed already, or an argument is not legal.

    Example:
        >>> import keras, keras_flow.hvd as hvd
        >>> hvd.init()
        >>> type(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))).__name__
        'SGD'
    """
    here = "hvd.DistributedOptimizer"
    ranks.rank()  # which asks for hvd.init()
    _refuse_distributions(())
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise FlowError(f"{here} takes an optimizer of Keras; got {optimizer!r}")
    if isinstance(optimizer, DistributedMethods):
        raise FlowError(f"{here}: the optimizer is distributed already; wrap it once")
    op, passes, predivide = checked_op(op, None), backward_passes_per_step, gradient_predivide_factor
    if op not in (Average, Sum, AverageOfPresent):
        raise FlowError(f"{here}: op is hvd.Average, hvd.Sum or hvd.AverageOfPresent, not {op!r}")
    if not isinstance(passes, int) or passes < 1:
        raise FlowError(f"{here}: backward_passes_per_step={passes!r}; legal is a whole number of at least 1")
    if passes > 1 and (optimizer.built or isinstance(optimizer, keras.optimizers.LossScaleOptimizer)):
        raise FlowError(
            f"{here}: backward_passes_per_step > 1 is for an optimizer that was not used yet and has no loss scale"
        )
    if passes > 1 and optimizer.gradient_accumulation_steps:
        raise FlowError(
            f"{here}: give backward_passes_per_step or the optimizer's gradient_accumulation_steps, not both"
        )
    if predivide != 1.0 and op == Sum:
        raise FlowError(f"{here}: gradient_predivide_factor is for op=hvd.Average")
    if not predivide > 0:
        raise FlowError(f"{here}: gradient_predivide_factor={predivide!r}; legal is a number above 0")
    if isinstance(groups, int) and groups < 1:
        raise FlowError(f"{here}: groups={groups}; legal is a whole number of at least 1, or lists of variables")
    install(backend())
    kind: Any = type(optimizer)
    made = _class_of(kind)
    if optimizer.built:
        optimizer.__class__ = made
        found: Any = optimizer
    else:
        config = dict(optimizer.get_config())
        found = made.from_config({**config, "name": name} if name else config)
        # what no config has, such as weights that do not decay
        for source, target in zip(with_inner(optimizer), with_inner(found), strict=True):
            for attribute in vars(source).keys() - vars(target).keys():
                setattr(target, attribute, getattr(source, attribute))
    found._hvd = _Settings(op, compression, passes, average_aggregated_gradients, predivide, groups, process_set)
    return found


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *args: Any,
    local_layers: Sequence[keras.Layer] | keras.Layer = (),
    scale_local_gradients: bool = True,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """`DistributedOptimizer`, but for the weights of some layers, which each rank trains for itself.

    Args:
        optimizer: an optimizer of Keras, as `DistributedOptimizer` takes it.
        args: the further arguments of `DistributedOptimizer`, in their order.
        local_layers: built layers whose gradients stay on their rank.
        scale_local_gradients: divide these by the number of ranks.
        options: further arguments of `DistributedOptimizer`, by name.
    """
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers)
    if unbuilt := [layer.name for layer in layers if not layer.built]:
        raise FlowError(f"hvd.PartialDistributedOptimizer: layers {unbuilt} are not built; call the model once before")
    local = frozenset(id(weight) for layer in layers for weight in layer.trainable_weights)
    found = DistributedOptimizer(optimizer, *args, **options)
    found._hvd = replace(found._hvd, local=local, scales_local=scale_local_gradients)
    return found


@functools.cache
def _class_of(kind: Any) -> Any:
    """The class of a distributed optimizer; files name the one that it is made of, so that Keras alone reads them."""
    return type(kind.__name__, (DistributedMethods, kind), {"__module__": kind.__module__})


def _refuse_distributions(variables: Sequence[keras.Variable]) -> None:
    if active() is not None or any(keras_layout(each) is not None for each in variables):
        raise FlowError(
            "keras_flow.hvd and a distribution in one program: under kf.DataParallel gradients are those of the batch "
            "of all ranks already. Leave out hvd.DistributedOptimizer, or the distribution's scope"
        )
