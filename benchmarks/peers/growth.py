"""How a cost grows: the exponents of d and of m that fit the measured cells best."""

import math

import torch

NOISE = 2e-3  # seconds; below them it is the calls that are measured, not the work


def exponents(points):
    """(α, β) of time ∝ d^α m^β by least squares of the logarithms; None for one that nothing tells.

    Args:
        points: (d, m, seconds), those of noise being left out; m is None where there is none.
    """
    points = [point for point in points if point[2] is not None and point[2] >= NOISE]
    several = [len({point[axis] for point in points}) > 1 for axis in (0, 1)]
    columns = [axis for axis in (0, 1) if several[axis]]
    if not columns or len(points) < len(columns) + 2:
        return None, None
    logs = torch.tensor([[1.0, *(math.log(point[axis]) for axis in columns)] for point in points], dtype=torch.float64)
    times = torch.tensor([math.log(point[2]) for point in points], dtype=torch.float64)
    fitted = torch.linalg.lstsq(logs, times[:, None]).solution[1:, 0].tolist()
    found = dict(zip(columns, fitted, strict=True))
    return found.get(0), found.get(1)
