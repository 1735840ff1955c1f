"""int8 products: every route gives the same answer, damage stays visible, and fusing changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import AttachError, ConfigError, ModelError
from gsm.smoothing import apply, int8_ops
from gsm.smoothing.int8 import GroupedProjection, InputScale, Int8GatedMLP, Int8Linear, ProjectionGroup, int8_modules
from gsm.smoothing.int8_ops import Int8Weight, cuda_padding, hadamard, quantise_rows
from gsm.smoothing.orthogonal import sylvester


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x: Tensor, weight: Int8Weight, static_scale: float = 0.0, block: int = 1) -> Tensor:
    """The same arithmetic in float64, step by step."""
    x = x.double()
    if block > 1:
        x = (sylvester(block) @ x.view(len(x), block, -1)).reshape(x.shape)
    scale = x.abs().amax(1, keepdim=True) / 127
    scale = torch.where((static_scale > 0) & (scale <= static_scale), torch.full_like(scale, static_scale), scale)
    q = (x / torch.where(scale > 0, scale, 1.0)).round()
    y = (q @ weight.codes.double().T) * scale * weight.scale[:, 0].double()
    return y if weight.bias is None else y + weight.bias.double()


@pytest.fixture(params=["kernels", "torch"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations: the fused kernels, and torch's own operations where numba is missing."""
    if request.param == "torch":
        monkeypatch.setattr(int8_ops, "kernels", lambda: None)
    else:
        assert int8_ops.kernels() is not None, "numba is part of the test environment"
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize(("out", "inner"), [(24, 32), (7, 96), (130, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_reference(route: str, rows: int, out: int, inner: int, bias: bool) -> None:
    weight = Int8Weight.quantise(random(out, inner), random(out, seed=2) if bias else None)
    x = random(rows, inner, seed=1)
    for static, block in ((0.0, 1), (0.05, 1), (0.0, 16)):
        y = int8_ops.linear(x, weight, static_scale=static, block=block)
        # a value exactly between two codes may round either way after the float32 rotation
        tolerance = 1e-4 if block == 1 else 0.05
        assert torch.allclose(y.double(), reference(x, weight, static, block), atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 9, 700])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("block", [1, 32])
def test_gated_mlp_equals_its_parts(route: str, rows: int, activation: str, block: int) -> None:
    gate_up, down = Int8Weight.quantise(random(128, 48)), Int8Weight.quantise(random(40, 64, seed=1))
    x = random(rows, 48, seed=2)
    gate, up = int8_ops.linear(x, gate_up).chunk(2, 1)
    act = nn.functional.silu(gate) if activation == "silu" else nn.functional.gelu(gate, approximate="tanh")
    expected = int8_ops.linear(act * up, down, block=block)
    y = int8_ops.gated_mlp(x, gate_up, down, activation, block=block)
    assert (y - expected).abs().max() <= 0.02 * expected.abs().max()
    assert ((y - expected).abs() > 1e-3).float().mean() < 0.05


def test_the_exponential_is_exact_enough_over_the_whole_range() -> None:
    kernels = int8_ops.kernels()
    for x in (-100.0, -87.0, -10.3, -1.0, -1e-6, 0.0, 0.3, 1.0, 20.0, 88.0):
        expected = float(torch.tensor(min(max(x, -87.0), 88.0), dtype=torch.float64).exp())
        assert float(kernels._exp(torch.tensor(x).numpy()[()])) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [2, 30])
def test_nan_and_infinity_stay_visible_and_stay_in_their_row(route: str, bad: float, rows: int) -> None:
    weight = Int8Weight.quantise(random(16, 32))
    x = random(rows, 32, seed=1)
    x[1, 5] = bad
    y = int8_ops.linear(x, weight)
    assert y[1].isnan().all()
    assert y[0].isfinite().all()
    assert torch.allclose(y[0], int8_ops.linear(x[:1].clone(), weight)[0], rtol=1e-5)
    mlp = int8_ops.gated_mlp(x, Int8Weight.quantise(random(64, 32)), Int8Weight.quantise(random(8, 32)), "silu")
    assert mlp[1].isnan().all()
    assert mlp[0].isfinite().all()


def test_rows_and_weights_of_zeros_and_extremes(route: str) -> None:
    w = random(16, 32)
    w[3] = 0.0
    weight = Int8Weight.quantise(w)
    assert torch.isfinite(weight.scale).all()
    x = torch.stack((torch.zeros(32), torch.full((32,), 1e-40), torch.full((32,), 1e30), random(32)))
    y = int8_ops.linear(x, weight)
    assert y.isfinite().all()
    assert torch.equal(y[0], torch.zeros(16))
    assert torch.equal(y[:, 3], torch.zeros(4))
    codes, scale = quantise_rows(x)
    assert int(codes.abs().max()) <= 127
    assert torch.allclose(codes[2:] * scale[2:, None], x[2:], rtol=0.01, atol=float(scale[3]))


def test_the_static_scale_is_used_by_rows_that_fit_and_only_by_them(route: str) -> None:
    x = torch.stack((random(32) * 0.1, random(32) * 50))
    _, scale = quantise_rows(x, static_scale=0.02)
    assert float(scale[0]) == pytest.approx(0.02)
    assert float(scale[1]) == pytest.approx(float(x[1].abs().max() / 127))


@pytest.mark.parametrize("rows", [1, 12, 40])
@pytest.mark.parametrize("group", [None, 16, 24])  # 24 does not divide 64: one scale per channel then
def test_weight_only_is_exact_in_its_activations(route: str, rows: int, group: int | None) -> None:
    weight = Int8Weight.quantise(random(24, 64), random(24, seed=3), group)
    assert weight.groups == (4 if group == 16 else 1)
    x = random(rows, 64, seed=1)
    expected = x @ weight.dequantise().T + weight.bias
    in_bfloat16 = route == "torch" and rows == 1 and weight.groups == 1  # the only fast product torch has for it
    tolerance = 0.02 * float(expected.abs().max()) if in_bfloat16 else 1e-4
    assert torch.allclose(int8_ops.weight_only(x, weight), expected, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 12])
