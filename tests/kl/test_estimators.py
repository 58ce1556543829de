"""Values and slopes of the sampled estimators: closed forms, extremes, masks, and TRL's numbers (CASES 17 to 19)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigError, ShapeError
from trl_grpo_ext.kl import K1, K2, K3, WEIGHTINGS, AbsK, ExactKL, K3Plus

SAMPLED = [K1(), AbsK(), K2(), K3(), K3Plus()]
IDS = [estimator.name for estimator in SAMPLED]
EXTREMES = {torch.float32: 100.0, torch.bfloat16: 15.0, torch.float16: 15.0}


def term(estimator, d, *, log_rho=0.0, weighting="none", dtype=torch.float32, mask=None):
    """Return value and gradient by logps, `(1, T)`, for log-ratios `d` and ``log rho``."""
    d = torch.tensor([d], dtype=dtype)
    logps = (d - 200 if dtype == torch.float32 else d.clone()).requires_grad_()
    old = (logps - torch.tensor([log_rho], dtype=dtype)).detach()
    value = estimator(logps, (logps - d).detach(), old, weighting=weighting, mask=mask)
    value.sum().backward()
    return value.detach(), logps.grad


def test_values_and_slopes_by_hand():
    # d = 1: k1 1; |d| 1; k2 1/2; k3 1/e - 1 + 1 = 0.36788, slope 1 - 1/e = 0.63212.
    # d = -2: k1 -2; |d| 2; k2 2; k3 e^2 - 1 - 2 = 4.38906, slope 1 - e^2 = -6.38906.
    expected = {
        "k1": ([1.0, -2.0], [1.0, 1.0]),
        "abs": ([1.0, 2.0], [1.0, -1.0]),
        "k2": ([0.5, 2.0], [1.0, -2.0]),
        "k3": ([0.36788, 4.38906], [0.63212, -6.38906]),
        "k3+": ([0.36788, 4.38906], [1.0, -2.0]),
    }
    for estimator in SAMPLED:
        value, grad = term(estimator, [1.0, -2.0])
        torch.testing.assert_close(value, torch.tensor([expected[estimator.name][0]]), atol=1e-4, rtol=0)
        torch.testing.assert_close(grad, torch.tensor([expected[estimator.name][1]]), atol=1e-4, rtol=0)


def test_ratio_by_hand():
    # rho = 2, d = 1. k3 with the ratio: value 2 * 0.36788, gradient rho * d = 2; with it held fixed: 2 * 0.63212.
    # k1 with the ratio: rho * (d + 1) = 4; k2 with it held fixed: rho * d = 2.
    rho = math.log(2)
    for estimator, weighting, value, grad in [
        (K3(), "ratio", 0.73576, 2.0),
        (K3(), "detached", 0.73576, 1.26424),
        (K1(), "ratio", 2.0, 4.0),
        (K2(), "detached", 1.0, 2.0),
        (K3Plus(), "detached", 0.73576, 2.0),
    ]:
        got = term(estimator, [1.0], log_rho=[rho], weighting=weighting)
        torch.testing.assert_close(torch.cat(got), torch.tensor([[value], [grad]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", EXTREMES, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("estimator", SAMPLED, ids=IDS)
def test_finite_at_extremes(estimator, weighting, dtype):
    edge = EXTREMES[dtype]
    for log_rho in (0.0, edge, -edge):
        value, grad = term(estimator, [edge, -edge, 0.0], log_rho=[log_rho] * 3, weighting=weighting, dtype=dtype)
        assert value.dtype == torch.float32
        assert grad.dtype == dtype
        assert value.isfinite().all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", EXTREMES, ids=str)
def test_exact_kl_is_finite_at_extremes(dtype):
    edge = EXTREMES[dtype]
    logps = torch.tensor([[[-edge, 0.0, -torch.inf]]], dtype=dtype, requires_grad=True)
    value = ExactKL()(logps, torch.tensor([[[0.0, -edge, -torch.inf]]], dtype=dtype))
    value.sum().backward()
    assert value.isfinite().all()
    assert logps.grad.isfinite().all()
    assert logps.grad[0, 0, 2] == 0


@pytest.mark.parametrize("d", [-25.0, -100.0, 25.0, 100.0])
def test_ratio_weighted_k3_has_the_exact_gradient_where_autograd_has_not(d):
    """TRL's own expression in fp32 gives 0 at d = -25, and NaN at -100."""
    rho = 1.25
    _, grad = term(K3(), [d], log_rho=[math.log(rho)], weighting="ratio", dtype=torch.float64)
    torch.testing.assert_close(grad.item(), rho * d, rtol=1e-12, atol=0)
    assert term(K3(), [d], weighting="ratio")[1].item() == d


