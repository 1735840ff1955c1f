"""Graded thoughts against ungraded recency, at equal bytes, on written transcripts.

    python benchmarks/prompt_reasoning.py --json benchmarks/results/prompt-reasoning.json

The transcripts are written, not generated: a question with a dozen facts, 2000 to 2400 tokens of thinking in steps, and
an answer that quotes the question and the conclusion. Every arm reads question and thoughts in the same chunks, grading
as it goes, then the answer is fed to it word by word whatever it would have said; KL is that of the next token against
the full cache. Recency (sinks and the newest tokens, the rest forgotten) stores its older tokens as int4 too and gets
at least as many bytes as the graded arm it stands beside. Bytes are those after the answer, full means fp16.
About 10 minutes on two quiet cores (16 transcripts, 5 arms); --transcripts 2 for a look.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsm
from gsm.integrations.transformers import cache_kwarg
from gsm.models import LoadedModel, load_model
from gsm.results import collect_environment
from gsm.stats import bootstrap_mean_ci

PEOPLE = ("Anna", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
PLACES = ("Porto", "Lyon", "Turin", "Ghent", "Bergen", "Seville", "Krakow", "Bristol", "Malmo", "Zurich")
SHOPS = (
    ("bakery", ("rye loaves", "plain rolls", "cheese cakes", "apple pies", "walnut tarts", "oat cookies")),
    ("book shop", ("atlases", "novels", "cook books", "comic books", "dictionaries", "travel guides", "poetry books")),
    (
        "garden centre",
        ("rose bushes", "clay pots", "bags of soil", "watering cans", "fig trees", "spades"),
    ),
    ("toy store", ("wooden trains", "card games", "puzzles", "kites", "dolls", "yo-yos", "paint sets")),
    ("music shop", ("guitar strings", "drum sticks", "flutes", "music stands", "violins", "reeds")),
)
OPENINGS = ("Let me look at the {item}.", "Now the {item}.", "Next, the {item}.", "So what about the {item}?")
CHECKS = (
    "Wait, let me check that again. {count} times {price} is the same as {price} added {count} times, and that gives "
    "{product}, so the number stands.",
    "Hmm, is that right? {count} times {price} is {product}. Yes, it is, and nothing needs to change.",
    "But I should be careful with the {item}: there are {count} of them, not more, and each costs {price} euros, so it "
    "is {product} euros.",
    "Alternatively I could count in tens first and then add the rest, which leads to {product} euros as well.",
)
ASIDES = (
    "The order in which the goods are counted does not matter, because a sum does not depend on their order.",
    "I do not need to think about costs here, the question is only about what is taken in on that day.",
    "It is easy to lose track in such a list, so I go through it slowly and write down every step.",
    "There is no discount mentioned anywhere, so every single piece is sold at its full price.",
)
CONFIG: dict[str, Any] = {"hot_size": 48, "recent_tokens": 32, "sink_tokens": 4}


@dataclass(frozen=True)
class Transcript:
    question: str
    thinking: str
    answer: str


def write(seed: int, rounds: int) -> Transcript:
    """One transcript; `rounds` times the list is gone through."""
    rng = random.Random(seed)
    person, helper = rng.sample(PEOPLE, 2)
    place, day = rng.choice(PLACES), rng.choice(("Monday", "Tuesday", "Friday", "Saturday"))
    shop, items = SHOPS[seed % len(SHOPS)]
    goods = [(item, rng.randrange(3, 19), rng.randrange(2, 13)) for item in rng.sample(items, 5)]
    listed = ", ".join(f"{count} {item} at {price} euros each" for item, count, price in goods)
    question = (
        f"{person} runs a {shop} in {place}. Last {day} {person} and {helper} sold {listed}. How much money did the "
        f"{shop} take in on that {day}, and which goods brought in the most?"
    )
    steps = [f"The question is what the {shop} in {place} took in last {day}. I have to add up five products."]
    for turn in range(rounds):
        total = 0
        steps.append(_round_opening(turn))
        for item, count, price in rng.sample(goods, len(goods)) if turn else goods:
            total += count * price
            facts = {"item": item, "count": count, "price": price, "product": count * price}
            text = rng.choice(OPENINGS).format(**facts)
            text += f" There are {count} {item} and each costs {price} euros, so they bring in {count * price} euros."
            text += f" With them the sum so far is {total} euros."
            steps.append(text)
            steps.append(rng.choice(CHECKS).format(**facts) + " " + rng.choice(ASIDES))
    best = max(goods, key=lambda good: good[1] * good[2])
    total = sum(count * price for _, count, price in goods)
    steps.append(
        f"So the sum of all five products is {total} euros. That is what the {shop} in {place} took in last {day}, "
        f"when {person} and {helper} sold five kinds of goods."
    )
    steps.append(
        f"The {best[0]} brought in the most: {best[1]} pieces at {best[2]} euros each make {best[1] * best[2]} euros, "
        f"the largest part of the {total} euros. Now I can write the answer."
    )
    answer = (
        f"Last {day} the {shop} in {place} took in {total} euros. {person} and {helper} sold five kinds of goods, and "
        f"the {best[0]} brought in the most: {best[1]} pieces at {best[2]} euros each make {best[1] * best[2]} euros. "
        f"That is the largest part of the {total} euros that {person}'s {shop} earned on that day."
    )
    return Transcript(question, "\n\n".join(steps), answer)


def _round_opening(turn: int) -> str:
    if turn == 0:
        return "First I go through the list once from the beginning to the end."
    return "However, I want to be sure, so I go through the whole list once more in another order."


def encode(loaded: LoadedModel, transcript: Transcript) -> tuple[Tensor, Tensor, int]:
    """Ids of what precedes the answer, ids of the answer, and how many of the former are thinking."""
    tokenizer: Any = loaded.tokenizer
    messages = [{"role": "user", "content": transcript.question}]
    head = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    thinking = f"<think>\n{transcript.thinking}\n</think>\n\n"
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (head, thinking, transcript.answer)]
    return torch.tensor(ids[0] + ids[1]), torch.tensor(ids[2]), len(ids[1])


@torch.inference_mode()
def run(loaded: LoadedModel, config: dict[str, Any], past: Tensor, answer: Tensor) -> dict[str, Any]:
    """Logits `[len(answer), vocab]` of an arm at the answer's tokens, and the bytes it ends with."""
    model: Any = loaded.model
    logits, peak = [], 0
    with gsm.attach(model, config, tokenizer=loaded.tokenizer) as handle:
        cache = handle.new_cache()
        keyword: dict[str, Any] = {cache_kwarg(model): cache, "use_cache": True}
        for chunk in past.split(256):
            last = model(chunk[None], logits_to_keep=1, **keyword).logits[0]
            peak = max(peak, cache.stats().kv_bytes)
        logits.append(last)
        for chunk in answer[:-1].split(24):
            logits.append(model(chunk[None], **keyword).logits[0])
        stats, manager = cache.stats(), cache.manager
        (group,) = manager.groups
        units = {name: pool.unit_bytes for name, pool in group.pools.items()} | {"record": group.pages.unit_bytes}
        found = {
            "logits": torch.cat(logits), "kv_bytes": stats.kv_bytes, "peak_bytes": peak, "pages": stats.pages_by_tier,
            "units": units, "streams": group.streams_per_slot,
        }  # fmt: skip
        cache.free()
    return found


