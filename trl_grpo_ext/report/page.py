"""The report: one HTML file with the plots inside, that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from trl_grpo_ext.report.distributions import before_and_after
from trl_grpo_ext.report.plots import write_plots
from trl_grpo_ext.report.record import RunRecord

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


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write `report.html`, and the plots as PNG files in `plots/`, to `folder`; return the path of the page.

    Other files in the folder are left alone. Raises `MissingMatplotlibError` if matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(record, folder / "plots")
    path = folder / "report.html"
    path.write_text(render(record, plots), encoding="utf-8")
    return path


def render(record: RunRecord, plots: Mapping[str, Path]) -> str:
    """Return the page as text; `plots` are embedded: title -> PNG file."""
    curves = {title: path for title, path in plots.items() if path.stem != "advantages"}
    sections = [
        _header(record),
        _section(
            "Results", _table(["", "before", "after", "change"], _summary_cells(record)) if record.summary else ""
        ),
        _section(
            "Training", f'<div class="plots">{"".join(_card(*plot) for plot in curves.items())}</div>' if curves else ""
        ),
        *(_distributions(record, path) for path in plots.values() if path.stem == "advantages"),
        _section("Strategies", _code(_yaml(record.strategies)) if record.strategies else ""),
        _section("Settings", _code(_yaml(record.settings)) if record.settings else ""),
        _section("Use it", _code(record.usage) if record.usage else ""),
        _footer(record),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(record.title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(record: RunRecord) -> str:
    lead = f'\n<p class="muted">{escape(record.lead)}</p>' if record.lead else ""
    return f"<h1>{escape(record.title)}</h1>{lead}"


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def _summary_cells(record: RunRecord) -> list[list[str]]:
    return [[row.label, row.before, row.after, row.change] for row in record.summary]


def _distributions(record: RunRecord, path: Path) -> str:
    assert record.batch is not None  # there is a plot of it
    before, after = before_and_after(record.batch, record.strategies.get("advantage"))
    names = ["mean", "std", "min", "max", "zero"]
    rows = [(d.name, d.statistics(), d.trained) for d in [before, *after]]
    cells = [[name, *(f"{s[n]:.3f}".replace("-0.000", "0.000") for n in names)] for name, s, _ in rows]
    trained = [index for index, (_, _, is_trained) in enumerate(rows) if is_trained]
    groups = len(record.batch.scores) // record.batch.num_generations
    text = (
        f"The rewards of the last batch ({groups} groups of {record.batch.num_generations}), and what each strategy "
        "makes of them. Values beyond the scale are drawn at its edge."
    )
    return _section(
        "Before and after normalisation",
        f'<p class="muted">{text}</p>\n{_card("Before and after normalisation", path, wide=True)}\n<br>\n'
        + _table(["", *names[:-1], "share exactly zero"], cells, trained),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], highlighted: Sequence[int] = ()) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        f"<tr{' class=trained' if index in highlighted else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    body = "\n".join(lines)
    return f'<div class="card"><table>\n<thead><tr>{first}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _card(title: str, path: Path, wide: bool = False) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    classes = "card wide" if wide else "card"
    return f'<figure class="{classes}"><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'


def _code(text: str) -> str:
    return f'<div class="card"><pre>{escape(text.strip())}</pre></div>'


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False)


def _footer(record: RunRecord) -> str:
    listed = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    return f'<footer class="muted">Made with {escape(listed)}.</footer>' if listed else ""
