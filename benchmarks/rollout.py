"""Does the guard take back bad configs, and leave harmless ones alone? One part per call.

python benchmarks/rollout.py record [--prompts 31]    score 10 answers of every config to each prompt once (15 s per
                                                      prompt and thread; goes on where it was stopped)
python benchmarks/rollout.py pack                     the records as one compact JSON
python benchmarks/rollout.py resample                 2000 sequences per config through the guard: power, false alarms
python benchmarks/rollout.py live [--configs NAME..]  one canary per config through engine and guard, fresh prompts
python benchmarks/rollout.py reloads                  1000 reloads under load, tiny random model
python benchmarks/rollout.py cost                     throughput with and without the guard, interleaved
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsm.config import GsmConfig, RolloutConfig, load_config
from gsm.core.batch import Span
from gsm.engine import Engine, SamplingParams
from gsm.engine import Sequence as Choice
from gsm.engine.request import Work
from gsm.engine.runner import Runner
from gsm.engine.shadow import _Job, _Reader, compare
from gsm.guard.sequential import _SHARES
from gsm.integrations.transformers.packed import PackedCache
from gsm.models import LoadedModel, load_model
from gsm.quality import load_thirds
from gsm.results import collect_environment, load_average
from gsm.serve.facts import repetition
from gsm.serve.rollout import Rollout
from gsm.serve.watch import METRICS, Metric
from gsm.serve.worker import EngineWorker

RESULTS = Path(__file__).parent / "results"
ANSWERS = RESULTS / "rollout_answers.json"
NUM_SEQUENCES, WITHIN, LONGEST = 2000, 60, 300
NEW_TOKENS = 8
NUM_CHOICES = 10  # answers of every config to each prompt
SAMPLING = {"max_tokens": NEW_TOKENS, "temperature": 0.7}

# everything small, so that prompts of 130 tokens cross every border; the stable config reads everything, most from int8
CACHE: dict[str, Any] = {"page_size": 8, "hot_size": 32, "recent_tokens": 16}
LIMITS: dict[str, Any] = {
    "max_running": 32,
    "max_batch_tokens": 512,
    "kv_memory_mib": 3000.0,
    "queue_timeout_s": 3600.0,
}
WINDOW = {
    "enable": True,
    "method": "window",
    "window_size": 16,
    "smooth_strength": 0.3,
    "target_layers": "all",
    "short_request": {"max_tokens": 0},
}


def settings(smoothing: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **cache: Any) -> GsmConfig:
    sections = {"cache": {**CACHE, **cache}, "engine": {**LIMITS, **(engine or {})}}
    return load_config(sections | ({"smoothing": smoothing} if smoothing else {}))


STABLE = settings()
BAD: dict[str, GsmConfig] = {
    "budget far too small": settings(recent_tokens=8, sparse={"enabled": True, "budget_tokens": 32}),
    "window smoothing .3/16": settings(smoothing=WINDOW),
    "broken positions": settings(engine={"max_waiting": 255}),  # the runner below counts the answer's tokens wrongly
    "KV at 2 bits": settings(engine={"chunk_tokens": 255}),  # the cache below rounds what is written; pages of its own
}
HARMLESS: dict[str, GsmConfig] = {
    "the same again": settings(engine={"max_waiting": 254}),
    "sparse, three quarters": settings(sparse={"enabled": True, "budget_fraction": 0.75}),
    "more recent tokens": settings(recent_tokens=32, sparse={"enabled": True, "budget_fraction": 0.9}),
    "wider spread": settings(sparse={"enabled": True, "budget_fraction": 0.8, "sigma": 1.0}),
    "larger hot zone": settings(hot_size=64),
}
CONFIGS: dict[str, GsmConfig] = {"stable": STABLE, **BAD, **HARMLESS}


# -- faults that no config can ask for -----------------------------------------------------------------------------


class FaultyRunner(Runner):
    """Counts positions of generated tokens from half of the prompt, and tells the cache whose columns to round."""

    broken: int
    noisy: int

    def _positions(self, work: Work, num_tokens: int) -> range:
        right = super()._positions(work, num_tokens)
        sequence = work.sequence
        if sequence.request.epoch != self.broken or right.start < sequence.num_prompt_tokens:
            return right
        return range(right.start - sequence.num_prompt_tokens // 2, right.stop - sequence.num_prompt_tokens // 2)

    def run(self, works: Sequence[Work]) -> list[Tensor]:
        start, columns = 0, []
        for work in works:
            length = len(work.ids)
            if work.sequence.request.epoch == self.noisy:
                columns.append(slice(start, start + length))
            start += length
        self.cache.rounded = columns  # type: ignore[attr-defined]
        return super().run(works)


class RoundingCache(PackedCache):
    """Rounds keys and values of some columns to 2 bits per number, one scale for each token and head."""

    rounded: list[slice]

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for columns in self.rounded:
            k, v = k.clone(), v.clone()
            k[:, :, columns], v[:, :, columns] = _two_bits(k[:, :, columns]), _two_bits(v[:, :, columns])
        return super().update(k, v, layer_idx, *args, **kwargs)


def _two_bits(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low).clamp_min(1e-8) / 3
    return ((x - low) / step).round() * step + low


def make_faulty(engine: Engine, numbers: dict[str, int]) -> None:
    engine.runner.__class__ = FaultyRunner
    engine.runner.cache.__class__ = RoundingCache
    engine.runner.broken = numbers.get("broken positions", -1)  # type: ignore[attr-defined]
    engine.runner.noisy = numbers.get("KV at 2 bits", -1)  # type: ignore[attr-defined]


# -- recording -----------------------------------------------------------------------------------------------------

_TASKS = (
    "Summarise the text in two sentences.",
    "What is the most important rule in the text? Answer briefly.",
    "List three terms that the text explains.",
    "Continue the text in the same style.",
)


def prompts(loaded: LoadedModel, part: str, length: int = 95) -> Iterator[list[int]]:
    """Chat prompts about stretches of one third of our text, each stretch once, about 140 tokens each."""
    text = load_thirds().part(part)
    words, step = text.split(" "), 120
    for number in range(len(words) // step):
        passage = " ".join(words[number * step : (number + 1) * step])
        ids = loaded.tokenizer(passage, add_special_tokens=False).input_ids[:length]
        content = f"{loaded.tokenizer.decode(ids)}\n\n{_TASKS[number % len(_TASKS)]}"
        chat = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        yield list(loaded.tokenizer(chat, add_special_tokens=False).input_ids)


def record(args: argparse.Namespace) -> None:
    """Every config answers the same prompts; each answer is scored as the guard scores it. One line per prompt."""
    loaded = load_model(args.model, threads=args.threads)
    wanted = list(prompts(loaded, "evaluation"))
    random.Random(0).shuffle(wanted)
    done = len(args.log.read_text().splitlines()) if args.log.exists() else 0
    numbers = {name: number for number, name in enumerate(CONFIGS)}
    Choice.records = property(lambda choice: choice.request.is_scored)  # type: ignore[method-assign,assignment]
    with Engine(loaded, STABLE) as engine:
        for name, number in numbers.items():
            if number:
                engine.epochs.publish(number, CONFIGS[name])
        make_faulty(engine, numbers)
        reader = _Reader(loaded, engine.windows)
        while done < min(args.prompts, len(wanted)):
            line = _record_prompt(engine, reader, wanted[done], done, numbers)
            with args.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done += 1
            print(f"{done} prompts, {time.process_time():.0f} s of CPU", flush=True)


def _record_prompt(
    engine: Engine, reader: _Reader, ids: list[int], number: int, numbers: dict[str, int]
) -> dict[str, Any]:
    ended: dict[tuple[str, int], Choice] = {}
    engine.on_finish = lambda choice: ended.__setitem__((choice.request.request_id, choice.index), choice)
    engine.shadow.max_tokens = 0  # scored below, with the prompt read once for all configs
    for name, epoch in numbers.items():
        sampling = SamplingParams(**SAMPLING, n=NUM_CHOICES, seed=100 * number + epoch)
        engine.add(name, list(ids), sampling, epoch=epoch, is_scored=True)
        if epoch == 0:
            engine.step()  # the others find its pages
    while engine.has_work:
        engine.step()
    prompt_job = _Job(0, list(ids), len(ids), [])
    reader.read(prompt_job, len(ids) - 1, 0)
    prompt_job.num_read = len(ids) - 1
    keys = [(name, i) for name in numbers for i in range(NUM_CHOICES)]
    scores = dict(zip(keys, _score_all(reader, prompt_job, [ended[key] for key in keys]), strict=True))
    line = {name: [scores[name, i] for i in range(NUM_CHOICES)] for name in numbers}
    reader.free(prompt_job)
    return {"prompt": number, **line}


@torch.inference_mode()
def _score_all(reader: _Reader, prompt_job: _Job, choices: Sequence[Choice], at_once: int = 25) -> list[dict[str, Any]]:
    """What `Shadow` computes answer by answer; the prompt is read already, and several answers share a row."""
    assert prompt_job.slot is not None
    manager, found = reader.cache.manager, []
    for first in range(0, len(choices), at_once):
        some = choices[first : first + at_once]
        assert all(choice.finish_reason in ("stop", "length") for choice in some)
        read = [choice.token_ids[prompt_job.num_read : -1] for choice in some]
        slots = [manager.fork(prompt_job.slot) for _ in some]
        starts = np.cumsum([0, *(len(ids) for ids in read)]).tolist()
        spans = [Span(*parts) for parts in zip(slots, [0] * len(some), starts, map(len, read), strict=False)]
        reader._windows.suspend()
        reader.cache.plan(spans, [reader.config.cache.sparse] * len(spans))
        positions = [prompt_job.num_read + j for ids in read for j in range(len(ids))]
        logits = reader._call([i for ids in read for i in ids], positions, list(range(starts[-1])))
        for slot in slots:
            manager.free(slot)
        for block, choice in zip(logits.split([len(ids) for ids in read]), some, strict=True):
            found.append(_scored(choice, *(float(x.float().mean()) for x in compare(block, choice.recorded))))
    return found


def _scored(choice: Choice, kl: float, top1: float, gap: float) -> dict[str, Any]:
    answer = choice.token_ids[choice.num_prompt_tokens :]
    return {
        "kl": round(kl, 7),
        "top1": round(top1, 5),
        "gap": round(gap, 6),
        "repetition": round(repetition(answer), 4),
        "early_stop": int(choice.finish_reason == "stop" and len(answer) <= 4),
        "tokens": len(answer),
    }


def pack(args: argparse.Namespace) -> None:
    lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    fields = ("kl", "top1", "gap", "repetition", "early_stop", "tokens")
    answers = {
        name: {key: [answer[key] for line in lines for answer in line[name]] for key in fields} for name in CONFIGS
    }
    write(
        "rollout_answers.json",
        args,
        {
            "num_prompts": len(lines),
            "answers_per_prompt": NUM_CHOICES,
            "new_tokens": NEW_TOKENS,
            "configs": _described(),
            "answers": answers,
        },
        indent=None,
    )


def _described() -> dict[str, Any]:
    return {name: config.model_dump(mode="json", exclude_defaults=True) for name, config in CONFIGS.items()}


# -- resampling ----------------------------------------------------------------------------------------------------


def resample(args: argparse.Namespace) -> None:
    """Draw answers of stable and canary with replacement and let the guard's tests bet on every pair."""
    answers = json.loads(ANSWERS.read_text())["answers"]
    generator = np.random.default_rng(args.seed)
    rules = RolloutConfig()
    found = {}
    for name in [*BAD, *HARMLESS]:
        stops, causes = first_alarms(answers["stable"], answers[name], rules, NUM_SEQUENCES, LONGEST, generator)
        alarmed = stops <= LONGEST
        found[name] = {
            "is_bad": name in BAD,
            "num_recorded": len(answers[name]["kl"]),
            "mean_kl": statistics.fmean(answers[name]["kl"]),
            "mean_top1": statistics.fmean(answers[name]["top1"]),
            "within_60": float((stops <= WITHIN).mean()),
            "within_300": float(alarmed.mean()),
            "median_answers": float(np.median(stops[alarmed])) if alarmed.any() else None,
            "p95_answers": float(np.percentile(stops[alarmed], 95)) if alarmed.any() else None,
            "by_metric": {key: int((causes[alarmed] == i).sum()) for i, key in enumerate(_LEVELS) if alarmed.any()},
        }
    stable_kl = statistics.fmean(answers["stable"]["kl"])
    summary = {
        "least_power_within_60": min(found[name]["within_60"] for name in BAD),
        "most_false_alarms_within_300": max(found[name]["within_300"] for name in HARMLESS),
    }
    content = {"num_sequences": NUM_SEQUENCES, "seed": args.seed, "stable_mean_kl": stable_kl, **summary}
    write("rollout.json", args, {**content, "rules": rules.model_dump(mode="json"), "configs": found})


