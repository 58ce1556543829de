"""Reports of a training run: plots and one self-contained HTML page, made from a trainer's log."""

from trl_grpo_ext.report.distributions import Distribution, before_and_after, default_strategies
from trl_grpo_ext.report.page import write_report
from trl_grpo_ext.report.plots import MissingMatplotlibError, require_matplotlib, write_plots
from trl_grpo_ext.report.record import BatchTap, Row, RunRecord, ends, series

__all__ = [
    "BatchTap",
    "Distribution",
    "MissingMatplotlibError",
    "Row",
    "RunRecord",
    "before_and_after",
    "default_strategies",
    "ends",
    "require_matplotlib",
    "series",
    "write_plots",
    "write_report",
]
