"""`GlobalTensor`: one logical tensor, of which each rank of a placement holds a shard.

This file has the data and what concerns a single tensor: layout, shards, `to_global`, `to_local`, conversions.
Operators (`x + y`, `x[2:5]`) are attached to the class by `operators.py`, because they need everything between here and
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from keras_flow import boxing
from keras_flow import sbp as _sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, combine
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, SbpSpec
from keras_flow.tensors import dry_run, tape
from keras_flow.tensors.dtypes import numpy_dtype
from keras_flow.tensors.ranks import check_placement, local_ranks, world_size

#: shards of this process that `repr` shows
_SHOWN = 2


class GlobalTensor:
    """One logical tensor; each rank of its placement holds the shard that the layout says.

    `kf.tensor`, `kf.zeros`, `kf.randn` ... and `kf.to_global` make them; they behave as numpy arrays do. Every process
    of the job must call the same operators in the same order, processes whose ranks are outside the placement included.

    Attributes:
        layout: placement, nd_sbp and logical shape.
        dtype: name of the dtype, as `"float32"`.

    Example:
        >>> import keras_flow as kf
        >>> mesh = kf.Placement([0, 1])
        >>> x = kf.tensor([[1.0, 2.0], [3.0, 4.0]], placement=mesh, sbp="S(0)")
        >>> x.shape, x.dtype, x.sbp
        ((2, 2), 'float32', (S(0),))
        >>> (x @ x).numpy()
        array([[ 7., 10.],
               [15., 22.]], dtype=float32)
    """

    # numpy leaves `array + tensor` to our __radd__ instead of adding element by element
    __array_priority__ = 100

    def __init__(self, layout: Layout, dtype: str, shards: Mapping[int, object]):
        """A tensor of shards that exist already.

        Args:
            layout: their layout.
            dtype: the dtype of all shards.
            shards: rank -> the engine's array, for the ranks that this process drives; none in a dry run.
        """
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
        """The ranks that hold it."""
        return self.layout.placement

    @property
    def sbp(self) -> NdSbp:
        """One sbp for each axis of the placement."""
        return self.layout.nd_sbp

    def __repr__(self) -> str:
        """Shape, dtype, placement, sbp and the shards of this process; nothing is communicated."""
        head = f"GlobalTensor(shape={self.shape}, dtype={self.dtype}, sbp=({_sbp.text(self.sbp)}), {self.placement}"
        as_numpy = tensor_engine().as_numpy
        shards = "".join(
            f"\n  rank {rank}: {np.array2string(as_numpy(value), prefix=f'  rank {rank}: ', threshold=64)}"
            for rank, value in list(self._shards.items())[:_SHOWN]
        )
        more = len(self._shards) - _SHOWN
        return f"{head}){shards}" + (f"\n  and {more} more ranks of this process" if more > 0 else "")

    def _repr_html_(self) -> str | None:
        """Who holds what, for a notebook; nothing is communicated."""
        return self.layout.picture(f"{self.dtype} {list(self.shape)}, sbp ({_sbp.text(self.sbp)})")

    # ---- other layouts

    def to_global(
        self, placement: Placement | None = None, sbp: SbpSpec | None = None, *, grad_sbp: SbpSpec | None = None
    ) -> GlobalTensor:
        """Return the logical tensor in another layout, by boxing.

        Args:
            placement: None keeps the present one.
            sbp: None keeps the present one.
            grad_sbp: layout that the gradient gets when it passes back through here; None leaves the layout it has.

        Raises:
            FlowError: a split dim out of range, an nd_sbp of another length than the placement has axes, ranks that
                the job does not have.

        Example:
            >>> import keras_flow as kf
            >>> x = kf.ones(4, 2, placement=kf.Placement([0, 1]), sbp="S(0)")
            >>> x.to_local(rank=1).shape, x.to_global(sbp="B").to_local(rank=1).shape
            ((2, 2), (4, 2))
        """
        if placement is not None:
            check_placement(placement)
        # an nd_sbp for the present placement is checked by the layout itself
        target = Layout(placement or self.placement, self.sbp if sbp is None else sbp, self.shape)
        if target == self.layout and grad_sbp is None:
            return self
        result = change_layout(self, target)
        if result is self:  # the tape tells tensors apart by identity, and the gradient of this one gets a layout
            result = GlobalTensor(self.layout, self.dtype, self._shards)
        tape.record_boxing(self, result, grad_sbp)
        return result

    def to_local(self, rank: int | None = None) -> Any:
        """The engine's own array that a rank holds, shared, without communication.

        Args:
            rank: None means the rank of this process, where it drives only one.

        Returns:
            The shard; for a rank outside the placement an empty array with as many dims, and at least one.

        Raises:
            FlowError: this process drives several ranks, or not that one.

        Example:
            >>> import keras_flow as kf
            >>> kf.arange(5, placement=kf.Placement([0, 1]), sbp="S(0)").to_local(rank=1)
            array([3, 4], dtype=int32)
        """
        here = local_ranks()
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
        # a rank outside the placement holds nothing; with the dims of the tensor, so that code for shards runs there
        # too. An array without dims would be a number
        return tensor_engine().put(np.zeros((0,) * max(1, self.ndim), numpy_dtype(self.dtype)), rank)

    def numpy(self) -> np.ndarray:
        """The logical tensor, on every process. A collective where there are several processes: all of them call.

        Raises:
            FlowError: in `kf.explain`, where tensors have no values.

        Example:
            >>> import keras_flow as kf
            >>> kf.ones(3, placement=kf.Placement([0, 1]), sbp="P").numpy()
            array([1., 1., 1.], dtype=float32)
        """
        if dry_run.is_on():
            raise FlowError("kf.explain knows layouts only; this program asks for the values of a tensor")
        as_numpy = tensor_engine().as_numpy
        if len(local_ranks()) == world_size():  # this process has all shards: nothing needs to be sent
            return combine(self.layout, {rank: as_numpy(value) for rank, value in self._shards.items()})
        # the values are wanted by every process, also by those whose ranks have no shard
        world = Placement(range(world_size()), type=self.placement.type)
        everywhere = change_layout(self, Layout(world, (_sbp.broadcast,), self.shape))
        return as_numpy(next(iter(everywhere._shards.values())))

    def item(self) -> float | int | bool:
        """The value of a tensor with one element, as a Python number."""
        return self.numpy().item()

    def to_engine(self) -> Any:
        """The engine's own distributed array with the same shards: `jax.Array`, torch `DTensor`, TensorFlow DTensor.

        Nothing is copied.

        Raises:
            FlowError: the engine's own array cannot have this layout.
        """
        return tensor_engine().to_engine(self.layout, self._shards)

    # ---- conversions of Python and numpy

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """The logical values, for `np.asarray(x)`; a copy for `np.array(x)`, which NumPy 2 leaves to this method."""
        make = np.array if copy else np.asarray
        return make(self.numpy(), dtype)  # type: ignore[call-overload]

    def __len__(self) -> int:
        """Length of the first dim."""
        if not self.shape:
            raise TypeError("len() of a 0-d global tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        """The truth of a tensor with one element."""
        return bool(self._number("bool"))

    def __float__(self) -> float:
        """The number in a tensor with one element."""
        return float(self._number("float"))

    def __int__(self) -> int:
        """The number in a tensor with one element."""
        return int(self._number("int"))

    def __index__(self) -> int:
        """The whole number in a tensor with one element, so that it can be an index or a length."""
        # as numpy: 2.0 is no index
        if "int" not in self.dtype:
            raise TypeError(f"a global tensor of dtype {self.dtype} is no index: whole numbers are")
        return int(self._number("int"))

    def __format__(self, spec: str) -> str:
        """A number for a format as `.3f`; otherwise the text of `repr`."""
        return format(self.item(), spec) if spec else repr(self)

    def _number(self, kind: str) -> Any:
        if self.size != 1:
            raise TypeError(f"{kind}() of a global tensor of shape {self.shape}: it has {self.size} elements, not one")
        return self.item()

    def __hash__(self) -> int:
        """Hash by identity: `==` compares elements and returns a tensor."""
        return id(self)

    def __reduce__(self) -> Any:
        """Refuses to be pickled."""
        raise TypeError(
            "a global tensor cannot be pickled: it is spread over the ranks of a job. Pickle x.numpy(), and make it "
            "again with kf.tensor(value, placement=..., sbp=...)"
        )

    # ---- operators, for type checkers: operators.py attaches them

    if TYPE_CHECKING:
        __add__: ClassVar[Operator]
        __radd__: ClassVar[Operator]
        __sub__: ClassVar[Operator]
        __rsub__: ClassVar[Operator]
        __mul__: ClassVar[Operator]
        __rmul__: ClassVar[Operator]
        __truediv__: ClassVar[Operator]
        __rtruediv__: ClassVar[Operator]
        __floordiv__: ClassVar[Operator]
        __rfloordiv__: ClassVar[Operator]
        __mod__: ClassVar[Operator]
        __rmod__: ClassVar[Operator]
        __pow__: ClassVar[Operator]
        __rpow__: ClassVar[Operator]
        __matmul__: ClassVar[Operator]
        __rmatmul__: ClassVar[Operator]
        __and__: ClassVar[Operator]
        __rand__: ClassVar[Operator]
        __or__: ClassVar[Operator]
        __ror__: ClassVar[Operator]
        __xor__: ClassVar[Operator]
        __rxor__: ClassVar[Operator]
        __eq__: ClassVar[Operator]  # type: ignore[assignment]
        __ne__: ClassVar[Operator]  # type: ignore[assignment]
        __lt__: ClassVar[Operator]
        __le__: ClassVar[Operator]
        __gt__: ClassVar[Operator]
        __ge__: ClassVar[Operator]
        __getitem__: ClassVar[Operator]
        __iter__: ClassVar[Callable[[GlobalTensor], Iterator[GlobalTensor]]]
        __contains__: ClassVar[Callable[[GlobalTensor, object], bool]]
        __setitem__: ClassVar[Callable[[GlobalTensor, object, object], None]]
        __round__: ClassVar[Callable[..., GlobalTensor]]
        __pos__: ClassVar[Callable[[GlobalTensor], GlobalTensor]]
        __neg__: ClassVar[Callable[[GlobalTensor], GlobalTensor]]
        __abs__: ClassVar[Callable[[GlobalTensor], GlobalTensor]]
        __invert__: ClassVar[Callable[[GlobalTensor], GlobalTensor]]

        @property
        def T(self) -> GlobalTensor: ...  # noqa: D102  # attached by operators.py with its docstring


Operator = Callable[[GlobalTensor, object], GlobalTensor]


def change_layout(tensor: GlobalTensor, target: Layout) -> GlobalTensor:
    """Return the logical tensor in another layout, or `tensor` where it has that layout. The tape does not see it.

    `x.to_global` is what programs call; this is boxing inside operators and gradients, which the tape must not record
    a second time.
    """
    if target == tensor.layout:
        return tensor
    plan = boxing.plan(tensor.layout, target, tensor.dtype)
    if (recorder := dry_run.recorder()) is not None:
        recorder.record_boxing(plan)
        return GlobalTensor(target, tensor.dtype, {})
    return GlobalTensor(target, tensor.dtype, boxing.execute(plan, tensor._shards))


def without_partial(nd_sbp: NdSbp) -> NdSbp:
    """An nd_sbp with B in place of P: the layout in which sums over ranks are finished."""
    return tuple(_sbp.broadcast if isinstance(part, PartialSum) else part for part in nd_sbp)
