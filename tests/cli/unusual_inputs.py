"""What is answered to unusual input: a log of inputs with their answers, each one line.

    KERAS_BACKEND=jax keras-flow launch --devices 4 -m tests.cli.unusual_inputs

writes it to docs/unusual_input.md. `test_unusual_inputs.py` looks at each answer, and compares the page with them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import typer

from keras_flow.errors import FlowError, FlowWarning, LayoutError

PAGE = Path(__file__).parents[2] / "docs" / "unusual_input.md"
#: no answer: the input was taken
TAKEN = "(taken)"

PROGRAM = """
import keras, numpy as np
def build_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name="hidden"), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model
def load_data():
    return np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
"""


def answer(ask: Callable[[], object]) -> str:
    """What is said to an input, in one line where it is one: of layout problems the problems, of a warning its text."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FlowWarning)
        try:
            ask()
        except LayoutError as error:
            return "\n".join(line.strip() for line in str(error).splitlines() if line.startswith("  ")) or str(error)
        except FlowError as error:
            return str(error)
        except (typer.Exit, SystemExit) as error:
            return f"(exit {error})"
        except Exception as error:
            if hasattr(error, "format_message"):  # of the command line's parser
                return error.format_message()
            return f"{_raiser(error)} {type(error).__name__}: {textwrap.shorten(str(error), 160, placeholder=' ...')}"
    return "; ".join(str(one.message) for one in said if issubclass(one.category, FlowWarning)) or TAKEN