def test_a_weight_that_is_a_transposed_view_is_read_right(rows: int) -> None:
    w, x = random(64, 32).t(), random(rows, 64, seed=1)
    exact = x @ w.T
    for y in (
        int8_ops.linear(x, Int8Weight.quantise(w)),
        int8_ops.weight_only(x, Int8Weight.quantise(w, group=16)),
    ):
        assert float((y - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("rows", [1, 12])
def test_torchs_default_dtype_does_not_matter(rows: int) -> None:
    weight, x = Int8Weight.quantise(random(24, 64)), random(rows, 64, seed=1)
    gate_up, down = Int8Weight.quantise(random(128, 64)), Int8Weight.quantise(random(40, 64))

    def products() -> list[Tensor]:
        mlp = int8_ops.gated_mlp(x, gate_up, down, "silu")
        return [int8_ops.linear(x, weight), int8_ops.weight_only(x, weight), mlp]

    expected = products()
    torch.set_default_dtype(torch.float64)
    try:
        found = products()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_norms_in_float32_of_a_half_precision_model(tiny_model: Any) -> None:
    model = tiny_model("gemma").bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    ids = torch.randint(1, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    before = logits(model, ids)
    with apply(model, SmoothingConfig(int8="weight_only")):
        assert torch.allclose(logits(model, ids), before, atol=0.1 * float(before.abs().max()))


def test_no_tokens_give_no_rows() -> None:
    y = Int8Linear(Int8Weight.quantise(random(24, 32)), "dynamic")(torch.zeros(2, 0, 32))
    assert y.shape == (2, 0, 24)


def test_scales_of_groups_come_closer_to_the_weight() -> None:
    w = random(16, 256) * torch.logspace(-1, 1, 256)
    errors = [float((Int8Weight.quantise(w, group=group).dequantise() - w).norm()) for group in (None, 64)]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("block", [2, 16, 64])
def test_the_fast_transform_is_the_hadamard_matrix(block: int) -> None:
    x = random(5, 192).double()
    expected = (sylvester(block) @ x.view(5, block, -1)).reshape(5, 192)
    assert torch.allclose(hadamard(x, block), expected, atol=1e-12)
    row = x[0].float().numpy().copy()
    int8_ops.kernels().hadamard(row, 192, block)
    assert torch.allclose(torch.from_numpy(row).double(), expected[0], atol=1e-5)


def test_padding_for_cuda() -> None:
    for rows in (1, 16, 17, 31, 32, 33, 40, 1001):
        padded = rows + cuda_padding(rows)
        assert padded >= 32
        assert padded % 8 == 0
        assert padded - rows < 32


@pytest.mark.parametrize(
    ("weight", "message"),
    [(torch.zeros(4, 4, dtype=torch.int8), "quantised already"), (torch.full((4, 4), float("nan")), "NaN")],
)
def test_weights_that_cannot_be_rounded_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Int8Weight.quantise(weight)


def group_of_three() -> tuple[ProjectionGroup, list[GroupedProjection], list[Int8Weight]]:
    parts = [Int8Weight.quantise(random(n, 32, seed=n)) for n in (16, 8, 8)]
    group = ProjectionGroup(Int8Linear(Int8Weight.concatenate(parts), "dynamic"), [16, 8, 8])
    return group, [GroupedProjection(group, index) for index in range(3)], parts


def test_grouped_projections_in_any_order_equal_single_ones_and_keep_no_result() -> None:
    group, projections, parts = group_of_three()
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0, 2, 0]):
        x = random(1, 6, 32, seed=len(order))
        for index in order:
            expected = Int8Linear(parts[index], "dynamic")(x)
            assert torch.equal(projections[index](x), expected)
    x = random(1, 1, 32)
    for projection in projections:
        projection(x)
    assert group._last.x is None
    assert not group._last.outputs


def test_grouped_projections_are_safe_in_two_threads() -> None:
    _, projections, parts = group_of_three()
    failures: list[str] = []

    def work(seed: int) -> None:
        x = random(1, 8, 32, seed=seed)
        for _ in range(50):
            for projection, part in zip(projections, parts, strict=True):
                if not torch.equal(projection(x), Int8Linear(part, "dynamic")(x)):
                    failures.append(f"seed {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_recording_leaves_the_first_tokens_out_and_the_largest_hundredth() -> None:
    scale = InputScale(recording=True, num_exempt=1)
    x = torch.ones(1, 201, 4)
    x[0, :, 2] = -12.7
    x[0, 0, 0] = 1000.0
    x[0, 3, 1] = 500.0
    scale.see(x)
    scale.freeze()
    assert scale.value == pytest.approx(0.1)
    assert not scale.recording


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "phi3", "mixtral", "qwen2_moe", "gpt_neox"])
@pytest.mark.parametrize("mode", ["weight_only", "dynamic", "static"])
def test_int8_stays_close_on_every_family(tiny_model: Any, family: str, mode: str) -> None:
    model = tiny_model(family)
    ids = torch.randint(1, model.config.vocab_size, (4, 20), generator=torch.Generator().manual_seed(0))
    before = logits(model, ids)
    with apply(model, {"int8": mode}, samples=ids) as applied:
        assert applied.int8
        after = logits(model, ids)
    error = (after - before).norm() / before.norm()
    # a mixture routes a few tokens to other experts
    assert 0 < error < (0.3 if "mixtral" in family or "moe" in family else 0.12)
    assert torch.equal(logits(model, ids), before)


