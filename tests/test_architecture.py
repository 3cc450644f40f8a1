"""The shape of the code, as rules: who imports whom, what is public, what the package never does."""

import ast
import sys
from pathlib import Path

import pytest

import mfac

ROOT = Path(mfac.__file__).parent
# Each room may import those of its own row and of the rows above it.
LAYERS = [
    [
        "woodbury",
        "products",
        "reference",
        "memory",
        "gradient_file",
        "layout",
        "progress",
        "precision",
        "fisher_blocks",
        "pages",
    ],
    [
        "sliding",
        "dual",
        "primal",
        "inverse_fisher",
        "windows",
        "static",
        "gradients",
        "dynamic",
        "distributed",
        "columns",
        "parameter_groups",
    ],
    ["parameter_window", "optimizer", "preconditioner", "pruning"],
    ["integrations"],
    ["app"],
    ["__main__"],
]
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
TORCH_ONLY = {"woodbury", "products", "reference", "layout"}
MODULES = sorted(path for path in ROOT.rglob("*.py"))


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path):
    for name in imports(path):
        if name == "mfac" or name.startswith("mfac."):
            yield name.split(".")[1]


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) != "__init__"], ids=str)
def test_imports_go_one_way(path):
    room = room_of(path)
    assert room in RANK, f"give {room} a place in LAYERS"
    for other in rooms_imported(path):
        if other not in (room, "__version__"):
            assert RANK[other] <= RANK[room], f"{room} imports {other}"


@pytest.mark.parametrize("room", sorted(TORCH_ONLY))
def test_the_core_imports_torch_only(room):
    outside = {name.split(".")[0] for name in imports(ROOT / f"{room}.py")}
    assert outside <= {"torch", "jaxtyping", *sys.stdlib_module_names}


def test_importing_mfac_brings_nothing_heavy():
    heavy = {"sklearn", "matplotlib", "rich", "transformers", "lightning", "pandas", "scipy", "typer"}
    for path in MODULES:
        if room_of(path) == "app":
            continue
        top = ast.parse(path.read_text()).body
        names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module.split(".")[0] for node in top if isinstance(node, ast.ImportFrom) and node.module}
        assert not names & heavy, path


def calls(path):
    return [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_print_no_logging_set_up_no_global_torch_flag(path):
    forbidden = {"torch.set_default_dtype", "torch.set_num_threads", "torch.set_float32_matmul_precision",
                 "torch.use_deterministic_algorithms", "torch.manual_seed", "logging.basicConfig"}  # fmt: skip
    used = set(calls(path))
    if "cli" not in path.parts:
        assert "print" not in used
    if room_of(path) != "app":  # programs of their own, which own the random state
        assert not used & forbidden
    assert not any(name.startswith("torch.backends") for name in used)


def test_no_room_without_a_name_and_none_too_large():
    for path in MODULES:
        assert path.stem not in ("utils", "util", "common", "helpers", "misc", "types")
        assert len(path.read_text().splitlines()) <= 400, f"{path.name}: is there a noun hiding in it?"


def test_public_names_are_all_there_and_documented():
    for name in mfac.__all__:
        assert getattr(mfac, name).__doc__
