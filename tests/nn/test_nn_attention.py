"""DecoderAttention against torch's own attention: forward, gradients, index, cache, compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.errors import ConfigError, InputError, KVError
from gsm.nn import DecoderAttention, KVCache, apply_rope, best_tokens

BATCH, TOKENS, MEMORY, DIM, HEADS = 2, 13, 29, 48, 6


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal_mask(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)


def gradients(module: nn.Module, out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a fixed projection of `out` with respect to inputs and weights, in a comparable order."""
    weight = seeded(*out.shape, seed=9)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad((out * weight).sum(), [*inputs, *parameters.values()])
    named = dict(zip(parameters, found[len(inputs) :], strict=True))
    if isinstance(module, DecoderAttention):
        names = [f"{part}_proj.{kind}" for kind in ("weight", "bias") for part in "qkv"]
        packed = [torch.cat([named[name] for name in names[i : i + 3]]) for i in (0, 3)]
        return [*found[: len(inputs)], *packed, named["o_proj.weight"], named["o_proj.bias"]]
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    return [*found[: len(inputs)], *(named[name] for name in names)]


@pytest.mark.parametrize("padded", [False, True])
def test_self_attention_is_torchs_multihead_attention_with_its_gradients(padded: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = DecoderAttention.from_multihead(theirs)
    x = seeded(BATCH, TOKENS, DIM).requires_grad_()
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, -4:] = padded
    expected, _ = theirs(x, x, x, attn_mask=causal_mask(TOKENS), key_padding_mask=padding, need_weights=False)
    got = ours(x, key_padding_mask=padding if padded else None)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for mine, his in zip(gradients(ours, got, x), gradients(theirs, expected, x), strict=True):
        torch.testing.assert_close(mine, his, atol=2e-5, rtol=1e-4)


