"""`--max_restarts`: a job that was killed and started again ends with the weights of one that nothing disturbed."""

import json
from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

PROGRAM = """
import json, os, signal, sys
import keras_flow as kf
kf.init()
import keras, numpy as np
folder, fails = sys.argv[1], sys.argv[2] == "fails"
attempt = int(os.environ["KERAS_FLOW_RESTARTS"])
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # in the middle of the third epoch, when two were saved
        if fails and attempt == 0 and kf.env.process_index() == 1 and self.epoch == 2 and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
keras.utils.set_random_seed(0)
x = np.linspace(-1, 1, 160).reshape(40, 4).astype("float32")
with kf.DataParallel().scope():
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    callbacks = [keras.callbacks.BackupAndRestore(folder + "/backup"), Fails()]
    history = model.fit(
        x, np.cos(x.sum(1, keepdims=True)), batch_size=10, epochs=5, shuffle=False, verbose=0, callbacks=callbacks
    )
if kf.env.is_main_process():
    weights = [value.tolist() for value in model.get_weights()]
    print(json.dumps({"attempt": attempt, "epochs": history.epoch, "weights": weights}))
"""


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_training_goes_on_from_the_last_backup(backend: str, tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    found = {}
    for case in ("fails", "undisturbed"):
        folder = tmp_path / case
        folder.mkdir()
        command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--max_restarts", "1", "--timeout", "60"]
        code, out, err = programs.finish(programs.start([*command, str(script), str(folder), case], backend), 120)
        assert code == 0, err
        assert ("restart 1 of 1" in err) is (case == "fails")
        found[case] = json.loads(out.strip().splitlines()[-1])
    assert found["fails"]["attempt"] == 1
    assert found["fails"]["epochs"] == [2, 3, 4], "two epochs are not trained again"
    # bit by bit: the masks of dropout go on where they were, too
    assert found["fails"]["weights"] == found["undisturbed"]["weights"]
