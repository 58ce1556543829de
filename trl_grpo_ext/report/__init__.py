"""Reports of a training run: plots and one self-contained HTML page, made from a trainer's log."""

from trl_grpo_ext.report.comparison import names_of, write_comparison
from trl_grpo_ext.report.distributions import Distribution, before_and_after, default_strategies
from trl_grpo_ext.report.folder import read_run
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
    "names_of",
    "read_run",
    "require_matplotlib",
    "series",
    "write_comparison",
    "write_plots",
    "write_report",
]
