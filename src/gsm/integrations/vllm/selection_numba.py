"""Scoring and choosing on a CPU by the compiled code of our own decode attention, over vLLM's block tables.

A summary of one block and kv head is one record of the kernel, number `block * kv_heads + head`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gsm.attention import numba_kernels as kernels
from gsm.attention.numba_cpu import MODES, PARTS
from gsm.core.team import run_alone
from gsm.integrations.vllm.pages import HeadPages
from gsm.integrations.vllm.selection import Rows
from gsm.integrations.vllm.summaries import Summaries


class CompiledSelection:
    """One layer's summaries as the kernel's records."""

    def __init__(self, summaries: Summaries, pages: HeadPages) -> None:
        self._summaries = summaries  # kept: the kernel knows addresses only
        self._pages = pages
        self._records = {name: field.data_ptr() for name, field in summaries.fields.items()}

    @staticmethod
    def serves(summaries: Summaries) -> bool:
        """Whether the kernel can read them: it runs on a CPU and knows every scorer of ours."""
        device = next(iter(summaries.fields.values())).device
        return summaries.scorer.name in MODES and device.type == "cpu"

    def __call__(self, query: Tensor, scale: float, prepared: Prepared) -> None:
        """`query [B, H, G, d]` before scaling; writes `prepared.pages [B, H, width]` and `.shares [B, H, P]`."""
        scorer, heads = self._summaries.scorer, query.float().contiguous()
        num_parts, group = PARTS.get(scorer.name, 1), heads.shape[2]
        prepared.set(
            mode=MODES[scorer.name],
            num_parts=num_parts,
            group=group,
            k_dim=heads.shape[3],
            sigma=scorer.sigma,
            scale=scale,
            query=heads.data_ptr(),
            scores=prepared.scratch(num_parts * group).data_ptr(),
            **self._records,
        )
        run_alone(kernels.selection_entry_point().address, prepared.address)
        prepared.pages = self._pages.ids(prepared.chosen())


class Prepared:
    """What the layers of a step share: rows as the kernel's arguments, and room for results (one layer at a time)."""

    def __init__(self, rows: Rows, num_heads: int) -> None:
        batch, columns = rows.tables.shape
        self.shares = torch.zeros(batch, num_heads, columns, dtype=torch.float32, device="cpu")
        self.pages = torch.zeros(batch, num_heads, rows.width, dtype=torch.int32)
        self._logical = torch.zeros(batch, num_heads, rows.width, dtype=torch.int64)
        self._tables = rows.tables.unsqueeze(1).expand(-1, num_heads, -1)
        records = self._tables * num_heads + torch.arange(num_heads).view(-1, 1)
        counts = torch.zeros(batch * num_heads, dtype=torch.int64)
        self._scores = torch.empty(0, dtype=torch.float32, device="cpu")
        # kept, so that their addresses stay valid
        self._kept = records.int().contiguous(), torch.arange(batch), rows.lengths, rows.counts, counts
        self._block = np.zeros(1, kernels.ARGUMENTS)
        self.address = self._block.ctypes.data
        table, slots, lengths, budgets, _ = self._kept
        self.set(
            batch=batch,
            num_kv_heads=num_heads,
            page_size=rows.block_size,
            max_pages=columns,
            width=rows.width,
            num_chunks=1,
            num_sinks=rows.num_sinks,
            recent_tokens=rows.recent_tokens,
            table=table.data_ptr(),
            table_slot_stride=num_heads * columns,
            table_head_stride=columns,
            slots=slots.data_ptr(),
            seq_lens=lengths.data_ptr(),
            budgets=budgets.data_ptr(),
            counts=counts.data_ptr(),
            pages=self._logical.data_ptr(),
            mass=self.shares.data_ptr(),
        )

    def set(self, **arguments: float) -> None:
        for name, value in arguments.items():
            self._block[name] = value

    def scratch(self, per_page: int) -> Tensor:
        """Room for that many numbers per head and page."""
        if self._scores.numel() < per_page * self.shares.numel():
            self._scores = torch.empty(per_page * self.shares.numel(), dtype=torch.float32, device="cpu")
        return self._scores

    def chosen(self) -> Tensor:
        """Physical blocks `[B, H, width]`; what lies beyond a row's count is never read."""
        return self._tables.gather(-1, self._logical.clamp_min(0))
