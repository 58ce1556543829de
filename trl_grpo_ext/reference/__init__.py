"""References: what the KL is measured against."""

from trl_grpo_ext.reference.anchor import MovingAnchor
from trl_grpo_ext.reference.base import REF_ADAPTER, ReferenceStrategy
from trl_grpo_ext.reference.checks import base_digest, base_unchanged, check_trainable
from trl_grpo_ext.reference.frozen import AdapterOff, FrozenAdapter, FullCopy
from trl_grpo_ext.reference.lifecycle import (
    check_resumed,
    default_reference,
    kept_dtypes,
    start_warning,
    stock_reference,
)
from trl_grpo_ext.reference.preserve import preserved

__all__ = [
    "REF_ADAPTER",
    "AdapterOff",
    "FrozenAdapter",
    "FullCopy",
    "MovingAnchor",
    "ReferenceStrategy",
    "base_digest",
    "base_unchanged",
    "check_resumed",
    "check_trainable",
    "default_reference",
    "kept_dtypes",
    "preserved",
    "start_warning",
    "stock_reference",
]
