"""What each KL estimator's value and gradient are worth: by exact enumeration, and by sampling. Feeds docs/kl.md.

    python benchmarks/kl_estimators.py            # prints the tables
    python benchmarks/kl_estimators.py --write    # writes tables into docs/kl.md and figures into docs/img

The policy is a categorical distribution over a small vocabulary, in float64. One token x is drawn from the policy (or,
off-policy, from an older one); its loss term k has the gradient ``slope(x) * (onehot(x) - pi)`` by the logits. Summing
over the vocabulary gives expectations and variances without sampling noise.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_grpo_ext.kl import K1, K2, K3, WEIGHTINGS, AbsK, ExactKL, K3Plus, SampledKL, exact_weighting

DOCS = Path(__file__).resolve().parents[1] / "docs"
SAMPLED: list[SampledKL] = [K1(), AbsK(), K2(), K3(), K3Plus()]
VOCABULARY = 16
DISTANCES = {"near": 0.05, "trained": 0.4, "far": 1.2}
OFF_POLICY_STEPS = (0, 1, 2, 4, 8, 16)
NEVER_USED = "-"


class Token(NamedTuple):
    """`(V,)` loss terms of every possible token, their gradients by the logits `(V, V)`, and the chances `(V,)`."""

    value: Tensor
    grad: Tensor
    chance: Tensor

    def mean_value(self) -> Tensor:
        """Expected loss term."""
        return self.chance @ self.value

    def mean_grad(self) -> Tensor:
        """Expected gradient, `(V,)`."""
        return self.chance @ self.grad

    def value_std(self) -> Tensor:
        """Standard deviation of the term of one sampled token."""
        return (self.chance @ (self.value - self.mean_value()).square()).sqrt()

    def grad_std(self) -> Tensor:
        """Root mean square distance of one token's gradient from the expected one."""
        return (self.chance @ (self.grad - self.mean_grad()).square().sum(-1)).sqrt()


def distributions(distance: float) -> tuple[Tensor, Tensor]:
    """Log-probs `(V,)` of a policy and a reference whose logits differ by `distance` times a standard normal."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    moved = logits + distance * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    return moved.log_softmax(-1), logits.log_softmax(-1)


def older(logps: Tensor, steps: int) -> Tensor:
    """Log-probs of the policy that sampled, `steps` policy-gradient steps on fixed rewards before `logps`."""
    rewards = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = logps.clone()
    for _ in range(steps):
        probs = logits.softmax(-1)
        logits = logits - 0.5 * probs * (rewards - probs @ rewards)
    return logits.log_softmax(-1)


def kl_and_grad(logps: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """The exact KL and its gradient by the logits."""
    logits = logps.clone().requires_grad_()
    value = ExactKL()(logits.log_softmax(-1).view(1, 1, -1), ref.view(1, 1, -1)).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


def enumerate_token(estimator: SampledKL, weighting: str, logps: Tensor, ref: Tensor, old: Tensor) -> Token:
    """Loss terms and gradients of every token, through the estimator's own autograd."""
    leaf = logps.clone().requires_grad_()
    value = estimator(leaf.view(1, -1), ref.view(1, -1), old.view(1, -1), weighting=weighting)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    score = torch.eye(VOCABULARY, dtype=torch.float64) - logps.exp()
    return Token(value.detach()[0], slope.unsqueeze(-1) * score, old.exp())


def number(x: float | Tensor) -> str:
    """Three digits; 0 for what is rounding."""
    x = float(x)
    if abs(x) < 1e-12:
        return "0"
    return f"{x:.3g}" if 1e-3 <= abs(x) < 1e4 else f"{x:.1e}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values_table() -> str:
    """Bias and standard deviation of the value of one on-policy token, in units of the KL."""
    pairs = [distributions(distance) for distance in DISTANCES.values()]
    kls = [kl_and_grad(*pair)[0] for pair in pairs]
    header = ["estimator"]
    for kl in kls:
        header += [f"bias (KL {number(kl)})", "std"]
    rows = []
    for estimator in SAMPLED:
        row = [f"`{estimator.name}`"]
        for (logps, ref), kl in zip(pairs, kls, strict=True):
            token = enumerate_token(estimator, "none", logps, ref, logps)
            row += [number((token.mean_value() - kl) / kl), number(token.value_std() / kl)]
        rows.append(row)
    return table(header, [*rows, ["`exact`"] + ["0"] * (2 * len(kls))])


