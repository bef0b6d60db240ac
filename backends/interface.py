"""The interface of an engine. Everything outside `backends/` is written against this file.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from keras_flow.backends.collective_engine import CollectiveEngine
from keras_flow.backends.engine_records import Capabilities, RandomPart, Replica, TraceEvent
from keras_flow.current.world import World as World

if TYPE_CHECKING:
    import keras

    from keras_flow.backends.hooking import Hook
    from keras_flow.boxing.spec import BoxingPlan
    from keras_flow.current.distribution import Distribution
    from keras_flow.current.keras_places import Private
    from keras_flow.current.variable_layout import KerasLayout
    from keras_flow.layout import Layout
    from keras_flow.sbp import NdSbp


class StageProgram(Protocol):
    """A stage of a pipeline, as an engine computes it."""

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients; what the function returns."""
        ...

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage; also what its backward pass needs."""
        ...

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors sent, from the stage that got them; None where it has none.
            scale: the gradient by the sum of the stage's losses.
        """
        ...

    def backward_inputs(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], Any]:
        """The first part of `backward`: gradients by the tensors that were received, and what the second part needs."""
        ...

    def backward_weights(self, later: Any) -> list[Any]:
        """The second part: gradients by the weights, once."""
        ...


class TensorEngine(CollectiveEngine, Protocol):
    """The part of an engine that global tensors and `kf.comm` use; numpy, the reference, has no more than this.

    Attributes:
        name: Keras's name of the backend.
    """

    name: str

    # ---- devices.py
    def init(self, devices: int | None, type: str | None) -> World:
        """Make `devices` ranks (virtual CPU devices where the engine has them), or take the real ones."""
        ...

    def simulate(self, devices: int) -> World:
        """Make `devices` ranks on the CPU in this process: virtual devices, or ranks that are played by it."""
        ...

    def world(self) -> World:
        """The ranks as they are now. Initialises the engine with its defaults when `init` was not called."""
        ...

    # ---- boxing.py
    def redistribute(self, plan: BoxingPlan, shards: Mapping[int, Any]) -> Mapping[int, Any]:
        """Run a boxing plan on the engine's arrays, rank -> shard, for the ranks that this process drives.

        Ranks receive the bytes that the plan says, and no padding.
        """
        ...

    # ---- tensors.py
    def agree_on(self, facts: Mapping[int, Any]) -> dict[int, Any]:
        """Facts by rank, of this process's ranks, together with those of all other processes; a collective."""
        ...

    def put(self, value: np.ndarray, rank: int) -> Any:
        """The engine's array with this value, on the device of a rank of this process."""
        ...

    def as_numpy(self, value: Any) -> np.ndarray:
        """The value of an engine's array."""
        ...

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        """Inside, operators compute on the device of `rank`."""
        ...

    def vjp(self, function: Callable[..., Any], values: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any]]]:
        """Results of `function(*values)`, which returns a list, and the function that takes cotangents back.

        The latter takes one cotangent for each result and returns one for each value.

        Raises:
            FlowError: the engine has no gradients.
        """
        ...

    def to_engine(self, layout: Layout, shards: Mapping[int, Any]) -> Any:
        """The engine's own distributed array of these shards, not copied.

        Raises:
            FlowError: it cannot hold the layout.
        """
        ...

    def from_engine(self, value: Any) -> tuple[Layout, dict[int, Any]] | None:
        """Layout and shards of the engine's own distributed array; None where it is none."""
        ...


class Backend(TensorEngine, Protocol):
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

    def fill(self, variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        """Give a variable a value that is read in parts: `part` returns the elements of slices, one for each dim."""
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

    # ---- stages.py
    def stage_program(
        self, function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None = None
    ) -> StageProgram:
        """Return the program that computes a stage of a pipeline, and its gradients, on a rank.

        Args:
            function: of weights, tensors and others; returns what has gradients, the sum of the losses last, and all
                else.
            rank: its device computes.
            compiled: whether to compile, where the engine does.
            split: lays tensors over the ranks that compute the stage together; None where `rank` computes it alone.
        """
        ...

    def compiled(self, function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
        """A function of values that is computed on the device of a rank, without gradients."""
        ...

    def on(self, rank: int, structure: Any, split: Distribution | None = None) -> Any:
        """A structure of tensors, of numbers too, on the device of a rank of this process.

        Args:
            rank: whose device.
            structure: of tensors.
            split: what lays tensors over the rank and others; they keep their layout, on these ranks.
        """
        ...

    def add(self, total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
        """The sums of gradients, one by one; None for those that there are not."""
        ...

    def read(self, variable: keras.Variable) -> Any:
        """The value of a variable, where it is."""
        ...

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Give a variable a value that was computed on its device."""
        ...

    def apply_gradients(
        self, optimizer: Any, parts: Sequence[tuple[int, list[keras.Variable], list[Any]]], is_compiled: bool
    ) -> None:
        """Update weights that are on several ranks, in one step of the optimizer.

        Args:
            optimizer: whose slots lie where their variables do.
            parts: of each rank of this process the weights, and a gradient for each.
            is_compiled: whether to compile, where the engine does.
        """
        ...

    def step_function(self, model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return the function that Keras's loop of this engine calls.

        Args:
            model: the model that is trained, evaluated or asked for predictions.
            name: `"train"`, `"test"` or `"predict"`.
            step: takes a batch; returns logs, or outputs.
        """
        ...

    def send_tensors(
        self, tensors: Any, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object
    ) -> Callable[[], None]:
        """Begin to send a list of tensors, or lists of them, to a rank of another process; returns what waits.

        Args:
            tensors: some may be None.
            pair: who sends them, and who gets them.
            tag: tells messages apart that are on their way between two ranks.
            told: the keys whose shapes were told; an own one for those that are received.
            key: messages of one key have the same shapes, which are told with the first.
        """
        ...

    def receive_tensors(
        self, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object, split: Distribution | None = None
    ) -> Callable[[], Any]:
        """Begin to receive what a rank of another process sends; returns what waits for it and gives it.

        `split`: what lays tensors over the rank and others, each of which gets its part of what is split.
        """
        ...

    def sum_over_processes(self, value: Any) -> Any:
        """The sum of a scalar over all processes, in each."""
        ...

    def sum_over_ranks(
        self,
        ranks: tuple[int, ...],
        given: Sequence[list[Any]],
        weights: Sequence[keras.Variable],
        split: Distribution | None = None,
    ) -> Callable[[], list[Any]]:
        """Begin to sum the gradients of a stage over its ranks; returns what waits for the sums.

        Args:
            ranks: those of the stage.
            given: of each of them that this process drives its gradients, None for those that there are not.
            weights: whose they are.
            split: what lays them over a rank and others, where ranks compute a lane together.
        """
        ...

    def from_process_of(self, rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
        """A structure of tensors of the process that drives a rank, in all processes.

        Args:
            rank: who has it.
            value: it; elsewhere tensors of the same shapes where `is_like`, otherwise whatever.
            is_like: whether all processes know the shapes.
            ranks: those whose processes get it; None for all.
        """
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
    def call_in_step(self, function: Callable[[list[Any]], list[Any]], values: Sequence[Any]) -> list[Any]:
        """Call a Python function of tensors in a step, compiled or not, once each time that the step runs.

        Args:
            function: returns tensors of the same dtypes and shapes; may wait for other processes.
            values: at least one tensor.
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
    def profiled(self, folder: Path) -> AbstractContextManager[Callable[[], list[TraceEvent]]]:
        """Run the engine's profiler inside; what it yields returns the events of this process, afterwards.

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
