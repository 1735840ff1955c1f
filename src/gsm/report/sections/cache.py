"""`gsm explain` and `gsm plan`: where tokens are, and what fits."""

from __future__ import annotations

from gsm.report.numbers import mebibytes, number, share
from gsm.report.page import Bar, BarChart, Block, Section, StackChart, Table, Verdict
from gsm.report.sections.common import facts, notes_of
from gsm.results.kinds import ResultFile

_TIERS = ("hot", "warm", "cold", "removed")
_MOST_BINS = 400


def explain_section(result: ResultFile) -> Section:
    data = result.data
    positions, stats = data["positions"], data["stats"]
    num_streams = max(1, positions["num_streams"])
    per_page = positions["streams_by_page"]
    bins = max(1, -(-len(per_page["hot"]) // _MOST_BINS))
    layers = [(tier, _merged([n / num_streams for n in per_page[tier]], bins)) for tier in _TIERS]
    blocks: list[Block] = [
        *explain_verdicts(result),
        StackChart(
            "Tier map over the sequence", "position in tokens", "share of layers x kv heads",
            positions["page_size"] * bins, layers,
        ),
        Table(
            "Shares", ["tier", "share of tokens"],
            [[tier, share(value)] for tier, value in positions["share_by_tier"].items()],
        ),
    ]  # fmt: skip
    if stats.get("bytes_by_tier"):
        bar = Bar("now", [value / 2**20 for value in stats["bytes_by_tier"].values()])
        blocks.append(BarChart("Memory by tier", "MiB", [bar], list(stats["bytes_by_tier"])))
    if positions["removals"]:
        total = positions["num_tokens"] * num_streams
        rows = [
            [item["reason"], f"{item['at_num_tokens']:,}", share(item["num_tokens"] / total)]
            for item in positions["removals"]
        ]
        blocks.append(Table("Removed for good", ["by", "at length", "share of tokens"], rows))
    env = data["environment"]
    return Section(
        title=f"Where {positions['num_tokens']:,} tokens are",
        sources=[result.name],
        lead=f"{num_streams} layers x kv heads, pages of {positions['page_size']} tokens.",
        blocks=blocks,
        command=env["command"],
        facts=facts(env),
    )


def explain_verdicts(result: ResultFile) -> list[Verdict]:
    removed = result.data["positions"]["share_by_tier"].get("removed", 0.0)
    broken = result.data["stats"].get("nonfinite_pages") or {}
    found = []
    if broken:
        found.append(Verdict("bad", f"Pages with inf or NaN in layers {', '.join(broken)}.", result.name))
    if removed:
        found.append(Verdict("warn", f"{share(removed)} of all tokens were removed for good.", result.name))
    return found


def plan_section(result: ResultFile) -> Section:
    data = result.data
    capacities = [
        [
            item["name"],
            number(item["bytes_per_token"], 4),
            "n/a" if item.get("max_tokens") is None else f"{item['max_tokens']:,}",
            "n/a" if item.get("max_sequences") is None else str(item["max_sequences"]),
        ]
        for item in data["capacities"]
    ]
    steps = [
        [f"{step['context_tokens']:,}", mebibytes(step["kv_bytes"]), share(step["kv_share"]), f"{step['max_gain']:.2f}"]
        for step in data["steps"]
    ]
    blocks: list[Block] = [
        *plan_verdicts(result),
        Table("What fits", ["cache", "bytes per token", "tokens", "sequences"], capacities),
        Table("What a step reads", ["context", "KV, MiB", "KV's share", "largest gain, times"], steps),
        *notes_of(data.get("notes"), data.get("helps_instead")),
    ]
    return Section(f"Plan for {data['model']}", [result.name], blocks=blocks)


def plan_verdicts(result: ResultFile) -> list[Verdict]:
    return [Verdict("plain", str(result.data["verdict"]), result.name)]


def _merged(shares: list[float], bins: int) -> list[float]:
    """Neighbours averaged, so that a long sequence stays a readable number of steps."""
    groups = (shares[start : start + bins] for start in range(0, len(shares), bins))
    return [sum(group) / len(group) for group in groups]
