"""A structure of tensors on a connection: a header of JSON, and the memory of each tensor behind it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_flow.backends.mail.structures import described, leaves, made

_LENGTH = struct.Struct("<Q")


def write(connection: socket.socket, told: Any, value: Any) -> None:
    """Write what JSON can say, and a structure of tensors.

    Args:
        connection: where to.
        told: numbers, texts, lists and dicts of these.
        value: None, or lists, tuples and dicts of tensors and Nones.
    """
    # of arrays that are being computed this waits
    arrays = [np.ascontiguousarray(leaf) for leaf in leaves(value)]
    header = json.dumps([told, described(value)]).encode()
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for array in arrays:
        connection.sendall(array.reshape(-1).view(np.uint8).data)


def read(reads: Any) -> tuple[Any, Any]:
    """Read what `write` wrote, tensors as arrays that may be written to.

    Args:
        reads: the connection, as a binary file.

    Raises:
        EOFError: the other side has closed it.
    """
    (length,) = _LENGTH.unpack(_exactly(reads, _LENGTH.size))
    told, structure = json.loads(bytes(_exactly(reads, length)))
    return told, made(structure, lambda dtype, shape: _array(reads, dtype, shape))


def _exactly(reads: Any, length: int) -> bytearray:
    buffer = bytearray(length)
    view, start = memoryview(buffer), 0
    while start < length:
        count = reads.readinto(view[start:])
        if not count:
            raise EOFError("the connection was closed")
        start += count
    return buffer


def _array(reads: Any, dtype: str, shape: Sequence[int]) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.frombuffer(_exactly(reads, size), np.uint8).view(dtype).reshape(shape)
