"""Python functions called in the middle of a compiled step, on JAX: the step is cut there into several programs.

XLA has callbacks, but what they call may not wait for XLA itself: a collective would stand behind the step that called
it, on a GPU's stream or in a pool of one thread. So the step is traced as ever, with a mark where the function is
called, and the operations before and after it are compiled apart. Between two programs the function gets arrays.

Example: a train step of Keras whose optimizer averages gradients over processes.

    program 1: loss and gradients          function: kf.comm.all_reduce          program 2: update, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
from jax.extend import core
from jax.interpreters import ad, mlir

from keras_flow.backends.hooking import hook
from keras_flow.current.models import calls_in_step
from keras_flow.errors import FlowError

_call = core.Primitive("keras_flow_host_call")
_call.multiple_results = True
_call.def_abstract_eval(lambda *values, **functions: list(values))
_call.def_impl(lambda *values, function, pullback: function(list(values)))


def dense(gradient: Any) -> Any:
    """The gradient as an array: here all are."""
    return gradient


def call_in_step(
    function: Callable[[list[Any]], list[Any]],
    values: Sequence[Any],
    pullback: Callable[[list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Call a function of tensors in a step, compiled or not; it returns tensors of the same dtypes and shapes.

    Raises:
        FlowError: inside `jax.jit`, where the step is compiled by the program itself; as that compiles it.
    """
    return _call.bind(*values, function=function, pullback=pullback)


def _moved(values: Sequence[Any], tangents: Sequence[Any], **functions: Any) -> tuple[list[Any], list[Any]]:
    """The rule of forward derivatives, of which JAX makes gradients: the function is linear."""
    found = iter(_call.bind(*(each for each in tangents if type(each) is not ad.Zero), **functions))
    moved = [each if type(each) is ad.Zero else next(found) for each in tangents]
    return _call.bind(*values, **functions), moved


def _pulled_back(cotangents: Sequence[Any], *_: Any, function: Any, pullback: Any) -> list[Any]:
    given = [ad.instantiate_zeros(each) for each in cotangents]
    return _call.bind(*given, function=pullback, pullback=function)


ad.primitive_jvps[_call] = _moved
ad.primitive_transposes[_call] = _pulled_back


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise FlowError(
        "a collective between processes (an optimizer of keras_flow.hvd, say) is called inside jax.jit, lax.cond or "
        "lax.scan, where arrays have no values yet. Call it outside of them; the steps of fit and train_on_batch are "
        "cut there by themselves"
    )


mlir.register_lowering(_call, _refuse)


def steps_that_call(function: object, *args: object, **kwargs: object) -> bool | None:
    """Condition of `cut`: a train step of Keras an optimizer of which says that it calls `call_in_step`."""
    model = getattr(function, "__self__", None)
    is_train_step = getattr(function, "__name__", "") == "train_step" and isinstance(model, keras.Model)
    return True if is_train_step and calls_in_step(model) else None


@hook(
    "keras:trainer",
    "jit",
    "a step whose optimizer waits for other processes (keras_flow.hvd) is cut there into two programs",
    when=steps_that_call,
)
def cut(_: object, original: Callable[..., Any], step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Hook on `jit`: compile a step of state and data as several programs; the last that reads state overwrites it."""
    programs: dict[Any, Callable[[list[Any]], Any]] = {}

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple(jax.typeof(leaf) for leaf in leaves)
        if key not in programs:
            programs[key] = _compiled(step, args, len(jax.tree.leaves(args[0])))
        return programs[key](leaves)

    return run


@dataclass(frozen=True)
class _StepPart:
    """A program, and the call that follows it."""

    program: Callable[..., list[Any]]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]
    call: Any
    #: what later pieces read
    later: frozenset[Any]


def _compiled(step: Callable[..., Any], args: tuple[Any, ...], donated: int) -> Callable[[list[Any]], Any]:
    """A step as its pieces; the first `donated` leaves may be overwritten."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)
    bodies: list[list[Any]] = [[]]
    calls: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive is _call:
            calls.append(equation)
            bodies.append([])
        else:
            bodies[-1].append(equation)
    calls.append(None)
    pieces: list[_StepPart] = []
    later, free = frozenset(_variables(jaxpr.outvars)), set(jaxpr.invars[:donated])
    for body, call in zip(reversed(bodies), reversed(calls), strict=True):
        ends = later | set(_variables(call.invars) if call else ())
        made = {var for equation in body for var in equation.outvars}
        reads = tuple(dict.fromkeys(var for each in body for var in _variables(each.invars) if var not in made))
        makes = tuple(var for equation in body for var in equation.outvars if var in ends)
        gone = [place for place, var in enumerate(reads) if var in free and var not in ends]
        pieces.append(
            _StepPart(jax.jit(_program(jaxpr, body, reads, makes), donate_argnums=gone), reads, makes, call, later)
        )
        later = frozenset((ends - made) | set(reads))

    def run(leaves: list[Any]) -> Any:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *leaves), strict=True))
        for piece in reversed(pieces):
            known |= zip(piece.makes, piece.program(*[known[var] for var in piece.reads]), strict=True)
            if piece.call is not None:
                results = piece.call.params["function"]([_value(known, var) for var in piece.call.invars])
                known |= zip(piece.call.outvars, results, strict=True)
            known = {var: value for var, value in known.items() if var in piece.later}
        return jax.tree.unflatten(structure, [_value(known, var) for var in jaxpr.outvars])

    return run


def _program(jaxpr: Any, body: Sequence[Any], reads: Sequence[Any], makes: Sequence[Any]) -> Callable[..., list[Any]]:
    """Some operations of a traced step as a function."""
    # JAX wants the names of arguments and results to be as many as these, or unknown
    told = jaxpr.debug_info.with_unknown_names()
    part = jaxpr.replace(constvars=[], invars=list(reads), outvars=list(makes), eqns=list(body), debug_info=told)
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _value(known: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else known[atom]
