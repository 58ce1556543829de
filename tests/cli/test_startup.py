"""Starting up: the help and the package itself cost next to nothing, beside what `import torch` costs here and now."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from trl_grpo_ext.cli import COMMANDS


def seconds(*command):
    """The best of three, so that a busy machine does not decide."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.slow
def test_help_and_import_cost_little():
    nothing, torch = seconds("-c", "pass"), seconds("-c", "import torch")
    help_text, package = seconds("-m", "trl_grpo_ext.cli", "--help"), seconds("-c", "import trl_grpo_ext")
    assert help_text < min(2.0, nothing + torch / 2)
    assert package < nothing + torch / 2


def test_no_commands_help_imports_anything_heavy():
    code = (
        "import sys\nfrom trl_grpo_ext.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'trl', 'transformers', 'numpy', 'accelerate'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]")
    assert all(f"trl-grpo-ext {name}" in result.stdout for name in COMMANDS)
