"""The code of the README and of the guides runs as it stands, top to bottom; commands and links exist."""

import importlib.util
import re
from pathlib import Path

import pytest
from cli_cases import mfac as command
from installed import NEEDED
from states import same

import mfac

ROOT = Path(__file__).parent.parent
FRAGMENTS = {"training_frameworks.md"}  # a few lines for each framework; examples/ has them whole, and tested
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))
# What some pages have computed in the end.
ENDS = {
    "README.md": lambda names: (
        (names["grads"].shape[0], names["rows"].shape[0], round(names["result"].sparsity, 3)) == (64, 500, 0.8)
    ),
    "gradual.md": lambda names: (
        names["pruner"].next_sparsity is None and names["state"]["pruner"]["steps_done"] == len(names["schedule"]) == 4
    ),
    "masks.md": lambda names: same(mfac.load_masks(names["model"]), names["masks"]),
}
GUIDES = [page for page in PAGES if "```python" in page.read_text() and page.name not in FRAGMENTS]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_code_of_every_page_runs_in_order(page, tmp_path, monkeypatch, capsys):
    def run(arguments, check):
        assert arguments[1:3] == ["-m", "mfac"]
        assert command(*arguments[3:]).exit_code == 0

    monkeypatch.setattr("subprocess.run", run)  # commands in this process, which has imported torch
    monkeypatch.chdir(tmp_path)  # for what a guide writes
    names = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert page.name not in ENDS or ENDS[page.name](names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_verb_and_every_link_exists(page):
    text = page.read_text()
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Commands, in code: indented or between backticks.
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= verbs
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"^2\. ", page.read_text(), re.MULTILINE)])
def test_lists_count_as_they_are_written(page):
    markdown, text = pytest.importorskip("markdown"), page.read_text()
    lists = re.findall(r"<ol>(.*?)</ol>", markdown.markdown(text, extensions=["tables"]), re.DOTALL)
    shown = [str(number + 1) for items in lists for number in range(items.count("<li>"))]
    assert shown == re.findall(r"^(\d+)\. ", text, re.MULTILINE)


def test_make_dist_tries_every_extra_with_a_module_that_exists():
    extras = re.search(r"^EXTRAS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert set(extras.split()) == set(NEEDED)
    for module in NEEDED.values():
        assert not module.startswith("mfac.") or importlib.util.find_spec(module), f"{module} is not there"
