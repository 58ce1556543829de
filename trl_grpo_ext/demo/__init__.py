"""The demo: a tiny model that learns sums, first from a sloppy text and then by GRPO."""

from trl_grpo_ext.demo.run import DemoResult, DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