def _raiser(error: Exception) -> str:
    """Who raised an error that is none of ours: Keras on purpose, or whoever met the input by accident."""
    in_keras = any("/keras/src/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return "(Keras)" if isinstance(error, ValueError) and in_keras else "RAW"


def log(folder: Path) -> Iterator[tuple[str, str]]:
    """All inputs with their answers; `folder` takes files."""
    for inputs in GROUPS.values():
        for text, ask in inputs(folder):
            yield text, _on_any_host(answer(ask), folder)


def _on_any_host(said: str, folder: Path) -> str:
    """Return an answer without what the host decides: colours, the folder, the size of the memory."""
    said = re.sub(r"\x1b\[\d*m", "", said).replace(str(folder.resolve()), "/here").replace(str(folder), "/here")
    return re.sub(r"the host has [\d.]+ GB: ask for \d+", "the host has 16 GB: ask for 160", said)


Case = tuple[str, Callable[[], object]]


def _of_init(folder: Path) -> Iterator[Case]:
    import keras_flow as kf

    yield "kf.init(0)", lambda: kf.init(0)
    yield "kf.init(-1)", lambda: kf.init(-1)
    yield "kf.init(2.5)", lambda: kf.init(2.5)  # type: ignore[arg-type]
    yield 'kf.init("4")', lambda: kf.init("4")  # type: ignore[arg-type]
    yield "kf.init(True)", lambda: kf.init(True)
    yield 'kf.init(4, type="npu")', lambda: kf.init(4, type="npu")
    yield 'kf.init(4, type="gpu")', lambda: kf.init(4, type="gpu")
    yield "kf.init(64) in a job of 4", lambda: kf.init(64)
    yield 'kf.init(4, type="gpu", simulate=True)', lambda: kf.init(4, type="gpu", simulate=True)
    yield "kf.env.get_rank() where a process drives four", lambda: kf.env.get_rank()
    yield "kf.run(main, devices=4, processes=3)", lambda: kf.run(print, devices=4, processes=3)
    yield 'kf.run(main, devices=4, on="moon")', lambda: kf.run(print, devices=4, on="moon")
    yield "kf.run(7, devices=4)", lambda: kf.run(7, devices=4)  # type: ignore[arg-type]
    yield "kf.run(main, devices=4, args=3)", lambda: kf.run(print, devices=4, args=3)  # type: ignore[arg-type]
    yield (
        "kf.run(main, devices=4, processes=2, timeout=-1)",
        lambda: kf.run(print, devices=4, processes=2, timeout=-1),
    )


def _of_placements(folder: Path) -> Iterator[Case]:
    import numpy as np

    import keras_flow as kf

    yield "kf.Placement([])", lambda: kf.Placement([])
    yield "kf.Placement(4)", lambda: kf.Placement(4)
    yield "kf.Placement([0, 0])", lambda: kf.Placement([0, 0])
    yield "kf.Placement([-1, 0])", lambda: kf.Placement([-1, 0])
    yield "kf.Placement([0.5, 1])", lambda: kf.Placement([0.5, 1])
    yield "kf.Placement([[0, 1], [2]])", lambda: kf.Placement([[0, 1], [2]])
    yield 'kf.Placement([0, 1], axis_names=("a", "b"))', lambda: kf.Placement([0, 1], ("a", "b"))
    yield 'kf.Placement([[0, 1]], axis_names=("a", "a"))', lambda: kf.Placement([[0, 1]], ("a", "a"))
    yield 'kf.Placement([0], type="abacus")', lambda: kf.Placement([0], type="abacus")
    yield "kf.DataParallel(kf.Placement(range(8))) on four ranks", lambda: kf.DataParallel(kf.Placement(range(8)))
    yield "kf.DataParallel([0, 1])", lambda: kf.DataParallel([0, 1])  # type: ignore[arg-type]
    yield "kf.DataParallel(4)", lambda: kf.DataParallel(4)  # type: ignore[arg-type]
    yield "kf.ModelParallel(4, rules=lambda mesh: None)", lambda: kf.ModelParallel(4, rules=lambda mesh: None)  # type: ignore[arg-type]
    yield 'kf.placement("cpu", "3:0-1")', lambda: kf.placement("cpu", "3:0-1")
    yield 'kf.placement("cpu", "0:3-1")', lambda: kf.placement("cpu", "0:3-1")
    yield "kf.DataParallel(zero=4)", lambda: kf.DataParallel(zero=4)
    yield 'kf.DataParallel(zero="all")', lambda: kf.DataParallel(zero="all")  # type: ignore[arg-type]
    yield "kf.PipelineParallel(kf.Placement([0, 1]))", lambda: kf.PipelineParallel(kf.Placement([0, 1]))
    yield "kf.layout_of(3)", lambda: kf.layout_of(3)  # type: ignore[arg-type]
    each = {rank: np.ones(2, "float32") for rank in range(4)}
    yield "kf.comm.all_reduce({0: x, ...}, 'avg')", lambda: kf.comm.all_reduce(each, "avg")
    yield 'kf.trace(".")', lambda: kf.trace(str(folder)).__enter__()
    yield 'kf.DataParallel(random="dice")', lambda: kf.DataParallel(random="dice")
    yield 'kf.DataParallel(batch_statistics="mean")', lambda: kf.DataParallel(batch_statistics="mean")
    yield 'kf.DataParallel(verify="always")', lambda: kf.DataParallel(verify="always")


def _of_sbp(folder: Path) -> Iterator[Case]:
    import keras_flow as kf

    four = kf.Placement(range(4))
    grid = kf.Placement([[0, 1], [2, 3]], ("data", "model"))
    yield 'kf.sbp.split("0")', lambda: kf.sbp.split("0")  # type: ignore[arg-type]
    yield "kf.sbp.split(1.5)", lambda: kf.sbp.split(1.5)  # type: ignore[arg-type]
    yield 'kf.sbp.parse("S(x)")', lambda: kf.sbp.parse("S(x)")
    yield 'kf.sbp.parse("Q")', lambda: kf.sbp.parse("Q")
    yield 'kf.Layout(four, "S(3)", (8, 8))', lambda: kf.Layout(four, "S(3)", (8, 8))
    yield 'kf.Layout(four, "S(0)", (-2, 8))', lambda: kf.Layout(four, "S(0)", (-2, 8))
    yield 'kf.Layout(grid, "S(0)", (8, 8))', lambda: kf.Layout(grid, "S(0)", (8, 8))
    yield 'kf.Layout(grid, {"modle": S(0)}, (8,))', lambda: kf.Layout(grid, {"modle": kf.sbp.split(0)}, (8,))
    yield 'kf.zeros(4, placement=four, sbp="P(")', lambda: kf.zeros(4, placement=four, sbp="P(")
    one_dim = [1.0, 2.0]
    yield "kf.tensor([1.0, 2.0], sbp=split(1))", lambda: kf.tensor(one_dim, placement=four, sbp=kf.sbp.split(1))


def _of_rules(folder: Path) -> Iterator[Case]:
    import keras_flow as kf

    split = kf.sbp.split
    yield 'rules="kernel"', lambda: _trained("kernel")
    yield "rules=[...]", lambda: _trained([("kernel", {"model": split(1)})])
    yield 'rules={"hidden/(kernel": ...}', lambda: _trained({"hidden/(kernel": {"model": split(1)}})
    yield "rules={3: ...}", lambda: _trained({3: {"model": split(1)}})
    yield 'rules={"hiden/kernel": ...}', lambda: _trained({"hiden/kernel": {"model": split(1)}})
    yield 'rules={"hidden/kernel": {"modle": ...}}', lambda: _trained({"hidden/kernel": {"modle": split(1)}})
    yield 'rules={"hidden/bias": split(1)}', lambda: _trained({"hidden/bias": {"model": split(1)}})
    yield 'rules={"hidden/kernel": (None, "model")}', lambda: _trained({"hidden/kernel": (None, "model")})
    yield 'rules={"hidden/kernel": {"model": "split(0)"}}', lambda: _trained({"hidden/kernel": {"model": "split(0)"}})
    yield 'rules={"hidden/kernel": {"model": 1}}', lambda: _trained({"hidden/kernel": {"model": 1}})
    yield 'rules={"hidden/kernel": None}', lambda: _trained({"hidden/kernel": None})
    yield 'rules={"hidden/kernel": partial_sum}', lambda: _trained({"hidden/kernel": {"model": kf.sbp.partial_sum}})
    yield 'rules={"out/kernel": split(1)}: 3 over 2 ranks', lambda: _trained({"out/kernel": {"model": split(1)}})
    yield (
        'rules={"out/kernel": split(1)}, strict=True',
        lambda: _trained({"out/kernel": {"model": split(1)}}, strict=True),
    )
    yield 'batch_axes="rows"', lambda: _trained({}, batch_axes="rows")
    yield "batch_axes=0", lambda: _trained({}, batch_axes=0)


def _of_fit(folder: Path) -> Iterator[Case]:
    import numpy as np

    import keras_flow as kf

    ones = np.ones
    yield "fit of no rows", lambda: _trained({}, ones((0, 6)), ones((0, 3)))
    yield "fit of rows of another length", lambda: _trained({}, ones((8, 5)), ones((8, 3)))
    yield "fit of 8 rows and 7 targets", lambda: _trained({}, ones((8, 6)), ones((7, 3)))
    yield "fit of None", lambda: _trained({}, None, None)
    yield "fit of []", lambda: _trained({}, [], [])
    yield "fit of strings", lambda: _trained({}, np.array([["a"] * 6] * 8), ones((8, 3)))
    split = {"hidden/kernel": {"model": kf.sbp.split(1)}}
    yield "fit with batch_size=0", lambda: _trained(split, ones((8, 6)), ones((8, 3)), batch_size=0)
    yield "fit with batch_size=-4", lambda: _trained({}, ones((8, 6)), ones((8, 3)), batch_size=-4)
    yield "fit with batch_size=2.5", lambda: _trained({}, ones((8, 6)), ones((8, 3)), batch_size=2.5)


def _trained(rules: object, x: object = "ones", y: object = "ones", batch_size: object = 4, **options: object) -> None:
    import keras
    import numpy as np

    import keras_flow as kf

    grid = kf.Placement([[0, 1], [2, 3]], ("data", "model"))
    keras.utils.clear_session()
    x = np.ones((8, 6)) if isinstance(x, str) else x
    y = np.ones((8, 3)) if isinstance(y, str) else y
    with kf.ModelParallel(grid, rules=rules, **{"batch_axes": "data", **options}).scope():  # type: ignore[arg-type]
        layers = [keras.Input((6,)), keras.layers.Dense(8, name="hidden"), keras.layers.Dense(3, name="out")]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=batch_size, verbose=0)  # type: ignore[arg-type]


