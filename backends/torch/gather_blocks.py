"""Pieces of split variables, from the ranks that hold them to rank 0, one block after the other.

Rank 0 asks for a variable by its number; every other rank answers with what it alone holds, until rank 0 has no more
questions. Point to point, so that rank 0 decides the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts
from keras_flow.current.variable_layout import stage_rank
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

#: the slices of a block in the logical tensor
Index = tuple[slice, ...]

#: bytes of a block
_BLOCK = 8 << 20
_END = -1


class Asking:
    """Rank 0's side.

    Args:
        variables: those that may be asked for, the same on all ranks.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self._numbers = {_key(variable._value): k for k, variable in enumerate(variables) if _is_split(variable._value)}

    def has(self, tensor: object) -> TypeGuard[DTensor]:
        """Whether this is the value of a split variable."""
        return _is_split(tensor) and _key(tensor) in self._numbers

    def blocks(self, tensor: DTensor) -> Generator[tuple[Index, torch.Tensor], None, None]:
        """All elements of a split variable, each once."""
        _ask(self._numbers[_key(tensor)])
        coming = self._coming(tensor)
        try:
            yield from _own_blocks(tensor)
            yield from coming
        finally:
            for _ in coming:  # what is on its way is taken, so that the other ranks can go on
                pass

    def _coming(self, tensor: DTensor) -> Iterator[tuple[Index, torch.Tensor]]:
        # [is there a block, start and stop of each dim]
        header = torch.empty(1 + 2 * tensor.ndim, dtype=torch.int64)
        for rank in range(1, torch_distributed.get_world_size()):
            while True:
                torch_distributed.recv(header, rank)
                is_block, *bounds = header.tolist()
                # an empty header: this rank has sent all that it alone holds
                if not is_block:
                    break
                index = tuple(slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True))
                block = torch.empty([part.stop - part.start for part in index], dtype=tensor.dtype)
                # as bytes: gloo does not send every dtype
                torch_distributed.recv(block.reshape(-1).view(torch.uint8), rank)
                yield index, block

    def whole(self, tensor: DTensor) -> torch.Tensor:
        """The logical value, on this rank only.

        Raises:
            FlowError: it is split, and not the value of a variable.
        """
        # this rank has all of it
        if not _is_split(tensor):
            return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        if not self.has(tensor):
            raise FlowError(
                "rank 0, which writes the files of all ranks, cannot read a split tensor of shape "
                f"{list(tensor.shape)} that is no variable's value: the other ranks do not compute it. Write variables "
                "as they are"
            )
        # block by block into one host tensor: never more than one block more than the value
        filled = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        for index, block in self.blocks(tensor):
            filled[index] = block
        return filled


@contextlib.contextmanager
def asking(variables: Sequence[keras.Variable]) -> Iterator[Asking]:
    """Ask, on rank 0; the other ranks answer meanwhile."""
    try:
        yield Asking(variables)
    finally:
        _ask(_END)


def answer(variables: Sequence[keras.Variable]) -> None:
    """Answer, on the other ranks, until rank 0 has no more questions."""
    number = torch.empty(1, dtype=torch.int64)
    while True:
        # rank 0 alone knows which variable the writer wants next, and when it is done
        torch_distributed.broadcast(number, src=0)
        if number.item() == _END:
            return
        tensor = variables[int(number)]._value
        for index, block in _own_blocks(tensor, variables[int(number)]):
            bounds = [bound for part in index for bound in (part.start, part.stop)]
            torch_distributed.send(torch.tensor([1, *bounds]), 0)
            # as bytes, whatever the dtype is
            torch_distributed.send(block.reshape(-1).view(torch.uint8), 0)
        # a header that begins with 0 ends the answer
        torch_distributed.send(torch.zeros(1 + 2 * tensor.ndim, dtype=torch.int64), 0)


def _ask(number: int) -> None:
    torch_distributed.broadcast(torch.tensor([number]), src=0)


def _own_blocks(tensor: torch.Tensor, variable: keras.Variable | None = None) -> Iterator[tuple[Index, torch.Tensor]]:
    """This rank's piece, unless a rank before it holds the same: blocks of rows."""
    if not isinstance(tensor, DTensor):  # this rank is not in the placement, or its stage has the variable whole
        if stage_rank(variable) == layouts.this_rank():
            local = tensor.detach().cpu()
            if local.ndim:
                yield from _rows(local, 0, tensor.shape[1:])
            else:
                yield (), local
        return
    home = None if variable is None else stage_rank(variable)
    if home is not None and home not in tensor.device_mesh.mesh:
        return  # another lane of the stage has the same, and answers
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    # of ranks with equal pieces, the one at index 0 of each broadcast axis sends
    if any(at for at, part in zip(coordinates, tensor.placements, strict=True) if part.is_replicate()):
        return
    first, *others = layouts.local_slices(tensor.shape, tensor.device_mesh, tensor.placements)
    for (rows, *_), block in _rows(tensor.to_local().detach().cpu(), first.start, ()):
        yield (rows, *others), block


def _rows(local: torch.Tensor, first: int, inner: Sequence[int]) -> Iterator[tuple[Index, torch.Tensor]]:
    """Blocks of rows of a tensor, whose bytes fill one; a row that is larger goes alone."""
    rows = max(1, _BLOCK * len(local) // max(1, local.numel() * local.element_size()))
    for start in range(0, len(local), rows):
        block = local[start : start + rows].contiguous()
        index = slice(first + start, first + start + len(block))
        yield (index, *(slice(0, length) for length in inner)), block


def _is_split(value: object) -> TypeGuard[DTensor]:
    """Whether other ranks have parts of a value, or all of it: that of a pipeline's stage."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return True
    return isinstance(value, DTensor) and any(part.is_shard() for part in value.placements)


def _key(tensor: DTensor) -> int:
    """A key that a variable's value and its detached copies share."""
    if tensor.is_meta:  # no memory, and never detached
        return id(tensor)
    return tensor._local_tensor.untyped_storage().data_ptr()  # no public way without autograd
