from pathlib import Path

import pytest

from gsm.errors import ConfigError, InputError
from gsm.measure.load.target import Target, parse_arm, parse_body, parse_headers, parse_url
from gsm.measure.load.workload import Prompt, SyntheticWorkload, read_prompts


@pytest.mark.parametrize(
    ("url", "root", "api"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1", "chat"),
        ("http://localhost:8000/", "http://localhost:8000/v1", "chat"),
        ("https://host/v1", "https://host/v1", "chat"),
        ("https://host/openai/v1/", "https://host/openai/v1", "chat"),
        ("http://host/v1/chat/completions", "http://host/v1", "chat"),
        ("http://host/v1/completions", "http://host/v1", "completions"),
        ("http://[::1]:80", "http://[::1]:80/v1", "chat"),
    ],
)
def test_what_users_type_becomes_a_root(url: str, root: str, api: str) -> None:
    assert parse_url(url) == (root, api)


def test_the_api_can_be_chosen_but_not_against_the_url() -> None:
    assert parse_url("http://host", "completions") == ("http://host/v1", "completions")
    with pytest.raises(ConfigError, match="--api says chat"):
        parse_url("http://host/v1/completions", "chat")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "", "http://h/v1?x=1"])
def test_other_urls_are_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://localhost:8000|--header"):
        parse_url(url)


def test_headers_and_body_fields() -> None:
    assert parse_headers(["X-A: b:c", "X-B=d=e"]) == {"X-A": "b:c", "X-B": "d=e"}
    body = parse_body(["temperature=0", "a.b=true", "a.c=text", 'stop=["x"]'])
    assert body == {"temperature": 0, "a": {"b": True, "c": "text"}, "stop": ["x"]}


@pytest.mark.parametrize("item", ["novalue", "=x", ": x", "X-A: b\r\nX-B: c", "X A=1", "\u00e9=1"])
def test_bad_headers_are_refused(item: str) -> None:
    with pytest.raises(ConfigError):
        parse_headers([item])


@pytest.mark.parametrize("items", [["novalue"], ["=1"], ["a..b=1"], ["a=1", "a.b=2"]])
def test_bad_body_fields_are_refused(items: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_body(items)


@pytest.mark.parametrize("body", [{"n": 2}, {"stream": False}])
def test_body_fields_that_would_break_the_measurement_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Target("http://host/v1", body=body)


def test_arms_differ_in_what_they_name_and_leave_the_base_alone() -> None:
    base = Target("http://a/v1", headers={"X": "1"}, body={"deep": {"one": 1}})
    assert parse_arm(base, "http://b:1").url == "http://b:1/v1"
    assert parse_arm(base, "header:Y=2").headers == {"X": "1", "Y": "2"}
    assert parse_arm(base, "body:deep.two=2").body == {"deep": {"one": 1, "two": 2}}
    assert base.body == {"deep": {"one": 1}}
    with pytest.raises(ConfigError, match="neither a URL"):
        parse_arm(base, "temperature=1")


def test_credentials_do_not_reach_a_report() -> None:
    target = Target("http://user:pw@host/v1", headers={"Authorization": "Bearer abc", "X-Mode": "b"})
    shown = str(target.describe())
    assert "abc" not in shown
    assert "pw" not in shown
    assert "'X-Mode': 'b'" in shown


def test_synthetic_prompts_share_exactly_their_prefix() -> None:
    workload = SyntheticWorkload(num_prompt_tokens=200, num_output_tokens=8, prefix_share=0.75, seed=3)
    first, second = (str(workload.prompt("measured", i).content).split() for i in (0, 1))
    assert len(first) == len(second) == 200
    assert first[:150] == second[:150]
    assert first[150:160] != second[150:160]
    assert workload.prompt("measured", 0) == workload.prompt("measured", 0)
    assert workload.prompt("measured", 0) != workload.prompt("warmup", 0), "a warm-up must not fill the prefix cache"
    assert workload.prompt("measured", 0) != SyntheticWorkload(200, 8, 0.75, seed=4).prompt("measured", 0)


@pytest.mark.parametrize("sizes", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, 1.5), (1, 1, -0.1)])
def test_impossible_synthetic_prompts_are_refused(sizes: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError):
        SyntheticWorkload(*sizes)


def test_prompts_from_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    workload = read_prompts(text, 16)
    assert [workload.prompt("measured", i).content for i in range(3)] == ["one", "two", "one"]
    assert workload.prompt("warmup", 0).content == "two"

    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 4}\n')
    workload = read_prompts(lines, 16)
    assert workload.prompt("measured", 0) == Prompt("a", 16)
    assert workload.prompt("measured", 1) == Prompt([{"role": "user", "content": "b"}], 4)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"messages": [3]}', '{"prompt": "a", "max_tokens": 0}'],
)
def test_a_bad_line_of_a_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_prompts(path, 16)


def test_missing_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "absent.txt", 16)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InputError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt", 16)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "binary.txt", 16)
