"""Numbers for people, and colours that can be told apart."""

import re
from importlib.resources import files

import pytest

from mfac.app.report.quantities import duration, percent, significant
from mfac.app.report.strips import FIRST_DARK, SHADES

SPACE = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.07456, "0.07456"), (0.5, "0.5000"), (97.13, "97.13"), (1234.5, "1,234"), (2.1e-6, "2.100e-06"),
     (-0.25, "-0.2500"), (3e9, "3.000e+09")],
)  # fmt: skip
def test_numbers_have_four_digits(value, text):
    assert significant(value) == text


def test_times_and_percents_are_for_people():
    assert [text.replace(SPACE, " ") for text in map(duration, (4.2, 200, 7500))] == [
        "4.2 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert [percent(value)[:-2] for value in (0.9, 0.975, 0.29, 1)] == ["90", "97.5", "29", "100"]


def test_colours_have_contrast_in_light_and_dark():
    """Text 4.5 to 1 (the names at the ends of lines have the series' colours), by the formula of WCAG 2."""
    style = (files("mfac.app.report") / "style.css").read_text(encoding="utf-8")
    themes = themes_of(style)
    assert len(themes) == 3, "light, dark, print"
    for theme in themes:
        for name in ("ink", "soft", "link", *(f"c{number}" for number in range(8))):
            for ground in ("page", "surface"):
                assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
        assert contrast(theme["warn"], theme["warn-page"]) >= 4.5
    assert themes[0].keys() == themes[1].keys() == themes[2].keys()


def test_figures_on_tiles_have_contrast_on_every_shade():
    style = (files("mfac.app.report") / "style.css").read_text(encoding="utf-8")
    shades = [float(value) for value in re.findall(r"\.h\d \{ fill-opacity: ([\d.]+); \}", style)]
    assert len(shades) == SHADES
    for theme in themes_of(style):
        for level, share in enumerate(shades):
            tile = blend(theme["heat"], theme["surface"], share)
            text = theme["surface"] if level >= FIRST_DARK else theme["ink"]
            assert contrast(tile, text) >= 4.5, (level, theme)


def themes_of(style):
    return [
        dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]


def blend(colour, ground, share):
    parts = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * one + (1 - share) * other):02x}" for one, other in parts)


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
