"""A page of HTML taken apart, and pages of the cases."""

from functools import cache
from html.parser import HTMLParser

import report_cases as cases

from mfac.app.report import render_page


class Page(HTMLParser):
    """A page taken apart: its elements in order, with the text inside each."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.parts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", "inside": [one["tag"] for one in self.open], **dict(attrs)}
        self.elements.append(element)
        if tag not in ("meta", "link"):
            self.open.append(element | {"first": len(self.parts), "element": element})

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        closed = self.open.pop()
        assert closed["tag"] == tag
        closed["element"]["text"] = "".join(self.parts[closed["first"] :])

    def handle_data(self, data):
        self.parts.append(data)

    def find(self, tag, **attributes):
        return [
            one for one in self.elements if one["tag"] == tag and all(one.get(k) == v for k, v in attributes.items())
        ]

    def ids(self):
        return [element["id"] for element in self.elements if "id" in element]

    def figure(self, ident):
        (figure,) = self.find("figure", id=ident)
        start = self.elements.index(figure)
        following = [i for i, one in enumerate(self.elements) if i > start and one["tag"] in ("figure", "section")]
        return self.elements[start : following[0] if following else None]

    def rows(self):
        """Every row of every table, as lists of texts."""
        rows, current = [], []
        for element in self.elements:
            if element["tag"] == "tr":
                rows.append(current := [])
            elif element["tag"] in ("td", "th"):
                current.append(element["text"])
        return rows


def names_of_axes(part):
    return [element["text"] for element in part if element["tag"] == "text" and element.get("class") == "name"]


ALL = {
    "pruning": [cases.pruning()],
    "gradual": [cases.gradual()],
    "training": [cases.training()],
    "merged": [cases.pruning("A"), cases.pruning("B"), cases.training(seeds=1)],
    "twenty": [cases.twenty_methods()],
    "nasty": [cases.nasty()],
    "holes": [cases.holes()],
    "empty": [cases.pruning(cells=[], finished=None)],
}


@cache
def text_of(name):
    return render_page(ALL[name])


@cache
def page(name):
    return Page(text_of(name))


def page_of(*runs, title=None):
    return Page(render_page(list(runs), title))
