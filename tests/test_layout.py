"""The house: which room may import which, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("identity", "kernels", "service")
HEAVY = {"torch", "transformers", "triton", "aiohttp", "pydantic", "accelerate"}
# Who may import whom, of our own rooms and of what others wrote (None: whatever it needs).
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "identity": ({"identity"}, {"msgpack", "xxhash"}),
    "cache": ({"cache", "identity"}, {"numpy"}),
    "kernels": ({"kernels"}, {"torch", "triton", "numpy"}),
    "service": ({"service", "cache", "identity", "kernels"}, None),
}


def files(room: str) -> list[Path]:
    if room == "cache":
        # The front door loads the rest by name, and the command is the service's.
        outside = {"__init__.py", "__main__.py"}
        return [p for p in (ROOT / "radixkv").glob("*.py") if p.name not in outside]
    return list((ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, at any depth, type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            assert node.level == 0, f"{path}: import by full name"
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room: str) -> None:
    rooms, others = ALLOWED[room]
    assert files(room)
    for path in files(room):
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "radixkv":
                target = rest.split(".")[0] if rest.split(".")[0] in ROOMS else "cache"
                assert target in rooms, f"{path.relative_to(ROOT)} imports {name}"
            elif others is not None and top not in sys.stdlib_module_names:
                assert top in others, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_linked_room_has_no_init(room: str) -> None:
    """A regular top-level package of that name would shadow other people's (``kernels``)."""
    assert not list((ROOT / room).rglob("__init__.py"))
    assert (ROOT / "radixkv" / room).resolve() == ROOT / room


def loaded(statement: str, before: str = "") -> tuple[set[str], float]:
    """Top-level modules there are after a statement, and the seconds of processor time it took.

    ``before`` is run first and not counted. Processor time, since others use the machine too.
    """
    script = (
        f"import sys, time\n{before}\nstart = time.process_time()\n{statement}\n"
        "print(time.process_time() - start, *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, *modules = out.stdout.split()
    return {name.partition(".")[0] for name in modules}, float(seconds)


def test_importing_radixkv_is_quick_and_light() -> None:
    """Under 150 ms and no torch."""
    costs = []
    for _ in range(3):
        modules, seconds = loaded("import radixkv")
        assert not modules & HEAVY
        costs.append(seconds)
    assert min(costs) < 0.150


def test_the_bare_cache_loads_numpy_and_nothing_heavier() -> None:
    """Beside numpy, whose own time is not ours, under 150 ms."""
    costs = []
    for _ in range(3):
        modules, seconds = loaded("import radixkv.cache", before="import numpy")
        assert "numpy" in modules and not modules & HEAVY
        costs.append(seconds)
    assert min(costs) < 0.150


def test_the_bare_cache_example_runs() -> None:
    path = ROOT / "examples" / "bare_cache.py"
    assert len(path.read_text().splitlines()) < 40
    out = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert "cached 56 of 60" in out.stdout
