"""Runs the grid's cases on one backend and writes one JSON line for each case and layout.

python -m tests.parity.worker --backend torch --out results.jsonl --layouts dp4,tp4,2x2 --only mlp,cnn
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback

from keras_flow import settings
from tests import quick


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--out", default="-", help="file for the results; - prints them")
    parser.add_argument("--layouts", default="", help="the layouts to run, for example dp4,tp4; all when left out")
    parser.add_argument("--only", default="", help="regular expression over case names")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--product", action="store_true", help="run models x optimizers x options instead of the cases")
    kinds.add_argument("--small", action="store_true", help="run the few cases of `make test-versions`")
    parser.add_argument("--processes", type=int, help="that share the four ranks; left out: one, on torch four")
    parser.add_argument("--one-gpu", action="store_true", help="every process takes the same NVIDIA GPU (docs/gpus.md)")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    return parser.parse_args(arguments)


#: every process believes that the GPU is its own; arithmetic that does not round to 10 bits and adds in one order
ON_ONE_GPU = {
    settings.OWN_ACCELERATORS: "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.one_gpu:
        options.processes = 4
        os.environ |= ON_ONE_GPU
    quick.set_environment(options.backend)
    import keras_flow as kf

    with tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True) as folder:
        # cases that train the same model under the same layout compile their programs once
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        kf.run(run_cases, devices=4, processes=options.processes, args=(vars(options), folder))
    return 0


def run_cases(options: dict, folder: str) -> None:
    """Run on every rank: the cases in turn. Rank 0 has the reference and writes results."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    quick.set_options(options["backend"])
    if options["one_gpu"]:
        # NCCL refuses two ranks of one host on one GPU, so each says that it is a host of its own
        os.environ["NCCL_HOSTID"] = f"rank{os.environ.get('RANK')}"
    from tests.parity.cases import CASES, product
    from tests.parity.support import SMALL

    chosen = [
        case
        for name, case in (product.CASES if options["product"] else CASES).items()
        if re.search(options["only"], name) and (name in SMALL or not options["small"])
    ]
    results = (result for case in chosen for result in run_case(case, options, folder))
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
    asked = options["layouts"].split(",") if options["layouts"] else case.on(options["backend"])
    reference = Reference(case, folder, options["trace"])
    for layout in [name for name in case.on(options["backend"]) if name in asked]:
        yield run_layout(reference, layout)


#: case -> its numbers on one device, once they were asked for
references: dict[str, Reference] = {}


class Reference:
    """The numbers of one device, on rank 0 alone; made once.

    Attributes:
        runs: of one device, and with the half precision of the case where it has one; none where it failed.
        error: with which it failed.
    """

    def __init__(self, case, folder: str, trace: bool = False):
        from keras_flow.runtime import env
        from tests.parity import harness

        self.case, self.trace = case, trace
        self.folder = os.path.join(folder, re.sub(r"\W+", "_", case.name))  # one for all ranks, as a user's would be
        os.makedirs(self.folder, exist_ok=True)
        self.runs: list[harness.Run] = []
        self.error = ""
        try:
            if env.process_index() == 0:
                self.runs.append(harness.run_once(case, "1", self.folder)[0])
                if case.half:
                    self.runs.append(harness.run_once(case, "1", self.folder, policy=case.half)[0])
        except Exception as error:
            self.runs, self.error = [], f"{type(error).__name__}: {error}"[:2000]
            if trace:
                traceback.print_exc()


def run_layout(reference: Reference, layout: str) -> dict:
    """Run the case of a reference under a layout, and compare."""
    from keras_flow import FlowError
    from tests.parity import harness

    case, started, used = reference.case, time.perf_counter(), time.process_time()
    result: dict = {"case": case.name, "layout": layout, "features": case.features, "single": reference.error}
    try:
        run, notes = harness.run_once(case, layout, reference.folder, policy=case.half or "float32")
        result["notes"] = notes
        if reference.runs:
            of_half = harness.compare_half if case.half else harness.compare
            measured = of_half(*reference.runs, run)
            result |= {"status": "over" if measured.over else "ok", "over": measured.over, "worst": measured.worst}
            result["left_out"] = measured.left_out
        else:
            result["status"] = "ok"
    except FlowError as error:
        result |= {"status": "refused", "error": str(error)[:2000]}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:2000]
        # what Keras refuses on one device too is refused in its own words
        result |= {"status": "refused" if text == reference.error else "error", "error": text}
        if reference.trace:
            traceback.print_exc()
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["cpu"] = round(time.process_time() - used, 1)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
