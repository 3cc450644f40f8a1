"""The README's code runs as it stands, top to bottom, and its commands are verbs of the Makefile."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["grads"].shape[0] == 64
    assert names["step"].shape == names["x"].shape


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_every_make_verb_and_every_link_exists(page):
    text = page.read_text()
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Commands, in code: indented or between backticks.
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= verbs
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
