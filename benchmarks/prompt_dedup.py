"""Prompts that repeat passages, with and without de-duplication: fewer tokens, the same answers?

    python benchmarks/prompt_dedup.py --json benchmarks/results/prompt-dedup.json

40 prompts of ten labelled passages about invented towns, four of which repeat earlier ones (two word for word, two with
small changes of wording), and a question that one passage answers. The answer's first words are given. Asked is whether
the value found is the same in both arms. About 3 minutes on two quiet cores; --prompts 4 for a look.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.config.prompt import DedupConfig, PromptConfig
from gsm.engine import Engine, SamplingParams
from gsm.models import load_model
from gsm.prompt import PromptPipeline
from gsm.results import collect_environment

TOWNS = ("Velmora", "Harlington", "Ostrava Bay", "Kestrel Point", "Brindle", "Samarra", "Lindholm", "Tavira", "Corvale",
         "Marston", "Elverum", "Dunmore", "Pellworth", "Redmere", "Alvesta", "Norwick")  # fmt: skip
RIVERS = ("Tamar", "Isar", "Drava", "Ebro", "Clyde", "Meuse", "Tagus", "Oder", "Severn", "Rhone", "Neman", "Tiber")
FOUNDERS = ("King Oswald", "Queen Matilda", "Bishop Anselm", "Captain Moreau", "Duke Leopold", "Abbot Benedict",
            "Countess Irma", "Admiral Hale")  # fmt: skip
GOODS = ("cheese", "glass", "paper", "honey", "wool", "salt", "pottery", "leather", "silk", "copper")
FESTIVALS = ("lantern", "harvest", "kite", "boat", "flower", "snow", "music", "candle")
QUESTIONS = (
    ("Which river does {town} lie on?", "{town} lies on the river", "river"),
    ("Who founded {town}?", "{town} was founded by", "founder"),
    ("What is {town} known for?", "{town} is known for its", "good"),
)
SHOTS = (
    "Visitors come from far away every summer, and the old market square is full of people until late in the evening.",
    "The houses along the main street are painted in bright colors, and most of them are two hundred years old.",
    "In winter the roads are quiet, the school children skate on the pond and the bells ring every day at noon.",
)
NEAR = (("far away", "far off"), ("bright colors", "vivid colors"), ("are quiet", "are very quiet"))


@dataclass(frozen=True)
class Town:
    name: str
    river: str
    founder: str
    good: str
    text: str


@dataclass(frozen=True)
class Task:
    content: str
    opening: str
    value: str


def make_town(name: str, rng: random.Random, river: str, good: str) -> Town:
    founder, year = rng.choice(FOUNDERS), rng.randrange(1100, 1800)
    text = (
        f"{name} is a town that lies on the river {river}. It was founded in {year} by {founder}, who built the first "
        f"bridge there. {name} is known for its {good}, which is sold in the whole country. "
        f"{' '.join(rng.sample(SHOTS, 2))} Every year the town holds its {rng.choice(FESTIVALS)} festival."
    )
    return Town(name, river, founder, good, text)


def make_task(rng: random.Random) -> Task:
    names, rivers, goods = rng.sample(TOWNS, 6), rng.sample(RIVERS, 6), rng.sample(GOODS, 6)
    towns = [make_town(*facts) for facts in zip(names, [rng] * 6, rivers, goods, strict=True)]
    repeated = rng.sample(towns, 4)
    order = [town.text for town in towns]
    for index, town in enumerate(repeated):
        text = town.text
        if index >= 2:
            for word, other in NEAR:
                text = text.replace(word, other)
        order.insert(rng.randrange(order.index(town.text) + 1, len(order) + 1), text)
    passages = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(order, 1))
    asked = rng.choice(towns)
    question, opening, field = rng.choice(QUESTIONS)
    content = f"Read these passages.\n\n{passages}\n\n{question.format(town=asked.name)}"
    return Task(content, opening.format(town=asked.name), getattr(asked, field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    loaded, rng = load_model(arguments.model, threads=arguments.threads), random.Random(arguments.seed)
    tokenizer: Any = loaded.tokenizer
    arms = {"full": PromptPipeline(tokenizer), "dedup": PromptPipeline(tokenizer, PromptConfig(dedup=_near()))}
    rows: list[dict[str, Any]] = []
    limits = {"prefix_cache": False, "max_running": 4}
    with Engine(loaded, {"cache": {"warm": {"codec": "none"}}, "engine": limits}) as engine:
        for number in range(arguments.prompts):
            task = make_task(rng)
            row: dict[str, Any] = {"value": task.value}
            for name, arm in arms.items():
                prompt = arm.process([{"role": "user", "content": task.content}])
                ids = prompt.ids + tokenizer(task.opening, add_special_tokens=False)["input_ids"]
                request = engine.add(f"{number}-{name}", ids, SamplingParams(max_tokens=8))
                while engine.has_work:
                    engine.step()
                said = tokenizer.decode(request.leader.token_ids[len(ids) :])
                row[name] = {
                    "answer": _extract(said), "right": task.value in said, "prompt_tokens": len(ids),
                    "removed": len(prompt.dedup.repeats),
                }  # fmt: skip
            rows.append(row)
            print(number + 1, "/", arguments.prompts, json.dumps(row), flush=True)
    result = {
        "benchmark": "prompt_dedup",
        "command": f"python benchmarks/prompt_dedup.py --json {arguments.json}",
        "verdict": judge(rows),
        "prompts": rows,
        "environment": collect_environment(
            model=loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads()
        ).model_dump(mode="json"),
    }
    Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["verdict"], indent=1))


def _near() -> DedupConfig:
    return DedupConfig(mode="near")


def _extract(said: str) -> str:
    """The answer up to the end of its sentence or clause."""
    for mark in (".", ",", "\n", "<|im_end|>", " in ", " which ", " and "):
        said = said.split(mark)[0]
    return said.strip()


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    n = len(rows)
    right = {name: sum(row[name]["right"] for row in rows) for name in ("full", "dedup")}
    same = sum(
        row["full"]["answer"] == row["dedup"]["answer"] or (row["full"]["right"] and row["dedup"]["right"])
        for row in rows
    )
    tokens = {name: sum(row[name]["prompt_tokens"] for row in rows) / n for name in ("full", "dedup")}
    saved = 1 - tokens["dedup"] / tokens["full"]
    return {
        "right": right | {"of": n}, "unchanged": same, "prompt_tokens": tokens, "saved": saved,
        "repeats_removed": sum(row["dedup"]["removed"] for row in rows), "repeats": 4 * n,
        "passed": {
            "full right on 70 %": right["full"] >= 0.7 * n, "25 % fewer tokens": saved >= 0.25,
            "unchanged on 90 %": same >= 0.9 * n,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
