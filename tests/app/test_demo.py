"""The demo, shorter than it is: both runs, the tables, the picture and the page."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mfac.app import demo
from mfac.app.cli.app import app


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(demo, "PRUNING", replace(demo.PRUNING, sparsities=(0.5, 0.9), recomputations=2))
    monkeypatch.setattr(demo, "TRAINING", replace(demo.TRAINING, seeds=(1, 2), epochs=1))


def test_the_demo_ends_with_tables_a_picture_and_a_page(short, tmp_path):
    for _ in range(2):  # a second time it starts over
        result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
        assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith(("magnitude", "mfac")) for line in lines) == 2 * 2 + 2
    assert lines[-1] == f"The page: {(tmp_path / 'demo' / 'report.html').resolve()}"
    page = (tmp_path / "demo" / "report.html").read_text()
    assert all(name in page for name in ("Pruning of digits", "Training of digits", "magnitude", "adam"))
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000


def test_at_nine_tenths_surgery_beats_magnitude(short, tmp_path):
    pruned, _ = demo.run(tmp_path)
    accuracy = {(cell["method"], cell["asked"]): cell["measure"] for cell in pruned["cells"]}
    assert accuracy["mfac", 0.9] > accuracy["magnitude", 0.9] + 0.1