_LEVELS = [metric.name for metric in METRICS if not metric.is_order and metric.name != "errors"]


def first_alarms(
    stable: dict[str, list[float]],
    canary: dict[str, list[float]],
    rules: RolloutConfig,
    num_sequences: int,
    length: int,
    generator: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of the scored answer at which the first alarm came (length + 1: none), and its metric's index.

    The same bets as `gsm.serve.watch`, for all sequences at once; `tests/serve/test_rollout_watch.py` compares them.
    """
    draws = generator.integers(len(stable["kl"]), size=(2, num_sequences, length))
    stops = np.full((len(_LEVELS), num_sequences), length + 1)
    for i, metric in enumerate(metric for metric in METRICS if metric.name in _LEVELS):
        evidence = _log_evidence(metric, rules, np.asarray(stable[metric.name]), np.asarray(canary[metric.name]), draws)
        needed = np.log(1.0 / (rules.false_alarm * metric.risk))
        above = evidence >= needed
        stops[i] = np.where(above.any(1), above.argmax(1) + 1, length + 1)
    return stops.min(0), stops.argmin(0)


def _log_evidence(
    metric: Metric, rules: RolloutConfig, stable: Any, canary: Any, draws: NDArray[np.int64]
) -> NDArray[np.float64]:
    tolerance = getattr(rules.tolerance, metric.name)
    cap = min(1.0, 10 * tolerance) if metric.unit.startswith("share") else 10 * tolerance
    worse = np.clip(canary, 0, cap)[draws[1]] / cap
    beside = np.clip(stable, 0, cap)[draws[0]] / cap
    surplus = worse - beside - tolerance / cap
    wealth = np.stack([np.log1p(share / (tolerance / cap + 1) * surplus).cumsum(1) for share in _SHARES])
    most = wealth.max(0)
    return most + np.log(np.exp(wealth - most).mean(0))


# -- live ----------------------------------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> None:
    """One canary per config at 50 %, through engine, shadow scoring, guard and roll-back, on other prompts."""
    loaded = load_model(args.model, threads=args.threads)
    waiting = list(prompts(loaded, "tuning"))
    random.Random(args.seed).shuffle(waiting)
    found: dict[str, Any] = {}
    for name in args.configs or [*BAD, *HARMLESS]:
        most = WITHIN if name in BAD else args.harmless_answers
        found[name] = _live(loaded, name, waiting, most, args.seed)
        print(name, json.dumps(found[name]), flush=True)
    write("rollout_live.json", args, {"seed": args.seed, "configs": found})


def _live(loaded: LoadedModel, name: str, waiting: list[list[int]], most: int, seed: int) -> dict[str, Any]:
    with Engine(loaded, STABLE) as engine:
        worker = EngineWorker(engine)
        rollout = Rollout(worker)
        asyncio.run(rollout.canary(CONFIGS[name], 50.0))
        canary = rollout.live.canary
        assert canary is not None
        make_faulty(engine, {name: canary.number})
        order, number = random.Random(seed), 0
        while rollout.live.canary is not None and rollout.watch.num_scored < most and number < len(waiting):
            while len(engine.requests) < 6 and number < len(waiting):
                epoch, is_scored = rollout.admit(str(order.random()))
                sampling = SamplingParams(**SAMPLING, seed=order.randrange(2**31))
                engine.add(f"{number}", list(waiting[number]), sampling, epoch=epoch, is_scored=is_scored)
                number += 1
            engine.step()
            while engine.shadow.has_work:
                engine.shadow.run(is_idle=True)
        record = rollout.record(canary.number)
        evidence = record.evidence or rollout.watch.evidence(canary.number)
        return {
            "is_bad": name in BAD,
            "num_scored": rollout.watch.num_scored
            or next(row["num_answers"] for row in evidence if row["name"] == "kl"),
            "is_rolled_back": record.status == "rolled back",
            "reason": record.reason,
            "mean_kl": next(row["mean"] for row in evidence if row["name"] == "kl"),
        }


# -- reloads -------------------------------------------------------------------------------------------------------


def reloads(args: argparse.Namespace) -> None:
    """The test of the same name, which ends the run when an answer is lost or of another epoch, with its times."""
    import sys
    import tempfile

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "serve")]
    from rollout_server import serve_tiny, with_cache
    from test_rollout import OFF, put, reload_under_load

    from support_engine import load_tiny
    from support_models import build_tiny_model

    with (
        tempfile.TemporaryDirectory() as directory,
        serve_tiny(load_tiny(build_tiny_model("llama")), with_cache(OFF), state=Path(directory) / "state") as served,
    ):
        num_answers, times = reload_under_load(served, args.num)
        back = []
        for number in range(20):
            put(served, with_cache(OFF, hot_size=8 + number))
            began = time.perf_counter()
            served.admin.post("/admin/rollback")
            served.ask([5], 1)
            back.append(time.perf_counter() - began)
        served.engine.manager.check_integrity()
    spread = {"median": statistics.median(times), "p99": float(np.percentile(times, 99)), "max": max(times)}
    content = {"num_reloads": args.num, "num_answers": num_answers}
    write("rollout_reloads.json", args, {**content, "reload_s": spread, "rollback_and_answer_s": max(back)})


# -- cost ----------------------------------------------------------------------------------------------------------


def cost(args: argparse.Namespace) -> None:
    """Tokens per second of a full queue with the guard off and at its default, arms interleaved."""
    loaded = load_model(args.model, threads=args.threads)
    waiting = list(prompts(loaded, "evaluation"))
    arms: dict[str, list[float]] = {"off": [], "default": []}
    shares: list[float] = []
    with Engine(loaded, STABLE) as engine:
        rollout = Rollout(EngineWorker(engine))
        for repeat in range(args.repeats + 1):
            order = list(arms) if repeat % 2 else list(reversed(arms))
            for arm in order:
                rate, share = _throughput(engine, rollout, waiting, arm == "default", args.requests, repeat)
                if repeat:  # the first is warm-up
                    arms[arm].append(rate)
                    shares += [share] if arm == "default" else []
    rates = {arm: statistics.median(values) for arm, values in arms.items()}
    loss = 1 - rates["default"] / rates["off"]
    write("rollout_cost.json", args, {"tokens_per_s": arms, "loss": loss, "shadow_share_of_time": shares})


def _throughput(
    engine: Engine, rollout: Rollout, waiting: list[list[int]], is_guarded: bool, num: int, repeat: int
) -> tuple[float, float]:
    assert engine.prefix is not None
    engine.prefix.clear()
    engine.on_finish = rollout._note_finished if is_guarded else None
    order, began, spent = random.Random(repeat), time.perf_counter(), engine.shadow.spent_s
    tokens, step_s, added = engine.stats.num_generated_tokens, engine.stats.step_s, 0
    random.seed(repeat)
    while added < num or engine.has_work:
        while added < num and len(engine.requests) < 16:
            epoch, is_scored = rollout.admit(str(added))
            sampling = SamplingParams(max_tokens=64, temperature=0.7, seed=order.randrange(2**31), ignore_eos=True)
            ids = list(waiting[added % len(waiting)])
            engine.add(f"{added}", ids, sampling, epoch=epoch, is_scored=is_scored and is_guarded)
            added += 1
        engine.step()
        if engine.has_work:
            engine.use_spare_time()
    duration = time.perf_counter() - began
    while engine.shadow.has_work:  # what is left would be done in idle time
        engine.use_spare_time()
    share = (engine.shadow.spent_s - spent) / max(1e-9, engine.stats.step_s - step_s)
    return (engine.stats.num_generated_tokens - tokens) / duration, share


# -- small things --------------------------------------------------------------------------------------------------


def write(name: str, args: argparse.Namespace, content: dict[str, Any], indent: int | None = 2) -> None:
    environment = collect_environment(model=args.model, dtype="float32", threads=torch.get_num_threads())
    head = {"environment": environment.model_dump(mode="json"), "load_average_at_start": args.load_average}
    temporary = RESULTS / f".{name}.tmp"
    temporary.write_text(json.dumps({**head, **content}, indent=indent) + "\n", encoding="utf-8")
    os.replace(temporary, RESULTS / name)
    print(json.dumps({key: value for key, value in content.items() if key not in ("answers", "rules")}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["record", "pack", "resample", "live", "reloads", "cost"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prompts", type=int, default=31)
    parser.add_argument("--log", type=Path, default=RESULTS / ".rollout_answers.jsonl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--configs", nargs="*")
    parser.add_argument("--harmless-answers", type=int, default=60)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    args = parser.parse_args()
    args.load_average = load_average()
    parts = {"record": record, "pack": pack, "resample": resample, "live": live, "reloads": reloads, "cost": cost}
    parts[args.part](args)


if __name__ == "__main__":
    main()
