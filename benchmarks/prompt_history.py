"""Twenty turns of chat with the history compressed: is a fact of turn 2 still found in turn 20, and at what price?

    python benchmarks/prompt_history.py --json benchmarks/results/prompt-history.json
    python benchmarks/prompt_history.py --ttft 10 --json benchmarks/results/prompt-history-ttft.json

40 chats of about 1050 tokens: of longer ones the model finds fewer than three quarters of the facts when it sees
everything (benchmarks/LOG.md). The user asks about one topic of Python's manual after the other and is answered with
its text; in turn 2 a fact is told and noted (half of them not numeric), in turn 20 it is asked for. The answer's first
words are given. `full` sees everything, `text` is history mode text. Hits are counted by the engine's own prefix index
on a tiny random model with the same tokenizer: all turns of every chat, each answer stored as generated tokens are. The
first command needs about 7 minutes on two quiet cores, the second (first-token times, arms in turns, no prefix reuse;
also with --chat-tokens 4000 --budget-tokens 1536) about 1; --chats 4 for a look.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.arch import describe
from gsm.config.prompt import HistoryConfig, PromptConfig
from gsm.engine import Engine, SamplingParams
from gsm.models import LoadedModel, load_model
from gsm.prompt import PromptPipeline
from gsm.results import collect_environment
from gsm.stats import bootstrap_mean_ci, percentile

# what a fact is about, and four values; the wording is that of `gsm.quality.needles`, which the demo model can follow
FACTS: tuple[tuple[str, str], ...] = (
    ("Emma's dog", "Biscuit Rocket Pepper Shadow"),
    ("Oliver's favorite city", "Oslo Madrid Kyoto Lima"),
    ("Sophia's favorite color", "purple orange silver green"),
    ("Charlie's best friend", "Henry Julia Victor Martha"),
    ("Napoleon's secret word", "mango cherry banana lemon"),
    ("Mozart's ticket number", "48271 91536 63024 77418"),
    ("Apollo's flight number", "81520 46293 93748 20861"),
    ("Berlin's secret code", "59204 31877 86420 14539"),
    ("Einstein's house number", "31264 74585 12896 60937"),
    ("Cairo's locker number", "70615 23984 51270 98346"),
)
ASKS = ("What does the manual say about {}?", "Tell me about {}, please.", "And what about {}?", "Please explain {}.")
SYSTEM = "You are a helpful assistant. You answer questions and remember what the user tells you."


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]
    opening: str  # of the answer
    value: str


def topics() -> list[tuple[str, list[str]]]:
    """Names and paragraphs of plain prose of the manual's topics."""
    from pydoc_data.topics import topics as found

    result = []
    for name in sorted(found):
        blocks = [re.sub(r"\s+", " ", block).strip() for block in found[name].split("\n\n")]
        prose = [b for b in blocks if len(b) > 120 and b[0].isalpha() and b.endswith(".") and "::" not in b]
        if len(prose) >= 2:
            result.append((name.replace("-", " "), prose))
    return result


def make_chats(tokenizer: Any, count: int, chat_tokens: int, num_turns: int, seed: int) -> list[Chat]:
    rng = random.Random(seed)
    # topics long enough to fill their turn
    known = [topic for topic in topics() if sum(map(len, topic[1])) > 5 * chat_tokens / num_turns]
    return [_make_chat(tokenizer, rng, known, number, chat_tokens, num_turns) for number in range(count)]


def _make_chat(
    tokenizer: Any, rng: random.Random, known: list[Any], number: int, chat_tokens: int, num_turns: int
) -> Chat:
    what, values = FACTS[number % len(FACTS)]
    value = values.split()[number // len(FACTS) % 4]
    answer_tokens = (chat_tokens - 120) // (num_turns - 1) - 24
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn, (name, prose) in enumerate(rng.sample(known, num_turns - 1), 1):
        question = rng.choice(ASKS).format(name)
        if turn == 2:
            question = f"Please remember this fact:\n{what} is {value}.\n\n{question}"
        noted = f"Noted: {what} is {value}. " if turn == 2 else ""
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": noted + _answer(tokenizer, prose, answer_tokens)},
        ]
    messages.append({"role": "user", "content": f"Which fact did I tell you about {what}?"})
    return Chat(messages, f"Facts from the text above:\n{what} is", value)


