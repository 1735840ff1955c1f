"""Which configs vLLM can serve, what may change while it runs, and the flags it is started with. No vLLM needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gsm.config import load_config
from gsm.errors import ConfigError
from gsm.integrations.vllm.launch import ServeOptions, engine_options, server_arguments, server_environment
from gsm.integrations.vllm.live import ENVIRONMENT, Live, check, configured
from gsm.integrations.vllm.metrics import render
from gsm.integrations.vllm.plugin import version_of

SPARSE = {"cache": {"sparse": {"enabled": True}}}
EVICT = {"cache": {"policy": "recent", "cold": "drop", "hot_size": 256}}
OPTIONS = ServeOptions(host="127.0.0.1", port=8000, model_name="demo")


def an_engine(additional: Any = None) -> Any:
    return SimpleNamespace(additional_config=additional if additional is not None else {}, instance_id="test")


class TestConfigured:
    def test_nothing_said_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
        assert configured(an_engine()) is None

    def test_a_mapping_a_path_and_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        file = tmp_path / "gsm.yaml"
        file.write_text("cache: {sparse: {enabled: true}}")
        expected = load_config(SPARSE)
        assert configured(an_engine({"gsm": SPARSE})) == expected
        assert configured(an_engine({"gsm": str(file)})) == expected
        monkeypatch.setenv(ENVIRONMENT, json.dumps(SPARSE))
        assert configured(an_engine()) == expected
        monkeypatch.setenv(ENVIRONMENT, str(file))
        assert configured(an_engine()) == expected

    def test_a_misspelt_setting_is_named(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'enabled'"):
            configured(an_engine({"gsm": {"cache": {"sparse": {"enable": True}}}}))


class TestCheck:
    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"cache": {"policy": "recent", "cold": "drop", "positions": "compact"}}, "positions: logical"),
            ({"cache": {"policy": "threshold", "threshold": 0.01, "cold": "int4"}}, "keep or drop"),
            ({"cache": {"policy": "budget", "warm_size": 64, "cold": "drop"}}, "sparse.enabled"),
            (
                {
                    "cache": {
                        "policy": "budget",
                        "warm_size": 64,
                        "cold": "drop",
                        "sparse": {"enabled": True, "scorer": "minmax"},
                    }
                },
                "clusters or anchor",
            ),
            ({"smoothing": {"enable": True, "method": "rotate"}}, "gsm smooth"),
            ({"smoothing": {"int8": "dynamic"}}, "gsm smooth"),
        ],
    )
    def test_what_vllm_cannot_do_is_refused_with_a_remedy(self, config: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            check(load_config(config))


class TestReload:
    def test_decode_settings_are_live(self) -> None:
        live = Live(load_config(SPARSE))
        assert live.reload({"cache": {"sparse": {"enabled": True, "budget_tokens": 2048}}}) == 2
        assert live.config.cache.sparse.budget_tokens == 2048
        assert live.reload({}) == 3

    def test_a_config_that_leaves_the_block_size_open_keeps_it(self) -> None:
        live = Live(load_config({**SPARSE, "vllm": {"block_tokens": 16}}))
        assert live.reload(SPARSE) == 2
        assert live.config.vllm.block_tokens == 16

    @pytest.mark.parametrize(
        "new",
        [EVICT, {"engine": {"max_running": 3}}, {"smoothing": {"enable": True}}, {"vllm": {"block_tokens": 16}}],
    )
    def test_what_needs_a_restart_says_so_and_changes_nothing(self, new: dict[str, Any]) -> None:
        live = Live(load_config(SPARSE))
        if "smoothing" in new:
            new = {"smoothing": {"enable": True, "method": "window"}}
        with pytest.raises(ConfigError, match="restart"):
            live.reload(new)
        assert live.epoch == 1
        assert live.config == load_config(SPARSE)


class TestLaunch:
    def test_flags_carry_the_config_and_nothing_needless(self) -> None:
        options = engine_options(load_config(SPARSE))
        assert options["additional_config"] == {"gsm": SPARSE}
        assert options["block_size"] == 32
        assert "kv_transfer_config" not in options
        assert engine_options(load_config(SPARSE), "cuda:0")["block_size"] == 16
        assert engine_options(load_config({**SPARSE, "vllm": {"block_tokens": 16}}))["block_size"] == 16

    def test_dropping_blocks_brings_the_connector(self) -> None:
        assert engine_options(load_config(EVICT))["kv_transfer_config"]["kv_connector"] == "GsmConnector"

    def test_a_command_line_that_vllm_can_read(self) -> None:
        told = ServeOptions(
            "0.0.0.0", 9000, "mine", kv_memory_mib=512, max_running=4, extra=("--tensor-parallel-size", "3")
        )
        arguments = server_arguments("/models/x", load_config(EVICT), told)
        pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert pairs["--model"] == "/models/x"
        assert json.loads(pairs["--additional-config"]) == {"gsm": EVICT}
        assert pairs["--kv-cache-memory-bytes"] == str(512 * 2**20)
        assert (pairs["--max-num-seqs"], pairs["--tensor-parallel-size"]) == ("4", "3")

    def test_the_environment_keeps_what_the_user_set(self) -> None:
        new = server_environment(OPTIONS, {"VLLM_PLUGINS": "mine", "VLLM_CPU_OMP_THREADS_BIND": "0-3"})
        assert new["VLLM_PLUGINS"] == "mine,gsm,gsm_admin"
        assert new["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"

    def test_versions(self) -> None:
        assert version_of("0.32.0+cpu") == (0, 32)
        assert version_of("nonsense") == (0, 0)


class TestMetrics:
    def test_every_rank_is_a_labelled_sample(self) -> None:
        counters = {
            "steps": 5, "sparse_steps": 3, "context_tokens": 9, "read_tokens": 4, "summarised_blocks": 2,
            "summary_bytes": 7,
        }  # fmt: skip
        ranks = [{"rank": r, "data_parallel_rank": 0, "epoch": 2, "counters": counters} for r in range(2)]
        text = render(ranks)
        assert 'gsm:read_tokens_total{engine="0",rank="1"} 4' in text
        assert 'gsm:summary_bytes{engine="0",rank="0"} 7' in text
        assert 'gsm:config_epoch{engine="0",rank="1"} 2' in text
        assert all(line.startswith(("#", "gsm:")) for line in text.splitlines())
