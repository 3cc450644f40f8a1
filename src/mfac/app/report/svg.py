"""Elements of SVG and HTML as strings in which every text is escaped."""

from markupsafe import Markup, escape

Attribute = str | float | None


def tag(name: str, *children: str, **attributes: Attribute) -> Markup:
    """One element; `class_` and `stroke_width` become `class` and `stroke-width`, None leaves an attribute out."""
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    inside = "".join(escape(child) for child in children)
    ending = f">{inside}</{name}>" if children else "/>"
    return Markup(f"<{name}{''.join(parts)}{ending}")


def picture(ident: str, title: str, description: str, width: float, height: float, *children: str) -> Markup:
    """A whole drawing, which scales with its box and has a name and a description for those who do not see it."""
    opening = Markup('<svg role="img" viewBox="0 0 {} {}" aria-labelledby="{}">')
    names = f"{ident}-title {ident}-desc"
    return Markup("").join(
        [
            opening.format(short(width), short(height), names),
            tag("title", title, id=f"{ident}-title"),
            tag("desc", description, id=f"{ident}-desc"),
            *children,
            Markup("</svg>"),
        ]
    )


def ornament(css_class: str, width: float, height: float, *children: str) -> Markup:
    """A small drawing beside a text that says the same."""
    opening = Markup('<svg viewBox="0 0 {} {}" class="{}" aria-hidden="true">')
    return opening.format(short(width), short(height), css_class) + Markup("").join(children) + Markup("</svg>")


def short(number: float) -> str:
    """A coordinate: a tenth of a unit is finer than any screen."""
    return "0" if abs(number) < 0.05 else f"{number:.1f}".removesuffix(".0")


def path(points: list[tuple[float, float] | None]) -> str:
    """The `d` of a line through points; None is a gap."""
    parts, pen_up = [], True
    for point in points:
        if point is not None:
            parts.append(f"{'M' if pen_up else 'L'}{short(point[0])} {short(point[1])}")
        pen_up = point is None
    return "".join(parts)


def _text(value: str | float) -> str:
    return str(escape(value)) if isinstance(value, str) else short(value)
