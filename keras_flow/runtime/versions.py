"""The oldest versions of Keras and of the engines that keras_flow works with."""

from __future__ import annotations

from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from keras_flow.backends.engines import ENGINES, installed
from keras_flow.errors import FlowError

#: Keras and the engines -> the same bounds as the dependencies and extras in pyproject.toml
SUPPORTED = {"keras": ">=3.15", **{name: engine.versions for name, engine in ENGINES.items()}}


def oldest(name: str) -> Version:
    """The oldest version of Keras or an engine that keras_flow works with."""
    return min(Version(part.version) for part in SpecifierSet(SUPPORTED[name]) if part.operator == ">=")


@cache
def check(engine: str) -> None:
    """Check Keras and `engine` against the supported versions.

    Raises:
        FlowError: one of them is not installed, or older than the oldest supported version.
    """
    for name in ("keras", engine):
        current, needed = installed(name), SUPPORTED[name]
        if current is None:
            extra = "keras-flow" if name == "keras" else ENGINES[name].extra
            raise FlowError(f"keras_flow needs {name} {needed}, found none; install it with `pip install '{extra}'`.")
        # newer ones are looked at hook by hook, when the first distribution is made (`backends/fingerprints`)
        if Version(current) < oldest(name):
            raise FlowError(
                f"keras_flow needs {name} {needed}, found {name} {current}; install a supported version with "
                f"`pip install '{name}{needed}'`."
            )
