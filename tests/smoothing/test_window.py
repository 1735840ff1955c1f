"""The window must not depend on how tokens are cut into steps, nor on who shares the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gsm.config.smoothing import ShortRequest, SmoothingConfig
from gsm.errors import AttachError
from gsm.smoothing import apply
from gsm.smoothing.window import (
    Parameters,
    Span,
    StepContext,
    WindowSmoothing,
    parameters_for,
)


def naive(x: Tensor, window: int, strength: float, skip: int, warmup: str) -> Tensor:
    """The document's formula, token by token."""
    y = x.clone()
    for t in range(skip, len(x)):
        part = x[max(skip, t - window + 1) : t + 1]
        if warmup == "partial" or len(part) == window:
            y[t] = (1 - strength) * x[t] + strength * part.mean(0)
    return y


def config(**values: Any) -> SmoothingConfig:
    return SmoothingConfig(
        enable=True, method="window", precision="fp32", short_request=ShortRequest(max_tokens=0), **values
    )


def run(smoothing: WindowSmoothing, x: Tensor, cuts: list[int], parameters: Parameters, request: int = 0) -> Tensor:
    parts, position = [], 0
    for length in cuts:
        smoothing.begin_step(StepContext((Span(request, 0, length, position, parameters),)))
        parts.append(smoothing.smooth("m", x[position : position + length]))
        position += length
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 1, 13, 18], [39, 1], [3, 3, 34]])
@pytest.mark.parametrize(
    ("window", "skip_sink", "warmup"), [(4, True, "skip"), (8, False, "partial"), (16, True, "partial")]
)
def test_independent_of_chunking(cuts: list[int], window: int, skip_sink: bool, warmup: str) -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    smoothing = WindowSmoothing(config(window_size=window, skip_sink=skip_sink, warmup=warmup))
    y = run(smoothing, x, cuts, Parameters(window, 0.2))
    assert torch.allclose(y, naive(x, window, 0.2, int(skip_sink), warmup), atol=1e-5)


def test_requests_share_a_batch_and_a_request_without_smoothing_is_untouched() -> None:
    generator = torch.Generator().manual_seed(2)
    xs = torch.randn(3, 20, 5, generator=generator)
    smoothing = WindowSmoothing(config())
    settings = [Parameters(4, 0.1), Parameters(16, 0.3), Parameters(8, 0.0)]
    lengths = [5, 9, 12]
    context, rows, start = [], [], 0
    for request, length in enumerate(lengths):
        context.append(Span(request, start, length, 0, settings[request]))
        rows.append(xs[request, :length])
        start += length
    smoothing.begin_step(StepContext(tuple(context)))
    outputs = [list(part) for part in smoothing.smooth("m", torch.cat(rows)).split(lengths)]
    for step in range(8):
        at = [length + step for length in lengths]
        smoothing.begin_step(StepContext(tuple(Span(r, r, 1, at[r], settings[r]) for r in range(3))))
        y = smoothing.smooth("m", torch.stack([xs[r, at[r]] for r in range(3)]))
        for request in range(3):
            outputs[request].append(y[request])
    for request, setting in enumerate(settings):
        x = xs[request, : lengths[request] + 8]
        expected = naive(x, setting.window, setting.strength, 1, "skip")
        assert torch.allclose(torch.stack(outputs[request]), expected, atol=1e-5)
    assert torch.equal(torch.stack(outputs[2]), xs[2, :20])


def test_a_slot_given_to_a_new_request_shows_nothing_of_the_old_one() -> None:
    smoothing = WindowSmoothing(config(warmup="partial"))
    run(smoothing, torch.full((20, 4), 1e6), [20], Parameters(8, 0.3), request=1)
    smoothing.release(1)
    x = torch.randn(12, 4)
    y = run(smoothing, x, [4, 1, 1, 6], Parameters(8, 0.3), request=2)
    assert smoothing.state.num_requests == 1
    assert torch.allclose(y, naive(x, 8, 0.3, 1, "partial"), atol=1e-5)


