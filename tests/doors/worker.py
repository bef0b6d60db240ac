"""Opens doors on one engine and prints what is not right.

python -m tests.doors.worker --backend torch [--only "Model\\.fit"] [--all]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile

from tests import quick


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--only", default="", help="regular expression over the names of doors")
    parser.add_argument("--all", action="store_true", help="all settings of the covering design, not one for each door")
    options = parser.parse_args(arguments)
    quick.set_environment(options.backend)
    import keras_flow as kf

    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        kf.run(run, devices=4, args=(options.backend, options.only, options.all, folder))
    return 0


def run(backend: str, only: str, whole: bool, folder: str) -> None:
    """Run on every rank."""
    quick.set_options(backend)
    from keras_flow.runtime import env
    from tests.doors import stage
    from tests.doors.cases import CASES
    from tests.doors.run import run as open_doors

    chosen = sorted(name for name in CASES if re.search(only, name))
    tasks = [(door, one) for door in chosen for one in (stage.settings() if whole else [stage.setting_of(door)])]
    for number, task in enumerate(tasks):
        for result in open_doors([task], f"{folder}/{number}"):
            if env.process_index() == 0:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
