"""Bugs of torch's DTensor that keras_flow goes around, each in a few lines of torch alone.

Seen in torch 2.13.0 (CPU, gloo).

    python -m tests.engine_bugs.torch

runs them on four ranks and prints which are still there. A function returns True while its bug is there.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
RANKS = 4


def reading_a_sum_gives_this_ranks_summand(mesh: DeviceMesh) -> bool:
    """`item()` of a DTensor that is a partial sum gives this rank's summand, so ranks continue with different numbers.

    Instead: `item`, and with it float, int, bool and `if`, sums over the ranks first.
    """
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return x.sum().item() != 6.0


def writing_into_a_slice_of_a_split_dim_is_lost(mesh: DeviceMesh) -> bool:
    """`x[1:3].copy_(y)` on a DTensor whose dim 0 is split writes into a gathered copy, and leaves x as it was.

    Instead: operators in place run by their functional form, and the result is written into the viewed tensor.
    """
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    x[1:3].copy_(distribute_tensor(torch.full((2,), 7.0), mesh, [Replicate()]))
    return x.full_tensor().sum().item() == 0.0


def writing_needs_the_layout_that_the_tensor_has(mesh: DeviceMesh) -> bool:
    """`masked_fill_` on a partial sum raises "in-place operations that require placement changes are not supported".

    Instead: operators in place run by their functional form, and the new value gets the tensor's layout.
    """
    x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    return _raises(lambda: x.masked_fill_(x > 0, 3.0), RuntimeError)


def a_scan_along_a_negative_dim_is_one_of_each_piece(mesh: DeviceMesh) -> bool:
    """`cumsum(x, -1)` where the last dim is split gives each rank's own sums; `cumsum(x, 1)` is right.

    Instead: a rule of our own for scans, which counts the dim from the front.
    """
    x = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
    return torch.cumsum(x, -1).full_tensor()[0, -1].item() != 4.0


def a_rule_is_remembered_for_other_arguments(mesh: DeviceMesh) -> bool:
    """`topk(x, 3)` after `topk(x, 2)` has the shape of the first: the key of DTensor's cache leaves out `k`.

    Instead: all integers, lists of integers, and flags are part of the key.
    """
    x = distribute_tensor(torch.randn(4, 5), mesh, [Shard(0)])
    return x.topk(2)[0].shape[1] == x.topk(3)[0].shape[1]


def register_sharding_remembers_for_other_lists(mesh: DeviceMesh) -> bool:
    """An operator of `register_sharding` has the shape of an earlier call with another list (stride, dilation, pads).

    Instead: all integers, lists of integers, and flags are part of the key.
    """

    @register_sharding(aten.reflection_pad1d.default)
    def _(x, padding):
        return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]

    x = distribute_tensor(torch.randn(4, 5), mesh, [Shard(0)])
    return aten.reflection_pad1d(x, [1, 1]).shape == aten.reflection_pad1d(x, [2, 1]).shape


def a_looked_up_row_can_be_read_once(mesh: DeviceMesh) -> bool:
    """The result of `embedding` on a table with split rows can be gathered only once: the second time its mask is gone.

    Instead: a lookup of our own, whose result is a plain sum over the ranks.
    """
    table = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    found = F.embedding(distribute_tensor(torch.tensor([0, 3]), mesh, [Replicate()]), table)
    found.full_tensor()
    return _raises(found.full_tensor, AssertionError)


def a_table_split_along_both_dims_cannot_be_looked_up(mesh: DeviceMesh) -> bool:
    """`embedding` of a table with split rows and columns: "The shape of the mask ... does not match the shape of the
    indexed tensor".

    Instead: a lookup of our own, whose result is a plain sum over the ranks.
    """
    square = init_device_mesh("cpu", (2, RANKS // 2))
    table = distribute_tensor(torch.randn(4, 6), square, [Shard(1), Shard(0)])
    indices = distribute_tensor(torch.tensor([[0, 3], [1, 2]]), square, [Shard(0), Replicate()])
    return _raises(lambda: F.embedding(indices, table).full_tensor(), Exception)


def a_view_in_place_keeps_the_old_shape(mesh: DeviceMesh) -> bool:
    """`squeeze_` changes the layout of a DTensor but not its `shape`; `torch.quantile` fails by it.

    Instead: views in place are made of the local tensor, and the shape is set.
    """
    x = distribute_tensor(torch.zeros(4, 1), mesh, [Shard(0)])
    return x.squeeze_(1).shape != (4,)


def the_largest_of_uneven_shards_raises_on_some_ranks(mesh: DeviceMesh) -> bool:
    """`max` of a DTensor of which a rank holds nothing raises on that rank alone, while the others wait for it.

    Instead: operators whose inputs do not divide by the ranks run on gathered tensors.
    """
    x = distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)])
    raised = torch.tensor(int(_raises(lambda: aten.max.default(x), Exception)))
    dist.all_reduce(raised)
    return 0 < raised.item() < RANKS


def joined_dims_make_a_layout_that_argmax_does_not_know(mesh: DeviceMesh) -> bool:
    """`argmax` after a reshape that joins a dim with a split one: the layout has strides, which the rule overlooks.

    Instead: where a dim would be split in strides, the tensor is gathered before the reshape.
    """
    x = distribute_tensor(torch.randn(4, 2, 4), mesh, [Shard(2)])
    flat = x.reshape(4, 8)
    return _raises(lambda: _same(flat.argmax(-1).full_tensor(), x.full_tensor().reshape(4, 8).argmax(-1)), Exception)


def equal_asks_ranks_that_do_not_compute(mesh: DeviceMesh) -> bool:
    """`torch.equal` on a mesh of some of the ranks reduces over all ranks of the job, and waits for the others.

    Instead: the tensors are gathered over their own mesh and compared there.
    """
    import inspect

    source = inspect.getsource(DTensor._op_dispatcher._dispatch_fast_path_python_tail)
    return "dist.all_reduce(r, op=dist.ReduceOp.MIN)" in source  # run, it would wait


def a_group_that_its_members_make_has_another_name_on_each(mesh: DeviceMesh) -> bool:
    """`new_group(ranks, use_local_synchronization=True)` hangs where its members have made different numbers of groups.

    Its name, by which members find each other, counts the groups of the process.

    Instead: `kf.comm` names a group by its ranks alone.
    """
    if mesh.get_rank() in (1, 3):
        dist.new_group([1, 3], use_local_synchronization=True)
    names: list[str | None] = [None] * RANKS
    dist.all_gather_object(names, dist.distributed_c10d._process_group_name([0, 1, 2], True))
    return len(set(names)) > 1  # made, its members would wait


def a_branch_of_dtensors_is_not_compiled(mesh: DeviceMesh) -> bool:
    """`torch.cond` of DTensors raises "error when making fake tensor call": it compiles both branches.

    Instead: under a distribution `torch.cond` runs the branch that is taken.
    """
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    return _raises(lambda: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)), Exception)


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        raise ValueError(f"{found} is not {expected}")


def _raises(action: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        action()
    except kind:
        return True
    return False


BUGS = [function for name, function in list(globals().items()) if "mesh" in getattr(function, "__annotations__", {})]


def _on_rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {function.__name__: function(mesh) for function in BUGS}
    everyone: list[dict[str, bool]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(everyone, found)
    if rank == 0:
        print(json.dumps({name: any(one[name] for one in everyone) for name in found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (f"{folder}/store",), nprocs=RANKS)  # type: ignore[attr-defined]
