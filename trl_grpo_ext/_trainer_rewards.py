"""The trainer's rewards: functions that may fail on one process, and shaping of the gathered batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from trl_grpo_ext import _trl
from trl_grpo_ext._outputs import checked_batch
from trl_grpo_ext._trl import GRPOTrainer
from trl_grpo_ext.advantages import AdvantageStrategy, MeanCentered, PerReward, ZScore
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.rewards import RewardGuard, ShapingStrategy


class RewardsMixin(GRPOTrainer):
    """Calls the reward functions so that no process waits for one that failed, and applies shaping."""

    shaping: list[Any] | None = None
    _guarded: bool = False

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if not self._guarded:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rank = self.accelerator.process_index
        guard = RewardGuard(self.reward_funcs, self.reward_func_names, rank, _trl.patience(self))
        with _trl.overridden(self, reward_funcs=guard.functions):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        guard.check(_trl.gather_list)
        return rewards

    def _shaped(self, batch: RewardBatch) -> RewardBatch:
        """Return the global batch after shaping, and log the columns that it brought."""
        if not self.shaping:
            return batch
        shaped = batch
        for shaping in self.shaping:
            if shaping.runs_once:
                shaped = self._shaped_once(shaping, shaped)
            else:
                shaped = checked_batch(shaping, shaping(shaped), shaped)
        for index, name in enumerate(shaped.names):
            if name not in batch.names:
                _trl.log_reward_column(self, name, shaped.rewards[:, index])
        _trl.rewrite_reward(self, shaped.scores)
        return shaped

    def _shaped_once(self, shaping: ShapingStrategy, batch: RewardBatch) -> RewardBatch:
        """Return ``shaping(batch)``, computed on the main process only."""

        def compute() -> tuple[Tensor, Tensor, tuple[str, ...]]:
            shaped = checked_batch(shaping, shaping(batch), batch)
            return shaped.rewards.cpu(), shaped.weights.cpu(), shaped.names  # a device means nothing elsewhere

        rewards, weights, names = _trl.from_main_process(self, compute)
        rewards, weights = rewards.to(batch.rewards.device), weights.to(batch.weights.device)
        return dataclasses.replace(batch, rewards=rewards, weights=weights, names=names)

    def _stock_advantage(self) -> AdvantageStrategy:
        """Return the strategy that equals what TRL's own options say."""
        if self.multi_objective_aggregation == "normalize_then_sum":
            return PerReward()
        return {"group": ZScore(), "batch": ZScore(scale="batch"), "none": MeanCentered()}[self.scale_rewards]
