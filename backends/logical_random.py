"""`random="logical"`: what `keras.random` draws under a distribution depends on the seed and the logical index alone.

The 32 bits of an element are Philox (`keras_flow/philox.py`) of its index in the logical tensor, so that they are equal
for every layout, number of ranks and engine, and a rank draws its own elements only. From these bits each function of
`keras.random` is computed here, once for all engines, by one element's own bits:

    uniform            fraction * (maxval - minval) + minval
    normal             the inverse of the normal distribution, sqrt(2) * erfinv(2 * fraction - 1)
    truncated_normal   the same between the two cuts
    dropout            keeps an element where its fraction is not below the rate
    randint            multiply and shift (Lemire 2019)
    categorical        the largest of logits + Gumbel noise (Gumbel 1954)
    shuffle            the order of one fraction for each position
    gamma, beta        Marsaglia and Tsang (2000), with a fixed number of attempts

`binomial`, and `randint` of more than 2**30 numbers, stay the engine's: equal for every layout, not for every engine.
An engine says which elements are drawn here (`random_part`) and draws their fractions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from keras_flow.backends.active import backend
from keras_flow.backends.engine_records import RandomPart
from keras_flow.backends.hooking import hook
from keras_flow.current import microbatch
from keras_flow.current.distribution import applied
from keras_flow.current.keras_places import draw_seed, in_symbolic_scope
from keras_flow.current.models import layer_in_call

#: without its annotations, which have the None of backends that lack an operation
ops: Any = keras.ops
#: bits of a half-precision number in [0.5, 1): a fraction with more would be rounded up to 1
_HALF_BITS = {"float16": 11, "bfloat16": 8}
#: attempts of a gamma draw; each fails for at most 5 %, so that one value in 10**10 is the last attempt's
_ATTEMPTS = 8
#: elements of a new variable that are drawn at a time: a draw needs some times its memory
_CHUNK = 1 << 18
#: between fractions, which are multiples of 2**-23: the smallest is above 0 then, and the largest below 1
_HALF_STEP = np.float32(2.0**-24)

#: of a new variable: its shape, the slices of the block that is being drawn, and the seed's state
_block: ContextVar[tuple[tuple[int, ...], tuple[slice, ...], Any] | None] = ContextVar("keras_flow_block", default=None)


def drawing(*args: object, **kwargs: object) -> bool | None:
    """Condition of the hooks below: draws are by logical index. Keras's inference of shapes draws nothing."""
    return True if is_logical() and not in_symbolic_scope() else None


def is_logical() -> bool:
    """Whether draws, and the order of rows, are those of `random="logical"`."""
    distribution = applied()
    return distribution is not None and distribution.random == "logical"


def makes_variable() -> bool:
    """Whether a block of a new variable is being drawn: once, so that it is not worth to load a compiler for it."""
    return _block.get() is not None


