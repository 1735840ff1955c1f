from __future__ import annotations

from pathlib import Path

import pytest

from gsm.errors import InputError
from gsm.quality import load_thirds


def test_thirds_are_disjoint_and_lose_nothing(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {i} says {'word ' * (i % 7)}and ends." for i in range(400))
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    thirds = load_thirds(path)
    assert thirds.calibration + thirds.tuning + thirds.evaluation == text
    assert all(len(thirds.part(name)) > len(text) // 4 for name in ("calibration", "tuning", "evaluation"))
    assert thirds.tuning.startswith("Paragraph")
    assert thirds.evaluation.startswith("Paragraph")
    assert len(set(thirds.hashes().values())) == 3


def test_hash_names_the_content(tmp_path: Path) -> None:
    for name, word in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(f"{word} filler " * 1000, encoding="utf-8")
    a, b, c = (load_thirds(tmp_path / name) for name in "abc")
    assert a.hashes() == b.hashes()
    assert a.sha256("tuning") != c.sha256("tuning")


def test_text_without_paragraphs_is_cut_too(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("word " * 1200, encoding="utf-8")
    assert len(load_thirds(tmp_path / "t").evaluation) == 2000


def test_default_text_is_long_enough_for_real_windows() -> None:
    assert len(load_thirds().evaluation) > 150_000


@pytest.mark.parametrize(
    ("content", "said"), [(b"short", "at least"), (b"\xff\xfe" * 4000, "not UTF-8"), (None, "does not exist")]
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_thirds(path)


def test_unknown_third_is_refused() -> None:
    with pytest.raises(InputError, match="calibration, tuning, evaluation"):
        load_thirds().part("test")