def gradients_table() -> str:
    """Bias and noise of the gradient of one token under each weighting, on-policy and off, in units of the KL's."""
    logps, ref = distributions(DISTANCES["trained"])
    _, truth = kl_and_grad(logps, ref)
    columns = [(weighting, steps) for weighting in WEIGHTINGS for steps in (0, 8)]
    header = ["estimator", *(f"{w}, {'on' if not steps else 'off'}-policy" for w, steps in columns)]
    rows = []
    for estimator in SAMPLED:
        row = [f"`{estimator.name}`"]
        for weighting, steps in columns:
            token = enumerate_token(estimator, weighting, logps, ref, older(logps, steps))
            bias = (token.mean_grad() - truth).norm() / truth.norm()
            cell = f"{number(bias)} ± {number(token.grad_std() / truth.norm())}"
            row.append(f"**{cell}**" if weighting == exact_weighting(estimator) else cell)
        rows.append(row)
    return table(header, [*rows, ["`exact`", "**0 ± 0**", "**0 ± 0**", *[NEVER_USED] * 4]])


def sampling_table(samples: int = 100_000) -> str:
    """Means of sampled tokens beside what enumeration expects, in units of the KL and of its gradient."""
    logps, ref = distributions(DISTANCES["trained"])
    old = older(logps, 8)
    kl, truth = kl_and_grad(logps, ref)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.multinomial(old.exp(), samples, replacement=True, generator=generator)
    rows = []
    for estimator in SAMPLED:
        weighting = exact_weighting(estimator) or "detached"
        token = enumerate_token(estimator, weighting, logps, ref, old)
        value, grad = token.value[drawn].mean(), token.grad[drawn].mean(0)
        along = grad @ truth / truth.norm() ** 2
        rows.append(
            [
                f"`{estimator.name}`",
                weighting,
                f"{number(value / kl)} ± {number(token.value_std() / kl / samples**0.5)}",
                number(token.mean_value() / kl),
                f"{number(along)} ± {number(token.grad_std() / truth.norm() / samples**0.5)}",
                number(token.mean_grad() @ truth / truth.norm() ** 2),
            ]
        )
    header = ["estimator", "weighting", "value, sampled", "expected", "gradient along the KL's, sampled", "expected"]
    return table(header, rows)


class Chain(NamedTuple):
    """A policy of two tokens: logits of the first `(A,)` and of the second given the first `(A, C)`."""

    first: Tensor
    second: Tensor

    def logps(self) -> tuple[Tensor, Tensor]:
        """Log-probs of the first token, and of the second given the first."""
        return self.first.log_softmax(-1), self.second.log_softmax(-1)

    def gradients(self, terms: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Gradients `(A, C, parameters)` by all logits of ``terms(log p(a), log p(c | a)) -> (A, C)``, per sequence."""
        leaves = [x.clone().requires_grad_() for x in self]
        flat = terms(*Chain(*leaves).logps()).flatten()
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)]) for x in flat]
        return torch.stack(rows).view(*self.second.shape, -1)


def placements(a: Tensor, c: Tensor, ref_a: Tensor, ref_c: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Loss terms of a sampled two-token sequence `(A, C)` under each placement, as functions of the live log-probs."""
    k1 = (a - ref_a).unsqueeze(-1) + (c - ref_c)  # the penalty of a sequence

    def in_loss(estimator: SampledKL) -> Callable[[Tensor, Tensor], Tensor]:
        weighting = exact_weighting(estimator) or "none"

        def terms(live_a: Tensor, live_c: Tensor) -> Tensor:
            first = estimator(live_a.view(1, -1), ref_a.view(1, -1), a.view(1, -1), weighting=weighting).view(-1, 1)
            return first + estimator(live_c, ref_c, c, weighting=weighting)

        return terms

    chosen = {f"`{e.name}` in the loss": in_loss(e) for e in (K1(), K2(), K3(), K3Plus())}
    return {**chosen, '`kl_placement="reward"`': lambda live_a, live_c: k1 * (live_a.unsqueeze(-1) + live_c)}


def placement_table() -> str:
    """Gradient of a two-token KL in the loss and in the reward, against the true one: bias by token, and noise."""
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 4)) * 2]
    policy, (ref_a, ref_c) = Chain(*logits[:2]), Chain(*logits[2:]).logps()
    a, c = policy.logps()
    chance = (a.unsqueeze(-1) + c).exp().unsqueeze(-1)

    def sequence_kl(live_a: Tensor, live_c: Tensor) -> Tensor:
        logps = live_a.unsqueeze(-1) + live_c
        return logps.exp() * (logps - ref_a.unsqueeze(-1) - ref_c)

    truth = policy.gradients(sequence_kl).sum((0, 1))
    split, rows = len(a), []
    for name, terms in placements(a, c, ref_a, ref_c).items():
        grads = policy.gradients(terms)
        mean = (chance * grads).sum((0, 1))
        first = (mean - truth)[:split].norm() / truth[:split].norm()
        second = (mean - truth)[split:].norm() / truth[split:].norm()
        noise = (chance * (grads - mean).square()).sum().sqrt() / truth.norm()
        rows.append([name, number(first), number(second), number(noise)])
    return table(["placement", "bias at the first token", "at the second", "noise of one sequence"], rows)


