"""Runs the README's code with the installed package, and imports what an extra is for: `python installed.py EXTRA`."""

import importlib
import re
import sys
from pathlib import Path

import mfac

NEEDED = {
    "progress": "rich.progress",
    "cli": "mfac.app.cli.commands",
    "demo": "mfac.app.tasks.digits",
    "masks": "safetensors.torch",
    "scipy": "scipy.sparse.linalg",
    "transformers": "mfac.integrations.transformers",
    "lightning": "mfac.integrations.lightning",
    "attribution": "dattri.algorithm",
    "bench": "pytorch_optimizer",
    "experiments": "pooch",
}

if __name__ == "__main__":
    extra = sys.argv[1]
    assert Path(mfac.__file__).is_relative_to(sys.prefix), f"{mfac.__file__} is not the installed package"
    if extra != "alone":
        importlib.import_module(NEEDED[extra])
    names, readme = {"__name__": "README"}, Path(__file__).parents[2] / "README.md"
    for block in re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL):
        exec(compile(block, readme.name, "exec"), names)
    sys.stdout.write(f"torch-mfac {mfac.__version__}, {extra}: the code of the README runs\n")
