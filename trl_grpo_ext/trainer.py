"""`GRPOExtTrainer`: TRL's `GRPOTrainer` with the decisions delegated to strategies. It gathers, delegates and logs."""

from __future__ import annotations

import inspect
import json
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
from trl_grpo_ext._construction import check_before_loading, numbered, resolve, reward_functions, saved_specs
from trl_grpo_ext._outputs import checked_advantages
from trl_grpo_ext._resume import check_resumed_strategies, read_saved
from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._suggest import nearest
from trl_grpo_ext._trainer_kl import KLMixin
from trl_grpo_ext._trainer_reference import ReferenceMixin
from trl_grpo_ext._trainer_rewards import RewardsMixin
from trl_grpo_ext.advantages import AdvantageStrategy
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.config import GRPOExtConfig, check_settings
from trl_grpo_ext.errors import ArgumentError, ConfigError, StateError
from trl_grpo_ext.kl import ExactKL
from trl_grpo_ext.rewards import bind_rewards

_trl.check_compatibility()

logger = get_logger(__name__)


class GRPOExtTrainer(RewardsMixin, KLMixin, ReferenceMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with swappable strategies. With none of them set it *is* stock TRL, bit for bit.

    Takes all that `GRPOTrainer` takes, and as keywords, each an object or a spec:

    - `advantage`: an `AdvantageStrategy`; replaces `scale_rewards` and `multi_objective_aggregation`.
    - `kl`: a `KLEstimator`; needs ``beta > 0``.
    - `beta_control`: how beta moves; without a `kl` it is TRL's, k3.
    - `reference`: what the KL is measured against; unset, TRL's choice: the base model for a new adapter, a frozen
      copy for a trained one, a second model for full fine-tuning.
    - `shaping`: group-aware reward shaping, one or a list.

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
    strategy_specs: Mapping[str, Any] = MappingProxyType({})
    _scored: tuple[Tensor, list, list, list] | None = None
    _called: set[str] | None = None
    _said: frozenset[str] = frozenset()

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
        _check_keywords(trl_kwargs)
        if args is None:
            args = GRPOExtConfig(_trl.default_args(model))
        keywords = {
            "advantage": advantage, "kl": kl, "beta_control": beta_control, "reference": reference, "shaping": shaping
        }  # fmt: skip
        strategies = resolve(args, keywords)
        kl_weighting = check_settings(args, strategies)
        placement = getattr(args, "kl_placement", "loss")
        if strategies["kl"] is not None or strategies["reference"] is not None or placement == "reward":
            _trl.refuse_liger(args)
        reward_funcs = reward_functions(reward_funcs, strategies.pop("rewards"))
        check_before_loading(strategies, reward_funcs, model, trl_args, trl_kwargs)

        with self._reference_chosen(strategies["reference"], model, args) as chosen:
            super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)

        for name, strategy in strategies.items():
            setattr(self, name, strategy)
        self.kl_weighting = kl_weighting
        self.kl_placement = placement
        self._begin_beta()
        if isinstance(self.kl, ExactKL) and (how := _trl.sharding(self)):
            raise ConfigError(
                f"kl {self.kl!r} needs the whole output head, which {how} splits over processes; use 'k3'"
            )
        self._called = set()
        configured = any(strategy is not None for strategy in strategies.values())
        ours = configured or any(isinstance(function, Strategy) for function in reward_funcs or [])
        self.strategy_specs = saved_specs(args, strategies, reward_funcs if ours else None)
        if ours:
            self.reward_func_names: list[str] = numbered(self.reward_func_names)
            self._guarded = self.accelerator.num_processes > 1
        bind_rewards(self.reward_funcs, self.accelerator.unwrap_model(self.model), self.processing_class)
        against = self._set_up_reference(chosen)
        if ours or self._reference is not None:
            self.add_callback(_AfterStep(self))
            weighting = f"; kl_weighting: {kl_weighting}" if kl_weighting else ""
            described = json.dumps(self.strategy_specs) if ours else "no strategy"
            logger.info("trl-grpo-ext: %s%s%s", described, weighting, against)

    # Rewards and advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.advantage is not None or self.shaping or self.kl_placement == "reward":
            self._scored = (rewards, completion_ids_list, prompts, completions)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._reference_kept_apart():
            output = super()._generate_and_score_completions(inputs)
        if self._scored is not None:
            batch = self._shaped(self._noted(self._reward_batch()))
            self._mark_called("shaping")
            if self.kl_placement == "reward":
                batch = self._with_kl_penalty(batch, output)
            advantages = self._advantages(batch)
            output["advantages"] = _trl.local_slice(self, advantages, len(inputs)).to(output["advantages"].device)
            self._scored = None
        return output

    def _reward_batch(self) -> RewardBatch:
        """Gather what the strategies see: the rewards are global already, lengths and texts are not."""
        rewards, completion_ids, prompts, completions = self._scored  # type: ignore[misc]  # set by the caller
        training = _trl.mode(self) == "train"
        local = torch.tensor(
            [[len(ids), cut] for ids, cut in zip(completion_ids, _trl.is_truncated(self, completion_ids), strict=True)],
            device=rewards.device,
        ).view(-1, 2)
        shape = _trl.gather_tensor(local)
        needs_text = any(getattr(strategy, "needs_text", False) for strategy in [self.advantage, *(self.shaping or [])])
        return RewardBatch(
            rewards=rewards,
            weights=self.reward_weights.to(rewards.device),
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
        self._warn_of(batch)
        advantage = self.advantage or self._stock_advantage()
        advantages, metrics = checked_advantages(advantage, advantage(batch), len(batch.rewards))
        self._mark_called("advantage")
        _trl.log_metrics(self, {f"advantage/{name}": value for name, value in metrics.items()})
        silent_groups = (advantages.view(-1, batch.num_generations) == 0).all(dim=1)
        _trl.rewrite_logs(self, advantages, silent_groups.float().mean().item())
        return advantages

    def _noted(self, batch: RewardBatch) -> RewardBatch:
        """Return the batch, and tell of infinite rewards in it."""
        infinite = batch.rewards.isinf()
        if infinite.any():
            self._say_once("A reward function returned an infinite value; such cells count as not scored.")
            _trl.log_metrics(self, {"rewards/infinite_frac": infinite.float().mean().item()})
            _trl.rewrite_reward(self, batch.scores)
        return batch

    def _warn_of(self, batch: RewardBatch) -> None:
        """Say, once per run, what no metric makes obvious."""
        finite = batch.scores[batch.scores.isfinite()]
        if len(finite) and batch.truncated.all() and finite.max() == finite.min():
            self._say_once(
                f"Every completion was cut off at max_completion_length={self.max_completion_length} and all scores "
                "are equal: nothing is learnt. Raise max_completion_length, or make the prompt ask for shorter answers."
            )

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said |= {message}
            logger.warning(message)

    # What is saved

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super()._save(output_dir, *args, **kwargs)
        self._write_strategies(output_dir or self.args.output_dir)

    def _write_strategies(self, folder: str) -> None:
        if self.strategy_specs:
            meta = {"reference": self._reference.name, "beta": self.args.beta} if self._reference else {}
            hub.write_strategies(folder, self.strategy_specs, **meta)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            self._write_strategies(self.args.output_dir)  # what is pushed during training is that folder
        super()._save_checkpoint(model, trial)
        state = {name: strategy.state_dict() for name, strategy in self._stateful().items()}
        if state and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            hub.write_json(folder / hub.STATE_FILE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        stateful = self._stateful()
        saved = read_saved(Path(checkpoint) / hub.STATE_FILE) if stateful else {}
        check_resumed_strategies(checkpoint, self.strategy_specs, stateful.keys() & saved.keys(), self._reference)
        for name, strategy in stateful.items():
            if name not in saved:
                raise StateError(
                    f"{checkpoint} has no saved state for `{name}={strategy!r}`; resume with the strategies it was "
                    "trained with, or start a new run from its weights"
                )
            strategy.load_state_dict(saved[name])
        if self.beta_control is not None:
            self.beta = self.beta_control.beta

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.strategy_specs and self.is_world_process_zero():
            shown = {**self.strategy_specs, **({"beta": self.args.beta} if self._reference else {})}
            hub.add_card_section(Path(self.args.output_dir) / "README.md", shown, self.state.log_history)

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
        expected = {name for name in ("advantage", "kl", "shaping") if getattr(self, name)}
        if self.kl_placement == "reward":
            expected |= {"kl", "kl_placement"}
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
        self.trainer._update_beta()
        self.trainer._reference_step(state.global_step)


def _check_keywords(keywords: Mapping[str, Any]) -> None:
    known = inspect.signature(GRPOExtTrainer.__init__).parameters
    for name in keywords:
        if name not in known:
            raise ArgumentError(f"GRPOExtTrainer takes no keyword {name!r}{nearest(name, list(known))}")


def _with_our_keywords() -> inspect.Signature:
    """Return TRL's signature plus ours, for `help()` and editors."""
    stock = inspect.signature(GRPOTrainer.__init__)
    ours = inspect.signature(GRPOExtTrainer.__init__).parameters
    extra = [p for p in ours.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return stock.replace(parameters=[*stock.parameters.values(), *extra])


GRPOExtTrainer.__init__.__signature__ = _with_our_keywords()  # type: ignore[attr-defined]
