"""A pipeline of two stages on two hosts, each with a launcher and a network of its own: the numbers of one device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests.launch import namespaces, programs

PROGRAM = """
import contextlib, json
import keras_flow as kf
kf.init()
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(26, 8)).astype("float32")
found = []
for distribution in (None, kf.PipelineParallel(microbatches=4, schedule="zb1p", random="stock")):
    keras.utils.set_random_seed(0)
    with distribution.scope() if distribution else contextlib.nullcontext():
        inner = [keras.layers.Dense(16, "tanh") for _ in range(4)]
        model = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, x[:, :1], batch_size=13, epochs=3, shuffle=False, verbose=0).history
        found.append([history["loss"], history["mae"], model.predict(x, batch_size=13, verbose=0).tolist()])
stages = [kf.layout_of(layer.kernel).layout.placement.ranks for layer in model.layers]
off = max(float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in zip(*found))
print(json.dumps({"nodes": kf.env.get_node_size(), "process": kf.env.process_index(), "stages": stages, "off": off}))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    with namespaces.joined_or_skipped() as made:
        yield made


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", that_train())
def test_a_stage_on_each_host(backend: str, hosts: namespaces.Hosts, tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    launchers = hosts.start(["--all-output", str(script)], backend, processes=1, timeout=120)
    outputs = [programs.finish(launcher, 200) for launcher in launchers]
    assert [code for code, _, _ in outputs] == [0, 0], [err[-2000:] for _, _, err in outputs]
    found = [json.loads(re.findall(r"\{.*\}$", out, re.MULTILINE)[-1]) for _, out, _ in outputs]
    assert sorted(each["process"] for each in found) == [0, 1]
    for each in found:
        assert each["nodes"] == 2 and {rank for (rank,) in each["stages"]} == {0, 1}
        assert each["off"] < 2e-5, each
