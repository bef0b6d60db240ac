"""Random models on one engine: each trained under a random layout and on one device, and compared.

    python -m tests.fuzz.models --backend torch --models 500 --seed 1 --out fuzz-torch.jsonl
    python -m tests.fuzz.models --backend jax --pipelines            random pipelines, of models row by row
    python -m tests.fuzz.models --backend jax --memory               random zero= and remat=
    python -m tests.fuzz.models --backend torch --quantized          quantize between fits, callbacks on one process
    python -m tests.fuzz.models --backend torch --only 1/137         prints model 137 of seed 1, and runs it

A run that was stopped goes on where it was. What is off in float32 is decided in float64.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

from tests import quick
from tests.sweep.runner import read, watched_tasks

#: ranks of a job: those of engines with a process for each rank cost more
RANKS = {"jax": 8, "tensorflow": 8, "torch": 4}
#: models in one process
CHUNK = 60


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, choices=tuple(RANKS))
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pipelines", action="store_true", help="their seeds begin with p")
    parser.add_argument("--memory", action="store_true", help="their seeds begin with z")
    parser.add_argument("--quantized", action="store_true", help="their seeds begin with q")
    parser.add_argument("--only", default="", help="SEED/NUMBER of one model: print it and run it")
    parser.add_argument("--out", type=Path, help="file of the results, a line each", default=Path("fuzz-models.jsonl"))
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return _work(options.backend, options.worker.split(","), str(options.out), options.float64)
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            lines = _all(options.backend, [options.only], Path(folder) / "one.jsonl", options.float64)
        print(lines[0].get("text", ""))
        print(json.dumps({key: value for key, value in lines[0].items() if key != "text"}, indent=1))
        return int(lines[0]["state"] in BAD)
    kind = "p" if options.pipelines else "z" if options.memory else "q" if options.quantized else ""
    seeds = [f"{kind}{options.seed}/{number}" for number in range(options.models)]
    lines = _all(options.backend, seeds, options.out, options.float64)
    off = [line["seed"] for line in lines if line["state"] == "wrong"]
    if off and not options.float64:
        exact = {line["seed"]: line for line in _all(options.backend, off, options.out.with_suffix(".float64"), True)}
        lines = [exact[line["seed"]] if line["state"] == "wrong" else line for line in lines]
    for line in lines:
        if line["state"] in BAD:
            print(line["state"], line["seed"], str(line.get("over") or line.get("error"))[:300])
    print(options.backend, dict(collections.Counter(line["state"] for line in lines)))
    return int(any(line["state"] in BAD for line in lines))


#: what must not be
BAD = ("wrong", "crash", "abort", "hang")


def _all(backend: str, seeds: list[str], out: Path, float64: bool) -> list[dict]:
    """The results of the seeds, those that are in the file already and those run now."""
    started = time.monotonic()
    while True:
        lines = read(out)
        done = {line["seed"]: line for line in lines if "state" in line}
        left = [seed for seed in seeds if seed not in done]
        if not left:
            return [done[seed] for seed in seeds]
        _process(backend, left[:CHUNK], out, float64)
        minutes = (time.monotonic() - started) / 60
        print(f"{backend}: {len(seeds) - len(left)} of {len(seeds)} models before, {minutes:.0f} min", flush=True)


def _process(backend: str, seeds: list[str], out: Path, float64: bool) -> None:
    """One process for some models; what it died in, or where it hangs, is a result."""
    command = [sys.executable, "-m", "tests.fuzz.models", "--backend", backend, "--worker", ",".join(seeds)]
    command += ["--out", str(out), *(["--float64"] if float64 else [])]
    died = watched_tasks(command, out)
    if died:
        with open(out, "a") as file:
            file.write(json.dumps({"seed": died.pop("begins"), **died}) + "\n")


def _work(backend: str, seeds: list[str], out: str, float64: bool) -> int:
    quick.set_environment(backend)
    if float64:
        os.environ |= {"JAX_ENABLE_X64": "1", "KERAS_FLOATX": "float64"}
    import keras_flow as kf

    kf.run(run, devices=RANKS[backend], args=(backend, seeds, out, float64))
    return 0


def run(backend: str, seeds: list[str], out: str, float64: bool) -> None:
    """Run on every rank."""
    import keras

    import keras_flow as kf

    quick.set_options(backend)
    if float64:
        keras.config.set_floatx("float64")
    for seed in seeds:
        if kf.env.process_index() == 0:
            with open(out, "a") as file:
                file.write(json.dumps({"begins": seed}) + "\n")
        line = result(seed, RANKS[backend])
        if kf.env.process_index() == 0:
            with open(out, "a") as file:
                file.write(json.dumps({"seed": seed, **line}) + "\n")


def result(seed: str, ranks: int) -> dict:
    """What one model gave: `state`, the model as text, what is over, seconds."""
    from tests.fuzz.random_models import is_for_a_pipeline

    started = time.monotonic()
    # draws of a pipeline's micro-batches are those of one device by the logical index of rows alone
    draws = {"KERAS_FLOW_RANDOM": "logical"} if is_for_a_pipeline(seed) else {}
    with mock.patch.dict(os.environ, draws):
        return {**_result(seed, ranks), "seconds": round(time.monotonic() - started, 1)}


def _result(seed: str, ranks: int) -> dict:
    import keras_flow as kf
    from keras_flow.backends.active import backend
    from tests.fuzz import around, further
    from tests.fuzz import model_programs as programs

    text = f"{programs.setting(seed, ranks).text}; {around.drawn_for(seed).text}; {further.drawn_for(seed).text}"
    reference, error = None, ""
    if kf.env.process_index() == 0:
        try:
            reference, drawn = programs.run(seed, ranks, distributed=False)
            text = "\n".join([text, *drawn.text])
            if reference.has_nan:  # of a row that is masked whole, on JAX: there is nothing to compare with
                error = "one device gives NaN"
        except Exception:
            error = traceback.format_exc()[-1500:]
    if any(backend().agree_on(dict.fromkeys(kf.env.local_ranks(), error)).values()):
        return {"state": "one device", "text": text, "error": error}
    found: dict = {"text": text}
    try:
        numbers, _ = programs.run(seed, ranks, distributed=True)
        over = programs.compare(reference, numbers) if reference is not None else {}
        found |= {"state": "wrong" if over else "right", "over": over}
    except kf.FlowError as refusal:
        found |= {"state": "refused", "error": str(refusal)[:1500]}
    except AssertionError as wrong:
        found |= {"state": "wrong", "over": str(wrong)[:1500]}
    except Exception:
        found |= {"state": "crash", "error": traceback.format_exc()[-2500:]}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
