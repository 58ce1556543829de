"""Exceptions of this package: one root, and children that are also the standard error they stand in for.

So ``except ValueError`` keeps working for callers who do not know this package.
"""

from __future__ import annotations


class GRPOExtError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(GRPOExtError, ValueError):
    """A value, or a combination of values, that cannot be trained with."""


class SpecError(ConfigError):
    """A strategy spec that names no known kind or field, or that may not be built from where it comes."""


class ShapeError(GRPOExtError, ValueError):
    """A tensor or list whose shape, length or dtype is not what the contract says."""


class RewardError(GRPOExtError, ValueError):
    """A reward function that did not return what TRL's reward contract asks for."""


class ArgumentError(GRPOExtError, TypeError):
    """A keyword that the trainer does not take."""


class StateError(GRPOExtError, RuntimeError):
    """A saved state that does not fit the strategy it is loaded into, or a strategy that was never called."""


class CompatibilityError(GRPOExtError, ImportError):
    """The installed TRL does not have the seams this package is built on."""


class GRPOExtWarning(UserWarning):
    """Something that trains, but probably not what was meant."""
