"""Records by which an engine says what it can, what a step sends and holds, and what its profiler saw.

`interface.py` says which of its functions return them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_flow.current.batch import BatchPlan


@dataclass(frozen=True)
class TraceEvent:
    """Something that an engine's profiler saw.

    Attributes:
        rank: the rank that it ran on; None where the engine does not say.
        lane: a thread, as text: events of one lane nest.
        name: what ran.
        begin: microseconds since the profile began.
        duration: microseconds.
        facts: what else is known. Of a collective `bytes`: of its tensor on one rank, of the larger side where they
            differ (the gathered tensor of an all-gather), as `explain` counts them; and `layer`, or `layers` where
            tensors of several travel together, where the engine says so.
        collective: our name of the collective that this event is. None for everything else, and for calls around a
            collective, so that each collective is there once.
        origin: lane and time of what caused it, where that is elsewhere: its step and layer are those of that place.
    """

    rank: int | None
    lane: str
    name: str
    begin: float
    duration: float
    facts: Mapping[str, object] = field(default_factory=dict)
    collective: str | None = None
    origin: tuple[str, float] | None = None


@dataclass(frozen=True)
class StepTraffic:
    """Communication of an engine in a step beyond what the layouts need, as data that `explain` reads.

    The values were counted: bytes in XLA's compiled programs, around the calls to `torch.distributed`, and in
    TensorFlow's partitioned graphs. `tests/explainer/test_against_engines.py` counts them again.

    Attributes:
        adds_before_summing: partial gradients of one tensor, from several layers that read it or from
            calls of one layer, are added before one all-reduce; otherwise each is reduced.
        scatters_sums: a sum of which each rank needs a part is a reduce-scatter; otherwise an all-reduce, then a cut.
        gather_is_sum: an all-gather is an all-reduce of padded pieces.
        joins_gradients: gradients travel together; otherwise each in a collective of its own.
        reduces_slices_for_each_use: the gradient of an embedding table is reduced for each of its uses in an
            optimizer's update.
        gathers_again: a weight that is gathered for its use (`zero=3`) is not kept for the backward pass, but gathered
            again.
        gathers_outputs: the model's outputs are gathered over the batch axes for losses (in the `"mirrored"` view) and
            metrics (in the `"consistent"` one with the targets) that do not add up rows.
        batch_statistics_vectors: vectors, each as long as the channels, that BatchNormalization reduces forward and
            backward.
    """

    adds_before_summing: bool = True
    scatters_sums: bool = False
    gather_is_sum: bool = False
    joins_gradients: bool = False
    reduces_slices_for_each_use: bool = False
    gathers_again: bool = False
    gathers_outputs: frozenset[str] = frozenset()
    batch_statistics_vectors: tuple[int, int] = (2, 2)


@dataclass(frozen=True)
class StepMemory:
    """Memory that an engine uses in a step besides weights, slots, gradients and outputs of layers.

    `explain` reads it for its estimate of the peak.

    The values are those with which the estimate comes closest to XLA's buffer assignment, torch's profiler and
    TensorFlow's allocator; `tests/explainer/test_against_engines.py` compares them, docs/explain.md says how close.

    Attributes:
        activation_tensors: activation function -> tensors of its output's size that its backward pass needs besides
            the output. Functions not named need one, the input.
        normalization_tensors: the same number for LayerNormalization and RMSNormalization.
        batch_normalization_tensors: the same number for BatchNormalization.
        attention_head_copies: copies of queries, keys, values and their result that attention holds besides the
            projections.
        attention_score_copies: copies of its scores [rows, heads, length, length] that attention holds.
        loss_tensors: tensors of the size of the model's outputs that losses hold with their gradients.
        max_pool_gradient_bytes: bytes that the backward pass of max pooling needs, for each element of its input and
            each dim of it.
        max_pool_index_bytes: bytes that max pooling keeps for each element of its output.
        reduces_out_of_place: gradients that are summed over ranks exist twice at a time, before and after.
        update_tensors: tensors of a variable's size that an optimizer's update makes.
        cuts_gradients: with `zero=2` a rank keeps its parts of gradients alone; otherwise they are whole until the
            update, since the engine sums them together.
        scattered_bytes: gradients that are on their way to the ranks that keep them, at most: packed, and as arrived.
    """

    activation_tensors: Mapping[str, int] = field(default_factory=dict)
    normalization_tensors: int = 1
    batch_normalization_tensors: int = 0
    attention_head_copies: int = 1
    attention_score_copies: int = 2
    loss_tensors: int = 2
    max_pool_gradient_bytes: int = 0
    max_pool_index_bytes: int = 0
    reduces_out_of_place: bool = False
    update_tensors: int = 0
    cuts_gradients: bool = False
    scattered_bytes: int = 0

    def tensors_of_activation(self, name: str) -> int:
        """Tensors that the activation function of this name needs besides its output."""
        plain = {"linear": 0, "relu": 0, "softmax": 0, "sigmoid": 0, "tanh": 0}
        return {**plain, **self.activation_tensors}.get(name, 1)


@dataclass(frozen=True)
class Capabilities:
    """The layouts and features of one engine, as data. An exception of an engine is a row here, not a branch elsewhere.

    Attributes:
        drives_all_ranks: one process drives every rank of a host (JAX, TensorFlow) or one rank (torch).
        several_axes_on_one_dim: a dim may be split by two placement axes at once, as in `(S(0), S(0))`.
        lays_by_keras: Keras's own functions lay values out by this engine's layouts of ours.
        whole_variables: variables that an operator of the engine needs unsplit: layer class name (subclasses included)
            -> (names of its variables, the reason).
        held_whole: variables that the engine holds whole whatever is asked: `"integers"` (of any dtype that is no
            float) or `"preprocessing"` (those of Keras's layers of this name) -> the reason.
        gathered_variables: layers whose split variables are gathered where they are used, so that the ranks share the
            memory and not the work: layer class name (subclasses included) -> the reason.
        strategies: what `kf.DataParallel(strategy=...)` may name.
        refused: features that raise under a distribution: name -> the engine's own reason.
        uneven_batches: `"parallel"` (rows stay split), `"own rows"` (in the mirrored view, if each rank gets rows) or
            `"broadcast"` (every rank computes that batch).
        splits_backward_pass: the gradients by a stage's inputs can be computed before those by its weights; otherwise a
            pipeline computes both at once.
        masks_reach_metrics: whether Keras's training step on this engine gives metrics the masks of predictions.
        traffic: what a step communicates beyond what the layouts need.
        memory: what a step holds beyond variables, gradients and outputs.
        environment: environment variables that the engine's folder sets in its own process -> why.
        long_first_step: why the first step of a `fit` takes longer than the next ones; empty where it does not.
        long_without_jit: the same where Keras does not compile steps; empty where that is no reason.
    """

    drives_all_ranks: bool
    several_axes_on_one_dim: bool
    uneven_batches: str
    lays_by_keras: bool = False
    whole_variables: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    held_whole: Mapping[str, str] = field(default_factory=dict)
    gathered_variables: Mapping[str, str] = field(default_factory=dict)
    strategies: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    splits_backward_pass: bool = True
    masks_reach_metrics: bool = True
    traffic: StepTraffic = field(default_factory=StepTraffic)
    memory: StepMemory = field(default_factory=StepMemory)
    environment: Mapping[str, str] = field(default_factory=dict)
    long_first_step: str = ""
    long_without_jit: str = ""

    def keeps_split(self, plan: BatchPlan, mirrored_view: bool) -> bool:
        """Whether the rows of a batch stay split over the data ranks."""
        if plan.divides or self.uneven_batches == "parallel":
            return True
        return self.uneven_batches == "own rows" and mirrored_view and plan.rows >= plan.replicas


@dataclass(frozen=True)
class RandomPart:
    """The elements of a random draw that are made in one place (`logical_random.py`).

    Attributes:
        shape: logical shape of the draw.
        slices: the elements, one slice for each dim.
        finish: what makes the engine's tensor of the caller from their values; None where the values are that.
        rows: how many of dim 0 are made, where they begin at a scalar of the program that is being traced.
    """

    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    finish: Callable[[Any], Any] | None = None
    rows: int | None = None

    @classmethod
    def whole(cls, shape: Sequence[int], finish: Callable[[Any], Any] | None = None) -> RandomPart:
        """All elements of a draw."""
        return cls(tuple(shape), tuple(slice(0, length) for length in shape), finish)


@dataclass(frozen=True)
class Replica:
    """The model of one rank, trained by a loop of the user's own: what `kf.DistributedDataParallel` needs.

    Attributes:
        call: the model's call.
        gradients_of: takes a loss function, and whether that returns `(loss, others)`. It returns a function of this
            process's tensors, which gives what the loss function returned and the gradients by
            `model.trainable_weights`.
        averages: whether the engine itself averages these over the ranks. Then it also adds up those of `no_sync`.
        no_sync: inside, gradients are not averaged; None where `averages` is false.
        is_recorded: whether the engine will average gradients of what is computed now; None where `averages` is false.
    """

    call: Callable[..., Any]
    gradients_of: Callable[[Callable[..., Any], bool], Callable[..., tuple[Any, list[Any]]]]
    averages: bool = False
    no_sync: Callable[[], AbstractContextManager[object]] | None = None
    is_recorded: Callable[[], bool] | None = None