def test_known_layouts_are_fused_and_unfused_ones_agree(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = torch.randint(1, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with apply(model, {"int8": "dynamic"}) as applied:
        assert sum(isinstance(module, Int8GatedMLP) for module in model.modules()) == model.config.num_hidden_layers
        assert sum(isinstance(module, GroupedProjection) for module in model.modules()) == 9
        assert len(int8_modules(model)) == 3 * 4 + 1
        assert len(applied.int8) == 3 * 7 + 1
        fused, one = logits(model, ids), logits(model, ids[:1, :1])
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("mlp.up_proj", "self_attn.k_proj")]
    with apply(model, {"int8": "dynamic"}, exclude=names):
        assert not any(isinstance(module, (Int8GatedMLP, GroupedProjection)) for module in model.modules())
        assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
        assert isinstance(model.model.layers[0].mlp.gate_proj, Int8Linear)
    with apply(model, {"int8": "dynamic", "enable": True, "method": "window", "smooth_strength": 0.0}, samples=ids):
        separate = logits(model, ids)
    assert torch.allclose(fused, separate, atol=0.02)
    assert one.isfinite().all()


def test_prefill_and_decode_give_the_same_numbers(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = torch.randint(1, model.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), apply(model, {"enable": True, "method": "rotate", "int8": "dynamic"}):
        whole = model(input_ids=ids).logits
        out = model(input_ids=ids[:, :8], use_cache=True)
        parts = [out.logits]
        for t in range(8, 16):
            out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    # rounding borders may be crossed by differences of 1e-7, each worth one code
    assert (torch.cat(parts, 1) - whole).norm() / whole.norm() < 0.01


def test_half_precision_models_keep_their_type(tiny_model: Any) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    ids = torch.randint(1, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    before = logits(model, ids)
    for config in (
        {"int8": "dynamic"},
        {"int8": "weight_only"},
        {"enable": True, "method": "rotate", "int8": "dynamic"},
    ):
        with apply(model, config):
            after = logits(model, ids)
        assert after.dtype == torch.bfloat16
        assert (after - before).float().norm() / before.float().norm() < 0.15


def test_head_and_named_modules_can_keep_their_precision(tiny_model: Any) -> None:
    model = tiny_model("llama")
    config = SmoothingConfig(int8="dynamic", int8_lm_head=False, keep_precision=("down_proj", "*layers.1*"))
    with apply(model, config) as applied:
        assert isinstance(model.lm_head, nn.Linear)
        assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)
        assert not any("layers.1" in name for name in applied.int8)
        assert isinstance(model.model.layers[2].self_attn.q_proj, GroupedProjection)
    wrong = config.model_copy(update={"keep_precision": ("dwon_proj",)})
    with pytest.raises(ConfigError, match="matches no linear layer"), apply(model, wrong):
        pass


def test_static_needs_text_and_quantised_models_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="pass samples"), apply(model, {"int8": "static"}):
        pass
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    for config in ({"int8": "dynamic"}, {"enable": True, "method": "rotate"}):
        with pytest.raises(AttachError, match="quantised already"), apply(model, config):
            pass


def test_two_models_with_two_configs_live_side_by_side(tiny_model: Any) -> None:
    one, two = tiny_model("llama"), tiny_model("llama")
    ids = torch.randint(1, one.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    with apply(one, {"int8": "dynamic"}):
        alone = logits(one, ids)
        with apply(two, {"enable": True, "method": "rotate", "int8": "static"}, samples=ids):
            assert torch.equal(logits(one, ids), alone)
            assert not torch.equal(logits(two, ids), alone)
        assert torch.equal(logits(one, ids), alone)
