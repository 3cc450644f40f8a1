"""An example of a framework on one of several processes: `torchrun ... framework_ranks.py name folder [options]`."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def main(name, folder, *options):
    torch.set_num_threads(1)
    example = __import__(name)
    built = []
    build = example.MFAC.__init__

    def remember(self, *arguments, **settings):
        build(self, *arguments, **settings)
        built.append(self)

    example.MFAC.__init__ = remember
    model, losses = example.main([*options, "--folder", folder])[:2]
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    rows = built[0]._window.operator.rows.shape
    torch.save({"weights": weights, "losses": losses, "rows": tuple(rows)}, f"{folder}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
