"""Model parallel: variables are split by rules. With batch axes beside, rows are also split (hybrid parallel)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import keras

from keras_flow import sbp
from keras_flow.backends.keras_distribution import placement_of
from keras_flow.distributions.ranks import require_placement
from keras_flow.distributions.rules import LayoutMapRules, PatternRules
from keras_flow.errors import FlowError, warn
from keras_flow.parallel.tools import ExplainedDistribution
from keras_flow.placements import Placement

LayoutMapMaker = Callable[[keras.distribution.DeviceMesh], keras.distribution.LayoutMap]


class ModelParallel(ExplainedDistribution):
    """Variables split as rules say, the batch split over the batch axes; the engine inserts the communication.

    Args:
        placement: the ranks. None takes the mesh of a LayoutMap given as `rules`. A `keras.distribution.DeviceMesh`
            gives its ranks, a `keras.distribution.ModelParallel` its ranks, LayoutMap and axis of the batch.
        rules: ordered mapping of regular expressions, searched in `variable.path`, first match wins, to nd_sbp; or a
            `keras.distribution.LayoutMap`, with Keras's own matching; or a function that makes a LayoutMap for a
            `keras.distribution.DeviceMesh`, as KerasHub's `Backbone.get_layout_map`, which is given the placement's.
        activations: the same over layer paths, for layer outputs.
        batch_axes: name, or names, of the axes that split the batch. The default is `"data"`. In a placement without
            this axis it is the first of several axes if `rules` are a LayoutMap, as in Keras; otherwise no axis, and
            every rank sees the whole batch.
        strict: make a split that does not divide an error instead of a broadcast with a warning.
        random: `"logical"` (the default) or `"stock"`, as for `kf.DataParallel`.
        verify: `"first_batch"` proves on the first batch of a model's first `fit` that a step has the numbers of one
            device.
        zero: what is split over the ranks of the batch besides: 1: the optimizer's slots (momentums, averages,
            accumulated gradients); 2: gradients too, each as soon as it is known; 3: weights too, each gathered where
            it is used. The numbers stay those of one device; memory and bytes: docs/memory.md.
        zero_axes: the axes of the batch over which they are split; None takes all of them.
        zero_min_size: elements that a rank's part of a slot has at least; what is smaller stays whole.
        remat: layers whose inner results are not held for the backward pass but computed again: `"block"` for the
            repeated blocks of a model (as those of a transformer), or regular expressions of layer paths. The numbers
            stay the same, dropout too; memory and time: docs/memory.md.

    Raises:
        FlowError: unknown axes, ranks that do not exist, no placement.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        >>> with kf.ModelParallel(placement, rules={"up/kernel": {"model": kf.sbp.split(1)}}).scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="up")])
        >>> kf.sbp.text(kf.layout_of(model.layers[0].kernel).layout.nd_sbp)  # rank 0 has 4 of the 8 columns
        'B,S(1)'
    """

    def __init__(
        self,
        placement: Placement | keras.distribution.DeviceMesh | keras.distribution.ModelParallel | None = None,
        *,
        rules: Mapping[str, sbp.SbpSpec] | keras.distribution.LayoutMap | LayoutMapMaker | None = None,
        activations: Mapping[str, sbp.SbpSpec] | None = None,
        batch_axes: str | Sequence[str] = "data",
        strict: bool = False,
        random: str | None = None,
        verify: str | None = None,
        zero: int = 0,
        zero_axes: str | Sequence[str] | None = None,
        zero_min_size: int = 1024,
        remat: str | Sequence[str] | None = None,
    ):
        given = placement.device_mesh if isinstance(placement, keras.distribution.ModelParallel) else placement
        if isinstance(placement, keras.distribution.ModelParallel):
            rules = placement._layout_map if rules is None else rules  # private, and no public name has it
            # None is the default of Keras's base class, where ModelParallel takes the mesh's first axis
            batch_axes = cast("str", placement.batch_dim_name) if batch_axes == "data" else batch_axes
        ranks = placement_of(given) if isinstance(given, keras.distribution.DeviceMesh) else given
        if ranks is not None:
            require_placement(ranks, type(self).__name__)
        if callable(rules):
            rules = _layout_map_for(ranks, rules)
        is_map = isinstance(rules, keras.distribution.LayoutMap)
        if ranks is None:
            ranks = _placement_of(rules if is_map else None)
        # a placement of one axis "model" is plain tensor parallelism: nobody should have to say that there is no "data"
        if batch_axes == "data" and "data" not in ranks.axis_names:
            # Keras's ModelParallel splits rows over its mesh's first axis, which KerasHub's maps call "batch"
            batch_axes = ranks.axis_names[:1] if is_map and len(ranks.axis_names) > 1 else ()
        elif isinstance(batch_axes, str):
            batch_axes = (batch_axes,)
        elif not isinstance(batch_axes, Sequence) or not all(isinstance(axis, str) for axis in batch_axes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FlowError(
                f"batch_axes names an axis of the placement or several, got {batch_axes!r}; the placement's axes are "
                f"{list(ranks.axis_names)}"
            )
        self.maps_outputs = is_map
        super().__init__(
            ranks,
            rules=LayoutMapRules(rules) if is_map else PatternRules(rules),
            activations=PatternRules(activations, "activations"),
            batch_axes=tuple(batch_axes),
            strict=strict,
            random=random,
            verify=verify,
            zero=zero,
            zero_axes=zero_axes,
            zero_min_size=zero_min_size,
            remat=remat,
        )
        if is_map:
            self._check_map_axes(rules)

    def warn_of_idle_axes(self, model: keras.Model) -> None:
        """Warn once of an axis over which nothing of a model is split."""
        lengths = dict(zip(self.placement.axis_names, self.placement.hierarchy, strict=True))
        layouts = [self.get_variable_layout(variable).layout.nd_sbp for variable in model.variables]
        used = set(self.batch_axes)
        for nd_sbp in (*self._legal_specs(), *layouts):
            parts = zip(lengths, nd_sbp, strict=True)
            used.update(axis for axis, part in parts if isinstance(part, sbp.Split))
        for axis, length in lengths.items():
            if axis not in used and length > 1 and axis not in self._warned:
                self._warned.add(axis)
                warn(
                    f"ModelParallel: no rule splits a weight over axis {axis!r}, so its {length} ranks compute the "
                    f'same. Give rules={{"...": {{"{axis}": kf.sbp.split(1)}}}} (`keras-flow explain` prints a '
                    f'skeleton), split rows over it by batch_axes="{axis}", or leave the axis out of the placement'
                )

    def _check_map_axes(self, layout_map: keras.distribution.LayoutMap) -> None:
        mesh = layout_map.device_mesh
        if mesh is not None and not set(mesh.axis_names) <= set(self.placement.axis_names):
            raise FlowError(
                f"the LayoutMap's mesh has axes {list(mesh.axis_names)}, the placement "
                f"{list(self.placement.axis_names)}: their names must agree"
            )


def _layout_map_for(placement: Placement | None, make: LayoutMapMaker) -> keras.distribution.LayoutMap:
    """The LayoutMap that a function makes for the placement's ranks and axes.

    Raises:
        FlowError: no placement, or the function refuses its axes.
    """
    name = getattr(make, "__qualname__", repr(make))
    if placement is None:
        raise FlowError(
            f"rules={name} makes a LayoutMap for a placement, and none was given; for example "
            'kf.Placement([[0, 1], [2, 3]], axis_names=("batch", "model"))'
        )
    # LayoutMaps name ranks as Keras names devices; no device is touched
    devices = [f"{placement.type or 'cpu'}:{rank}" for rank in placement.ranks]
    try:
        layout_map = make(keras.distribution.DeviceMesh(placement.hierarchy, list(placement.axis_names), devices))
    except Exception as error:
        raise FlowError(
            f"rules={name} cannot make a LayoutMap for a placement with the axes {list(placement.axis_names)}: "
            f'{type(error).__name__}: {error}; name the axes as it asks (KerasHub\'s maps: "batch" and "model"), or '
            "give it their names by functools.partial"
        ) from error
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise FlowError(f"rules={name} must return a keras.distribution.LayoutMap, got {type(layout_map).__name__}")
    return layout_map


def _placement_of(layout_map: keras.distribution.LayoutMap | None) -> Placement:
    """The placement of a LayoutMap's mesh.

    Raises:
        FlowError: there is no map, or it has no mesh.
    """
    if layout_map is None or layout_map.device_mesh is None:
        raise FlowError(
            "ModelParallel needs a placement: give one, for example "
            'kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")), or rules that are a LayoutMap with a '
            "device mesh"
        )
    return placement_of(layout_map.device_mesh)
