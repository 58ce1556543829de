"""Reward wrappers, around any TRL reward function."""

from trl_grpo_ext.rewards.base import RewardWrapper, callable_name, is_async
from trl_grpo_ext.rewards.functions import TRL_FUNCTIONS, function_spec, resolve_function
from trl_grpo_ext.rewards.length import LengthPenalty

__all__ = [
    "TRL_FUNCTIONS",
    "LengthPenalty",
    "RewardWrapper",
    "callable_name",
    "function_spec",
    "is_async",
    "resolve_function",
]
