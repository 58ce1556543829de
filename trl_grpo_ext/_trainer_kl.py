"""The trainer's KL: the term in the loss, the penalty on the score, and the control of beta."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_grpo_ext import _trl
from trl_grpo_ext._outputs import check_finite_kl, checked_terms
from trl_grpo_ext._trl import GRPOTrainer
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.functional.masked import masked_sum
from trl_grpo_ext.kl import BetaControl, ExactKL, KLEstimator, SampledKL, exact_weighting

PENALTY_COLUMN = "kl_penalty"
"""The reward column that carries the KL with `kl_placement="reward"`."""


class _Pass(NamedTuple):
    """What a forward pass leaves for a KL over the vocabulary: `(B, P + T, H)` hidden states, and the output head."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None


class KLMixin(GRPOTrainer):
    """Puts a `KLEstimator` in the place of TRL's KL term, whose reference pass and loss normalisation it keeps."""

    kl: KLEstimator | None = None
    kl_log: list[KLEstimator] | None = None
    kl_weighting: str | None = None
    kl_placement: str = "loss"
    beta_control: BetaControl | None = None
    _policy_logps: list[Tensor] | None = None
    # KL summed, tokens and completions of the optimiser step under way, over all processes.
    _kl_window: tuple[float, float, int] = (0.0, 0.0, 0)
    # With the KL in the reward: sum and tokens of the generation that the optimiser steps under way learn from.
    _generation_kl: tuple[float, float] = (0.0, 0.0)

    def _begin_beta(self) -> None:
        """Take the first beta from the control, if there is one."""
        if self.beta_control is not None:
            self.beta: float = self.beta_control.begin(self.args.beta)

    def _update_beta(self) -> None:
        """At the end of an optimiser step: let the control see its KL."""
        total, tokens, completions = self._kl_window
        self._kl_window = (0.0, 0.0, 0)
        if self.beta_control is not None:
            self.beta = self.beta_control.update(total / tokens if tokens else float("nan"), completions)

    # In the loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._policy_logps is not None:
            self._policy_logps.append(result[0])
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.kl_placement == "reward":
            self._mark_called("kl_placement")
            self._see_kl(*self._generation_kl, len(inputs["completion_ids"]))
            with _trl.overridden(self, beta=0.0):
                return super()._compute_loss(model, inputs)
        if self.kl is None:
            if getattr(self.args, "use_bias_correction_kl", False) is not None:
                return super()._compute_loss(model, inputs)
            with _trl.overridden(self.args, use_bias_correction_kl=_trl.stock_default("use_bias_correction_kl")):
                return super()._compute_loss(model, inputs)
        reference = self._reference_pass(inputs) if isinstance(self.kl, ExactKL) else None
        # TRL computes everything but the KL; what the KL needs of the policy's forward pass is picked up on the way.
        with (
            _trl.overridden(self, beta=0.0, _policy_logps=[]),
            _trl.captured_hidden(self, model, wanted=reference is not None) as hidden,
        ):
            loss = super()._compute_loss(model, inputs)
            (logps,) = self._policy_logps or []
        pair = None if reference is None else (_Pass(hidden[0], *_trl.output_head(self, self.model)), reference)
        return loss + self._kl_loss(logps, inputs, pair)

    def _kl_loss(self, logps: Tensor, inputs: dict[str, Any], passes: tuple[_Pass, _Pass] | None = None) -> Tensor:
        """Return ``beta * sum(kl * w)`` for `(B, T)` policy log-probs, w being the loss type's weight of each token.

        `passes` are the policy's and the reference's, for an estimator over the whole vocabulary.
        """
        mask = _trl.loss_mask(inputs)
        if passes is not None:
            terms = self._exact_terms(*passes, mask)
        else:
            old_logps = inputs.get("old_per_token_logps")
            weighting = self.kl_weighting or exact_weighting(self.kl) or "none"  # type: ignore[arg-type]
            settings = {"old_logps": old_logps, "weighting": weighting, "mask": mask}
            terms = self.kl(logps, inputs["ref_per_token_logps"], **settings)  # type: ignore[misc]  # set where called
        terms = checked_terms(self.kl, terms, logps)
        self._log_kl(terms.detach(), logps.detach(), inputs["ref_per_token_logps"], mask)
        return self.beta * masked_sum(terms * _trl.token_weights(self, inputs, mask), mask)

    def _reference_pass(self, inputs: dict[str, Any]) -> _Pass:
        """Make the reference's forward pass, without gradient."""
        with (
            torch.no_grad(),
            _trl.reference_model(self) as model,
            _trl.captured_hidden(self, model, wanted=True) as hidden,
        ):
            _trl.forward(self, model, inputs)
            return _Pass(hidden[0], *_trl.output_head(self, model))

    def _exact_terms(self, policy: _Pass, reference: _Pass, mask: Tensor) -> Tensor:
        """Return the `(B, T)` exact KL at the positions that predict the completion's tokens."""
        positions = slice(-mask.size(1) - 1, -1)
        with _trl.head_precision(self) as dtype:
            return self.kl.from_hidden(  # type: ignore[union-attr]  # an ExactKL where this is called
                policy.hidden[:, positions].to(dtype),
                reference.hidden[:, positions].to(dtype),
                policy.head,
                reference.head,
                bias=policy.bias,
                ref_bias=reference.bias,
                mask=mask,
                **_trl.logit_settings(self),
            )

    def _log_kl(self, terms: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> None:
        """Log the trained term as `kl`, the plain value of each estimator, the clamped share, and beta."""
        values = {"kl": terms}
        watched = [*([self.kl] if isinstance(self.kl, SampledKL) else []), *(self.kl_log or [])]
        for estimator in watched:
            values[f"kl/{estimator.name}"] = estimator(logps, ref_logps, mask=mask)
        if isinstance(self.kl, SampledKL):
            values["kl/clipped_frac"] = self.kl.clipped(logps, ref_logps).float()
        totals, tokens = _trl.global_sums(self, list(values.values()), mask)
        check_finite_kl(self.kl, totals[0])
        means = {name: total / max(tokens, 1.0) for name, total in zip(values, totals, strict=True)}
        _trl.log_metrics(self, {**means, "beta": self.beta})
        self._see_kl(totals[0], tokens, len(mask))
        self._mark_called("kl")

    def _see_kl(self, total: float, tokens: float, rows: int) -> None:
        """In training, add a micro-batch (`rows` on this process) to what the beta control will see of this step."""
        if _trl.mode(self) == "train":
            seen_total, seen_tokens, completions = self._kl_window
            rows *= self.accelerator.num_processes
            self._kl_window = (seen_total + total, seen_tokens + tokens, completions + rows)

    # In the reward

    def _with_kl_penalty(self, batch: RewardBatch, output: dict[str, Any]) -> RewardBatch:
        """Return the global batch with ``-beta * sum_t k1_t`` of each completion as one more reward column."""
        mask = _trl.loss_mask(output)
        logps = output.get("old_per_token_logps")
        if logps is None:  # TRL skips them where the loss can do without
            with torch.no_grad():
                logps = _trl.forward(self, self.model, output)
        k1 = torch.where(mask.bool(), logps - output["ref_per_token_logps"], 0.0)
        (total,), tokens = _trl.global_sums(self, [k1], mask)
        _trl.log_metrics(self, {"kl": total / max(tokens, 1.0), "beta": self.beta})
        if _trl.mode(self) == "train":
            self._generation_kl = (total, tokens)
        self._mark_called("kl")
        penalty = -self.beta * _trl.gather_tensor(k1.sum(1).float())
        column = torch.where(batch.scores.isnan(), torch.nan, penalty.to(batch.rewards.device, batch.rewards.dtype))
        _trl.log_reward_column(self, PENALTY_COLUMN, column)
        penalised = dataclasses.replace(
            batch,
            rewards=torch.cat([batch.rewards, column.unsqueeze(1)], dim=1),
            weights=torch.cat([batch.weights, batch.weights.new_ones(1)]),
            names=(*batch.names, PENALTY_COLUMN),
        )
        _trl.rewrite_reward(self, penalised.scores)
        return penalised

    def _mark_called(self, name: str) -> None:
        """Note that a strategy took part; see the trainer."""
