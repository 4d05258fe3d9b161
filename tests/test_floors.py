"""The house keeps its floors: who may import whom, read from the source itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "penstock"

FLOORS = {
    "cli": 9,
    "node": 8,
    "llm": 8,
    "simulate": 8,
    "async_llm": 8,
    "doors": 7,
    "placement": 7,
    "peers": 6,
    "engine": 5,
    "audit": 5,
    "pipes": 4,
    "weights": 4,
    "workspace": 3,
    "network": 3,
    "model": 3,
    "domain": 2,
    "config": 2,
    "kernels": 2,
    "errors": 1,
    "stats": 1,
    "progress": 1,
    "units": 1,
}
# Floors inside a package: folders, and files that lie beside them. Rooms of one floor do not import each other.
INNER_FLOORS = {
    "doors": [
        ("http", "connections"),
        ("grammar",),
        ("tools",),
        ("generation", "access"),
        ("api_config",),
        ("dispatch", "jobs"),
        ("openai", "anthropic", "ollama"),
        ("app",),
    ],
    "workspace": [("store",), ("batch",), ("work",), ("flow",), ("worker",)],
    "engine": [
        ("run_in_halves",),
        ("scheduling",),
        ("sequences",),
        ("routing",),
        ("visit",),
        ("commands", "fault_handler"),
        ("inbox",),
        ("reception",),
        ("engine",),
        ("job_factory", "job_receiver"),
        ("hosted_model",),
    ],
    "model": [
        ("files", "memory", "text", "batch", "transfer"),
        ("architecture", "sampling"),
        ("decoder", "packed"),
        ("segment",),
        ("ends",),
        ("native", "largest_pass", "triton"),
        ("backend", "sources"),
    ],
    "network": [
        ("stream", "log_throttle", "rate_limit", "link_meter"),
        ("router",),
        ("frame", "parts", "trust", "in_process", "routers", "conformance"),
        ("codec", "members", "joining", "send_window"),
        ("messenger", "wire"),
        ("link_monitor", "zenoh"),
    ],
    "cli": [
        ("ui", "prompt", "quick_imports", "version"),
        ("exits",),
        ("options",),
        ("client",),
        ("node",),
        ("chat", "jobs", "network"),
        ("batch", "machine", "moving"),
        ("app",),
    ],
}
# `from penstock import LLM` is an import of llm.py
FACE_NAMES = {"LLM": "llm", "AsyncLLM": "async_llm", "Work": "workspace", "Flow": "workspace"} | dict.fromkeys(
    ("SamplingParams", "JobRequest", "TokensOut", "OutputFinished", "JobDone", "JobFailed"), "domain"
)
FACE = ""  # penstock/__init__.py: its public names are imported on first use, so its top level imports no Penstock module
NEIGHBOURS = {
    "errors",
    "stats",
    "progress",
    "units",
    "domain",
    "config",
    "llm",
    "async_llm",
    "node",
}  # same floor, and may import each other

COMPUTE = {"torch", "numpy", "safetensors", "tokenizers", "jinja2"}
THIRD_PARTY = {
    "": set(),
    "errors": set(),
    "stats": set(),
    "progress": set(),
    "units": set(),
    "domain": set(),
    "config": set(),
} | dict.fromkeys(("model", "pipes", "weights", "engine", "audit"), COMPUTE)
THIRD_PARTY["kernels"] = {"numpy"} | {"torch", "triton"}  # these two only in kernels/triton
THIRD_PARTY["network"] = {"zenoh", "msgspec", "cryptography"}
THIRD_PARTY["workspace"] = {"watchfiles"}
IMPORTERS = {"gguf", "huggingface_hub"}  # only in model/sources, and only inside functions
BLOCKED = ("llguidance", "typer", "rich", "gguf", "huggingface_hub", "msgspec", "zenoh", "starlette", "transformers", "pydantic")


@dataclass(frozen=True)
class Import:
    """`module` imports `target` at `line`; `lazy` when it does so inside a function, `typing` when only for type checkers."""

    file: Path
    module: str
    line: int
    target: str
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


# ---- reading imports ----


def module_name(file: Path, source: Path) -> str:
    """`engine.scheduler` for engine/scheduler.py; a folder's `__init__.py` is the folder."""
    parts = list(file.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, source: Path) -> Iterator[Import]:
    module = module_name(file, source)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from penstock import x` may name a module, and so may `from penstock.model import spec`.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["penstock", *package][: len(package) + 2 - node.level]
            targets = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for target in targets:
            yield Import(file, module, node.lineno, target, lazy, typing)  # type: ignore[attr-defined]
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, inside, True)
            for child in node.orelse:
                yield from walk(child, inside, typing)
            return
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # no expression imports anything
                yield from walk(child, inside, typing)

    yield from walk(ast.parse(file.read_text(encoding="utf-8"), str(file)), False, False)


def all_imports(source: Path) -> list[Import]:
    return _imports_of_penstock() if source == SOURCE else _read_imports(source)


@cache
def _imports_of_penstock() -> list[Import]:
    return _read_imports(SOURCE)


def _read_imports(source: Path) -> list[Import]:
    return [found for file in sorted(source.rglob("*.py")) for found in imports_of(file, source)]


def room_of(module: str) -> str:
    return module.split(".")[0]


def ours(target: str) -> bool:
    return target.split(".")[0] == "penstock"


def room_imported(found: Import) -> str:
    parts = found.target.split(".")[1:]
    room = FACE_NAMES.get(parts[0], parts[0]) if parts else FACE
    return room if room in FLOORS else FACE


# ---- the rules; each returns its violations ----


def rooms_without_a_floor(source: Path) -> list[str]:
    rooms = {room_of(module_name(file, source)) for file in source.rglob("*.py")} - {FACE, "__main__"}
    return [f"penstock/{room} has no floor: give it one in {Path(__file__).name}" for room in sorted(rooms - FLOORS.keys())]


def wrong_floors(source: Path) -> list[str]:
    """Imports of higher floors. Typing-only imports count too: a module that needs a type of a higher floor lives too low."""
    broken = []
    for found in all_imports(source):
        room, other = room_of(found.module), room_imported(found)
        if not ours(found.target) or room in (FACE, "__main__") or other in (FACE, room):
            continue
        above, below = FLOORS.get(room, 0), FLOORS[other]
        if above < below:
            broken.append(f"{found}: floor {above} must not know floor {below}")
        elif above == below and not {room, other} <= NEIGHBOURS:
            broken.append(f"{found}: {room} and {other} are wings of floor {above} and must not know each other")
    return broken


def inner_room(module: str) -> str:
    """`routing` for engine.routing.origin; `engine` for engine/engine.py; empty for the package itself."""
    return [*module.split("."), ""][1]


def wrong_inner_floors(source: Path) -> list[str]:
    broken = []
    for found in all_imports(source):
        package = room_of(found.module)
        if package not in INNER_FLOORS or not found.target.startswith(f"penstock.{package}."):
            continue
        floors = {room: floor for floor, rooms in enumerate(INNER_FLOORS[package], 1) for room in rooms}
        room, other = inner_room(found.module), inner_room(found.target.removeprefix("penstock."))
        if room in ("", "__main__") or room == other:
            continue
        if unknown := [name for name in (room, other) if name not in floors]:
            broken.append(f"{found}: {package}/{unknown[0]} has no floor: give it one in {Path(__file__).name}")
        elif floors[room] < floors[other]:
            broken.append(f"{found}: {package}/{room} lies below {package}/{other} and must not know it")
        elif floors[room] == floors[other]:
            broken.append(f"{found}: {package}/{room} and {package}/{other} must not know each other")
    return broken


def heavy_face(source: Path) -> list[str]:
    """`import penstock` must stay cheap: `__init__.py` imports no Penstock module except for type checkers."""
    return [
        f"{found}: penstock/__init__.py must import it on first use"
        for found in all_imports(source)
        if found.module == FACE and not (found.lazy or found.typing) and found.target.split(".")[0] not in sys.stdlib_module_names
    ]


def wrong_third_parties(source: Path) -> list[str]:
    broken = []
    for found in all_imports(source):
        room, package = room_of(found.module), found.target.split(".")[0]
        if ours(found.target) or package in sys.stdlib_module_names or package == "__future__":
            continue
        if room == "kernels" and package in ("torch", "triton") and not found.module.startswith("kernels.triton."):
            broken.append(f"{found}: only kernels/triton may use {package}")
        elif package in IMPORTERS and room in THIRD_PARTY:
            if not found.module.startswith("model.sources"):
                broken.append(f"{found}: only model/sources reads foreign formats")
            elif not (found.lazy or found.typing):
                broken.append(f"{found}: import it inside the function that uses it")
        elif room in THIRD_PARTY and package not in THIRD_PARTY[room]:
            broken.append(
                f"{found}: {room or 'penstock/__init__.py'} may use only {sorted(THIRD_PARTY[room]) or 'the standard library'}"
            )
    return broken


def circles(source: Path) -> list[str]:
    """Import cycles; lazy and typing-only imports do not count."""
    modules = {module_name(file, source) for file in source.rglob("*.py")}
    needs: dict[str, set[str]] = {module: set() for module in modules}
    for found in all_imports(source):
        if found.lazy or found.typing or not ours(found.target):
            continue
        target = found.target.removeprefix("penstock").lstrip(".")
        while target not in modules:
            target = target.rpartition(".")[0]
        if target not in (FACE, found.module):
            needs[found.module].add(target)
    return [" → ".join(circle) for circle in _circles_in(needs)]


def _circles_in(needs: dict[str, set[str]]) -> Iterator[list[str]]:
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in finished:
            for other in sorted(needs[module]):
                yield from visit(other, [*path, module])
            finished.add(module)

    for module in sorted(needs):
        yield from visit(module, [])


RULES = [rooms_without_a_floor, wrong_floors, wrong_inner_floors, heavy_face, wrong_third_parties, circles]


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule) -> None:
    assert rule(SOURCE) == []


# ---- the compute core stands alone ----


def modules_under(room: str) -> list[str]:
    """Without the Triton back-end, which is imported where there is a CUDA GPU."""
    files = sorted(file for file in (SOURCE / room).rglob("*.py") if file.parent.name != "triton")
    return [f"penstock.{module_name(file, SOURCE)}" for file in files]


CORE = ["domain", "config", "workspace", "model", "pipes", "weights", "engine", "audit"]


@pytest.fixture(scope="module")
def imported_apart() -> dict[str, str]:
    """Import each room of the core in its own process, forked from one that has only loaded torch; return the outcomes."""
    program = f"""
import importlib, json, os, sys, traceback
for name in {BLOCKED!r}:
    sys.modules[name] = None  # makes `import name` fail as if it were not installed
import torch
for room, modules in { ({room: modules_under(room) for room in CORE})!r}.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            for name in modules:
                importlib.import_module(name)
            print(json.dumps([room, "imported"]), flush=True)
        except BaseException:
            print(json.dumps([room, traceback.format_exc()]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    env = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("room", CORE)
def test_the_compute_core_imports_where_nothing_else_is_installed(room: str, imported_apart: dict[str, str]) -> None:
    assert modules_under(room)
    assert imported_apart[room] == "imported"


def test_importing_penstock_does_not_import_torch() -> None:
    names = "penstock.SamplingParams, penstock.Work, penstock.Flow"
    program = f"import sys, penstock; {names}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60, check=False).returncode == 0


# ---- the checker detects what it should ----


@pytest.fixture
def house(tmp_path: Path):
    def build(**files: str) -> Path:
        """A tiny penstock; `engine__loop="..."` becomes engine/loop.py."""
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            for folder in path.parents:
                if folder.is_relative_to(tmp_path):
                    (folder / "__init__.py").touch()
        return tmp_path

    return build


def test_a_house_in_order_passes(house) -> None:
    source = house(
        errors="",
        domain__job="from penstock.errors import PenstockError\nimport dataclasses",
        model__segment="import torch.nn.functional as F\nfrom penstock.domain.job import Job\nfrom . import batch",
        model__batch="",
        model__sources__hub="def fetch():\n    import huggingface_hub",
        engine__engine="from penstock.model import segment\nfrom .scheduling.scheduler import schedule",
        engine__scheduling__scheduler="",
        cli__chat__run="import typer\nfrom penstock.engine.engine import step",
    )
    assert [rule(source) for rule in RULES] == [[]] * len(RULES)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"model__decoder": "import penstock.engine.loop", "engine__loop": ""}, "floor 3 must not know floor 5"),
        ({"model__decoder": "from penstock import engine", "engine__loop": ""}, "floor 3 must not know floor 5"),
        ({"engine__loop": "def f():\n    from penstock.cli import main", "cli__run": ""}, "floor 5 must not know floor 9"),
        ({"model__decoder": "from ..engine.loop import step", "engine__loop": ""}, "floor 3 must not know floor 5"),
        ({"engine__loop": "from penstock import LLM", "llm": ""}, "floor 5 must not know floor 8"),
        ({"errors": "from penstock.domain import job", "domain__job": ""}, "floor 1 must not know floor 2"),
        ({"model__x": "from penstock.network.wire import send", "network__wire": ""}, "wings of floor 3"),
    ],
)
def test_an_import_of_a_higher_floor_or_another_wing_is_found(house, files: dict[str, str], message: str) -> None:
    found = wrong_floors(house(**files))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"engine__scheduling__a": "from penstock.engine.engine import Engine", "engine__engine": ""},
            "lies below engine/engine",
        ),
        ({"doors__openai__a": "from ..ollama import b", "doors__ollama__b": ""}, "must not know each other"),
        ({"doors__new__a": "from penstock.doors.http import b", "doors__http__b": ""}, "doors/new has no floor"),
    ],
)
def test_an_import_across_the_floors_of_a_package_is_found(house, files: dict[str, str], message: str) -> None:
    found = wrong_inner_floors(house(**files))
    assert len(found) == 1
    assert message in found[0]


def test_a_type_checkers_import_of_a_higher_floor_is_found(house) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.engine.loop import Loop"
    assert len(wrong_floors(house(model__decoder=text, engine__loop=""))) == 1


def test_a_room_without_a_floor_is_found(house) -> None:
    assert "penstock/helpers has no floor" in rooms_without_a_floor(house(helpers=""))[0]


@pytest.mark.parametrize(
    "files, message",
    [
        ({"domain__job": "import torch"}, "domain may use only the standard library"),
        ({"engine__loop": "def f():\n    import msgspec"}, "engine may use only"),
        ({"model__decoder": "def f():\n    import gguf"}, "only model/sources reads foreign formats"),
        ({"model__sources__gguf_file": "import gguf"}, "import it inside the function"),
        ({"kernels__library": "import torch"}, "only kernels/triton may use torch"),
    ],
)
def test_a_foreign_package_in_the_wrong_room_is_found(house, files: dict[str, str], message: str) -> None:
    found = wrong_third_parties(house(**files))
    assert len(found) == 1
    assert message in found[0]


def test_a_circle_is_found_and_a_lazy_import_is_none(house) -> None:
    source = house(
        engine__a="from penstock.engine.b import x", engine__b="from penstock.engine import c", engine__c="from .a import y"
    )
    assert circles(source) == ["engine.a → engine.b → engine.c → engine.a"]
    assert circles(house(engine__c="def f():\n    from .a import y")) == []


def test_a_heavy_face_is_found(house) -> None:
    source = house(llm="")
    (source / "__init__.py").write_text("from penstock.llm import LLM", encoding="utf-8")
    assert len(heavy_face(source)) == 1
