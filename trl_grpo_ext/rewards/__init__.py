"""Rewards: wrappers around any TRL reward function, shaping that looks at the whole group, and reward models."""

from trl_grpo_ext.rewards.adapter import AdapterRewardModel
from trl_grpo_ext.rewards.base import RewardWrapper, bind_rewards, callable_name, inner_functions, is_async
from trl_grpo_ext.rewards.functions import TRL_FUNCTIONS, function_spec, resolve_function
from trl_grpo_ext.rewards.guard import RewardGuard
from trl_grpo_ext.rewards.length import CosineLength, LengthPenalty, SoftOverlong
from trl_grpo_ext.rewards.model import RewardModel
from trl_grpo_ext.rewards.pairwise import PairwiseWinRate
from trl_grpo_ext.rewards.repetition import RepetitionPenalty
from trl_grpo_ext.rewards.retry import RetryReward
from trl_grpo_ext.rewards.scale import ClipReward, ScaleReward
from trl_grpo_ext.rewards.shaping import GroupLengthReward, PassRateLengthPenalty, ShapingStrategy

__all__ = [
    "TRL_FUNCTIONS",
    "AdapterRewardModel",
    "ClipReward",
    "CosineLength",
    "GroupLengthReward",
    "LengthPenalty",
    "PairwiseWinRate",
    "PassRateLengthPenalty",
    "RepetitionPenalty",
    "RetryReward",
    "RewardGuard",
    "RewardModel",
    "RewardWrapper",
    "ScaleReward",
    "ShapingStrategy",
    "SoftOverlong",
    "bind_rewards",
    "callable_name",
    "function_spec",
    "inner_functions",
    "is_async",
    "resolve_function",
]
