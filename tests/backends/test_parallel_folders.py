"""The folders of the engines are read side by side: what they share has one name, and what they do not has a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_flow.backends import engines

pytestmark = pytest.mark.check

ROOT = Path(engines.__file__).parent

#: files that one engine has, or two -> why the others have none
FILES = {
    "agent_store": (("torch",), "torchrun's store, which the others ask by a process of its own (`held_port`)"),
    "fused_adam": (
        ("torch",),
        "XLA fuses Keras's formula; on TensorFlow its operations run one by one, as in stock Keras",
    ),
    "operators/operations": (
        ("tensorflow", "torch"),
        "rules of DTensor, which both have; XLA's are gone around in `partitioning`",
    ),
    "convolutions": (("jax", "tensorflow"), "torch's rules for convolutions are right, or are set in `operators`"),
    "gathered_weights": (("jax", "torch"), "TensorFlow's `layouts.gathered` says it where a variable becomes a tensor"),
    "profiled_programs": (("jax", "tensorflow"), "a compiled step: its collectives are described in its program"),
    # jax
    "layer_scopes": (("jax",), "a compiled program knows of layers what it is told"),
    "partitioning": (("jax",), "dims left over, which XLA pads and others compute whole"),
    "rank_grid": (("jax",), "all ranks are one program: a rank finds its place by index"),
    "schedule": (("jax",), "rounds of messages, which an SPMD program must fix beforehand"),
    "fourier": (("jax",), "transforms that XLA has wrong on split dims"),
    "uniform_exchange": (("jax",), "exchanges as one SPMD program"),
    # tensorflow
    "operators/counting": (("tensorflow",), "operations that DTensor has no rule for, made of others"),
    "operators/graph_operations": (("tensorflow",), "a step is a graph: its operations are seen as they are made"),
    "operators/images": (("tensorflow",), "operations that DTensor has no rule for, made of others"),
    "operators/linear_algebra": (("tensorflow",), "operations that DTensor has no rule for, made of others"),
    "mirrored/step": (("tensorflow",), 'the step of a replica, `strategy="mirrored"`'),
    "mirrored/strategy": (("tensorflow",), 'the engine\'s own strategy, `strategy="mirrored"`'),
    "profiled_ranks": (("tensorflow",), "events of its profiler do not say whose they are"),
    "recovery": (("tensorflow",), "DTensor keeps errors of ranks for the next operation"),
    "mirrored/replica_math": (("tensorflow",), 'the mathematics of `strategy="mirrored"`'),
    "operators/replicated_operations": (("tensorflow",), "flags by which DTensor runs an operation whole"),
    "servers": (
        ("tensorflow", "torch"),
        "a process of JAX runs one program with all others, and cannot be asked alone",
    ),
    "operators/slices": (("tensorflow",), "slices that DTensor has wrong"),
    "operators/substitutes": (("tensorflow",), "operations that DTensor has no rule for, made of others"),
    "mesh_values": (("tensorflow",), "DTensors are packed of components; elsewhere the engine cuts a value"),
    "mesh_variables": (("tensorflow",), "DTensor's variables are read by one rank outside of steps"),
    "tables": (("tensorflow", "torch"), "variables on servers: see `servers`"),
    "traced_step": (("tensorflow",), "which layer made which operation of a graph"),
    "unpartitioned": (("tensorflow",), "what DTensor says of a step that it cannot partition"),
    "whole_step": (("tensorflow",), "the last resort for such a step"),
    "operators/windows": (("tensorflow",), "operations that DTensor has no rule for, made of others"),
    # torch
    "parcels": (("torch",), "what servers and workers run is sent to them; TensorFlow's runtime sends graphs"),
    "state_copies": (("torch",), "a rank is a process of its own, and may assign another value to a copy of state"),
    "ddp_of_keras": (("torch",), "what Keras 3.16 does by itself where processes have a group"),
    "device_draws": (("torch",), "others' draws are part of their programs; torch's are made on the host, or here"),
    "handed_out": (("torch",), "others' direct calls hand out what was computed on whole values"),
    "operators/attention": (("torch",), "a handler in the place of rules, which DTensor has not"),
    "operators/embedding": (("torch",), "a handler in the place of DTensor's"),
    "stage_messages": (("torch",), "`torch.distributed`, and pieces of DTensors; the others have `backends/mail`"),
    "gather_blocks": (("torch",), "a rank is a process of its own: what rank 0 writes must come to it"),
    "operators/gathering": (("torch",), "handlers gather below autograd"),
    "operators/in_place": (("torch",), "tensors that are written into, which the others do not have"),
    "rows/losses": (
        ("torch",),
        "outputs are tensors of a rank; on the others the compiler reduces what a loss adds up",
    ),
    "local_tensors": (("torch",), "from plain tensors to DTensors and back, in a third of DTensor's time"),
    "rows/log_readers": (("torch",), "one process drives all ranks on the others, and may read when it likes"),
    "rows/metrics": (
        ("torch",),
        "outputs are tensors of a rank; on the others the compiler reduces what a metric adds up",
    ),
    "rows/mirrored_calls": (
        ("torch",),
        "rows of a layer's call on plain tensors: DTensor costs time for each operator",
    ),
    "rows/partial_numbers": (
        ("torch",),
        "a sum over ranks that waits; on the others the compiler puts it where it is used",
    ),
    "operators/relayout": (("torch",), "changes of layout inside DTensor are plans"),
    "gradient_buckets": (("torch",), "gradients are summed while the pass goes on; XLA and TensorFlow sum in the step"),
    "doubling": (("torch",), "gloo's all-reduce of few bytes is mostly messages; XLA and TensorFlow have other ways"),
    "operators/resizing": (("torch",), "handlers for operators that DTensor has no rule for"),
    "rows/consistent_calls": (
        ("torch",),
        "rows of a layer's call on plain tensors: DTensor costs time for each operator",
    ),
    "split_layers": (("torch",), "split layers on plain tensors: DTensor costs time for each operator"),
    "slot_parts": (("torch",), "the others compile a step: told about its layouts, they send and gather parts"),
    "split_backward": (("jax", "torch"), "a graph's gradient is one function on TensorFlow, which computes all of it"),
    "rows/split_rows": (("torch",), "outputs of which a rank holds its rows, on plain tensors"),
    "saving": (("torch",), "a rank is a process of its own: one of them writes"),
    "short_calls": (("torch",), "layers are called in each step; on the others once, as it is traced"),
    "simulated": (("torch",), "ranks that one process plays; on the others it has virtual devices"),
    "step": (("torch",), "operators run eagerly: hooks ask which step is running"),
    "wrapped_modules": (("torch",), "others have no modules of their own that Keras wraps with shared weights"),
    "operators/believed_rules": (("torch",), "the rules of DTensor that are right"),
    "operators/reading_dtensors": (("torch",), "values that an eager program reads"),
    "operators/gathered_whole": (("torch",), "operators whose rules are not right"),
}

#: file -> names that not all engines have which have the file -> why
NAMES = {
    "boxing": {
        "Shards program": "JAX and TensorFlow compile a program for each plan; JAX leaves all shards in one array",
        "Region": "torch works out a recipe for its rank",
    },
    "convolutions": {
        "pool max_pool by_rows_only whole_kernel on_windows": "what each partitioner has wrong",
        "read_kernel convolve_directly": "Keras's convolution in groups is a tf.function of its own",
    },
    "creation": {
        "block_of Block": "TensorFlow's parts of a table on servers are made as the components on a mesh are",
        "creating_values making_values": "TensorFlow makes values on the host, whatever mesh is current",
        "skip": "of a pipeline's weight one rank alone draws the value; elsewhere a process drives all ranks",
    },
    "gathered_weights": {
        "gathering_step": "JAX's step is traced as a whole",
        "Gathered is_held_split placements_of_use plain within_call": "torch's layers run one by one, on plain tensors",
        "Order": "XLA's scheduler and TensorFlow's executor see the whole step",
    },
    "host_calls": {
        "cut": "a program of XLA cannot wait for another one, so it is cut",
        "steps_that_call with_own_errors": "torch's steps are Python, and raise what is raised in them",
    },
    "data": {
        "Uneven has_uneven to_logical distribute_data_input": "on JAX batches that do not divide stay split",
        "gathered": "a step of TensorFlow's may fall back to one device, which needs all rows",
        "MeshBatch batch_axis": "DTensor holds one mesh axis on the rows, and takes no plain values",
        "to_tensors": "JAX's step takes host arrays as they are",
        "batches_on_mesh": "tf.data and torch's DataLoader read ahead by themselves",
        "map_call rows refuse watch watch_of_step": "ranks are processes that read batches by themselves",
    },
    "collectives": {
        "process_group forget_groups": "torch makes a group before it is used; the others name ranks in each call",
        "send received run_within_limit": "TensorFlow's programs of boxing plans send between processes themselves",
        "AXIS compiled all_reduced by_tree goes_by_tree known": "XLA's programs, which `direct_collectives` makes, too",
        "REDUCED": "dtypes of TensorFlow's runtime and of gloo; XLA reduces what it knows, and the rest by parts",
        "GATHERED operation exchanged": "operations in TensorFlow's programs, for `direct_collectives`",
        "OPS": "torch's names, for `direct_collectives`",
        "as_bytes as_sent": "gloo does not know every dtype; boxing sends bytes too",
    },
    "devices": {
        "must_await_steps": "XLA's pool of threads may be too small for steps in flight",
        "serve_with": "JAX has no parameter servers",
        "host_device": "names of TensorFlow's devices have the process in them",
    },
    "layers": {
        "call moments": "JAX's step sees logical tensors, outside of a step too",
        "convert_function": "the others have no conversion of functions of JAX",
        "distribution_outside rows_of_global confusion_matrix dense_bincount": "limits of DTensor, and of replicas",
        "step_or_distribution pin plain_with_mask regularization": "operators run eagerly: each layer's call is seen",
    },
    "layouts": {
        "mesh": "TensorFlow's mesh joins axes: `mesh_view`",
        "ranks_of": "a mesh of DTensor names the devices of its own process only",
        "MeshView mesh_view view_of layout_on relayout on_mesh gathered in_step": "DTensor puts one mesh axis on a dim",
        "whole_on on_every_rank": "XLA is told which dims stay whole",
        "replicated": "a NamedSharding without axes is all that JAX needs",
        "TorchPlacements group make_groups_again has_peers this_rank is_member distributed to_sbp "
        "to_placements local_slices divides without_sums": (
            "ranks are processes that meet in groups; DTensor's placements are lists"
        ),
    },
    "operators/operations": {
        "in_traced_step on_operation without_rule captured_tensor capture concat split sparse_softmax_cross_entropy "
        "tile top_k recurrent unrolled half_precision contract by_rows whole_dims known_value endless_text "
        "parse_message": ("TensorFlow's functions are wrapped one by one"),
        "aten Signature register": "torch has a registry of rules",
    },
    "optimizer": {
        "Target described_key distribution_by_dtensor add_variable_from_reference distribution_of_update scaled": (
            "Keras's optimizer on TensorFlow updates by its strategy"
        ),
        "variables_of_dtensors updates_by_element reduce watch": "gradients arrive as partial sums",
        "splits_further": "on JAX an update is a part of the step; XLA is told about its layouts with `zero=` alone",
        "backend_update_step": "XLA partitions the update of JAX as Keras has it",
    },
    "processes": {
        "JOB joined addresses": "each TensorFlow server has an address of its own, which it must be told of",
        "has_joined": "Keras on torch asks whether there is a group, and not whose it is",
        "join_again": "gloo can leave a collective that another rank never joins; the others cannot",
        "collectives_on": "a private way to say it; gloo under torch takes an environment variable",
    },
    "profiled_programs": {
        "ProgramCollective collectives kind_of": "XLA's profile has the programs in it",
        "KINDS remember sizes layer_of": "TensorFlow keeps the programs, and numbers the scopes in them",
        "Fields": "JAX brings no reader of these messages",
    },
    "profiling": {
        "gradients_of small_all_reduce": "the messages are our own on torch; the others' are made by the compiler",
    },
    "random": {
        "distribution_of_draw shuffle cast_seed seed_on_mesh": ("draws are operations of the step's graph"),
        "draw dropout": "JAX draws the stock values of a rank's part by itself",
    },
    "reading": {
        "LogicalBatches": "on torch a value of which a rank has its rows is a tensor of its own kind",
        "OrderedBatches": "torch asks a batch sampler for the rows of each batch",
        "RowNumbers": "a torch loader does more for each batch than its rows need",
        "OwnRowsDataset OwnRowsIterator": "what Keras loops over on TensorFlow tells how long it is, and reads ahead",
    },
    "generation": {
        "updated_on_mesh slice_update": "a cache of JAX has the layout that XLA gives it",
    },
    "tables": {
        "ServedTable is_table reading read_parts update": "TensorFlow's runtime has variables on servers",
        "ServedPlace Read ServedTensor Lookups looking_up table_of rows_of_table summed is_served shards": (
            "torch's are tensors that say where they are; TensorFlow's are its own, and parts of a table"
        ),
        "join ask read_all read_rows write serve hold held forget forget_with": "what TensorFlow's runtime does",
        "Block block_of cut_of": "in `creation` on TensorFlow, whose values on meshes are made so, too",
    },
    "trainer": {
        "jit on_batch": "Keras's stock trainer does the rest on JAX",
        "step_state": "JAX ends the process where a step overwrites one array twice",
        "LoopSource": "an iterator of tf.data has threads, which end with it",
        "Steps MOST_TRACES functions_by_dtensor make_predict_function build build_for_prediction compile": (
            "a graph for each shape of batch"
        ),
        "refuse_jit_of_calls refuse_jit": "XLA is asked for by compile",
        "refuse_settings": "of compile, which a pipeline on torch cannot follow either",
        "in_turn predicted": "a function of Keras's may run several steps",
        "new_source retrack lists_replaced named_parameters": "a step runs eagerly, on parameters of torch's modules",
    },
    "split_backward": {
        "Parts parts": "JAX cuts a traced program",
        "Arrived Later by_inputs": "torch cuts the graph of autograd, anew in each pass",
    },
    "servers": {
        "Coordinator WorkerProgram": "TensorFlow's own coordinator schedules graphs",
        "update_on_servers": "torch's servers update, and the chief sends gradients",
        "WorkerQueue SentProgram": "torch's sends programs, and hands batches to whichever worker is free",
    },
    "stages": {
        "sum_over_processes sum_over_ranks": (
            "torch has a process for each rank; on the others a process may drive several, see `mail`"
        ),
    },
    "variables": {
        "to_logical from_logical": "numpy reads the logical value of a jax.Array; TensorFlow's are in mesh_values",
        "read_whole of_several_processes gathered": "JAX raises where another process has a part of what is read",
        "distribute_tensor host_value": "JAX compares what is made between all processes",
        "separate_copy lay_anew lies_elsewhere": "JAX ends the process where a step overwrites one array twice",
        "laid_by_another read_here": "JAX computes with no arrays of two meshes; the others read plain tensors",
        "from_rank": "of a pipeline's weight one rank alone has the value; elsewhere a process drives all ranks",
        "initialize": "Keras's JAX variable has layouts: `_value` is set as it is",
        "to_host": "DTensors are packed of components",
        "assigned_on_host to_tensor to_numpy to_array value_on_mesh": "DTensor variables raise instead",
        "layout_of_use": "a weight that the rows' axis splits is gathered by hand for layers alone",
        "read_directly convert": "eagerly DTensor fails on much: one rank computes what is called outside of steps",
        "copied copy_while_writing": "what JAX's `read_whole` does too; torch reads blocks on demand",
        "assigned_over_ranks as_view viewed keep_plain whole holding": "a variable is a DTensor or plain, by its view",
    },
}


def folders() -> dict[str, dict[str, Path]]:
    """engine -> file, `hooks` or `operators/operations` -> path."""
    return {
        name: {
            path.relative_to(ROOT / name).with_suffix("").as_posix(): path
            for path in (ROOT / name).rglob("*.py")
            if path.name != "__init__.py" or path.parent == ROOT / name
        }
        for name in engines.that_train()
    }


def public_names(path: Path) -> set[str]:
    """Functions, classes and values of a file, without what it imports."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_files_that_not_all_engines_have_are_listed_with_the_reason() -> None:
    present: dict[str, list[str]] = {}
    for engine, files in folders().items():
        for file in files:
            present.setdefault(file, []).append(engine)
    partial = {file: tuple(have) for file, have in present.items() if len(have) < len(folders())}
    assert partial == {file: have for file, (have, _) in FILES.items()}


@pytest.mark.parametrize("file", sorted({file for files in folders().values() for file in files}))
def test_names_that_not_all_engines_have_are_listed_with_the_reason(file: str) -> None:
    names = [public_names(files[file]) for files in folders().values() if file in files]
    partial = set.union(*names) - set.intersection(*names)
    listed = [name for texts in NAMES.get(file, {}) for name in texts.split()]
    assert len(listed) == len(set(listed))
    assert partial == set(listed)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_hooks_and_conditions_are_written_in_one_form() -> None:
    """A replacement takes what was found and the original, and says what it hooks; a condition may find nothing."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        for function in functions(path):
            text = ast.get_docstring(function) or ""
            second = [arg.arg for arg in function.args.args[1:2]]
            if second == ["original"] and not function.name.startswith("_"):
                if not text.startswith("Hook on "):
                    wrong.append(f"{path.name} {function.name}: {text[:40]!r}")
            elif text.startswith("Condition of") and function.name != "always":
                returns = ast.unparse(function.returns) if function.returns else ""
                if not returns.endswith("None"):
                    wrong.append(f"{path.name} {function.name} -> {returns}")
    assert not wrong
