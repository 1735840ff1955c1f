import numpy as np
import pytest

from gsm.errors import ConfigError
from gsm.measure.load.metrics import aggregate, parse_goodput, peak_concurrency, peak_tokens_per_second, pool
from gsm.measure.load.record import Chunk, Failure, RequestRecord
from gsm.measure.load.samples import Sample, take_sample


def request(start_s: float, ttft_s: float, itls_s: list[float], prompt: int | None = 100) -> Sample:
    record = RequestRecord(start_s, start_s, num_prompt_tokens=prompt, num_output_tokens=1 + len(itls_s))
    at_s = start_s + ttft_s
    record.chunks.append(Chunk(at_s, 0, 4, None))
    for gap_s in itls_s:
        at_s += gap_s
        record.chunks.append(Chunk(at_s, 0, 4, None))
    record.end_s = at_s
    return take_sample(record)


def failed(start_s: float, after_s: float, kind: str = "http_500") -> Sample:
    record = RequestRecord(start_s, start_s, end_s=start_s + after_s, failure=Failure(kind, f"it was {kind}"))
    return take_sample(record)


def test_percentiles_are_those_of_successes_and_failures_stand_beside() -> None:  # CASES.md E5
    samples = [request(float(i), 0.2, [0.4, 0.4]) for i in range(90)]
    samples += [failed(float(i), 0.01) for i in range(7)] + [failed(0.0, 0.01, "timeout") for _ in range(3)]
    result = aggregate(samples, duration_s=90.0)
    assert (result["completed"], result["failed"]) == (90, 10)
    for key in ("mean", "median", "p50", "p95", "p99"):
        assert result[f"{key}_e2el_ms"] == pytest.approx(1000.0)
    assert result["failures"] == {
        "http_500": {"count": 7, "example": "it was http_500"},
        "timeout": {"count": 3, "example": "it was timeout"},
    }
    assert result["request_throughput"] == pytest.approx(1.0)
    assert result["num_e2el_samples"] == 90


def test_nothing_measured_is_none_everywhere() -> None:  # CASES.md E7
    for samples in ([], [failed(0.0, 0.01)]):
        result = aggregate(samples, duration_s=1.0)
        for metric in ("ttft", "ttft_reasoning", "ttft_answer", "tpot", "itl", "e2el"):
            assert result[f"num_{metric}_samples"] == 0
            for key in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
                assert result[f"{key}_{metric}_ms"] is None
        assert result["total_input_tokens"] is None
        assert result["max_output_tokens_per_s"] is None


def test_percentiles_pool_the_raw_samples_of_all_requests() -> None:
    """A request with many tokens weighs more in ITL; a mean of per-request percentiles would not show that."""
    samples = [request(0.0, 0.1, [0.01] * 90), request(0.0, 0.1, [0.05] * 10)]
    result = aggregate(samples, duration_s=2.0)
    expected = [10.0] * 90 + [50.0] * 10
    assert result["num_itl_samples"] == 100
    assert result["mean_itl_ms"] == pytest.approx(np.mean(expected))
    assert result["std_itl_ms"] == pytest.approx(np.std(expected))
    assert result["p90_itl_ms"] == pytest.approx(np.percentile(expected, 90))
    assert result["p95_itl_ms"] == pytest.approx(50.0)


def test_throughput_counts_tokens_of_successes() -> None:
    samples = [request(0.0, 0.1, [0.1] * 9), request(1.0, 0.1, [0.1] * 4), failed(0.0, 1.0)]
    result = aggregate(samples, duration_s=2.0)
    assert result["total_output_tokens"] == 15
    assert result["output_throughput"] == pytest.approx(7.5)
    assert result["total_input_tokens"] == 200
    assert result["total_token_throughput"] == pytest.approx(215 / 2)
    assert result["request_goodput"] is None, "not asked for"


def test_an_input_that_one_server_response_did_not_count_is_unknown() -> None:
    result = aggregate([request(0.0, 0.1, []), request(0.0, 0.1, [], prompt=None)], duration_s=1.0)
    assert result["total_input_tokens"] is None
    assert result["total_token_throughput"] is None


def test_goodput_needs_every_limit_and_no_failure() -> None:
    samples = [
        request(0.0, 0.4, [0.04] * 9),  # good
        request(0.0, 0.6, [0.04] * 9),  # first token too late
        request(0.0, 0.4, [0.06] * 9),  # tokens too slow
        request(0.0, 0.4, []),  # one token: no time per token to miss
        failed(0.0, 0.01),
    ]
    limits = parse_goodput(["ttft:500", "tpot:50"])
    assert aggregate(samples, 10.0, limits)["request_goodput"] == pytest.approx(0.2)
    assert aggregate(samples, 10.0, parse_goodput(["e2el:450"]))["request_goodput"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "objective", ["itl:5", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "ttft:nan", "tpot:inf"]
)
def test_goodput_that_cannot_be_meant_is_refused(objective: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([objective])


def test_peak_concurrency_counts_a_successor_that_starts_when_one_ends_once() -> None:
    samples = [request(0.0, 1.0, []), request(0.5, 1.0, []), request(1.5, 1.0, [])]
    assert peak_concurrency(samples) == 2
    assert peak_concurrency([]) == 0


def test_peak_token_rate_is_that_of_the_fullest_second() -> None:
    samples = [request(0.0, 0.25, [0.25] * 3), request(1.0, 0.25, [0.25] * 2), request(1.0, 0.5, [])]
    assert peak_tokens_per_second(samples) == 5.0


def test_queueing_before_the_request_is_told_apart() -> None:
    record = RequestRecord(scheduled_s=1.0, start_s=1.5, end_s=2.0, finish_reason="stop")
    assert pool([take_sample(record)], "queue") == [500.0]
    assert pool([take_sample(record)], "e2el") == [500.0]
