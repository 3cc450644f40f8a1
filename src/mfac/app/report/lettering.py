"""How wide a text will be, for drawings that cannot ask: a generous guess, for the fonts of all systems."""

from unicodedata import east_asian_width

LARGEST, END = 13.5, 12.0  # units of the drawing: the letters of drawings on a phone, and names at the ends of lines
BOLD = 1.12
NARROW, WIDE = set("iljtfrI.,:;'|!·()[]/ -\N{NO-BREAK SPACE}"), set("mwMW@%…—")


def text_width(text: str, size: float = LARGEST) -> float:
    """The width of a line of text, in the units of `size`."""
    return size * sum(_letter(letter) for letter in text)


def shortened(text: str, longest: int) -> str:
    """Both ends of a name that is too long, which tell it from others; the legend or the table has it in full."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half].rstrip()}…{text[-half:].lstrip()}"


def _letter(letter: str) -> float:
    if letter in NARROW:
        return 0.43
    if letter in WIDE:
        return 1.0
    return 1.05 if east_asian_width(letter) in "WF" else 0.66
