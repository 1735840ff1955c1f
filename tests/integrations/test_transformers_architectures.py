"""The table of architectures: complete, and true. A few rows run quickly, all of them slowly."""

from __future__ import annotations

import pytest
from architectures import COLUMNS, ROWS, cells, check_exact, check_padding, check_sparse, model_of, table_rows

QUICK = ("Gemma 3", "Gemma 3n", "Llama 4", "DeepSeek-V3", "Qwen3-Next", "LFM2", "GPT-BigCode")


def test_the_written_table_has_no_blank_cell() -> None:
    rows = table_rows()
    assert list(rows) == list(ROWS)
    assert all(len(row) == len(COLUMNS) and all(row) for row in rows.values())


@pytest.mark.parametrize("row", QUICK)
@pytest.mark.parametrize("check", [check_exact, check_sparse, check_padding])
def test_unusual_caches(row: str, check: object) -> None:
    assert check(model_of(row)) == "yes"  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_as_written(row: str) -> None:
    assert cells(row) == table_rows()[row]
