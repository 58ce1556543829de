"""The pieces a report's HTML is built from. A page needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

STYLESHEET = """
:root { color-scheme: light; --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --accent: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { margin: 0 0 .4rem; font-size: 1.9rem; line-height: 1.2; }
h2 { margin: 2.6rem 0 .8rem; font-size: 1.25rem; }
p { margin: 0 0 .8rem; max-width: 75ch; }
.muted { color: var(--muted); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.2rem; overflow-x: auto; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.plots figure, .wide { margin: 0; }
img { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; font-size: .875rem; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
tr.trained td { color: #c2410c; font-weight: 600; }
pre { margin: 0; font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 3rem; font-size: .875rem; }
"""


def page(title: str, lead: str, sections: Iterable[str], versions: Mapping[str, str]) -> str:
    """Return a whole page; empty sections are left out."""
    header = f"<h1>{escape(title)}</h1>" + (f'\n<p class="muted">{escape(lead)}</p>' if lead else "")
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    footer = f'<footer class="muted">Made with {escape(listed)}.</footer>' if listed else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, [header, *sections, footer]))
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Return a section, or nothing if it would be empty."""
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], highlighted: Sequence[int] = ()) -> str:
    """Return a table of text; rows whose index is in `highlighted` stand out."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        f"<tr{' class=trained' if index in highlighted else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    body = "\n".join(lines)
    return f'<div class="card"><table>\n<thead><tr>{first}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def plot(title: str, path: Path, wide: bool = False) -> str:
    """Return a PNG file as a figure that holds the file's bytes."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    classes = "card wide" if wide else "card"
    return f'<figure class="{classes}"><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'


def plots(files: Mapping[str, Path]) -> str:
    """Return figures side by side, or nothing if there are none; `files` maps titles to PNG files."""
    return f'<div class="plots">{"".join(plot(*item) for item in files.items())}</div>' if files else ""


def code(text: str) -> str:
    """Return text as it is, in a fixed-width font; nothing for no text."""
    return f'<div class="card"><pre>{escape(text.strip())}</pre></div>' if text else ""


def as_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping as YAML for `code`; nothing for an empty one."""
    return code(yaml.safe_dump(dict(content), sort_keys=False)) if content else ""
