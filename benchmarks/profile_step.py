"""Where the time of `update_and_apply` goes: passes over the window, m x m algebra, Python and calls.

    python benchmarks/profile_step.py

Clocks are around the methods of the rows (passes) and of the m x m inverse (algebra). What a step takes where there
is nothing to compute, with 4 gradients of 16 weights, is Python and the calls of torch, and is taken off the two. The
rest is vectors: the norm of the gradient, its copies. The best of many steps counts.
"""

import math
import time
from collections import Counter
from itertools import count

import torch

import mfac
from timing import save, seconds

DAMPING = 1e-3  # where independent rows of norm 1 leave everything in float32
SIZES = [(10_000, 64), (10_000, 1024), (100_000, 64), (100_000, 512), (270_000, 512), (1_000_000, 64), (1_000_000, 256)]
PARTS = ("passes", "algebra", "Python and calls", "vectors")
NOTHING = (16, 4)


class Clock:
    """Time spent inside some methods of an object; of a method that calls another, the outer one counts."""

    def __init__(self):
        self.spent, self._inside = Counter(), False

    def watch(self, thing, part, names):
        for name in names:
            setattr(thing, name, self._timed(getattr(thing, name), part))

    def _timed(self, method, part):
        def timed(*arguments, **keywords):
            if self._inside:
                return method(*arguments, **keywords)
            self._inside, began = True, time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.spent[part] += time.perf_counter() - began
                self._inside = False

        return timed


def filled(d, m):
    """A full window of independent rows, given at once: filling it row by row would be m passes."""
    op = mfac.DynamicInverseFisher(m, d, DAMPING)
    state = op.state_dict()
    G = state["rows"]  # the window's own memory
    G.copy_(torch.randn(d + m, generator=torch.Generator().manual_seed(0)).as_strided((m, d), (1, 1)) / d**0.5)
    op.load_state_dict(state | {"gram": (G.double() @ G.double().T), "updates": m, "num_seen": m})
    return op, G


def step_times(d, m):
    """The whole of the best step, and its parts."""
    op, G = filled(d, m)
    clock, turn = Clock(), count()
    clock.watch(op._rows, "passes", ("project", "combine"))
    public = [name for name in dir(op._inverse) if not name.startswith("_")]
    clock.watch(op._inverse, "algebra", [name for name in public if callable(getattr(op._inverse, name))])
    best = {"whole": math.inf}
    until, rounds = time.perf_counter() + 1.0, 0
    while rounds < 12 or time.perf_counter() < until:
        g = G[next(turn) % m].clone()
        clock.spent.clear()
        began = time.perf_counter()
        op.update_and_apply(g)
        whole = time.perf_counter() - began
        rounds += 1
        if rounds > 2 and whole < best["whole"]:  # the first one makes the inverse
            best = {"whole": whole, **clock.spent}
    assert not op._sensitive, "float64 passes would be another profile"
    return best


def bare_passes(d, m):
    """What the passes would take alone: G g and c G."""
    G, g, c = torch.ones(m, d), torch.ones(d), torch.ones(m)
    return seconds(bare=lambda: (G @ g, c @ G))["bare"]


def profile(d, m, nothing):
    times = step_times(d, m)
    passes = max(0.0, times["passes"] - nothing["passes"])
    algebra = max(0.0, times["algebra"] - nothing["algebra"])
    vectors = max(0.0, times["whole"] - passes - algebra - nothing["whole"])
    figures = dict(zip(PARTS, (passes, algebra, nothing["whole"], vectors), strict=True))
    return {"d": d, "m": m, "whole_s": times["whole"], "bare_passes_s": bare_passes(d, m), "parts_s": figures}


def main():
    nothing = step_times(*NOTHING)
    save("profile_step", "python benchmarks/profile_step.py", (profile(d, m, nothing) for d, m in SIZES))


if __name__ == "__main__":
    main()