def test_cross_attention_is_torchs_multihead_attention_with_its_gradients() -> None:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, kdim=20, vdim=20)
    ours = DecoderAttention.from_multihead(theirs)
    x, memory = seeded(BATCH, TOKENS, DIM).requires_grad_(), seeded(BATCH, MEMORY, 20, seed=2).requires_grad_()
    expected, _ = theirs(x, memory, memory, need_weights=False)
    got = ours(x, memory)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(x, ours.project(memory)), expected, atol=1e-5, rtol=1e-5)
    weight = seeded(*got.shape, seed=9)
    mine = torch.autograd.grad((got * weight).sum(), [x, memory, ours.q_proj.weight, ours.k_proj.weight])
    his = torch.autograd.grad((expected * weight).sum(), [x, memory, theirs.q_proj_weight, theirs.k_proj_weight])
    for a, b in zip(mine, his, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("rope", [None, 8, 4])
def test_grouped_heads_and_rope_are_sdpa_on_repeated_heads(num_kv_heads: int, rope: int | None) -> None:
    torch.manual_seed(2)
    module = DecoderAttention(DIM, HEADS, num_kv_heads, rope_theta=100.0 if rope else None, rotary_dim=rope)
    x = seeded(BATCH, TOKENS, DIM).requires_grad_()
    got = module(x)
    heads = [
        linear(x).view(BATCH, TOKENS, -1, 8).transpose(1, 2) for linear in (module.q_proj, module.k_proj, module.v_proj)
    ]
    if rope:
        frequencies = 100.0 ** (-torch.arange(0, rope, 2) / rope)
        turns = torch.polar(torch.ones(TOKENS, rope // 2), torch.outer(torch.arange(TOKENS).float(), frequencies))
        heads[:2] = [_turned(y, turns) for y in heads[:2]]
    k, v = (y.repeat_interleave(HEADS // num_kv_heads, dim=1) for y in heads[1:])
    out = F.scaled_dot_product_attention(heads[0], k, v, is_causal=True)
    expected = module.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (got, expected))
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotation by complex numbers: an independent way to write the same thing."""
    half = turns.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turns
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def test_rope_depends_on_distance_alone_and_takes_positions_per_row() -> None:
    module = DecoderAttention(DIM, HEADS, 2, rope_theta=1e4)
    x = seeded(BATCH, TOKENS, DIM)
    positions = torch.arange(TOKENS)
    torch.testing.assert_close(module(x, positions=positions + 500), module(x), atol=1e-4, rtol=1e-4)
    per_row = torch.stack((positions, positions + 77))
    torch.testing.assert_close(module(x, positions=per_row), module(x), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(module(x, positions=positions * 3), module(x), atol=1e-3)
    one = apply_rope(x.unsqueeze(1), positions, module.rope)
    torch.testing.assert_close(one.norm(dim=-1), x.unsqueeze(1).norm(dim=-1))


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2, 1])
def test_an_index_reads_exactly_the_keys_it_names(num_kv_heads: int) -> None:
    torch.manual_seed(3)
    module = DecoderAttention(DIM, HEADS, num_kv_heads, memory_dim=DIM)
    x, memory = seeded(BATCH, TOKENS, DIM).requires_grad_(), seeded(BATCH, MEMORY, DIM, seed=4).requires_grad_()
    keep = torch.rand(BATCH, num_kv_heads, MEMORY, generator=torch.Generator().manual_seed(5)) < 0.4
    keep[..., 3] = True
    width = int(keep.sum(-1).max())
    order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :width]
    index = order.masked_fill(~keep.gather(-1, order), -1)
    got = module(x, memory, index=index)
    q = module.q_proj(x).view(BATCH, TOKENS, HEADS, 8).transpose(1, 2)
    k, v = (y.repeat_interleave(HEADS // num_kv_heads, dim=1) for y in module.project(memory))
    mask = keep.repeat_interleave(HEADS // num_kv_heads, dim=1).unsqueeze(2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = module.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(y.square().sum(), memory, retain_graph=True)[0] for y in (got, expected))
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_an_index_of_everything_changes_nothing_and_causality_holds_inside_it() -> None:
    module = DecoderAttention(DIM, HEADS, 3, rope_theta=1e4)
    x = seeded(BATCH, TOKENS, DIM)
    everything = torch.arange(TOKENS).flip(0).expand(BATCH, -1)
    torch.testing.assert_close(module(x, index=everything), module(x), atol=1e-5, rtol=1e-5)
    x.requires_grad_()
    first = module(x, index=everything)[:, :5]
    (gradient,) = torch.autograd.grad(first.square().sum(), x)
    assert float(gradient[:, 5:].abs().max()) == 0.0  # nothing of the future reached them


def test_queries_without_any_key_get_zeros_not_nan() -> None:
    module = DecoderAttention(DIM, HEADS, 2, memory_dim=DIM, bias=False)
    x, memory = seeded(BATCH, 1, DIM), seeded(BATCH, MEMORY, DIM)
    index = torch.full((BATCH, 2, 4), -1)
    assert torch.equal(module(x, memory, index=index), torch.zeros_like(x))
    nobody = torch.ones(BATCH, MEMORY, dtype=torch.bool)
    assert torch.equal(module(x, memory, key_padding_mask=nobody), torch.zeros_like(x))
    assert torch.equal(
        module(x, memory, index=torch.arange(4).expand(BATCH, -1), key_padding_mask=nobody), torch.zeros_like(x)
    )


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (torch.zeros(BATCH, 2, 4, dtype=torch.int32), "int64"),
        (torch.zeros(BATCH, 2, 4), "int64"),
        (torch.zeros(BATCH, HEADS, 4, dtype=torch.int64), "per kv head"),
        (torch.zeros(BATCH, 2, 4, 1, dtype=torch.int64), "per kv head"),
        (torch.full((BATCH, 2, 4), MEMORY), "names key 29"),
        (torch.full((BATCH, 2, 4), -2), "names key -2"),
        (torch.zeros(BATCH, 2, 4, dtype=torch.int64, device="meta"), "on meta"),
    ],
)
def test_a_bad_index_is_told_by_value_and_remedy(index: Tensor, words: str) -> None:
    module = DecoderAttention(DIM, HEADS, 2, memory_dim=DIM)
    with pytest.raises(InputError, match=words):
        module(seeded(BATCH, 1, DIM), seeded(BATCH, MEMORY, DIM), index=index)


def test_best_tokens_finds_the_page_with_the_key_that_answers() -> None:
    keys = seeded(1, 2, 83, 16) * 0.1
    query = seeded(1, 4, 1, 16, seed=1)
    for head in range(2):
        keys[0, head, 37] = query[0, 2 * head : 2 * head + 2, 0].sum(0) * 3
    index = best_tokens(query, keys, num_tokens=40, page_size=16)
    assert index.shape == (1, 2, 35)  # two pages and the three tokens of the open one
    assert all(37 in index[0, head] for head in range(2))
    assert torch.equal(index[..., -3:], torch.arange(80, 83).expand(1, 2, -1))
    assert torch.equal(best_tokens(query, keys, 100), torch.arange(83).expand(1, 2, -1))
    with pytest.raises(InputError, match="at least one page"):
        best_tokens(query, keys, 8)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_decoding_with_a_cache_is_the_causal_forward_pass(num_kv_heads: int) -> None:
    torch.manual_seed(4)
    blocks = [DecoderAttention(32, 4, num_kv_heads, rope_theta=1e4, layer_idx=i) for i in range(2)]
    x = seeded(BATCH, 40, 32)
    expected = x
    for block in blocks:
        expected = expected + block(expected)
    cache = KVCache(2, {"cache": {"page_size": 4, "hot_size": 8, "recent_tokens": 4, "warm": {"codec": "none"}}})
    out = []
    with torch.no_grad():
        for part in (x[:, :23], *x[:, 23:].split(1, dim=1)):
            with cache.step(part) as step:
                y = part
                for block in blocks:
                    y = y + block(y, cache=step)
            out.append(y)
    assert cache.num_tokens == 40
    torch.testing.assert_close(torch.cat(out, dim=1), expected, atol=1e-5, rtol=1e-5)
    cache.manager.check_integrity()
    cache.crop(30)
    assert cache.num_tokens == 30
    cache.free()
    assert cache.stats().kv_bytes == 0


def test_a_cache_refuses_what_it_cannot_do_and_an_error_leaves_no_trace() -> None:
    block = DecoderAttention(32, 4, 2)
    cache = KVCache(1)
    x = seeded(1, 5, 32)
    with pytest.raises(InputError, match="no gradients"), cache.step(x):
        pass
    with torch.no_grad():
        with pytest.raises(KVError, match="layer_idx"), cache.step(x) as step:
            block(block(x, cache=step), cache=step)
        assert cache.num_tokens == 0
        with pytest.raises(InputError, match="cache's choice"), cache.step(x) as step:
            block(x, cache=step, index=torch.zeros(1, 1, dtype=torch.int64))
        with cache.step(x) as step:
            block(x, cache=step)
        with pytest.raises(InputError, match="holds 1 rows"), cache.step(seeded(2, 1, 32)):
            pass
    assert cache.num_tokens == 5


@pytest.mark.parametrize("case", ["self", "grouped+rope", "cross", "index", "padding"])
def test_it_compiles_as_one_graph(case: str) -> None:
    torch.manual_seed(5)
    x, memory = seeded(BATCH, TOKENS, DIM), seeded(BATCH, MEMORY, DIM)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[0, 9:] = True
    index = torch.arange(10).expand(BATCH, -1)
    module, args, kwargs = {
        "self": (DecoderAttention(DIM, HEADS), (x,), {}),
        "grouped+rope": (DecoderAttention(DIM, HEADS, 2, rope_theta=1e4), (x,), {}),
        "cross": (DecoderAttention(DIM, HEADS, 1, memory_dim=DIM), (x, memory), {}),
        "index": (DecoderAttention(DIM, HEADS, 2, memory_dim=DIM), (x, memory), {"index": index}),
        "padding": (DecoderAttention(DIM, HEADS, 2), (x,), {"key_padding_mask": padding}),
    }[case]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out = compiled(*args, **kwargs)
    torch.testing.assert_close(out, module(*args, **kwargs), atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(out.square().sum(), module.k_proj.weight)[0]
    plain = torch.autograd.grad(module(*args, **kwargs).square().sum(), module.k_proj.weight)[0]
    torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((48, 6, 4), "evenly"),
        ((50, 6), "no multiple"),
        ((48, 0), "evenly"),
    ],
)
def test_impossible_sizes_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecoderAttention(*arguments)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="two sequences"):
        DecoderAttention(48, 6, memory_dim=48, rope_theta=1e4)
    with pytest.raises(ConfigError, match="exceeds"):
        DecoderAttention(48, 6, rope_theta=1e4, rotary_dim=10)
    with pytest.raises(ConfigError, match="even"):
        DecoderAttention(48, 6, rope_theta=1e4, rotary_dim=3)
    with pytest.raises(InputError, match="pass memory"):
        DecoderAttention(48, 6, memory_dim=48)(torch.zeros(1, 1, 48))
