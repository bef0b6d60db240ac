"""The table of engines: what is known of each without loading it.

A launcher, the command line and the check of versions must tell engines apart before one is loaded, and mostly without
ever loading it. Whatever they need is a row here. To add an engine is to add its row and the folder
`backends/<name>/`, a module with the names of `interface.Backend`; `tests/backends/test_engines.py` does it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from keras_flow.errors import FlowError


@dataclass(frozen=True)
class Engine:
    """One engine, as far as it is known without loading it.

    Attributes:
        name: Keras's name of the backend; also that of the folder under `backends/`.
        versions: the oldest version of its package that keras_flow works with, as in pyproject.toml. Later ones are
            judged by the check of hooks (`fingerprints`).
        packages: names under which it is packaged.
        module: the module that Python imports.
        extra: what pip installs to have it with keras_flow.
        drives_all_ranks: one process drives every rank of a host; otherwise each rank is a process of its own.
        trains: whether it is an `interface.Backend`; otherwise it is a `tensor_engine.TensorEngine` only.
        lost_neighbour: words in an error of this engine by which a rank says that another one is gone, so that the
            launcher does not take it for the cause. (Words of the operating system are the launcher's own.)
        rejoins: processes that are stuck in a collective can leave it and form their group anew, so that workers of a
            notebook stay usable after an interrupt.
        has_servers: there are parameter servers on it, so that its module has `serve` and `connect_servers`.
        on_cpu: the environment variable, and its value, by which it computes on the CPU of a host with GPUs.
        uncached: the environment variable, and its value, by which it writes no compiled program to a folder that the
            user has named for compiled programs.
        settings: environment variables that users set for it, which `keras-flow doctor` shows.
    """

    name: str
    versions: str
    packages: tuple[str, ...]
    module: str
    extra: str
    drives_all_ranks: bool
    trains: bool = True
    lost_neighbour: tuple[str, ...] = ()
    rejoins: bool = False
    has_servers: bool = False
    on_cpu: str = ""
    uncached: str = ""
    settings: tuple[str, ...] = ()


#: what people call an engine -> Keras's name of it
_OTHER_NAMES = {"pytorch": "torch", "pt": "torch", "tf": "tensorflow"}

#: name -> engine, in the order in which they are listed and compared
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "jax",
            ">=0.8",
            ("jax",),
            "jax",
            "keras-flow[jax]",
            drives_all_ranks=True,
            # of its collectives on CPUs, and of the service that watches over the processes
            lost_neighbour=("Gloo", "CoordinationServiceError"),
            on_cpu="JAX_PLATFORMS=cpu",
            uncached="JAX_ENABLE_COMPILATION_CACHE=false",
            settings=("JAX_PLATFORMS", "XLA_FLAGS", "NPROC"),
        ),
        Engine(
            "tensorflow",
            ">=2.20",
            ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly", "tf-nightly-cpu"),
            "tensorflow",
            "keras-flow[tensorflow]",
            drives_all_ranks=True,
            # the last one is our own (`tensorflow/recovery.py`)
            lost_neighbour=(
                "CoordinationServiceError",
                "UnavailableError",
                "has ended the collectives of this process",
            ),
            has_servers=True,
            on_cpu="CUDA_VISIBLE_DEVICES=-1",
            settings=("TF_NUM_INTRAOP_THREADS",),
        ),
        Engine(
            "torch",
            ">=2.13",
            ("torch",),
            "torch",
            "keras-flow[torch]",
            drives_all_ranks=False,
            lost_neighbour=(
                "recvBytes",
                "sendBytes",
            ),  # functions of gloo, named when a connection breaks
            rejoins=True,
            has_servers=True,
            on_cpu="KERAS_TORCH_DEVICE=cpu",
            settings=("KERAS_TORCH_DEVICE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ),
        # the reference of boxing and of global tensors
        Engine("numpy", ">=2", ("numpy",), "numpy", "keras-flow", drives_all_ranks=True, trains=False),
    )
}


#: names under which Keras is packaged
_KERAS = ("keras", "keras-nightly")


def installed(name: str) -> str | None:
    """The version of Keras or an engine that Python would import, read without importing it; None where there is none.

    A nightly build is packaged under another name, and may stand in front of a release: the one counts that is where
    the module is.
    """
    module = ENGINES[name].module if name in ENGINES else name
    spec = find_spec(module)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    found = []
    for package in ENGINES[name].packages if name in ENGINES else _KERAS if name == "keras" else (name,):
        try:
            found.append(distribution(package))
        except PackageNotFoundError:
            continue
    beside = [each for each in found if Path(str(each.locate_file(module))) == folder]
    return (beside or found)[0].version if found else None


def that_train() -> tuple[str, ...]:
    """The names of the engines that train."""
    return tuple(name for name, engine in ENGINES.items() if engine.trains)


def in_words(names: Iterable[str]) -> str:
    """Names as a choice.

    Example:
        >>> in_words(["jax", "tensorflow", "torch"])
        'jax, tensorflow or torch'
    """
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def require_known(names: Sequence[str], legal: Collection[str]) -> None:
    """Refuse backends that there are not, and none at all.

    Raises:
        FlowError: naming the first of them, or that none was named.
    """
    if not names:
        raise FlowError(f"no backend was named: legal are {', '.join(legal)}")
    for name in names:
        if name not in legal:
            raise FlowError(unknown(name, legal))


def unknown(name: str, legal: Iterable[str]) -> str:
    """Return the text of an error about a backend that does not exist, or that does not train.

    Example:
        >>> unknown("pytorch", ["jax", "torch"])
        "keras_flow has no backend 'pytorch': did you mean torch? Legal are jax, torch"
        >>> unknown("numpy", ["jax", "torch"])
        'the numpy backend trains nothing: legal are jax, torch'
    """
    known = list(legal)
    if name in ENGINES:
        return f"the {name} backend trains nothing: legal are {', '.join(known)}"
    near = _OTHER_NAMES.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), known, 1)), None)
    hint = f"did you mean {near}? Legal are" if near in known else "legal are"
    return f"keras_flow has no backend {name!r}: {hint} {', '.join(known)}"
