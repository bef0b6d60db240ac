"""`kf.run` finds wrong rules and placements before it starts a process, and nobody notices that it looked."""

from pathlib import Path

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import os, sys, time
import keras, numpy as np, keras_flow as kf
from keras_flow.launch import rehearsal

def train(rules, before=lambda: None, ranks=((0, 1), (2, 3)), width=8, targets=4):
    mesh = kf.Placement(np.array(ranks), axis_names=("data", "model"))
    with kf.ModelParallel(mesh, rules=rules, batch_axes="data").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="hidden")])
        model.compile("sgd", "mse")
        before()
        model.fit(np.ones((8, width)), np.ones((8, targets)), verbose=0)  # the step

def noticed():
    print("printed")
    open(sys.argv[1], "w")

def compiled():
    import torch
    torch.save(np.ones(9999), sys.argv[1] + ".pt")

def catches():
    try: train({"nothing": {"model": kf.sbp.split(1)}})
    except kf.LayoutError: pass

def sizes():
    assert (kf.init(4).size, kf.env.get_world_size(), kf.env.local_ranks()) == (4, 4, (0,))
    train({"hidden/kernel": {"modle": kf.sbp.split(1)}})

def told(main, *args, run=lambda main, args: kf.run(main, devices=4, args=args)):
    try: run(main, args)
    except kf.FlowError as error: print(type(error).__name__, error, sep="|")

right = {"hidden/kernel": {"model": kf.sbp.split(1)}}
if __name__ == "__main__":
    rehearsal._SECONDS = 60.0  # on a machine with other work
    for name in os.environ["CASES"].split():
        print("==", name, flush=True)
        if name == "nothing": told(train, {"hiden/kernel": {"model": kf.sbp.split(1)}})
        if name == "axis": told(sizes)
        if name == "key": told(train, {"hidden/(kernel": {"model": kf.sbp.split(1)}})
        if name == "ranks": told(train, right, lambda: None, ((0, 1), (6, 7)))
        if name == "shape": told(train, right, lambda: None, ((0, 1), (2, 3)), 9)
        if name == "targets": told(train, right, lambda: None, ((0, 1), (2, 3)), 8, 3)
        if name == "right": rehearsal.rehearse(train, (right,), {}, 4, 4)
        if name == "noticed": rehearsal.rehearse(train, ({"nothing": "B"}, noticed), {}, 4, 4)
        if name == "compiled": rehearsal.rehearse(train, (right, compiled), {}, 4, 4)
        if name == "catches": rehearsal.rehearse(catches, (), {}, 4, 4)
        if name == "other": rehearsal.rehearse(lambda: 1 / 0, (), {}, 4, 4)
        if name == "long": rehearsal._SECONDS = 0.5
        if name == "long": rehearsal.rehearse(time.sleep, (99,), {}, 4, 4)
"""


def test_what_is_found_and_what_is_left_to_the_ranks(tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    cases = "nothing axis key ranks shape targets right noticed compiled catches other long"
    process = programs.start([str(script), str(tmp_path / "file")], "torch", CASES=cases)
    code, out, err = programs.finish(process, 200)
    assert code == 0, err
    said = dict(part.split("\n", 1) for part in out.split("== ")[1:])
    where = f'Found before any rank was started, at:\n  File "{script}", line'
    for name, kind, text in (
        ("nothing", "LayoutError", "rule 'hiden/kernel' matched no variable; the nearest path is 'sequential/hid"),
        ("axis", "LayoutError", "no axis 'modle': the placement's axes are ['data', 'model']"),
        ("key", "FlowError", "rules: 'hidden/(kernel' is not a regular expression: missing ), unterminated subpattern"),
        (
            "shape",
            "FlowError",
            "layer 'hidden' is incompatible with the layer: expected axis -1 of input shape to have valu",
        ),
        (
            "targets",
            "FlowError",
            "fit was given targets that the loss does not take: y has the shape (8, 3), the model's output (8, 4)",
        ),
        ("ranks", "FlowError", "the placement needs ranks up to 7, torch has 4 (ranks 0 to 3)"),
    ):
        assert said[name].startswith(f"{kind}|"), said[name]
        assert text in said[name] and where in said[name], said[name]
    assert "# the step" in said["nothing"]
    assert not any(said[name] for name in ("right", "noticed", "compiled", "catches", "other", "long")), out
    assert not (tmp_path / "file").exists()
    written = tmp_path / "file.pt"
    assert not written.exists() or not written.stat().st_size
