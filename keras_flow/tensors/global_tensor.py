"""A logical tensor that lies on the ranks of a placement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from keras_flow import boxing
from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, combine
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, SbpSpec
from keras_flow.tensors import engine

#: while it is there operators tell it what they choose and how they lay tensors, and compute nothing: see `explanation`
_watcher: ContextVar[Any] = ContextVar("watcher", default=None)


def _operator(name: str, swapped: bool = False) -> Callable[[GlobalTensor, object], GlobalTensor]:
    def method(self: GlobalTensor, other: object) -> GlobalTensor:
        from keras_flow.tensors import ops

        if not isinstance(other, (GlobalTensor, int, float, bool, complex, np.ndarray, np.generic)):
            return NotImplemented
        one, two = (other, self) if swapped else (self, other)
        return getattr(ops, name)(one, two)

    return method


def _unary(name: str) -> Callable[[GlobalTensor], GlobalTensor]:
    def method(self: GlobalTensor) -> GlobalTensor:
        from keras_flow.tensors import ops

        return getattr(ops, name)(self)

    return method


class GlobalTensor:
    """One logical tensor; each rank of its placement holds the shard that its layout says.

    Made by `kf.tensor`, `kf.zeros`, `kf.randn` ... and `kf.to_global`; behaves as an array does. Every process of the
    job calls each operator in the same order; ranks outside the placement too.

    Attributes:
        layout: placement, nd_sbp and logical shape.
        dtype: name of the dtype, as `"float32"`.
    """

    # a numpy array on the left leaves the operator to us
    __array_priority__ = 100

    def __init__(self, layout: Layout, dtype: str, shards: Mapping[int, object]):
        self.layout = layout
        self.dtype = dtype
        self._shards = shards

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def placement(self) -> Placement:
        """The ranks."""
        return self.layout.placement

    @property
    def sbp(self) -> NdSbp:
        """One sbp for each axis of the placement."""
        return self.layout.nd_sbp

    def __repr__(self) -> str:
        """Shape, dtype, placement, sbp and the shards of this process; nothing is communicated."""
        head = f"GlobalTensor(shape={self.shape}, dtype={self.dtype}, sbp=({_sbp.text(self.sbp)}), {self.placement}"
        shards = "".join(
            f"\n  rank {rank}: {np.array2string(engine.as_numpy(value), prefix=f'  rank {rank}: ', threshold=64)}"
            for rank, value in list(self._shards.items())[:2]
        )
        more = len(self._shards) - 2
        return f"{head}){shards}" + (f"\n  and {more} more ranks of this process" if more > 0 else "")

    # ---- other layouts

    def to_global(
        self, placement: Placement | None = None, sbp: SbpSpec | None = None, *, grad_sbp: SbpSpec | None = None
    ) -> GlobalTensor:
        """The same logical tensor in another layout.

        Args:
            placement: None keeps the present one.
            sbp: None keeps the present one.
            grad_sbp: layout of the gradient that passes back through here; None leaves it as it comes.

        Raises:
            FlowError: a split dim out of range, an nd_sbp of another length than the placement has axes, ranks that
                the job does not have.
        """
        from keras_flow.tensors import gradients

        if placement is not None:
            engine.check_placement(placement)
        target = Layout(placement or self.placement, self.sbp if sbp is None else sbp, self.shape)
        if target == self.layout and grad_sbp is None:
            return self
        result = relay(self, target)
        if result is self:  # another tensor, so that the tape can tell them apart
            result = GlobalTensor(self.layout, self.dtype, self._shards)
        gradients.note_relay(self, result, grad_sbp)
        return result

    def to_local(self, rank: int | None = None) -> Any:
        """The engine's own array that a rank holds, shared, without communication.

        Args:
            rank: which; None: that of this process, where it drives one.

        Returns:
            The shard; for a rank outside the placement an empty array with as many dims.

        Raises:
            FlowError: this process drives several ranks, or not that one.
        """
        here = engine.local_ranks()
        if rank is None:
            if len(here) != 1:
                raise FlowError(
                    f"this process drives ranks {list(here)}: say whose shard, to_local(rank={here[0]}) for example"
                )
            rank = here[0]
        if rank not in here:
            raise FlowError(f"rank {rank} is not of this process, which drives {list(here)}")
        if rank in self._shards:
            return self._shards[rank]
        return engine.put(np.zeros((0,) * self.ndim, engine.numpy_dtype(self.dtype)), rank)

    def numpy(self) -> np.ndarray:
        """The logical tensor on every process; a collective on several: all processes call."""
        if is_described():
            raise FlowError("kf.explain knows layouts only; this program asks for the values of a tensor")
        if len(engine.local_ranks()) == engine.world_size():  # one process sees all shards
            return combine(self.layout, {rank: engine.as_numpy(value) for rank, value in self._shards.items()})
        whole = Placement(range(engine.world_size()), type=self.placement.type)
        everywhere = relay(self, Layout(whole, (_sbp.broadcast,), self.shape))
        return engine.as_numpy(next(iter(everywhere._shards.values())))

    def item(self) -> float | int | bool:
        """The value of a tensor with one element, as a Python number."""
        return self.numpy().item()

    def to_engine(self) -> Any:
        """The engine's own distributed array with the same shards: `jax.Array`, torch `DTensor`, TensorFlow DTensor.

        Nothing is copied.

        Raises:
            FlowError: the engine's own cannot hold this layout.
        """
        return engine.to_engine(self)

    # ---- as arrays do

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)  # type: ignore[call-overload]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d global tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[GlobalTensor]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._number("bool"))

    def __float__(self) -> float:
        return float(self._number("float"))

    def __int__(self) -> int:
        return int(self._number("int"))

    def __index__(self) -> int:
        if "int" not in self.dtype:
            raise TypeError(f"a global tensor of dtype {self.dtype} is no index: whole numbers are")
        return int(self._number("int"))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __contains__(self, value: object) -> bool:
        from keras_flow.tensors import ops

        return bool(ops.any(self == value))

    @property
    def T(self) -> GlobalTensor:
        """Dims in reverse order."""
        from keras_flow.tensors import ops

        return ops.transpose(self)

    def _number(self, kind: str) -> Any:
        if self.size != 1:
            raise TypeError(f"{kind}() of a global tensor of shape {self.shape}: it has {self.size} elements, not one")
        return self.item()

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a global tensor cannot be pickled: it is spread over the ranks of a job. Pickle x.numpy(), and make it "
            "again with kf.tensor(value, placement=..., sbp=...)"
        )

    # ---- operators
    __add__ = _operator("add")
    __radd__ = _operator("add", swapped=True)
    __sub__ = _operator("subtract")
    __rsub__ = _operator("subtract", swapped=True)
    __mul__ = _operator("multiply")
    __rmul__ = _operator("multiply", swapped=True)
    __truediv__ = _operator("true_divide")
    __rtruediv__ = _operator("true_divide", swapped=True)
    __floordiv__ = _operator("floor_divide")
    __rfloordiv__ = _operator("floor_divide", swapped=True)
    __mod__ = _operator("mod")
    __rmod__ = _operator("mod", swapped=True)
    __pow__ = _operator("power")
    __rpow__ = _operator("power", swapped=True)
    __matmul__ = _operator("matmul")
    __rmatmul__ = _operator("matmul", swapped=True)
    __and__ = _operator("bitwise_and")
    __rand__ = _operator("bitwise_and", swapped=True)
    __or__ = _operator("bitwise_or")
    __ror__ = _operator("bitwise_or", swapped=True)
    __xor__ = _operator("bitwise_xor")
    __rxor__ = _operator("bitwise_xor", swapped=True)
    __eq__ = _operator("equal")  # type: ignore[assignment]
    __ne__ = _operator("not_equal")  # type: ignore[assignment]
    __lt__ = _operator("less")
    __le__ = _operator("less_equal")
    __gt__ = _operator("greater")
    __ge__ = _operator("greater_equal")
    __neg__ = _unary("negative")
    __abs__ = _unary("absolute")

    def __pos__(self) -> GlobalTensor:
        return self

    def __invert__(self) -> GlobalTensor:
        from keras_flow.tensors import ops

        return ops.logical_not(self) if self.dtype == "bool" else ops.bitwise_invert(self)

    def __round__(self, digits: int | None = None) -> GlobalTensor:
        from keras_flow.tensors import ops

        return ops.round(self, digits or 0)

    def __getitem__(self, key: object) -> GlobalTensor:
        from keras_flow.tensors import indexing

        return indexing.get(self, key)

    def __setitem__(self, key: object, value: object) -> None:
        from keras_flow.tensors import gradients, indexing

        if gradients.is_taped([one for one in (self, value) if isinstance(one, GlobalTensor)]):
            raise FlowError(
                "x[...] = value changes a tensor that kf.value_and_grad differentiates; make a new one, with "
                "kf.ops.where or kf.ops.concatenate"
            )
        result = indexing.put(self, key, value).to_global(sbp=self.sbp)
        self._shards = result._shards


def relay(tensor: GlobalTensor, target: Layout) -> GlobalTensor:
    """The same logical tensor in another layout, unseen by a tape."""
    if target == tensor.layout:
        return tensor
    plan = boxing.plan(tensor.layout, target, tensor.dtype)
    if (watching := watcher()) is not None:
        watching.relaid(plan)
        return GlobalTensor(target, tensor.dtype, {})
    return GlobalTensor(target, tensor.dtype, boxing.execute(plan, tensor._shards))


def summed(nd_sbp: NdSbp) -> NdSbp:
    """An nd_sbp with B where it has P."""
    return tuple(_sbp.broadcast if isinstance(part, PartialSum) else part for part in nd_sbp)


@contextlib.contextmanager
def watched(by: Any) -> Iterator[None]:
    """Tell `by`, and no other, of what operators and boxing do; tensors are only described inside."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def watcher() -> Any:
    """The one of now, or None."""
    return _watcher.get()


def is_described() -> bool:
    """Whether tensors are only described: layouts without values."""
    return _watcher.get() is not None
