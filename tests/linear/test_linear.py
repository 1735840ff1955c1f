"""Linear layers multiplied by other code: the same numbers, the same modules, and nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gsm
from gsm.linear import fast_linears, layers, norms, products

needs_kernel = pytest.mark.skipif(not products.has_kernel(), reason="numba is not installed")


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random matrix in the middle of a buffer of NaN, so that reading beyond it shows."""
    buffer = torch.full((rows * columns + 64,), torch.nan, dtype=dtype)
    matrix = buffer[32 : 32 + rows * columns].view(rows, columns)
    return matrix.copy_(torch.randn(rows, columns))


@needs_kernel
@pytest.mark.parametrize("dtype", list(products.FEW_ROWS))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("n", "out"), [(1, 1), (7, 3), (64, 129), (576, 192), (1536, 577)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_kernel_multiplies_as_float64_does(dtype: torch.dtype, rows: int, n: int, out: int, has_bias: bool) -> None:
    x, weight = poisoned(rows, n, dtype), poisoned(out, n, dtype)
    bias = poisoned(1, out, dtype)[0] if has_bias else None
    exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = products.few_rows(x, weight, bias)
    assert y.dtype == dtype
    rounding = exact.abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((y.double() - exact).abs() <= rounding + 4e-6 * n**0.5).all()


@pytest.mark.parametrize("dtype", list(products.FEW_ROWS))
@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = poisoned(rows, 96, dtype), poisoned(130, 96, dtype), torch.randn(130).to(dtype)
    torch.testing.assert_close(products.multiply(x, weight, bias), nn.functional.linear(x, weight, bias))


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 7), (2, 576), (5, 3, 64), (40, 129)])
def test_the_norm_is_what_float64_says(shape: tuple[int, ...]) -> None:
    x, gain = torch.randn(shape), poisoned(1, shape[-1])[0]
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    torch.testing.assert_close(norms.rms_norm(x, gain, 1e-5).double(), exact, atol=1e-5, rtol=1e-5)
    x.view(-1, shape[-1])[0, 0] = torch.nan
    y = norms.rms_norm(x, gain, 1e-5).view(-1, shape[-1])
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize(("family", "served"), [("llama", True), ("gemma", True), ("gpt_neox", False)])
def test_norms_are_known_by_what_they_compute(tiny_model: Any, family: str, served: bool) -> None:
    """Gemma multiplies by 1 + weight; GPT-NeoX subtracts the mean."""
    model = tiny_model(family)
    found = [m for m in model.modules() if "Norm" in type(m).__name__]
    with torch.no_grad():
        for norm in found:
            norm.weight.copy_(torch.randn_like(norm.weight))
    assert found
    assert all((norms.norm_forward(norm) is not None) == served for norm in found)
    x = torch.randn(3, found[0].weight.numel())
    with fast_linears(model), torch.inference_mode():
        torch.testing.assert_close(found[0](x), type(found[0]).forward(found[0], x), atol=1e-5, rtol=1e-5)


@needs_kernel
@pytest.mark.parametrize("dtype", list(products.FEW_ROWS))
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 577).to(dtype), torch.randn(65, 577).to(dtype)
    alone = torch.cat([products.few_rows(row, weight, None) for row in x.split(1)])
    for rows in range(1, 9):
        assert torch.equal(products.few_rows(x[:rows], weight, None), alone[:rows])


