"""The token-level estimators. What each one's value and gradient are worth is in the table of docs/kl.md."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.functional import kl as functional
from trl_grpo_ext.kl.base import SampledKL


@dataclass(frozen=True, kw_only=True)
class K1(SampledKL):
    """The plain log-ratio ``d``: unbiased value, high variance, may be negative.

    Left plain in the loss its expected gradient is zero, so it regularises nothing; with the importance ratio it is
    exact, on- and off-policy. Good as a number to watch.

    >>> import torch
    >>> K1()(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]))
    tensor([[2.]])

    Reference: http://joschu.net/blog/kl-approx.html
    """

    kind: ClassVar[str] = "k1"
    aliases: ClassVar[tuple[str, ...]] = ("naive",)
    gradient: ClassVar[Mapping[str, str]] = {"none": "zero", "ratio": "exact", "detached": "zero"}

    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        return functional.k1(d)


@dataclass(frozen=True, kw_only=True)
class AbsK(SampledKL):
    """The absolute log-ratio ``|d|``: never negative, but its value and its gradient estimate no KL.

    Its pull has the same strength however small the difference is, so a policy never settles at the reference. Here for
    comparison with other code bases; prefer `K2` or `K3`. It trains with a warning.

    >>> import torch
    >>> AbsK()(torch.tensor([[-3.0]]), torch.tensor([[-1.0]]))
    tensor([[2.]])
    """

    kind: ClassVar[str] = "abs"
    gradient: ClassVar[Mapping[str, str]] = {"none": "biased", "ratio": "biased", "detached": "biased"}

    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        return functional.absolute(d)


@dataclass(frozen=True, kw_only=True)
class K2(SampledKL):
    """Half the squared log-ratio, ``d^2 / 2``: biased value, exact gradient where it counts.

    Its expected on-policy gradient is exactly the KL's; off-policy it needs the ratio *held fixed*. Its slope is ``d``,
    which never explodes. The value overstates large divergences: log `K3` beside it.

    >>> import torch
    >>> K2()(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]))
    tensor([[2.]])

    Reference: http://joschu.net/blog/kl-approx.html
    """

    kind: ClassVar[str] = "k2"
    aliases: ClassVar[tuple[str, ...]] = ("mse",)
    gradient: ClassVar[Mapping[str, str]] = {"none": "exact", "ratio": "wrong", "detached": "exact"}

    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        return functional.k2(d)


@dataclass(frozen=True, kw_only=True)
class _ClampedKL(SampledKL, ABC):
    """Shared by the estimators with an exp in them: the log-ratio is clamped to ``+-max_log_ratio`` before it."""

    max_log_ratio: float | None = 20.0

    def validate(self) -> None:
        check_number("max_log_ratio", self.max_log_ratio, above=0, optional=True)

    def limit(self, *, half: bool) -> float | None:
        """The clamp in use: for float16 log-probs it is 11 at most, so that their gradient is finite."""
        if half and self.max_log_ratio is not None:
            return min(self.max_log_ratio, functional.MAX_LOG_RATIO_FP16)
        return self.max_log_ratio

    def clipped(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        limit = self.limit(half=logps.dtype == torch.float16)
        if limit is None:
            return super().clipped(logps, ref_logps)
        return functional.log_ratio(logps, ref_logps).abs() > limit


@dataclass(frozen=True, kw_only=True)
class K3(_ClampedKL):
    """``exp(-d) - 1 + d``: unbiased, low variance, never negative. TRL's estimator.

    With the importance ratio its gradient is exact, on- and off-policy (TRL's default since 1.12); left plain it is
    that of the *forward* KL. The log-ratio is clamped to ``+-max_log_ratio`` before exp and in the linear term, so
    values stay finite; None switches the clamp off. For float16 log-probs the clamp is 11 at most. Inside the clamp the
    value equals TRL's bit for bit, and the gradient of the ratio-weighted term is the closed form ``rho * d``, exact
    for every d.

    >>> import torch
    >>> K3()(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]))
    tensor([[1.1353]])

    Reference: http://joschu.net/blog/kl-approx.html
    """

    kind: ClassVar[str] = "k3"
    aliases: ClassVar[tuple[str, ...]] = ("low_var_kl",)
    gradient: ClassVar[Mapping[str, str]] = {"none": "forward", "ratio": "exact", "detached": "forward"}

    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        return functional.k3(d, self.limit(half=half))


@dataclass(frozen=True, kw_only=True)
class K3Plus(_ClampedKL):
    """The value of `K3` with the gradient of `K2` (straight-through): both of the right kind.

    The value is unbiased and never negative, so the logged number is the KL; the gradient is ``d``, which is exact
    on-policy and, with the ratio held fixed, off-policy, and never explodes. The clamp bounds the value only.

    >>> import torch
    >>> logps = torch.tensor([[-1.0]], requires_grad=True)
    >>> value = K3Plus()(logps, torch.tensor([[-3.0]]))
    >>> value.backward()
    >>> value.detach(), logps.grad
    (tensor([[1.1353]]), tensor([[2.]]))

    Reference: https://arxiv.org/abs/2506.09477
    """

    kind: ClassVar[str] = "k3+"
    gradient: ClassVar[Mapping[str, str]] = {"none": "exact", "ratio": "wrong", "detached": "exact"}

    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        return functional.k3_plus(d, self.limit(half=half))
