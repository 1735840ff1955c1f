"""One contract for every decode back end, on fresh random inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import Case, dense, make_case, mass_by_page, selection_for
from torch import Tensor

from gsm.attention import DecodeAttention, DecodeResult, make_attention
from gsm.attention.reference import ReferenceAttention
from gsm.core.batch import Span
from gsm.core.view import AttentionSpec, Selection
from gsm.errors import KVError
from gsm.kv.removal import removal_code

BACKENDS = ("reference", "torch", "numba")  # the one list to extend
SPEC = AttentionSpec(scale=0.25)
REFERENCE = ReferenceAttention()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> DecodeAttention:
    """Each back end, for comparison with formulas."""
    return make_attention(request.param, torch.device("cpu"))


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def kernel(request: pytest.FixtureRequest) -> DecodeAttention:
    """Each back end but the reference, for comparison with it."""
    return make_attention(request.param, torch.device("cpu"))


def assert_same(result: DecodeResult, expected: DecodeResult, tolerance: float = 2e-5) -> None:
    """Equal outputs, the same pages read per head, and the same mass on each."""
    torch.testing.assert_close(result.out, expected.out, atol=tolerance, rtol=1e-4)
    ours, theirs = mass_by_page(result.pages, result.mass), mass_by_page(expected.pages, expected.mass)
    for b, row in enumerate(theirs):
        for h, pages in enumerate(row):
            assert set(ours[b][h]) == set(pages), (b, h)
            assert ours[b][h] == pytest.approx(pages, abs=2e-5), (b, h)


def check(backend: DecodeAttention, case: Case, spec: AttentionSpec, selection: Selection | None = None) -> Tensor:
    result = backend.decode(case.query, case.view, spec, selection)
    assert torch.isfinite(result.out).all()
    assert_same(result, REFERENCE.decode(case.query, case.view, spec, selection))
    return result.out


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (1, 4), (2, 3)], ids=["single", "mha", "mqa", "gqa"])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (8, 32)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_full_precision_equals_the_textbook_formula(
    backend: DecodeAttention, heads: tuple[int, int], dims: tuple[int, int], page_size: int
) -> None:
    case = make_case(
        num_kv_heads=heads[0], group_size=heads[1], k_dim=dims[0], v_dim=dims[1], page_size=page_size, codec="none"
    )
    out = check(backend, case, SPEC)
    torch.testing.assert_close(out.double(), dense(case, SPEC), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("codec", "page_size"), [("none", 1), ("none", 16), ("int8", 1), ("int8", 16), ("int4", 16)])
@pytest.mark.parametrize("hot_size", [8, 40, 1000])
@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_mixtures_of_hot_and_warm_pages(
    kernel: DecodeAttention, codec: str, page_size: int, hot_size: int, dropped: float
) -> None:
    case = make_case(page_size=page_size, codec=codec, hot_size=hot_size, dropped=dropped, v_dim=64, seed=hot_size)
    check(kernel, case, SPEC)
    fixed = 1 + 8 // page_size
    check(kernel, case, SPEC, selection_for(case, fixed + 5, fixed + 3, fixed + 2))


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_cold_pages_in_int4(kernel: DecodeAttention, dropped: float) -> None:
    case = make_case((150, 60, 20), chilled=0.5, dropped=dropped, hot_size=20, v_dim=64)
    assert case.view.cold is not None
    check(kernel, case, SPEC)
    check(kernel, case, SPEC, selection_for(case, 6, 4, 3))


@pytest.mark.parametrize("scorer", ["clusters", "anchor", "mean_sigma", "minmax"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dropped", [0.0, 0.6])
@pytest.mark.parametrize("budgets", [(4, 4, 4), (7, 5, 3), (99, 99, 99)], ids=str)
def test_selection_reads_the_pages_of_the_reference(
    kernel: DecodeAttention, scorer: str, page_size: int, dropped: float, budgets: tuple[int, int, int]
) -> None:
    case = make_case((130, 70, 23), page_size=page_size, scorer=scorer, dropped=dropped, seed=page_size)
    check(kernel, case, SPEC, selection_for(case, *(b * (16 // page_size) for b in budgets)))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_variants(
    backend: DecodeAttention, softcap: float | None, window: int | None, with_sinks: bool
) -> None:
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)) if with_sinks else None
    spec = AttentionSpec(0.4, softcap, window, sinks)
    exact = make_case(codec="none", seed=5)
    torch.testing.assert_close(check(backend, exact, spec).double(), dense(exact, spec), atol=2e-5, rtol=1e-4)
    case = make_case(dropped=0.4, seed=6)
    check(backend, case, spec)
    check(backend, case, spec, selection_for(case, 5, 3, 3))


def test_a_window_of_four_sees_exactly_four_keys(backend: DecodeAttention) -> None:  # CASES A8
    case = make_case((10,), codec="none", page_size=4)
    spec = AttentionSpec(0.25, window=4)
    out = backend.decode(case.query, case.view, spec, None).out
    k, v = case.tokens[0]
    four = Case(case.view, case.query, [(k[:, -4:], v[:, -4:])], case.manager)
    torch.testing.assert_close(out.double(), dense(four, SPEC), atol=2e-5, rtol=1e-4)


def test_poisoned_slots_change_nothing(backend: DecodeAttention) -> None:  # CASES B1
    for codec, selected in itertools.product(("none", "int8"), (False, True)):
        outs = []
        for poison in (False, True):
            case = make_case((150, 33), codec=codec, dropped=0.3, poison=poison)
            selection = selection_for(case, 6, 4) if selected else None
            outs.append(backend.decode(case.query, case.view, SPEC, selection).out)
        assert torch.isfinite(outs[1]).all()
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_query_without_visible_keys_gets_zeros(backend: DecodeAttention, with_sinks: bool) -> None:  # CASES B2
    spec = AttentionSpec(0.25, sink_logits=torch.zeros(6) if with_sinks else None)
    case = make_case((80, 20), codec="none")
    group = case.manager.groups[0]
    group.table[0, 1, 0] = -1  # every page of one stream is gone
    group.has_holes = True
    view = group.layer_view(1, case.view.slots, case.view.seq_lens, case.view.max_pages)
    out = backend.decode(case.query, view, spec, None).out
    assert torch.equal(out[0, :3], torch.zeros_like(out[0, :3]))
    assert torch.isfinite(out).all()
    assert out[0, 3:].abs().min() > 0


def test_mass_is_the_largest_share_of_any_query_head(backend: DecodeAttention) -> None:
    case = make_case((70, 33), codec="none", page_size=8)
    result = backend.decode(case.query, case.view, SPEC, None)
    for b, row in enumerate(mass_by_page(result.pages, result.mass)):
        k, _ = case.tokens[b]
        weights = (case.query[b].double().unflatten(0, (2, 3)) @ k.double().transpose(-1, -2) * 0.25).softmax(-1)
        for h, pages in enumerate(row):
            assert set(pages) == set(range(-(-k.shape[1] // 8)))
            for page, mass in pages.items():
                share = weights[h, :, page * 8 : page * 8 + 8].sum(-1).max()
                assert mass == pytest.approx(float(share), abs=2e-5)


def test_pages_that_begin_with_a_gap(kernel: DecodeAttention) -> None:
    """A crop into a dropped page leaves leading slots without a token; they must take no mass."""
    case = make_case((100, 90), codec="int8", hot_size=8)
    manager, group = case.manager, case.manager.groups[0]
    for slot in (0, 1):
        state = manager.sequences[slot]
        gone = torch.zeros(2, 2, state.demoted.stop, dtype=torch.bool)
        gone[:, slot, 3:5] = True
        group.drop(slot, gone, state.demoted, removal_code(state.num_tokens, "recent"))
        manager.crop(slot, 55 + slot)  # inside page 3
        assert group.has_skips
    fresh = make_case((4, 3), seed=9)
    step = manager.begin([Span(0, 0, 0, 3), Span(1, 1, 0, 3)])
    for layer in range(2):
        step.write(layer, *(torch.stack([fresh.tokens[i][j][:, :3] for i in (0, 1)]) for j in (0, 1)))
    step.commit()
    view = group.layer_view(1, torch.tensor([0, 1]), torch.tensor([58, 59]), 4)
    after = Case(view, case.query, [], manager)
    check(kernel, after, SPEC)
    check(kernel, after, SPEC, selection_for(after, 3, 3))


def test_one_and_two_tokens(backend: DecodeAttention) -> None:  # CASES A3
    for lengths in ((1,), (2,), (1, 2)):
        case = make_case(lengths)
        torch.testing.assert_close(check(backend, case, SPEC).double(), dense(case, SPEC), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kernel: DecodeAttention, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, dropped=0.3)
    for selection in (None, selection_for(case, 6, 4, 3)):
        result = kernel.decode(case.query, case.view, SPEC, selection)
        expected = REFERENCE.decode(case.query, case.view, SPEC, selection)
        assert result.out.dtype == dtype
        torch.testing.assert_close(result.out, expected.out, atol=2e-2, rtol=2e-2)


def test_a_query_that_does_not_fit_is_refused(backend: DecodeAttention) -> None:
    case = make_case((20, 20))
    for query in (case.query[:1], case.query[:, :5], case.query[..., :8]):
        with pytest.raises(KVError, match="does not fit 2 sequences with 2 kv heads of 16 channels"):
            backend.decode(query, case.view, SPEC, None)


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(kernel: DecodeAttention, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    page_size = pick(1, 2, 16, 32)
    case = make_case(
        tuple(pick(1, 2, 15, 16, 17, 64, 129) for _ in range(pick(1, 2, 5))),
        num_kv_heads=pick(1, 2, 3),
        group_size=pick(1, 2, 4),
        k_dim=pick(8, 32, 64),
        v_dim=pick(8, 32, 64),
        page_size=page_size,
        codec=("none", "int8", "int4" if page_size >= 16 else "int8")[pick(0, 1, 2)],
        hot_size=pick(8, 33, 100),
        dropped=pick(0, 1) * 0.5,
        seed=seed,
    )
    check(kernel, case, SPEC)
    budgets = [pick(2, 3, 5, 9) + 8 // page_size + 1 for _ in case.tokens]
    check(kernel, case, SPEC, selection_for(case, *budgets))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_result(threads: int, sparse: bool) -> None:
    case = make_case((700, 33), num_kv_heads=3)
    selection = selection_for(case, 8, 8) if sparse else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):  # races would show now and then
            case.view.scratch.clear()
            check(make_attention("numba", torch.device("cpu")), case, SPEC, selection)
    finally:
        torch.set_num_threads(before)
