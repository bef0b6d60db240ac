"""Messages between the stages of a pipeline on torch: `torch.distributed`, of a DTensor the piece of this rank.

A piece becomes a DTensor again on the ranks that compute the next stage together: the rank that gets it has the place
among them that the rank that sent it has among its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_distributed
from keras import tree
from torch.distributed.tensor import DTensor, Replicate, Shard

from keras_flow import sbp
from keras_flow.backends.mail.structures import described, leaves, made
from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.backends.torch.collectives import process_group
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import engine_core as core


def send_tensors(
    tensors: Any, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object
) -> Callable[[], None]:
    """Begin to send a structure of tensors to a rank; returns what waits until it has left."""
    every = [_plainly_laid(leaf) for leaf in leaves(tensors)]
    works, sent = [], []
    if key not in told:
        told[key] = True
        text = json.dumps([described(tensors), [_dims(leaf) for leaf in every]]).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sent += [torch.tensor([len(text)]), header]
    sent += [local(leaf).contiguous() for leaf in every]
    for leaf in sent:
        works.append(torch_distributed.isend(leaf, pair[1], tag=tag))

    def wait() -> None:
        for work in works:
            work.wait()
        sent.clear()

    return wait


def receive_tensors(
    pair: tuple[int, int], tag: int, told: dict[object, Any], key: object, split: Distribution | None = None
) -> Callable[[], Any]:
    """Begin to receive what a rank sends; returns what waits for it and gives it."""
    rank = pair[0]
    if key in told:
        return _coming(told[key], rank, tag, split)

    def first() -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        torch_distributed.recv(length, rank, tag=tag)
        header = torch.zeros(int(length), dtype=torch.uint8)
        torch_distributed.recv(header, rank, tag=tag)
        told[key] = json.loads(bytes(header.tolist()).decode())
        return _coming(told[key], rank, tag, split)()

    return first


def from_process_of(rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
    """Broadcast a structure of tensors from the process that drives a rank to all processes.

    A DTensor has pieces of the same place in the processes of `ranks`.
    """
    mine, group = layouts.this_rank() == rank, None if ranks is None else process_group(ranks)
    if not is_like:
        text = json.dumps(described(value)).encode() if mine else b""
        length = torch.tensor([len(text)])
        torch_distributed.broadcast(length, rank, group)
        header = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if mine
            else torch.zeros(int(length), dtype=torch.uint8)
        )
        torch_distributed.broadcast(header, rank, group)
        value = value if mine else made(json.loads(bytes(header.tolist()).decode()), _empty)
    every = tree.flatten(value)
    flat = [local(leaf).contiguous() if mine else torch.empty_like(local(leaf)) for leaf in every]
    for leaf in flat:
        torch_distributed.broadcast(leaf, rank, group)
    found = [
        local_tensors.from_local(piece, leaf.shape, leaf.device_mesh, leaf.placements)
        if isinstance(leaf, DTensor)
        else piece
        for piece, leaf in zip(flat, every, strict=True)
    ]
    return tree.pack_sequence_as(value, found)


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a DTensor; any other tensor as it is."""
    return local_tensors.to_local(value) if isinstance(value, DTensor) else value


def _plainly_laid(value: torch.Tensor) -> torch.Tensor:
    """A tensor in a layout that a message can name: no sums, no rows in strides."""
    if not isinstance(value, DTensor):
        return value
    kinds = {axis: layouts.to_sbp(part) for axis, part in enumerate(value.placements)}
    if all(kind not in (None, sbp.partial_sum) for kind in kinds.values()):
        return value
    return value.redistribute(value.device_mesh, layouts.replicated(value.device_mesh))


def _dims(value: torch.Tensor) -> list[int | None] | None:
    """The dim that each axis of the mesh splits, None for none; None for a plain tensor."""
    if not isinstance(value, DTensor):
        return None
    return [part.dim if isinstance(part, Shard) else None for part in value.placements]


def _coming(told: Any, rank: int, tag: int, split: Distribution | None) -> Callable[[], Any]:
    """Begin to receive tensors of known shapes; what waits for them."""
    structure, every = told[0], iter(told[1])
    tensors = made(structure, lambda dtype, shape: _piece(dtype, shape, next(every), split))
    works: list[Any] = [torch_distributed.irecv(local(leaf), rank, tag=tag) for leaf in leaves(tensors)]

    def wait() -> Any:
        for work in works:
            work.wait()
        return tensors

    return wait


def _piece(dtype: str, shape: list[int], dims: list[int | None] | None, split: Distribution | None) -> torch.Tensor:
    """A tensor to receive into: this rank's piece of a DTensor where the sender says how it is split."""
    if dims is None or split is None:
        return _empty(dtype, shape)
    mesh, placements = layouts.mesh(split.placement), tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    lengths = [part.stop - part.start for part in layouts.local_slices(shape, mesh, placements)]
    return local_tensors.from_local(_empty(dtype, lengths), shape, mesh, placements)


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=core.to_torch_dtype(dtype), device=core.get_device())