def draw_block(
    initializer: Callable[..., Any], shape: Sequence[int], dtype: str
) -> Callable[[Sequence[slice], Any], Any]:
    """How blocks of what an initialiser of `initializers.DRAWN` gives for a shape are drawn; no other element is.

    All blocks are of one state of the initialiser's seed, which a `SeedGenerator` moves on once.

    Returns:
        A function of a block's slices and an empty array of its shape, which fills and returns the array, some rows at
        a time: what a draw needs besides is that of these rows.
    """
    state = draw_seed(initializer.seed)  # type: ignore[attr-defined]

    def some(slices: tuple[slice, ...]) -> Any:
        token = _block.set((tuple(shape), slices, state))
        try:
            return initializer(tuple(shape), dtype=dtype)
        finally:
            _block.reset(token)

    def fill(slices: Sequence[slice], out: Any) -> Any:
        if not slices:
            out[...] = some(())
            return out
        rows, *others = slices
        of_a_row = math.prod(part.stop - part.start for part in others)
        step = max(1, _CHUNK // max(1, of_a_row))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            out[start - rows.start : stop - rows.start] = some((slice(start, stop), *others))
        return out

    return fill


# ---- the functions of keras.random


#: a hook on a function of `keras.random`
_by_index = functools.partial(
    hook,
    "keras:random",
    why='random="logical": bits by logical index, equal for every layout and engine',
    when=drawing,
)


@_by_index("uniform")
def uniform(
    _: object,
    original: Callable[..., Any],
    shape: Sequence[int],
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: str | None = None,
    seed: object = None,
) -> Any:
    """Hook on `random.uniform`."""
    draw = _ElementDraw.of(shape, seed)
    if draw is None:
        return original(shape, minval=minval, maxval=maxval, dtype=dtype, seed=seed)
    name = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    fractions = draw.fractions()
    if name in _HALF_BITS:
        steps = np.float32(2.0 ** _HALF_BITS[name])
        fractions = ops.floor(fractions * steps) / steps
    return draw.finished(_scaled(ops.cast(fractions, name), maxval - minval, minval))


@_by_index(("normal", "truncated_normal"))
def normal(
    _: object,
    original: Callable[..., Any],
    shape: Sequence[int],
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: str | None = None,
    seed: object = None,
) -> Any:
    """Hook on `random.normal`, and on `random.truncated_normal`: cut at two standard deviations."""
    draw = _ElementDraw.of(shape, seed)
    if draw is None:
        return original(shape, mean=mean, stddev=stddev, dtype=dtype, seed=seed)
    within = 2.0 if original.__name__ == "truncated_normal" else math.inf
    return draw.finished(_scaled(_cast(draw.normals(within=within), dtype), stddev, mean))


@_by_index("dropout")
def dropout(
    _: object,
    original: Callable[..., Any],
    inputs: Any,
    rate: float,
    noise_shape: Sequence[int | None] | None = None,
    seed: object = None,
) -> Any:
    """Hook on `random.dropout`."""
    if not 0.0 < rate < 1.0:
        return original(inputs, rate, noise_shape, seed)
    lengths = tuple(inputs.shape)
    asked = tuple(noise_shape) if noise_shape is not None else (None,) * len(lengths)
    # as the caller sees it, who may have a rank's own rows
    shape = tuple(length if wanted is None else wanted for length, wanted in zip(lengths, asked, strict=True))
    draw = _ElementDraw.of(shape, seed, inputs, asked)
    if draw is None:
        return original(inputs, rate, noise_shape, seed)
    kept = draw.finished(draw.fractions() >= np.float32(rate))
    return ops.where(kept, inputs / (1.0 - rate), ops.zeros_like(inputs))


@_by_index("randint")
def randint(
    _: object,
    original: Callable[..., Any],
    shape: Sequence[int],
    minval: Any,
    maxval: Any,
    dtype: str = "int32",
    seed: object = None,
) -> Any:
    """Hook on `random.randint`."""
    is_known = isinstance(minval, int | np.integer) and isinstance(maxval, int | np.integer)
    draw = _ElementDraw.of(shape, seed) if is_known and 0 < maxval - minval <= 2**30 else None
    if draw is None:
        return original(shape, minval, maxval, dtype=dtype, seed=seed)
    values = draw.offsets(int(maxval - minval))
    if minval:
        values = values if minval >= -(2**31) and maxval <= 2**31 else ops.cast(values, "int64")
        values = values + minval
    return draw.finished(ops.cast(values, dtype))


@_by_index("categorical")
def categorical(
    _: object,
    original: Callable[..., Any],
    logits: Any,
    num_samples: int,
    dtype: str = "int32",
    seed: object = None,
) -> Any:
    """Hook on `random.categorical`: logits [rows, classes] to samples [rows, num_samples]."""
    rows, classes = logits.shape
    draw = _ElementDraw.of((rows, num_samples, classes), seed)
    if draw is None:
        return original(logits, num_samples, dtype=dtype, seed=seed)
    noise = -ops.log(-ops.log(draw.fractions() + _HALF_STEP))
    return ops.cast(ops.argmax(ops.expand_dims(logits, 1) + draw.finished(noise), axis=-1), dtype)


@_by_index("shuffle")
def shuffle(_: object, original: Callable[..., Any], x: Any, axis: int = 0, seed: object = None) -> Any:
    """Hook on `random.shuffle`: one order along the axis."""
    draw = _ElementDraw.of((x.shape[axis],), seed, is_whole=True)
    if draw is None:
        return original(x, axis=axis, seed=seed)
    return backend().reorder(x, draw.fractions(), axis)


@_by_index("gamma")
def gamma(
    _: object,
    original: Callable[..., Any],
    shape: Sequence[int],
    alpha: Any,
    dtype: str | None = None,
    seed: object = None,
) -> Any:
    """Hook on `random.gamma`."""
    draw = _ElementDraw.of(shape, seed)
    if draw is None:
        return original(shape, alpha, dtype=dtype, seed=seed)
    return draw.finished(_cast(draw.gammas(alpha), dtype))


@_by_index("beta")
def beta(
    _: object,
    original: Callable[..., Any],
    shape: Sequence[int],
    alpha: Any,
    beta: Any,
    dtype: str | None = None,
    seed: object = None,
) -> Any:
    """Hook on `random.beta`: a gamma draw over the sum of two."""
    draw = _ElementDraw.of(shape, seed)
    if draw is None:
        return original(shape, alpha, beta, dtype=dtype, seed=seed)
    first, second = draw.gammas(alpha), draw.gammas(beta, first_tag=2 * _ATTEMPTS + 1)
    return draw.finished(_cast(first / (first + second), dtype))


def _cast(values: Any, dtype: str | None) -> Any:
    return ops.cast(values, dtype or keras.config.floatx())


def _scaled(values: Any, factor: Any, shift: Any) -> Any:
    # by default nothing changes: then two passes over the values are saved
    values = values if isinstance(factor, float) and factor == 1.0 else values * factor
    return values if isinstance(shift, float) and shift == 0.0 else values + shift


class _ElementDraw:
    """One call of a function of `keras.random`: the words of its seed, and the elements that are drawn here."""

    def __init__(self, words: tuple[Any, Any], part: RandomPart):
        self._words, self._part = words, part

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        seed: object,
        inputs: Any = None,
        noise_shape: Sequence[int | None] | None = None,
        is_whole: bool = False,
    ) -> _ElementDraw | None:
        """The draw of a shape, or None where the engine has a way of its own (or refuses).

        Args:
            shape: of the draw, as the caller sees it: of its own rows, where it computes these alone. Lengths may be
                unknown: None, or a scalar of the program that is being traced.
            seed: the argument of a function of `keras.random`.
            inputs: what the draw is multiplied with, for a mask.
            noise_shape: the shape of the mask; None for lengths that are those of the inputs.
            is_whole: the draw is for all rows, wherever it is made.
        """
        lengths = tuple(int(length) if isinstance(length, int | np.integer) else length for length in shape)
        block = _block.get()
        if block is not None and block[0] == tuple(shape):
            return cls(backend().random_words(block[2]), RandomPart(*block[:2]))
        part = _part_of_microbatch(lengths, inputs, noise_shape, is_whole)
        if part is None:
            part = backend().random_part(lengths, inputs, noise_shape, is_whole)
        return None if part is None else cls(backend().random_words(_seed_state(seed)), part)

    def fractions(self, tag: int = 0) -> Any:
        """float32 in [0, 1); draws of other tags are independent."""
        return backend().random_fractions(self._words, tag, self._part)

    def offsets(self, span: int) -> Any:
        """Whole numbers in [0, span)."""
        return backend().random_offsets(self._words, self._part, span)

    def normals(self, tag: int = 0, within: float = math.inf) -> Any:
        """float32, standard normal, cut at `within` on both sides."""
        centred = self.fractions(tag) * np.float32(2.0) + (2 * _HALF_STEP - np.float32(1.0))
        if within < math.inf:
            centred = centred * np.float32(math.erf(within / math.sqrt(2.0)))
        return ops.erfinv(centred) * np.float32(math.sqrt(2.0))

    def gammas(self, alpha: Any, first_tag: int = 0) -> Any:
        """float32, of shape parameter `alpha` and scale 1."""
        alpha = ops.convert_to_tensor(alpha, "float32")
        # a gamma of alpha < 1 is one of alpha + 1 times a power of a fraction (section 6 of the paper)
        shift = ops.cast(alpha < 1.0, "float32")
        d = alpha + shift - 1.0 / 3.0
        c = 1.0 / ops.sqrt(9.0 * d)
        cubes = None
        for attempt in reversed(range(_ATTEMPTS)):
            z = self.normals(first_tag + 2 * attempt)
            u = self.fractions(first_tag + 2 * attempt + 1) + _HALF_STEP
            v = ops.power(ops.maximum(1.0 + c * z, 1e-6), 3.0)
            accepted = ops.log(u) < 0.5 * z * z + d - d * v + d * ops.log(v)
            # the first attempt that is accepted counts, so later ones are overwritten
            cubes = v if cubes is None else ops.where(accepted, v, cubes)
        power = self.fractions(first_tag + 2 * _ATTEMPTS) + _HALF_STEP
        return d * cubes * ops.where(shift > 0, ops.power(power, 1.0 / ops.maximum(alpha, 1e-6)), 1.0)

    def finished(self, values: Any) -> Any:
        """Make the caller's result from the values that were computed for the elements drawn here."""
        return values if self._part.finish is None else self._part.finish(values)


