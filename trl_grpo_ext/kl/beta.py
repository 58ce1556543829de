"""Beta control: how the weight of the KL term moves from one optimiser step to the next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ConfigError, StateError

MAX_ERROR = 0.2
"""`AdaptiveBeta` looks at the relative distance from its target up to here, so that one outlier cannot run away."""


@dataclass
class _State:
    """What moves during training; the control itself is frozen."""

    beta: float | None = None
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class BetaControl(Strategy, ABC):
    """Sets the weight of the KL term: `begin` once, read `beta`, `update` after each optimiser step.

    Numbers in, numbers out: the caller averages the KL and counts completions over all processes, so that the control
    is the same on each. `state_dict` is JSON-able and goes into checkpoints.
    """

    family: ClassVar[str] = "beta"
    has_state: ClassVar[bool] = True

    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    @abstractmethod
    def initial(self, beta: float) -> float:
        """Return the first beta, given the trainer's own `beta` (0: not set)."""

    @abstractmethod
    def after(self, step: int, *, beta: float, kl: float, n: int) -> float:
        """Return the beta to use once `step` optimiser steps are done; `beta` is the one used in the last of them."""

    def begin(self, beta: float = 0.0) -> float:
        """Start, and return the first beta.

        A control with a start of its own uses that; the trainer's `beta` then only says that there is a KL term. The
        others start from `beta`. Raises `ConfigError` if that is 0 (not set) or out of range.
        """
        first = self.first(beta)
        self._state.beta, self._state.step = first, 0
        return first

    def first(self, beta: float) -> float:
        """Return the beta that `begin` would start with, and raise what it would raise."""
        check_number("beta", beta, at_least=0)
        return self._checked(self.initial(float(beta)))

    @property
    def beta(self) -> float:
        """The weight to use now."""
        return self.initial(0.0) if self._state.beta is None else self._state.beta

    def update(self, kl: float, n: int) -> float:
        """Take note of one optimiser step and return the beta of the next one.

        `kl` is the step's mean KL per token, `n` its number of completions, both over all processes.
        """
        step = self._state.step + 1
        beta = self._checked(self.after(step, beta=self.beta, kl=float(kl), n=int(n)))
        self._state.beta, self._state.step = beta, step
        return beta

    def _checked(self, beta: Any) -> float:
        check_number(f"beta of {self!r}", beta, at_least=0)
        return float(beta)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"beta", "step"}``; beta is None before `begin`."""
        return {"beta": self._state.beta, "step": self._state.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Raises `StateError` if it is not the state of a beta control."""
        try:
            check_number("step", state["step"], at_least=0, integer=True)
            check_number("beta", state["beta"], at_least=0, optional=state["step"] == 0)
        except (KeyError, TypeError, ConfigError) as error:
            raise StateError(f"cannot continue {self!r} from {state!r}: {error!r}") from error
        self._state.beta = None if state["beta"] is None else float(state["beta"])
        self._state.step = int(state["step"])


@dataclass(frozen=True, kw_only=True)
class ConstantBeta(BetaControl):
    """The same beta throughout: `value`, or the trainer's own `beta` if it is None. The default.

    Start at 0.01. A KL that explodes means beta too small or steps too large; a flat KL with a flat reward means beta
    too large. A changed value takes effect when training resumes.

    >>> ConstantBeta().begin(0.04)
    0.04
    """

    kind: ClassVar[str] = "constant_beta"

    value: float | None = None

    def validate(self) -> None:
        check_number("value", self.value, above=0, optional=True)

    def initial(self, beta: float) -> float:
        return _needed(beta, self) if self.value is None else float(self.value)

    def after(self, step: int, *, beta: float, kl: float, n: int) -> float:
        return beta

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        configured = self._state.beta if self.value is None else self.value
        super().load_state_dict(state)
        self._state.beta = self._state.beta if configured is None else configured


@dataclass(frozen=True, kw_only=True)
class LinearBeta(BetaControl):
    """From `start` to `end` in equal parts over `steps` optimiser steps, then `end`.

    ``beta = start + (end - start) * min(step / steps, 1)``. Falling: hold the policy near the reference while the
    reward is still noisy, then let go. Rising: let it explore first. It does not look at the KL; `AdaptiveBeta` does.

    >>> control = LinearBeta(start=1.0, end=0.0, steps=4)
    >>> [control.begin(), *(control.update(kl=0.0, n=8) for _ in range(5))]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    kind: ClassVar[str] = "linear_beta"

    start: float
    end: float
    steps: int

    def validate(self) -> None:
        check_number("start", self.start, at_least=0)
        check_number("end", self.end, at_least=0)
        check_number("steps", self.steps, at_least=1, integer=True)
        if self.start == self.end == 0:
            raise ConfigError("`start` and `end` are both 0, so there would be no KL term at all")

    def initial(self, beta: float) -> float:
        return float(self.start)

    def after(self, step: int, *, beta: float, kl: float, n: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.start * (1 - done) + self.end * done


@dataclass(frozen=True, kw_only=True)
class AdaptiveBeta(BetaControl):
    """Moves beta until the KL is at `target`: up while it is above, down while it is below.

    ``error = clip(kl / target - 1, -0.2, 0.2)``, then ``beta *= 1 + error * n / horizon``, kept in ``[min, max]``, once
    per optimiser step of n completions. With a KL that is 20 % or more too high beta doubles within about
    ``3.5 * horizon / n`` steps: choose `horizon` 10 to 100 times n. A horizon below ``0.2 * n`` could take beta to 0 in
    one step, from where it never grows again; a positive `min` rules that out.

    Use it when the KL you are willing to spend is known and the right beta is not. The target is a mean per token, of
    the estimator that is trained on: its value must be unbiased (`K3`, `K3Plus`, `ExactKL`) to mean what it says.
    A step without a KL (NaN: no token counted) changes nothing.

    >>> control = AdaptiveBeta(target=0.05, horizon=80)
    >>> control.begin(0.01), round(control.update(kl=0.2, n=8), 6)
    (0.01, 0.0102)

    Reference: Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593
    """

    kind: ClassVar[str] = "adaptive_beta"

    target: float
    horizon: float
    min: float = 1e-5
    max: float = 1.0

    def validate(self) -> None:
        check_number("target", self.target, above=0)
        check_number("horizon", self.horizon, above=0)
        check_number("min", self.min, at_least=0)
        check_number("max", self.max, above=0)
        if self.min > self.max:
            raise ConfigError(f"`min` must be <= `max`, got {self.min!r} and {self.max!r}")

    def initial(self, beta: float) -> float:
        if not self.min <= _needed(beta, self) <= self.max:
            raise ConfigError(f"`beta` must start within [min, max] of {self!r}, got {beta!r}")
        return beta

    def after(self, step: int, *, beta: float, kl: float, n: int) -> float:
        if math.isnan(kl):
            return beta
        error = max(-MAX_ERROR, min(MAX_ERROR, kl / self.target - 1))
        return max(self.min, min(self.max, beta * (1 + error * n / self.horizon)))


def _needed(beta: float, control: BetaControl) -> float:
    if beta == 0:
        raise ConfigError(f"`beta` is 0, so {control!r} has nothing to start from; set `beta`, for example to 0.01")
    return beta