@pytest.mark.parametrize("dtype", EXTREMES, ids=str)
def test_clamp_bounds_the_gradient_and_keeps_its_sign(dtype):
    edge = EXTREMES[dtype]
    _, grad = term(K3(), [-edge, edge], dtype=dtype)
    limit = 11 if dtype == torch.float16 else min(edge, 20)
    torch.testing.assert_close(grad[0].float(), torch.tensor([1 - math.exp(limit), 1.0]), rtol=1e-2, atol=1e-4)


def test_the_clamp_is_before_exp_and_in_the_linear_term():
    value, _ = term(K3(max_log_ratio=2.0), [-5.0, 5.0])
    torch.testing.assert_close(value, torch.tensor([[math.exp(2) - 3, math.exp(-2) + 1]]))
    free, _ = term(K3(max_log_ratio=None), [-30.0], dtype=torch.float64)
    torch.testing.assert_close(free.item(), math.exp(30) - 31)


def test_clipped_counts_tokens_beyond_the_clamp():
    logps, ref = torch.tensor([[0.0, -1.0, -30.0]]), torch.tensor([[-21.0, -2.0, -5.0]])
    assert K3().clipped(logps, ref).tolist() == [[True, False, True]]
    assert K3Plus(max_log_ratio=0.5).clipped(logps, ref).tolist() == [[True, True, True]]
    assert K3().clipped(torch.tensor([[0.0]]).half(), torch.tensor([[-12.0]]).half()).tolist() == [[True]]
    for estimator in (K3(max_log_ratio=None), K1(), K2(), AbsK()):
        assert not estimator.clipped(logps, ref).any()


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("estimator", SAMPLED, ids=IDS)
def test_masked_tokens_change_nothing(estimator, weighting, poison):
    """Whichever of the three log-probs is poisoned at a masked token, value and gradients stay as they were."""
    generator = torch.Generator().manual_seed(0)
    clean = [-torch.rand(2, 5, generator=generator) * 3 for _ in range(3)]
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])

    def run(tensors):
        logps = tensors[0].clone().requires_grad_()
        value = estimator(logps, tensors[1], tensors[2], weighting=weighting, mask=mask)
        value.sum().backward()
        return value.detach(), logps.grad

    value, grad = run(clean)
    assert (value[mask == 0] == 0).all()
    assert (grad[mask == 0] == 0).all()
    assert (value[mask == 1] != 0).all()
    for which in range(3):
        poisoned = [x.masked_fill(mask == 0, poison) if i == which else x for i, x in enumerate(clean)]
        for before, after in zip((value, grad), run(poisoned), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_masked_tokens_change_nothing_for_exact(poison):
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 3, 7, generator=generator).log_softmax(-1) for _ in range(2)]
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    results = []
    for which in (None, 0, 1):
        tensors = [x.masked_fill((mask == 0).unsqueeze(-1), poison) if i == which else x for i, x in enumerate(clean)]
        logps = tensors[0].clone().requires_grad_()
        value = ExactKL()(logps, tensors[1], mask=mask)
        value.sum().backward()
        results.append((value.detach(), logps.grad))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("estimator", SAMPLED, ids=IDS)