def _part_of_microbatch(
    shape: tuple[int, ...], inputs: Any, noise_shape: Sequence[int | None] | None, is_whole: bool
) -> RandomPart | None:
    """The elements of a draw within a stage of a pipeline: those of the rows that are computed; None elsewhere.

    Draws of another length than the rows' are for all of them.
    """
    here = microbatch.current()
    if here is None or is_whole or not shape or not has_known_lengths(shape):
        return None
    own = int(shape[0] if inputs is None else inputs.shape[0])
    if own % here.count or (inputs is not None and has_one_mask(noise_shape, own)):
        return RandomPart.whole(shape)
    rows, slices = here.of(own)
    if shape[0] not in (own, rows):  # a noise shape may name the rows of the whole batch
        return RandomPart.whole(shape)
    return RandomPart((rows, *shape[1:]), (slices, *(slice(0, length) for length in shape[1:])), rows=own)


def has_known_lengths(shape: Sequence[object]) -> bool:
    """Whether each length of a draw is a number, and none a scalar of a graph, which knows it only as it runs."""
    return all(isinstance(length, int) for length in shape)


def has_one_mask(noise_shape: Sequence[int | None] | None, own: int) -> bool:
    """Whether all rows have one mask. Of a single row, a spatial dropout asks for the same shape."""
    if not noise_shape or not isinstance(noise_shape[0], int) or noise_shape[0] != 1:  # TensorFlow may give a tensor
        return False
    # one row asks for [1, ...] too: then only the layer's own noise_shape tells the two apart
    return own != 1 or getattr(layer_in_call(), "noise_shape", None) is not None


def _seed_state(seed: object) -> Any:
    # JAX's functions also take the two words themselves
    return seed if getattr(seed, "shape", None) == (2,) else draw_seed(seed)  # type: ignore[arg-type]
