"""Several runs on one page: their curves over each other, their headline figures, and what each was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.report import html
from trl_grpo_ext.report.folder import HEADLINES
from trl_grpo_ext.report.page import REPORT_FILE
from trl_grpo_ext.report.plots import RUN_COLOURS, write_comparison_plots
from trl_grpo_ext.report.record import RunRecord, ends

NOTE = (
    "A curve is the average over the last few logged values. The reward is what each run was trained with: where "
    "penalties or reward functions differ, compare lengths and held-out figures, not rewards."
)


def write_comparison(runs: Mapping[str, RunRecord], folder: Path) -> Path:
    """Write `report.html` and `plots/` to `folder`; return the path of the page. `runs` maps names to records.

    Raises `ConfigError` for fewer than two runs or more than can be told apart, `MissingMatplotlibError` without
    matplotlib.
    """
    if not 2 <= len(runs) <= len(RUN_COLOURS):
        raise ConfigError(f"a comparison takes 2 to {len(RUN_COLOURS)} runs, got {len(runs)}")
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_comparison_plots({name: run.log_history for name, run in runs.items()}, folder / "plots")
    path = folder / REPORT_FILE
    sections = [
        html.section("Results", _headlines(runs)),
        html.section("Training", html.plots(plots)),
        *(html.section(f"Strategies of {name}", html.as_yaml(run.strategies)) for name, run in runs.items()),
    ]
    versions = _shared_versions(runs)
    path.write_text(html.page(f"Comparison of {len(runs)} runs", NOTE, sections, versions), encoding="utf-8")
    return path


def names_of(folders: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart.

    >>> names_of([Path("runs/a"), Path("runs/b")]), names_of([Path("a/out"), Path("b/out")])
    (['a', 'b'], ['a/out', 'b/out'])
    """
    parts = [folder.resolve().parts for folder in folders]
    deepest = max(map(len, parts))
    for depth in range(1, deepest + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run is named twice: {', '.join(map(str, folders))}")


def _headlines(runs: Mapping[str, RunRecord]) -> str:
    logged = {
        label: {name: ends(run.log_history, key) for name, run in runs.items()} for label, key in HEADLINES.items()
    }
    shown = [label for label, of_run in logged.items() if any(of_run.values())]
    rows = [[name, *(_arrow(logged[label][name]) for label in shown)] for name in runs]
    return html.table(["first \N{RIGHTWARDS ARROW} last values", *shown], rows) if shown else ""


def _arrow(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.4g} \N{RIGHTWARDS ARROW} {pair[1]:.4g}"


def _shared_versions(runs: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return the versions, all those in use where the runs differ."""
    found: dict[str, list[str]] = {}
    for run in runs.values():
        for name, number in run.versions.items():
            if number not in found.setdefault(name, []):
                found[name].append(number)
    return {name: " and ".join(numbers) for name, numbers in found.items()}
