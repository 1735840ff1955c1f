import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsm.measure.load import sse
from gsm.measure.load.sse import SSEParser


def parse(body: bytes, *cuts: int) -> list[str]:
    parser, start, payloads = SSEParser(), 0, []
    for cut in (*sorted(cuts), len(body)):
        payloads += parser.feed(body[start:cut])
        start = cut
    return payloads + parser.close()


@pytest.mark.parametrize(
    ("body", "payloads"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a \n\n", [" a "]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: first\ndata: second\n\n", ["first\nsecond"]),
        (b": ping\n\nevent: x\nid: 7\nretry: 1\ndata: a\n\n: ping\n\n", ["a"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"data\n\n", [""]),
        (b"data: no blank line after the last", ["no blank line after the last"]),
        (b"database: no\ndata2: no\n\n", []),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_forms_of_an_event(body: bytes, payloads: list[str]) -> None:
    assert parse(body) == payloads
    assert parse(body, *range(len(body))) == payloads, "cut after every byte"


TEXT = "data: héé 🎉 漢字\r\ndata: zwei\r\n\r\ndata: 👩‍👩‍👧 \n\n".encode()


@given(st.lists(st.integers(0, len(TEXT)), max_size=8))
def test_no_cut_of_the_network_changes_a_character(cuts: list[int]) -> None:  # CASES.md E10
    assert parse(TEXT, *cuts) == ["héé 🎉 漢字\nzwei", "👩‍👩‍👧 "]


def test_an_event_is_given_out_as_soon_as_its_blank_line_arrives() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == ["a"]
    assert parser.feed(b"data: b\r\n\r") == ["b"], "without waiting for the LF that may follow"
    assert parser.feed(b"\ndata: c\n\n") == ["c"]


def test_bytes_that_are_no_text_are_an_error_and_not_replaced() -> None:
    with pytest.raises(UnicodeDecodeError):
        parse(b"data: \xff\n\n")


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch, line_end: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    line = b"data: 0123456789" + line_end
    with pytest.raises(ValueError, match="larger than 1000 bytes"):
        parse(200 * line, *range(0, 200 * len(line), len(line)))
