"""Names of Horovod that are not here, and what does their work."""

from __future__ import annotations

import re
from typing import NoReturn

from keras_flow.errors import MissingName

#: names -> what to use
_INSTEAD = {
    r"\w*GradientTape": "use kf.DistributedDataParallel(model) in a loop of your own",
    "broadcast_global_variables": "Keras 3 has no global variables: use hvd.broadcast_variables(model.weights, 0)",
    r"broadcast_(parameters|optimizer_state)": "use hvd.broadcast_variables(variables, root_rank)",
    r"\w+_async_?|poll|synchronize": "use hvd.allreduce, which waits, or kf.comm.all_reduce(x, async_op=True)",
    r"st(art|op)_timeline": "use kf.trace",
    r"\w+_(built|enabled|supported)": "leave it out; `keras-flow launch --check-build` prints what is there",
    r"\w+": "docs/migrate/from_horovod.md lists what there is",
}


def refuse(name: str) -> NoReturn:
    """Raise for a name that is not there: AttributeError for private ones, for which Python itself asks."""
    if name.startswith("_"):
        raise AttributeError(name)
    instead = next(text for names, text in _INSTEAD.items() if re.fullmatch(names, name))
    raise MissingName(f"hvd.{name} is not in keras_flow.hvd. Instead: {instead}")
