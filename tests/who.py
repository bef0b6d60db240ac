"""Which tests test a source file: `make test-changed` runs them in full.

python -m tests.who backends/torch/optimizer.py     prints them, as pytest takes them
python -m tests.who --since "1 day ago"             those of all files that commits have changed since then

A test file tests the modules that it imports, and what `MAP` says for engines, whose modules are imported in processes
of their own. A test file that changed is among its own tests.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: pattern of source files -> tests, most telling first; all patterns that match count
MAP: dict[str, tuple[str, ...]] = {
    "backends/*.py": ("tests/backends/test_*.py",),
    "backends/rendezvous/*.py": ("tests/doors/test_alone.py", "tests/backends/rendezvous"),
    "backends/row_wise/*.py": ("tests/backends/row_wise", "tests/backends/torch/test_beliefs.py"),
    "backends/reading/*.py": ("tests/backends/reading", "tests/parity/test_reading.py"),
    "backends/files/*.py": ("tests/backends/files", "tests/doors"),
    "backends/mail/*.py": ("tests/pipelines", "tests/servers"),
    "backends/fingerprints/*.py": ("tests/backends/test_fingerprints.py",),
    "backends/jax/*.py": ("tests/backends/jax", "tests/parity/test_grid.py"),
    "backends/tensorflow/*.py": ("tests/backends/tensorflow", "tests/parity/test_grid.py"),
    "backends/tensorflow/*/*.py": ("tests/backends/tensorflow", "tests/parity/test_grid.py"),
    "backends/torch/*.py": ("tests/backends/torch", "tests/parity/test_grid.py"),
    "backends/torch/*/*.py": ("tests/backends/torch", "tests/parity/test_grid.py"),
    "backends/numpy/*.py": ("tests/conformance", "tests/tensors"),
    "backends/*/boxing.py": ("tests/conformance/test_boxing.py",),
    "backends/*/*collectives.py": ("tests/comm", "tests/conformance"),
    "backends/*/processes.py": ("tests/launch", "tests/parity/test_processes.py"),
    "backends/*/reading*.py": ("tests/backends/reading/test_reading.py", "tests/parity/test_reading.py"),
    "backends/*/random.py": ("tests/backends/test_logical_random.py",),
    "backends/*/profil*.py": ("tests/timeline",),
    "backends/*/replica.py": ("tests/comm",),
    "backends/*/tensors.py": ("tests/tensors",),
    "backends/*/servers.py": ("tests/servers",),
    "backends/*/tables.py": ("tests/servers",),
    "backends/*/parcels.py": ("tests/servers",),
    "keras_flow/compat/oneflow/*.py": ("tests/compat",),
    "keras_flow/current/*.py": ("tests/distributions", "tests/verify"),
    "keras_flow/parallel/*.py": ("tests/distributions", "tests/verify"),
    "keras_flow/parallel/parameter_server.py": ("tests/servers",),
    "keras_flow/parallel/central_storage.py": ("tests/pipelines/test_central_storage.py",),
    "keras_flow/launch/served.py": ("tests/servers",),
    "keras_flow/*.py": ("tests/test_doctests.py",),
}


@cache
def imported_by(test: Path) -> frozenset[str]:
    """Return the modules that a test file imports, those of its functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def module_of(source: str) -> str:
    """Return the name that a source file is imported by.

    Example:
        >>> module_of("backends/torch/optimizer.py"), module_of("keras_flow/boxing/__init__.py")
        ('keras_flow.backends.torch.optimizer', 'keras_flow.boxing')
    """
    name = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"keras_flow.{name}" if name.startswith("backends") else name


@cache
def _test_files() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


def _asking(module: str) -> set[Path]:
    """Test files that import a module, directly or by another file of the tests."""
    found: set[Path] = set()
    wanted = {module}
    while wanted:
        new = {file for file in _test_files() if imported_by(file) & wanted} - found
        found |= new
        wanted = {module_of(str(file.relative_to(ROOT))) for file in new if not file.name.startswith("test_")}
    return {file for file in found if file.name.startswith("test_")}


def tests_of(source: str) -> list[str]:
    """Return the test files, or folders of them, of a file of the repository."""
    if not source.endswith(".py"):
        return []
    if source.startswith("tests/"):
        path = ROOT / source
        if path.name.startswith("test_"):
            return [source] if path.exists() else []
        return sorted(str(file.relative_to(ROOT)) for file in _asking(module_of(source)))
    module = module_of(source)
    asking = {str(file.relative_to(ROOT)) for file in _asking(module)}
    mirror = Path("tests", *Path(source.removeprefix("keras_flow/")).parent.parts)
    named = mirror / f"test_{Path(source).stem}.py"
    mirrored = (
        [str(named)] if (ROOT / named).exists() else [str(mirror)] if list((ROOT / mirror).glob("test_*")) else []
    )
    patterns = [pattern for pattern, tests in MAP.items() if Path(source).match(pattern) for pattern in tests]
    declared = [str(file.relative_to(ROOT)) for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys((*(mirrored if mirror != Path("tests") else ()), *sorted(asking), *declared)))


def changed(since: str) -> list[str]:
    """Return the files that commits have changed since a date, and those that are changed now."""
    log = ["git", "log", f"--since={since}", "--name-only", "--pretty=format:", "--diff-filter=AMR"]
    found = "\n".join(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in (log, ["git", "diff", "--name-only", "HEAD", "--diff-filter=AMR"])
    )
    return sorted({line for line in found.splitlines() if line and (ROOT / line).exists()})


def tests_of_all(sources: Iterable[str]) -> list[str]:
    """Return the tests of some files, each once: those that test most of the files first."""
    counts: dict[str, int] = {}
    for source in sources:
        for test in tests_of(source):
            counts[test] = counts.get(test, 0) + 1
    return sorted(counts, key=lambda test: (-counts[test], test))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="source files, from the root of the repository")
    parser.add_argument("--since", default="", help="all files that commits have changed since then: '1 day ago'")
    options = parser.parse_args(arguments)
    for test in tests_of_all([*options.files, *(changed(options.since) if options.since else ())]):
        print(test)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