def test_a_token_masked_later_leaks_no_gradient(estimator):
    """The trainer masks its sum with `where`; a slope of NaN must not survive that."""
    logps = torch.tensor([[-1.0, torch.nan]], requires_grad=True)
    value = estimator(logps, torch.tensor([[-2.0, -1.0]]), weighting="ratio")
    torch.where(torch.tensor([[True, False]]), value, 0.0).sum().backward()
    assert logps.grad.isfinite().all()
    assert logps.grad[0, 1] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-19, 19, width=32), min_size=1, max_size=20))
def test_k3_value_is_trls_bit_for_bit(ds):
    ref = torch.tensor([ds])
    logps = torch.linspace(-3, 0, len(ds)).unsqueeze(0)
    ref = logps + ref.clamp(-15, 15)
    trl = torch.exp(ref - logps) - (ref - logps) - 1
    assert torch.equal(K3()(logps, ref), trl)
    assert torch.equal(K3Plus()(logps, ref), trl)


ratios = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=16)


@settings(max_examples=60, deadline=None)
@given(ds=ratios, log_rho=st.floats(-50, 50, width=32))
def test_properties_for_any_log_ratio(ds, log_rho):
    for estimator in SAMPLED:
        for weighting in WEIGHTINGS:
            value, grad = term(estimator, ds, log_rho=[log_rho] * len(ds), weighting=weighting, dtype=torch.float64)
            assert value.isfinite().all()
            assert grad.isfinite().all()
            if estimator.name != "k1":
                assert (value >= -1e-7).all()  # rounding of exp(-d) - 1 + d near d = 0, times rho
    # The pull of an estimator with an exact weighting never points away from the reference.
    d = torch.tensor([ds], dtype=torch.float64)
    for estimator, weighting in ((K3(), "ratio"), (K2(), "detached"), (K3Plus(), "detached"), (K3(), "none")):
        _, grad = term(estimator, ds, log_rho=[log_rho] * len(ds), weighting=weighting, dtype=torch.float64)
        assert (grad * d >= 0).all()


@pytest.mark.parametrize("estimator", SAMPLED, ids=IDS)
def test_no_gradient_to_the_reference_or_the_old_policy(estimator):
    logps, ref, old = (torch.tensor([[-x]], requires_grad=True) for x in (1.0, 2.0, 1.5))
    estimator(logps, ref, old, weighting="ratio").sum().backward()
    assert logps.grad is not None
    assert ref.grad is None
    assert old.grad is None


def test_without_old_logps_the_ratio_is_one_but_still_differentiated():
    logps = torch.tensor([[-1.0]], requires_grad=True)
    K3()(logps, torch.tensor([[-3.0]]), weighting="ratio").sum().backward()
    assert logps.grad.item() == 2.0


@pytest.mark.parametrize("name", ["ref_logps", "old_logps", "mask"])
def test_shapes_must_agree(name):
    tensors = {"ref_logps": torch.zeros(2, 3), "old_logps": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    tensors[name] = torch.zeros(2, 1)
    with pytest.raises(ShapeError, match=rf"`{name}` must have the shape of logps, \(2, 3\), got \(2, 1\)"):
        K3()(torch.zeros(2, 3), **tensors)


def test_exact_kl_says_what_it_takes():
    with pytest.raises(ShapeError, match=r"takes \(B, T, V\) log-probs of the whole vocabulary, got \(2, 3\)"):
        ExactKL()(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ShapeError, match=r"`ref_logps` must have the shape"):
        ExactKL()(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    with pytest.raises(ShapeError, match=r"`mask` must be \(2, 3\), got \(2, 3, 4\)"):
        ExactKL()(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4))


@pytest.mark.parametrize("estimator", SAMPLED, ids=IDS)
def test_unknown_weighting(estimator):
    with pytest.raises(ConfigError, match="`weighting` must be one of 'none', 'ratio', 'detached', got 'auto'"):
        estimator(torch.zeros(1, 1), torch.zeros(1, 1), weighting="auto")
