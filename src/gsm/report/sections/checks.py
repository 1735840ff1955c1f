"""`gsm eval`, `gsm diagnose` and `gsm doctor`: what passed, what did not, and what to do."""

from __future__ import annotations

from typing import Any

from gsm.report.numbers import mebibytes, number
from gsm.report.page import Block, Note, Section, Table, Verdict
from gsm.report.sections.common import environment_notes, facts, notes_of, quality_rows
from gsm.results.kinds import ResultFile


def eval_section(result: ResultFile) -> Section:
    data = result.data
    tolerance = data["tolerance"]
    blocks: list[Block] = [*eval_verdicts(result), *environment_notes(data)]
    blocks.append(Table("Quality against the full cache", ["", "config"], quality_rows([data["quality"]])))
    blocks += notes_of(data["quality"].get("notes"))
    return Section(
        title=f"Quality after {data['workload']['prompt_tokens']:,} tokens",
        sources=[result.name],
        lead=f"Tolerance: KL at most {tolerance['kl']:g} nats per token (upper end of its interval), at most "
        f"{tolerance['needles_lost']} needles lost per case.",
        blocks=blocks,
        command=data["environment"]["command"],
        facts=facts(data["environment"]),
    )


def eval_verdicts(result: ResultFile) -> list[Verdict]:
    data = result.data
    where = f"after {data['workload']['prompt_tokens']:,} tokens"
    if data["passed"]:
        return [Verdict("good", f"Quality {where} is inside the tolerance.", result.name)]
    return [Verdict("bad", f"Quality {where} misses the tolerance: {'; '.join(data['failures'])}.", result.name)]


def diagnose_section(result: ResultFile) -> Section:
    data = result.data
    rows = [
        [finding["cause"], finding["symptom"], finding["evidence"], finding["remedy"]] for finding in data["findings"]
    ]
    blocks: list[Block] = [*diagnose_verdicts(result)]
    if rows:
        blocks.append(Table("Findings", ["cause", "symptom", "evidence", "remedy"], rows))
    checked = [[item["what"], item["found"]] for item in data["checked"]]
    blocks.append(Table("What was checked", ["check", "found"], checked))
    blocks += notes_of(data.get("notes"))
    env = data.get("environment") or {}
    return Section("Diagnosis", [result.name], blocks=blocks, command=env.get("command", ""), facts=facts(env))


def diagnose_verdicts(result: ResultFile) -> list[Verdict]:
    findings = result.data["findings"]
    if not findings:
        return [Verdict("good", "Nothing wrong was found.", result.name)]
    return [
        Verdict("warn" if item.get("advice") else "bad", f"{item['cause']}: {item['evidence']}.", result.name)
        for item in findings
    ]


def generate_section(result: ResultFile) -> Section:
    data = result.data
    rows = [
        ["prompt tokens", f"{data['prompt_tokens']:,}"],
        ["new tokens", f"{data['new_tokens']:,}"],
        ["first token, ms", number(data.get("ttft_ms"))],
        ["each token, ms", number(data.get("tpot_ms"))],
        ["KV cache, MiB", mebibytes(data.get("kv_bytes"))],
        ["tokens attended", number(data.get("attended_tokens_mean"), 4)],
    ]
    env = data["environment"]
    blocks: list[Block] = [Table("What it cost", ["", "value"], rows), Note(data["text"])]
    return Section("A generated text", [result.name], blocks=blocks, command=env["command"], facts=facts(env))


def no_verdicts(result: ResultFile) -> list[Verdict]:
    """For results that decide nothing."""
    return []


def doctor_section(result: ResultFile) -> Section:
    data = result.data
    rows = [
        [check["section"], check["name"], check["status"], check["found"], check.get("remedy", "")]
        for check in data["checks"]
    ]
    table = Table("Checks", ["section", "check", "status", "found", "remedy"], rows)
    return Section("Doctor", [result.name], blocks=[*doctor_verdicts(result), table])


def doctor_verdicts(result: ResultFile) -> list[Verdict]:
    problems = [check for check in result.data["checks"] if check["status"] == "problem"]
    if not problems:
        return [Verdict("good", f"{_subject(result.data)} is ready.", result.name)]
    return [Verdict("bad", f"{check['name']}: {check['found']}. {check['remedy']}", result.name) for check in problems]


def _subject(data: dict[str, Any]) -> str:
    return f"This machine with {data['model']}" if data.get("model") else "This machine"
