"""Strategies that compare a score with the other scores of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from trl_grpo_ext._validate import check_choice, check_number
from trl_grpo_ext.advantages.base import AdvantageStrategy
from trl_grpo_ext.functional import advantages as functional


@dataclass(frozen=True, kw_only=True)
class ZScore(AdvantageStrategy):
    """Standardised score: ``(r - mean) / (std + eps)`` over the group.

    `scale="batch"` keeps the group's mean but divides by the standard deviation of all scores in the batch, which
    weighs easy and hard prompts alike. `ddof` 1 is the sample deviation (TRL), 0 the population's. The defaults equal
    TRL's ``scale_rewards="group"``, and `scale="batch"` its ``"batch"``.

    Use it once rewards spread out, with any `loss_type`. Beware of groups whose spread is small but real: at a std of
    0.01 a difference of 0.1 becomes an advantage of 10; `Rank` has a fixed range, `eps` bounds the blow-up, and
    `MeanCentered` does not divide. Dividing by the group's std also up-weights prompts that are almost always or almost
    never solved, which `loss_type="dr_grpo"` was made to avoid. The largest possible value grows with the group, as
    (G - 1) / sqrt(G): a single success among 64 gets 7.9, among 4 it gets 1.5.

    >>> import torch
    >>> ZScore(ddof=0, eps=0.0).normalize(torch.tensor([1.0, 2.0, 4.0, 2.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-1.1471, -0.2294,  1.6059, -0.2294])

    Reference: DeepSeekMath (GRPO), https://arxiv.org/abs/2402.03300
    """

    kind: ClassVar[str] = "zscore"

    eps: float = 1e-4
    ddof: int = 1
    scale: str = "group"

    def validate(self) -> None:
        check_number("eps", self.eps, at_least=0)
        check_choice("ddof", self.ddof, (0, 1))
        check_choice("scale", self.scale, ("group", "batch"))

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.zscore(
            values, segments, eps=self.eps, ddof=self.ddof, scale=self.scale, rows=context.get("rows")
        )


@dataclass(frozen=True, kw_only=True)
class MeanCentered(AdvantageStrategy):
    """Score minus the group's mean: ``r - mean``; the size of the rewards is kept.

    Use it with `loss_type="dr_grpo"` to remove both biases that Dr. GRPO names, and when rewards share one meaningful
    scale. Do not use it when the scale is unknown or drifts, as a learnt reward model's does: the step size follows it,
    and with it the balance against ``beta * KL``. The baseline contains the row itself, which shrinks advantages by
    (G - 1) / G: see `LeaveOneOut` for small groups. Equals TRL's ``scale_rewards="none"``.

    >>> import torch
    >>> MeanCentered().normalize(torch.tensor([1.0, 2.0, 4.0, 2.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-1.2500, -0.2500,  1.7500, -0.2500])

    Reference: Understanding R1-Zero-Like Training (Dr. GRPO), https://arxiv.org/abs/2503.20783
    """

    kind: ClassVar[str] = "mean_centered"
    aliases: ClassVar[tuple[str, ...]] = ("dr_grpo",)

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.mean_centered(values, segments, rows=context.get("rows"))


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(AdvantageStrategy):
    """Score minus the mean of the *other* scores of its group: ``r_i - mean_{j != i} r_j``.

    The baseline does not contain the row itself, so the gradient is unbiased. It is `MeanCentered` times n / (n - 1),
    which matters for small groups: a factor of 2 for G = 2, of 1.14 for G = 8. Groups that lost rows differently get
    different factors, so that each stays unbiased.

    Use it for on-policy training with small groups and rewards of one meaningful scale; the original has no clipping
    and weighs completions, not tokens, alike, which is closest to `loss_type="grpo"` with `importance_sampling_level`
    "sequence". Like `MeanCentered` it does not protect from a drifting reward scale; `BatchWhiten` after it does.
    Equals the advantage of TRL's ``RLOOTrainer``.

    >>> import torch
    >>> LeaveOneOut().normalize(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])

    Reference: Back to Basics (RLOO), https://arxiv.org/abs/2402.14740
    """

    kind: ClassVar[str] = "leave_one_out"
    aliases: ClassVar[tuple[str, ...]] = ("rloo",)

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.leave_one_out(values, segments, rows=context.get("rows"))


@dataclass(frozen=True, kw_only=True)
class Rank(AdvantageStrategy):
    """Position within the group: ``(k - 1) / (n - 1) - 1/2`` for the average rank k of n; ties share their mean rank.

    Always within [-0.5, 0.5] and summing to zero, whatever the scale or the outliers of the rewards: no group can
    dominate the batch. Use it at the start of training, with noisy reward models, or with rewards of unknown scale.

    Do not use it when the size of a difference matters: a difference of 1e-6 counts as much as one of 10, so noise
    among equally good completions is trained on. With binary rewards it is exactly half of `LeaveOneOut`. In a group
    of 2 or 3 there is little to rank. Its advantages are about a third of a z-score's, so with any `loss_type` the
    learning rate may be higher, and ``beta * KL`` weighs more; ``Chain(Rank(), transforms=[Scale(3.0)])`` restores
    both.

    >>> import torch
    >>> Rank().normalize(torch.tensor([1.0, 2.0, 4.0, 2.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-0.5000,  0.0000,  0.5000,  0.0000])

    Reference: rank-based fitness shaping, https://arxiv.org/abs/1106.4487
    """

    kind: ClassVar[str] = "rank"

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.rank(values, segments, rows=context.get("rows"))


@dataclass(frozen=True, kw_only=True)
class RobustZScore(AdvantageStrategy):
    """Distance from the median in robust standard deviations: ``(r - median) / (1.4826 * MAD + eps)``.

    MAD is the median of ``|r - median|`` over the group; the median of an even count is the mean of the two middle
    values. Where more than half of a group is equal, the MAD is 0, and 1.2533 times the mean of ``|r - median|`` takes
    its place.

    Use it when single scores are wild, as from a reward model on garbled text: an outlier moves neither the centre
    nor the scale of the others. The outlier's own advantage is large, so clip it:
    ``Chain(RobustZScore(), transforms=[Clip(3.0)])``. It needs G >= 8 to be more than noise, and for binary rewards
    `ZScore` is better: the median of a group with more wrong than right answers is "wrong", and nobody is below it.
    Advantages do not sum to zero, so a group may push the policy up or down as a whole; loss types that treat the signs
    apart ("sapo", "vespo") notice.

    >>> import torch
    >>> RobustZScore(eps=0.0).normalize(torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-1.0117, -0.3372,  0.3372, 65.7628])

    Reference: Leys et al. 2013, Detecting outliers, https://doi.org/10.1016/j.jesp.2013.03.013
    """

    kind: ClassVar[str] = "robust_zscore"

    eps: float = 1e-4

    def validate(self) -> None:
        check_number("eps", self.eps, at_least=0)

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.robust_zscore(values, segments, eps=self.eps, rows=context.get("rows"))


@dataclass(frozen=True, kw_only=True)
class OptimalBaseline(AdvantageStrategy):
    """Score minus the length-weighted mean of the group: ``r_i - sum(len * r) / sum(len)``.

    The baseline of least gradient variance if the squared gradient norm of a completion grows with its length. Groups
    whose lengths are all 0, and calls of `normalize` without ``lengths=``, weigh all rows alike.

    Use it for exact on-policy training (`num_iterations` 1, no KL) with lengths that differ much, and a `loss_type`
    that sums over tokens ("dapo", "dr_grpo"), for which it is derived. Do not use it with "grpo", which averages over a
    completion's tokens: there `MeanCentered` fits. In a small group one long completion is most of the baseline.
    Advantages sum to zero only if weighted by length. It does not rescale, and does not keep completions from growing:
    see `LengthBucketed`.

    >>> import torch
    >>> rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([30, 10])
    >>> OptimalBaseline().normalize(rewards, torch.zeros(2, dtype=torch.int64), lengths=lengths)
    tensor([ 0.2500, -0.7500])

    Reference: On-Policy RL with Optimal Reward Baseline (OPO), https://arxiv.org/abs/2505.23585
    """

    kind: ClassVar[str] = "optimal_baseline"
    aliases: ClassVar[tuple[str, ...]] = ("opo",)

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return functional.optimal_baseline(values, segments, context.get("lengths"), rows=context.get("rows"))
