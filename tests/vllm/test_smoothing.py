"""Window smoothing inside vLLM, against the formula on whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gsm.config import load_config
from gsm.integrations.vllm.window import WindowIndex, smooth

Start = Callable[..., Any]

EXEMPT, WINDOW = 10, 8


def section(strength: float, **more: Any) -> dict[str, Any]:
    values = {
        "enable": True,
        "method": "window",
        "window_size": WINDOW,
        "smooth_strength": strength,
        "target_layers": "all",
        "precision": "fp32",
        "short_request": {"max_tokens": EXEMPT},
    }
    return {"smoothing": {**values, **more}}


def formula(x: Tensor, strength: float) -> Tensor:
    """`x [n, channels]`; the first position takes no part, nor do tokens without a full window."""
    y = x.clone()
    for p in range(max(EXEMPT, WINDOW), len(x)):
        y[p] = (1 - strength) * x[p] + strength * x[p - WINDOW + 1 : p + 1].mean(0)
    return y


class TestFormula:
    def test_any_chunks_over_any_blocks_give_the_formula(self) -> None:
        torch.manual_seed(0)
        config = load_config(section(0.2)).smoothing
        lengths, block, ring = [70, 41], 16, WINDOW - 1
        x = [torch.randn(n, 5) for n in lengths]
        tables = torch.stack([torch.randperm(9) + 1, torch.randperm(9) + 20])
        state = torch.zeros(40, ring, 5)
        parts: list[list[Tensor]] = [[], []]
        done = [0, 0]
        generator = torch.Generator().manual_seed(1)
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            take = [
                min(n - d, int(torch.randint(1, 20, (1,), generator=generator)))
                for d, n in zip(done, lengths, strict=True)
            ]
            starts = [0, take[0], take[0] + take[1]]
            now = [d + t for d, t in zip(done, take, strict=True)]
            index = WindowIndex.build(now, starts, tables, block, ring, torch.device("cpu"))
            rows = torch.cat([x[i][done[i] : now[i]] for i in range(2)] + [torch.full((3, 5), torch.nan)])
            y = smooth(rows, state, index, config)
            assert torch.isnan(y[starts[-1] :]).all()  # padding is passed on
            for i in range(2):
                parts[i].append(y[starts[i] : starts[i + 1]])
            done = now
        for i in range(2):
            torch.testing.assert_close(torch.cat(parts[i]), formula(x[i], 0.2))

    def test_rejected_drafts_leave_no_trace(self) -> None:
        torch.manual_seed(0)
        config, drafts, n = load_config(section(0.2)).smoothing, 3, 60
        x, ring = torch.randn(n, 5), WINDOW - 1 + drafts
        tables, state, parts = torch.randperm(9)[None] + 1, torch.zeros(20, ring, 5), []
        for p in range(n):  # every token comes with three drafts, all of them wrong
            index = WindowIndex.build([p + 1 + drafts], [0, 1 + drafts], tables, 16, ring, torch.device("cpu"))
            parts.append(smooth(torch.cat((x[p : p + 1], 9 + torch.randn(drafts, 5))), state, index, config)[:1])
        torch.testing.assert_close(torch.cat(parts), formula(x, 0.2))

    def test_strength_zero_changes_nothing(self) -> None:
        x = torch.randn(20, 4)
        index = WindowIndex.build([20], [0, 20], torch.arange(2).view(1, -1), 16, 7, torch.device("cpu"))
        assert torch.equal(smooth(x, torch.zeros(3, 7, 4), index, load_config(section(0.0)).smoothing), x)


class TestEngine:
    def test_equals_the_formula_in_the_whole_model(self, start: Start, tiny_llama: Any, tools: Any) -> None:
        llm = start(section(0.2))
        ids = tools.prompts([300, 70])
        found = tools.generate(llm, ids, 24)
        assert tools.same(found, self.smoothed(tiny_llama, ids, 0.2, tools))
        assert not tools.same(found, [tools.reference(tiny_llama, one, 24) for one in ids])
        assert tools.same(tools.generate(llm, ids, 24), found)  # reused prefixes keep their windows
        assert not tools.reload(llm, section(0.1)).get("error")
        llm.reset_prefix_cache()
        assert tools.same(tools.generate(llm, ids, 24), self.smoothed(tiny_llama, ids, 0.1, tools))
        assert "restart" in tools.reload(llm, section(0.1, window_size=16))["error"]

    @staticmethod
    def smoothed(model: Any, ids: list[list[int]], strength: float, tools: Any) -> list[Any]:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (formula(arguments[0][0], strength)[None],)

        sites = [m for name, m in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
        handles = [site.register_forward_pre_hook(hook) for site in sites]
        try:
            return [tools.reference(model, one, 24) for one in ids]
        finally:
            for handle in handles:
                handle.remove()

    def test_layers_chosen_by_measurement_are_refused(self, start: Start) -> None:
        with pytest.raises(Exception, match="name the modules"):
            start(section(0.2, target_layers="auto"))
