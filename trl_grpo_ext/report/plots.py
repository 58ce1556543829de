"""PNG plots of a run: curves by step, and the distributions before and after normalisation. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_grpo_ext.errors import GRPOExtError
from trl_grpo_ext.report.distributions import Distribution, before_and_after
from trl_grpo_ext.report.record import SMOOTHING, RunRecord, series

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, VIOLET = "#2563eb", "#ea580c", "#0f766e", "#7c3aed"
RUN_COLOURS = (BLUE, ORANGE, GREEN, VIOLET, "#be185d", "#a16207", "#0891b2", "#4b5563")
"""One for each run of a comparison."""

WIDEST = 3.0
"""Advantages beyond this are drawn at the edge: one outlier should not squeeze all other panels."""

COLUMNS = 3
BINS = 61
"""Odd, so that one bin is centred on zero, where every row of a group without a signal is."""

STYLE: Mapping[str, Any] = {
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class Curve(NamedTuple):
    """A logged value to draw against the step."""

    file: str
    key: str
    title: str
    label: str
    colour: str
    from_zero: bool = False


CURVES = (
    Curve("reward", "reward", "Reward", "mean reward of the batch", BLUE),
    Curve("kl", "kl", "KL to the reference", "mean KL per token", ORANGE, from_zero=True),
    Curve(
        "length", "completions/mean_length", "Completion length", "mean tokens per completion", GREEN, from_zero=True
    ),
    Curve(
        "silent_groups", "frac_reward_zero_std", "Groups without a signal", "share of groups", VIOLET, from_zero=True
    ),
    Curve("eval_reward", "eval_reward", "Reward on held-out prompts", "mean reward of the evaluation", BLUE),
)


class MissingMatplotlibError(GRPOExtError, ImportError):
    """Plots were asked for, and matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise `MissingMatplotlibError` (an ``ImportError``) that says how to install matplotlib, if it is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlibError(
            "the plots need matplotlib, which is not installed: pip install 'trl-grpo-ext[demo]'"
        ) from error


def write_plots(record: RunRecord, folder: Path) -> dict[str, Path]:
    """Draw what the record holds into PNG files in `folder`; return title -> file, in the order of a report."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with _style():
        for curve in CURVES:
            if len(series(record.log_history, curve.key)[0]) >= 2:
                path = folder / f"{curve.file}.png"
                _save(draw_curve(record.log_history, curve, record.guides.get(curve.key)), path)
                written[curve.title] = path
        if record.batch is not None and not record.batch.scores.isnan().all():
            before, after = before_and_after(record.batch, record.strategies.get("advantage"))
            path = folder / "advantages.png"
            _save(draw_distributions(before, after), path)
            written["Before and after normalisation"] = path
    return written


def write_comparison_plots(logs: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> dict[str, Path]:
    """Draw each curve that at least two runs have logged, over each other; return title -> file.

    `logs` maps the runs' names to their logs.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with _style():
        for curve in CURVES:
            logged = {name: log for name, log in logs.items() if len(series(log, curve.key)[0]) >= 2}
            if len(logged) >= 2:
                path = folder / f"{curve.file}.png"
                colours = dict(zip(logs, RUN_COLOURS, strict=False))
                _save(draw_comparison(logged, curve, colours), path)
                written[curve.title] = path
    return written


def draw_comparison(
    logs: Mapping[str, Sequence[Mapping[str, Any]]], curve: Curve, colours: Mapping[str, str]
) -> Figure:
    """Return a figure with the moving average of one curve for each run; `colours` maps the runs' names to colours."""
    figure, axes = _figure(6.0, 3.4)
    for name, log in logs.items():
        steps, values = series(log, curve.key)
        axes.plot(steps, values, color=colours[name], alpha=0.15, linewidth=1)
        axes.plot(steps, moving_average(values), color=colours[name], linewidth=2, label=name)
    _finish(figure, axes, curve)
    return figure