def far_table() -> str:
    """Gradient of one on-policy token far from the reference: float32 autograd of TRL's expression, and K3's."""
    rows = []
    for d in (-5.0, -15.0, -20.0, -25.0, -100.0):
        logps, ref = torch.tensor([[d - 5]], requires_grad=True), torch.tensor([[-5.0]])
        trl = (torch.exp(ref - logps) - (ref - logps) - 1) * torch.exp(logps - logps.detach())
        (theirs,) = torch.autograd.grad(trl.sum(), logps)
        (ours,) = torch.autograd.grad(K3()(logps, ref, weighting="ratio").sum(), logps)
        rows.append([f"{x:g}" for x in (d, theirs.item(), ours.item())])
    return table(["d, and the true gradient", "TRL's expression by autograd", "`K3`"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "values": values_table,
    "gradients": gradients_table,
    "sampling": sampling_table,
    "placement": placement_table,
    "far": far_table,
}


# Wide lines lie under narrow ones, so that estimators which agree are all seen.
LINES: dict[str, dict[str, Any]] = {
    "k1": {"color": "#4477aa", "linewidth": 5.5, "zorder": 2},
    "abs": {"color": "#777777", "linewidth": 1.3, "linestyle": ":", "zorder": 5},
    "k2": {"color": "#e6cc55", "linewidth": 8, "zorder": 1},
    "k3": {"color": "#e07bb0", "linewidth": 3.5, "zorder": 3},
    "k3+": {"color": "#000000", "linewidth": 1.3, "linestyle": "--", "zorder": 4},
}


def draw_values(axes: Any) -> None:
    """Value of every estimator, and the slope of its loss term under the automatic weighting, against d."""
    d = torch.linspace(-3, 3, 241, dtype=torch.float64)
    for estimator in SAMPLED:
        leaf = d.clone().requires_grad_()
        weighting = exact_weighting(estimator) or "none"
        zeros = torch.zeros(1, len(d), dtype=d.dtype)
        value = estimator(leaf.view(1, -1), zeros, leaf.detach().view(1, -1), weighting=weighting)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        axes[0].plot(d, value.detach()[0], **LINES[estimator.name])
        axes[1].plot(d, slope, label=f"{estimator.name} ({weighting})", **LINES[estimator.name])
    axes[0].set(title="value", xlabel="d = log π - log π_ref", ylim=(-3.2, 6))
    axes[1].set(title="slope of the loss term, kl_weighting=auto", xlabel="d", ylim=(-4.2, 4.2))
    for axis in axes:
        axis.axhline(0, color="black", linewidth=0.5)


def draw_gradients(axes: Any) -> None:
    """Relative error of the expected gradient against the number of updates since sampling, per weighting."""
    logps, ref = distributions(DISTANCES["trained"])
    _, truth = kl_and_grad(logps, ref)
    for axis, weighting in zip(axes, WEIGHTINGS, strict=True):
        for estimator in SAMPLED:
            errors = []
            for steps in OFF_POLICY_STEPS:
                token = enumerate_token(estimator, weighting, logps, ref, older(logps, steps))
                errors.append(max(float((token.mean_grad() - truth).norm() / truth.norm()), 1e-4))
            axis.plot(OFF_POLICY_STEPS, errors, label=estimator.name, **LINES[estimator.name])
        axis.set(title=f"weighting: {weighting}", xlabel="policy updates since sampling", yscale="log")
    axes[0].set(ylabel="error of the expected gradient\n(exact ones drawn at 1e-4)", ylim=(0.7e-4, 30))


def draw(folder: Path) -> None:
    """Write the two figures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for name, paint, panels in (("kl_values", draw_values, 2), ("kl_gradients", draw_gradients, 3)):
        figure, axes = plt.subplots(1, panels, figsize=(11, 3.6), sharey=panels == 3, constrained_layout=True)
        paint(axes)
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)


def between_markers(text: str, name: str, block: str) -> str:
    """Replace what stands between the markers of table `name` in a markdown text."""
    begin, end = f"<!-- begin {name}: benchmarks/kl_estimators.py -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no markers for the table {name!r}")
    return pattern.sub(lambda _: f"{begin}\n{block}\n{end}", text)


def main() -> None:
    """Print the tables, or write tables and figures into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/kl.md and docs/img")
    if not parser.parse_args().write:
        for name, make in TABLES.items():
            print(f"\n{name}: {make.__doc__}\n\n{make()}")
        return
    page = DOCS / "kl.md"
    text = page.read_text()
    for name, make in TABLES.items():
        text = between_markers(text, name, make())
    page.write_text(text)
    draw(DOCS / "img")


if __name__ == "__main__":
    main()
