"""Boxing: changing a tensor's layout. Plans are values; every engine executes the same specification.

Example:
    >>> import keras_flow as kf
    >>> ranks = kf.Placement([0, 1])
    >>> plan = kf.boxing.plan(kf.Layout(ranks, "S(0)", (4, 2)), kf.Layout(ranks, "B", (4, 2)), "float32")
    >>> plan.total_bytes, kf.boxing.lower_bound(plan.source, plan.target, "float32")  # each rank lacks 2 x 2 numbers
    (32, 32)
"""

from typing import TYPE_CHECKING

from keras_flow.boxing.lower_bound import lower_bound as lower_bound
from keras_flow.boxing.lower_bound import rank_lower_bound as rank_lower_bound
from keras_flow.boxing.planner import plan as plan
from keras_flow.boxing.simulate import simulate as simulate
from keras_flow.boxing.spec import BoxingPlan as BoxingPlan
from keras_flow.boxing.step import Step as Step
from keras_flow.boxing.topology import Link as Link
from keras_flow.boxing.topology import Topology as Topology

if TYPE_CHECKING:
    from keras_flow.backends.execute import execute as execute


def __getattr__(name: str) -> object:
    # `execute` needs the active engine, which is a layer above plans: it is loaded when it is first asked for
    if name == "execute":
        from keras_flow.backends.execute import execute

        globals()[name] = execute
        return execute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
