"""Downloads public data sets to the folder MFAC_DATA; without a name, lists them."""

import argparse

from experiments.datasets.fetching import fetch, registry

parser = argparse.ArgumentParser(prog="python -m experiments.datasets", description=__doc__)
parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(registry()))
names = parser.parse_args().names
try:
    print(*([path for name in names for path in fetch(name)] if names else registry()), sep="\n")
except (ValueError, OSError) as error:  # a wrong name or file, no network, no room
    parser.exit(1, f"{parser.prog}: {error}\n")
