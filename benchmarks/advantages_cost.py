"""What each advantage strategy costs, against sorting the same scores once.

    python benchmarks/advantages_cost.py

Prints two markdown tables: the time for one million rows (G=8, F=3) as a multiple of `torch.sort` of their scores in
float64, measured in turns in the same run, for complete rewards and with missing ones; and the growth up to ten million
rows. Times are CPU times of one thread, so that other programs on the machine do not count. Exits with 1 if a strategy
costs more than `LIMIT` sorts, or grows faster than n log n.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import torch

from trl_grpo_ext.advantages import (
    Adaptive,
    AdvantageStrategy,
    BatchWhiten,
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
    Scale,
    ZScore,
)
from trl_grpo_ext.batch import RewardBatch

LIMIT = 6.0
G, F = 8, 3

STRATEGIES: dict[str, AdvantageStrategy] = {
    "ZScore()": ZScore(),
    'ZScore(scale="batch")': ZScore(scale="batch"),
    "MeanCentered()": MeanCentered(),
    "LeaveOneOut()": LeaveOneOut(),
    "Rank()": Rank(),
    "RobustZScore()": RobustZScore(),
    "OptimalBaseline()": OptimalBaseline(),
    "LengthBucketed()": LengthBucketed(),
    "LengthBucketed(Rank(), buckets=3)": LengthBucketed(Rank(), buckets=3),
    "LengthBucketed(edges=[128, 256])": LengthBucketed(edges=[128, 256]),
    'LengthBucketed(scope="batch")': LengthBucketed(scope="batch"),
    "PerReward()": PerReward(),
    "PerReward(Rank())": PerReward(Rank()),
    "Mix(0.5 Rank(), 0.5 ZScore())": Mix(parts=[(0.5, Rank()), (0.5, ZScore())]),
    "Chain(ZScore(), [Clip, Scale, BatchWhiten])": Chain(ZScore(), transforms=[Clip(2.0), Scale(0.5), BatchWhiten()]),
    "Adaptive()": Adaptive(),
}


class Data:
    """Rewards of three functions (right or wrong, continuous, and in steps) and lengths."""

    def __init__(self, rows: int, missing: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        right = torch.rand(rows, generator=generator) < 0.4
        continuous = torch.randn(rows, generator=generator)
        steps = torch.randint(0, 5, (rows,), generator=generator) / 4
        self.rewards = torch.stack([right.float(), continuous, steps], dim=1)
        if missing:
            self.rewards[torch.rand(self.rewards.shape, generator=generator) < missing] = torch.nan
        self.lengths = torch.randint(1, 512, (rows,), generator=generator)
        self.scores = self.batch().scores.double()

    def batch(self) -> RewardBatch:
        """Return a batch from which nothing has been derived yet."""
        return RewardBatch(
            rewards=self.rewards,
            weights=torch.tensor([1.0, 0.5, 0.25]),
            lengths=self.lengths,
            truncated=torch.zeros(len(self.rewards), dtype=torch.bool),
            num_generations=G,
            names=("right", "continuous", "steps"),
        )


def in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the shortest CPU time in seconds of each function, run one after the other, `repeats` times over."""
    best = dict.fromkeys(functions, math.inf)
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def against_sort(strategy: AdvantageStrategy, data: Data, repeats: int) -> tuple[float, float]:
    """Return the time of `strategy` in milliseconds, and as a multiple of the sort's."""
    times = in_turns({"sort": lambda: torch.sort(data.scores), "ours": lambda: strategy(data.batch())}, repeats)
    return 1e3 * times["ours"], times["ours"] / times["sort"]


def cost_table(rows: int, repeats: int) -> float:
    """Print the cost of every strategy; return the largest multiple of a sort."""
    complete, holes = Data(rows), Data(rows, missing=0.02)
    print(f"{rows:,} rows, G={G}, F={F}, torch {torch.__version__}, one thread. A sort of the scores is 1.\n")
    print("| strategy | ms | sorts | sorts, 2 % of cells missing |\n|---|---|---|---|")
    worst = 0.0
    for name, strategy in STRATEGIES.items():
        milliseconds, ratio = against_sort(strategy, complete, repeats)
        _, with_holes = against_sort(strategy, holes, repeats)
        worst = max(worst, ratio, with_holes)
        print(f"| `{name}` | {milliseconds:.0f} | {ratio:.1f} | {with_holes:.1f} |", flush=True)
    print(f"\nThe dearest costs {worst:.1f} sorts (limit: {LIMIT:g}).\n")
    return worst


def growth_table(sizes: list[int], repeats: int) -> float:
    """Print seconds for each size; return the largest exponent p of ``time ~ rows ** p``."""
    datasets = [Data(size) for size in sizes]
    print("| strategy | " + " | ".join(f"{size:,} rows" for size in sizes) + " | exponent |")
    print("|---" * (len(sizes) + 2) + "|")
    worst = 0.0
    timed: dict[str, Callable[[Data], object]] = {"torch.sort": lambda data: torch.sort(data.scores)}
    timed.update({name: lambda data, s=s: s(data.batch()) for name, s in STRATEGIES.items()})  # type: ignore[misc]
    for name, function in timed.items():
        seconds = [in_turns({"": lambda d=data: function(d)}, repeats)[""] for data in datasets]  # noqa: B023
        exponent = math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])
        worst = max(worst, exponent)
        print(f"| `{name}` | " + " | ".join(f"{s:.2f} s" for s in seconds) + f" | {exponent:.2f} |", flush=True)
    return worst


def main() -> int:
    """Print both tables; return 1 if one of the limits is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--growth", type=int, nargs="*", default=[1_000_000, 3_000_000, 10_000_000], metavar="ROWS")
    args = parser.parse_args()
    torch.set_num_threads(1)

    worst = cost_table(args.rows, args.repeats)
    exponent = growth_table(args.growth, max(2, args.repeats // 2)) if args.growth else 1.0
    return int(worst > LIMIT or exponent > 1.25)  # n log n gives 1.06 from one to ten million; the rest is caches


if __name__ == "__main__":
    sys.exit(main())
