"""The compiled programs that a profile of XLA holds beside its events: bytes and layers of their collectives.

XLA writes each program that ran into the profile's metadata. Neither JAX nor jaxlib has a public reader of these
messages, of which a few fields are needed: they are read by their numbers, which protocol buffers never change
(tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto, xla/xla_data.proto).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keras_flow.backends.jax.layer_scopes import layers_of

#: HLO's opcodes; the asynchronous ones of accelerators begin with them
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "send",
    "collective-broadcast": "broadcast",
}
#: element types by their number in xla_data.proto -> bytes; all others have one
_BYTES = {3: 2, 4: 4, 5: 8, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}


@dataclass(frozen=True)
class ProgramCollective:
    """A collective of a compiled program.

    Attributes:
        kind: our name.
        bytes: the bytes of its tensors on one rank, of the larger side.
        layers: paths of the layers that it belongs to.
    """

    kind: str
    bytes: int
    layers: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """The facts of a `TraceEvent`."""
        if len(self.layers) == 1:
            return {"bytes": self.bytes, "layer": self.layers[0]}
        return {"bytes": self.bytes, **({"layers": list(self.layers)} if self.layers else {})}


def kind_of(instruction: str) -> str | None:
    """Our name of the collective that an instruction with this name is: `all-reduce.6` is an all_reduce.

    What is told as done has been told as started.
    """
    match = re.fullmatch(r"([a-z-]+?)(-start)?(\.\d+)*(\.clone)?", instruction)
    return _KINDS.get(match[1]) if match else None


def collectives(profile: bytes) -> dict[tuple[int, str], ProgramCollective]:
    """The collectives of the programs in a profile (a serialized `XSpace`), by program and name of the instruction."""
    found: dict[tuple[int, str], ProgramCollective] = {}
    for plane in _all(profile, 1):
        if _text(plane, 2) != "/host:metadata":
            continue
        for entry in _all(plane, 4):
            for metadata in _all(entry, 2):
                # the name of a program ends with its number, by which events call it: jit_step(16)
                number = re.search(r"\((\d+)\)$", _text(metadata, 2))
                for stat in _all(metadata, 5):
                    for program in _all(stat, 6):
                        for module in _all(program, 1) if number else ():
                            found |= {(int(number[1]), name): each for name, each in _of_module(module)}  # type: ignore[index]
    return found


def _of_module(module: bytes) -> Iterator[tuple[str, ProgramCollective]]:
    for computation in _all(module, 3):
        instructions = [_fields(instruction) for instruction in _all(computation, 2)]
        sizes = {_number(each, 35): sum(map(_size, _all(each, 3))) for each in instructions}
        names = {_number(each, 35): "".join(_text(metadata, 2) for metadata in _all(each, 7)) for each in instructions}
        for each in instructions:
            opcode = _text(each, 2)
            kind = _KINDS.get(opcode.removesuffix("-start"))
            if kind is None:
                continue
            operands = [operand for packed in each.get(36, ()) for operand in _numbers(packed)]
            result = sizes[_number(each, 35)]
            if opcode.endswith("-start"):  # its result holds the operands, too
                result = max((_size(part) for shape in _all(each, 3) for part in _all(shape, 4)), default=result)
            size = max(result, sum(sizes[operand] for operand in operands))
            # where XLA joins messages it gave the new one no name (in jax 0.8): then those of what it sends
            layers = layers_of(names[_number(each, 35)]) or layers_of(":".join(names[operand] for operand in operands))
            yield _text(each, 1), ProgramCollective(kind, size, layers)


def _size(shape: bytes) -> int:
    """Bytes of a shape, of all parts of a tuple."""
    fields = _fields(shape)
    if 4 in fields:
        return sum(map(_size, fields[4]))  # type: ignore[arg-type]
    dims = [dim for packed in fields.get(3, ()) for dim in _numbers(packed)]
    return math.prod(dims) * _BYTES.get(_number(fields, 2), 1)


# ---- protocol buffers: a message is a list of (number, value); a value is a whole number, or bytes

Fields = Mapping[int, list[int | bytes]]


def _fields(message: int | bytes | Fields) -> Fields:
    """The values of each field of a message, by its number."""
    if not isinstance(message, bytes):
        return message if isinstance(message, Mapping) else {}
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + length], at + length
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A whole number, 7 bits to a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _all(message: int | bytes | Fields, number: int) -> list[bytes]:
    return [value for value in _fields(message).get(number, ()) if isinstance(value, bytes)]


def _text(message: int | bytes | Fields, number: int) -> str:
    return b"".join(_all(message, number)[:1]).decode()


def _number(message: Fields, number: int) -> int:
    return next((value for value in message.get(number, ()) if isinstance(value, int)), 0)


def _numbers(values: int | bytes) -> list[int]:
    """A field of many whole numbers: they come packed into bytes, or one by one."""
    if isinstance(values, int):
        return [values]
    found, at = [], 0
    while at < len(values):
        value, at = _varint(values, at)
        found.append(value)
    return found
