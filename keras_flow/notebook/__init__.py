"""`kf.notebook`: ranks for the cells of a notebook, on every engine.

`start(4)` makes four ranks: in the kernel where one process drives them all (JAX, TensorFlow), else a worker process
for each (torch). A cell that begins with `%%ranks` runs on all of them, `pull("history")` brings a variable to the
notebook, `run(function)` calls a function on all ranks, `restart()` and `stop()` do what they say.
`docs/notebooks.md` has more.

Example:
    >>> import keras_flow as kf
    >>> kf.notebook.start(4)
    >>> kf.notebook.run(kf.env.get_world_size)[0]
    4
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from keras_flow.notebook.session import pull as pull
from keras_flow.notebook.session import push as push
from keras_flow.notebook.session import restart as restart
from keras_flow.notebook.session import run as run
from keras_flow.notebook.session import start as start
from keras_flow.notebook.session import stop as stop

if TYPE_CHECKING:
    from keras_flow.notebook.comparing import compare as compare


def __getattr__(name: str) -> object:
    # loads Keras, and with it an engine, which kf.notebook.start must come before
    if name == "compare":
        return _import_module("keras_flow.notebook.comparing").compare
    raise AttributeError(f"module 'keras_flow.notebook' has no attribute {name!r}")
