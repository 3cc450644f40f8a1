"""The page in a real browser: laid out on phones and desktops, nothing cut off, nothing on the console."""

import html
import json
import re
import shutil
import subprocess

import pytest
from report_page import text_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
PREFERRED = {"dark": 0, "light": 1}
PHONE, DESKTOP = 360, 1280
# The page may not run scripts, so a second page looks at it through frames of both widths.
LOOK = """
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement, wrong = [];
  const drawings = [...page.querySelectorAll("figure svg")];
  for (const drawing of drawings) {
    const outer = drawing.getBoundingClientRect();
    const boxes = [...drawing.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([one, a], i) => {
      if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.top < outer.top - 1 || a.bottom > outer.bottom + 1)
        wrong.push("cut off: " + one);
      for (const [other, b] of boxes.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5) wrong.push(one + " overlaps " + other);
    });
  }
  return {
    wrong, width: root.clientWidth, overflow: root.scrollWidth - root.clientWidth,
    ground: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.querySelector("svg text")).fill,
    small: drawings.filter(drawing => drawing.getBoundingClientRect().width < 250).length,
  };
};
addEventListener("load", () => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
  document.body.replaceChildren(answer);
});
"""


def browse(path, folder, *options):
    """The document after loading, and the lines of the console."""
    command = [BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *options]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, re.findall(r".*:CONSOLE[:(]\d+.*", done.stderr)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_laid_out_on_phones_and_desktops(tmp_path, scheme):
    names = ("gradual", "training", "twenty", "nasty") if scheme == "light" else ("gradual",)
    shown = [(name, width) for name in names for width in (PHONE, DESKTOP)]
    frames = [f'<iframe width="{w}" height="800" srcdoc="{html.escape(text_of(name))}"></iframe>' for name, w in shown]
    head = '<!DOCTYPE html><meta charset="utf-8"><title>look</title><style>iframe { border: 0 }</style>'
    path = tmp_path / "look.html"
    path.write_text(f"{head}<script>{LOOK}</script>{''.join(frames)}", encoding="utf-8")
    preferred = f"--blink-settings=preferredColorScheme={PREFERRED[scheme]}"
    document, console = browse(path, tmp_path, preferred, "--dump-dom", f"--window-size={DESKTOP},900")
    assert console == []
    answers = json.loads(html.unescape(re.search(r'<pre id="answer">(.*?)</pre>', document, re.S).group(1)))
    for (name, width), seen in zip(shown, answers, strict=True):
        ground, ink = (sum(map(int, re.findall(r"\d+", seen.pop(key))[:3])) for key in ("ground", "ink"))
        assert seen == {"wrong": [], "width": width, "overflow": 0, "small": 0}, f"{name} at {width} pixels"
        assert (ground > ink) == (scheme == "light")


def test_tables_are_open_on_paper(tmp_path):
    """More sheets than without the rule that opens them."""
    text = text_of("twenty")
    sheets = []
    for content in (text, text.replace("details::details-content", "details::nothing")):
        (tmp_path / "report.html").write_text(content, encoding="utf-8")
        pdf = tmp_path / "report.pdf"
        browse(tmp_path / "report.html", tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
        sheets.append(len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())))
    assert sheets[0] >= sheets[1] + 1
