"""Every figure against event streams whose arrival times are set to the microsecond; no clock and no network."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, event, sse, usage, usage_event

from gsm.measure.load.protocol import BadResponse, StreamReader, read_whole
from gsm.measure.load.record import RequestRecord
from gsm.measure.load.samples import Sample, take_sample

Arrivals = Iterable[tuple[float, bytes]]


def read(arrivals: Arrivals) -> RequestRecord:
    """A request sent at 100 s whose bytes arrive at the given seconds after that."""
    record = RequestRecord(scheduled_s=100.0, start_s=100.0)
    reader, at_s = StreamReader(record, keep_text=True), 0.0
    for at_s, data in arrivals:
        reader.feed(data, 100.0 + at_s)
    reader.close(100.0 + at_s)
    return record


def sample(arrivals: Arrivals) -> Sample:
    return take_sample(read(arrivals))


def approx(expected: float | list[float]) -> object:
    return pytest.approx(expected, abs=1e-9)


END = event("", finish="length")


def test_a_role_event_is_no_token() -> None:  # CASES.md E1
    result = sample([(0.01, event("", role="assistant")), (0.5, event("Hi")), (0.6, event("!")), (0.6, END + DONE)])
    assert result.ttft_s == approx(0.5)
    assert result.num_output_tokens == 2
    assert list(result.itls_s) == approx([0.1])


def test_chunks_of_five_tokens_give_five_intervals_each() -> None:  # CASES.md E3
    chunks = [(0.3 + 0.1 * i, event("one two three four five")) for i in range(4)]
    result = sample([*chunks, (0.6, END + usage_event(20) + DONE)])
    assert list(result.itls_s) == approx([0.02] * 15)  # the first chunk's own five tokens show no interval
    assert result.num_output_tokens == 20
    assert result.tpot_s == approx(0.3 / 19)
    assert result.counted_by == "usage"


def test_five_events_in_one_network_read_are_five_tokens_that_share_the_gap() -> None:
    burst = b"".join(event(" word") for _ in range(5))
    result = sample([(0.1, burst), (0.2, burst), (0.3, burst), (0.3, END + usage_event(15) + DONE)])
    assert list(result.itls_s) == approx([0.02] * 10)


def test_two_tokens_have_one_interval() -> None:  # CASES.md E4
    result = sample([(0.2, event("a")), (0.25, event("b")), (0.25, END + usage_event(2) + DONE)])
    assert list(result.itls_s) == approx([0.05])
    assert result.tpot_s == approx(0.05)


def test_one_token_has_neither_interval_nor_time_per_token() -> None:
    result = sample([(0.2, event("a")), (0.2, END + usage_event(1) + DONE)])
    assert list(result.itls_s) == []
    assert result.tpot_s is None
    assert result.ttft_s == result.e2el_s == approx(0.2)


def test_a_whole_answer_in_one_chunk_shows_no_time_per_token() -> None:
    result = sample([(0.9, event("all at once")), (0.9, END + usage_event(40) + DONE)])
    assert result.num_output_tokens == 40
    assert result.tpot_s is None
    assert list(result.itls_s) == []


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_and_answer_have_a_first_token_each(field: str) -> None:
    result = sample(
        [
            (0.1, event(**{field: "Let me"})),
            (0.2, event(**{field: " think"})),
            (0.7, event("42")),
            (0.8, event(".")),
            (0.8, END + usage_event(4) + DONE),
        ]
    )
    assert result.ttft_s == result.ttft_reasoning_s == approx(0.1)
    assert result.ttft_answer_s == approx(0.7)
    assert (result.reasoning, result.answer) == ("Let me think", "42.")
    assert list(result.itls_s) == approx([0.1, 0.5, 0.1])


def test_without_reasoning_there_is_no_first_reasoning_token() -> None:
    result = sample([(0.1, event("a")), (0.2, END)])
    assert result.ttft_reasoning_s is None
    assert result.ttft_answer_s == approx(0.1)


def test_tool_calls_are_tokens() -> None:
    call = event(tool_calls=[{"index": 0, "function": {"name": "look", "arguments": '{"q"'}}])
    more = event(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}])
    result = sample([(0.3, call), (0.4, more), (0.4, END + usage_event(8) + DONE)])
    assert result.ttft_s == approx(0.3)
    assert result.num_output_tokens == 8


def test_running_usage_says_how_many_tokens_a_chunk_has() -> None:
    chunks = [(0.1, event("a", usage=usage(1))), (0.3, event("b", usage=usage(4))), (0.4, event("c", usage=usage(5)))]
    result = sample([*chunks, (0.4, END + usage_event(5) + DONE)])
    assert list(result.itls_s) == approx([0.2 / 3] * 3 + [0.1])
    assert result.counted_by == "running_usage"


def test_a_running_count_that_stands_still_waits_for_the_next_chunk() -> None:
    chunks = [(0.1, event("a", usage=usage(1))), (0.2, event("b", usage=usage(1))), (0.3, event("c", usage=usage(2)))]
    assert list(sample([*chunks, (0.3, END)]).itls_s) == approx([0.2])


def test_without_usage_every_chunk_is_one_token_and_it_says_so() -> None:
    result = sample([(0.1, event("a")), (0.2, event("b")), (0.3, event("c")), (0.3, END + DONE)])
    assert result.num_output_tokens == 3
    assert result.counted_by == "chunks"


def test_an_end_of_sequence_token_has_no_text_and_no_interval() -> None:
    chunks = [(0.1, event("a")), (0.2, event("a long word")), (0.3, event("c"))]
    result = sample([*chunks, (0.4, event("", finish="stop") + usage_event(4) + DONE)])
    assert list(result.itls_s) == approx([0.1, 0.1])
    assert result.tpot_s == approx(0.3 / 3)
    assert result.e2el_s == approx(0.4)


def test_longer_texts_get_more_of_the_tokens() -> None:
    chunks = [(0.1, event("a")), (0.2, event("a much longer piece of text")), (0.3, event("b"))]
    result = sample([*chunks, (0.3, END + usage_event(8) + DONE)])
    assert list(result.itls_s) == approx([0.1 / 6] * 6 + [0.1])


def test_the_end_is_the_finish_reason_and_not_the_closing_of_the_stream() -> None:
    result = sample([(0.1, event("a")), (0.2, event("b")), (0.2, END), (5.0, usage_event(2) + DONE)])
    assert result.e2el_s == approx(0.2)


def test_an_answer_without_text_is_complete_but_has_no_first_token() -> None:
    result = sample([(0.1, event("", role="assistant")), (0.2, event("", finish="stop") + usage_event(1) + DONE)])
    assert result.failure is None
    assert result.ttft_s is None
    assert result.e2el_s == approx(0.2)


def test_text_is_joined_without_replacement_characters() -> None:  # CASES.md E10
    text = "漢字 👩‍👩‍👧 é🎉"
    body = b"".join(event(character) for character in text) + END + DONE
    record = read((0.1 * i, body[i : i + 1]) for i in range(len(body)))
    assert record.answer == text


@pytest.mark.parametrize("chars_per_event", [1, 3, 7])
@given(extra=st.integers(0, 40), num_chunks=st.integers(1, 20))
def test_intervals_account_for_all_the_time_and_no_token_twice(
    chars_per_event: int, extra: int, num_chunks: int
) -> None:
    total = num_chunks + extra
    chunks = [(0.1 * (i + 1), event("x" * (1 + i % chars_per_event))) for i in range(num_chunks)]
    result = sample([*chunks, (0.1 * num_chunks, END + usage_event(total) + DONE)])
    assert len(result.itls_s) < total
    assert len(result.itls_s) >= num_chunks - 1
    assert sum(result.itls_s) == pytest.approx(0.1 * (num_chunks - 1))


def test_a_server_that_splits_tokens_into_more_chunks_still_counts_tokens() -> None:
    chunks = [(0.1 * (i + 1), event("x")) for i in range(8)]
    result = sample([*chunks, (0.8, END + usage_event(4) + DONE)])
    assert result.num_output_tokens == 4
    assert len(result.itls_s) <= 4


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (event("a"), "cut_off"),
        (b"", "cut_off"),
        (event("a") + b'data: {"choices": [{"del', "bad_stream"),
        (sse([1]), "bad_stream"),
        (sse({"choices": [7]}), "bad_stream"),
        (sse({"choices": {"a": 1}}), "bad_stream"),
        (sse({"choices": [], "usage": {"completion_tokens": "many"}}), "bad_stream"),
        (sse({"choices": [], "usage": {"completion_tokens": 10**12}}), "bad_stream"),
        (sse({"choices": [], "usage": {"completion_tokens": -1}}), "bad_stream"),
        (b"data: \xff\xfe\n\n", "bad_stream"),
        (event("a") + sse({"error": {"message": "out of memory"}}), "server_error"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failure_with_its_reason(body: bytes, kind: str) -> None:
    with pytest.raises(BadResponse) as caught:
        read([(0.1, body)])
    assert caught.value.failure.kind == kind
    assert caught.value.failure.message


def test_done_or_a_finish_reason_is_enough_of_an_end() -> None:
    assert read([(0.1, event("a") + DONE)]).failure is None
    assert read([(0.1, event("a", finish="stop"))]).failure is None


def test_a_whole_response_has_an_end_and_tokens_but_no_first_token() -> None:
    record = RequestRecord(100.0, 100.0)
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage(7, 30)}
    read_whole(record, json.dumps(body).encode(), 101.5, keep_text=True)
    result = take_sample(record)
    assert result.e2el_s == approx(1.5)
    assert (result.ttft_s, result.tpot_s, list(result.itls_s)) == (None, None, [])
    assert (result.num_output_tokens, result.num_prompt_tokens) == (7, 30)
    assert (result.reasoning, result.answer) == ("Hm", "Hi")


def test_completions_carry_their_text_elsewhere() -> None:
    choice = {"index": 0, "text": "word", "finish_reason": "length"}
    assert sample([(0.4, sse({"choices": [choice]}))]).ttft_s == approx(0.4)
    record = RequestRecord(0.0, 0.0)
    read_whole(record, json.dumps({"choices": [choice]}).encode(), 1.0, keep_text=True)
    assert record.answer == "word"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"error": "busy"}'])
def test_a_whole_response_of_another_shape_is_a_failure(body: bytes) -> None:
    with pytest.raises(BadResponse):
        read_whole(RequestRecord(0.0, 0.0), body, 1.0)


def test_cached_prompt_tokens_are_kept() -> None:
    counts = usage(2, 100) | {"prompt_tokens_details": {"cached_tokens": 64}}
    result = sample([(0.1, event("a")), (0.2, event("b", finish="stop")), (0.2, sse({"choices": [], "usage": counts}))])
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (100, 64)