def _answer(tokenizer: Any, prose: list[str], num_tokens: int) -> str:
    """Whole sentences of a topic, about that many tokens."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(prose))
    text = ""
    for sentence in sentences:
        longer = f"{text} {sentence}".strip()
        num_before, num_after = (len(tokenizer(x)["input_ids"]) for x in (text, longer))
        if num_after > num_tokens and num_after - num_tokens > num_tokens - num_before:
            break  # stopping here is nearer to what was asked for
        text = longer
    return text


def pipeline(tokenizer: Any, arguments: argparse.Namespace) -> PromptPipeline:
    history = HistoryConfig(mode="text", budget_tokens=arguments.budget_tokens, low_water=arguments.low_water)
    return PromptPipeline(tokenizer, PromptConfig(history=history))


def prompts_of(chat: Chat, arms: dict[str, PromptPipeline], tokenizer: Any) -> dict[str, list[int]]:
    opening = tokenizer(chat.opening, add_special_tokens=False)["input_ids"]
    return {name: arm.process(chat.messages).ids + opening for name, arm in arms.items()}


ENGINE = {"cache": {"warm": {"codec": "none"}}, "engine": {"prefix_cache": False, "max_running": 4}}


def find_facts(loaded: LoadedModel, chats: list[Chat], arms: dict[str, PromptPipeline]) -> list[dict[str, Any]]:
    """Whether each arm says the fact, and the length of its prompt."""
    rows: list[dict[str, Any]] = []
    with Engine(loaded, ENGINE) as engine:
        for number, chat in enumerate(chats):
            row: dict[str, Any] = {"value": chat.value}
            for name, ids in prompts_of(chat, arms, loaded.tokenizer).items():
                request = engine.add(f"{number}-{name}", ids, SamplingParams(max_tokens=10))
                while engine.has_work:
                    engine.step()
                said = loaded.tokenizer.decode(request.leader.token_ids[len(ids) :])
                row[name] = {"found": chat.value.lower() in said.lower(), "prompt_tokens": len(ids), "said": said}
            rows.append(row)
            print(number + 1, "/", len(chats), json.dumps(row), flush=True)
    return rows


def count_hits(tokenizer: Any, chats: list[Chat], arms: dict[str, PromptPipeline]) -> dict[str, Any]:
    """Share of prompt tokens that the engine's prefix index had, over all turns of all chats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model_config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16384, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(model_config).eval()
    tiny = LoadedModel(model, tokenizer, "tiny", "tiny", describe(model.config))
    result: dict[str, Any] = {}
    for name, arm in arms.items():
        hits = total = 0
        with Engine(tiny, {"engine": {"max_running": 2, "chunk_tokens": 512, "max_batch_tokens": 512}}) as engine:
            for number, chat in enumerate(chats):
                for end in range(2, len(chat.messages) + 1, 2):
                    ids = arm.process(chat.messages[:end]).ids
                    hits += _run(engine, f"{number}-{end}", ids, f"chat {number}")
                    total += len(ids)
                    if end < len(chat.messages):
                        answer = tokenizer(chat.messages[end]["content"], add_special_tokens=False)["input_ids"]
                        _run(engine, f"{number}-{end}-answer", [*ids, *answer], f"chat {number}")
                engine.prefix.clear()  # type: ignore[union-attr]
        result[name] = {"hit_rate": hits / total, "prompt_tokens": total, "computed_tokens": total - hits}
        print(name, result[name], flush=True)
    return result


def _run(engine: Engine, request_id: str, ids: list[int], salt: str) -> int:
    request = engine.add(request_id, ids, SamplingParams(max_tokens=1), salt=salt)
    while engine.has_work:
        engine.step()
    return request.num_cached_tokens


