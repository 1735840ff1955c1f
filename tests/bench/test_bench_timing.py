from __future__ import annotations

import pytest
import torch

from gsm.errors import InputError
from gsm.measure.bench.prompt import check_window, make_prompt
from gsm.measure.bench.timing import memory_bandwidth, timed_run
from gsm.models import LoadedModel
from gsm.quality import PlainArm, load_thirds
from support_measure import RuleArm


def test_a_run_is_one_prefill_and_greedy_steps() -> None:
    arm = RuleArm("a", lambda calls: torch.eye(9)[len(calls)])
    ttft_ms, tpot_ms, _ = timed_run(arm, torch.tensor([[3, 4, 5]]), 4)
    assert arm.log == [[("prefill", [3, 4, 5]), ("step", [1]), ("step", [2]), ("step", [3])]]
    assert ttft_ms > 0
    assert tpot_ms > 0


def test_a_single_token_has_no_time_per_token() -> None:
    arm = RuleArm("a", lambda calls: torch.zeros(9))
    assert timed_run(arm, torch.tensor([[3]]), 1)[1] is None


def test_plain_transformers_bytes_and_attended_tokens(tiny_model) -> None:
    model = tiny_model("llama")
    prompt = torch.randint(0, 128, (2, 40))
    _, _, stats = timed_run(PlainArm(model, chunk_tokens=16), prompt, 11)
    per_token = 3 * 2 * 2 * 16 * 4  # layers, K and V, kv heads, head_dim, float32
    assert stats.kv_bytes == stats.kv_pool_bytes == 2 * 50 * per_token
    assert stats.attended_tokens_mean == pytest.approx(sum(range(41, 51)) / 10)


def test_a_sliding_layer_attends_its_window_only(tiny_model) -> None:
    model = tiny_model("mistral", sliding_window=8)
    _, _, stats = timed_run(PlainArm(model, chunk_tokens=16), torch.randint(0, 128, (1, 40)), 5)
    assert stats.attended_tokens_mean == pytest.approx(8, abs=1)  # transformers keeps window - 1 past tokens


def test_forks_of_plain_transformers_are_independent(tiny_model) -> None:
    model = tiny_model("llama")
    ids = torch.randint(0, 128, (1, 20))
    with PlainArm(model).open() as session:
        session.prefill(ids)
        fork = session.fork()
        fork.prefill(ids)
        a = session.step(ids[:, :1])
        fork.close()
        assert session.num_tokens == 21
    with PlainArm(model).open() as fresh:
        fresh.prefill(ids)
        assert torch.equal(a, fresh.step(ids[:, :1]))
        with pytest.raises(InputError, match="shape"):
            fresh.prefill(ids[:, :0])


def test_prompts_are_real_text_different_in_each_row_and_always_the_same(demo: LoadedModel) -> None:
    prompt = make_prompt(demo, load_thirds(), 64, 8, 3)
    assert prompt.shape == (3, 64)
    assert len({tuple(row.tolist()) for row in prompt}) == 3
    assert torch.equal(prompt, make_prompt(demo, load_thirds(), 64, 8, 3))


def test_a_prompt_beyond_the_window_is_refused(demo: LoadedModel) -> None:
    check_window(demo, 8190, 2)
    with pytest.raises(InputError, match="at most 8182 tokens"):
        check_window(demo, 8190, 10)


def test_bandwidth_is_that_of_memory_and_not_of_a_cache() -> None:
    assert 1e8 < memory_bandwidth(torch.device("cpu")) < 1e12
