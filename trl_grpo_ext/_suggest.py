"""Pieces of error messages: the nearest valid names, and values shown at a bearable length."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_SHOWN = 200
"""How much of a value an error message shows."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'? Valid: ..."``, to be appended to a message about an unknown `name`.

    >>> did_you_mean("rnak", ["rank", "zscore"])
    "; did you mean 'rank'? Valid: rank, zscore."
    """
    names = sorted(valid)
    return f"{nearest(name, names) or '.'} Valid: {', '.join(names)}."


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"``, for where the valid names are many or known; "" if none is near.

    >>> nearest("rnak", ["rank", "zscore"])
    "; did you mean 'rank'?"
    """
    close = difflib.get_close_matches(name, sorted(valid), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def shortened(value: Any) -> str:
    """Return the value's repr, cut if it is long, with its type then; one that can't be shown is told by its type.

    >>> shortened("rank"), shortened(10**5000)
    ("'rank'", 'an int too large to show')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return f"an {type(value).__name__} too large to show"
    except Exception:  # somebody else's repr
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... of type {type(value).__name__}"
