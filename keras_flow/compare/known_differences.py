"""Differences between engines on one device that are known, and which of them concern a program.

The only list of them: `keras-flow compare` names those that fit, and `docs/engine-bugs.md` has all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

#: optimizers whose update is linear in the gradient, so that slices of it may be added before or after
_LINEAR = ("SGD",)


@dataclass(frozen=True)
class ProgramFacts:
    """The facts of a program by which known differences are told.

    Attributes:
        layers: class names of its layers.
        optimizer: class name of its optimizer.
        clips: whether the optimizer clips gradients.
        outputs: number of outputs that have a loss.
        short_batch: rows of the last batch where it is shorter than the others; else 0.
        dtypes: dtypes in which layers compute.
        device: type of the devices, `"cpu"`, `"gpu"` or `"tpu"`.
        random: whose random numbers it draws: `"logical"`, or the engine's own, `"stock"`; empty where it draws none.
    """

    layers: Collection[str] = ()
    optimizer: str = "SGD"
    clips: bool = False
    outputs: int = 1
    short_batch: int = 0
    dtypes: Collection[str] = ("float32",)
    device: str = "cpu"
    random: str = ""


@dataclass(frozen=True)
class KnownDifference:
    """One difference.

    Attributes:
        name: a short name.
        engines: those that have other numbers than the rest. Empty: each has its own.
        of: what differs: `"training"`, or `"metrics"` alone.
        what: what happens, and on which engine.
        advice: how to have equal numbers.
        fits: whether it concerns a program.
        reproduction: the function of `tests/engine_bugs` that shows it; empty where only special hardware does.
    """

    name: str
    engines: tuple[str, ...]
    of: str
    what: str
    advice: str
    fits: Callable[[ProgramFacts], bool]
    reproduction: str = ""

    def separates(self, one: str, other: str) -> bool:
        """Whether two engines have different numbers by it."""
        return one != other and (not self.engines or (one in self.engines) != (other in self.engines))


KNOWN: tuple[KnownDifference, ...] = (
    KnownDifference(
        name="repeated rows of an embedding",
        engines=("tensorflow",),
        of="training",
        what="Keras's optimizers on TensorFlow take the gradient of an embedding as slices, one for each token. Adam, "
        "RMSprop and their like square them, and clipping takes their norm, before the slices of a token that occurs "
        "twice are added up. JAX and torch add first.",
        advice="Compare with SGD without clipping, which has equal numbers everywhere; a distribution has those of one "
        "device of its engine.",
        fits=lambda program: (
            bool({"Embedding", "ReversibleEmbedding"} & set(program.layers))
            and (program.optimizer not in _LINEAR or program.clips)
        ),
        reproduction="adam_squares_the_slices_of_a_repeated_row_one_by_one",
    ),
    KnownDifference(
        name="losses of outputs in a short last batch",
        engines=("tensorflow",),
        of="metrics",
        what="In `fit` and `evaluate` of a model with several outputs, stock Keras on TensorFlow gives the short last "
        "batch the weight of a whole one in the loss of each output (`a_loss`, `b_loss`). JAX and torch weigh by rows, "
        "and so does keras_flow on every engine; `loss` itself is by rows everywhere.",
        advice="Take a batch size that divides the rows where these metrics are compared.",
        fits=lambda program: program.outputs > 1 and program.short_batch > 0,
        reproduction="losses_of_outputs_weigh_a_short_batch_as_a_whole_one",
    ),
    KnownDifference(
        name="random numbers of each engine",
        engines=(),
        of="training",
        what='With random="stock" dropout masks, noise and shuffles are those of each engine.',
        advice='Use random="logical", the default: its numbers are equal on every engine.',
        fits=lambda program: program.random == "stock",
    ),
    KnownDifference(
        name="TF32",
        engines=(),
        of="training",
        what="On NVIDIA GPUs since Ampere the engines compute some products of float32 in TF32, with 10 bits of "
        "mantissa. TensorFlow does so for all products, JAX by its matmul precision, torch for convolutions.",
        advice='Turn it off where numbers are compared: `jax_default_matmul_precision="highest"`, '
        "`tf.config.experimental.enable_tensor_float_32_execution(False)`, "
        "`torch.backends.cudnn.allow_tf32 = False`.",
        fits=lambda program: program.device == "gpu" and "float32" in program.dtypes,
    ),
    KnownDifference(
        name="half precision",
        engines=(),
        of="training",
        what="In float16 and bfloat16 each engine rounds sums at other places, 2^-10 or 2^-7 of a value at a time.",
        advice="Compare engines in float32.",
        fits=lambda program: bool({"float16", "bfloat16"} & set(program.dtypes)),
    ),
)


def that_fit(program: ProgramFacts, engines: Sequence[str]) -> list[KnownDifference]:
    """The known differences that concern a program on some of these engines."""
    pairs = [(one, other) for one in engines for other in engines]
    return [each for each in KNOWN if each.fits(program) and any(each.separates(*pair) for pair in pairs)]
