"""What is plotted and tabulated: its name, its unit, and how its values are written."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MISSING, SPACE = "–", "\N{NO-BREAK SPACE}"
# (unit, the smallest value in base units that is written in it, base units in it)
TIMES = (("h", 3 * 3600.0, 3600.0), ("min", 300.0, 60.0), ("s", 0.0, 1.0))
SIZES = (("GiB", 2.0**30, 2.0**30), ("MiB", 2.0**20, 2.0**20), ("KiB", 0.0, 2.0**10))


@dataclass(frozen=True)
class Quantity:
    """A name and a unit; `factor` converts stored values to the unit; `decimals` None: four significant digits."""

    name: str
    unit: str = ""
    factor: float = 1.0
    decimals: int | None = None

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float | None, unit: bool = False) -> str:
        if value is None or not math.isfinite(value):
            return MISSING
        shown = value * self.factor
        text = f"{shown:#.4g}".rstrip(".") if self.decimals is None else f"{shown:,.{self.decimals}f}"
        return f"{text}{SPACE}{self.unit}" if unit and self.unit else text


LOSS, STEP, SPARSITY = Quantity("loss"), Quantity("step", decimals=0), Quantity("sparsity", "%", 100, 2)


def measure_quantity(name: str, values: Iterable[float | None]) -> Quantity:
    """An accuracy between 0 and 1 is written in per cent, every other measure as it is."""
    share = "accuracy" in name.lower() and all(0 <= value <= 1 for value in values if value is not None)
    return Quantity(name, "%", 100, 1) if share else Quantity(name)


def scaled(name: str, values: Iterable[float | None], units: Sequence[tuple[str, float, float]]) -> Quantity:
    """A time or a size in the unit that suits its largest value."""
    largest = max((value for value in values if value is not None), default=0.0)
    return next(Quantity(name, unit, 1 / size) for unit, least, size in units if largest >= least)


def percent(fraction: float) -> str:
    """A fraction in per cent with no more decimals than it needs: 90 %, 97.5 %."""
    return f"{round(100 * fraction, 2):g}{SPACE}%"


def capital(text: str) -> str:
    """The text with its first letter capitalized; AUC stays AUC."""
    return text[:1].upper() + text[1:]
