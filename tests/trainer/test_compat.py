"""The seams this package uses in TRL, pinned; and what is said when one moves."""

from __future__ import annotations

import pytest
from trl import GRPOTrainer

from trl_grpo_ext import _trl
from trl_grpo_ext.errors import CompatibilityError, ConfigError


def test_the_installed_trl_has_every_seam():
    _trl.check_compatibility()


def test_a_missing_seam_is_named():
    class Moved(GRPOTrainer):
        _compute_loss = None

    with pytest.raises(CompatibilityError, match="GRPOTrainer has no `_compute_loss`"):
        _trl.check_compatibility(Moved)


def test_a_changed_signature_is_shown():
    class Changed(GRPOTrainer):
        def _calculate_rewards(self, inputs, completions):
            return None

    with pytest.raises(CompatibilityError, match=r"_calculate_rewards takes .*completions.*expected"):
        _trl.check_compatibility(Changed)


@pytest.mark.parametrize("version", ["1.11.9", "2.0.0", "0.20.0"])
def test_versions_outside_the_range(version):
    with pytest.raises(CompatibilityError, match=rf"found trl {version}"):
        _trl.check_compatibility(version=version)


@pytest.mark.parametrize("version", ["1.12.0", "1.16.0", "1.17.0.dev0"])
def test_versions_inside_the_range(version):
    _trl.check_compatibility(version=version)


def test_the_old_liger_path_is_refused():
    class Args:
        use_liger_kernel = True

    with pytest.raises(ConfigError, match="bypasses the KL term"):
        _trl.refuse_liger(Args(), version="1.14.0")
    _trl.refuse_liger(Args(), version="1.15.0")


def test_old_trl_gets_async_rewards_as_functions():
    import asyncio
    import inspect

    from trl_grpo_ext import LengthPenalty

    async def judge(completions, **kwargs):
        return [1.0] * len(completions)

    wrapper = LengthPenalty(judge, alpha=1.0, target=0)
    awaited = _trl.awaited_reward(wrapper, version="1.12.0")
    assert inspect.iscoroutinefunction(awaited)
    assert awaited.__name__ == "length_penalty(judge)"
    assert asyncio.run(awaited(prompts=["p"], completions=["c"], completion_ids=[[1, 2]])) == [-1.0]
