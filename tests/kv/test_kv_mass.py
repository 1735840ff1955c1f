"""Attention mass against plain lists of observations."""

from __future__ import annotations

import pytest
import torch
from kv_model import HEADS, LAYERS, append, make_config, random_tokens, write

from gsm.core.batch import Span
from gsm.kv.manager import KVManager
from gsm.kv.mass import MassStatistics

PAGES = 6


def _records(statistics: MassStatistics) -> dict[str, torch.Tensor]:
    fields = {name: torch.full((PAGES, *shape), 77).to(dtype) for name, (shape, dtype) in statistics.fields.items()}
    fields["observed"].zero_()
    return fields


@pytest.mark.parametrize("window", [1, 3, 8, 128])
def test_the_mean_of_the_last_observations(window: int) -> None:
    statistics, generator = MassStatistics(window), torch.Generator().manual_seed(window)
    records = _records(statistics)
    seen: list[list[float]] = [[] for _ in range(PAGES)]
    for _ in range(3 * window + 5):
        ids = torch.randperm(PAGES - 1, generator=generator)[: int(torch.randint(1, PAGES, (), generator=generator))]
        mass = torch.rand(len(ids), generator=generator).half().float()
        statistics.record(records, ids, mass)
        for page, value in zip(ids.tolist(), mass.tolist(), strict=True):
            seen[page].append(value)
        mean = statistics.mean(records, torch.arange(PAGES))
        for page in range(PAGES):
            last = seen[page][-window:]
            if last:
                assert float(mean[page]) == pytest.approx(sum(last) / len(last), rel=1e-4)
            else:
                assert mean[page].isnan()  # page 5 is never observed


def test_a_decayed_average() -> None:
    statistics = MassStatistics(8, decay=0.75)
    records, expected = _records(statistics), None
    for value in (0.5, 0.1, 0.9, 0.0):
        statistics.record(records, torch.tensor([2]), torch.tensor([value]))
        expected = value if expected is None else 0.75 * expected + 0.25 * value
        assert float(statistics.mean(records, torch.tensor(2))) == pytest.approx(expected, rel=2e-3)
    assert statistics.nbytes == 3


def test_absent_pages_have_no_mass() -> None:
    statistics = MassStatistics(4)
    records = _records(statistics)
    statistics.record(records, torch.arange(PAGES), torch.ones(PAGES))
    mean = statistics.mean(records, torch.tensor([[-1, 3], [0, -99]]))
    assert mean.isnan().tolist() == [[True, False], [False, True]]


def _store(**settings: object) -> KVManager:
    config = make_config(policy="threshold", threshold=1e-4, cold="drop", warm={"codec": "none"}, **settings)
    return KVManager(LAYERS, config)


def test_observations_arrive_at_the_pages_they_mean() -> None:
    manager, generator = _store(), torch.Generator().manual_seed(0)
    slots = [manager.add_sequence(), manager.add_sequence()]
    append(manager, {slot: random_tokens(length, generator) for slot, length in zip(slots, (30, 21), strict=True)})
    step = write(manager, {slot: random_tokens(1, generator) for slot in slots})
    pages = torch.tensor([[[0, 2, 7], [1, 3, -1]], [[0, 5, -1], [4, 0, 1]]])
    masses = {layer: torch.rand(pages.shape, generator=generator).half().float() for layer in range(LAYERS)}
    for layer, mass in masses.items():
        step.observe(layer, pages, mass)
    step.commit()
    group = manager.groups[0]
    for b, slot in enumerate(slots):
        mean = group.mean_mass(group.table[slot])
        assert mean is not None
        for layer in range(LAYERS):
            for h in range(HEADS):
                read = {int(p): float(masses[layer][b, h, i]) for i, p in enumerate(pages[b, h]) if p >= 0}
                for page in range(8 if b == 0 else 6):
                    value = float(mean[group.rows[layer], h, page])
                    assert value == pytest.approx(read[page]) if page in read else value != value


def test_an_aborted_step_leaves_no_mass() -> None:
    manager, generator = _store(), torch.Generator().manual_seed(0)
    slot = manager.add_sequence()
    append(manager, {slot: random_tokens(20, generator)})
    step = write(manager, {slot: random_tokens(1, generator)})
    step.observe(0, torch.zeros(1, HEADS, 1, dtype=torch.long), torch.ones(1, HEADS, 1))
    step.abort()
    assert manager.groups[0].mean_mass(manager.groups[0].table[slot]).isnan().all()


def test_a_new_page_does_not_inherit_the_mass_of_the_last_owner() -> None:
    manager, generator = _store(), torch.Generator().manual_seed(0)
    slot = manager.add_sequence()
    append(manager, {slot: random_tokens(16, generator)})
    step = write(manager, {slot: random_tokens(1, generator)})
    step.observe(0, torch.arange(4).expand(1, HEADS, 4), torch.ones(1, HEADS, 4))
    step.commit()
    manager.free(slot)
    slot = manager.add_sequence()
    append(manager, {slot: random_tokens(16, generator)})
    assert manager.groups[0].mean_mass(manager.groups[0].table[slot]).isnan().all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_statistics_are_at_most_one_percent_of_resident_bytes(codec: str) -> None:
    config = make_config(
        page_size=16, hot_size=512, recent_tokens=128, policy="threshold", threshold=0.01, warm={"codec": codec}
    )
    manager = KVManager(2, config)
    slot = manager.add_sequence()
    step = manager.begin([Span(slot, 0, 0, 8000)])
    for layer in range(2):
        step.write(layer, torch.randn(1, 3, 8000, 64), torch.randn(1, 3, 8000, 64))
    step.commit()
    stats = manager.stats()
    assert 0 < stats.statistics_bytes <= 0.01 * stats.kv_bytes
    assert stats.kv_bytes <= {"int8": 0.35, "int4": 0.27}[codec] * 8000 * 2 * 3 * 128 * 4
