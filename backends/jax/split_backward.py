"""The backward pass of a stage in two parts: gradients by what it received first, those by its weights later.

Zero-bubble schedules (Qi et al., 2024, arXiv:2401.10241) send the first part (`I`) to the stage before as soon as it is
there, and fill the time in which a rank would wait with the second part (`W`). JAX's pullback computes both. Traced, it
is a list of equations: `I` consists of those on which the gradients by the received tensors depend, `W` of the others.
What an equation of `W` reads of `I` is an output of `I`. No equation is computed twice.

Example: the stage `h = x @ v; y = h @ w`, with the gradient `g` by `y`

    a = g @ w.T      I      by x needs it; an output of I, since W reads it
    b = h.T @ g      W      by w
    c = a @ v.T      I      by x
    d = x.T @ a      W      by v
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jax_core

#: the first part of a function, the second, and the numbers of the arguments that the second needs
Parts = tuple[Callable[..., Any], Callable[..., Any], list[int]]


def parts(function: Callable[..., tuple[Sequence[Any], Sequence[Any]]], arguments: Sequence[Any]) -> Parts:
    """Cut a function into two.

    Args:
        function: takes arrays; returns a list of those that are wanted first, and a list of the others.
        arguments: arrays of the shapes and types of its calls.

    Returns:
        The first part takes the arguments, and returns the first list and what the second part reads of it. The second
        part takes some of the arguments, then what it reads, and returns the second list. The numbers say which ones.
    """
    counts: list[int] = []

    def flat(*values: Any) -> list[Any]:
        first, second = function(*values)
        counts[:] = [len(first)]
        return [*first, *second]

    traced = jax.make_jaxpr(flat)(*arguments)
    equations, inputs, outputs = traced.jaxpr.eqns, traced.jaxpr.invars, traced.jaxpr.outvars
    wanted, rest = outputs[: counts[0]], outputs[counts[0] :]
    early = _needed(equations, wanted)
    made = {variable for equation in early for variable in equation.outvars}
    late = _needed([equation for equation in equations if made.isdisjoint(equation.outvars)], rest)
    read = {
        each: None for each in (*(each for equation in late for each in equation.invars), *rest) if _is_variable(each)
    }
    crossing = [variable for variable in read if variable in made]
    own = [number for number, variable in enumerate(inputs) if variable in read]

    def part(equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        return jax_core.jaxpr_as_fun(
            jax_core.ClosedJaxpr(traced.jaxpr.replace(eqns=equations, invars=inputs, outvars=outputs), traced.consts)
        )

    first = part(early, inputs, [*wanted, *crossing])

    def in_two(*values: Any) -> tuple[list[Any], list[Any]]:
        found = first(*values)
        return found[: len(wanted)], found[len(wanted) :]

    return in_two, part(late, [*(inputs[number] for number in own), *crossing], rest), own


def _needed(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The equations on which outputs depend, in their order."""
    needed = {each for each in outputs if _is_variable(each)}
    found = []
    for equation in reversed(equations):
        if any(variable in needed for variable in equation.outvars):
            found.append(equation)
            needed.update(each for each in equation.invars if _is_variable(each))
    return found[::-1]


def _is_variable(each: Any) -> bool:
    return not isinstance(each, jax_core.Literal)
