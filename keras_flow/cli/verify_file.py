"""`keras-flow verify FILE.py`: verifies the program's model on its first rows, in a process for each backend."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from keras_flow import settings
from keras_flow.backends.engine_process import EngineProcess
from keras_flow.errors import FlowError
from keras_flow.launch.job import stated_timeout
from keras_flow.rules_check import RulesCheck
from keras_flow.verify.verification import ComparedNumber, Verification


@dataclass(frozen=True)
class VerifyJob:
    """What the process of a backend verifies.

    Attributes:
        file: the user's program.
        layout: its name, as `keras-flow compare` takes it.
        batch_size: rows of the batch that is verified.
        tolerance: as of `dist.verify`; None takes its default.
        dtype: as of `dist.verify`.
        seed: of the weights.
        by_layer: as of `dist.verify`.
        ranks: how many, where the layout's name does not say it, as of `user_file.ranks_for`.
        out: file to which the result is written.
    """

    file: str
    layout: str
    batch_size: int
    tolerance: float | None
    dtype: str | None
    seed: int
    by_layer: bool | None
    ranks: int | None = None
    out: str = ""


def verify_file(backend: str, job: VerifyJob, check: RulesCheck) -> Verification:
    """Verify a program's model under a layout on one backend, while `check` checks the file's rules.

    Raises:
        FlowError: an error of the user's file or of the run, with its text.
    """
    with tempfile.TemporaryDirectory(prefix="keras-flow-verify-") as folder:
        out = Path(folder) / "verification.json"
        told = json.dumps(vars(replace(job, out=str(out))))
        with EngineProcess(backend, "keras_flow.cli.verify_file", told) as process:
            limit = stated_timeout(None)
            if not process.wait(limit, check.raise_what_is_found):
                raise FlowError(
                    f"{backend}: the verification took more than {limit:g} s and was ended; {settings.TIMEOUT} sets "
                    "other seconds"
                )
            # an error of keras_flow is also written to `out`: without a file the process has crashed
            if not out.exists():
                said = process.last_words(3000)
                raise FlowError(f"{backend}: the verification ended with status {process.status}: {said}")
        result = json.loads(out.read_text())
    if "error" in result:
        raise FlowError(f"{backend}: {result['error']}")
    rows = tuple(ComparedNumber(**row) for row in result.pop("rows"))
    return Verification(**result, rows=rows)


def run(job: VerifyJob) -> None:
    """Verify the job's model. Runs on every rank; the first writes the result."""
    import keras

    from keras_flow import user_file
    from keras_flow.runtime import env
    from keras_flow.verify.run import verify

    module = user_file.load(job.file, what="a verification")
    make = user_file.distribution_maker(module, job.layout)
    if make is None:
        raise FlowError("layout '1' is one device: there is nothing to verify. Give dpN, tpN, AxB or a name of yours")
    data = user_file.load_data(module)
    keras.utils.set_random_seed(job.seed)
    distribution = make()
    x, y = (keras.tree.map_structure(lambda leaf: leaf[: job.batch_size], part) for part in (data.x, data.y))
    with distribution.scope():
        model = user_file.built_model(module, lambda: x)
    verification = verify(distribution, model, x, y, tolerance=job.tolerance, dtype=job.dtype, by_layer=job.by_layer)
    if env.process_index() == 0:
        Path(job.out).write_text(json.dumps(asdict(verification)))


def main(text: str) -> int:
    """Run a job in the process of its backend; returns the exit status."""
    import keras_flow as kf
    from keras_flow import user_file

    job = VerifyJob(**json.loads(text))
    try:
        kf.run(run, devices=user_file.ranks_for([job.layout], job.ranks), args=(job,), rehearse=False)
    except FlowError as error:
        Path(job.out).write_text(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
