"""Makes many small runs fast."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """Leave the imported libraries out of the full collections that accelerate asks for at the start of each run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
