"""Nearest valid names for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'? Valid: ..."``, to be appended to a message about an unknown `name`.

    >>> did_you_mean("rnak", ["rank", "zscore"])
    "; did you mean 'rank'? Valid: rank, zscore."
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{hint} Valid: {', '.join(names)}."
