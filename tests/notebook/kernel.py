"""A kernel in which a test runs cells, and what they showed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

#: cells that train a model on all ranks, and that tell whether they have the same weights
TRAIN = """%%ranks
keras.utils.set_random_seed(0)
x = np.arange(256 * 8).reshape(256, 8).astype("float32") / 2048
y = x.sum(1, keepdims=True)
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(x, y, batch_size=32, epochs=2)
"""
WEIGHTS = "%%ranks\nfloat(sum(np.abs(w).sum() for w in model.get_weights()))"

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """What a cell showed: texts and pictures, whether it failed, and its number, `In [8]`."""

    text: str
    html: str
    failed: bool
    number: int


class Kernel:
    """Runs cells one by one.

    Attributes:
        pid: process number of the kernel.
    """

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self.pid: int = client.km.provisioner.process.pid  # type: ignore[union-attr]

    def run(self, source: str, interrupt_after: float | None = None) -> Shown:
        """Run a cell; press the stop button after so many seconds."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        if interrupt_after is not None:
            threading.Timer(interrupt_after, os.kill, (self.pid, 2)).start()
        failed = False
        try:
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        except CellExecutionError:
            failed = True
        texts, html = [], []
        for output in cell.outputs:
            data = output.get("data", {})
            texts += [output.get("text", ""), data.get("text/plain", ""), "\n".join(output.get("traceback", []))]
            html.append(data.get("text/html", ""))
        return Shown(_STYLE.sub("", "\n".join(filter(None, texts))), "".join(html), failed, cell.execution_count)

    def children(self) -> list[psutil.Process]:
        """All processes that the kernel has started."""
        return psutil.Process(self.pid).children(recursive=True)


@contextmanager
def kernel(backend: str, folder: str, timeout: int = 240) -> Iterator[Kernel]:
    """A kernel for one backend; cells have so many seconds."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    environment.pop("KERAS_FLOW_DEVICES", None)
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    with client.setup_kernel(env=environment):
        yield Kernel(client)


def assert_children_end_with(notebook: Kernel) -> None:
    """Kill the kernel: its processes end too, within some seconds."""
    started = notebook.children()
    os.kill(notebook.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started):
        assert time.monotonic() < until, started
        time.sleep(0.1)
