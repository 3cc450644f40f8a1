"""F⁻¹ by itself, in front of other optimizers: SGD with momentum, Adam and Muon from torch.optim.

    python examples/precondition.py
    python examples/precondition.py --scales 0.1 0.3 1 3 10    # each with the best of five learning rates

MFACPreconditioner replaces every .grad by its part of F⁻¹g; the optimizer behind it does not know. What it does with
that is its own affair: SGD takes it as it is, so preconditioner and SGD are M-FAC with SGD's momentum, and
Adam divides it by its own running scale, coordinate by coordinate; Muon makes each matrix orthogonal.
"""

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from digits import EpochOrder, accuracy, build_model, load_data
from mfac import MFACPreconditioner


def optimizers(name, model, scale):
    """The optimizers of a run: Muon takes matrices only, so the biases have an Adam beside it."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    if name == "Muon":
        return [
            torch.optim.Muon(matrices, lr=scale * 0.02, weight_decay=0.0),
            torch.optim.Adam(vectors, lr=scale * 0.01),
        ]
    if name == "Adam":
        return [torch.optim.Adam(model.parameters(), lr=scale * 0.01)]
    return [torch.optim.SGD(model.parameters(), lr=scale * 0.1, momentum=0.9)]


def train(name, preconditioned, epochs, scale=1.0):
    data, test = load_data()
    order = EpochOrder(data)
    loader = DataLoader(data, batch_size=64, sampler=order)
    model = build_model()
    behind = optimizers(name, model, scale)
    preconditioner = MFACPreconditioner(model.parameters(), num_grads=64, damping=0.1, normalize="sum")
    losses = []
    for epoch in range(epochs):
        order.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            model.zero_grad()
            loss.backward()
            if preconditioned:
                preconditioner.step()
            for optimizer in behind:
                optimizer.step()
            losses.append(loss.item())
    return losses, accuracy(model, test)


def main(argv=None):
    parser = argparse.ArgumentParser(description="MFACPreconditioner in front of other optimizers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="factors of the learning rates to try")
    args = parser.parse_args(argv)
    results = {}
    for name in ("SGD", "Adam", "Muon"):
        for preconditioned in (False, True):
            runs = {scale: train(name, preconditioned, args.epochs, scale) for scale in args.scales}
            last = {scale: sum(losses[-23:]) / 23 for scale, (losses, _) in runs.items()}
            best = min(last, key=last.get)  # by the training loss: the test images choose nothing
            losses, right = runs[best]
            results[name, preconditioned] = losses[0], last[best], right
            label = f"F⁻¹ and {name}" if preconditioned else name
            print(f"{label:12} loss {losses[0]:.3f} -> {last[best]:.4f} (mean of the last epoch), ", end="")
            print(f"accuracy {right:.1f} %, learning rate x {best:g}")
    return results


if __name__ == "__main__":
    main()
