"""Changing a config while requests run: epochs, canaries, roll-backs, keys, and what survives a restart."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_server import ADMIN, API, BASE, SPARSE, Served, serve_tiny, with_cache

from gsm.config import load_config
from gsm.errors import ConfigError
from gsm.models import LoadedModel
from gsm.serve.rollout import share_of
from support_engine import load_tiny, prompt_ids

OFF: dict[str, Any] = {"guard": False}
BAD = {**SPARSE, "rollout": OFF}


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


@pytest.fixture
def served(tiny: LoadedModel, tmp_path: Path) -> Iterator[Served]:
    with serve_tiny(tiny, with_cache(OFF), state=tmp_path / "state.json") as found:
        yield found


def put(served: Served, config: dict[str, Any]) -> httpx.Response:
    return served.admin.put("/admin/config", json={"config": config})


# -- reload --------------------------------------------------------------------------------------------------------


def test_a_reload_serves_new_requests_at_once_and_running_ones_keep_theirs(served: Served) -> None:
    ids = prompt_ids(60, 1)
    before = served.ask(ids)
    assert before.headers["x-gsm-epoch"] == "1"
    body = {"model": "tiny", "prompt": ids, "max_tokens": 300, "temperature": 0, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        assert put(served, BAD).json()["epoch"] == 2
        after = served.ask(ids)
        assert after.headers["x-gsm-epoch"] == "2"
        assert running.headers["x-gsm-epoch"] == "1"
        text = "".join(json.loads(x[6:])["choices"][0]["text"] for x in lines if x.startswith("data: {"))
    assert after.json()["choices"][0]["text"] != before.json()["choices"][0]["text"]
    assert text  # the running answer came to its end


def test_the_same_config_again_is_no_new_epoch(served: Served) -> None:
    assert put(served, with_cache(OFF)).json()["epoch"] == 1
    assert [e["epoch"] for e in served.epochs()["epochs"]] == [1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cach": {}}, "unknown setting 'cach'; did you mean 'cache'"),
        (with_cache(page_size=8), "needs a restart: cache.page_size"),
        (with_cache(warm={"codec": "int4"}, page_size=16, hot_size=16), "needs a restart"),
        ({**BASE, "smoothing": {"int8": "dynamic"}}, "changes the model's weights"),
        (with_cache(recent_tokens=100), "exceeds hot_size"),
        (with_cache(policy="threshold", threshold=0.01), "no attention mass"),
    ],
)
def test_a_config_that_does_not_resolve_is_refused_and_the_live_one_stays(
    served: Served, caplog: pytest.LogCaptureFixture, config: dict[str, Any], said: str
) -> None:
    state = served.rollout._state_file.path
    assert state is not None
    before = (served.epochs()["epochs"], state.read_text(), served.engine.epochs.numbers)
    with caplog.at_level(logging.ERROR, "gsm"):
        for response in (put(served, config), served.admin.post("/admin/canary", json={"config": config, "weight": 5})):
            assert response.status_code == 400
            assert said.split(":")[0] in response.json()["error"]["message"] or said in response.text
    assert "was refused" in caplog.text
    assert (served.epochs()["epochs"], state.read_text(), served.engine.epochs.numbers) == before
    assert served.ask(prompt_ids(9, 1)).headers["x-gsm-epoch"] == "1"


def test_reload_and_rollback_take_effect_within_a_second(served: Served) -> None:
    for number in range(2, 6):
        began = time.monotonic()
        assert put(served, {**BAD, "engine": {**BASE["engine"], "max_waiting": number}}).status_code == 200
        assert served.ask(prompt_ids(5, 1), 1).headers["x-gsm-epoch"] == str(number)
        assert time.monotonic() - began < 1.0
    began = time.monotonic()
    assert served.admin.post("/admin/rollback").status_code == 200
    assert int(served.ask(prompt_ids(5, 1), 1).headers["x-gsm-epoch"]) == 6
    assert served.engine.config.engine.max_waiting == 4
    assert time.monotonic() - began < 1.0


def test_limits_of_a_reload_bound_the_engine(served: Served) -> None:
    put(served, {**BAD, "engine": {**BASE["engine"], "max_waiting": 0}})
    assert served.engine.scheduler.limits.max_waiting == 0
    assert served.ask(prompt_ids(5, 1)).status_code == 429


# -- canary --------------------------------------------------------------------------------------------------------


def test_a_canary_gets_its_share_and_everybody_stays_where_he_is(served: Served) -> None:
    served.admin.post("/admin/canary", json={"config": BAD, "weight": 30})
    users = [f"user-{i}" for i in range(60)]
    first = {user: served.ask(prompt_ids(4, 1), 1, user=user).headers["x-gsm-epoch"] for user in users}
    again = {user: served.ask(prompt_ids(4, 2), 1, user=user).headers["x-gsm-epoch"] for user in users}
    assert first == again
    assert 5 <= sum(epoch == "2" for epoch in first.values()) <= 32
    session = {"x-gsm-session": "one"}
    assert len({served.ask(prompt_ids(4, i), 1, headers=session).headers["x-gsm-epoch"] for i in range(8)}) == 1
    served.admin.post("/admin/canary", json={"weight": 60})
    wider = {user: served.ask(prompt_ids(4, 3), 1, user=user).headers["x-gsm-epoch"] for user in users}
    assert all(wider[user] == "2" for user in users if first[user] == "2"), "who was in stays in"
    served.admin.post("/admin/canary", json={"weight": 0})
    assert {served.ask(prompt_ids(4, 4), 1, user=user).headers["x-gsm-epoch"] for user in users[:20]} == {"1"}


def test_shares_are_even_and_differ_between_canaries() -> None:
    one = [share_of(f"u{i}", 2) for i in range(4000)]
    two = [share_of(f"u{i}", 3) for i in range(4000)]
    assert abs(sum(x < 0.1 for x in one) / 4000 - 0.1) < 0.02
    assert abs(sum(x < 0.5 for x in one) / 4000 - 0.5) < 0.03
    both = sum(x < 0.1 and y < 0.1 for x, y in zip(one, two, strict=True))
    assert both < 100, "the same tenth would try every canary"
    assert share_of("u1", 2) == one[1]


def test_both_epochs_share_prefix_pages_where_content_is_the_same(served: Served) -> None:
    ids = prompt_ids(60, 7)  # CASES C2

    def cached() -> int:
        found: int = served.ask(ids, 1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached() == 0
    own = cached()
    assert own >= 48
    put(served, BAD)
    assert cached() == own
    put(served, with_cache(OFF, hot_size=16))
    assert cached() == 0


def test_one_answer_with_several_prompts_has_one_epoch(served: Served) -> None:
    served.admin.post("/admin/canary", json={"config": BAD, "weight": 50})
    prompts = [prompt_ids(50, seed) for seed in range(6)]
    alone = {}
    for epoch in ("1", "2"):
        user = next(f"u{i}" for i in range(99) if served.ask([5], 1, user=f"u{i}").headers["x-gsm-epoch"] == epoch)
        alone[epoch] = [served.ask(p, 12, user=user).json()["choices"][0]["text"] for p in prompts]
        together = served.ask(prompts, 12, user=user)  # type: ignore[arg-type]
        assert together.headers["x-gsm-epoch"] == epoch
        assert [c["text"] for c in together.json()["choices"]] == alone[epoch]
    assert alone["1"] != alone["2"]


def test_promote_and_rollback_by_hand(served: Served) -> None:
    assert served.admin.post("/admin/promote").status_code == 409
    assert served.admin.post("/admin/rollback").status_code == 409
    served.admin.post("/admin/canary", json={"config": BAD, "weight": 20})
    assert served.admin.post("/admin/promote", json={"epoch": 9}).status_code == 409
    assert served.admin.post("/admin/promote", json={"epoch": 2}).json()["status"] == "stable"
    assert served.ask([5], 1).headers["x-gsm-epoch"] == "2"
    served.admin.post("/admin/canary", json={"config": with_cache(OFF), "weight": 20})
    said = served.admin.post("/admin/rollback", json={"reason": "I do not like it"}).json()
    assert (said["epoch"], said["status"], said["reason"]) == (3, "rolled back", "I do not like it")
    assert {served.ask([5], 1, user=str(i)).headers["x-gsm-epoch"] for i in range(9)} == {"2"}
    assert served.engine.epochs.numbers == [2]
    served.admin.post("/admin/rollback")  # nothing runs beside it: the stable config before
    assert served.epochs()["epochs"][0]["config"]["cache"]["sparse"]["enabled"] is False


# -- keys ----------------------------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/admin/config", None),
    ("PUT", "/admin/config", {"config": BAD}),
    ("POST", "/admin/canary", {"config": BAD, "weight": 50}),
    ("POST", "/admin/promote", None),
    ("POST", "/admin/rollback", None),
    ("GET", "/admin/epochs", None),
]


@pytest.mark.parametrize(
    "key", [None, "", "Bearer x", "Bearer wrong-key-999", f"Bearer {API}", f"Bearer {ADMIN}x", "Ädmin"]
)
def test_without_the_admin_key_nothing_changes(served: Served, key: str | None) -> None:
    served.admin.post("/admin/canary", json={"config": BAD, "weight": 50})
    before = served.epochs()
    headers = {} if key is None else {"authorization": key.encode("utf-8")}
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        for method, path, body in ROUTES:
            response = client.request(method, path, json=body, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401
            assert "config" not in response.text
        broken = client.put("/admin/config", content=b"{", headers=headers)  # type: ignore[arg-type]
        assert broken.status_code == 401
    assert served.epochs() == before


def test_the_admin_key_opens_no_other_door(served: Served) -> None:
    assert served.admin.get("/v1/models").status_code == 401


def test_the_admin_api_is_off_unless_a_key_is_set(tiny: LoadedModel) -> None:
    with serve_tiny(tiny, admin_keys=()) as served:
        for method, path, body in ROUTES:
            assert served.admin.request(method, path, json=body).status_code in (404, 405)
        assert served.client.get("/live").json()["has_admin"] is False


def test_no_key_is_an_api_key_and_an_admin_key() -> None:
    from gsm.serve.settings import ServeSettings

    with pytest.raises(ConfigError, match="among the API keys"):
        ServeSettings("m", api_keys=("same-key-1",), admin_keys=("same-key-1",))


def test_secrets_appear_nowhere(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        put(served, BAD)
        put(served, {"nonsense": 1})
        served.ask([5, 6], 2)
        served.client.put("/admin/config", json={"config": BAD})
    state = served.rollout._state_file.path
    assert state is not None
    seen = [caplog.text, state.read_text(), repr(served.server.settings)]
    seen += [served.admin.get(path).text for path in ("/metrics", "/live", "/", "/page/app.js", "/admin/epochs")]
    for secret in (ADMIN, API):
        assert not any(secret in text for text in seen)


# -- persistence ---------------------------------------------------------------------------------------------------


def test_the_last_good_epoch_survives_a_restart_and_an_unproven_one_does_not(tiny: LoadedModel, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with serve_tiny(tiny, with_cache(OFF), state=state) as served:
        put(served, BAD)
        served.admin.post("/admin/canary", json={"config": with_cache(OFF, hot_size=12), "weight": 10})
    with serve_tiny(tiny, with_cache(OFF), state=state) as served:
        found = served.epochs()
        assert (found["stable"], found["canary"]) == (2, None)
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "2"
        assert served.engine.config.cache.sparse.budget_tokens == 16
        canary = next(e for e in found["epochs"] if e["epoch"] == 3)
        assert canary["status"] == "replaced"
        assert "restarted" in canary["reason"]
        assert put(served, with_cache(OFF, hot_size=12)).json()["epoch"] == 4, "numbers are never used twice"


def test_a_crash_during_a_change_leaves_the_old_one(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    with serve_tiny(tiny, with_cache(OFF), state=state) as served:
        before = state.read_bytes()

        def fail(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("gsm.serve.state.os.replace", fail)
        response = put(served, BAD)
        assert response.status_code == 400
        assert "No space left" in response.text
        monkeypatch.undo()
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "1"
        assert state.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["state.json"], "no half-written file stays"
        assert served.engine.epochs.numbers == [1]
        assert put(served, BAD).json()["epoch"] == 2


def test_a_damaged_state_file_is_told_and_the_given_config_is_served(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"version": 1, "stable"')
    with caplog.at_level(logging.WARNING, "gsm"), serve_tiny(tiny, with_cache(OFF), state=state) as served:
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "1"
    assert "state file" in caplog.text


def test_a_changed_file_beats_the_state_and_a_restart_takes_what_cannot_change_live(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    state, file = tmp_path / "state.json", tmp_path / "gsm.yaml"
    file.write_text(json.dumps(with_cache(OFF)))
    with serve_tiny(tiny, file=file, state=state) as served:
        put(served, BAD)
    with serve_tiny(tiny, file=file, state=state) as served:
        assert served.epochs()["stable"] == 2, "the file is what it was: what an administrator made live goes on"
    file.write_text(json.dumps(with_cache(OFF, page_size=8, hot_size=8, recent_tokens=8)))
    with serve_tiny(tiny, file=file, state=state) as served:
        assert served.engine.config.cache.page_size == 8
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "3"
    file.write_text(json.dumps(with_cache(OFF, page_size=8, hot_size=16, recent_tokens=8)))
    with serve_tiny(tiny, file=file, state=state) as served:
        served.wait_for(lambda: served.engine.config.cache.hot_size == 16)
        assert served.epochs()["stable"] == 4


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_config_file_is_followed(tiny: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "gsm.yaml"
    file.write_text(json.dumps(with_cache(OFF)))
    with serve_tiny(tiny, file=file) as served:
        time.sleep(0.3)  # the watcher has begun
        other = tmp_path / "new.yaml"
        other.write_text(json.dumps(BAD))
        other.replace(file)  # as editors do
        took_s = served.wait_for(lambda: served.rollout.live.stable.number == 2, 10)
        assert took_s < 5
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "2"
        file.write_text("cache: {page_size: 8")
        served.wait_for(lambda: served.rollout.last_error is not None, 10)
        assert "not valid YAML" in served.epochs()["last_error"]["message"]
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "2"
        file.write_text(json.dumps(with_cache(OFF)))
        served.wait_for(lambda: served.rollout.live.stable.number == 3, 10)


def test_a_file_that_was_not_proven_yet_is_tried_again_after_a_restart_and_a_bad_one_is_not(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    file, state = tmp_path / "gsm.yaml", tmp_path / "state.json"
    file.write_text(json.dumps(with_cache()))
    with serve_tiny(tiny, file=file, state=state):
        pass
    file.write_text(json.dumps(with_cache(hot_size=12)))
    with serve_tiny(tiny, file=file, state=state) as served:
        served.wait_for(lambda: served.rollout.live.canary is not None, 10)
    with serve_tiny(tiny, file=file, state=state) as served:
        served.wait_for(lambda: served.rollout.live.canary is not None, 10)
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "3"
        served.admin.post("/admin/rollback", json={"reason": "bad"})
    with serve_tiny(tiny, file=file, state=state) as served:
        time.sleep(0.3)
        assert served.ask([5], 1).headers["x-gsm-epoch"] == "1"
        file.write_text(json.dumps(with_cache(hot_size=16)))
        served.wait_for(lambda: served.rollout.live.canary is not None, 10)


# -- under load ----------------------------------------------------------------------------------------------------

NUM_PROMPTS = 4


def reload_under_load(served: Served, num_reloads: int) -> tuple[int, list[float]]:
    """Alternate two configs while four threads ask; every answer must be its own epoch's, and none may be missing.

    Four reloads to an answer at most: a quick machine would be done before anybody was served. Returns the number of
    answers and how many seconds each reload took.
    """
    configs = [BAD, with_cache(OFF)]
    prompts = [prompt_ids(50, seed) for seed in range(NUM_PROMPTS)]
    expected: dict[int, list[str]] = {}
    for parity, config in ((0, configs[1]), (1, configs[0])):
        put(served, config)
        salt = {"cache_salt": "alone"}
        expected[parity] = [served.ask(p, 10, **salt).json()["choices"][0]["text"] for p in prompts]
    assert expected[0] != expected[1]
    first = int(served.ask([5], 1).headers["x-gsm-epoch"])
    is_sparse = {first: 1}
    done, problems, answers = threading.Event(), [], []

    def client(seed: int) -> None:
        with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {API}"}, trust_env=False) as http:
            for number in range(10**9):
                if done.is_set():
                    return
                which = (seed + number) % NUM_PROMPTS
                body = {"model": "tiny", "prompt": prompts[which], "max_tokens": 10, "temperature": 0}
                response = http.post("/v1/completions", json={**body, "cache_salt": f"{seed}/{number}"}, timeout=60)
                if response.status_code != 200:
                    problems.append(response.text)
                else:
                    text = response.json()["choices"][0]["text"]
                    answers.append((int(response.headers["x-gsm-epoch"]), which, text))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    times = []
    for number in range(num_reloads):
        began = time.monotonic()
        response = put(served, configs[number % 2 - 1])
        times.append(time.monotonic() - began)
        assert response.status_code == 200, response.text
        is_sparse[response.json()["epoch"]] = int(configs[number % 2 - 1] is configs[0])
        if number % 4 == 3:
            num_answers = len(answers)
            served.wait_for(lambda seen=num_answers: len(answers) > seen or problems, 30)
    done.set()
    for thread in threads:
        thread.join(60)
    assert not problems, problems[0]
    for epoch, which, text in answers:
        assert text == expected[is_sparse[epoch]][which], (epoch, which)
    assert len({epoch for epoch, _, _ in answers}) > min(5, num_reloads // 10)
    return len(answers), times


def test_reloads_under_load_lose_and_mix_nothing(served: Served) -> None:
    reload_under_load(served, 60)  # CASES D12, D13
    served.wait_for(lambda: not served.engine.requests)
    assert len(served.engine.epochs.numbers) == 1
    served.engine.manager.check_integrity()


@pytest.mark.slow
def test_a_thousand_reloads_under_load(served: Served) -> None:
    num_answers, _ = reload_under_load(served, 1000)
    assert num_answers > 200
    served.engine.manager.check_integrity()


def test_load_config_round_trips_through_the_state() -> None:
    for config in (BASE, SPARSE, {"cache": {"preset": "evict+sparse"}}, {"cache": {"preset": "sparse-int4"}}):
        settings = load_config(config)
        assert load_config(settings.model_dump(mode="json")) == settings
