from __future__ import annotations

import re

import pytest
import torch

from gsm.errors import InputError
from gsm.models import LoadedModel
from gsm.quality import Assessment, NeedlePlan, QualityPlan, encode, load_thirds, needles
from gsm.quality.needles import QUESTION, _hide, _make_needles
from support_measure import RuleArm

PLAN = NeedlePlan(600, per_depth=3, facts_per_depth=2)


@pytest.fixture(scope="module")
def tokenizer(demo: LoadedModel):
    return demo.tokenizer


@pytest.fixture(scope="module")
def ids(tokenizer):
    return encode(tokenizer, load_thirds().evaluation[:40_000])


def reader(tokenizer, name: str, sees) -> RuleArm:
    """An arm that answers perfectly from those calls that ``sees`` keeps."""

    def rule(calls) -> torch.Tensor:
        text = tokenizer.decode([i for _, ids in sees(calls) for i in ids])
        question = tokenizer.decode([i for _, ids in calls for i in ids]).rsplit("\n", 1)[-1]
        stated = re.search(rf"\n{re.escape(question.split(' is')[0])} is (\d+)\.", text)
        answered = question.split(" is")[-1]
        logits = torch.zeros(len(tokenizer))
        wanted = encode(tokenizer, f" {stated.group(1) if stated else '00000'}")
        logits[wanted[min(len(encode(tokenizer, answered)) if answered else 0, len(wanted) - 1)]] = 1
        return logits

    return RuleArm(name, rule)


def test_a_reader_finds_all_and_a_forgetful_one_none(tokenizer, ids) -> None:
    perfect = reader(tokenizer, "full", lambda calls: calls)
    forgetful = reader(tokenizer, "forgetful", lambda calls: calls[1:])  # loses the haystack
    late_only_loses = reader(tokenizer, "snap", lambda calls: calls if calls[1:2] and calls[1][0] == "prefill" else [])
    arms = [forgetful, late_only_loses]
    assessment = Assessment(perfect, arms, tokenizer, ids, QualityPlan(None, PLAN))
    assessment.run()
    quality = assessment.results()
    assert quality["full"].needle_prefill == quality["full"].needle_late == 1
    assert quality["full"].n_needles == 9
    assert quality["forgetful"].needle_prefill == quality["forgetful"].needle_late == 0
    assert quality["snap"].needle_prefill == 1
    assert quality["snap"].needle_late == 0
    assert quality["snap"].late_pair is not None
    assert (quality["snap"].late_pair.lost, quality["snap"].late_pair.gained) == (9, 0)
    assert quality["snap"].kl is None  # no windows were asked for


def test_a_reference_that_finds_little_is_said_so(tokenizer, ids) -> None:
    blind = reader(tokenizer, "full", lambda calls: [])
    perfect = reader(tokenizer, "arm", lambda calls: calls)
    assessment = Assessment(blind, [perfect], tokenizer, ids, QualityPlan(None, PLAN))
    assessment.run()
    quality = assessment.results()["arm"]
    assert any("full cache itself finds only 0 of 9" in note for note in quality.notes)
    assert quality.late_pair is not None
    assert (quality.late_pair.lost, quality.late_pair.gained) == (0, 9)


def test_late_questions_come_token_by_token(tokenizer, ids) -> None:
    arm = reader(tokenizer, "full", lambda calls: calls)
    list(needles([arm], tokenizer, ids, NeedlePlan(600, per_depth=1)))
    questions = [[kind for kind, _ in calls[1:]] for calls in arm.log[1:]]  # the first log is the haystack alone
    assert [kinds[0] for kinds in questions] == ["prefill"] * 3 + ["step"] * 3
    assert all("prefill" not in kinds for kinds in questions[3:])
    assert all(calls[0] == arm.log[0][0] for calls in arm.log)


def test_the_haystack_has_the_asked_length_and_depths(tokenizer, ids) -> None:
    import random

    hidden = _make_needles(tokenizer, PLAN, 2, random.Random(0))
    haystack = _hide(ids, hidden, 600)
    text = tokenizer.decode(haystack)
    assert len(haystack) == 600
    for needle in hidden:
        assert text.count(needle.code) == 1
        place = len(encode(tokenizer, text[: text.index(needle.code)])) / 600
        assert place == pytest.approx(needle.depth, abs=0.12)
    assert len({needle.code for needle in hidden}) == 6


def test_same_seed_same_needles_and_no_question_gives_the_code_away(tokenizer) -> None:
    import random

    first, second = (_make_needles(tokenizer, PLAN, 2, random.Random(5)) for _ in range(2))
    assert [n.code for n in first] == [n.code for n in second]
    assert all(n.code not in tokenizer.decode(n.question) for n in first)
    assert QUESTION.format(owner="A", kind="b").endswith("is")


def test_impossible_haystacks_are_refused(tokenizer, ids) -> None:
    arm = RuleArm("a", lambda calls: torch.zeros(49152))
    with pytest.raises(InputError, match="too small for 6 facts"):
        next(needles([arm], tokenizer, ids, NeedlePlan(60)))
    with pytest.raises(InputError, match="at most 12"):
        next(needles([arm], tokenizer, ids, NeedlePlan(600, facts_per_depth=5)))
    with pytest.raises(InputError, match="a haystack needs 600"):
        next(needles([arm], tokenizer, ids[:500], NeedlePlan(600)))
