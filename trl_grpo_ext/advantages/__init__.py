"""Advantage strategies: from the scores of a group to what the policy gradient is weighted by."""

from trl_grpo_ext.advantages.adaptive import Adaptive
from trl_grpo_ext.advantages.base import AdvantageOutput, AdvantageStrategy
from trl_grpo_ext.advantages.combine import Chain, Mix, PerReward
from trl_grpo_ext.advantages.group import LeaveOneOut, MeanCentered, OptimalBaseline, Rank, RobustZScore, ZScore
from trl_grpo_ext.advantages.length import LengthBucketed
from trl_grpo_ext.advantages.transforms import BatchWhiten, Clip, Scale, Transform

__all__ = [
    "Adaptive",
    "AdvantageOutput",
    "AdvantageStrategy",
    "BatchWhiten",
    "Chain",
    "Clip",
    "LeaveOneOut",
    "LengthBucketed",
    "MeanCentered",
    "Mix",
    "OptimalBaseline",
    "PerReward",
    "Rank",
    "RobustZScore",
    "Scale",
    "Transform",
    "ZScore",
]
