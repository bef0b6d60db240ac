"""The active backend is found as Keras finds it, without loading anything."""

import json
from pathlib import Path

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(60)


def tell(program: str, backend: str = "jax", **variables: str) -> str:
    code, out, err = programs.finish(programs.start(["-c", program], backend, **variables))
    assert code == 0, err
    return out.strip()


NAME = """
import sys
from keras_flow.backends.active import backend_name
print(backend_name())
assert "keras" not in sys.modules
"""


def test_name_comes_from_the_environment_then_from_the_file(tmp_path: Path) -> None:
    assert tell(NAME, "torch") == "torch"
    assert tell(NAME, "", KERAS_HOME=str(tmp_path)) == "tensorflow", "the default of Keras"
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert tell(NAME, "", KERAS_HOME=str(tmp_path)) == "jax"


def test_keras_agrees(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "numpy"}))
    program = (
        "import keras; from keras_flow.backends.active import backend_name as b; print(b(), keras.backend.backend())"
    )
    assert tell(program, "", KERAS_HOME=str(tmp_path)) == "numpy numpy"


ERROR = """
import sys
import keras_flow as kf
from importlib.util import find_spec
import importlib.util
if len(sys.argv) > 1:
    importlib.util.find_spec = lambda name: None if name == sys.argv[1] else find_spec(name)
try: kf.init(2)
except kf.FlowError as error: print(error)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openvino", "legal are jax, tensorflow, torch."),
        ("pytorch", "did you mean torch?"),
        ("jaxx", "did you mean jax?"),
    ],
)
def test_unknown_backend(name: str, said: str) -> None:
    assert f"keras_flow has no backend '{name}': {said}" in tell(ERROR, name)


def test_missing_engine() -> None:
    text = tell("import sys; sys.argv.append('torch')\n" + ERROR, "torch")
    assert "its engine is not installed" in text
    assert "pip install 'keras-flow[torch]'" in text


def test_numpy_has_global_tensors_and_trains_nothing() -> None:
    program = """
import keras_flow as kf
from keras_flow.backends import active
print(kf.init(4).size, active.tensor_engine().name)
try:
    with kf.DataParallel(kf.Placement([0, 1])).scope():
        pass
except kf.FlowError as error:
    print("trains nothing" in str(error))
"""
    assert tell(program, "numpy").split("\n") == ["4 numpy", "True"]
