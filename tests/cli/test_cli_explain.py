"""`gsm explain` from the outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import gsm.cli
from support_measure import save_tiny_model

CONFIG = "cache: {policy: recent, cold: drop, hot_size: 64, recent_tokens: 32}\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    (path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return path


def _run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gsm", "explain", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        gsm.cli.main()
    return int(ended.value.code or 0)


def test_every_token_is_explained(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, result = tmp_path / "map.png", tmp_path / "map.json"
    code = _run(
        monkeypatch, directory, "--config", directory / "config.yaml", "--prompt-tokens", 300, "--new-tokens", 20,
        "--token", 100, "--picture", picture, "--json", result,
    )  # fmt: skip
    assert code == 0
    assert "recent" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))
    found = json.loads(result.read_text(encoding="utf-8"))
    positions = found["positions"]
    assert positions["num_tokens"] == 320
    assert sum(positions["share_by_tier"].values()) == pytest.approx(1.0)
    assert {(p["tier"], p["removed_by"], p["removed_at"]) for p in found["token"]} == {("removed", "recent", 300)}
    assert found["stats"]["num_dropped"] > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--token", 500], "there is no token 500: prompt and answer have 320"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--prompt-tokens", 2000], "does not fit"),
        (["--config", "transformers"], "is plain transformers"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    extra: list[object], message: str, directory: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = ["--config", directory / "config.yaml", "--prompt-tokens", 300, "--new-tokens", 20]
    assert _run(monkeypatch, directory, *settings, *extra) == 2
    assert message in capsys.readouterr().err


def test_an_impossible_picture_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--config", "tiers", "--prompt-tokens", 40, "--new-tokens", 0]
    assert _run(monkeypatch, directory, *settings, "--picture", tmp_path / "map.nonsense") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
