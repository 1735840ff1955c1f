"""From messages or text to token ids, with the ids of earlier answers put back where their text stands.

An answer that comes back as part of the next prompt is text; encoded anew it may split into other tokens than those
that were generated, and then nothing after the first difference hits the prefix cache. So the text of a prompt and
its answer is remembered with its ids, per tenant, and a prompt that begins with it is encoded from there on only. The
cut is made where the tokenizer cuts anyway: before a special token.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gsm.config.prompt import PromptConfig
from gsm.errors import InputError
from gsm.models import LoadedModel
from gsm.prompt.pipeline import PromptPipeline, token_finder
from gsm.prompt.render import render
from gsm.prompt.spans import text_of

_MAX_REMEMBERED = 256
_MAX_PIPELINES = 8  # prompt settings in use at the same time
_MAX_TEXT = 1 << 20  # characters of one remembered conversation


class Tokens:
    """Encodes in one thread of its own, so that long prompts stop neither the event loop nor the engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer: Any = copy.deepcopy(loaded.tokenizer)  # the engine's thread decodes with the other one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gsm-tokens")
        self._special = [str(token) for token in self._tokenizer.all_special_tokens if str(token)]
        self._pipelines: OrderedDict[PromptConfig, PromptPipeline] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], list[int]] = OrderedDict()  # (salt, text) -> ids

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    async def chat(self, messages: list[dict[str, Any]], salt: str, **template: Any) -> tuple[str, list[int]]:
        """Text and ids of a conversation up to where the answer begins. Raises InputError."""
        return await self._in_thread(self._chat, messages, salt, template)

    async def prompt(
        self, messages: list[dict[str, Any]], salt: str, settings: PromptConfig, **template: Any
    ) -> tuple[str, list[int], tuple[tuple[int, int], ...], int]:
        """The same through the prompt pipeline: text, ids, token ranges of old turns that give their KV back, and how
        many tokens the messages lost. Raises InputError."""
        return await self._in_thread(self._prompt, messages, salt, settings, template)

    async def text(self, text: str, salt: str) -> tuple[str, list[int]]:
        """Ids of a plain text, with the tokenizer's own special tokens around it."""
        return await self._in_thread(self._encode, text, salt, True)

    async def remember(self, salt: str, prompt_text: str, ids: list[int], answer_ids: list[int]) -> None:
        """Keep the ids of a prompt and its answer, if they spell it exactly."""
        await self._in_thread(self._remember, salt, prompt_text, ids, answer_ids)

    def token_text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _chat(self, messages: list[dict[str, Any]], salt: str, template: dict[str, Any]) -> tuple[str, list[int]]:
        if not self.has_template:
            raise InputError("this model has no chat template; use /v1/completions")
        try:
            text = str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise InputError(f"the chat template refused the messages: {error}") from error
        return self._encode(text, salt, False)

    def _prompt(
        self, messages: list[dict[str, Any]], salt: str, settings: PromptConfig, template: dict[str, Any]
    ) -> tuple[str, list[int], tuple[tuple[int, int], ...], int]:
        if settings not in self._pipelines:
            while len(self._pipelines) >= _MAX_PIPELINES:
                self._pipelines.popitem(last=False)
            self._pipelines[settings] = PromptPipeline(self._tokenizer, settings)
        pipeline, num_removed = self._pipelines[settings], 0
        if settings.changes_text:
            edited = pipeline.edit(messages, str(template.get("reasoning_effort") or "")).messages
            before, after = (sum(pipeline.count(text_of(m)) for m in found) for found in (messages, edited))
            messages, num_removed = edited, max(0, before - after)
        text, ids = self._chat(messages, salt, template)
        ranges: tuple[tuple[int, int], ...] = ()
        if settings.history.mode == "kv":
            rendered = render(self._tokenizer, messages, **template)
            ranges = pipeline.lowered(messages, rendered, token_finder(self._tokenizer, ids))
        return text, ids, ranges, num_removed

    def _encode(self, text: str, salt: str, add_special_tokens: bool) -> tuple[str, list[int]]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is no valid Unicode at character {error.start}; send UTF-8") from None
        known = self._longest_known(text, salt)
        if known is not None:
            start, ids = known
            return text, [*ids, *self._ids(text[start:], False)]
        return text, self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]) if text else []

    def _longest_known(self, text: str, salt: str) -> tuple[int, list[int]] | None:
        """Length and ids of the longest remembered text that `text` begins with, cut before a special token."""
        best: tuple[str, str] | None = None
        for key in self._known:
            if key[0] != salt or (best is not None and len(key[1]) <= len(best[1])):
                continue
            if text.startswith(key[1]) and text[len(key[1]) :].startswith(tuple(self._special)):
                best = key
        if best is None:
            return None
        self._known.move_to_end(best)
        return len(best[1]), self._known[best]

    def _remember(self, salt: str, prompt_text: str, ids: list[int], answer_ids: list[int]) -> None:
        answer = str(self._tokenizer.decode(answer_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        spelled = self._tokenizer.decode(answer_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = prompt_text + answer
        if answer != spelled or "\ufffd" in answer or len(text) > _MAX_TEXT:
            return
        self._known[salt, text] = [*ids, *answer_ids]
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
