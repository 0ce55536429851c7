"""The import rules of the house, and how a source file is held against them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "raymod"


@dataclass(frozen=True)
class Room:
    """Modules that may import one another and rooms of lower rows, and nothing of `never`."""

    row: int
    modules: tuple[str, ...]
    never: tuple[str, ...] = ()


# The same table stands in docs/how-it-works.md. "raymod" is the package's own __init__.
ROOMS = (
    Room(10, ("__main__", "cli", "demo", "bench"), never=("raymod.worker",)),
    Room(9, ("__init__",), never=("ray", "torch.distributed")),
    Room(
        8,
        ("api",),
        never=("ray", "torch.distributed", "raymod.worker", "raymod.parallel", "raymod.prepare"),
    ),
    Room(
        7,
        ("module",),
        never=(
            "ray",
            "raymod.worker",
            "raymod.transport",
            "raymod.weights",
            "raymod.parallel",
            "raymod.prepare",
        ),
    ),
    Room(6, ("gang",), never=("diffusers", "raymod.parallel", "raymod.prepare")),
    Room(5, ("worker",), never=("ray",)),
    Room(4, ("prepare",), never=("ray", "raymod.transport", "raymod.weights")),
    Room(3, ("parallel",), never=("ray", "raymod.transport", "raymod.weights")),
    Room(2, ("plans",), never=("ray", "torch.distributed")),
    Room(2, ("weights",)),
    Room(2, ("transport",), never=("diffusers",)),
    Room(1, ("calls",), never=("ray", "diffusers", "torch.distributed")),
    Room(1, ("machine",), never=("ray", "torch", "diffusers")),
    Room(1, ("config",), never=("ray", "diffusers", "torch.distributed")),
    Room(0, ("errors",), never=("ray", "torch", "diffusers", "numpy", "cloudpickle")),
)

ROOM_OF = {module: room for room in ROOMS for module in room.modules}


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The top-level module of the package that a file belongs to: "gang" for gang/actors.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations(source: str, *, module: str, package: str) -> Iterator[str]:
    """What the imports of `source`, a part of `raymod.<module>` in `package`, break."""
    room = ROOM_OF.get(module)
    if room is None:
        yield f"{module} has no room: give it one in {Path(__file__).name} and in how-it-works.md"
        return
    for line, name in imported_names(ast.parse(source), package=package):
        for banned in room.never:
            if _within(name, banned):
                yield f"line {line}: {module} must not import {banned}"
        other = _own_module(name)
        if other is None:
            continue
        there = ROOM_OF.get(other)
        if there is None:
            yield f"line {line}: {other} has no room"
        elif there is not room and there.row >= room.row:
            yield f"line {line}: {module} (row {room.row}) imports {other} (row {there.row})"


def imported_names(tree: ast.AST, *, package: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import, wherever it stands, literal ones by name too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def _is_import_call(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in ("import_module", "__import__")


def _within(name: str, banned: str) -> bool:
    return name == banned or name.startswith(banned + ".")


def _own_module(name: str) -> str | None:
    """The part of raymod that an import reaches, or None for somebody else's."""
    first, _, rest = name.partition(".")
    if first != "raymod":
        return None
    module = rest.partition(".")[0]
    if module == "__version__":  # plain data, and the package is loaded before any part of it
        return None
    # `from raymod import wrap` reaches a public name, `from raymod import gang` a module
    return module if module and (module in ROOM_OF or _is_part(module)) else "__init__"


def _is_part(module: str) -> bool:
    return (PACKAGE / f"{module}.py").is_file() or (PACKAGE / module).is_dir()
