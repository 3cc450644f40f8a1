"""What is plotted and tabulated: its name, its unit, and how its values are written."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MISSING = "–"
SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Quantity:
    """A name with a unit; `factor` takes stored values to that unit, `decimals` None writes four digits that count."""

    name: str
    unit: str = ""
    factor: float = 1.0
    decimals: int | None = None

    @property
    def heading(self) -> str:
        """For an axis or a column."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def shown(self, value: float | None) -> float | None:
        """A stored value in the unit of this quantity; None where there is none."""
        return None if value is None or not math.isfinite(value) else value * self.factor

    def text(self, value: float | None) -> str:
        """A value without its unit, as in a column that has the unit in its heading."""
        shown = self.shown(value)
        if shown is None:
            return MISSING
        return significant(shown) if self.decimals is None else f"{shown:,.{self.decimals}f}"

    def full(self, value: float | None) -> str:
        """A value with its unit, as in a sentence."""
        text = self.text(value)
        return text if text == MISSING or not self.unit else f"{text}{SPACE}{self.unit}"


SPARSITY = Quantity("sparsity", "%", 100, 2)
REMOVED = Quantity("sparsity", "% of weights removed", 100)
LOSS = Quantity("loss")
STEP = Quantity("step", decimals=0)


def significant(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, and thousands set apart: 0.07457, 1,235, 2.1e-06."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def measure_quantity(name: str, values: Iterable[float | None]) -> Quantity:
    """An accuracy between 0 and 1 is written in per cent, every other measure as it is."""
    known = [value for value in values if value is not None]
    if "accuracy" in name.lower() and all(0 <= value <= 1 for value in known):
        return Quantity(name, "%", 100, 1)
    return Quantity(name)


def time_quantity(values: Iterable[float | None], name: str = "time") -> Quantity:
    """Seconds, or minutes or hours where the largest value is long."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest >= 3 * 3600:
        return Quantity(name, "h", 1 / 3600)
    return Quantity(name, "min", 1 / 60) if largest >= 300 else Quantity(name, "s")


def size_quantity(values: Iterable[float | None], name: str) -> Quantity:
    """Bytes in the unit that suits the largest value."""
    largest = max((value for value in values if value is not None), default=0.0)
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if largest >= 2**power:
            return Quantity(name, unit, 2.0**-power)
    return Quantity(name, "bytes", decimals=0)


def percent(fraction: float) -> str:
    """A fraction in per cent with no more decimals than it needs: 90 %, 97.5 %."""
    return f"{round(100 * fraction, 2):g}{SPACE}%"


def duration(seconds: float) -> str:
    """A time for people: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.1f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min {rest}{SPACE}s"
    return f"{minutes // 60}{SPACE}h {minutes % 60}{SPACE}min"


def capital(text: str) -> str:
    """A heading's first letter; the others stay as they are, so that AUC stays AUC."""
    return text[:1].upper() + text[1:]
