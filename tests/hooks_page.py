"""docs/hooks.md, from what the engines' modules declare; each engine says it in a process of its own.

python -m tests.hooks_page      writes the page
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from keras_flow.backends.fingerprints import is_public

ENGINES = ("jax", "tensorflow", "torch")
PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"

_HEAD = """# Hooks

Every name of Keras and of the engines that keras_flow wraps, and what would happen without it. Keras has {count} of
them. A hook does nothing while no distribution of keras_flow is active. It is declared above the function that takes
the name's place (`backends/hooking.py`), and compared with tested versions before it is put in
(`backends/fingerprints.json`). `python -m tests.hooks_page` writes this page. [What Keras could have](upstream.md) says
which hooks a change of Keras would make needless."""
_METHODS = """
## Methods of objects

{count} methods are replaced on objects and not on their class: a class of keras_flow stands before Keras's in the bases
of a callback, once a loop hands it its model, and of an archive, when it is made. So are `Model.build` of a model whose
variables the distribution makes, and on torch `update_state` of the metrics that an own `train_step` updates.

| name | what it does |
|---|---|"""
_GROUPS = (
    ("Public names of Keras", is_public),
    ("Private names of Keras", lambda name: name.startswith(("keras:", "keras."))),
    ("Names of engines", lambda name: True),
)
_SAYS = """
import json, sys
from keras_flow.backends import fingerprints, hooking, keras_hooks, object_hooks
from keras_flow.backends.active import backend
from keras_flow.checkpoint import callback, positions
hooks = (*backend().hooks(), *keras_hooks.hooks(), *hooking.declared(callback, positions))
found = [[(fingerprints.name_of(each), each.why) for each in group] for group in (hooks, object_hooks.declared())]
json.dump(found, sys.stdout)
"""


def declared(engine: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Name and reason of each hook of an engine, of those common to all too, and of each method of objects."""
    environment = {**os.environ, "KERAS_BACKEND": engine}
    said = subprocess.run(
        [sys.executable, "-c", _SAYS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    hooks, methods = ([(name, why) for name, why in group] for group in json.loads(said.stdout))
    return hooks, methods


def page() -> str:
    """The whole page."""
    engines: dict[str, dict[str, list[str]]] = {}
    for engine in ENGINES:
        hooks, methods = declared(engine)
        for name, why in hooks:
            found = engines.setdefault(name, {}).setdefault(why, [])
            if engine not in found:
                found.append(engine)
    count = sum(name.startswith(("keras:", "keras.")) for name in engines)
    parts, left = [_HEAD.format(count=count)], dict(sorted(engines.items()))
    for title, belongs in _GROUPS:
        names = [name for name in left if belongs(name)]
        rows = [
            f"| `{name}` | {'all' if len(on) == len(ENGINES) else ', '.join(on)} | {why.replace('|', chr(92) + '|')} |"
            for name in names
            for why, on in left.pop(name).items()
        ]
        parts += [f"\n## {title}\n\n{len(names)} names.\n\n| name | engines | why |\n|---|---|---|", *rows]
    parts += [_METHODS.format(count=len(methods)), *(f"| `{name}` | {why} |" for name, why in sorted(methods))]
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
