"""Lines by folder into the size table of CHANGELOG.md: `python benchmarks/size_table.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {".py", ".c", ".html", ".css"}


def size(folder, *without):
    """Lines and files of the sources below a folder, without those in some other folders."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    counted = [path for path in files if not any((ROOT / other) in path.parents for other in without)]
    return f"{sum(path.read_text().count(chr(10)) for path in counted):,} in {len(counted)} files"


def main():
    parts = [f"src/mfac/{name}" for name in ("windows", "gradients", "pruning", "distributed", "integrations")]
    sizes = {
        "`src/mfac`: operators, optimizer, layout": size("src/mfac", *parts, "src/mfac/app"),
        **{f"`{part}`": size(part) for part in parts},
        "**the library**": f"**{size('src/mfac', 'src/mfac/app')}**",
        "`src/mfac/app` ": size("src/mfac/app"),
        **{f"`{name}`": size(name) for name in ("tests", "experiments", "benchmarks")},
    }
    page = ROOT / "CHANGELOG.md"
    text = page.read_text()
    for row, after in sizes.items():
        text, found = re.subn(rf"(?m)^(\| {re.escape(row)}[^|]*\|[^|]*\|)[^|]*\|$", rf"\1 {after} |", text)
        assert found == 1, f"{page} has no row of {row}"
        print(row, after)
    page.write_text(text)


if __name__ == "__main__":
    main()
