"""A plan in words."""

from __future__ import annotations

from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.boxing.spec import KINDS, BoxingPlan


def amount(bytes_: float) -> str:
    """Bytes as text: `"1.5 MB"` (1 MB = 10^6 bytes)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_ >= size:
            return f"{bytes_ / size:.4g} {unit}"
    return f"{bytes_:g} B"


def describe(plan: BoxingPlan) -> str:
    """Steps, groups, bytes received, lower bound and peak memory."""
    lines = [f"{plan.source}", f"-> {plan.target}, {plan.dtype}"]
    if not plan.steps:
        return "\n".join([*lines, "nothing to do: the layouts are the same"])
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"{number}. {step}")
        lines.append(f"   {KINDS[step.kind]}")
    bound = lower_bound(plan.source, plan.target, plan.dtype)
    ratio = "at the lower bound" if plan.total_bytes == bound else f"lower bound {amount(bound)}"
    total, most = amount(plan.total_bytes), amount(plan.most_loaded)
    lines.append(f"received: {total} by all ranks together ({ratio}), at most {most} by one")
    lines.append(f"peak memory: {amount(max(plan.peak_bytes(rank) for rank in plan.ranks))} on one rank")
    lines.append(f"chosen for: {plan.chosen}")
    return "\n".join(lines)
