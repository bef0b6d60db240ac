"""Published schedules, each a function of the number of ranks and of micro-batches.

Times below are of p ranks, m micro-batches and v stages of a rank; F, I, W are the times of one micro-batch on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from keras_flow.errors import FlowError
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from keras_flow.schedules.schedule import Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., 2019, arXiv:1811.06965).

    A step takes (m + p - 1)(F + I + W); each rank holds the activations of all m micro-batches.

    Args:
        ranks: how many; each has one stage.
        microbatches: into how many parts a batch is cut.

    Raises:
        FlowError: a number is not positive.

    Example:
        >>> gpipe(2, 2).draw()
        0 F0 F1 ·· ·· ·· B0 B0 B1 B1
        1 ·· F0 F1 B0 B0 B1 B1 ·· ··
    """
    _check(ranks, microbatches)
    return gpipe_on(range(ranks), microbatches)


def gpipe_on(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """`gpipe` of stages on given ranks.

    Args:
        rank_of_stage: the rank of each stage, counted from 0.
        microbatches: parts of a batch.

    Example:
        >>> gpipe_on([0, 1, 0], 1).draw()
        0 F0 ·· f0 b0 b0 ·· ·· B0 B0
        1 ·· F0 ·· ·· ·· B0 B0 ·· ··
    """
    _check(max(rank_of_stage) + 1, microbatches)
    stages = range(len(rank_of_stage))
    orders: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for kind, order in ((FORWARD, stages), (BACKWARD, stages[::-1])):
        for part in range(microbatches):
            for stage in order:
                orders[rank_of_stage[stage]].append(Action(stage, kind, part))
    return Schedule(orders, "gpipe")


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forward and backward passes in turn, as soon as a backward pass can be (Narayanan et al., 2019, PipeDream-Flush).

    A step takes (m + p - 1)(F + I + W), as in `gpipe`; rank r holds at most p - r micro-batches.

    Args:
        ranks: how many; each has one stage.
        microbatches: into how many parts a batch is cut.

    Raises:
        FlowError: a number is not positive.

    Example:
        >>> one_f_one_b(2, 3).draw()
        0 F0 F1 ·· ·· B0 B0 F2 B1 B1 ·· B2 B2
        1 ·· F0 B0 B0 F1 B1 B1 F2 B2 B2 ·· ··
    """
    return _in_turn("1f1b", ranks, microbatches, 1, ahead=1, kinds=_whole)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages on each rank, which shortens the fill (Narayanan et al., 2021, arXiv:2104.04473).

    Rank r has the stages r, r + p, r + 2p and so on. A step takes m(F + I + W) + (p - 1)(F + I + W) / v where p divides
    m. Messages are v times as many as with one stage.

    Args:
        ranks: how many.
        microbatches: into how many parts a batch is cut.
        chunks: stages of a rank.

    Raises:
        FlowError: a number is not positive.

    Example:
        >>> interleaved(2, 2).draw()
        0 F0 F1 f0 f1 ·· ·· b0 b0 ·· b1 b1 B0 B0 B1 B1
        1 ·· F0 F1 f0 b0 b0 f1 b1 b1 B0 B0 B1 B1 ·· ··
    """
    # with one stage a micro-batch comes back after p - 1 - r ranks; with several two of each rank are on their way
    return _in_turn("interleaved", ranks, microbatches, chunks, ahead=2 if chunks > 1 else 1, kinds=_whole)


def zb1p(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B whose backward passes are split: W fills what was idle (Qi et al., 2023, arXiv:2401.10241).

    With F = I = W and m >= p a step takes 3mF + (p - 1)F / v. A rank holds as many micro-batches as in `one_f_one_b`,
    or p.

    Args:
        ranks: how many.
        microbatches: into how many parts a batch is cut.
        chunks: how many stages each rank has, placed as in `interleaved`.

    Raises:
        FlowError: a number is not positive.

    Example:
        >>> zb1p(2, 3).draw()
        0 F0 F1 ·· I0 W0 F2 I1 W1 I2 W2
        1 ·· F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return _in_turn("zb1p", ranks, microbatches, chunks, ahead=1, kinds=_split)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """A V: rank r has the stages r and 2p - 1 - r, so the last stage is on the first rank (Qi et al., 2024).

    With F = I = W and m >= 2p - 1 a step takes 3mF + (p - 1)F / 2, and each rank holds at most p micro-batches ("V-ZB"
    of arXiv:2405.15362). The first and the last stage are on one rank: tied embeddings need no message.

    Args:
        ranks: how many; each has two stages.
        microbatches: into how many parts a batch is cut.

    Raises:
        FlowError: a number is not positive.

    Example:
        >>> zbv(2, 3).stages, zbv(2, 3).rank_of
        (4, {0: 0, 1: 1, 2: 1, 3: 0})
    """
    _check(ranks, microbatches)
    return Schedule([_v(ranks, rank, microbatches) for rank in range(ranks)], "zbv")


def _check(ranks: int, microbatches: int, chunks: int = 1) -> None:
    given = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise FlowError(f"{name} is a whole number from 1 on; got {value!r}")


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches in rounds of about as many as ranks: a round goes through a rank's first stage, then its second."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    starts = [number * size + min(number, more) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _passes(ranks: int, microbatches: int, chunks: int, backward: bool) -> Iterator[tuple[int, int]]:
    """Yield the chunk and the micro-batch of a rank's forward or backward passes in their order."""
    for part in _rounds(ranks, microbatches):
        for chunk in reversed(range(chunks)) if backward else range(chunks):
            for microbatch in part:
                yield chunk, microbatch


def _in_turn(
    name: str, ranks: int, microbatches: int, chunks: int, ahead: int, kinds: Callable[[int, int], list[str]]
) -> Schedule:
    """Some forward passes, then forward and backward in turn, then the backward passes that are left.

    Args:
        name: the name of the schedule.
        ranks: how many.
        microbatches: likewise.
        chunks: how many stages each rank has.
        ahead: forward passes that a rank makes, before its first backward pass, for each rank behind it.
        kinds: the rank and the number of a backward pass -> its kinds. W is that of the first micro-batch that waits
            for it.
    """
    _check(ranks, microbatches, chunks)
    first = len(_rounds(ranks, microbatches)[0])
    orders = []
    for rank in range(ranks):
        forward = [Action(c * ranks + rank, FORWARD, m) for c, m in _passes(ranks, microbatches, chunks, False)]
        warm_up = min((chunks - 1) * first + ahead * (ranks - 1 - rank), len(forward))
        order, waiting = forward[:warm_up], []
        for place, (chunk, part) in enumerate(_passes(ranks, microbatches, chunks, True)):
            order += forward[warm_up + place : warm_up + place + 1]
            stage = chunk * ranks + rank
            for kind in kinds(rank, place):
                if kind == INPUTS:
                    waiting.append(Action(stage, WEIGHTS, part))
                order.append(waiting.pop(0) if kind == WEIGHTS else Action(stage, kind, part))
        orders.append(order + waiting)
    return Schedule(orders, name)


def _whole(rank: int, place: int) -> list[str]:
    return [BACKWARD]


def _split(rank: int, place: int) -> list[str]:
    """The backward pass by the inputs at once; one by the weights, once as many are behind as the rank's number."""
    return [INPUTS, WEIGHTS] if place >= rank else [INPUTS]


def _v(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """One rank's list of `zbv`, as the paper builds it for at least 2p - 1 micro-batches; those over are left out."""
    many = max(2 * ranks - 1, microbatches)
    down, up = rank, 2 * ranks - 1 - rank  # its stages
    order: list[Action] = []
    done = {(stage, kind): 0 for stage in (down, up) for kind in (FORWARD, INPUTS, WEIGHTS)}

    def add(stage: int, *kinds: str) -> None:
        for kind in kinds:
            order.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        add(down, FORWARD)
    for _ in range(rank):
        add(up, FORWARD)
        add(down, FORWARD)
    for _ in range(ranks - rank):
        add(up, FORWARD, INPUTS, WEIGHTS)
    while done[up, FORWARD] < done[down, FORWARD] or done[down, FORWARD] < many:
        if done[down, FORWARD] < many:
            add(down, FORWARD)
        add(down, INPUTS, WEIGHTS)
        add(up, FORWARD, INPUTS, WEIGHTS)
    for _ in range(rank):
        add(down, INPUTS)
        add(up, INPUTS)
    for _ in range(ranks - rank):
        add(down, INPUTS, WEIGHTS)
    for stage in (up, down):
        while done[stage, WEIGHTS] < done[stage, INPUTS]:
            add(stage, WEIGHTS)
    return [action for action in order if action.microbatch < microbatches]
