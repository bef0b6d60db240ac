"""Who imports whom: the algebra needs no engine, and engines are told apart only inside `backends/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

ROOT = Path(__file__).parents[1]
ENGINES = {"jax", "jaxlib", "tensorflow", "torch"}


def _engine_of(path: Path) -> str:
    """The folder of `backends/` that a file is in."""
    return path.relative_to(ROOT / "backends").parts[0]


SOURCES = sorted((ROOT / "keras_flow").rglob("*.py"))
BACKENDS = sorted(path for path in (ROOT / "backends").rglob("*.py") if _engine_of(path) in ENGINES)

pytestmark = pytest.mark.timeout(120)

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked by this test")
BLOCKED = {names}
sys.meta_path.insert(0, Blocked())
"""


def run(body: str, backend: str = "jax") -> str:
    code, out, err = programs.finish(programs.start(["-c", body], backend), 100)
    assert code == 0, err
    return out.strip()


def test_the_algebra_imports_with_keras_and_the_engines_blocked() -> None:
    body = BLOCK.replace("{names}", "{'keras', 'jax', 'jaxlib', 'tensorflow', 'torch'}") + (
        "import keras_flow as kf, keras_flow.sbp, keras_flow.placements, keras_flow.layout, keras_flow.errors\n"
        "import keras_flow.backends.interface, keras_flow.backends.active, keras_flow.boxing\n"
        "layout = kf.Layout(kf.Placement(range(4)), kf.sbp.split(0), (10, 2))\n"
        "shapes = [layout.local_shape(rank) for rank in range(4)]\n"
        "print(shapes, kf.FlowError.__name__, kf.placement('cpu', '0:0-1').size)\n"
        "assert not set(sys.modules) & BLOCKED"
    )
    assert run(body) == "[(3, 2), (3, 2), (2, 2), (2, 2)] FlowError 2"


def test_every_public_name_loads_when_asked_for() -> None:
    body = (
        "import sys, keras_flow as kf\nassert 'keras' not in sys.modules\n"
        "for name in kf.__all__: getattr(kf, name)\nassert set(dir(kf)) >= set(kf.__all__)\n"
        "try: kf.nothing\nexcept AttributeError as error: print(error)"
    )
    assert run(body) == "module 'keras_flow' has no attribute 'nothing'"


@pytest.mark.parametrize("command", [[], ["boxing"], ["compare"], ["launch"], ["doctor"]])
def test_help_loads_neither_keras_nor_an_engine(command: list[str]) -> None:
    body = BLOCK.replace("{names}", "{'keras', 'jax', 'jaxlib', 'tensorflow', 'torch'}") + (
        f"from keras_flow.cli.app import app\ntry: app({[*command, '--help']!r})\n"
        "except SystemExit as end: sys.exit(end.code)"
    )
    assert "Usage" in run(body)


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "torch")))
def test_only_the_active_engine_is_loaded(engine: str) -> None:
    """Keras itself loads TensorFlow where it is installed: asked of what keras_flow adds."""
    body = f"""
import sys
import keras
engines = {{"jax", "tensorflow", "torch"}}
before = engines & set(sys.modules)
import keras_flow as kf
kf.init(1)
distribution = kf.DataParallel()
kf.ModelParallel(kf.Placement([0], axis_names=("model",)), rules={{"kernel": "S(1)"}})
with distribution.scope():
    pass
print(sorted((engines & set(sys.modules)) - before - {{{engine!r}}}))
print([name for name in engines - {{{engine!r}}} if f"keras_flow.backends.{{name}}" in sys.modules])
"""
    assert run(body, engine).splitlines() == ["[]", "[]"]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of a file, those inside functions included, and of import_module by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def offends(module: str, others: set[str]) -> bool:
    return module.partition(".")[0] in others or any(
        module.startswith(f"keras_flow.backends.{name}") for name in others
    )


def test_nothing_outside_backends_imports_an_engine() -> None:
    shared = sorted(set((ROOT / "backends").rglob("*.py")) - set(BACKENDS))
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in (*SOURCES, *shared)
        for line, module in imports(path)
        if offends(module, ENGINES)
    ]
    assert not found, found


def test_a_backend_imports_no_other_engine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in BACKENDS
        for line, module in imports(path)
        if offends(module, ENGINES - {_engine_of(path), "jaxlib"})
    ]
    assert not found, found


