"""Server-sent events, byte by byte as they arrive (WHATWG HTML, section 9.2)."""

from __future__ import annotations

MAX_EVENT_BYTES = 4 << 20  # a server that never ends its line must not fill our memory


class SSEParser:
    """Incremental parser of a `text/event-stream` body: network chunks in, `data` payloads out.

    Lines may end in LF, CRLF or CR; several `data:` lines of one event are joined by newlines; comments and other
    fields are ignored. Bytes are decoded per line, never per network chunk, so a character cut in two stays whole.
    `feed` and `close` raise UnicodeDecodeError for bytes that are no UTF-8 and ValueError for an event beyond
    `MAX_EVENT_BYTES`.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the line that has not ended yet
        self._data: list[str] = []  # data lines of the event that has not ended yet
        self._data_bytes = 0
        self._ended_in_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """The payloads of all events that `chunk` completes."""
        if not chunk:
            return []
        if self._ended_in_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the other half of a CRLF that was cut in two
        self._ended_in_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._rest += chunk
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES + len(chunk):
            raise ValueError(f"an event of the stream is larger than {MAX_EVENT_BYTES} bytes")
        if b"\n" not in chunk:
            return []
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        return [payload for line in lines if (payload := self._line(line)) is not None]

    def close(self) -> list[str]:
        """The payload of a last event that lacks its blank line, as some servers send it."""
        line, self._rest = self._rest, bytearray()
        payloads = [self._line(line), self._line(bytearray())]
        return [payload for payload in payloads if payload is not None]

    def _line(self, line: bytearray) -> str | None:
        """Takes one line; returns the event's payload when the line is the blank one that ends it."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._end_event()
        if line.startswith(b"data"):
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode())
                self._data_bytes += len(line)
        return None

    def _end_event(self) -> str | None:
        if not self._data:
            return None
        payload = self._data[0] if len(self._data) == 1 else "\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        return payload
