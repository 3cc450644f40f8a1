"""The shapes in the core's signatures are checked at run time, in tests only; every test starts from one seed."""

import pytest
import torch
from jaxtyping import config, install_import_hook

# Not the rooms that users call: those answer bad input themselves, in words that the tests pin.
CORE = ("woodbury", "products", "precision", "dual", "primal", "reference")
install_import_hook([f"mfac.{name}" for name in CORE], "beartype.beartype")

CHECKED = set()  # the first case of every test, and one of five besides: the checks take longer than small products


@pytest.fixture(autouse=True)
def _start(request):
    torch.manual_seed(0)
    config.update("jaxtyping_disable", request.node.nodeid not in CHECKED)


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory):
    """Four processes in one group, for whatever runs on several ranks."""
    from rank_pool import RankPool

    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


SLOW = {"test_distributed_examples", "test_experiment_recipes", "test_pruning_callbacks"}


def pytest_collection_modifyitems(items):
    """Marks by file and fixture: `ranks`, `browser` and `slow`; and the tests in which shapes are checked."""
    first = {(item.path, getattr(item, "originalname", item.name)): item for item in reversed(items)}
    CHECKED.update(item.nodeid for item in [*first.values(), *items[::5]])
    for item in items:
        if "distributed" in item.path.parts or "rank_pool" in item.fixturenames:
            item.add_marker(pytest.mark.ranks)
        if item.path.stem == "test_report_browser":
            item.add_marker(pytest.mark.browser)
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
