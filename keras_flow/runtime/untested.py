"""Says on standard error that a version of Keras or an engine was not tested, as commands that run one do."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def say_untested(engines: Sequence[str]) -> None:
    """Name the packages that are installed in a version that keras_flow was not tested with."""
    from keras_flow.backends import fingerprints

    found = {package: version for engine in engines for package, version in fingerprints.untested(engine).items()}
    for package, version in found.items():
        known = ", ".join(fingerprints.tested(package)) or "none"
        print(
            f"keras-flow: {package} {version} was not tested (tested: {known}); `keras-flow doctor` runs a self-test, "
            "and an error names what does not fit.",
            file=sys.stderr,
        )
