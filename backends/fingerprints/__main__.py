"""`python -m keras_flow.backends.fingerprints` writes fingerprints of what is there."""

from __future__ import annotations

import json

from keras_flow.backends import fingerprints, keras_hooks, object_hooks
from keras_flow.backends.active import backend
from keras_flow.current import keras_places


def write() -> None:
    """Write the fingerprints of the active engine's hooks, and of Keras's, for the versions that are installed."""
    engine = backend()
    table: fingerprints.Table = json.loads(fingerprints.FILE.read_text()) if fingerprints.FILE.exists() else {}
    of_engine = table.setdefault(engine.name, {})
    hooks = (*engine.hooks(), *keras_hooks.hooks(), *object_hooks.declared())
    places = (*hooks, *engine.privates(), *keras_places.privates())
    gone = (
        of_engine.keys()
        - {fingerprints.name_of(place) for place in places}
        - {f"{name}:" for name in ("keras", engine.name)}
    )
    for name in gone:  # of these versions; others may have it
        current = fingerprints.installed(fingerprints.package_of(name))
        for versions in of_engine[name].values():
            versions[:] = [each for each in versions if each != current]
        of_engine[name] = {seen: versions for seen, versions in of_engine[name].items() if versions}
        if not of_engine[name]:
            del of_engine[name]
    for name, seen in fingerprints.of_places(places).items():
        package = fingerprints.package_of(name)
        versions = of_engine.setdefault(name, {}).setdefault(seen, [])
        versions[:] = sorted({*versions, fingerprints.installed(package)}, key=fingerprints._ordered)
    for package in ("keras", engine.name):  # also where no hook is in the engine itself
        tested = of_engine.setdefault(f"{package}:", {}).setdefault("tested", [])
        tested[:] = sorted({*tested, fingerprints.installed(package)}, key=fingerprints._ordered)
    fingerprints.FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