def kl(full: Tensor, arm: Tensor) -> tuple[float, float]:
    """Mean KL(full || arm) and share of equal best tokens."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (full, arm))
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


def recency(graded: dict[str, Any]) -> dict[str, Any]:
    """A recency config that gets at least the bytes of a graded run: the same hot zone, older tokens as int4."""
    pages, units = graded["pages"], graded["units"]
    record, int4 = units["record"], units["cold"]
    coded = pages["warm"] * (units["warm"] + record) + pages["cold"] * (int4 + record)
    num_pages = math.ceil(coded / (int4 + record) / graded["streams"]) + 1
    cache = {**CONFIG, "policy": "recent", "cold": "drop", "warm": {"codec": "int4"}, "warm_size": num_pages * 16}
    return {"cache": cache}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--transcripts", type=int, default=16, help="at least 2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--efforts", nargs="*", default=["high", "max"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, threads=arguments.threads)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for number in range(max(2, arguments.transcripts)):
        past, answer, num_think = encode(loaded, write(arguments.seed + number, arguments.rounds))
        full_bytes = (len(past) + len(answer)) * loaded.arch.kv_bytes_per_token(2)
        full = run(loaded, {"cache": {"warm": {"codec": "none"}}}, past, answer)["logits"]
        row: dict[str, Any] = {"think_tokens": num_think, "tokens": len(past) + len(answer), "arms": {}}
        for effort in arguments.efforts:
            config = {"cache": CONFIG, "reasoning": {"enabled": True, "effort": effort}}
            graded = run(loaded, config, past, answer)
            for name, arm in ((effort, graded), (f"recency at {effort}", run(loaded, recency(graded), past, answer))):
                divergence, top1 = kl(full, arm["logits"])
                row["arms"][name] = {
                    "kl": divergence, "top1": top1, "resident": arm["kv_bytes"] / full_bytes,
                    "peak": arm["peak_bytes"] / full_bytes, "kv_bytes": arm["kv_bytes"],
                }  # fmt: skip
        rows.append(row)
        line = "  ".join(f"{name}: KL {a['kl']:.4f} at {a['resident']:.3f}" for name, a in row["arms"].items())
        print(f"{number + 1}/{arguments.transcripts} {num_think} think tokens  {line}", flush=True)
        if len(rows) > 1:  # an interval needs two
            result = report(arguments, loaded, rows)
    print(json.dumps({"arms": result["arms"], "verdict": result["verdict"]}, indent=1))


def report(arguments: argparse.Namespace, loaded: LoadedModel, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the transcripts so far, written to the result file."""
    result = {
        "benchmark": "prompt_reasoning",
        "command": f"python benchmarks/prompt_reasoning.py --transcripts {arguments.transcripts} "
        f"--json {arguments.json}",
        "complete": len(rows) == arguments.transcripts,
        "arms": {name: summary([row["arms"][name] for row in rows]) for name in rows[0]["arms"]},
        "verdict": {effort: verdict(rows, effort) for effort in arguments.efforts},
        "transcripts": rows,
        "environment": collect_environment(
            model=loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads()
        ).model_dump(mode="json"),
    }
    target = Path(arguments.json)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    temporary.replace(target)
    return result


def summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    interval = bootstrap_mean_ci([arm["kl"] for arm in arms])
    means = {name: sum(arm[name] for arm in arms) / len(arms) for name in ("top1", "resident", "peak")}
    return {"kl": interval.mean, "kl_low": interval.low, "kl_high": interval.high, **means}


def verdict(rows: list[dict[str, Any]], effort: str) -> dict[str, Any]:
    """The bars of the issue: KL against recency's, resident share, KL itself."""
    graded, plain = ([row["arms"][name] for row in rows] for name in (effort, f"recency at {effort}"))
    ratio = sum(arm["kl"] for arm in graded) / sum(arm["kl"] for arm in plain)
    most = {"high": 0.25, "max": 0.35}.get(effort)
    resident = max(arm["resident"] for arm in graded)
    bytes_ratio = min(b["kv_bytes"] / a["kv_bytes"] for a, b in zip(graded, plain, strict=True))
    return {
        "kl_ratio": ratio, "kl_ratio_passed": ratio <= 0.8, "recency_bytes_at_least": bytes_ratio,
        "resident_max": resident, "resident_passed": most is None or resident <= most,
        "kl_passed": summary(graded)["kl_high"] <= 0.02, "least_think_tokens": min(row["think_tokens"] for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    main()