def first_tokens(loaded: LoadedModel, chats: list[Chat], arms: dict[str, PromptPipeline]) -> dict[str, Any]:
    """Seconds from the messages to the first token, arms in turns, nothing reused."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    lengths: dict[str, list[int]] = {name: [] for name in arms}
    config = {**ENGINE, "engine": {**ENGINE["engine"], "chunk_tokens": 512}}
    with Engine(loaded, config) as engine:
        for number, chat in enumerate(chats):
            for name, arm in arms.items():
                began = time.perf_counter()
                ids = arm.process(chat.messages).ids
                _run(engine, f"{number}-{name}", ids, "")
                if number:  # the first chat warms up
                    times[name].append(time.perf_counter() - began)
                    lengths[name].append(len(ids))
            print(number + 1, {name: t[-1:] for name, t in times.items()}, flush=True)
    summary = {
        name: {"ttft_s_median": percentile(t, 50), "ttft_s_min": min(t), "ttft_s_max": max(t),
               "prompt_tokens_mean": sum(lengths[name]) / len(lengths[name])}
        for name, t in times.items()
    }  # fmt: skip
    ratios = [a / b for a, b in zip(times["full"], times["text"], strict=True)]
    return {"arms": summary, "ratio_median": percentile(ratios, 50), "passed": percentile(ratios, 50) >= 2.0}


def judge(rows: list[dict[str, Any]], hits: dict[str, Any]) -> dict[str, Any]:
    full, text = (sum(row[name]["found"] for row in rows) for name in ("full", "text"))
    ratios = [row["full"]["prompt_tokens"] / row["text"]["prompt_tokens"] for row in rows]
    words = [row for row in rows if not row["value"].isdigit()]
    lost = [float(row["text"]["found"]) - float(row["full"]["found"]) for row in rows]
    return {
        "found": {"full": full, "text": text, "of": len(rows)},
        "found_not_numeric": {n: sum(r[n]["found"] for r in words) for n in ("full", "text")} | {"of": len(words)},
        "difference": bootstrap_mean_ci(lost)._asdict() if len(lost) > 1 else None,
        "prompt_tokens": {n: sum(r[n]["prompt_tokens"] for r in rows) / len(rows) for n in ("full", "text")},
        "ratio_mean": sum(ratios) / len(ratios), "ratio_min": min(ratios),
        "passed": {
            "full finds 75 %": full >= 0.75 * len(rows), "at most 3 fewer": text >= full - 3,
            "2.5 times fewer tokens": sum(ratios) / len(ratios) >= 2.5,
            "hit rate 80 %": hits.get("text", {}).get("hit_rate", 0.0) >= 0.8,
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--chat-tokens", type=int, default=1200)
    parser.add_argument("--budget-tokens", type=int, default=450)
    parser.add_argument("--low-water", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ttft", type=int, metavar="CHATS", help="Only first-token times, of that many chats.")
    parser.add_argument("--no-quality", action="store_true", help="Only count tokens and hits.")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, threads=arguments.threads)
    tokenizer: Any = loaded.tokenizer
    count = arguments.ttft + 1 if arguments.ttft else arguments.chats
    chats = make_chats(tokenizer, count, arguments.chat_tokens, arguments.turns, arguments.seed)
    arms = {"full": PromptPipeline(tokenizer), "text": pipeline(tokenizer, arguments)}
    settings = vars(arguments)
    result: dict[str, Any] = {
        "benchmark": "prompt_history_ttft" if arguments.ttft else "prompt_history",
        "command": "python benchmarks/prompt_history.py"
        + (f" --ttft {arguments.ttft}" if arguments.ttft else "")
        + f" --chat-tokens {arguments.chat_tokens} --budget-tokens {arguments.budget_tokens} --json {arguments.json}",
        "settings": {name: settings[name] for name in ("turns", "chat_tokens", "budget_tokens", "low_water", "seed")},
    }  # fmt: skip
    if arguments.ttft:
        result |= first_tokens(loaded, chats, arms)
    else:
        result["hits"] = count_hits(tokenizer, chats, arms)
        if arguments.no_quality:
            lengths = {name: [len(arm.process(c.messages).ids) for c in chats] for name, arm in arms.items()}
            result["prompt_tokens"] = {name: sum(found) / len(found) for name, found in lengths.items()}
        else:
            rows = find_facts(loaded, chats, arms)
            result |= {"verdict": judge(rows, result["hits"]), "chats": rows}
    environment = collect_environment(model=loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads())
    result["environment"] = environment.model_dump(mode="json")
    Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k not in ("chats", "environment")}, indent=1))


if __name__ == "__main__":
    main()
