"""Downloads public data sets: `python -m experiments.datasets NAME...`; without a name, lists them."""

import sys

from experiments.datasets.fetching import fetch, registry

if len(sys.argv) == 1:
    print("\n".join(registry()))
for name in sys.argv[1:]:
    print(*fetch(name), sep="\n")