def test_no_process_unpickles_what_nobody_signed() -> None:
    """torch's collectives of objects do; `kf.comm` has its own."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for path in sorted((ROOT / "backends").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.endswith(("_object", "_object_list"))
        and "distributed" in ast.unparse(node.value)
    ]
    assert not found, found


def test_the_algebra_imports_only_itself_and_numpy() -> None:
    allowed = (
        "keras_flow.sbp",
        "keras_flow.placements",
        "keras_flow.layout",
        "keras_flow.errors",
        "keras_flow.pictures",
    )
    for name in ("sbp", "placements", "layout", "errors"):
        for line, module in imports(ROOT / "keras_flow" / f"{name}.py"):
            if module.startswith(("keras", "keras_flow")):
                legal = module == "keras_flow.sbp" or module.startswith(allowed)
                assert legal, f"{name}.py:{line} imports {module}"


def test_pictures_know_numbers_and_names_only() -> None:
    for path in sorted((ROOT / "keras_flow" / "pictures").glob("*.py")):
        for line, module in imports(path):
            if module.startswith(("keras", "keras_flow")):
                legal = ("keras_flow.pictures", "keras_flow.errors", "keras_flow.atomic", "keras_flow.units")
                assert module.startswith(legal), f"{path.name}:{line} {module}"


def test_boxing_imports_only_the_algebra_and_itself() -> None:
    """`kf.boxing.execute` alone asks for the active engine, when it is first used."""
    allowed = (
        "keras_flow.boxing.",
        "keras_flow.errors.",
        "keras_flow.layout.",
        "keras_flow.pictures.",
        "keras_flow.placements.",
        "keras_flow.units.",
    )
    found = [
        f"{path.name}:{line} imports {module}"
        for path in sorted((ROOT / "keras_flow" / "boxing").glob("*.py"))
        for line, module in imports(path)
        if module.startswith("keras_flow") and not module.startswith((*allowed, "keras_flow.sbp"))
    ]
    assert sorted({text.partition(":")[0] for text in found}) == ["__init__.py"]
    assert {text.rpartition(" ")[2] for text in found} == {"keras_flow.backends.execute.execute"}


def test_no_branch_on_the_name_of_a_backend_outside_backends() -> None:
    """`if backend == ...` belongs into a capability record. Texts of errors may name an engine."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
                if names & ENGINES:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not found, found


#: packages and modules from the lowest to the highest; what stands in one line may not import each other
ORDER = (
    ("scoped",),
    ("errors", "units", "philox", "progress", "atomic", "layout_names", "near_names"),
    ("permutation", "settings"),
    ("pictures",),
    ("schedules",),
    ("sbp",),
    ("placements",),
    ("layout",),
    ("boxing",),
    ("signatures",),
    ("current",),
    ("backends",),
    ("runtime",),
    ("launch",),
    ("distributions", "tensors", "checkpoint"),
    ("pipelines", "npz"),
    ("servers",),
    ("callbacks",),
    ("comm",),
    ("hvd",),
    ("user_file",),
    ("rules_check",),
    ("explainer", "verify", "doctor", "timeline"),
    ("parallel",),
    ("compat",),
    ("compare",),
    ("notebook",),
    ("cli",),
)


def test_one_file_knows_what_keras_has_inside() -> None:
    """Others ask it, or Keras's public names; so a module that moves is followed in one place."""
    inside = ("keras.src", "keras._")
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in (*SOURCES, *sorted((ROOT / "backends").rglob("*.py")))
        for line, module in imports(path)
        if module.startswith(inside)
    ]
    assert not found, found
    named = {path.name for path in (*SOURCES, *(ROOT / "backends").rglob("*.py")) if "keras.src" in path.read_text()}
    assert named == {"keras_places.py"}


def test_arrows_point_down() -> None:
    """Every import, also for types and inside functions. `__init__` names the modules of public names as texts."""
    height = {name: number for number, names in enumerate(ORDER) for name in names}
    found = []
    for path in (*SOURCES, *sorted((ROOT / "backends").rglob("*.py"))):
        if path == ROOT / "keras_flow" / "boxing" / "__init__.py":
            continue  # `kf.boxing.execute` has its public name there; it is loaded when it is asked for
        inside = path.relative_to(ROOT).parts
        own = "backends" if inside[0] == "backends" else inside[1].removesuffix(".py")
        own = "cli" if path.stem == "__main__" else own  # `python -m keras_flow.launch` is a command line
        for line, module in imports(path):
            tree, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if tree != "keras_flow" or own.startswith("__init__") or other == own or other not in height:
                continue
            if height[other] >= height[own]:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not found, found


def test_backends_import_in_no_circle() -> None:
    """Imports inside functions count: one that only breaks a circle is a missing module. Those for types do not."""
    below = {_module(path): path for path in sorted((ROOT / "backends").rglob("*.py"))}
    sees = {name: _imported(path, set(below)) & below.keys() - {name} for name, path in below.items()}
    while lowest := [name for name, others in sees.items() if not others & sees.keys()]:
        for name in lowest:
            del sees[name]
    # what is left is in a circle, or imports one: a walk along it comes back
    path = [next(iter(sees), "")]
    while path[-1] and path[-1] not in path[:-1]:
        path.append(min(sees[path[-1]] & sees.keys()))
    assert not sees, " -> ".join(path[path.index(path[-1]) :])


def _module(path: Path) -> str:
    inside = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("keras_flow", *(part for part in inside if part != "__init__")))


def _imported(path: Path, modules: set[str]) -> set[str]:
    """What a file imports when it runs: of `from package import module` the module, where it is one of `modules`."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in whole}
    return found


def test_every_package_has_its_place_in_the_order() -> None:
    named = {name for names in ORDER for name in names}
    there = {path.stem for path in (ROOT / "keras_flow").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert named == {name for name in there if not name.startswith("__")} | {"backends"}