def _of_commands(folder: Path) -> Iterator[Case]:
    files = {
        "program.py": PROGRAM,
        "empty.py": "",
        "broken.py": "def build_model(:",
        "raises.py": "raise ValueError('boom')" + PROGRAM,
        "no_model.py": PROGRAM.replace("return model", "return 3"),
        "uncompiled.py": PROGRAM.replace('model.compile("sgd", "mse")', "pass"),
        "notes.txt": "not Python",
        "ends.py": "raise SystemExit(3)" + PROGRAM,
        "asks.py": PROGRAM + "def rules(mesh): return {}",
        "listed.py": PROGRAM + "def rules(): return [1, 2]",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    lines = """
        compare none.py
        compare .
        compare broken.py
        compare program.py --backends torhc
        compare program.py --backends ,
        compare program.py --backends numpy
        compare program.py --layouts 3y3
        compare program.py --layouts dp0
        compare program.py --layouts ,
        compare program.py --layouts 0x2
        compare program.py --steps 0
        compare program.py --batch-size -1
        compare program.py --batch-size four
        compare program.py --out program.py
        compare program.py --seed -1
        compare program.py --layouts dp2 --schedule zbv
        compare program.py --layouts dp2,2x2 --ranks 8
        explain none.py --layout 2x2
        explain empty.py --layout 2x2
        explain raises.py --layout 2x2
        explain broken.py --layout 2x2
        explain no_model.py --layout dp2
        explain notes.txt --layout dp2
        explain program.py --layout 1
        explain program.py --layout DP2
        explain program.py --layout 2x2x2
        explain ends.py --layout dp2
        explain asks.py --layout 2x2
        explain listed.py --layout 2x2
        explain program.py --layout 2*2
        explain program.py --layout dp4 --ranks 2
        explain program.py --layout dp4 --batch-size 0
        explain program.py --layout dp2 --suggest --json
        explain program.py --layout pp2 --schedule zb1p1
        explain program.py --layout pp2-gpipe --schedule zbv
        explain program.py
        verify none.py --layout 2x2
        verify program.py --layout 1 --backends jax
        verify program.py --layout dp0 --backends jax
        verify program.py --layout three --backends jax
        verify program.py --layout dp2 --backends jxa
        verify program.py --layout dp2 --backends jax --tolerance -1
        verify program.py --layout dp2 --backends jax --dtype float99
        boxing S(0) S(9)
        boxing S(0)
        boxing X B
        boxing S(0) B --shape 4,x
        boxing S(0) B --shape -4
        boxing S(0) B --hierarchy 0
        boxing S(0) B --dtype float33
        boxing S(0) B --rank 9
        boxing S(0) B --png plan.gif
        boxing S(0) B --png none/plan.png
        boxing S(0) B --ranks 0,1
        boxing S(0) B --inside fast
        boxing S(0) B --measured none.json
        boxing S(0) B --measured none.json --ranks-per-host 4
        boxing S(0) B --backend jax
        boxing S(0) B --json --rank 1
        launch none.py --devices 2
        launch --devices 0 program.py
        launch --devices 2 none.py
        launch program.py
        launch --devices 3 --nproc_per_node 2 program.py
        launch --nnodes 2 --node_rank 2 --nproc_per_node 1 program.py
        launch --devices 2 --on moon program.py
        launch --devices 2 --timeout -1 --nproc_per_node 2 program.py
        launch --devices 2 --print-k8s program.py
        launch --nproc_per_node 2 --master_port 99999 program.py
        launch --nproc_per_node 2 --no_python nosuchprogram
        launch --nproc_per_node 2 -m nosuchmodule
        launch --nproc_per_node 2 --logdir program.py --tee program.py
        launch --nproc_per_node 1000000 program.py
        launch --devices two program.py
        launch --devices 4 --devices_per_proc 8 program.py
        launch --devices 2 notes.txt
        launch --devices 2 --logdir logs program.py
        launch --devices 2 --redirect --tee program.py
        launch --devices 2 --image image program.py
        launch --nproc_per_node 2 --max_restarts -1 program.py
        checkpoint none
        checkpoint program.py
        checkpoint .
        checkpoint verify folder
        checkpoint inspect folder
        checkpoint folder --format keras
        checkpoint folder --export model.keras --json
        doctor --backends jxa
        doctor --timeout 0
        doctor --backends numpy
        doctor jax
        dance
        compare program.py --stepz 3
    """
    for line in textwrap.dedent(lines).split("\n"):
        if line.strip():
            yield f"keras-flow {line.strip()}", functools.partial(_command, line.split(), folder)


def _command(words: list[str], folder: Path) -> object:
    from keras_flow.cli.app import app

    with contextlib.chdir(folder), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        return app(words, standalone_mode=False)


#: what makes each group of inputs, by the group's heading in the page
GROUPS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "Ranks and jobs": _of_init,
    "Placements and distributions": _of_placements,
    "sbp and layouts": _of_sbp,
    "Rules": _of_rules,
    "`fit`": _of_fit,
    "The command line": _of_commands,
}


