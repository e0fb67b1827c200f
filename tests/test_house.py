"""The plan of the house: what may import what, in one direction, in sight; and where torch's private names stand."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from fsdp_compile.passes.source import source_hash

ROOT = Path(__file__).parent.parent

# From the ground up. A room imports from floors below its own, and from itself; rooms of one floor know nothing of one
# another.
FLOORS = [
    {"passes._torch_compat", "passes.source"},
    {"passes.wire"},
    {"passes.ir"},
    {"passes.schedule", "passes.ranks"},
    {"passes.cost"},
    {"passes.apply"},
    {"passes.budget"},
    {"passes.manager"},
    {"passes", "page", "workers"},
    {"_torch_compat"},
    {"core"},
    {"graph", "eager", "lookout", "optim"},
    {"api"},
    {"tools", "fsdp1", "hugging_face"},
    {"profiling"},
    {"adoption"},
    {"demo", "run", "started", "forecast"},
    {"cli"},
]


def modules() -> dict[str, Path]:
    """The package's modules by their name below ``fsdp_compile``; ``passes`` is installed as one of them."""
    found = {}
    for folder, prefix in ((ROOT / "fsdp_compile", ()), (ROOT / "passes", ("passes",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(name: str, node: ast.AST) -> list[str]:
    """The package's own modules that an import statement names."""
    if isinstance(node, ast.Import):
        named = [one.name.removeprefix("fsdp_compile.") for one in node.names if one.name.startswith("fsdp_compile")]
        return [one for one in named if one in MODULES]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level == 0:
        if not (node.module or "").startswith("fsdp_compile"):
            return []
        base = (node.module or "").removeprefix("fsdp_compile").lstrip(".")
    else:
        inside = name.split(".") if name else []
        if MODULES[name].name != "__init__.py":
            inside = inside[:-1]
        base = ".".join([*inside[: len(inside) - node.level + 1], *filter(None, [node.module])])
    submodules = [f"{base}.{one.name}".lstrip(".") for one in node.names]
    return [one if one in MODULES else base for one in submodules]


def arrows() -> Iterator[tuple[str, str]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            for target in imports_of(name, node):
                if target != name:
                    yield name, target


def room_of(name: str) -> str:
    """The folder of a module; ``passes`` is a house of its own, and its name alone the module that gathers the others."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "passes" else 1])


def floor_of(name: str) -> int:
    room = room_of(name)
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), len(FLOORS))


def test_every_module_has_a_room_and_arrows_run_down() -> None:
    assert {room_of(name) for name in MODULES if name} == set().union(*FLOORS)

    def runs_down(name: str, target: str) -> bool:
        if room_of(name) == room_of(target):
            return True
        # The command line says the version, which stands above.
        return floor_of(target) < floor_of(name) or (name, target) == ("cli", "")

    assert [f"{name} imports {target}" for name, target in arrows() if not runs_down(name, target)] == []


def test_there_is_no_circle() -> None:
    targets: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, target in arrows():
        if name != "passes" and target != "":  # passes/__init__ gathers names for others
            targets[name].add(target)
    TopologicalSorter(targets).prepare()  # raises CycleError, which names the circle


def test_imports_are_in_sight() -> None:
    """Of ours: none stands in a function or under TYPE_CHECKING, where it would hide an arrow."""
    hidden = []
    for name, tree in TREES.items():
        in_sight = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if imports_of(name, node) and id(node) not in in_sight:
                hidden.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert hidden == []


def test_a_name_has_one_meaning() -> None:
    """No two modules define a class, or a function for others, of one name; what a command calls is main or work."""
    defined: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body:
            is_ours = isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and node.name[0] != "_")
            if is_ours and node.name not in ("main", "work"):
                defined.setdefault(node.name, []).append(name)
    assert {one: modules for one, modules in defined.items() if len(modules) > 1} == {}


# Private by their look alone: documented, or the only way to a module's own dicts.
FOREIGN = {
    "_parameters", "_buffers", "_modules", "_call_impl", "_flat_weights_names",  # of nn.Module and nn.RNNBase, 2.11 to 2.15
    "_c10d_functional", "_to_copy", "_unsafe_view",  # operators
    "_exit", "_run_exitfuncs", "_getframe",  # of Python
    "_fields", "_make", "_replace",  # of named tuples
    "_fsdp_compile_original",  # ours, on generated classes
}  # fmt: skip


def test_private_names_of_torch_stand_with_their_versions() -> None:
    """Every attribute that begins with an underscore is defined by us, or stands in a ``_torch_compat``."""
    ours = set(FOREIGN)
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
            elif isinstance(node, (ast.AnnAssign, ast.Assign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        ours.add(target.id)
    found = []
    for name, tree in TREES.items():
        if "_torch_compat" in name:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if node.attr not in ours:
                    found.append(f"{name}:{node.lineno} {node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                parts = [*(node.module or "").split("."), *(one.name for one in node.names)]
                if any(part.startswith("_") and not part.startswith("__") for part in parts):
                    found.append(f"{name}:{node.lineno} from {node.module}")
    assert found == []


def test_the_hash_in_cache_keys_covers_every_folder_of_the_passes(tmp_path: Path) -> None:
    copied = tmp_path / "passes"
    shutil.copytree(ROOT / "passes", copied, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.spec_from_file_location("source_of_a_copy", copied / "source.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {module.source_hash(), source_hash()}
    assert len(found) == 1
    for path in sorted(copied.rglob("*.py")):
        path.write_text(path.read_text() + "# another line\n")
        module.source_hash.cache_clear()
        assert module.source_hash() not in found, path
        found.add(module.source_hash())
