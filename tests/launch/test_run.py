"""`kf.run`: results, errors, and what it leaves behind."""

import signal
import threading
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(180)


def tell(folder: Path, text: str, backend: str = "torch") -> tuple[int, str, str]:
    return programs.finish(programs.start([str(programs.write(folder, text))], backend), 150)


@sampling.one_in(2)
def test_torch_result_of_rank_0_state_and_custom_objects(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
import keras, keras_flow as kf

@keras.saving.register_keras_serializable("mine")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

def drawn():
    import torch
    return np.random.rand(), float(torch.rand(())), float(keras.random.uniform(()))

def ordered():
    import tensorflow as tf
    return [int(n) for n in tf.data.Dataset.range(6).shuffle(6)]

def main(first, second=0):
    import torch.distributed
    env = kf.env
    ranks = [None] * 2
    me = (env.get_rank(), env.get_local_rank(), env.local_ranks(), env.process_index())
    torch.distributed.all_gather_object(ranks, me)
    print("shown once", flush=True)
    kept = "mine>Twice" in keras.saving.get_custom_objects()
    state = (keras.config.dtype_policy().name, drawn(), ordered())
    inner = kf.run(lambda: kf.init(2).size)
    return ranks, first + second, kept, state, (env.get_world_size(), env.process_count(), env.get_node_size()), inner

if __name__ == "__main__":
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_bfloat16")
    drawn()
    print(kf.run(main, devices=2, args=(1,), kwargs={"second": 2}))
    print((drawn(), ordered()))
"""
    code, out, err = tell(tmp_path, program)
    assert code == 0, err
    shown, result, random = out.splitlines()
    assert shown == "shown once"
    ranks, added, kept, state, sizes, inner = eval(result)
    assert ranks == [(0, 0, (0,), 0), (1, 1, (1,), 1)]
    assert (added, kept, sizes, inner) == (3, True, (2, 2, 1), 2)
    assert state == ("mixed_bfloat16", *eval(random)), "as the script set it up beside main"


def test_torch_rank_raises(tmp_path: Path) -> None:
    program = """
import keras_flow as kf
def main():
    import torch, torch.distributed, warnings
    if kf.env.get_rank() == 1:
        raise ValueError("boom")
    warnings.warn("look here")
    torch.distributed.all_reduce(torch.ones(1))
if __name__ == "__main__":
    try: kf.run(main, devices=2)
    except kf.LaunchError as error: print(error.rank, error)
"""
    code, out, err = tell(tmp_path, program)
    script = tmp_path / "program.py"
    assert (code, err) == (0, f'{script}:7: UserWarning: look here\n  warnings.warn("look here")\n')
    assert out.startswith("1 rank 1 of 2 failed: ValueError: boom (exit code 1)\n")
    assert f'File "{script}", line 6, in main\n    raise ValueError("boom")\n' in out
    assert "dynamic-code" not in out


def test_main_that_cannot_be_sent(tmp_path: Path) -> None:
    program = """
import threading
import keras_flow as kf
lock = threading.Lock()
def main():
    with lock: pass
try: kf.run(main, devices=2)
except kf.FlowError as error: print(error)
try: kf.run(print, devices=2, args=(lock,))
except kf.FlowError as error: print(error)
"""
    _, out, err = tell(tmp_path, program)
    first, second = out.splitlines()
    assert "kf.run cannot send main" in first, err
    assert "the name 'lock', which it uses (lock)" in first
    assert "create such objects" in first
    assert "argument 0 (lock)" in second


def test_missing_guard_in_a_module_starts_no_more_processes(tmp_path: Path) -> None:
    text = "import keras_flow as kf\ndef main(): pass\nkf.run(main, devices=2)\n"
    programs.write(tmp_path, text, "unguarded.py")
    _, out, err = tell(tmp_path, "import unguarded")
    assert "was importing the module that holds main" in err
    assert "__main__" in err
    assert out == ""


def test_result_that_cannot_be_sent_back(tmp_path: Path) -> None:
    from keras_flow.errors import FlowError
    from keras_flow.launch import payload

    with pytest.raises(FlowError, match="main returned a generator, which cannot be sent back"):
        payload.send_result(tmp_path / "result", (n for n in range(3)))
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):  # no fault of what was returned
        payload.send_result(tmp_path / "full", bytes(100000))


def test_a_history_comes_back_without_its_model(tmp_path: Path) -> None:
    """One rank cannot send weights that several ranks hold, or custom layers."""
    import keras

    from keras_flow.launch import payload

    history = keras.callbacks.History()
    history.set_model(threading.Lock())  # which cannot be pickled
    history.set_params({"epochs": 1})
    history.on_train_begin()
    history._model = history.model
    history.history["loss"] = [0.5]
    payload.send_result(tmp_path / "result", {"first": [history]})
    back = payload.receive_result(tmp_path / "result")["first"][0]  # type: ignore[index]
    assert (type(back), back.history, back.epoch, back.params) == (type(history), {"loss": [0.5]}, [], {"epochs": 1})


def test_main_that_leaves_well_leaves_here_too(tmp_path: Path) -> None:
    """As where it runs in this process."""
    from keras_flow.launch import payload

    with pytest.raises(SystemExit) as caught:
        payload.receive_result(tmp_path / "result")
    assert caught.value.code == 0


def test_settings_of_keras_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from keras_flow.current.keras_places import get_global_attribute, set_global_attribute
    from keras_flow.launch import payload

    class Own(keras.layers.Layer):
        __module__ = "__main__"

    class Other(keras.layers.Layer):
        pass

    custom, names = keras.saving.get_custom_objects(), payload._SWITCHES
    before, settings = dict(custom), [get_global_attribute(name) for name in names]
    custom.update({"Own": Own, "Other": Other, "of>Other": Other, "of>Own": Own})
    keras.config.enable_unsafe_deserialization()
    keras.config.disable_interactive_logging()
    keras.config.disable_flash_attention()
    keras.config.disable_traceback_filtering()
    keras.config.set_max_epochs(3)
    try:
        state = payload._keras_state()
        custom.clear()
        for name in names:
            set_global_attribute(name, None)
        keras.config.set_max_epochs(None)
        payload._restore(state)
        assert custom == {"Own": Own, "Other": Other, "of>Own": Own}
        assert [get_global_attribute(name) for name in names] == [False] * 4
        assert keras.config.max_epochs() == 3
    finally:
        keras.config.set_max_epochs(None)
        custom.clear()
        custom.update(before)
        for name, value in zip(names, settings, strict=True):
            set_global_attribute(name, value)


def test_a_rank_joins_before_it_reads_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arrays of JAX among them start the engine, which must know of the other processes then."""
    from keras_flow.launch import child, payload
    from keras_flow.launch.folder import JobFolder

    did: list[str] = []
    monkeypatch.setattr("keras_flow.runtime.init.init", lambda: did.append("joined"))
    monkeypatch.setattr(payload, "receive", lambda _: did.append("read") or (lambda: did.append("called")))
    child._run_main(JobFolder(tmp_path), 1, joins=True)
    assert did == ["joined", "read", "called"]


@pytest.mark.parametrize("processes", [0, -1, True])
def test_numbers_of_processes_that_cannot_be(processes: int) -> None:
    import keras_flow as kf

    with pytest.raises(kf.FlowError, match=f"processes={processes}; legal is a whole number of at least 1"):
        kf.run(print, devices=2, processes=processes)


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    program = f"""
import keras_flow as kf
class Sleeps:  # while the rank loads it, so that no engine has to start first
    def __reduce__(self):
        return exec, ("import os, time; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'); time.sleep(99)",)
def main(value): pass
if __name__ == "__main__":
    kf.run(main, devices=2, args=(Sleeps(),))
"""
    process = programs.start([str(programs.write(tmp_path, program))])
    programs.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert programs.interrupt_and_check(process, signal.SIGINT) == -signal.SIGINT
    assert "KeyboardInterrupt" in programs.finish(process)[2]


def test_one_process_with_all_ranks(tmp_path: Path) -> None:
    program = """
import os
import keras_flow as kf
def main(offset):
    try: kf.init(2)
    except kf.FlowError as error: print(error)
    return kf.init().size + offset, os.getpid()
size, pid = kf.run(main, devices=4, args=(10,))
print(size, pid == os.getpid(), "KERAS_FLOW_DEVICES" in os.environ)
"""
    code, out, err = tell(tmp_path, program, "jax")
    assert code == 0, err
    disagree, last = out.splitlines()
    assert "asked for 2 ranks inside a job of 4" in disagree
    assert last == "14 True False"