def page(folder: Path, answers: Mapping[str, str]) -> str:
    """Return docs/unusual_input.md: each input that was not taken, with its answer."""
    groups, count = "", sum(said != TAKEN for said in answers.values())
    for heading, inputs in GROUPS.items():
        groups += f"\n## {heading}\n\n| input | answer |\n|---|---|\n"
        for text, _ in inputs(folder):
            if answers[text] != TAKEN:
                groups += f"| `{text}` | {_cell(answers[text])} |\n"
    return f"""# Unusual input

What does keras_flow say to a wrong number, a misspelt name or an empty file? This page has {count} inputs with their
answers on JAX. Each answer is one line: it says what was asked, what was found and what is legal.
`KERAS_BACKEND=jax keras-flow launch --devices 4 -m tests.cli.unusual_inputs` writes the page, and a test compares it
with the answers.
[Error messages by text](howto/errors_by_text.md) says why an error is raised.

- `four` is `kf.Placement(range(4))`, and `grid` is `kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))`.
- Rules are given to `kf.ModelParallel(grid, rules=...)`.
- The commands run in the folder `/here`. It has the files that they name, but not `none.py`.
{groups}"""


def _cell(said: str) -> str:
    return said.replace("(Keras) ", "Keras says: ").replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the page."""
    import keras_flow as kf

    kf.init()
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(Path(folder), dict(log(Path(folder)))))


if __name__ == "__main__":
    main()
