"""The demo, shorter than it is: both runs, the tables, the picture and the page."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mfac.app import demo
from mfac.app.cli.commands import app
from mfac.app.runs.format import read_run


@pytest.fixture
def short(monkeypatch):
    options = replace(demo.PRUNING.options, recomputations=2)
    monkeypatch.setattr(demo, "PRUNING", replace(demo.PRUNING, sparsities=(0.9,), options=options))
    monkeypatch.setattr(demo, "TRAINING", replace(demo.TRAINING, seeds=(1,), epochs=1))


def test_the_demo_ends_with_tables_a_picture_and_a_report(short, tmp_path):
    folder = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith(("magnitude", "mfac", "full")) for line in lines) == 2 + 1
    assert lines[-1] == f"Report: {(folder / 'report.html').resolve()}"
    page = (folder / "report.html").read_text()
    assert all(name in page for name in ("Pruning of digits", "Training of digits", "magnitude", "adam"))
    for cell in (cell for kind in ("prune", "train") for cell in read_run(folder / kind)["cells"]):
        kind = "prune" if "method" in cell else "train"
        assert all(f'<a href="{kind}/{file}">{what}</a>' in page for what, file in cell["files"].items())
    assert (folder / "demo.png").stat().st_size > 10_000
    accuracy = {(cell["method"], cell["asked"]): cell["measure"] for cell in read_run(folder / "prune")["cells"]}
    (tmp_path / "demo.png").write_text("mine")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert (refused.exit_code, (tmp_path / "demo.png").read_text()) == (1, "mine")
    assert "is not empty and not the folder of a demo; choose another (--out)" in refused.stderr
    assert accuracy["mfac", 0.9] > accuracy["magnitude", 0.9] + 0.1
