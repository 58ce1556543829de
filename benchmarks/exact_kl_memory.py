"""Peak memory and time of the chunked full-vocabulary KL against a naive softmax, forward and backward, on the CPU.

    python benchmarks/exact_kl_memory.py            # prints a markdown table
    python benchmarks/exact_kl_memory.py --tokens 256 --vocabulary 32000 --hidden 64

Each row runs in a process of its own, since a process never gives back its peak. Memory is the highest resident set
while the function runs, above what was resident when it started (inputs and head weights); the process asks malloc to
return freed tensors at once. Time is that of the CPU, summed over threads, so that a busy machine does not distort it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from trl_grpo_ext.functional.exact_kl import exact_kl

MIB = 2**20
CASES = {
    "naive": "naive softmax",
    "chunked": "`exact_kl`",
    "naive-head": "naive softmax, head trained too",
    "chunked-head": "`exact_kl`, head trained too",
}


def naive_kl(hidden: Tensor, ref_hidden: Tensor, weight: Tensor, ref_weight: Tensor) -> Tensor:
    """Full log-softmax of both models."""
    logps = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        ref_logps = (ref_hidden @ ref_weight.T).log_softmax(-1)
    return (logps.exp() * (logps - ref_logps)).sum(-1)


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS now, VmHWM at the highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def measure(case: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """Run one case in this process; return seconds, bytes and a checksum of the value and the gradient."""
    generator = torch.Generator().manual_seed(0)
    function = naive_kl if case.startswith("naive") else exact_kl
    hidden = torch.randn(1, tokens, width, generator=generator)
    ref_hidden = hidden + 0.3 * torch.randn(1, tokens, width, generator=generator)
    hidden.requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 2 / width**0.5).requires_grad_("head" in case)
    small = function(hidden[:, :2].detach(), ref_hidden[:, :2], weight[:8].detach(), weight[:8].detach())  # warm up
    del small
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = resident("VmRSS"), time.process_time()
    value = function(hidden, ref_hidden, weight, weight.detach())
    value.sum().backward()
    seconds, peak = time.process_time() - start, resident("VmHWM") - before
    assert hidden.grad is not None
    return {"seconds": seconds, "peak": peak, "kl": value.mean().item(), "grad": hidden.grad.norm().item()}


def in_child(case: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run `measure` in a fresh process."""
    sizes = [str(arguments.tokens), str(arguments.vocabulary), str(arguments.hidden)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--case", case, "--tokens", sizes[0], "--vocabulary", sizes[1]]
    result = subprocess.run([*command, "--hidden", sizes[2]], env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{case} failed ({result.returncode}): {result.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return measured


def report(arguments: argparse.Namespace) -> str:
    """Run every case and return the markdown table."""
    results = {case: in_child(case, arguments) for case in arguments.cases}
    one = arguments.tokens * arguments.vocabulary * 4
    lines = [
        f"T = {arguments.tokens}, V = {arguments.vocabulary}, H = {arguments.hidden}, float32, "
        f"{torch.get_num_threads()} threads; one (T, V) tensor is {one / MIB:.0f} MiB.",
        "",
        "| | peak memory | in (T, V) tensors | CPU time | time / naive | mean KL |",
        "|---|---|---|---|---|---|",
    ]
    for case, result in results.items():
        base = results.get(case.replace("chunked", "naive"))
        ratio = f"{result['seconds'] / base['seconds']:.2f}" if base else "-"
        lines.append(
            f"| {CASES[case]} | {result['peak'] / MIB:.0f} MiB | {result['peak'] / one:.2f} | "
            f"{result['seconds']:.1f} s | {ratio} | {result['kl']:.6f} |"
        )
        if base and abs(result["grad"] / base["grad"] - 1) > 1e-4:
            raise RuntimeError(f"{case}: gradient differs from the naive one, {result} against {base}")
    if "chunked" in results and results["chunked"]["peak"] > one / 4:
        lines.append(f"\nOver the budget of a quarter of one (T, V) tensor, {one / 4 / MIB:.0f} MiB.")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line; a `--case` is what a child runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments.tokens, arguments.vocabulary, arguments.hidden)))
    else:
        print(report(arguments))


if __name__ == "__main__":
    main()
