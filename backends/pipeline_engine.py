"""The part of an engine that trains a model in stages: pipelines, and models on parameter servers.

Each engine has it in its `stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution


class StageProgram(Protocol):
    """The program of a stage of a pipeline."""

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients, and return what its function returns."""
        ...

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage, and return also what its backward pass needs."""
        ...

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Return the gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors that were sent, from the stage that received them; None where it has
                none.
            scale: the gradient by the sum of the stage's losses.
        """
        ...

    def backward_inputs(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], Any]:
        """Return the gradients by the tensors that were received, and what `backward_weights` needs."""
        ...

    def backward_weights(self, later: Any) -> list[Any]:
        """Return the gradients by the weights; called once."""
        ...


class PipelineEngine(Protocol):
    """An engine that computes stages, moves tensors between them and updates weights that are on several ranks."""

    def stage_program(
        self, function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None = None
    ) -> StageProgram:
        """Return the program that computes a stage of a pipeline, and its gradients, on a rank.

        Args:
            function: takes weights, tensors and others. It returns what has gradients, the sum of the losses last, and
                all else.
            rank: its device computes.
            compiled: whether to compile, where the engine does.
            split: lays tensors over the ranks that compute the stage together; None where `rank` computes it alone.
        """
        ...

    def compiled(self, function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
        """Return a function that computes on the device of a rank, without gradients."""
        ...

    def on(self, rank: int, structure: Any, split: Distribution | None = None) -> Any:
        """Put a structure of tensors and numbers on the device of a rank of this process.

        Args:
            rank: the rank.
            structure: tuples, lists and dicts of tensors and numbers.
            split: lays tensors over the rank and others, where these compute together; the tensors keep their layout.
        """
        ...

    def add(self, total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
        """Add gradients one by one; None where there is neither summand."""
        ...

    def read(self, variable: keras.Variable) -> Any:
        """Return the value of a variable, on the device where it is."""
        ...

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Assign to a variable a value that was computed on its device."""
        ...

    def apply_gradients(
        self,
        optimizer: Any,
        parts: Sequence[tuple[int, list[keras.Variable], list[Any]]],
        is_compiled: bool,
        programs: dict[Any, Any],
    ) -> None:
        """Update weights that are on several ranks, in one step of the optimizer.

        Args:
            optimizer: its slots are on the ranks of their variables.
            parts: each rank of this process that has any, with its weights and a gradient for each of them.
            is_compiled: whether to compile, where the engine does.
            programs: what was compiled before; what is compiled now is added.
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
        """Begin to send a list of tensors, or lists of them, to a rank of another process.

        Args:
            tensors: some may be None.
            pair: the rank that sends, and the rank that receives.
            tag: tells messages apart that are on their way between two ranks.
            told: the keys whose shapes were told before. What is received has another such dict.
            key: messages of one key have the same shapes, which are told with the first.

        Returns:
            A function that waits until the tensors are sent.
        """
        ...

    def receive_tensors(
        self, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object, split: Distribution | None = None
    ) -> Callable[[], Any]:
        """Begin to receive what a rank of another process sends.

        Args:
            pair, tag, told, key: as in `send_tensors`.
            split: lays tensors over the receiving rank and others, where these compute together: each receives its
                part of what is split.

        Returns:
            A function that waits for the tensors and returns them.
        """
        ...

    def sum_over_processes(self, value: Any) -> Any:
        """Return the sum of a scalar over all processes, in each of them."""
        ...

    def sum_over_ranks(
        self,
        ranks: tuple[int, ...],
        given: Sequence[list[Any]],
        weights: Sequence[keras.Variable],
        split: Distribution | None = None,
    ) -> Callable[[], list[Any]]:
        """Begin to sum the gradients of a stage over its ranks.

        Args:
            ranks: those of the stage.
            given: for each of these ranks that this process drives its gradients, None where it has none.
            weights: the weights of these gradients.
            split: lays the weights over a rank and others, where ranks compute a lane together.

        Returns:
            A function that waits for the sums and returns them.
        """
        ...

    def from_process_of(self, rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
        """Broadcast a structure of tensors from the process that drives a rank to all processes.

        Args:
            rank: the rank whose process has the tensors.
            value: these tensors; in other processes ones of the same shapes where `is_like`, otherwise anything.
            is_like: whether all processes know the shapes.
            ranks: the ranks whose processes take part; None for all.
        """
        ...