def test_taking_back_drafted_tokens_leaves_no_trace() -> None:
    x, wrong = torch.randn(30, 4), torch.randn(6, 4)
    parameters, smoothing = Parameters(8, 0.3), WindowSmoothing(config())
    first = run(smoothing, x[:20], [20], parameters)
    smoothing.begin_step(StepContext((Span(0, 0, 6, 20, parameters),)))
    smoothing.smooth("m", wrong)  # rejected
    smoothing.begin_step(StepContext((Span(0, 0, 10, 20, parameters),)))
    y = torch.cat((first, smoothing.smooth("m", x[20:])))
    assert torch.allclose(y, naive(x, 8, 0.3, 1, "skip"), atol=1e-5)


def test_a_fork_goes_on_with_its_own_copy_of_the_window() -> None:
    x, other = torch.randn(24, 4), torch.randn(4, 4)
    parameters, smoothing = Parameters(8, 0.3), WindowSmoothing(config())
    run(smoothing, x[:20], [20], parameters, request=0)
    for target in range(1, 9):  # more requests than the rings had room for
        smoothing.state.copy(0, target)
    branch = torch.cat((x[:20], other))
    for step in range(4):
        spans = tuple(Span(request, request, 1, 20 + step, parameters) for request in range(9))
        smoothing.begin_step(StepContext(spans))
        y = smoothing.smooth("m", torch.stack([x[20 + step]] + [other[step]] * 8))
        assert torch.allclose(y[0], naive(x, 8, 0.3, 1, "skip")[20 + step], atol=1e-5)
        assert torch.allclose(y[1:], naive(branch, 8, 0.3, 1, "skip")[20 + step].expand(8, -1), atol=1e-5)
    smoothing.state.copy("nobody", 1)  # a source without a window leaves nothing to copy
    assert not smoothing.state.knows("nobody")


def test_padding_after_the_last_token_is_passed_on() -> None:
    x, parameters = torch.randn(20, 4), Parameters(4, 0.3)
    smoothing = WindowSmoothing(config())
    run(smoothing, x[:18], [18], parameters)
    padding = torch.randn(3, 4)
    for position in (18, 19):
        smoothing.begin_step(StepContext((Span(0, 0, 1, position, parameters),)))
        y = smoothing.smooth("m", torch.cat((x[position : position + 1], padding)))
        assert torch.equal(y[1:], padding)
        assert torch.allclose(y[0], naive(x, 4, 0.3, 1, "skip")[position], atol=1e-5)


def test_a_reused_prefix_without_its_window_is_refused() -> None:
    smoothing = WindowSmoothing(config())
    with pytest.raises(AttachError, match="position 16"):
        smoothing.begin_step(StepContext((Span("a", 0, 4, 16, Parameters(4, 0.1)),)))
    smoothing.begin_step(StepContext((Span("a", 0, 4, 16, Parameters(4, 0.0)),)))  # not smoothed: nothing is missing
    smoothing.begin_step(StepContext((Span("b", 0, 4, 0, Parameters(4, 0.1)),)))
    with pytest.raises(AttachError, match="saw 2 tokens"):
        smoothing.smooth("m", torch.randn(2, 4))
    smoothing.end_step()
    x = torch.randn(2, 4)
    assert smoothing.smooth("m", x) is x  # outside of a step nothing is smoothed


def test_reordering_moves_windows_between_beams() -> None:
    x = torch.randn(2, 21, 4)
    parameters, smoothing = Parameters(8, 0.3), WindowSmoothing(config())
    for beam in range(2):
        smoothing.begin_step(StepContext((Span(beam, 0, 20, 0, parameters),)))
        smoothing.smooth("m", x[beam, :20])
    smoothing.state.reorder([0, 1], [1, 1])
    smoothing.begin_step(StepContext((Span(0, 0, 1, 20, parameters), Span(1, 1, 1, 20, parameters))))
    y = smoothing.smooth("m", torch.stack((x[1, 20], x[1, 20])))
    expected = naive(x[1], 8, 0.3, 1, "skip")[20]
    assert torch.allclose(y[0], expected, atol=1e-5)
    assert torch.allclose(y[1], expected, atol=1e-5)


