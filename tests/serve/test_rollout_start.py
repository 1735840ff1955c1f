"""What `gsm serve` starts with: the config given, or the last good one, completed with what it was told beside it."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rollout_server import SPARSE, with_cache

from gsm.cli.serve import command
from gsm.config import load_config
from gsm.errors import ConfigError
from gsm.models import LoadedModel
from gsm.serve.app import Server
from gsm.serve.run import open_server
from gsm.serve.settings import ServeSettings
from support_engine import load_tiny

OFF: dict[str, Any] = {"guard": False}


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


def start(tiny: LoadedModel, file: Path, kept: ExitStack) -> Server:
    return open_server(
        tiny, lambda: load_config(file), ServeSettings("tiny"), None, file, file.with_suffix(".state"), kept
    )


def test_memory_that_no_config_bounds_is_bounded_once(tiny: LoadedModel, tmp_path: Path) -> None:
    unbounded = with_cache(OFF)
    del (unbounded := {**unbounded, "engine": dict(unbounded["engine"])})["engine"]["kv_memory_mib"]
    file = tmp_path / "gsm.yaml"
    file.write_text(json.dumps(unbounded))
    with ExitStack() as kept:
        server = start(tiny, file, kept)
        engine, bound = server.worker.engine, server.worker.engine.room.max_bytes
        assert bound is not None
        changed = {**unbounded, "cache": {**unbounded["cache"], "hot_size": 12}}
        asyncio.run(server.rollout.reload(load_config(changed), "admin"))
        assert engine.config.cache.hot_size == 12
        assert engine.room.max_bytes == bound
        asked = server.rollout.record(2).config["engine"]["kv_memory_mib"]
        assert asked is None, "what is kept is what was asked for, not what this machine made of it"


def test_a_file_that_cannot_be_read_leaves_the_last_good_config(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gsm.yaml"
    file.write_text("cache: {hot")
    with ExitStack() as kept, pytest.raises(ConfigError, match="not valid YAML"):
        start(tiny, file, kept)
    file.write_text(json.dumps(with_cache(OFF)))
    with ExitStack() as kept:
        server = start(tiny, file, kept)
        asyncio.run(server.rollout.reload(load_config({**SPARSE, "rollout": OFF}), "admin"))
    file.write_text("cache: {hot")
    with caplog.at_level(logging.ERROR, "gsm"), ExitStack() as kept:
        server = start(tiny, file, kept)
        assert server.rollout.live.stable.number == 2
        assert server.worker.engine.config.cache.sparse.enabled
    assert "last good one is served" in caplog.text


def test_keys_are_told_apart_on_the_command_line() -> None:
    told = CliRunner().invoke(command, ["demo", "--admin-key-env", "NOT_SET_ANYWHERE"])
    assert told.exit_code != 0
    assert "--admin-key-env names NOT_SET_ANYWHERE" in str(told.exception or told.output)
