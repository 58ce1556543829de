"""`GRPOExtTrainer`: TRL's `GRPOTrainer` with the decisions delegated to strategies. It gathers, delegates and logs."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from trl_grpo_ext import _trl, hub
from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext.advantages import AdvantageStrategy
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.config import LIST_FIELDS, SPEC_FIELDS, GRPOExtConfig, build_field, check_settings
from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.kl import KLEstimator
from trl_grpo_ext.reference import ReferenceStrategy, preserved
from trl_grpo_ext.rewards import RewardWrapper, is_async
from trl_grpo_ext.specs import from_spec, to_spec

_trl.check_compatibility()

logger = get_logger(__name__)


class GRPOExtTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with swappable strategies. With none of them set it *is* stock TRL, bit for bit.

    Takes all that `GRPOTrainer` takes, and as keywords, each an object or a spec:

    - `advantage`: an `AdvantageStrategy`; replaces `scale_rewards` and `multi_objective_aggregation`.
    - `kl`: a `KLEstimator`; needs ``beta > 0``.
    - `reference`: what the KL is measured against.
    - `beta_control`, `shaping`: see the config.

    The same can be set in `GRPOExtConfig`; setting one in both places is an error. Reward functions may be given as
    `reward_funcs`, with wrappers and specs (mappings) among them, or in the config as `rewards`.

    Raises `ConfigError` (a ``ValueError``) before anything is loaded if the settings do not go together.

    Example::

        trainer = GRPOExtTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=LengthPenalty(accuracy_reward, alpha=0.002, target=256),
            args=GRPOExtConfig(output_dir="out", beta=0.01),
            train_dataset=dataset,
            peft_config=LoraConfig(),
            advantage=Rank(),
            kl=K3(),
        )
        trainer.train()
    """

    # Class-level defaults: code around TRL builds bare trainers and calls one method.
    advantage: AdvantageStrategy | None = None
    kl: KLEstimator | None = None
    kl_weighting: str | None = None
    beta_control: Any = None
    reference: ReferenceStrategy | None = None
    shaping: list[Any] | None = None
    strategy_specs: Mapping[str, Any] = MappingProxyType({})
    _scored: tuple[Tensor, list, list, list] | None = None
    _policy_logps: list[Tensor] | None = None
    _called: set[str] | None = None
    _warned: bool = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *trl_args: Any,
        advantage: Any = None,
        kl: Any = None,
        beta_control: Any = None,
        reference: Any = None,
        shaping: Any = None,
        **trl_kwargs: Any,
    ) -> None:
        if args is None:
            args = GRPOExtConfig(_trl.default_args(model))
        keywords = {
            "advantage": advantage, "kl": kl, "beta_control": beta_control, "reference": reference, "shaping": shaping
        }  # fmt: skip
        strategies = _resolve(args, keywords)
        kl_weighting = check_settings(args, strategies)
        if strategies["kl"] is not None:
            _trl.refuse_liger(args)
        reward_funcs = _reward_functions(reward_funcs, strategies.pop("rewards"))

        super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)

        for name, strategy in strategies.items():
            setattr(self, name, strategy)
        self.kl_weighting = kl_weighting
        self.strategy_specs = _specs(args, strategies)
        self._called = set()
        configured = any(strategy is not None for strategy in strategies.values())
        if configured or any(isinstance(function, Strategy) for function in self.reward_funcs):
            self.reward_func_names: list[str] = _unique(self.reward_func_names)
        if self.reference is not None:
            self.reference.prepare(_trl.policy_of(self) or self.accelerator.unwrap_model(self.model))
        if configured:
            self.add_callback(_AfterStep(self))
            logger.info("trl-grpo-ext: %s", json.dumps(self.strategy_specs))

    # Rewards and advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.advantage is not None or self.shaping:
            self._scored = (rewards, completion_ids_list, prompts, completions)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        policy = _trl.policy_of(self) if self.beta != 0 else None
        if policy is None:
            output = super()._generate_and_score_completions(inputs)
        else:
            with preserved(policy):  # the reference pass switches adapters, and PEFT does not put everything back
                output = super()._generate_and_score_completions(inputs)
        if self._scored is not None:
            advantages = self._advantages(self._reward_batch())
            output["advantages"] = _trl.local_slice(self, advantages, len(inputs)).to(output["advantages"].device)
            self._scored = None
        return output

    def _reward_batch(self) -> RewardBatch:
        """Gather what the strategies see: the rewards are global already, lengths and texts are not."""
        rewards, completion_ids, prompts, completions = self._scored  # type: ignore[misc]  # set by the caller
        training = _trl.mode(self) == "train"
        local = torch.tensor(
            [
                [len(ids), cut]
                for ids, cut in zip(completion_ids, _trl.is_truncated(self, completion_ids), strict=True)
            ],
            device=rewards.device,
        ).view(-1, 2)
        shape = _trl.gather_tensor(local)
        needs_text = any(
            getattr(strategy, "needs_text", False) for strategy in [self.advantage, *(self.shaping or [])]
        )
        return RewardBatch(
            rewards=rewards,
            weights=self.reward_weights,
            lengths=shape[:, 0],
            truncated=shape[:, 1].bool(),
            num_generations=self.num_generations if training else self.num_generations_eval,
            names=tuple(self.reward_func_names),
            training=training,
            prompts=_trl.gather_list(prompts) if needs_text else None,
            completions=_trl.gather_list(completions) if needs_text else None,
        )

    def _advantages(self, batch: RewardBatch) -> Tensor:
        """Return the `(N,)` advantages of the global batch, and make the logs tell of them."""
        self._warn_once(batch)
        advantages, metrics = self.advantage(batch)  # type: ignore[misc]  # set where this is called
        self._mark_called("advantage")
        metrics = {f"advantage/{name}": value for name, value in metrics.items()}
        infinite = batch.rewards.isinf()
        if infinite.any():
            metrics["rewards/infinite_frac"] = infinite.float().mean().item()
        _trl.log_metrics(self, metrics)
        silent_groups = (advantages.view(-1, batch.num_generations) == 0).all(dim=1)
        _trl.rewrite_logs(self, advantages, silent_groups.float().mean().item())
        return advantages

    def _warn_once(self, batch: RewardBatch) -> None:
        """Say, once per run, what no metric makes obvious."""
        if self._warned:
            return
        if batch.rewards.isinf().any():
            self._warned = True
            logger.warning("A reward function returned an infinite value; such cells count as not scored.")
        finite = batch.scores[batch.scores.isfinite()]
        if len(finite) and batch.truncated.all() and finite.max() == finite.min():
            self._warned = True
            logger.warning(
                "Every completion was cut off at max_completion_length=%s and all scores are equal: nothing is learnt. "
                "Raise max_completion_length, or make the prompt ask for shorter answers.",
                self.max_completion_length,
            )

    # KL

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._policy_logps is not None:
            self._policy_logps.append(result[0])
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.kl is None:
            if getattr(self.args, "use_bias_correction_kl", False) is not None:
                return super()._compute_loss(model, inputs)
            with _trl.overridden(self.args, use_bias_correction_kl=_trl.stock_default("use_bias_correction_kl")):
                return super()._compute_loss(model, inputs)
        # TRL computes everything but the KL, and the policy's log-probs are picked up on the way.
        with _trl.overridden(self, beta=0.0, _policy_logps=[]):
            loss = super()._compute_loss(model, inputs)
            (logps,) = self._policy_logps  # type: ignore[misc]
        return loss + self._kl_loss(logps, inputs)

    def _kl_loss(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return ``beta * sum(kl * w)`` for `(B, T)` policy log-probs, w being the loss type's weight of each token."""
        mask = _trl.loss_mask(inputs)
        terms = self.kl(  # type: ignore[misc]  # set where this is called
            logps,
            inputs["ref_per_token_logps"],
            inputs.get("old_per_token_logps"),
            weighting=self.kl_weighting,
            mask=mask,
        )
        self._mark_called("kl")
        _trl.log_metrics(self, {"kl": _trl.global_mean(self, terms.detach(), mask), "beta": self.beta})
        return self.beta * (terms * _trl.token_weights(self, inputs, mask)).sum()

    # What is saved

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super()._save(output_dir, *args, **kwargs)
        if self.strategy_specs:
            hub.write_strategies(output_dir or self.args.output_dir, self.strategy_specs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        state = {name: strategy.state_dict() for name, strategy in self._stateful().items()}
        if state and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            hub.write_json(folder / hub.STATE_FILE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        stateful = self._stateful()
        if checkpoint is None or not stateful:
            return
        path = Path(checkpoint) / hub.STATE_FILE
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name, strategy in stateful.items():
            if name not in saved:
                raise StateError(
                    f"{checkpoint} has no saved state for `{name}={strategy!r}`; resume with the strategies it was "
                    "trained with, or start a new run from its weights"
                )
            strategy.load_state_dict(saved[name])

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.strategy_specs and self.is_world_process_zero():
            hub.add_card_section(Path(self.args.output_dir) / "README.md", self.strategy_specs)

    # Bookkeeping

    def _stateful(self) -> dict[str, Any]:
        """Return the configured strategies that carry state: field name -> object."""
        strategies = {"advantage": self.advantage, "beta_control": self.beta_control, "reference": self.reference}
        return {name: strategy for name, strategy in strategies.items() if getattr(strategy, "has_state", False)}

    def _mark_called(self, name: str) -> None:
        if self._called is not None:
            self._called.add(name)

    def _check_called(self) -> None:
        """Raise `StateError` if a configured strategy took no part in the first step: it would be silently ignored."""
        expected = {name for name in ("advantage", "kl") if getattr(self, name) is not None}
        silent = sorted(expected - (self._called or set()))
        if silent:
            raise StateError(
                f"the first training step did not call the configured strategies {silent}: something between this "
                "trainer and TRL bypasses them (a subclass that replaces `_compute_loss` or "
                "`_generate_and_score_completions`?)"
            )


class _AfterStep(TrainerCallback):
    """Runs what has to happen once per optimiser step."""

    def __init__(self, trainer: GRPOExtTrainer) -> None:
        self.trainer = trainer
        self.checked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.checked:
            self.trainer._check_called()
            self.checked = True


def _resolve(args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return every strategy, from a keyword or from the config field of the same name."""
    resolved = {}
    for name in SPEC_FIELDS:
        keyword, field = keywords.get(name), getattr(args, name, None)
        if keyword is not None and field is not None:
            raise ConfigError(
                f"`{name}` is set both as a keyword of the trainer ({keyword!r}) and in the config ({field!r}); "
                "set it in one place"
            )
        resolved[name] = build_field(name, field if keyword is None else keyword)
    return resolved


def _reward_functions(reward_funcs: Any, rewards: list[Any] | None) -> Any:
    """Return the reward functions for TRL in a list of its own; mappings are specs, a string is TRL's model id."""
    if rewards is not None:
        if reward_funcs is not None:
            raise ConfigError(
                f"reward functions are set both as `reward_funcs` ({reward_funcs!r}) and in the config's `rewards` "
                f"({rewards!r}); set them in one place"
            )
        reward_funcs = rewards
    if reward_funcs is None:
        return None
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [from_spec(f, family="reward") if isinstance(f, dict) else f for f in functions]
    return [_trl.awaited_reward(f) if isinstance(f, RewardWrapper) and is_async(f) else f for f in functions]


def _specs(args: Any, strategies: dict[str, Any]) -> dict[str, Any]:
    """Return what a later run needs to use the same strategies: config field -> spec."""
    specs = args.strategy_specs() if isinstance(args, GRPOExtConfig) else {}
    for name, strategy in strategies.items():
        if strategy is not None:
            specs[name] = [to_spec(s) for s in strategy] if name in LIST_FIELDS else to_spec(strategy)
    return specs


def _unique(names: list[str]) -> list[str]:
    """Number the second and later of equal names: TRL would merge their metrics."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _with_our_keywords() -> inspect.Signature:
    """Return TRL's signature plus ours, for `help()` and editors."""
    stock = inspect.signature(GRPOTrainer.__init__)
    ours = inspect.signature(GRPOExtTrainer.__init__).parameters
    extra = [p for p in ours.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return stock.replace(parameters=[*stock.parameters.values(), *extra])


GRPOExtTrainer.__init__.__signature__ = _with_our_keywords()  # type: ignore[attr-defined]