def test_rules_for_short_requests_and_relative_windows() -> None:
    short = ShortRequest(max_tokens=50, action="off")
    assert parameters_for(SmoothingConfig(short_request=short), 50).strength == 0.0
    assert parameters_for(SmoothingConfig(short_request=short), 51) == Parameters(8, 0.1)
    own = ShortRequest(max_tokens=50, action="own", window_size=4, smooth_strength=0.05)
    assert parameters_for(SmoothingConfig(short_request=own), 20) == Parameters(4, 0.05)
    auto = SmoothingConfig(window_size="auto", short_request=ShortRequest(max_tokens=0))
    assert [parameters_for(auto, n).window for n in (10, 64, 128, 10_000)] == [4, 4, 8, 16]
    unsafe = auto.model_copy(update={"allow_unsafe": True})
    assert parameters_for(unsafe, 1600).window == 100


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


def test_model_decode_equals_one_prefill_even_with_left_padding(model: Any) -> None:
    ids = torch.randint(1, model.config.vocab_size, (2, 30), generator=torch.Generator().manual_seed(3))
    settings = config(smooth_strength=0.3, window_size=4, target_layers="all")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad(), apply(model, settings, samples=ids) as applied:
        assert applied.window is not None
        assert len(applied.smoothed) == 2 * model.config.num_hidden_layers
        whole = model(input_ids=ids, attention_mask=mask).logits
        alone = model(input_ids=ids[1:, 6:]).logits
        out = model(input_ids=ids[:, :20], attention_mask=mask[:, :20], use_cache=True)
        parts = [out.logits]
        for t in range(20, 30):
            out = model(
                input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=out.past_key_values
            )
            parts.append(out.logits)
        plain_cost = applied.window.cost
    stepped = torch.cat(parts, 1)
    assert torch.allclose(stepped[0], whole[0], atol=1e-4)
    assert torch.allclose(stepped[1, 6:], whole[1, 6:], atol=1e-4)
    assert torch.allclose(alone[0], whole[1, 6:], atol=1e-4)
    assert plain_cost.calls > 0
    assert plain_cost.seconds > 0
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=ids, attention_mask=mask).logits[0], whole[0], atol=1e-3)


def test_beam_search_follows_the_reordered_cache(model: Any) -> None:
    ids = torch.randint(1, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(4))
    settings = config(smooth_strength=0.3, window_size=4, target_layers="all")
    with torch.no_grad(), apply(model, settings, samples=ids):
        out = model.generate(
            ids, num_beams=3, max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        scores = model(input_ids=out.sequences).logits.log_softmax(-1)
    picked = scores[0, 11:-1].gather(1, out.sequences[0, 12:, None]).sum()
    assert torch.allclose(picked / 8, out.sequences_scores[0], atol=1e-4)


def test_a_batch_that_changes_size_without_a_new_prompt_is_refused(model: Any) -> None:
    ids = torch.randint(1, model.config.vocab_size, (2, 10))
    with torch.no_grad(), apply(model, config(target_layers="all"), samples=ids):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(AttachError, match="empty cache"):
            model(input_ids=ids[:1, :1], past_key_values=cache)


@pytest.mark.parametrize("chunks", [[30, 70], [30, 30, 40]])
def test_a_request_is_short_until_it_has_outgrown_that(model: Any, chunks: list[int]) -> None:
    section = SmoothingConfig(
        enable=True, method="window", precision="fp32", target_layers=("*o_proj",), smooth_strength=0.3, window_size=4
    )
    ids = torch.randint(1, model.config.vocab_size, (1, sum(chunks)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with apply(model, section):
            cache, parts = None, []
            for part in ids.split(chunks, 1):
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                parts.append(out.logits)
    found, short = torch.cat(parts, 1), sum(chunks[:-1])
    assert torch.allclose(found[:, :short], plain[:, :short], atol=1e-5)
    assert not torch.allclose(found[:, short:], plain[:, short:], atol=1e-2)
