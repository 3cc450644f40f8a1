"""The shape of the code, as rules: layers, walks, sizes, what is public, what the package never does."""

import ast
import re
import sys
from pathlib import Path

import pytest
from cli_cases import QUICK
from models import mlp
from typer.testing import CliRunner

import mfac
from mfac.app.cli.commands import app

ROOT = Path(mfac.__file__).parent
DOCS = ROOT.parents[1] / "docs" / "architecture.md"
# A module imports from its own layer and from those above it; docs/architecture.md has the same table.
LAYERS = {
    "algebra": ["woodbury", "products", "precision", "reference", "memory"],
    "rows": ["layout", "pages", "fisher_blocks", "gradient_file", "saved", "windows"],
    "operators and gradients": ["inverse_fisher", "dual", "primal", "static", "sliding", "dynamic", "influence",
                                "gradients", "distributed.groups", "distributed.shares", "distributed.exchange"],
    "training and pruning": ["columns", "parameter_groups", "parameter_window", "optimizer", "full_matrix_adam",
                             "preconditioner", "pruning", "distributed"],
    "integrations": ["integrations"],
    "application": ["app", "__main__"],
}  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(LAYERS.values()) for room in rooms}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(module):
    parts = module.removesuffix(".__init__").split(".")
    return next((RANK[".".join(parts[:n])] for n in (2, 1) if ".".join(parts[:n]) in RANK), None)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(path):
    """The modules of the package that a module imports, at its top or inside functions."""
    for name in imports(path):
        if name.startswith("mfac."):
            parts = name.removeprefix("mfac.").split(".")
            known = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            yield from (
                [n for n in known if n in MODULES] or [f"{n}.__init__" for n in known if f"{n}.__init__" in MODULES]
            )[:1]


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_imports_go_one_way(module):
    assert layer_of(module) is not None, f"give {module} a place in LAYERS"
    for other in modules_imported(MODULES[module]):
        assert layer_of(other) <= layer_of(module), f"{module} imports {other}"


def test_the_documented_layers_are_these():
    table = re.findall(r"^\| (\w[\w ]*) \| (`.*`)", DOCS.read_text(), re.MULTILINE)
    assert {name: re.findall(r"`([\w.]+)`", rooms) for name, rooms in table} == LAYERS


@pytest.mark.parametrize("room", LAYERS["algebra"])
def test_the_algebra_imports_torch_only(room):
    outside = {name.split(".")[0] for name in imports(ROOT / f"{room}.py")}
    assert outside <= {"torch", "jaxtyping", "mfac", *sys.stdlib_module_names}


def test_importing_mfac_imports_nothing_heavy():
    heavy = {"sklearn", "matplotlib", "rich", "transformers", "lightning", "pandas", "scipy", "typer", "safetensors"}
    for module, path in MODULES.items():
        if module.split(".")[0] not in ("app", "integrations"):
            top = ast.parse(path.read_text()).body
            names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
            names |= {node.module.split(".")[0] for node in top if isinstance(node, ast.ImportFrom) and node.module}
            assert not names & heavy, path


PRIVATE = re.compile(r"torch\._C\b|_execution_engine|\._saved_|_functorch|_global_backward|_global_forward")


@pytest.mark.parametrize("module", MODULES)
def test_no_print_no_logging_set_up_no_global_torch_flag_nothing_private_no_module_too_large(module):
    forbidden = {"torch.set_default_dtype", "torch.set_num_threads", "torch.set_float32_matmul_precision",
                 "torch.use_deterministic_algorithms", "torch.manual_seed", "logging.basicConfig", "print"}  # fmt: skip
    text = MODULES[module].read_text()
    used = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    if module == "gradients.model_state":  # which restores the random states it has set
        forbidden.remove("torch.manual_seed")
    assert module.startswith("app") or not used & forbidden
    assert not any(name.startswith("torch.backends") for name in used)
    assert not PRIVATE.search(text)
    assert MODULES[module].stem not in ("utils", "util", "common", "helpers", "misc", "types")
    assert len(text.splitlines()) <= 400, "is there a noun hiding in it?"


def test_no_two_public_classes_share_a_name():
    owners = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in owners.items() if len(modules) > 1}
    # One callback for each framework, under the same name on purpose.
    assert twice == {"PruningCallback": ["integrations.lightning", "integrations.transformers"]}


def test_public_names_are_all_there_documented_and_in_the_reference():
    reference = (DOCS.parent / "api.md").read_text()
    for name in mfac.__all__:
        assert getattr(mfac, name).__doc__
        assert f"::: mfac.{name}\n" in reference


# Walks: the files in which a function runs during a call are those that docs/architecture.md lists, in any order.


def to_the_diagonal():
    case = mlp(128)
    rows = mfac.collect_gradients(case.model, case.loss_fn, case.batches(8), 16)
    mfac.StaticInverseFisher(rows, 1e-3).diagonal()


def to_a_step():
    case = mlp(80)
    optimizer = mfac.MFAC(case.model.parameters(), num_grads=8)
    for batch in case.batches(8):
        optimizer.zero_grad()
        case.loss_fn(case.model, batch).backward()
        optimizer.step()


def to_a_pruned_model():
    case = mlp(320)
    mfac.prune(case.model, case.loss_fn, case.batches(8), 0.5)


WALKS = {"diagonal": (to_the_diagonal, 12), "step": (to_a_step, 14), "prune": (to_a_pruned_model, 21)}


def files_visited(call):
    seen = set()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            seen.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def documented_walk(name):
    section = re.search(rf"<!-- walk: {name} -->\n(.*?)\n\n", DOCS.read_text(), re.DOTALL)[1]
    return set(re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE))


@pytest.mark.parametrize("name", WALKS)
def test_the_documented_walk_is_the_one_taken(name):
    call, most = WALKS[name]
    visited = files_visited(call)
    assert visited == documented_walk(name)
    assert len(visited) <= most


def test_the_documented_walk_through_the_application_is_the_one_taken(tmp_path):
    options = ["--out", str(tmp_path / "run"), "--sparsity", "0.5", *QUICK]
    visited = files_visited(lambda: CliRunner().invoke(app, ["prune", "digits", *options], catch_exceptions=False))
    assert {file for file in visited if file.startswith("app/")} == documented_walk("command")
