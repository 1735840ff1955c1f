"""Continuous batching: every step decodes everyone who decodes and computes chunks of prompts beside them.

Not thread-safe: one thread owns an engine. Between two steps requests may be added and cancelled at any point of their
life. State lives in the scheduler's queues, in each `Sequence`, in the KV manager and the smoothing windows; the rest
is frozen or pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType

from torch import Tensor

from gsm.config import GsmConfig, SparseConfig, fingerprint
from gsm.config.load import ConfigLike, load_config
from gsm.engine.collect import Collector
from gsm.engine.detokenize import Detokenizer
from gsm.engine.epochs import Epoch, Epochs
from gsm.engine.params import SamplingParams
from gsm.engine.prefixes import make_prefix_index, weights_digest
from gsm.engine.request import FinishReason, Request, Sequence, TokenEvent, Work
from gsm.engine.runner import Runner
from gsm.engine.sampler import SamplerState
from gsm.engine.scheduler import Scheduler
from gsm.engine.shadow import NUM_TOP, Shadow
from gsm.engine.speculate import PromptLookup
from gsm.engine.stats import EngineStats
from gsm.engine.windows import Windows
from gsm.errors import EngineError, InputError, OutOfPages, QueueFull
from gsm.integrations.transformers import attach
from gsm.integrations.transformers.grading import Lowered, make_grader
from gsm.kv.room import KVRoom
from gsm.models import LoadedModel
from gsm.smoothing.window import WindowSmoothing

_PAGES_PER_EVICTION = 8
_UNBOUNDED = 1 << 30  # tokens


class Engine:
    """Serves many requests on one model. Use as a context manager: the model is attached until `close`.

    `window` is the run-time smoothing in force on the model, if any (`gsm.smoothing.apply(...).window`);
    `prefix_dir` keeps prefix pages across restarts. Raises ConfigError, UnsupportedModel or AttachError.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: ConfigLike = None,
        *,
        window: WindowSmoothing | None = None,
        prefix_dir: str | Path | None = None,
    ) -> None:
        settings: GsmConfig = load_config(config)
        self.loaded = loaded
        self.stats = EngineStats()
        self.windows = Windows(loaded.model, window)
        self.epochs = Epochs(self, settings, window)
        endless = settings.cache.positions == "compact"
        self.max_context = _UNBOUNDED if endless else loaded.arch.max_position_embeddings or _UNBOUNDED
        self.eos_ids = _eos_ids(loaded)
        self.shadow = Shadow(loaded, self.windows, settings.rollout.max_scored_tokens)
        self.on_finish: Callable[[Sequence], None] | None = None  # called before its pages are given back
        self.collector = Collector(self)
        self.requests: dict[str, Request] = {}
        self._pieces: dict[int, str] = {}  # texts of tokens, for graders
        self._events: list[TokenEvent] = []  # of cancelled and expired requests
        with ExitStack() as attached:  # the model is given back at once when anything of this fails
            attached.enter_context(attach(loaded.model, settings, tokenizer=loaded.tokenizer))
            attached.callback(self.windows.close)
            self._start(settings, window is not None, prefix_dir)
            self._attached = attached.pop_all()

    def _start(self, settings: GsmConfig, is_windowed: bool, prefix_dir: str | Path | None) -> None:
        limits = settings.engine
        self.runner = Runner(self.loaded, settings, self.windows)
        self.manager = self.runner.cache.limit(limits.kv_pages)
        if self.manager.compactor is not None:
            self.manager.compactor.check_chunk(settings.cache, limits.chunk_tokens)
        self.room = KVRoom(self.manager, None, limits.chunk_tokens)
        self.room.limit(limits.kv_memory_mib)
        self._warm_up()
        self.prefix = make_prefix_index(self, is_windowed, prefix_dir)
        self.epochs.start()
        self.scheduler = Scheduler(limits, self.room, self._admit, self._preempt, self._make_room)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def weights(self) -> bytes:
        """A digest of the model as it is served, for the names of prefix pages."""
        return weights_digest(self.loaded.model)

    @property
    def config(self) -> GsmConfig:
        """What requests get that name no epoch."""
        return self.epochs.current.config

    def close(self) -> None:
        """Drop every request, write prefix pages to disk, and give the model back as it was."""
        self.abort_all("the engine was closed")
        if self.prefix is not None:
            while self.prefix.save_some(64):
                pass
        self._attached.close()

    # -- requests ----------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        sparse: SparseConfig | None = None,
        tenant: str = "",
        salt: str = "",
        epoch: int | Epoch | None = None,
        is_scored: bool = False,
        effort: int | str | None = None,
        lowered: Lowered | None = None,
    ) -> Request:
        """Queue a request. It keeps the config of `epoch` (default: the current one) and `sparse`, decode settings of
        its own; an `Epoch` object may be used even after it was retired. `is_scored` has its answer read again exactly
        once it is finished (`shadow`). `effort` says how its thoughts are graded (`reasoning`), `lowered` which old
        turns give their pages back when the prompt is computed.

        Raises QueueFull, ConfigError for an epoch not in force, or InputError when it can never be served.
        """
        sampling = sampling or SamplingParams()
        terms = epoch if isinstance(epoch, Epoch) else self.epochs[epoch]
        if len(self.scheduler.waiting) >= self.config.engine.max_waiting:
            raise QueueFull(f"{len(self.scheduler.waiting)} requests are waiting already; try again later")
        self._check(request_id, prompt_ids, sampling)
        request = Request(
            request_id,
            prompt_ids,
            sampling,
            terms,
            sparse if sparse is not None else terms.config.cache.sparse,
            is_scored,
            tenant,
            salt,
            time.monotonic() + terms.config.engine.queue_timeout_s,
            effort=effort,
            lowered=lowered,
        )
        request.sequences = [self._sequence(request, index) for index in range(sampling.n)]
        self.requests[request_id] = request
        self.scheduler.waiting.append(request.leader)
        return request

    def cancel(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a request now, wherever it is; its pages are free when this returns. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        for sequence in request.sequences if request is not None else ():
            if sequence.finish_reason is None:
                self.finish(sequence, reason)
                self._events.append(TokenEvent(request_id, sequence.index, [], "", finish_reason=reason, error=error))

    def abort_all(self, error: str) -> None:
        for request_id in list(self.requests):
            self.cancel(request_id, "error", error)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or len(self.scheduler.waiting) or self._events)

    @property
    def kv_usage(self) -> float:
        """Share of the KV memory in use, prefix pages that nobody needs included."""
        if self.room.max_bytes is not None:
            return self.room.used_bytes / self.room.max_bytes
        most = self.manager.max_pages
        used = max((g.pages.num_used / max(1, g.streams_per_slot) for g in self.manager.groups), default=0.0)
        return used / most if most else 0.0

    def longest_answer(self, num_prompt_tokens: int) -> int:
        """Tokens that can still be generated after a prompt: bounded by the model's window and the KV memory."""
        capacity = self.room.capacity_tokens
        most = min(self.max_context, capacity) if capacity is not None else self.max_context
        return most - num_prompt_tokens

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Schedule, run, commit, collect: one token for everyone who decodes, chunks of prompts beside them.

        A failure of the model ends the requests of the step, not the engine; three in a row raise EngineError.
        """
        self._expire()
        for row in self.runner.rows(self.scheduler.schedule()):
            works = [work for work in row if work.sequence.slot is not None]  # an earlier row may have ended others
            if works:
                self._run(works)
        events, self._events = self._events, []
        return events

    def use_spare_time(self) -> None:
        """Between two steps: score finished answers, freely when nobody waits, else within the share given to it."""
        self.shadow.run(is_idle=not self.has_work)

    def _run(self, works: list[Work]) -> None:
        began_s = time.perf_counter()
        try:
            logits = self.runner.run(works)
        except Exception as error:  # foreign code: whatever a model may raise ends these requests only
            self._fail(works, error)
            return
        duration_s = time.perf_counter() - began_s
        self.stats.note_step(works, duration_s)
        self.shadow.earn(duration_s)
        self._commit(works, logits)

    def _commit(self, works: list[Work], logits: list[Tensor]) -> None:
        self.stats.failures_in_a_row = 0
        sampling = [work for work in works if work.samples]
        for work in works:
            work.sequence.num_computed += work.num_tokens
            work.sequence.grade(self.manager)
            self._index_pages(work.sequence)
        self._events += self.collector.collect(sampling, logits)

    def _fail(self, works: list[Work], error: Exception) -> None:
        if isinstance(error, OutOfPages) and len(self.scheduler.running) > 1:
            self._preempt(self.scheduler.running.pop())  # memory ended before our own limit did
            return
        for work in works:
            self.cancel(work.sequence.request.request_id, "error", f"{type(error).__name__}: {error}")
        self.stats.failures_in_a_row += 1
        if self.stats.failures_in_a_row >= 3:
            raise EngineError(f"three steps in a row failed, the last with {type(error).__name__}: {error}") from error

    # -- life of a sequence ------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        request, terms = sequence.request, sequence.request.terms
        if self.prefix is not None and terms.fingerprint is not None:
            settings = self._decode_settings(request)
            chain = self.prefix.chain(request.salt, sequence.num_prompt_tokens, settings, fingerprint=terms.fingerprint)
            sequence.chain = chain
            sequence.slot, sequence.num_computed = self.prefix.match(chain, sequence.token_ids, terms.rules)
            sequence.num_indexed_pages = len(chain.names)
        else:
            sequence.slot, sequence.num_computed = self.manager.add_sequence(terms.rules), 0
        if request.first_scheduled_s is None:
            request.first_scheduled_s = time.monotonic()
            request.num_cached_tokens = sequence.num_computed
            self.stats.note_admission(request)

    def fork(self, leader: Sequence) -> Iterable[Sequence]:
        """The other choices begin where the first one has computed the prompt."""
        for sequence in leader.request.sequences[1:]:
            assert leader.slot is not None
            sequence.slot = self.manager.fork(leader.slot)
            sequence.num_computed = leader.num_computed
            sequence.num_indexed_pages = leader.num_indexed_pages
            if leader.chain is not None:
                sequence.chain = leader.chain.fork()
            sequence.grader = leader.grader.copy() if leader.grader is not None else None
            self.windows.fork(leader, sequence)
            self.scheduler.running.append(sequence)
            yield sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is over: its pages are free, but for those the prefix index keeps."""
        sequence.finish_reason = reason
        if self.on_finish is not None:
            self.on_finish(sequence)
        if sequence.records and reason in ("stop", "length"):
            self.shadow.submit(sequence)
        if sequence.slot is not None:
            self.scheduler.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.scheduler.waiting:
            self.scheduler.waiting.remove(sequence)
        if sequence.request.is_finished:
            del self.requests[sequence.request.request_id]
            self.stats.note_end(sequence.request)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a (no longer running) sequence's pages; it waits and computes them anew."""
        self._release(sequence)
        sequence.num_computed = 0
        if sequence.grader is not None:
            sequence.grader.restart()
        sequence.request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.scheduler.waiting.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.manager.free(sequence.slot)
        self.windows.release(sequence)
        sequence.slot, sequence.chain = None, None

    def _index_pages(self, sequence: Sequence) -> None:
        """Offer completed pages to the prefix index, up to the first thought where thoughts are graded."""
        if self.prefix is None or sequence.chain is None or sequence.slot is None:
            return
        num_complete = self.manager.sequences[sequence.slot].num_complete
        most = sequence.grader.num_shared_tokens if sequence.grader is not None else None
        if most is not None:
            num_complete = min(num_complete, most // self.manager.config.page_size)
        if num_complete > sequence.num_indexed_pages:
            first, sequence.num_indexed_pages = sequence.num_indexed_pages, num_complete
            self.prefix.insert(sequence.chain, sequence.slot, sequence.token_ids, first, num_complete)

    def _make_room(self) -> bool:
        """Give cached pages back; False when there are none that nobody uses."""
        if self.prefix is None:
            return False
        return sum(self.prefix.evict() for _ in range(_PAGES_PER_EVICTION)) > 0

    def _expire(self) -> None:
        now = time.monotonic()
        late = [s.request for s in self.scheduler.waiting if s.request.first_scheduled_s is None]
        for request in late:
            if request.deadline_s is not None and now > request.deadline_s:
                limit = request.config.engine.queue_timeout_s
                self.cancel(request.request_id, "timeout", f"the request waited longer than {limit:g} s; try again")

    # -- small things ------------------------------------------------------------------------------------------

    def _decode_settings(self, request: Request) -> str:
        """What names pages whose keys were computed while decoding: nothing where that is what a prompt computes."""
        if request.lowered is not None:
            return f"{fingerprint(request.sparse)} {request.lowered.tier} {request.lowered.ranges}"
        return "" if request.recomputes_in_bulk else fingerprint(request.sparse)

    def _sequence(self, request: Request, index: int) -> Sequence:
        sampling = request.sampling
        text = Detokenizer(self.loaded.tokenizer, request.prompt_ids, sampling.stop, sampling.skip_special_tokens)
        state = SamplerState(sampling, self.eos_ids, request.prompt_ids, index)
        sequence = Sequence(request, index, text, state, list(request.prompt_ids))
        if sequence.records:
            state.num_top = max(sampling.logprobs or 0, NUM_TOP)
        sequence.grader = make_grader(
            self.loaded.tokenizer, request.config.reasoning, request.effort, request.lowered, self._pieces
        )
        draft_tokens = request.config.engine.draft_tokens
        if draft_tokens and sampling.is_greedy and not sampling.changes_logits and not self.manager.needs_mass:
            sequence.lookup = PromptLookup(draft_tokens)
        return sequence

    def _check(self, request_id: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        if request_id in self.requests:
            raise InputError(f"request id {request_id!r} is in use; choose another")
        if not prompt_ids:
            raise InputError("the prompt is empty; give at least one token")
        vocab = self.loaded.arch.vocab_size
        wrong = next((i for i in prompt_ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the model's vocabulary of {vocab}")
        wanted = len(prompt_ids) + sampling.max_tokens
        if wanted > self.max_context:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {sampling.max_tokens}, together more than "
                f"the model's {self.max_context}; shorten the prompt or lower max_tokens"
            )
        if sampling.n > self.config.engine.max_running:
            raise InputError(f"n is {sampling.n} but at most {self.config.engine.max_running} choices run at a time")
        if not self.room.fits_empty(wanted):
            raise InputError(
                f"prompt and answer need {wanted} tokens but the KV memory holds {self.room.capacity_tokens}; shorten "
                "the prompt, lower max_tokens, or raise engine.kv_memory_mib"
            )

    def _warm_up(self) -> None:
        """A prompt and a decode step: shapes of pages are known and kernels compiled before the first request."""
        terms = self.epochs.current
        request = Request("warm-up", [0] * 3, SamplingParams(), terms, terms.config.cache.sparse)
        sequence = self._sequence(request, 0)
        sequence.slot = self.manager.add_sequence()
        try:
            for num_tokens in (2, 1):
                self.runner.run([Work(sequence, num_tokens)])
                sequence.num_computed += num_tokens
        finally:
            self._release(sequence)


def _eos_ids(loaded: LoadedModel) -> frozenset[int]:
    """Every token that ends an answer, by the model's generation config and its tokenizer."""
    generation = loaded.model.generation_config
    found = generation.eos_token_id if generation is not None else None
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in [*ids, loaded.tokenizer.eos_token_id] if isinstance(i, int))