def draw_curve(
    log_history: Sequence[Mapping[str, Any]], curve: Curve, guide: tuple[float, str] | None = None
) -> Figure:
    """Return a figure of each step's value, faint, and of the moving average; `guide` marks a level."""
    figure, axes = _figure(6.0, 3.4)
    steps, values = series(log_history, curve.key)
    axes.plot(steps, values, color=curve.colour, alpha=0.28, linewidth=1, label="as logged")
    axes.plot(
        steps, moving_average(values), color=curve.colour, linewidth=2.2, label=f"average of the last {SMOOTHING}"
    )
    if guide is not None:
        level, text = guide
        axes.axhline(level, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, label=text)
    _finish(figure, axes, curve)
    return figure


def draw_distributions(before: Distribution, after: Sequence[Distribution]) -> Figure:
    """Return a panel for each strategy: the rewards before (outline) and its advantages after, on one scale."""
    rows = math.ceil(len(after) / COLUMNS)
    figure, grid = _figures(rows, min(COLUMNS, len(after)), width=3.6, height=2.35)
    edge = min(WIDEST, max(abs(v) for d in [before, *after] for v in d.values) + 0.1) or 1.0
    panels = [axes for line in grid for axes in line]
    figure.suptitle("One batch: rewards before normalisation, advantages after", x=0.01, ha="left", weight="bold")
    for axes, distribution in zip(panels, after, strict=False):
        _draw_panel(axes, before, distribution, edge)
    for axes in panels[len(after) :]:
        axes.remove()
    for line in grid:
        line[0].set_ylabel("share of completions")
    figure.legend(handles=_legend_handles(after), loc="outside lower center", ncols=3)
    return figure


def moving_average(values: Sequence[float], window: int = SMOOTHING) -> list[float]:
    """Return, for each value, the mean of it and of up to ``window - 1`` values before it.

    >>> moving_average([1.0, 3.0, 5.0], window=2)
    [1.0, 2.0, 4.0]
    """
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _finish(figure: Figure, axes: Axes, curve: Curve) -> None:
    axes.set_title(curve.title)
    axes.set_xlabel("step")
    axes.set_ylabel(curve.label)
    axes.margins(x=0, y=0.12)
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    # Below the axes, where it can cover nothing.
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)


def _draw_panel(axes: Axes, before: Distribution, after: Distribution, edge: float) -> None:
    bins = [-edge + 2 * edge * index / BINS for index in range(BINS + 1)]
    colour = ORANGE if after.trained else BLUE
    _histogram(axes, after, bins, edge, histtype="stepfilled", color=colour, alpha=0.7)
    _histogram(axes, before, bins, edge, color=INK, histtype="step", linewidth=1.1)
    statistics = after.statistics()
    axes.set_title(f"{after.name} (this run)" if after.trained else after.name, fontsize=11)
    axes.set_xlabel(
        f"{_short(statistics['min'])} to {_short(statistics['max'])}, std {statistics['std']:.2f}, "
        f"{statistics['zero']:.0%} zero",
        fontsize=10,
        color=INK,
    )
    axes.set_xlim(-edge, edge)
    axes.set_ylim(0, 1)


def _histogram(axes: Axes, distribution: Distribution, bins: list[float], edge: float, **style: Any) -> None:
    inside = edge * (1 - 1e-9)
    values = [min(inside, max(-inside, value)) for value in distribution.values]
    axes.hist(values, bins=bins, weights=[1 / len(values)] * len(values), **style)


def _legend_handles(after: Sequence[Distribution]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor="white", edgecolor=INK, label="before: rewards"),
        Patch(color=BLUE, label="after: advantages"),
    ]
    if any(distribution.trained for distribution in after):
        handles.append(Patch(color=ORANGE, label="after, with this run's strategy"))
    return handles


def _short(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "\N{MINUS SIGN}")


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(rc=dict(STYLE)):
        yield


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, grid = _figures(1, 1, width, height)
    return figure, grid[0][0]


def _figures(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    # Not pyplot: it would pick a window system and keep every figure.
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