@needs_kernel
def test_damage_stays_visible() -> None:
    x, weight = torch.randn(3, 64), torch.randn(5, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = products.few_rows(x, weight, None)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()


def test_a_bias_with_gaps_is_read_right() -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(5, 8), torch.randn(10)[::2]
    torch.testing.assert_close(products.multiply(x, weight, bias), nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD", ""])
def test_onednn_takes_over_only_where_mkl_is_slow(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: maker)
    chosen = products.onednn_is_faster.__wrapped__()
    assert chosen == (maker == "AuthenticAMD" and torch.backends.mkl.is_available())


def test_a_private_operation_that_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError("no such operation")

    monkeypatch.setattr(products, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(products, "onednn", gone)
    assert not products.onednn_is_faster.__wrapped__()
    monkeypatch.setattr(products, "onednn", lambda x, w, b: nn.functional.linear(x, w))  # forgets the bias
    assert not products.onednn_is_faster.__wrapped__()


def num_linears(model: Any) -> int:
    return sum(type(module) is nn.Linear for module in model.modules())


def num_norms(model: Any) -> int:
    return sum("RMSNorm" in type(module).__name__ for module in model.modules()) * products.has_kernel()


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model("qwen2")  # biases in q, k, v


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where other code is faster, whatever this one is."""
    monkeypatch.setattr(layers, "onednn_is_faster", lambda: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", list(products.FEW_ROWS))
@pytest.mark.parametrize("columns", [1, 3, 40])
def test_a_model_computes_the_same_and_is_given_back(model: Any, columns: int, dtype: torch.dtype) -> None:
    ids = torch.randint(1, model.config.vocab_size, (2, columns))
    model.to(dtype)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        with fast_linears(model) as served:
            assert served == num_linears(model) + (num_norms(model) if dtype == torch.float32 else 0)
            fast = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, plain)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_gives_the_model_back(model: Any, error: type[BaseException]) -> None:
    with pytest.raises(error), fast_linears(model):
        raise error
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.usefixtures("always")
def test_gradients_and_other_dtypes_take_torchs_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the fast product was called")

    monkeypatch.setattr(layers, "multiply", refuse)
    ids = torch.randint(1, model.config.vocab_size, (1, 4))
    with fast_linears(model):
        model(input_ids=ids).logits.sum().backward()
        assert model.model.layers[0].mlp.down_proj.weight.grad is not None
        with torch.inference_mode(), pytest.raises(AssertionError, match="fast product"):
            model(input_ids=ids)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model.model.layers[0].mlp.down_proj(torch.randn(1, model.config.intermediate_size))
        with torch.inference_mode():
            model.double()(input_ids=ids)


@pytest.mark.usefixtures("always")
def test_a_weight_replaced_meanwhile_counts(model: Any) -> None:
    layer, x = model.model.layers[0].mlp.down_proj, torch.randn(1, model.config.intermediate_size)
    with torch.inference_mode(), fast_linears(model):
        layer._parameters["weight"] = nn.Parameter(torch.zeros_like(layer.weight))
        assert not layer(x).any()


@pytest.mark.usefixtures("always")
@needs_kernel
def test_a_deep_copy_computes_with_its_own_weights(model: Any) -> None:
    ids = torch.arange(1, 9)[None]
    with fast_linears(model), torch.no_grad():
        twin = copy.deepcopy(model)
        twin.lm_head.weight.zero_()
        assert not twin(input_ids=ids).logits.any()
        assert model(input_ids=ids).logits.any()


@needs_kernel
@pytest.mark.parametrize("rows", [2, 40])
def test_torchs_default_dtype_does_not_matter(rows: int) -> None:
    x, weight, gain = torch.randn(rows, 96), torch.randn(130, 96), torch.randn(96)
    expected = products.multiply(x, weight, None), norms.rms_norm(x, gain, 1e-5)
    torch.set_default_dtype(torch.float64)
    try:
        found = products.multiply(x, weight, None), norms.rms_norm(x, gain, 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@needs_kernel
def test_a_norm_with_a_gate_keeps_it() -> None:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    model = nn.Sequential(MambaRMSNormGated(64, group_size=64).eval())
    x, gate = torch.randn(3, 64), torch.randn(3, 64)
    with torch.no_grad():
        expected = model[0](x, gate), model[0](x)
        with fast_linears(model):
            found = model[0](x, gate), model[0](x)
    torch.testing.assert_close(found, expected)


def test_layers_of_somebody_else_are_left_alone(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight)

    layer.forward = offloaded
    with fast_linears(model) as served:
        assert layer.forward is offloaded
        assert served == num_linears(model) + num_norms(model) - 1
    assert layer.forward is offloaded


def test_the_config_can_leave_it_to_torch(model: Any) -> None:
    with gsm.attach(model, {"linear": {"backend": "torch"}}):
        assert not any("forward" in module.__dict__ for module in model.modules())
    with fast_linears(model, "torch") as served:
        assert served == 0
