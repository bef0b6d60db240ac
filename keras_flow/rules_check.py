"""Checks rules and shapes of a user's file in a process of its own, before the processes that train or verify it start.

What a rule, an axis, a dim or the shape of rows does to a model is the same on every engine. So the check runs on the
engine that loads fastest, without the optional packages that Keras loads where they are installed. It takes 3 s of a
processor. On a busy machine it takes longer: then the processes start meanwhile, and the check ends them if it finds
an error.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_flow import user_file
from keras_flow.backends import active
from keras_flow.backends.engine_process import EngineProcess
from keras_flow.backends.engines import ENGINES
from keras_flow.launch import rehearsal
from keras_flow.runtime import versions

#: libraries that Keras loads where it finds them, for wrappers and pictures that no rule needs: half of its import
_NOT_NEEDED = ("sklearn", "matplotlib")
#: seconds after which the other processes are started, whether or not the check has ended
_SECONDS = 5.0
#: words in a file that may build another model, or have other rules, on another engine
_OF_ENGINES = re.compile(rf"\b(?:\w*backend\w*|\w*BACKEND\w*|{'|'.join(each.module for each in ENGINES.values())})\b")


class RulesCheck:
    """A process that checks the rules of a file under some layouts.

    Entering its `with` block waits for the check, for some seconds at most. Leaving the block ends the process.

    Args:
        file: the file.
        layouts: names of its layouts.
        backends: engines that will train or verify the file's model.
        what: who needs the file, for errors.
        ranks: as of `user_file.ranks_for`.
    """

    def __init__(
        self, file: Path, layouts: Sequence[str], backends: Sequence[str], what: str, ranks: int | None = None
    ) -> None:
        engine = ENGINES[_engine_for(file.read_text(encoding="utf-8", errors="replace"), backends)]
        # a check needs no memory of a GPU, and ends where it would write a file
        aside = dict(setting.split("=") for setting in (engine.on_cpu, engine.uncached) if setting)
        told = ("keras_flow.rules_check", str(file.resolve()), json.dumps(layouts), what, json.dumps(ranks))
        self._process = EngineProcess(engine.name, *told, environment=aside, with_errors=False)

    def __enter__(self) -> RulesCheck:
        try:
            self._process.wait(_SECONDS)
            self.raise_what_is_found()
        except BaseException:  # also a signal, after which nobody leaves the block
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__()

    def raise_what_is_found(self) -> None:
        """Raise what the check has found until now.

        Raises:
            FlowError: a rule, a layout or the file is wrong.
        """
        if self._process.status is not None:
            rehearsal.raise_found(self._process.output())


def _engine_for(source: str, backends: Sequence[str]) -> str:
    """The engine that loads fastest, where the file's text names no engine; otherwise the first of those asked for."""
    fastest = next(iter(ENGINES))
    return fastest if versions.installed(fastest) and not _OF_ENGINES.search(source) else backends[0]


def main(file: str, layouts: list[str], what: str, given: int | None) -> None:
    """Check the rules in this process, and write what is wrong to standard output for `rehearsal.raise_found`."""
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # Python takes None for "cannot be had"
    importlib.import_module("keras")
    for name in hidden:  # the user's file may have them
        del sys.modules[name]
    ranks = user_file.ranks_for(layouts, given)
    processes = 1 if active.drives_all_ranks() else ranks
    rehearsal.play(lambda: user_file.check_before_start(file, layouts, what), ranks, processes, os.dup(1))
    os._exit(0)  # nothing is left to be finished


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
