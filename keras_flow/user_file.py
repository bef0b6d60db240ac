"""Reads the Python file that a user gives to `keras-flow compare`, `explain` or `verify`.

It defines `build_model` and `load_data`, and for layouts that split variables `rules` or `distributions`.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from keras_flow.backends import symbolic
from keras_flow.errors import FlowError, frames_of_user
from keras_flow.launch import rehearsal
from keras_flow.layout_names import LAYOUTS, SCHEDULES

if TYPE_CHECKING:
    import keras

    from keras_flow.distributions.distribution import FlowDistribution

_DATA = re.compile(r"dp([1-9]\d*)(?:z([123]))?(r?)$")
_TENSOR = re.compile(r"tp([1-9]\d*)(r?)$")
_PIPE = re.compile(
    r"pp([1-9]\d*)(?:xdp([1-9]\d*))?(?:xtp([1-9]\d*))?(r?)"
    rf"(?:-({'|'.join(SCHEDULES)}))?(?:-m([1-9]\d*))?$"
)
_HYBRID = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:z([123]))?(r?)$")
#: ranks of a layout of the file's own, whose size is not known until the file has run
RANKS_OF_OWN = 4
#: what a name ends with -> `remat=`
_BLOCK = {"": None, "r": "block"}


@dataclass(frozen=True)
class Data:
    """The arrays of `load_data`: training rows, and validation rows if it returns any."""

    x: object
    y: object
    x_val: object = None
    y_val: object = None


#: functions that the file must define -> how the error describes them
_NEEDS = {
    "build_model": "build_model(), which returns a compiled model",
    "load_data": "load_data(), which returns (x, y) or (x, y, x_val, y_val)",
}


def load(file: str | Path, needs: Sequence[str] = tuple(_NEEDS), what: str = "a comparison") -> ModuleType:
    """Import the user's file.

    Args:
        file: the file.
        needs: the functions that it must define.
        what: who needs them, for the error.

    Raises:
        FlowError: it does not define one of them.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FlowError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that Keras can name the file's own layers when it saves them
    # a file may import its neighbours, as when it is run by itself
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except FlowError:
        raise
    except SyntaxError as error:
        raise _no_python(file, error) from error
    except SystemExit as error:
        raise FlowError(
            f"{path} ends the program as it is imported{_where(error)}: {what} imports the file, so put what runs it "
            'below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise FlowError(f"{path} fails as it is imported{_where(error)}: {type(error).__name__}: {error}") from error
    missing = [name for name in needs if not callable(getattr(module, name, None))]
    if missing:
        raise _missing(path, missing, needs, what)
    return module


def _missing(file: str | Path, missing: Sequence[str], needs: Sequence[str], what: str) -> FlowError:
    return FlowError(
        f"{file} defines no {' and no '.join(missing)}: {what} needs " + ", and ".join(_NEEDS[name] for name in needs)
    )


def _no_python(file: str | Path, error: SyntaxError) -> FlowError:
    return FlowError(f"{error.filename or file} is not a Python file: line {error.lineno}: {error.msg}")


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code that an error came through."""
    own = frames_of_user(error)
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _called(module: ModuleType, name: str) -> object:
    """Call a function of the user's file. What it raises is told with the innermost line of the user's own code."""
    try:
        return getattr(module, name)()
    except FlowError:
        raise
    except Exception as error:
        said = symbolic.COLOURS.sub("", str(error))  # Keras writes a part of its errors in bold
        raise FlowError(f"{name}() fails{_where(error)}: {type(error).__name__}: {said}") from error


def load_data(module: ModuleType) -> Data:
    """Call the file's `load_data`.

    Raises:
        FlowError: it fails, or returns not two or four arrays, arrays of different lengths, or no rows.
    """
    values = _called(module, "load_data")
    # two arrays are trained on; four have a part for validation
    if not isinstance(values, tuple | list) or len(values) not in (2, 4):
        raise FlowError(f"load_data() must return (x, y) or (x, y, x_val, y_val), got {type(values).__name__}")
    data = Data(*values)
    if data.x_val is not None:
        length_of((data.x_val, data.y_val))
    if length_of((data.x, data.y)) == 0:
        raise FlowError("load_data() returned no rows")
    return data


def length_of(data: object) -> int:
    """The number of rows of a structure of arrays.

    Raises:
        FlowError: the arrays have different numbers of rows.
    """
    from keras import tree

    lengths = {len(leaf) for leaf in tree.flatten(data) if leaf is not None}
    if len(lengths) != 1:
        raise FlowError(f"load_data() returned arrays of different lengths: {sorted(lengths)}")
    return lengths.pop()


def build_model(module: ModuleType, compiled: bool = True) -> keras.Model:
    """Call the file's `build_model`; returns the model, which is compiled unless it need not be.

    Raises:
        FlowError: it fails, or returns no Keras model, or one that is not compiled.
    """
    import keras

    model = _called(module, "build_model")
    if not isinstance(model, keras.Model):
        legal = "a compiled keras.Model" if compiled else "a keras.Model"
        raise FlowError(f"build_model() must return {legal}, got {type(model).__name__}")
    if compiled and not model.compiled:
        raise FlowError("build_model() returned a model that is not compiled: call model.compile(...) in it")
    return model


def built_model(module: ModuleType, x: Callable[[], object]) -> keras.Model:
    """Call the file's `build_model`, and build what it returns for the rows of `x()` where it is not built yet.

    Raises:
        FlowError: see `build_model`.
    """
    from keras_flow.backends import symbolic
    from keras_flow.current import models

    model = build_model(module)
    if not models.is_built(model):
        symbolic.outputs(model, x())  # by `build` a subclassed model would only say that it is built
    return model


def ranks_of(layout: str) -> int | None:
    """The number of ranks in a layout's name; None for a name of the file's own.

    Example:
        >>> [ranks_of(name) for name in ("1", "dp4", "dp4z2", "2x2", "pp2", "pp2xdp2", "pp2xdp2xtp2", "mine")]
        [1, 4, 4, 4, 2, 4, 8, None]
    """
    if layout == "1":
        return 1
    if match := _DATA.match(layout) or _TENSOR.match(layout):
        return int(match[1])
    if match := _PIPE.match(layout):
        return int(match[1]) * int(match[2] or 1) * int(match[3] or 1)
    if match := _HYBRID.match(layout):
        return int(match[1]) * int(match[2])
    return None


def ranks_for(layouts: Sequence[str], given: int | None = None) -> int:
    """Ranks on which all of these layouts run: those in their names; for the file's own `given`, otherwise 4.

    Example:
        >>> ranks_for(["1", "2x2"]), ranks_for(["dp2", "mine"]), ranks_for(["dp2", "mine"], 8)
        (4, 4, 8)
    """
    return max((ranks_of(name) or given or RANKS_OF_OWN for name in layouts), default=1)


def with_schedule(layouts: Sequence[str], schedule: str | None, microbatches: int | None) -> tuple[str, ...]:
    """The names of layouts, those of pipelines with the schedule and number of micro-batches that a command was given.

    Raises:
        FlowError: no layout is a pipeline that takes them, or there is no such schedule.

    Example:
        >>> with_schedule(["dp4", "pp2"], "zbv", 8)
        ('dp4', 'pp2-zbv-m8')
    """
    if schedule is not None and schedule not in SCHEDULES:
        raise FlowError(f"--schedule {schedule}: legal are {', '.join(SCHEDULES)}")
    pipes = {layout: match for layout in layouts if (match := _PIPE.match(layout))}
    for option, place, value in (("--schedule", 5, schedule), ("--microbatches", 6, microbatches)):
        if value is not None and not pipes:
            raise FlowError(
                f"{option} is of a pipeline, and no layout that was named is one: add a layout ppN, for example pp2"
            )
        if value is not None and (double := [layout for layout, match in pipes.items() if match[place]]):
            raise FlowError(f"layout {double[0]!r} says in its name what {option} says too: leave out one of them")

    def whole(layout: str) -> str:
        if layout not in pipes:
            return layout
        ends = (("-", schedule or pipes[layout][5]), ("-m", microbatches or pipes[layout][6]))
        return layout.partition("-")[0] + "".join(f"{sign}{end}" for sign, end in ends if end)

    return tuple(map(whole, layouts))


def refuse_other_ranks(layouts: Sequence[str], ranks: int | None, what: str) -> None:
    """Refuse a number of ranks where the names of all layouts say other ones.

    Raises:
        FlowError: they do.
    """
    said = {layout: ranks_of(layout) for layout in layouts if layout != "1"}
    if ranks is not None and said and None not in said.values() and ranks not in said.values():
        name, needs = next(iter(said.items()))
        raise FlowError(
            f"{what} was asked for layout {name!r} on {ranks} ranks; its name says {needs}: leave ranks out"
        )


def check_file(
    file: str | Path,
    layouts: Sequence[str],
    what: str = "a comparison",
    needs: Sequence[str] = tuple(_NEEDS),
    ranks: int | None = None,
) -> None:
    """Check a file and names of layouts before any process starts. The file is parsed, not run.

    Args:
        file: the file.
        layouts: names of layouts.
        what: who needs the functions, for the error.
        needs: functions that the file must define.
        ranks: how many were asked for; None: as many as the layouts need.

    Raises:
        FlowError: no layout is named; one is none of `LAYOUTS` in a file without `distributions`, or all have other
            ranks; the file is not Python, or does not define a function that is needed.
    """
    if Path(file).suffix != ".py":
        raise FlowError(f"{file} is not a Python file: its name does not end in .py")
    if not layouts:
        raise FlowError(f"no layout was named: legal are 1, {LAYOUTS}, or names from the file's distributions()")
    refuse_other_ranks(layouts, ranks, what)
    try:
        tree = ast.parse(Path(file).read_bytes(), str(file))
    except SyntaxError as error:
        raise _no_python(file, error) from error
    names = _names_in(tree)
    if "*" in names:
        return
    if missing := [name for name in needs if name not in names]:
        raise _missing(file, missing, needs, what)
    if "distributions" not in names:
        for layout in layouts:
            if ranks_of(layout) is None:
                raise _unknown(layout, ())


def _names_in(tree: ast.Module) -> set[str]:
    """Names that a file may have: defined, imported or assigned; `"*"` where `from x import *` may bring others."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.alias)}
    names |= {node.asname for node in ast.walk(tree) if isinstance(node, ast.alias) and node.asname}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def may_split_weights(file: str | Path) -> bool:
    """Whether a file may have `rules()`, without which layouts that split weights are refused. The file is parsed."""
    try:
        return bool({"rules", "*"} & _names_in(ast.parse(Path(file).read_bytes())))
    except SyntaxError:
        return True  # `check_file` says so


def _unknown(layout: str, named: Collection[str]) -> FlowError:
    parts = layout.split()
    if len(parts) > 1 and all(part in named or ranks_of(part) for part in parts):
        return FlowError(f"unknown layout {layout!r}: separate layouts by commas, {','.join(parts)}")
    # with another sign, or in capitals
    meant = [re.sub(r"[^a-z0-9]+", sign, layout.lower()) for sign in ("", "x", "-")]
    if near := [name for name in meant if ranks_of(name)] or difflib.get_close_matches(layout, named, 1):
        return FlowError(f"unknown layout {layout!r}: did you mean {near[0]!r}?")
    also = f"one of distributions(): {sorted(named)}" if named else "a name from the file's distributions()"
    return FlowError(
        f"unknown layout {layout!r}: it is 1, {LAYOUTS}, or {also}; "
        "for example dp4, tp4, 2x2 (rows over 2 ranks, variables over 2) or pp2"
    )


def distribution_maker(module: ModuleType, layout: str) -> Callable[[], FlowDistribution] | None:
    """A function that creates the distribution of a layout; None for one device.

    Raises:
        FlowError: an unknown name, or a layout that needs rules where the program has none (with a skeleton of rules).
    """
    if layout == "1":
        return None
    named: Mapping[str, Callable[[], FlowDistribution]] = (
        _called(module, "distributions") if hasattr(module, "distributions") else {}  # type: ignore[assignment]
    )
    if layout in named:
        made = named[layout]
        return made if callable(made) else lambda: made
    import keras_flow as kf

    if match := _DATA.match(layout):
        count, zero, remat = int(match[1]), int(match[2] or 0), _BLOCK[match[3]]
        return lambda: kf.DataParallel(kf.Placement(range(count), axis_names=("data",)), zero=zero, remat=remat)
    if match := _PIPE.match(layout):
        axes = [(name, int(match[place])) for place, name in enumerate(("pipe", "data", "model"), 1) if match[place]]
        names, sizes = zip(*axes, strict=True)
        ranks = kf.Placement(np.arange(math.prod(sizes)).reshape(sizes), names)
        rules = _rules(module, layout) if match[3] else None
        schedule, parts = match[5] or "1f1b", int(match[6]) if match[6] else None
        repeated = "stage" if match[4] else None
        return lambda: kf.PipelineParallel(
            ranks,
            schedule=schedule,
            microbatches=parts,
            rules=rules and rules(),  # type: ignore[arg-type]
            remat=repeated,
        )
    tensor, hybrid = _TENSOR.match(layout), _HYBRID.match(layout)
    if not tensor and not hybrid:
        raise _unknown(layout, named)
    rules = _rules(module, layout)
    placement = (
        kf.Placement(range(int(tensor[1])), axis_names=("model",))
        if tensor
        else kf.Placement(np.arange(int(hybrid[1]) * int(hybrid[2])).reshape(int(hybrid[1]), -1), ("data", "model"))  # type: ignore[index]
    )
    zero = int(hybrid[3] or 0) if hybrid else 0
    remat = _BLOCK[tensor[2] if tensor else hybrid[4]]  # type: ignore[index]
    return lambda: kf.ModelParallel(placement, rules=rules(), zero=zero, remat=remat)  # type: ignore[arg-type]


def _rules(module: ModuleType, layout: str) -> Callable[[], object]:
    """Return the user's function that makes rules, which a layout that splits variables needs.

    Raises:
        FlowError: the program has none (with a skeleton of them).
    """
    if not hasattr(module, "rules"):
        raise FlowError(
            f"layout {layout!r} splits variables, and {Path(str(module.__file__)).name} has neither rules() nor "
            "distributions(). The layouts 1, dpN and ppN need none. Rules to begin with, to be pasted into it: "
            f"attention by heads, pairs of layers by columns and then by rows.\n\n{skeleton(module)}"
        )
    return lambda: _called(module, "rules")


def skeleton(module: ModuleType) -> str:
    """The text of a `rules()` function to begin with, for the file's model."""
    import keras

    from keras_flow.distributions.first_rules import first_rules
    from keras_flow.distributions.rule_patterns import function_text, line, patterns

    keras.utils.clear_session(free_memory=False)  # names begin anew, as in the run that takes the rules
    model = build_model(module)
    if not model.built:
        return "# the model is not built: give its first layer an Input, then ask again"
    paths = [variable.path for variable in model.variables]
    lines = [line(rule) for rule in patterns(first_rules(model), paths).items()]
    if not lines:
        lines = [
            "# neither attention nor a pair of layers was found",
            f'# r"{paths[0]}$": {{"model": kf.sbp.split(0)}},',
        ]
    return function_text(lines)


def check_before_start(file: str | Path, layouts: Sequence[str], what: str = "a comparison") -> None:
    """Build the file's model under each layout and ask whether its rules fit, and then its data; to be rehearsed.

    Nothing is computed, and variables have no values.

    Raises:
        FlowError: a rule, a layout, the shape of rows or the file is wrong.
    """
    import keras

    import keras_flow as kf

    module = load(file, what=what)
    rehearsal.leave_out_other_engines()
    model: keras.Model | None = None
    for layout in (*(each for each in layouts if each != "1"), "1"):
        # one device last: its model has nothing of a layout, and then the data are looked at
        make = distribution_maker(module, layout) or (lambda: kf.DataParallel(kf.Placement([0])))
        keras.utils.clear_session(free_memory=False)  # names begin anew
        distribution = make()
        with distribution.scope():
            model = built_model(module, lambda: load_data(module).x)
        distribution.check(model)
    assert model is not None
    check_shapes(model, load_data(module))


def check_shapes(model: keras.Model, data: Data) -> None:
    """Ask whether a model takes the rows of `load_data`, and its loss their targets. By shapes: nothing is computed.

    Raises:
        FlowError: it does not.
    """
    for x, y in ((data.x, data.y), (data.x_val, data.y_val)):
        if x is None or not (symbolic.have_shapes(x) and symbolic.have_shapes(y)):
            continue
        try:
            outputs = symbolic.outputs(model, x)
        except Exception as error:
            if text := symbolic.misfit(error):
                raise FlowError(
                    "load_data() returns rows that the model does not take: x has the shape "
                    f"{symbolic.shapes(x)}. {text}"
                ) from None
            return  # it cannot be called without values
        if text := symbolic.refused_targets(model, y, outputs):
            raise FlowError(f"load_data() returns {text}")
