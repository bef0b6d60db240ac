"""Runs the grid's cases on one backend and writes one JSON line for each case and layout.

python -m tests.parity.worker --backend torch --out results.jsonl --layouts dp4,tp4,2x2 --only mlp,cnn
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback

from tests import quick


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--out", default="-", help="file for the results; - prints them")
    parser.add_argument("--layouts", default="", help="the layouts to run, for example dp4,tp4; all when left out")
    parser.add_argument("--only", default="", help="regular expression over case names")
    parser.add_argument("--faults", action="store_true", help="run the seeded faults too, after the cases")
    parser.add_argument("--product", action="store_true", help="run models x optimizers x options instead of the cases")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    quick.set_environment(options.backend)
    import keras_flow as kf

    with tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True) as folder:
        # cases that train the same model under the same layout compile their programs once
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        kf.run(run_cases, devices=4, args=(vars(options), folder))
    return 0


def run_cases(options: dict, folder: str) -> None:
    """Run on every rank: the cases in turn. Rank 0 has the reference and writes results."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    quick.set_options(options["backend"])
    from tests.parity import faults
    from tests.parity.cases import CASES, product

    chosen = [
        case
        for name, case in (product.CASES if options["product"] else CASES).items()
        if re.search(options["only"], name)
    ]
    results = (result for case in chosen for result in run_case(case, options, folder))
    if options["faults"]:
        results = itertools.chain(results, faults.run(options["backend"], folder))
    from keras_flow.runtime import env

    for result in results:
        if env.process_index() == 0:
            line = json.dumps({"backend": options["backend"], **result})
            if options["out"] == "-":
                print(line, flush=True)
            else:
                with open(options["out"], "a") as file:
                    file.write(line + "\n")


def run_case(case, options: dict, folder: str):
    """One device (on rank 0 alone), then each layout; yields one result for each layout."""
    from keras_flow import FlowError
    from keras_flow.runtime import env
    from tests.parity import harness

    folder = os.path.join(folder, re.sub(r"\W+", "_", case.name))  # one for all ranks, as a user's would be
    os.makedirs(folder, exist_ok=True)
    started, used = time.perf_counter(), time.process_time()
    references, single_error = [], ""
    try:
        if env.process_index() == 0:
            references.append(harness.run_once(case, "1", folder)[0])
            if case.half:
                references.append(harness.run_once(case, "1", folder, policy=case.half)[0])
    except Exception as error:
        references, single_error = [], f"{type(error).__name__}: {error}"
        if options["trace"]:
            traceback.print_exc()
    asked = options["layouts"].split(",") if options["layouts"] else case.on(options["backend"])
    for layout in [name for name in case.on(options["backend"]) if name in asked]:
        result: dict = {"case": case.name, "layout": layout, "features": case.features, "single": single_error[:2000]}
        try:
            run, notes = harness.run_once(case, layout, folder, policy=case.half or "float32")
            result["notes"] = notes
            if references:
                measured = harness.compare_half(*references, run) if case.half else harness.compare(references[0], run)
                result |= {"status": "over" if measured.over else "ok", "over": measured.over, "worst": measured.worst}
                result["left_out"] = measured.left_out
            else:
                result["status"] = "ok"
        except FlowError as error:
            result |= {"status": "refused", "error": str(error)[:2000]}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            # what Keras refuses on one device too is refused in its own words
            result |= {"status": "refused" if text == single_error[:2000] else "error", "error": text}
            if options["trace"]:
                traceback.print_exc()
        result["seconds"] = round(time.perf_counter() - started, 1)
        result["cpu"] = round(time.process_time() - used, 1)
        started, used = time.perf_counter(), time.process_time()
        yield result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
