"""Prometheus metrics. Names are vLLM's with `gsm:` in place of `vllm:`, so that its dashboards need one replacement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gsm.engine import Engine
from gsm.serve.rollout import Rollout

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ITL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536, 262144)


class Metrics:
    """What the server observes itself, and what the engine counts, read when somebody asks."""

    def __init__(self, engine: Engine, model_name: str, rollout: Rollout) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Time to the first token.", _LATENCY_S)
        self.itl_s = self._histogram("inter_token_latency_seconds", "Time between tokens.", _ITL_S)
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Time to the last token.", _LATENCY_S)
        self.queue_s = self._histogram("request_queue_time_seconds", "Time in the queue.", _LATENCY_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.rejected: dict[str, int] = {}  # by status code
        self.registry.register(_EngineCollector(engine, model_name, self.rejected, rollout))

    def note_rejection(self, status: int) -> None:
        self.rejected[str(status)] = self.rejected.get(str(status), 0) + 1

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"gsm:{name}", help_text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)


class _EngineCollector:
    """The engine's own counters: plain numbers, read while its thread runs; their sum may be a step off."""

    def __init__(self, engine: Engine, model_name: str, rejected: dict[str, int], rollout: Rollout) -> None:
        self._engine = engine
        self._rollout = rollout
        self._model_name = model_name
        self._rejected = rejected

    def collect(self) -> Iterator[Any]:
        engine, stats = self._engine, self._engine.stats
        yield self._gauge("num_requests_running", "Choices that run.", len(engine.scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests that wait.", len(engine.scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV memory in use, 1 is all.", engine.kv_usage)
        yield self._gauge("kv_used_bytes", "Bytes of KV pages in use.", engine.room.used_bytes)
        yield self._counter("num_preemptions", "Times a request was put back.", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generated_tokens)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("spec_decode_num_draft_tokens", "Guessed tokens.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Right guesses.", stats.num_accepted_tokens)
        prefix = engine.prefix.counters if engine.prefix is not None else {"queries": 0, "hits": 0}
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", prefix["queries"])
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", prefix["hits"])
        yield self._by_label("request_success", "Choices by how they ended.", "finished_reason", dict(stats.finished))
        shadow, live = engine.shadow, self._rollout.live
        yield self._counter("shadow_scored_answers", "Answers read again exactly.", shadow.num_scored)
        yield self._counter("shadow_seconds", "Time spent on that.", shadow.spent_s)
        yield self._counter("config_rollbacks", "Configs that were taken back.", self._rollout.num_rollbacks)
        yield self._gauge("config_epoch", "The stable config's number.", live.stable.number)
        yield self._gauge("config_canary_epoch", "The canary's, 0 is none.", live.canary.number if live.canary else 0)
        yield self._gauge("config_canary_weight", "Share of new requests it gets, in percent.", live.weight)
        yield self._by_label("requests_rejected", "Requests refused, by status.", "status", dict(self._rejected))

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"gsm:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"gsm:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _by_label(self, name: str, help_text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"gsm:{name}", help_text, labels=["model_name", label])
        for key, value in sorted(values.items()):
            family.add_metric([self._model_name, key], value)
        return family
