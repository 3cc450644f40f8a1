"""The page in a real browser: laid out, nothing too wide, nothing cut off, nothing on the console."""

import html
import json
import re
import shutil
import subprocess
from functools import cache

import pytest
import report_cases as cases

from mfac.app.report import render_page, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
PREFERRED = {"dark": 0, "light": 1}
PHONE, DESKTOP = 360, 1280
PAGES = {
    "pruning": [cases.pruning()],
    "gradual": [cases.gradual()],
    "training": [cases.training()],
    "twenty": [cases.twenty_methods()],
    "nasty": [cases.nasty()],
    "holes": [cases.holes(), cases.pruning("Another")],
}
# A page may not run scripts, so a second page looks at it through frames of the two widths.
LOOK = """
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const drawings = [...page.querySelectorAll("figure > svg")];
  const cut = drawings.flatMap(drawing => {
    const box = drawing.getBoundingClientRect();
    return [...drawing.querySelectorAll("text")].filter(text => {
      const at = text.getBoundingClientRect();
      return at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1;
    }).map(text => drawing.querySelector("title").textContent + ": " + text.textContent);
  });
  const overlapping = drawings.flatMap(drawing => {
    const boxes = [...drawing.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1;
    const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5;
    return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([_, b]) => across(a, b) && down(a, b)).map(
      ([other, _]) => drawing.querySelector("title").textContent + ": " + one + " / " + other));
  });
  const sizes = drawings.map(drawing => drawing.getBoundingClientRect()).map(box => [box.width, box.height]);
  const strokes = [...page.querySelectorAll("path.line")].map(line => getComputedStyle(line).stroke);
  return {
    width: root.clientWidth, overflow: root.scrollWidth - root.clientWidth, sizes, cut, overlapping,
    strokes: [...new Set(strokes)], ground: getComputedStyle(page.body).backgroundColor,
    dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
    sections: [...page.querySelectorAll("section")].map(section => section.getBoundingClientRect().height),
  };
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(look);
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(found);
  document.body.replaceChildren(answer);
});
"""


def browse(path, folder, *options):
    """What the browser prints: the document after loading, and the lines of its console."""
    command = [BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *options]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, re.findall(r".*:CONSOLE[:(]\d+.*", done.stderr)


@cache
def text_of(name):
    return render_page(PAGES[name])


def looked_at(tmp_path, names, scheme):
    """Pages in frames of both widths: {name: {width: what was seen}}."""
    frames = [
        f'<iframe width="{width}" height="800" style="border: 0" srcdoc="{html.escape(text_of(name))}"></iframe>'
        for name in names
        for width in (PHONE, DESKTOP)
    ]
    path = tmp_path / "look.html"
    head = '<!DOCTYPE html><meta charset="utf-8"><title>look</title>'  # without it the browser guesses
    path.write_text(f"{head}<script>{LOOK}</script>{''.join(frames)}", encoding="utf-8")
    preferred = f"--blink-settings=preferredColorScheme={PREFERRED[scheme]}"
    document, console = browse(path, tmp_path, preferred, "--dump-dom", f"--window-size={DESKTOP},900")
    assert console == []
    answer = re.search(r'<pre id="answer">(.*?)</pre>', document, re.S)
    seen = iter(json.loads(html.unescape(answer.group(1))))
    return {name: {width: next(seen) for width in (PHONE, DESKTOP)} for name in names}


@pytest.mark.parametrize(("scheme", "names"), [("light", tuple(PAGES)), ("dark", ("pruning", "training"))])
def test_the_page_is_laid_out_on_phones_and_desktops(tmp_path, scheme, names):
    for name, by_width in looked_at(tmp_path, names, scheme).items():
        for width, seen in by_width.items():
            where = f"{name} at {width} pixels"
            assert seen["width"] == width, where
            assert seen["overflow"] == 0, where
            assert seen["sizes"], where
            assert all(size[0] > 250 and size[1] > 60 for size in seen["sizes"]), where
            assert seen["cut"] == [], where
            assert seen["overlapping"] == [], where
            assert all(height > 20 for height in seen["sections"]), where
            assert seen["dark"] == (scheme == "dark")
            light = sum(map(int, re.findall(r"\d+", seen["ground"])[:3])) > 384
            assert light == (scheme == "light"), where
            assert "rgb(0, 0, 0)" not in seen["strokes"], "a colour that no variable gives"
            assert seen["strokes"], where


def test_the_page_opens_from_the_disk_in_full_and_without_a_word_on_the_console(tmp_path):
    path = tmp_path / "report.html"
    runs = [cases.pruning("A"), cases.gradual(), cases.training()]
    write_page(runs, path)
    document, console = browse(path, tmp_path, "--dump-dom")
    assert console == []
    document, written = html.unescape(document), html.unescape(path.read_text(encoding="utf-8"))
    for pattern in (
        r'<section id="([^"]+)"',
        r'<figure id="([^"]+)"',
        r"<h\d>(.*?)</h\d>",
        r"<t[dh][^>]*>(.*?)</t[dh]>",
    ):
        assert re.findall(pattern, document) == re.findall(pattern, written)
        assert re.findall(pattern, document)


def test_words_on_the_console_would_have_been_seen(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_page([cases.pruning()]).replace("</body>", "<script>1</script></body>"), encoding="utf-8")
    _, console = browse(path, tmp_path, "--dump-dom")
    assert len(console) == 1
    assert "Content Security Policy" in console[0]


def test_tables_are_open_on_paper(tmp_path):
    """More sheets than without the rule that opens them."""
    text = render_page([cases.pruning(labels=("mfac",))])
    sheets = []
    for content in (text, text.replace("details::details-content", "details::nothing")):
        (tmp_path / "report.html").write_text(content, encoding="utf-8")
        pdf = tmp_path / "report.pdf"
        browse(tmp_path / "report.html", tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
        sheets.append(len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())))
    assert sheets[0] >= sheets[1] + 2
