"""Private names of torch that are used without being wrapped, each with its reason; compared as hooks are."""

from keras_flow.current.keras_places import Private


def privates() -> tuple[Private, ...]:
    """The private names of this engine that are used."""
    return tuple(Private(module, name, why) for (module, name), why in _NAMES.items())


_TENSOR, _SCHEMA = "torch.distributed.tensor", "torch.distributed.tensor._op_schema"
_GROUPS = "torch.distributed.distributed_c10d"
_KINDS = "the types of what a sharding rule is given and returns"
_NAMES = {
    ("torch", "Tensor._make_wrapper_subclass"): "logical tensors of which a rank holds its rows",
    ("torch._C", "_disabled_torch_function_impl"): "such tensors see operators below autograd only",
    ("torch._C", "_DisableTorchDispatch"): "a tensor that is written into is read as plain memory",
    ("torch._C", "Argument"): "which arguments of an operator are written into",
    ("torch._C", "_jit_get_all_schemas"): "which operators write into an argument",
    ("torch._C", "DispatchKey"): "operators that torch takes apart itself",
    ("torch._C", "_dispatch_has_kernel_for_dispatch_key"): "operators that torch takes apart itself",
    ("torch._C", "_current_graph_task_id"): "whether a backward pass is running",
    ("torch._C", "_storage_Use_Count"): "whether a buffer of gradients is still used",
    ("torch._decomp", "decomposition_table"): "operators without a rule are taken apart",
    ("torch._ops", "OpOverload"): "the type of an operator",
    ("torch.autograd", "Variable._execution_engine"): "gradients are reduced at the end of the backward pass",
    ("torch.autograd", "_profiler_enabled"): "names of messages are made for a profiler alone",
    (
        "torch.distributed._functional_collectives",
        "AsyncCollectiveTensor",
    ): "a piece of a DTensor may still be on its way",
    (_GROUPS, "_get_default_group"): "the group of the whole job",
    (_GROUPS, "_get_default_store"): "the job's store has no public name",
    (_GROUPS, "_hash_ranks_to_str"): "groups of one name on all ranks, without a message",
    (_TENSOR, "DTensor._op_dispatcher"): "handlers, and rules that are replaced",
    (f"{_TENSOR}._dtensor_spec", "DTensorSpec"): "what a DTensor is made of",
    (f"{_TENSOR}._dtensor_spec", "TensorMeta"): "what a DTensor is made of",
    (_SCHEMA, "OpInfo"): _KINDS,
    (_SCHEMA, "OpSchema"): _KINDS,
    (_SCHEMA, "OutputSharding"): _KINDS,
    (_SCHEMA, "RuntimeSchemaInfo"): _KINDS,
    (_SCHEMA, "StrategyType"): _KINDS,
    (f"{_TENSOR}._ops._view_ops", "register_op_strategy_map"): "views that DTensor has a rule for under another name",
    (f"{_TENSOR}._utils", "compute_global_tensor_info"): "strides of a logical tensor",
    (f"{_TENSOR}._utils", "compute_local_shape_and_global_offset"): "where a rank's piece is",
    ("torch.nn.modules.module", "_has_any_global_hook"): "who listens to all modules sees all calls",
    ("torch.utils._pytree", "tree_leaves"): "structures of an operator's arguments, as DTensor walks them",
    ("torch.utils._pytree", "tree_map"): "structures of an operator's arguments, as DTensor walks them",
    ("torch.utils._pytree", "tree_map_only"): "structures of an operator's arguments, as DTensor walks them",
}
