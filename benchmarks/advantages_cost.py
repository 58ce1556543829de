"""What each advantage strategy costs, against sorting the same scores once.

    python benchmarks/advantages_cost.py

Prints two markdown tables: the time for one million rows (G=8, F=3) as a multiple of `torch.sort` of their scores in
float64, measured in turns in the same run: for complete rewards, with missing ones, and for plain tensors with the
groups in no order; and the growth up to ten million rows. Times are CPU times of one thread, so that other programs on
the machine do not count, with memory kept from one call to the next (see `keep_memory`). Exits with 1 if a strategy
costs more than `LIMIT` sorts, or grows faster than ``rows ** MOST_GROWTH``.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import time
from collections.abc import Callable
from functools import partial

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
MOST_GROWTH = 1.15
"""``n log n`` would be 1.06 from one to ten million; the rest is for the memory's hierarchy."""

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
    "Adaptive(), before": Adaptive(min_std=1e9),
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
        self.shuffled_groups = torch.randperm(rows, generator=generator) // G

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


def keep_memory() -> None:
    """Make glibc keep freed memory, for the sort as for ours.

    By default it returns blocks beyond 32 MB to the system, and every tensor of ten million doubles is then paid for
    page by page, again and again: what grows faster than linearly is that.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the shortest CPU time in seconds of each function, run one after the other, `repeats` times over."""
    best = dict.fromkeys(functions, math.inf)
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def run(strategy: AdvantageStrategy | None, data: Data) -> None:
    """Call the strategy on a fresh batch, or sort the scores if there is none."""
    if strategy is None:
        torch.sort(data.scores)
    else:
        strategy(data.batch())


def run_shuffled(strategy: AdvantageStrategy, data: Data) -> None:
    """Call the strategy on the plain scores with their groups in no order."""
    strategy.normalize(data.scores, data.shuffled_groups, lengths=data.lengths)


def against_sort(ours: Callable[[], object], data: Data, repeats: int) -> tuple[float, float]:
    """Return the time of `ours` in milliseconds, and as a multiple of the sort's."""
    times = in_turns({"sort": partial(run, None, data), "ours": ours}, repeats)
    return 1e3 * times["ours"], times["ours"] / times["sort"]


def cost_table(rows: int, repeats: int) -> float:
    """Print the cost of every strategy; return the largest multiple of a sort."""
    complete, holes = Data(rows), Data(rows, missing=0.02)
    print(f"{rows:,} rows, G={G}, F={F}, torch {torch.__version__}, one thread. A sort of the scores is 1.\n")
    print("| strategy | ms | sorts | 2 % of cells missing | groups in no order |\n|---|---|---|---|---|")
    worst = 0.0
    for name, strategy in STRATEGIES.items():
        milliseconds, plain = against_sort(partial(run, strategy, complete), complete, repeats)
        _, missing = against_sort(partial(run, strategy, holes), holes, repeats)
        _, shuffled = against_sort(partial(run_shuffled, strategy, complete), complete, repeats)
        worst = max(worst, plain, missing, shuffled)
        print(f"| `{name}` | {milliseconds:.0f} | {plain:.1f} | {missing:.1f} | {shuffled:.1f} |", flush=True)
    print(f"\nThe dearest costs {worst:.1f} sorts (limit: {LIMIT:g}).\n")
    return worst


def growth_table(sizes: list[int], repeats: int) -> float:
    """Print seconds for each size; return the largest exponent p of ``time ~ rows ** p``."""
    datasets = [Data(size) for size in sizes]
    print("| strategy | " + " | ".join(f"{size:,} rows" for size in sizes) + " | exponent |")
    print("|---" * (len(sizes) + 2) + "|")
    worst = 0.0
    for name, strategy in [("torch.sort", None), *STRATEGIES.items()]:
        seconds = [in_turns({name: partial(run, strategy, data)}, repeats)[name] for data in datasets]
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
    keep_memory()

    worst = cost_table(args.rows, args.repeats)
    exponent = growth_table(args.growth, max(2, args.repeats // 2)) if args.growth else 1.0
    return int(worst > LIMIT or exponent > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
