"""The house keeps its shape: short files, imports one way, a light import."""

import ast
import statistics
import subprocess
import sys

import pytest

from shared_data import ROOT

ROOMS = ("core", "cache", "scheduling", "simulation", "engine", "distributed", "cli")
FILES = sorted(
    path
    for folder in ("jaxsched", "models", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def _lines(path):
    return len(path.read_text().splitlines())


def test_no_file_is_long():
    long = {str(path): _lines(path) for path in FILES if _lines(path) > 400}
    assert not long


def test_the_median_file_is_short():
    sizes = [_lines(path) for path in FILES if path.name != "__init__.py"]
    assert statistics.median(sizes) <= 220


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _room(parts):
    return ROOMS.index(parts[0].removesuffix(".py"))


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.is_relative_to(ROOT / "jaxsched")]
)
def test_rooms_import_only_from_rooms_before_them(path):
    parts = path.relative_to(ROOT / "jaxsched").parts
    if parts[0] in ("__init__.py", "__main__.py"):
        return
    own = _room(parts)
    for module in _imports(path):
        steps = module.split(".")
        if steps[0] != "jaxsched" or len(steps) < 2:
            continue
        if steps[1] == "models":
            assert parts[0] == "cli", f"{path} imports {module}"
        elif steps[1] in ROOMS:
            assert _room(steps[1:]) <= own, f"{path} imports {module}"


def test_the_oracles_know_no_arrays():
    for path in (ROOT / "tests" / "oracles").glob("planner*.py"):
        assert not {name.split(".")[0] for name in _imports(path)} & {"jax", "numpy"}


def test_import_is_light():
    """flax and matplotlib are for those who use them, not for a scheduler's import."""
    code = (
        "import sys, jaxsched; "
        "print([m for m in ('flax', 'matplotlib', 'rich') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_public_names_are_sorted_and_exist():
    import jaxsched

    assert list(jaxsched.__all__) == sorted(jaxsched.__all__)
    assert all(hasattr(jaxsched, name) for name in jaxsched.__all__)
