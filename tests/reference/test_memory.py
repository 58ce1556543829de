"""What each reference weighs, counted on the trainer."""

from __future__ import annotations

import pytest

from tests.reference.policies import base_model, make_trainer, trained_policy
from trl_grpo_ext.reference import REF_ADAPTER, AdapterOff, FrozenAdapter, FullCopy, MovingAnchor
from trl_grpo_ext.reference.adapters import adapter_parameters


def weight_bytes(*modules) -> int:
    """Return the size of all weights, each storage counted once."""
    tensors = [t for m in modules if m is not None for t in [*m.parameters(), *m.buffers()]]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("reference", [AdapterOff(), FrozenAdapter(), MovingAnchor(every=9)], ids=lambda s: s.name)
def test_beside_an_adapter(tiny_model_dir, tmp_path, reference):
    policy = trained_policy(tiny_model_dir)
    alone = weight_bytes(policy)
    adapter = sum(p.nbytes for p in adapter_parameters(policy, "default").values())
    trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=reference)
    extra = weight_bytes(trainer.model, trainer.ref_model) - alone
    assert trainer.ref_model is None
    assert extra == (0 if reference.name == "adapter_off" else adapter)
    assert sum(p.nbytes for p in adapter_parameters(policy, REF_ADAPTER).values()) == extra


def test_a_full_copy(tiny_model_dir, tmp_path):
    model = weight_bytes(base_model(tiny_model_dir))
    trainer = make_trainer(tiny_model_dir, tiny_model_dir, tmp_path, reference=FullCopy())
    assert weight_bytes(trainer.model, trainer.ref_model) == 2 * model
