"""How a run tells where it is: calls on an object that a display, or nobody, listens to."""

from typing import Protocol


class Watcher(Protocol):
    """Listens to a run; `Silent` does nothing with it."""

    def begin(self, what: str, total: float, unit: str) -> None:
        """A piece of work begins, of `total` units."""

    def at(self, done: float, note: str = "") -> None:
        """So many units are done."""

    def end(self) -> None:
        """The piece of work is over."""

    def say(self, line: str) -> None:
        """Something that people should know."""


class Silent:
    """Nobody listens."""

    def begin(self, what: str, total: float, unit: str) -> None:
        """Nothing."""

    def at(self, done: float, note: str = "") -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""
