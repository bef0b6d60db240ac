"""Draws by logical index on a GPU, by torch's operators: a host's would have to be copied there.

They are what `keras_flow.philox` has, bit by bit. torch has no arithmetic of uint32 on GPUs, so words are int64, and a
product of two is made of two that stay below 2**48: compilers take it that signed numbers never overflow.

On NVIDIA's GPUs `torch.compile` makes one kernel of the operators; one by one, each of 250 would read and write memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from keras_flow import philox
from keras_flow.errors import warn

_LOW = 0xFFFFFFFF
#: counters whose words are made at a time where nothing compiles, so that these take 200 MB at most
_COUNTERS = 1 << 21

#: 64 bits: a number, or an int64 scalar on the device
Word = int | torch.Tensor
#: (counters [n], numbers: the halves of seed and stream, and a span) -> draws [n, 4]
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fractions(
    device: str | torch.device, words: tuple[Word, Word], shape: Sequence[int], slices: Sequence[slice]
) -> torch.Tensor:
    """`philox.fractions` of a block, of its shape, on a device: float32.

    Args:
        device: where.
        words: seed and stream, as `philox.words_of_block` takes them.
        shape: logical shape.
        slices: the block, one slice for each dim.
    """
    return _of_block(_fractions, torch.float32, device, words, shape, slices)


def offsets(
    device: str | torch.device, words: tuple[Word, Word], shape: Sequence[int], slices: Sequence[slice], span: int
) -> torch.Tensor:
    """`philox.offsets` of a block, of its shape, on a device: int32; the other arguments as those of `fractions`."""
    return _of_block(_offsets, torch.int32, device, words, shape, slices, span)


def _fractions(counters: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return (_words(counters, numbers) & philox.FRACTION_BITS).to(torch.float32) * 2.0**-23


def _offsets(counters: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return ((_words(counters, numbers) * numbers[4]) >> 32).to(torch.int32)


def _words(counters: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`philox.words`: int64 [n, 4] below 2**32."""
    key, other_key = numbers[0], numbers[1]
    one, two = counters & _LOW, counters >> 32
    three, four = (half.expand_as(counters) for half in (numbers[2], numbers[3]))
    for _ in range(philox.ROUNDS):
        (high, low), (other_high, other_low) = map(_product, (one, three), philox.MULTIPLIERS)
        one, two, three, four = other_high ^ two ^ key, other_low, high ^ four ^ other_key, low
        key, other_key = (key + philox.WEYL[0]) & _LOW, (other_key + philox.WEYL[1]) & _LOW
    return torch.stack((one, two, three, four), dim=-1)


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product of 32 bits each."""
    high, low = word * (factor >> 16), word * (factor & 0xFFFF)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _LOW


def _of_block(
    program: Program,
    dtype: torch.dtype,
    device: str | torch.device,
    words: tuple[Word, Word],
    shape: Sequence[int],
    slices: Sequence[slice],
    span: int = 0,
) -> torch.Tensor:
    """The draws of a block. A line of the last dim has counters of its own, four elements each."""
    if not shape:
        return _of_block(program, dtype, device, words, (1,), (slice(0, 1),), span).reshape(())
    first, last = slices[-1].start // 4, philox.counters_of_line(slices[-1].stop)
    lines = (*shape[:-1], philox.counters_of_line(shape[-1]))
    own = (*slices[:-1], slice(first, max(first, last)))
    seed, stream = words
    numbers = torch.empty(5, dtype=torch.int64, device=device)  # written one by one: a copy from the host waits
    for place, number in enumerate((seed & _LOW, seed >> 32 & _LOW, stream & _LOW, stream >> 32 & _LOW, span)):
        numbers[place] = number
    drawn = _run(program, dtype, _counters(lines, own, device), numbers)
    line = drawn.reshape(*(part.stop - part.start for part in own[:-1]), 4 * (own[-1].stop - first))
    shift = slices[-1].start - 4 * first
    return line[..., shift : shift + slices[-1].stop - slices[-1].start]


def _counters(lines: Sequence[int], own: Sequence[slice], device: str | torch.device) -> torch.Tensor:
    """The place of each counter of a block among all: int64 [n]."""
    inner = math.prod(lines[1:])
    if all(part == slice(0, length) for part, length in zip(own[1:], lines[1:], strict=True)):  # rows
        return torch.arange(own[0].start * inner, own[0].stop * inner, device=device)
    counters = torch.zeros((), dtype=torch.int64, device=device)
    for dim, part in enumerate(own):
        along = torch.arange(part.start, part.stop, device=device) * math.prod(lines[dim + 1 :])
        counters = counters + along.reshape(-1, *(1,) * (len(own) - 1 - dim))
    return counters.reshape(-1)


#: a program that could not be compiled here: then none can
_uncompiled: list[Program] = []


@torch.no_grad()
def _run(program: Program, dtype: torch.dtype, counters: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    # with one, or none, torch would compile another kernel
    if counters.device.type == "cuda" and len(counters) > 1 and not _uncompiled:
        try:
            return _compiled(program)(counters, numbers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of Triton, which needs a C compiler on the host
            _uncompiled.append(program)
            reason = str(error).strip().partition("\n")[0]
            warn(
                f"torch.compile cannot make a kernel of random draws ({reason}): they are made operator by operator, "
                'some 20 times slower. A C compiler beside Triton mends this; random="stock" draws by torch'
            )
    drawn = torch.empty((len(counters), 4), dtype=dtype, device=counters.device)
    for some, rows in zip(counters.split(_COUNTERS), drawn.split(_COUNTERS), strict=True):
        rows.copy_(program(some, numbers))
    return drawn


@functools.cache
def _compiled(program: Program) -> Program:
    """One kernel, for any number of counters."""
    return torch.compile(program, dynamic=True)
