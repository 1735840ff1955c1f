"""Needles: is a fact said once, somewhere in a long text, still found?

A haystack of N tokens hides several facts ("Emma's phone number is 49755.") at depths of 10, 50 and 90 %; each is asked
for in a fork of its own, so one prefill serves them all. Two cases: ``prefill``, the question is a chunk of the prefill
(what is dropped afterwards may depend on it), and ``late``, the question arrives token by token on the decode path,
after the cache has been compressed. Facts differ in owner *and* in kind, because a small model confuses facts that
differ in the name alone. The wording was chosen so that SmolLM2-135M with its full cache finds them
(benchmarks/LOG.md has what was tried).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gsm.errors import InputError
from gsm.quality.sessions import Arm, Progress, Session, no_progress
from gsm.quality.texts import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CASES = ("prefill", "late")
FACTS = (
    ("Paris", "secret code"), ("Oliver", "lucky number"), ("Emma", "phone number"), ("Tokyo", "locker number"),
    ("Mozart", "ticket number"), ("Sophia", "account number"), ("Einstein", "house number"),
    ("Apollo", "serial number"), ("Berlin", "zip code"), ("Napoleon", "password"), ("Charlie", "favorite number"),
    ("Cairo", "flight number"),
)  # fmt: skip
STATEMENT = "\n{owner}'s {kind} is {code}.\n"
QUESTION = "\n\nFacts from the text above:\n{owner}'s {kind} is"
ANSWER_ROOM = 48  # positions that a question with its answer may take after the haystack, in any tokenizer
_SPREAD = 0.04  # distance between the facts of one depth, as a share of the haystack


@dataclass(frozen=True)
class NeedlePlan:
    """Needles in haystacks of ``prompt_tokens`` tokens, ``per_depth`` for each depth and case."""

    prompt_tokens: int
    per_depth: int = 10
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    facts_per_depth: int = 2  # in one haystack
    seed: int = 0

    @property
    def num_needles(self) -> int:
        """Needles per case."""
        return self.per_depth * len(self.depths)

    @property
    def fed_tokens(self) -> int:
        """Positions a haystack with a question and its answer takes in the model's context."""
        return self.prompt_tokens + ANSWER_ROOM

    @property
    def num_haystacks(self) -> int:
        return -(-self.per_depth // self.facts_per_depth)


@dataclass(frozen=True)
class Needle:
    """One hidden fact: where, what is asked, what must be answered."""

    depth: float
    statement: torch.Tensor
    question: torch.Tensor
    code: str


@dataclass(frozen=True)
class NeedleOutcome:
    """Whether each needle of one haystack was found, per case, in a fixed order."""

    found: dict[str, tuple[bool, ...]]


def needles(
    arms: Sequence[Arm],
    tokenizer: PreTrainedTokenizerBase,
    text_ids: torch.Tensor,
    plan: NeedlePlan,
    progress: Progress = no_progress,
) -> Iterator[dict[str, NeedleOutcome]]:
    """Yield one ``{arm name: outcome}`` per haystack; every arm sees the same haystacks and questions.

    ``text_ids`` [num_tokens] is the text that hides the facts. Raises InputError when it is too short.
    """
    if len(text_ids) < plan.prompt_tokens:
        raise InputError(
            f"the evaluation text has {len(text_ids)} tokens, a haystack needs {plan.prompt_tokens}; "
            "give a longer text with --text"
        )
    rng = random.Random(plan.seed)
    done, total = 0, plan.num_haystacks * len(arms)
    for index in range(plan.num_haystacks):
        facts_here = min(plan.facts_per_depth, plan.per_depth - index * plan.facts_per_depth)
        hidden = _make_needles(tokenizer, plan, facts_here, rng)
        offset = index * (len(text_ids) - plan.prompt_tokens) // max(1, plan.num_haystacks - 1)
        haystack = _hide(text_ids[offset:], hidden, plan.prompt_tokens)
        outcomes = {}
        for arm in arms:
            outcomes[arm.name] = _search(arm, tokenizer, haystack, hidden)
            progress(f"needles: {arm.name}", done := done + 1, total)
        yield outcomes


def _max_answer_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    return len(encode(tokenizer, " 12345")) + 3


def _make_needles(
    tokenizer: PreTrainedTokenizerBase, plan: NeedlePlan, facts_per_depth: int, rng: random.Random
) -> list[Needle]:
    """Facts with owners and codes drawn for one haystack, in order of depth."""
    count = facts_per_depth * len(plan.depths)
    if count > len(FACTS):
        raise InputError(f"{count} facts in one haystack are too many; at most {len(FACTS)}, lower facts_per_depth")
    facts = iter(rng.sample(FACTS, count))
    hidden = []
    for depth in sorted(plan.depths):
        for index in range(facts_per_depth):
            owner, kind = next(facts)
            code = str(rng.randrange(10_000, 100_000))
            hidden.append(
                Needle(
                    depth + (index - (facts_per_depth - 1) / 2) * _SPREAD,
                    encode(tokenizer, STATEMENT.format(owner=owner, kind=kind, code=code)),
                    encode(tokenizer, QUESTION.format(owner=owner, kind=kind)),
                    code,
                )
            )
    return hidden


def _hide(text_ids: torch.Tensor, hidden: Sequence[Needle], num_tokens: int) -> torch.Tensor:
    """A haystack of exactly ``num_tokens`` tokens, shape [num_tokens]."""
    room = num_tokens - sum(len(needle.statement) for needle in hidden)
    if room < num_tokens // 2:
        raise InputError(f"a haystack of {num_tokens} tokens is too small for {len(hidden)} facts; use longer prompts")
    parts, last = [], 0
    for needle in hidden:
        position = min(room, max(last, int(needle.depth * room)))
        parts += [text_ids[last:position], needle.statement]
        last = position
    return torch.cat([*parts, text_ids[last:room]])


def _search(
    arm: Arm, tokenizer: PreTrainedTokenizerBase, haystack: torch.Tensor, hidden: Sequence[Needle]
) -> NeedleOutcome:
    found: dict[str, tuple[bool, ...]] = {}
    with arm.open() as base:
        base.prefill(haystack[None])
        for case in CASES:
            found[case] = tuple(_ask(base, tokenizer, needle, late=case == "late") for needle in hidden)
    return NeedleOutcome(found)


def _ask(base: Session, tokenizer: PreTrainedTokenizerBase, needle: Needle, *, late: bool) -> bool:
    """Ask in a fork; greedy answer, judged by whether the code is in it."""
    session = base.fork()
    try:
        logits = _feed_slowly(session, needle.question) if late else session.prefill(needle.question[None])
        answer: list[int] = []
        while len(answer) < _max_answer_tokens(tokenizer):
            answer.append(int(logits.argmax()))
            if needle.code in tokenizer.decode(answer):
                return True
            logits = session.step(torch.tensor([[answer[-1]]]))
        return False
    finally:
        session.close()


def _feed_slowly(session: Session, question: torch.Tensor) -> torch.Tensor:
    logits = torch.empty(0)
    for token in question:
        logits = session.step(token.view(1, 1))
    return logits
