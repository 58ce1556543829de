"""Every advantage strategy on the same five groups.

python benchmarks/advantages_side_by_side.py            # print the tables of docs/advantages.md
python benchmarks/advantages_side_by_side.py --write    # update them, and the figure
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import torch

from trl_grpo_ext.advantages import (
    Adaptive,
    AdvantageStrategy,
    Chain,
    Clip,
    LeaveOneOut,
    LengthBucketed,
    MeanCentered,
    Mix,
    OptimalBaseline,
    PerReward,
    Rank,
    RobustZScore,
    ZScore,
)
from trl_grpo_ext.batch import RewardBatch

DOCS = Path(__file__).parents[1] / "docs"


class Group(NamedTuple):
    """One group of eight completions."""

    title: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...] = (40, 60, 50, 70, 45, 55, 65, 50)


GROUPS = {
    "narrow": Group("narrow spread", (0.50, 0.51, 0.52, 0.50, 0.53, 0.51, 0.52, 0.51)),
    "outlier": Group("one outlier", (0.2, 0.4, 0.3, 0.5, 0.1, 0.3, 0.4, 9.0)),
    "binary": Group("binary", (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)),
    "ties": Group("ties", (0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0)),
    # Length / 200, and 0.2 more for the second and the sixth, which are the good answers.
    "length": Group(
        "reward that likes length",
        (0.10, 0.35, 0.20, 0.25, 0.75, 1.00, 0.85, 0.90),
        (20, 30, 40, 50, 150, 160, 170, 180),
    ),
}

STRATEGIES: dict[str, AdvantageStrategy] = {
    "ZScore()": ZScore(),
    "MeanCentered()": MeanCentered(),
    "LeaveOneOut()": LeaveOneOut(),
    "OptimalBaseline()": OptimalBaseline(),
    "Rank()": Rank(),
    "RobustZScore()": RobustZScore(),
    "LengthBucketed(ZScore())": LengthBucketed(),
    "LengthBucketed(Rank())": LengthBucketed(Rank()),
    "PerReward()": PerReward(),
    "Mix(0.5 Rank(), 0.5 ZScore())": Mix(parts=[(0.5, Rank()), (0.5, ZScore())]),
    "Chain(RobustZScore(), [Clip(2)])": Chain(RobustZScore(), transforms=[Clip(2.0)]),
    "Adaptive(), at the start": Adaptive(),
}


def advantages(strategy: AdvantageStrategy, group: Group) -> list[float]:
    """Return the advantages of a group that is a batch of its own."""
    n = len(group.rewards)
    batch = RewardBatch(
        rewards=torch.tensor(group.rewards)[:, None],
        weights=torch.ones(1),
        lengths=torch.tensor(group.lengths),
        truncated=torch.zeros(n, dtype=torch.bool),
        num_generations=n,
        names=("reward",),
        training=False,
    )
    return strategy(batch).advantages.tolist()


def table(name: str) -> str:
    """Return the markdown table of one group, strategies in rows."""
    group = GROUPS[name]
    lines = [
        "| reward | " + " | ".join(f"{reward:.2f}" for reward in group.rewards) + " |",
        "|---" * (len(group.rewards) + 1) + "|",
    ]
    if name == "length":
        lines.append("| *length* | " + " | ".join(f"*{length}*" for length in group.lengths) + " |")
    for label, strategy in STRATEGIES.items():
        cells = (f"{value + 0.0:.2f}".replace("-0.00", "0.00") for value in advantages(strategy, group))
        lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def between_markers(text: str, name: str, block: str) -> str:
    """Replace what stands between the markers of table `name` in a markdown text."""
    begin, end = f"<!-- begin {name}: benchmarks/advantages_side_by_side.py -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no markers for the table {name!r}")
    return pattern.sub(lambda _: f"{begin}\n{block}\n{end}", text)


def draw(path: Path) -> None:
    """Draw one panel per group, one line of eight points per strategy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(STRATEGIES)
    figure, axes = plt.subplots(1, len(GROUPS), figsize=(17, 5.2), sharey=True, layout="constrained")
    for axis, group in zip(axes, GROUPS.values(), strict=True):
        axis.axvline(0, color="0.8", linewidth=1)
        for line, strategy in enumerate(STRATEGIES.values()):
            values = advantages(strategy, group)
            # Equal points are drawn below each other.
            seen: dict[float, int] = {}
            for value, length, order in sorted(zip(values, group.lengths, _ranks(group.rewards), strict=True)):
                step = seen[round(value, 2)] = seen.get(round(value, 2), -1) + 1
                longer = length > 100
                axis.scatter(
                    value,
                    line + 0.09 * step,
                    c=[order],
                    cmap="viridis",
                    vmin=0,
                    vmax=1,
                    s=34,
                    marker="s" if longer else "o",
                    edgecolors="black",
                    linewidths=0.4,
                    zorder=3,
                )
        axis.set_xscale("symlog", linthresh=2, linscale=2)
        axis.set_xlim(-4, 80)
        axis.set_xticks([-2, -1, 0, 1, 2, 10, 50], ["-2", "-1", "0", "1", "2", "10", "50"])
        axis.set_title(group.title)
        axis.set_xlabel("advantage")
        axis.grid(axis="x", color="0.93")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.2, -0.6)
    figure.suptitle("Dark: lowest reward of the group, light: highest. Squares: completions of more than 100 tokens.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _ranks(rewards: tuple[float, ...]) -> list[float]:
    """Return each reward's place between the lowest (0) and the highest (1), for its colour."""
    distinct = sorted(set(rewards))
    return [distinct.index(reward) / max(1, len(distinct) - 1) for reward in rewards]


def main() -> None:
    """Print the tables, or write tables and figure into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/advantages.md and docs/img")
    if not parser.parse_args().write:
        for name, group in GROUPS.items():
            print(f"\n{group.title}\n\n{table(name)}")
        return
    page = DOCS / "advantages.md"
    text = page.read_text(encoding="utf-8")
    for name in GROUPS:
        text = between_markers(text, name, table(name))
    page.write_text(text, encoding="utf-8")
    draw(DOCS / "img" / "advantages_groups.png")


if __name__ == "__main__":
    main()
