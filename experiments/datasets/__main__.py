"""Downloads public data sets: `python -m experiments.datasets NAME...`; without a name, lists them."""

import sys

from experiments.datasets import CATALOGUE, data_folder, fetch

if len(sys.argv) == 1:
    print("\n".join(f"{name:14} {entry.title}" for name, entry in CATALOGUE.items()))
for name in sys.argv[1:]:
    fetch(name)
    print(f"{name} is in {data_folder()}")
