"""`FlowDistribution`: the Keras `Distribution` behind `kf.DataParallel` and `kf.ModelParallel`.

Keras asks it for the layout of each variable and batch as it creates them; it answers from the rules, falls back where
a split does not divide, and collects problems until `check` raises them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np

from keras_flow import sbp, settings
from keras_flow.backends.active import backend
from keras_flow.backends.installing import install
from keras_flow.current import dry_run
from keras_flow.current.batch import UnevenNotice
from keras_flow.current.creator import creator
from keras_flow.current.distribution import ActivationLayout, Distribution
from keras_flow.current.models import layer_paths
from keras_flow.current.variable_layout import KerasLayout, VariableLayout, keras_layout
from keras_flow.distributions import companions, layout_problems, models, recomputed
from keras_flow.distributions.fallbacks import Fallbacks
from keras_flow.distributions.ranks import check_ranks
from keras_flow.distributions.resolve import fit_layout, held_whole, joined_axes, problems_of, rows_on_one_axis
from keras_flow.distributions.rules import PatternRules, Rules, matched_key
from keras_flow.distributions.shard import shard_of, unknown_names
from keras_flow.distributions.zero import layouts_of_slots, why_whole, zero_of
from keras_flow.errors import FlowError, LayoutError, LayoutFallback, warn
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.runtime import versions

if TYPE_CHECKING:
    from keras_flow.backends.engine_records import Capabilities


_LOST = (
    "the distribution was taken away inside its scope, by keras.distribution.set_distribution(None) or by a "
    "`clear_session` imported by name before the first distribution was made: models made after it here are not "
    "distributed. Inside a scope call keras.utils.clear_session(), which leaves the scope"
)


class FlowDistribution(Distribution):
    """The base class of data- and model-parallel distributions.

    Args:
        placement: the ranks; its type, when None, becomes the type of the devices found.
        rules: layouts of variables by path.
        activations: layouts of layer outputs by layer path.
        batch_axes: axes that split dimension 0 of every batch.
        strict: raise where a split does not divide or the engine cannot hold it; else it is broadcast with a warning.
        random: `"logical"`: draws of `keras.random` depend on the seed and the logical index alone, equal for every
            layout and engine, and a rank draws its own part; `"stock"`: those of stock Keras on one device. None takes
            what the environment variable KERAS_FLOW_RANDOM says, `"logical"` where it is not set.
        verify: `"first_batch"` proves on the first batch of each model's first `fit` that a step has the numbers of one
            device, before anything is trained; see the method `verify`.
        zero, zero_axes, zero_min_size: which of slots and gradients are split over the axes of the batch; see
            `distributions/zero.py`.
        remat: which layers are computed again in the backward pass; see `distributions/recomputed.py`.

    Raises:
        FlowError: unknown axes, ranks that do not exist, an unsupported version or backend.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        rules: Rules | None = None,
        activations: Rules | None = None,
        batch_axes: Sequence[str] = (),
        strict: bool = False,
        random: str | None = None,
        verify: str | None = None,
        zero: int = 0,
        zero_axes: str | Sequence[str] | None = None,
        zero_min_size: int = 1024,
        remat: str | Sequence[str] | None = None,
    ):
        settings.check()
        random = (settings.read(settings.RANDOM) or "logical") if random is None else random
        if random not in ("logical", "stock"):
            raise FlowError(f'random is "logical" or "stock", got {random!r}')
        if verify not in (None, "first_batch"):
            raise FlowError(f'verify is None or "first_batch", got {verify!r}')
        engine = backend()
        versions.check(engine.name)
        engine_world = dry_run.world() or engine.world()
        engine_world.require_real(f"kf.{type(self).__name__}, like all that trains,")
        # the type of the ranks that the job has, or that a dry run assumes
        if placement.type is None:
            placement = Placement(
                np.asarray(placement.ranks).reshape(placement.hierarchy), placement.axis_names, engine_world.type
            )
        check_ranks(placement, engine_world, engine, self.is_of_all_processes)
        unknown = [axis for axis in batch_axes if axis not in placement.axis_names]
        if unknown:
            raise FlowError(f"batch_axes names {unknown}, the placement's axes are {list(placement.axis_names)}")
        self.placement = placement
        self.rules: Rules = rules if rules is not None else PatternRules(None)
        self.activations: Rules = activations if activations is not None else PatternRules(None)
        # in the order of the placement, whatever order the user named them in
        self.batch_axes = tuple(axis for axis in placement.axis_names if axis in batch_axes)
        self.zero = zero_of(zero, zero_axes, zero_min_size, self.batch_axes)
        self.zero_stage = zero
        self._recomputed = recomputed.Recomputed(remat)
        self.rematerialized = self._recomputed.layers
        self.strict = strict
        self.random = random
        self.uneven_notice = UnevenNotice()
        #: models whose first batch was verified; None where no verification was asked for
        self._verified: WeakSet[keras.Model] | None = WeakSet() if verify else None
        self._problems: dict[str, list[str]] = {}
        #: of outputs, each raised by the call that met it: the next call meets it again, where it is still there
        self._raised: dict[str, list[str]] = {}
        self._rule_use = layout_problems.RuleUse(self.rules, self.activations, self.maps_outputs)
        self._warned: set[str] = set()
        #: optimizer -> the layouts of its variables when its slots were last laid
        self._laid: WeakKeyDictionary[keras.Optimizer, list[KerasLayout | None]] = WeakKeyDictionary()
        self.fallbacks = Fallbacks()
        self._entered = False
        self.joined_axes = joined_axes(list(self._legal_specs()), self.batch_axes, placement.axis_names)
        reason = rows_on_one_axis(placement, self.batch_axes, self.joined_axes, engine.capabilities)
        if reason and strict:
            raise LayoutError(f"{reason} (strict=True)")
        if reason:
            warn(reason, LayoutFallback)
        mesh = keras.distribution.DeviceMesh(
            placement.hierarchy, list(placement.axis_names), [f"{placement.type}:{rank}" for rank in placement.ranks]
        )
        # auto_shard_dataset=False: each process reads the logical batch; Keras must not cut it
        super().__init__(mesh, self.batch_axes[0] if self.batch_axes else None, auto_shard_dataset=False)
        install(engine)

    def _legal_specs(self) -> Iterator[sbp.NdSbp]:
        if self.zero.stage:  # slots may split a dim over these axes, and over no others of the batch
            yield sbp.nd_sbp(dict.fromkeys(self.zero.axes, sbp.split(0)), self.placement.axis_names)
        for spec in (*self.rules.specs(), *self.activations.specs()):
            try:
                yield sbp.nd_sbp(spec, self.placement.axis_names)
            except FlowError:
                continue  # reported with the first variable that it matches

    # ---- questions of Keras

    def get_variable_layout(self, variable: keras.Variable) -> KerasLayout:
        """The layout of a variable: the one that it carries, otherwise the one that it gets when it is created."""
        return keras_layout(variable) or self.layout_for(variable.path, tuple(variable.shape), dtype=variable.dtype)

    def get_data_layout(self, data_shape: Sequence[int]) -> KerasLayout:
        """The layout of a batch tensor, as Keras carries it."""
        return KerasLayout(VariableLayout(self.batch_layout(data_shape), "batch_axes"), self)

    def get_tensor_layout(self, path: str) -> ActivationLayout | None:
        """The layout of a layer's output, by `activations` or a LayoutMap key ending in `/output`."""
        layer_path = path.removesuffix("/output")
        match = self.activations.match(layer_path)
        if match is None and self.maps_outputs:
            match = self.rules.match(path)
        if match is None:
            return None
        self._rule_use.matched.add(match.key)
        try:
            return ActivationLayout(sbp.nd_sbp(match.spec, self.placement.axis_names), path)
        except FlowError as error:
            self._problems[path] = [f"{path}: activations {match.key!r}: {error}"]
            return None

    #: whether keys of `rules` may also name layer outputs, as those of a LayoutMap may
    maps_outputs = False

    @contextmanager
    def scope(self) -> Iterator[FlowDistribution]:
        """Make this distribution the current one; `keras.utils.clear_session` inside leaves it so.

        Warns at the end if it was taken away meanwhile: models created after that are not distributed.
        """
        self.enter()
        with super().scope(), self.fallbacks.together():
            self.open_scopes += 1
            try:
                yield self
            finally:
                self.open_scopes -= 1
            if keras.distribution.distribution() is None:
                warn(_LOST)

    def enter(self) -> None:
        """Check devices and align the ranks' random states; done at each scope, skipped in a dry run."""
        if dry_run.world() is not None:
            return
        backend().enter(self)
        self._entered = True

    def ensure_entered(self) -> None:
        """Call `enter`, unless a scope did so before: `keras.distribution.set_distribution` opens none."""
        if not self._entered:
            self.enter()

    # ---- layouts

    def engine_layout(self, layout: Layout) -> object:
        """The engine's description of a layout."""
        return backend().engine_layout(layout)

    def batch_layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a batch tensor [rows, ...]: rows over the batch axes where they divide, otherwise broadcast."""
        split = len(shape) > 0 and self.batch_plan(int(shape[0])).divides
        spec = {axis: sbp.split(0) for axis in self.batch_axes} if split else {}
        return Layout(self.placement, spec, shape)

    def layout_for(
        self, path: str, shape: tuple[int, ...], layer: keras.Layer | None = None, dtype: str = "float32"
    ) -> KerasLayout:
        """The layout that a variable gets by `kf.shard`, by the rules, or by default (broadcast).

        Problems are recorded, and raised together by `check`. A split that becomes broadcast is warned of once.

        Args:
            path: the variable's path.
            shape: its logical shape.
            layer: the layer that owns it; None takes the layer that is creating variables now.
            dtype: its dtype.
        """
        created_by = creator()
        layer = layer or (created_by.layer if created_by else None)
        broadcast = Layout(self.placement, {}, shape)
        # states of metrics and seeds, counters of optimizers: not what rules are written for
        if (created_by and created_by.kind != "layer" and layer is None) or is_seed(path) or not shape:
            return KerasLayout(VariableLayout(broadcast, "default"), self)
        self._problems.pop(path, None)  # what was asked for before may be taken back, as in a notebook
        capabilities = backend().capabilities
        whole = held_whole(capabilities, layer, dtype)
        try:
            spec = shard_of(layer, path)
            source = "kf.shard"
            if spec is None:
                weight = companions.weight_of(path, layer)
                if weight is not None and not self._has_own_rule(path, weight.path):
                    return self._layout_with(weight, path, shape, layer, whole)
                match = self.rules.match(path)
                if match is None:
                    return self._held(broadcast, "default", path, whole=whole)
                self._rule_use.matched.add(match.key)
                spec, source = match.spec, f"rule '{match.key}'"
            unpacked = companions.unpacked_shape(layer, path, shape)
            try:
                requested = Layout(self.placement, spec, unpacked)
            except FlowError as error:
                raise FlowError(f"{path}: {source}: {error}") from error
            problems = problems_of(requested, source, path)
            if unpacked != shape and not problems:
                requested = companions.packed(requested, shape)
        except FlowError as error:
            requested, source, problems = broadcast, "default", [str(error)]
        if problems:
            self._problems[path] = problems
            return KerasLayout(VariableLayout(broadcast, source), self)
        fitted = fit_layout(requested, path, capabilities, self.joined_axes, layer, dtype)
        self._fell_back(path, source, fitted.reasons)
        is_gathered = _is_gathered(layer, capabilities) and not fitted.layout.is_broadcast
        used = Layout(self.placement, {}, shape) if is_gathered else None
        return self._held(fitted.layout, source, path, "; ".join(fitted.reasons), used, whole)

    def _fell_back(self, path: str, source: str, reasons: Sequence[str]) -> None:
        # `check` raises it with all others, so that a user sees every bad rule at once
        if reasons and self.strict:
            self._problems[path] = [f"{reason} (strict=True)" for reason in reasons]
        for reason in () if self.strict else reasons:
            self.fallbacks.add(path, source, reason.removeprefix(f"{path}: "))

    def _held(
        self, layout: Layout, source: str, path: str, note: str = "", used: Layout | None = None, whole: str = ""
    ) -> KerasLayout:
        """The layout in which a weight is held: the one that it was given, or split further (`zero=3`)."""
        found = None
        if self.gathers_weights and not self.has_one_rank:
            try:
                found = self._split_further(layout)
            except LayoutError as error:
                self._problems[path] = [f"{path}: {error}"]
        if found is not None and whole:
            self._fell_back(path, "zero=3", [f"{path}: {whole}, with zero=3 too"])
        if found is None or whole:
            return KerasLayout(VariableLayout(layout, source, note, used), self)
        source = f"zero={self.zero.stage}; before it: {source}"
        return KerasLayout(VariableLayout(found, source, note, used or layout), self)

    def slot_layout(self, layout: KerasLayout) -> KerasLayout:
        """The layout that slots of a variable with this layout have: its own, or split further (`zero=`)."""
        if not self.zero.stage or self.has_one_rank or not layout.layout.shape:
            return layout
        if layout.of_slots is None:
            found = self._split_further(layout.layout)
            source = f"zero={self.zero.stage}; its variable: {layout.given.source}"
            layout.of_slots = layout if found is None else KerasLayout(VariableLayout(found, source), self)
        return layout.of_slots

    def _split_further(self, layout: Layout) -> Layout | None:
        """The best layout that the engine can hold of those that split this one further; None where there is none.

        Raises:
            LayoutError: with `strict`, where what is large enough cannot be split.
        """
        capabilities = backend().capabilities
        for found in layouts_of_slots(layout, self.zero.axes, self.zero.min_size):
            parts = dict(zip(self.placement.axis_names, found.nd_sbp, strict=True))
            # an engine that holds joined axes as one cannot split over some of them
            agree = all(len({parts[axis] for axis in group}) == 1 for group in self.joined_axes)
            fits = not fit_layout(found, "", capabilities, self.joined_axes).reasons
            if fits and (agree or capabilities.several_axes_on_one_dim):
                return found
        reason = why_whole(layout, self.zero.axes, self.zero.min_size, self.gathers_weights)
        if reason and self.strict:
            raise LayoutError(f"zero={self.zero.stage}: {reason} (strict=True)")
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warn(f"zero={self.zero.stage}: {reason}", LayoutFallback)
        return None

    def _has_own_rule(self, path: str, weight: str) -> bool:
        """Whether a rule was written for a variable that belongs to a weight, and not for the weight."""
        key = matched_key(self.rules, path)
        return key is not None and key != matched_key(self.rules, weight)

    def _layout_with(
        self, weight: keras.Variable, path: str, shape: tuple[int, ...], layer: keras.Layer | None, whole: str
    ) -> KerasLayout:
        """The layout of a variable that belongs to a weight of its layer, from the weight's."""
        found = keras_layout(weight)
        if found is None or found.distribution is not self:
            found = self.layout_for(weight.path, tuple(weight.shape), layer, weight.dtype)
        source = f"its weight {weight.path!r}, which has it from {found.given.source}"
        layout = Layout(self.placement, {}, shape) if whole else companions.layout_with(found.layout, path, shape)
        used = None if found.given.used is None else companions.layout_with(found.given.used, path, shape)
        return KerasLayout(VariableLayout(layout, source, used=None if used == layout else used), self)

    # ---- checks

    def record(self, path: str, problem: str) -> None:
        """Keep a problem of the layer output with this path, which a call raises now; `check` raises it with others."""
        self._raised[path] = [problem]

    def adopt(self, model: keras.Model, *others: object) -> bool:
        """Give every variable that a model reaches its layout under this distribution.

        Args:
            model: the model.
            others: objects used with it, as callbacks are; what they reach is laid too.

        Returns:
            Whether the layout of any of them changed.
        """
        with self.fallbacks.together():
            return models.adopt(model, self, *others)

    def lay_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Give slots that were made elsewhere, or before `kf.shard`, the layouts of their variables."""
        layouts = [keras_layout(variable) for variable in optimizer._trainable_variables]
        if layouts != self._laid.get(optimizer) or not all(models.is_laid(slot, self) for slot in optimizer.variables):
            models.lay_optimizer(optimizer, self)
            self._laid[optimizer] = layouts

    def apply(self, model: keras.Model) -> keras.Model:
        """Give the variables of a built model their layouts under this distribution.

        Returns:
            The model.

        Raises:
            LayoutError: a rule is wrong, or matches nothing.
        """
        self.ensure_entered()
        self.adopt(model)
        self.check(model)
        return model

    def check(self, model: keras.Model) -> None:
        """Raise all layout problems of a model together: bad rules, and rules that matched nothing.

        Raises:
            LayoutError: with one line for each problem, naming the nearest paths.
        """
        self.fallbacks.say()
        paths = [variable.path for variable in model.variables if not is_seed(variable.path)]
        problems = layout_problems.of_model({**self._problems, **self._raised}, self.rules, paths)
        self._raised.clear()
        layers = layer_paths(model)
        unmatched = self._rule_use.unmatched(layers, paths)
        # Keras ignores keys of a LayoutMap that match nothing, and KerasHub's maps have some, for layers that not all
        # variants of a model have. A map of which nothing at all matches is that of another model, and stays an error
        if self.rules.may_be_unmatched and not self.strict and self._rule_use.matched:
            idle = self._rule_use.idle(unmatched, layers, paths)
            unmatched = [key for key in unmatched if key not in idle]
            text = f"the LayoutMap's keys {idle} match no variable of the model, so nothing is split by them"
            if idle and text not in self._warned:
                self._warned.add(text)
                inside = self._rule_use.only_inside(idle, paths)
                how = f": a key must match a path whole, so write {f'.*{inside[0]}'!r}" if inside else ""
                warn(f"{text}{how} (strict=True makes this an error)")
        problems += [self._rule_use.why_unmatched(key, layers, paths) for key in unmatched]
        problems += [text for layer in model._flatten_layers() for text in unknown_names(layer)]
        problems += self._recomputed.check(model)
        if problems:  # they stay recorded, as the next call must not train without the rules either
            raise LayoutError(
                f"{len(problems)} layout problem{'s' if len(problems) > 1 else ''} in model {model.name!r}:\n  "
                + "\n  ".join(problems)
                + f"\nPaths are those of `variable.path`; {self.rules.matching}."
            )

    def blocks_of(self, model: keras.Model) -> list[keras.Layer]:
        """The layers of a model that are computed again in the backward pass."""
        return self._recomputed.layers_of(model)

    @property
    def has_problems(self) -> bool:
        """Whether problems wait to be raised."""
        return bool(self._problems or self._raised)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placement}, batch_axes={list(self.batch_axes)})"


def _is_gathered(layer: keras.Layer | None, capabilities: Capabilities) -> bool:
    """Whether the engine gathers split variables of such a layer where it uses them."""
    return layer is not None and any(cls.__name__ in capabilities.gathered_variables for cls in type(layer).__mro__)


def is_seed(path: str) -> bool:
    """Whether a variable is the state of a `SeedGenerator`, which is broadcast whatever the rules match."""
    return path.endswith("seed_generator_state")
