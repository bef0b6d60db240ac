"""Operators element by element."""

from __future__ import annotations

import numpy as np

from tests.fuzz.drawing import Drawing
from tests.fuzz.operators.registry import any_float, any_tensor, other, smooth


@smooth
def unary(d: Drawing) -> None:
    x = any_float(d)
    names = ["sin", "cos", "tanh", "sigmoid", "negative", "square", "softplus", "gelu", "silu", "relu", "absolute"]
    array = d.array(x)
    if array.size and array.min() > 0.3:
        names += ["log", "sqrt", "rsqrt", "reciprocal"] * 3
    if array.size and array.max() < 4:
        names += ["exp"]
    d.note(d.random.choice(names), (x,))


@smooth
def binary(d: Drawing) -> None:
    x = any_float(d)
    y = d.operand(x)
    name = d.random.choice(("operator.add", "operator.sub", "operator.mul", "add", "multiply", "maximum", "minimum"))
    d.note(name, (x, y) if d.random.random() < 0.5 else (y, x))


@smooth
def with_number(d: Drawing) -> None:
    x = any_float(d)
    number = d.random.choice((2, -1, 0.5, 3.25, np.float32(1.5), np.int32(2)))
    name = d.random.choice(("add", "sub", "mul", "truediv"))
    d.note(f"operator.{name}", (number, x) if name != "truediv" and d.random.random() < 0.5 else (x, number))


@other
def with_array(d: Drawing) -> None:
    x = any_tensor(d)
    array = d.array(x)
    given = np.linspace(-1, 2, array.size, dtype="float32").reshape(array.shape)
    name = d.random.choice(("add", "sub", "mul"))
    d.note(f"operator.{name}", (x, given) if d.random.random() < 0.5 else (given, x))


@smooth
def divide(d: Drawing) -> None:
    x = any_float(d)
    far = d.any_of(
        lambda a: a.dtype == "float32" and a.shape in (d.array(x).shape, ()) and a.size > 0 and abs(a).min() > 0.2
    )
    if far is not None:
        d.note(d.random.choice(("divide", "operator.truediv")), (x, d.moved(far, d.ranks(x))))


@other
def whole_numbers(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "int32") or d.tensor(d.shape(2), "int32")
    name = d.random.choice(
        ("operator.add", "operator.mul", "operator.floordiv", "operator.mod", "operator.eq", "maximum")
    )
    number = d.random.choice((1, 2, 3))
    d.note(name, (x, number if "div" in name or "mod" in name else d.operand(x, "int32")))


@other
def conditions(d: Drawing) -> None:
    x = any_tensor(d)
    if d.array(x).dtype == "bool":
        y = d.operand(x, "bool")
        d.note(d.random.choice(("logical_and", "logical_or", "logical_xor", "operator.and_", "operator.or_")), (x, y))
    else:
        d.note(d.random.choice(("operator.lt", "operator.ge", "not_equal")), (x, 0.123))


@other
def not_(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "bool") or d.tensor(d.shape(2), "bool")
    d.note("logical_not", (x,))


@smooth
def where(d: Drawing) -> None:
    x = any_float(d)
    condition = d.operand(x, "bool")
    y = d.operand(x) if d.random.random() < 0.7 else 0.0
    d.note("where", (condition, x, y) if d.random.random() < 0.5 else (condition, y, x))


@other
def cast(d: Drawing) -> None:
    x = any_tensor(d)
    names = ["float32", "bool"] if d.array(x).dtype != "float32" else ["float32"]
    d.note("cast", (x, d.random.choice(names + ["int32"] * (d.array(x).dtype == "bool"))))


@other
def clip(d: Drawing) -> None:
    d.note("clip", (any_float(d), -0.5, d.random.choice((0.5, 2))))
