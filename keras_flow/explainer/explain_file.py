"""Explains the model of a user's file: builds it without values, under a distribution without devices."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from keras_flow import user_file
from keras_flow.distributions.dry_run import dry_run
from keras_flow.errors import FlowError
from keras_flow.explainer.explanation import Explanation

#: ranks that the file's own distributions may use, if neither the command nor the layout's name says how many there are
_MOST_RANKS = 1 << 16


def explain_file(file: str | Path, layout: str, batch_size: int, ranks: int | None = None) -> Explanation:
    """Explain the model of a file under a layout.

    Args:
        file: defines `build_model`, and `rules` or `distributions` where the layout needs them.
        layout: dpN, tpN, AxB, ppN, ppNxdpM, ppNxtpM, or one of the file's own.
        batch_size: rows of a global batch.
        ranks: number of ranks; None takes what the layout's name says, else as many as the file asks for.

    Raises:
        FlowError: no `build_model`, an unknown layout, a model that is not built, wrong rules.

    Example:
        >>> import keras_flow as kf
        >>> explanation = kf.explain_file("examples/digits.py", "16x8", batch_size=4096)
        >>> explanation.placement
        {'data': 16, 'model': 8}
    """
    user_file.refuse_other_ranks((layout,), ranks, "explain")
    module = user_file.load(Path(file), ("build_model",), "explain")
    given = ranks or user_file.ranks_of(layout)
    with dry_run(given or _MOST_RANKS):
        maker = user_file.distribution_maker(module, layout)
        if maker is None:
            raise FlowError("layout '1' is one device: there is nothing to explain; legal are dpN, tpN, AxB, ppN")
        distribution: Any = maker()
        if given is not None or distribution.placement.size < _MOST_RANKS:
            return _explained(distribution, module, batch_size)
    # it takes all ranks that there are: as many as `compare` and `verify` take then
    with dry_run(user_file.RANKS_OF_OWN):
        maker = user_file.distribution_maker(module, layout)
        assert maker is not None
        return _explained(maker(), module, batch_size)


def _explained(distribution: Any, module: ModuleType, batch_size: int) -> Explanation:
    with distribution.scope():
        return distribution.explain(user_file.build_model(module, compiled=False), batch_size)
