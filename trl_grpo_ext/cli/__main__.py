"""``python -m trl_grpo_ext.cli``, for launchers that start a module, such as ``accelerate launch -m``."""

from __future__ import annotations

import sys

from trl_grpo_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
