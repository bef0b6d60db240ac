"""The interface of an engine. Everything outside `backends/` is written against it.

Its parts are `collective_engine.py` (`kf.comm`), `tensor_engine.py` (global tensors), `pipeline_engine.py` (models in
stages) and this file (all else that training needs).

The three implementations have the same files: `devices`, `layouts`, `boxing`, `collectives`, `tensors`, `variables`,
`creation`, `random`, `data`, `trainer`, `replica`, `layers`, `hooks`, `privates`, `probes`, `capabilities`. What
differs between engines is visible by comparing two files; `tests/backends/test_parallel_folders.py` lists it with
reasons. numpy, the reference of boxing and of global tensors, has `devices`, `boxing`, `collectives` and `tensors`.
What must be known before an engine is loaded is in `engines.py`.

The module `keras_flow.backends.<engine>` itself is the backend, since a module may satisfy a protocol: its `__init__`
imports each name below from the file that has it, so that a search finds every name once. (`hooks`, `privates` and
`capabilities` are there the functions and the record, not their files.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from keras_flow.backends.engine_records import Capabilities, RandomPart, Replica, TraceEvent
from keras_flow.backends.pipeline_engine import PipelineEngine
from keras_flow.backends.tensor_engine import TensorEngine
from keras_flow.current.world import World as World

if TYPE_CHECKING:
    import keras

    from keras_flow.backends.hooking import Hook
    from keras_flow.current.distribution import Distribution
    from keras_flow.current.keras_places import Private
    from keras_flow.current.variable_layout import KerasLayout
    from keras_flow.layout import Layout
    from keras_flow.sbp import NdSbp


class Backend(TensorEngine, PipelineEngine, Protocol):
    """One engine that trains. `keras_flow.backends.active.backend()` returns that of the active Keras backend.

    Attributes:
        capabilities: what it can hold and do.
    """

    capabilities: Capabilities

    # ---- processes.py
    def put_text(self, key: str, text: str) -> None:
        """Write a text into the job's store; several processes only."""
        ...

    def first_text(self, key: str, text: str) -> str:
        """Write a text into the job's store unless there is one; the one that is there then, in all processes."""
        ...

    def get_text(self, key: str, seconds: float) -> str:
        """Read a text from the job's store, waiting until it is there.

        Raises:
            FlowError: nobody has written it after these seconds.
        """
        ...

    def delete_text(self, key: str) -> None:
        """Remove a text from the job's store."""
        ...

    # ---- layouts.py
    def engine_layout(self, layout: Layout) -> object:
        """The engine's own description of `layout`: NamedSharding, DTensor Layout, DTensor placements."""
        ...

    def constrain(self, outputs: object, nd_sbp: NdSbp, path: str) -> object:
        """Lay the tensors of a layer's output as `nd_sbp` says (`activations` rules), inside a step or outside.

        Args:
            outputs: one tensor or a structure of them; those with too few dimensions for `nd_sbp` raise FlowError.
            nd_sbp: one sbp for each axis of the active distribution's placement.
            path: the layer's path, for the error.
        """
        ...

    # ---- generation.py
    def generate_function(
        self, model: keras.Model, distribution: Distribution, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a model's generate function as a step of a distribution of several ranks.

        Args:
            model: its variables have the distribution's layouts.
            distribution: the step runs on its ranks.
            function: what `make_generate_function` returned. It takes a batch of logical tensors, and settings that
                are no tensors; it returns logical tensors.
        """
        ...

    # ---- exporting.py
    def plain_value(self, variable: keras.Variable, value: np.ndarray, before: object = None) -> Any:
        """A value that the variable would have on one device; `before` is the one of an earlier call, or None."""
        ...

    def track(self, model: keras.Layer) -> None:
        """Tell what lists a model's variables besides Keras that their values were replaced."""
        ...

    # ---- variables.py
    def place(self, variable: keras.Variable, layout: KerasLayout) -> None:
        """Lay an existing variable anew, keeping its value, and set `variable._layout = layout`."""
        ...

    def fill(self, variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[], object]:
        """Read a value of a variable in parts: `part` returns the elements of slices, one for each dim.

        Returns:
            What gives the variable this value.
        """
        ...

    def shards(self, variable: keras.Variable) -> dict[int, np.ndarray]:
        """rank -> the shard it physically holds, of the ranks of this process; no copy where it is in host memory."""
        ...

    def is_split_over_processes(self, variable: keras.Variable) -> bool:
        """Whether no process has the whole value on its own ranks: to read it is a collective."""
        ...

    # ---- saving.py
    def write_alone(self, action: Callable[[], object], model: keras.Model | None, name: str) -> None:
        """Process 0 calls `action`, which writes files and may read the variables of `model`; the others wait.

        They provide what it reads, and get its error. `name` is what writes, the same in all processes.
        """
        ...

    # ---- trainer.py
    def enter(self, distribution: Distribution) -> None:
        """Called when a scope of `distribution` is entered: builds the mesh, aligns the ranks' random states."""
        ...

    def forget_steps(self, model: keras.Model) -> None:
        """Drop step functions that were compiled for another distribution."""
        ...

    def recover(self, model: keras.Model) -> None:
        """After a step raised: leave the model with its last good weights, usable."""
        ...

    def rejoin(self, times: int) -> bool:
        """Form the process groups anew after collectives were broken off; called by all processes of the job.

        Args:
            times: how often this was done before, the same in all processes.

        Returns:
            Whether tensors made before can be used; False where the engine cannot (`Engine.rejoins`), or the processes
            have made different groups.
        """
        ...

    def double_precision(self) -> AbstractContextManager[object]:
        """Inside, the engine computes in float64 where it is asked to."""
        ...

    # ---- replica.py
    def make_replica(self, model: keras.Model, ranks: tuple[int, ...], bucket_bytes: int, find_unused: bool) -> Replica:
        """Return the replica that trains the model of this process, which is a rank.

        Args:
            model: a built model, whose weights are equal on all ranks.
            ranks: the ranks over which gradients are averaged.
            bucket_bytes: bytes of gradients that travel together, where the engine averages them.
            find_unused: look for weights that a loss does not depend on, where that costs something.
        """
        ...

    # ---- host_calls.py
    def call_in_step(
        self,
        function: Callable[[list[Any]], list[Any]],
        values: Sequence[Any],
        pullback: Callable[[list[Any]], list[Any]] | None = None,
    ) -> list[Any]:
        """Call a Python function of tensors in a step, compiled or not, once each time that the step runs.

        Args:
            function: returns tensors of the same dtypes and shapes; may wait for other processes.
            values: at least one tensor.
            pullback: cotangents of the results -> those of the values, where a gradient may be asked for; `function`
                is then linear, and takes some of the values, too.
        """
        ...

    def dense(self, gradient: Any) -> Any:
        """A gradient as a tensor that has all its elements."""
        ...

    # ---- random.py
    def random_part(
        self, shape: tuple[int, ...], inputs: Any, noise_shape: Sequence[int | None] | None, is_whole: bool
    ) -> RandomPart | None:
        """Which elements of a draw are made here.

        Args:
            shape: of the draw, as a layer's code sees it: of its own rows where it computes these alone. The first
                length may be unknown: None (that of `inputs`), or a scalar of the program that is being traced.
            inputs: the tensor that a mask is for, or None.
            noise_shape: the mask's, as the caller gave it.
            is_whole: the draw is for all rows.

        Returns:
            None where the engine draws by its own hook, or refuses.
        """
        ...

    def random_words(self, state: Any) -> tuple[Any, Any]:
        """The two 32-bit words of a seed: numbers, or scalars of the program that is being traced."""
        ...

    def random_fractions(self, words: tuple[Any, Any], tag: int, part: RandomPart) -> Any:
        """`philox.fractions` of the elements of `part`, float32."""
        ...

    def random_offsets(self, words: tuple[Any, Any], part: RandomPart, span: int) -> Any:
        """`philox.offsets` of the elements of `part`, int32: from 0 up, below `span`, which is up to 2**31."""
        ...

    def reorder(self, x: Any, keys: Any, axis: int) -> Any:
        """`x` with its entries along an axis in the order of `keys` [length], equal ones as they were."""
        ...

    # ---- profiling.py
    def profiled(self, folder: Path) -> AbstractContextManager[Callable[[], tuple[int, list[TraceEvent]]]]:
        """Run the engine's profiler inside; what it yields returns the events of this process, afterwards.

        Before them the nanoseconds since 1970 at which the first one began: processes of a host have one clock.

        Args:
            folder: an empty folder for the profiler's own files.
        """
        ...

    def annotated(self, name: str) -> AbstractContextManager[object]:
        """Inside, the engine's profiler shows this name.

        Names with a meaning for `kf.trace`: `step 3`, `layer model/up`, and `gradients of model/up, model/down`. A
        pipeline's work has the names of its schedule, `1F3 on rank 1`.
        """
        ...

    # ---- hooks.py
    def hooks(self) -> Sequence[Hook]:
        """The places of Keras and of the engine that are wrapped, with reasons."""
        ...

    # ---- privates.py
    def privates(self) -> Sequence[Private]:
        """The private names of the engine that are used and not wrapped, with reasons."""
        ...

    # ---- probes.py
    def free_memory(self) -> int:
        """Bytes that are free on the first device here: the host's memory for CPUs, and where the engine cannot say."""
        ...

    def devices_seen(self) -> list[str]:
        """The devices that the engine would use by itself, one text each."""
        ...

    def all_reduce(self, elements: int, ranks: int, repeats: int) -> list[float]:
        """Seconds of each of `repeats` sums over the first `ranks` ranks of a float32 tensor [elements].

        Called by all ranks of the job. Raises FlowError when a sum is wrong.
        """
        ...
