"""The report of one run: one HTML file with the plots inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trl_grpo_ext.report import html
from trl_grpo_ext.report.distributions import before_and_after
from trl_grpo_ext.report.plots import write_plots
from trl_grpo_ext.report.record import RunRecord

REPORT_FILE = "report.html"


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write `report.html`, and the plots as PNG files in `plots/`, to `folder`; return the path of the page.

    Other files in the folder are left alone. Raises `MissingMatplotlibError` if matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(record, folder / "plots")
    path = folder / REPORT_FILE
    path.write_text(render(record, plots), encoding="utf-8")
    return path


def render(record: RunRecord, plots: Mapping[str, Path]) -> str:
    """Return the page as text; `plots` are embedded: title -> PNG file."""
    curves = {title: path for title, path in plots.items() if path.stem != "advantages"}
    cells = [[row.label, row.before, row.after, row.change] for row in record.summary]
    sections = [
        html.section("Results", html.table(["", "before", "after", "change"], cells) if cells else ""),
        html.section("Training", html.plots(curves)),
        *(_distributions(record, path) for path in plots.values() if path.stem == "advantages"),
        html.section("Strategies", html.as_yaml(record.strategies)),
        html.section("Settings", html.as_yaml(record.settings)),
        html.section("Use it", html.code(record.usage)),
    ]
    return html.page(record.title, record.lead, sections, record.versions)


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
    return html.section(
        "Before and after normalisation",
        f'<p class="muted">{text}</p>\n{html.plot("Before and after normalisation", path, wide=True)}\n<br>\n'
        + html.table(["", *names[:-1], "share exactly zero"], cells, trained),
    )
