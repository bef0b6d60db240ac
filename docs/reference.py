"""The pages of the reference: one for each group of public names, under the names that a program writes."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path

import typer

import keras_flow
from keras_flow.cli.app import app


@dataclass(frozen=True)
class Group:
    """One page.

    Args:
        title: its heading, and its entry in the navigation.
        about: what the names are for.
        names: names of `kf`.
        module: a module of `kf` whose names are on the page too, as `kf.comm.all_reduce`.
        members: the names of that module; all that it exports where none are given.
        returned: classes of what the page's functions return, by their places in the package.
    """

    title: str
    about: str
    names: tuple[str, ...] = ()
    module: str = ""
    members: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()


#: what every distribution has from its bases, and a program calls
_METHODS = "[scope, explain, verify, check, apply]"
_CREATION = ("tensor", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "to_global", "global_tensor")
GROUPS = {
    "distributions": Group(
        "Distributions",
        "A model that is built in the scope of a distribution is trained by all its ranks.",
        (
            "DataParallel",
            "ModelParallel",
            "PipelineParallel",
            "CentralStorage",
            "ParameterServer",
            "shard",
            "layout_of",
            "explain_file",
            "plot_layout",
        ),
        returned=(
            "explainer.explanation.Explanation",
            "verify.verification.Verification",
            "servers.counting.Statistics",
            "pictures.drawing.Drawing",
        ),
    ),
    "layouts": Group(
        "Placements and layouts",
        "A placement says which ranks compute, an sbp how a tensor lies on them.",
        ("Placement", "placement", "Layout"),
        "sbp",
        ("split", "broadcast", "partial_sum", "parse", "nd_sbp", "text"),
    ),
    "ranks": Group(
        "Starting ranks",
        "Who starts the ranks, and which of them this process is.",
        ("init", "run", "on_preemption"),
        "env",
        returned=("current.world.World",),
    ),
    "loops": Group(
        "Custom training loops",
        "Collectives of tensors that each process has for itself, and averaged gradients.",
        ("DistributedDataParallel",),
        "comm",
    ),
    "hvd": Group(
        "Horovod's names",
        "`import keras_flow.hvd as hvd`: programs of Horovod run with their import line changed "
        "([what is there](../migrate/from_horovod.md)).",
        (),
        "hvd",
        (
            *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank"),
            *("cross_size", "is_homogeneous", "ProcessSet", "add_process_set", "remove_process_set", "allreduce"),
            *("grouped_allreduce", "allgather", "allgather_object", "broadcast", "broadcast_object", "alltoall"),
            *("reducescatter", "barrier", "join", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer"),
            *("broadcast_variables", "load_model", "run"),
        ),
    ),
    "tensors": Group(
        "Global tensors",
        "One logical tensor on all ranks of a placement. `kf.ops` has the operators of `keras.ops`, with their names "
        "and arguments.",
        ("GlobalTensor", *_CREATION, "value_and_grad", "unpack", "pack", "explain", "visualize"),
    ),
    "checkpoints": Group("Checkpoints", "Saved under one layout, loaded under any.", (), "checkpoint"),
    "callbacks": Group("Callbacks", "What `fit` gets in `callbacks=`.", (), "callbacks"),
    "boxing": Group("Boxing", "Plans that change a layout, and what they cost.", (), "boxing"),
    "schedules": Group("Schedules", "In which order the ranks of a pipeline compute.", (), "schedules"),
    "scope": Group("Placed by hand", "Which rank computes the layers that are made inside.", (), "scope"),
    "notebook": Group("Notebooks and traces", "Ranks for cells, and what ran when.", ("trace",), "notebook"),
    "errors": Group(
        "Errors", "What keras_flow raises and warns of.", ("FlowError", "LayoutError", "LaunchError", "FlowWarning")
    ),
}


def exports(module: str) -> tuple[str, ...]:
    """Return the public names of a module of `kf`: what it imports as itself, else what it defines."""
    spec = importlib.util.find_spec(keras_flow._MODULES[module])
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    named = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    again = tuple(alias.name for alias in named if alias.asname == alias.name)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return again or tuple(name for name in defined if not name.startswith("_"))


def names(group: Group) -> list[str]:
    """Return the names of a page as a program writes them, without `kf.`."""
    members = group.members or (exports(group.module) if group.module else ())
    return [*group.names, *(f"{group.module}.{member}" for member in members)]


def pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its file's name."""
    index = ["# Reference\n\n`import keras_flow as kf`. A name leads to its page; the search knows all of them.\n"]
    texts = {}
    for file, group in GROUPS.items():
        shown = [f"# {group.title}\n\n{group.about}\n"]
        for name in names(group):
            options = f"    options:\n      heading: kf.{name}\n      toc_label: kf.{name}\n"
            if name in ("DataParallel", "ModelParallel", "PipelineParallel", "CentralStorage", "ParameterServer"):
                options += f"      inherited_members: {_METHODS}\n"
            shown.append(f"\n::: keras_flow.{_home(name)}\n{options}")
        for place in group.returned:
            kind = place.rpartition(".")[2]
            options = f"    options:\n      heading: {kind} (returned)\n      toc_label: {kind}\n"
            shown.append(f"\n::: keras_flow.{place}\n{options}")
        texts[f"{file}.md"] = "".join(shown)
        links = " · ".join(f"[`kf.{name}`]({file}.md#keras_flow.{_home(name)})" for name in names(group))
        index.append(f"\n**[{group.title}]({file}.md)** {group.about}\n\n{links}\n")
    index.append("\n**[Commands](commands.md)** `keras-flow` and its options, as `--help` prints them.\n")
    return {"index.md": "".join(index), **texts, "commands.md": commands()}


def commands() -> str:
    """Return the page of the command line: each command with its text and its options."""
    shown = ["# Commands\n\nThe options of `keras-flow`, as `keras-flow COMMAND --help` prints them.\n"]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        shown.append(f"\n## keras-flow {name}\n\n{inspect.cleandoc(command.help)}\n\n")
        shown.append("| option | what | default |\n|---|---|---|\n")
        for parameter in command.params:
            is_argument = parameter.param_type_name == "argument"
            written = parameter.metavar if is_argument else ", ".join(parameter.opts)
            said = isinstance(parameter.default, int | float | str) and not isinstance(parameter.default, bool)
            default = f"`{parameter.default}`" if said and parameter.default != "" and not is_argument else ""
            about = " ".join((parameter.help or "").split()).replace("|", "\\|")
            shown.append(f"| `{written}` | {about} | {default} |\n")
    return "".join(shown)


def _home(name: str) -> str:
    """Return where griffe finds a name: `kf.env` is the module keras_flow.runtime.env."""
    module, _, member = name.rpartition(".")
    return f"{keras_flow._MODULES[module].removeprefix('keras_flow.')}.{member}" if module else name
