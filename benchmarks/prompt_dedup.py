"""Prompts that repeat passages, with and without de-duplication: fewer tokens, the same answers?

    python benchmarks/prompt_dedup.py --json benchmarks/results/prompt-dedup.json

40 prompts of ten labelled passages about invented things; four repeat earlier ones (two word for word, two with
a change of wording), and a question that one passage answers. The answer's first words are given. Asked is whether
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

# six kinds of passages, so that a model of 135M parameters does not take one for another:
# name, what is said of it, what is asked, how the answer begins, values
KINDS: tuple[tuple[str, str, str, str, str], ...] = (
    ("Velmora Harlington Lindholm Corvale", "The town of {n} lies on the river {v}. Its first bridge is of {y}.",
     "Which river does the town of {n} lie on?", "The town of {n} lies on the river", "Tamar Isar Drava Ebro Clyde"),
    ("Albatross Meridian Swallow Polaris", "The ship {n} was sailed by Captain {v}, who bought it in {y}.",
     "Who was the captain of the ship {n}?", "The ship {n} was sailed by Captain", "Moreau Hale Brandt Silva Larsen"),
    ("Fenwick Okada Petrov Marlowe", "The inventor {n} built the first {v} of the country in {y}.",
     "What did the inventor {n} build?", "The inventor {n} built the first", "telescope piano bicycle clock camera"),
    ("Grauhorn Silverpeak Monteverde Tindfell", "The mountain {n} is home to many {v}, first counted in {y}.",
     "Which animals live on the mountain {n}?", "The mountain {n} is home to many", "eagles wolves goats owls bears"),
    ("Osterfest Lumina Carnova Midwinter", "The festival {n} is held every {v}, since the year {y}.",
     "When is the festival {n} held?", "The festival {n} is held every", "March April June August October"),
    ("Redmere Kingsley Aldous Tavira", "The museum {n} shows a famous collection of {v}, given in {y}.",
     "What does the museum {n} show?", "The museum {n} shows a famous collection of", "coins maps masks swords dolls"),
)  # fmt: skip
SHOTS = (
    "Many people come from far away to see it every year, and the local paper writes about it all through the summer.",
    "There are pictures of it in bright colors in every shop, and the children of the region learn about it at school.",
    "In winter it is quiet there, and only a few friends meet in the evening to drink tea and talk about the old days.",
)
NEAR = (("bright colors", "vivid colors"),)


@dataclass(frozen=True)
class Task:
    content: str
    opening: str
    value: str


def make_task(rng: random.Random) -> Task:
    texts, questions = [], []
    for names, said, question, opening, values in KINDS:
        name, value = rng.choice(names.split()), rng.choice(values.split())
        facts = {"n": name, "v": value, "y": rng.randrange(1100, 1900)}
        texts.append(f"{said.format(**facts)} {' '.join(rng.sample(SHOTS, 3))}")
        questions.append((question.format(**facts), opening.format(**facts), value))
    order = rng.sample(texts, len(texts))
    for index, text in enumerate(rng.sample(texts, 4)):
        again = text
        for word, other in NEAR if index >= 2 else ():
            again = again.replace(word, other)
        order.insert(rng.randrange(order.index(text) + 1, len(order) + 1), again)
    passages = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(order, 1))
    question, opening, value = rng.choice(questions)
    return Task(f"Read these passages.\n\n{passages}\n\n{question}", opening, value)


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
