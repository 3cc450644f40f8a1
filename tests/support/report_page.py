"""A page of HTML taken apart, and pages of the cases."""

import re
from functools import cache
from html.parser import HTMLParser

import report_cases as cases

from mfac.app.report.page import render_page

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


class Page(HTMLParser):
    """The elements of a page in order, each with its text, and the tags and ids of those around it."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        around = " ".join(f"{one['tag']}#{one.get('id')}" for one in self.open)
        self.elements.append({"tag": tag, "text": "", "around": f"{around} ", **dict(attrs)})
        if tag not in ("meta", "link"):
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag, class_=None):
        return [one for one in self.elements if one["tag"] == tag and class_ in (None, one.get("class"))]

    def texts(self, tag, class_=None):
        return [one["text"].replace("\N{NO-BREAK SPACE}", " ") for one in self.find(tag, class_)]

    def ids(self):
        return [element["id"] for element in self.elements if "id" in element]

    def figure(self, ident):
        return [one for one in self.elements if f"figure#{ident} " in one["around"]]

    def rows(self):
        """Every row of every table, as lists of texts."""
        rows = []
        for element in self.elements:
            if element["tag"] == "tr":
                rows.append([])
            elif element["tag"] in ("td", "th"):
                rows[-1].append(element["text"])
        return rows


def axis_names(part):
    """The names of the x axis and, if it has one, of the y axis."""
    texts = [one for one in part if one["tag"] == "text" and "axis_" in one["around"]]
    return tuple(one["text"] for one in texts if "tick_" not in one["around"])


def legend(part):
    """The labels in a plot's legend with their colours, in order."""
    found, colour = {}, ""
    for one in part:
        if "legend_" in one["around"]:
            colour = "".join(re.findall(r"stroke: (var\(--\w+\))", one.get("style") or "")) or colour
            found |= {one["text"]: colour} if one["tag"] == "text" else {}
    return found


@cache
def text_of(name):
    return render_page(ALL[name])


@cache
def page(name):
    return Page(text_of(name))


def page_of(*runs):
    return Page(render_page(list(runs)))
