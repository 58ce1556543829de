"""References: what the KL is measured against."""

from trl_grpo_ext.reference.base import REF_ADAPTER, AdapterOff, ReferenceStrategy
from trl_grpo_ext.reference.preserve import preserved

__all__ = [
    "REF_ADAPTER",
    "AdapterOff",
    "ReferenceStrategy",
    "preserved",
]
