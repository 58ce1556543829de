"""The chunked full-vocabulary KL against a naive softmax, TRL's own head, and the size of what it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_grpo_ext.errors import ConfigError, ShapeError
from trl_grpo_ext.functional.exact_kl import exact_kl
from trl_grpo_ext.kl import ExactKL

B, T, V, H = 2, 13, 301, 16
SMALL = {"token_chunk": 4, "vocab_chunk": 64}


def naive(
    hidden, ref_hidden, weight, ref_weight, *, bias=None, ref_bias=None, temperature=1.0, logit_scale=1.0, cap=None
):
    """The same by full softmax, `(B, T, V)` and all, by plain autograd."""

    def log_probs(hidden, weight, bias):
        logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_scale
        return ((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature).log_softmax(-1)

    logps = log_probs(hidden, weight, bias)
    return (logps.exp() * (logps - log_probs(ref_hidden, ref_weight, ref_bias).detach())).sum(-1)


def inputs(*, dtype=torch.float32, distance=0.3, seed=0):
    """Hidden states, head weights and biases of a policy and a reference `distance` away."""
    generator = torch.Generator().manual_seed(seed)
    policy = [torch.randn(*shape, generator=generator) for shape in ((B, T, H), (V, H), (V,))]
    reference = [x + distance * torch.randn(x.shape, generator=generator) for x in policy]
    hidden, weight, bias = (x.to(dtype) for x in policy)
    ref_hidden, ref_weight, ref_bias = (x.to(dtype) for x in reference)
    return (hidden, ref_hidden, weight, ref_weight), {"bias": bias, "ref_bias": ref_bias}


def gradients(function, tensors, biases, **settings):
    """Value, and gradients by hidden states, weight and bias of a weighted sum of the tokens."""
    leaves = [tensors[0], tensors[2], biases["bias"]]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = function(
        leaves[0], tensors[1], leaves[1], tensors[3], bias=leaves[2], ref_bias=biases["ref_bias"], **settings
    )
    weights = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view_as(value)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"logit_scale": 0.25, "temperature": 1.3},
    "cap": {"softcap": 5.0},
    "all": {"softcap": 4.0, "logit_scale": 1.5, "temperature": 0.9},
}


@pytest.mark.parametrize("chunks", [{}, SMALL, {"token_chunk": 1, "vocab_chunk": 300}], ids=["one", "small", "odd"])
@pytest.mark.parametrize("head", HEADS)
def test_equals_the_naive_softmax(head, chunks):
    settings = HEADS[head]
    tensors, biases = inputs()
    renamed = {"cap" if name == "softcap" else name: value for name, value in settings.items()}
    truth = gradients(naive, [x.double() for x in tensors], {k: x.double() for k, x in biases.items()}, **renamed)
    for ours, exact in zip(gradients(exact_kl, tensors, biases, **settings, **chunks), truth, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, exact) < 1e-5


def test_float64_to_the_last_digits():
    tensors, biases = inputs(dtype=torch.float64)
    for ours, exact in zip(
        gradients(exact_kl, tensors, biases, **SMALL), gradients(naive, tensors, biases), strict=True
    ):
        assert relative_error(ours, exact) < 1e-13


def test_a_tiny_kl_keeps_its_digits():
    """A run starts next to its reference: at a KL of about 1e-5 the value of an fp32 softmax is off by 1 %."""
    tensors, biases = inputs(distance=1e-3)
    truth = naive(*(x.double() for x in tensors), **{name: x.double() for name, x in biases.items()})
    assert 1e-6 < truth.mean() < 1e-4
    assert relative_error(exact_kl(*tensors, **biases, **SMALL), truth) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_hidden_states(dtype):
    """Products and sums are float32: only the inputs' own rounding remains, and the gradient's on its way out."""
    tensors, biases = inputs(dtype=dtype)
    truth = gradients(naive, [x.double() for x in tensors], {k: x.double() for k, x in biases.items()})
    value, *grads = gradients(exact_kl, tensors, biases, **SMALL)
    assert value.dtype == torch.float32
    assert relative_error(value, truth[0]) < 1e-5
    for ours, exact in zip(grads, truth[1:], strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, exact) < 4 * torch.finfo(dtype).eps


def test_autocast_rounds_the_factors_as_a_linear_layer_does():
    tensors, biases = inputs()
    rounded = [x.bfloat16().float() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = gradients(exact_kl, tensors, biases, **SMALL)[0]
    torch.testing.assert_close(value, exact_kl(*rounded, **biases))


def test_identical_models_have_exactly_no_kl_and_no_gradient():
    tensors, _ = inputs()
    hidden = tensors[0].requires_grad_()
    value = exact_kl(hidden, hidden, tensors[2], tensors[2], **SMALL)
    value.sum().backward()
    assert (value == 0).all()
    assert hidden.grad.abs().max() < 1e-6


def test_no_gradient_where_none_is_asked_for():
    tensors, _ = inputs()
    leaves = [x.clone().requires_grad_() for x in tensors]
    leaves[2].requires_grad_(False)
    exact_kl(*leaves, **SMALL).sum().backward()
    assert leaves[0].grad is not None
    assert [x.grad for x in leaves[1:]] == [None] * 3


def test_one_shared_head_and_a_reference_of_another_width():
    (hidden, ref_hidden, weight, _), _ = inputs()
    value = exact_kl(hidden, ref_hidden, weight, weight, **SMALL)
    torch.testing.assert_close(value, naive(hidden, ref_hidden, weight, weight))
    narrow = exact_kl(hidden, ref_hidden[..., :5], weight, weight[:, :5], **SMALL)
    torch.testing.assert_close(narrow, naive(hidden, ref_hidden[..., :5], weight, weight[:, :5]))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan], ids=str)
def test_masked_tokens_change_nothing(poison):
    tensors, biases = inputs()
    mask = torch.arange(B * T).view(B, T) % 3 > 0
    clean = gradients(exact_kl, tensors, biases, mask=mask, **SMALL)
    assert (clean[0][~mask] == 0).all()
    assert (clean[1][~mask] == 0).all()
    torch.testing.assert_close(clean[0][mask], naive(*tensors, **biases)[mask])
    for which in (0, 1):
        poisoned = list(tensors)
        poisoned[which] = tensors[which].masked_fill(~mask.unsqueeze(-1), poison)
        for before, after in zip(clean, gradients(exact_kl, poisoned, biases, mask=mask.int(), **SMALL), strict=True):
            assert torch.equal(before, after)


def test_a_batch_without_a_counted_token_can_be_backpropagated():
    tensors, biases = inputs()
    for value in gradients(exact_kl, tensors, biases, mask=torch.zeros(B, T), **SMALL):
        assert (value == 0).all()


def test_vocabulary_entries_of_probability_zero_add_nothing():
    """Some models pad the vocabulary with a bias of -inf; a whole tile of them as well as single ones."""
    tensors, biases = inputs()
    absent = torch.zeros(V, dtype=torch.bool)
    absent[:70] = absent[200] = True
    biases = {name: bias.masked_fill(absent, -torch.inf) for name, bias in biases.items()}
    kept = [x if x.dim() == 3 else x[~absent] for x in tensors]
    expected = gradients(naive, kept, {name: bias[~absent] for name, bias in biases.items()})
    actual = gradients(exact_kl, tensors, biases, **SMALL)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[2][~absent], expected[2], rtol=1e-4, atol=1e-5)
    assert (actual[2][absent] == 0).all()


def test_extreme_logits_stay_finite():
    tensors, biases = inputs(distance=3)
    tensors = [x * 10 for x in tensors]
    for value in gradients(exact_kl, tensors, biases, **SMALL):
        assert value.isfinite().all()


def test_the_object_calls_the_same_and_the_direct_call_agrees():
    tensors, biases = inputs()
    chunked = ExactKL().from_hidden(*tensors, **biases, temperature=0.8)
    logps, ref_logps = (
        ((hidden @ weight.T + bias) / 0.8).log_softmax(-1)
        for hidden, weight, bias in zip(tensors[:2], tensors[2:], biases.values(), strict=True)
    )
    torch.testing.assert_close(chunked, ExactKL()(logps, ref_logps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"final_logit_softcapping": 3.0},
        {"logit_scale": 0.4},
        {"logits_scaling": 2.0, "final_logit_softcapping": 2.0},
    ],
)
def test_the_distributions_are_those_of_trls_head(attributes):
    """TRL's head gives the log-prob of one label at a time: asked for every label, it gives the whole distribution."""
    transformers, utils = pytest.importorskip("transformers"), pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    for name, value in attributes.items():
        setattr(config, name, value)
    ids = torch.arange(12).view(2, 6)
    tables, hidden, weights = [], [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(30)
        utils.add_fused_lm_head(model, temperature=0.9)
        with torch.no_grad():
            rows = [model(ids, labels=torch.full_like(ids, label), fused_lm_head=True).log_probs for label in range(19)]
            tables.append(torch.stack(rows, -1))
            hidden.append(model.model(ids).last_hidden_state[:, :-1])
        weights.append(model.lm_head.weight)
    scale = attributes.get("logit_scale", 1 / attributes.get("logits_scaling", 1.0))
    settings = {"temperature": 0.9, "logit_scale": scale, "softcap": attributes.get("final_logit_softcapping")}
    assert (tables[0] - tables[1]).abs().max() > 0.1
    torch.testing.assert_close(exact_kl(*hidden, *weights, **settings), ExactKL()(*tables), rtol=1e-4, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_nothing_of_size_tokens_times_vocabulary_exists():
    tokens, vocabulary, width = 64, 4096, 8
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width)
    with LargestTensor() as largest:
        exact_kl(
            hidden, torch.randn(1, tokens, width), weight, weight, token_chunk=16, vocab_chunk=256
        ).sum().backward()
    assert largest.numel == vocabulary * width  # the head itself
    assert largest.numel < tokens * vocabulary / 4


def test_errors_name_the_argument():
    (hidden, ref_hidden, weight, ref_weight), _ = inputs()
    tensors = (hidden, ref_hidden, weight, ref_weight)
    for bad, message in [
        (
            (hidden[0], ref_hidden, weight, ref_weight),
            r"`hidden` must be \(B, T, H\) and `lm_head_weight` \(V, H\), got",
        ),
        (
            (hidden, ref_hidden, weight, ref_weight[:, 1:]),
            r"`ref_hidden` must be .* `ref_lm_head_weight` \(V, H\), got",
        ),
        ((hidden, ref_hidden[:, 1:], weight, ref_weight), "hidden states must agree in B and T"),
        ((hidden, ref_hidden, weight, ref_weight[1:]), "same vocabulary, got 301 and 300"),
    ]:
        with pytest.raises(ShapeError, match=message):
            exact_kl(*bad)
    with pytest.raises(ShapeError, match=r"`bias` must be \(301,\), got \(300,\)"):
        exact_kl(*tensors, bias=torch.zeros(V - 1))
    with pytest.raises(ShapeError, match=r"`mask` must be \(2, 13\), got \(2, 12\)"):
        exact_kl(*tensors, mask=torch.ones(B, T - 1))
    for setting in ({"temperature": 0.0}, {"softcap": -1.0}, {"token_chunk": 0}, {"vocab_chunk": 1.5}):
        with pytest.raises(ConfigError, match=f"`{next(iter(setting))}` must be"):
            exact_kl(*tensors, **setting)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_at_full_size_is_under_a_quarter_of_one_logits_tensor():
    """V = 150,000 and T = 1024, measured as the resident set of a child process, forward and backward."""
    script = Path(__file__).parents[2] / "benchmarks/exact_kl_memory.py"
    command = [sys.executable, str(script), "--case", "chunked", "--hidden", "16"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(output)["peak"] < 1024 * 150_000 * 4 / 4
