"""Prefix pages in files: one file per page of every stream, written whole or not at all, checked when read.

    magic (8 bytes) | length of the header (4) | header (JSON) | payload | BLAKE2b of all before (16)

The header names the format's version, the content fingerprint and the fields of the payload. Older pages are stored
as the codes they have (or get) in memory, so a page is the same bytes in every tier; sinks are stored in full
precision, as they are kept. A file that is damaged, of another version or of another model is removed, told once, and
its page computed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gsm.core.codec import CODECS, Codec, Fields, FieldSpec
from gsm.errors import ConfigError, KVError, OutOfPages
from gsm.kv.group import StreamGroup
from gsm.kv.manager import KVManager
from gsm.kv.prefix import Node

_log = logging.getLogger("gsm")
_MAGIC, _VERSION, _DIGEST_BYTES = b"GSMPAGE\n", 1, 16
_SUFFIX = ".page"


class PrefixDisk:
    """A directory of pages of one content fingerprint, at most `max_bytes` large; the least recently used go first.

    Raises ConfigError when the directory cannot be used. Later failures of the file system are logged and cost reuse.
    """

    def __init__(self, manager: KVManager, directory: Path, fingerprint: str, max_bytes: int) -> None:
        self.manager = manager
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.directory = directory / fingerprint
        self.counters = {"saved": 0, "loaded": 0, "damaged": 0, "removed": 0}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sizes = {entry.name: entry.stat().st_size for entry in self._oldest_first()}
        except OSError as error:
            raise ConfigError(f"the prefix directory {directory} cannot be used: {error.strerror or error}") from None

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def has(self, name: bytes) -> bool:
        return self._file(name).name in self._sizes

    def save(self, name: bytes, node: Node) -> None:
        """Write a page that is in memory. Failures are logged."""
        file = self._file(name)
        if file.name in self._sizes:
            return
        fields: Fields = {}
        for number, group in enumerate(self.manager.groups):
            fields |= {f"{number}.{key}": value for key, value in self._pack(group, node, number).items()}
        content = _encode({"version": _VERSION, "fingerprint": self.fingerprint, "depth": node.depth}, fields)
        try:
            _write(file, content)
        except OSError as error:
            _log.warning("prefix page %s could not be written: %s", file, error)
            return
        self._sizes[file.name] = len(content)
        self.counters["saved"] += 1
        self._shrink()

    def load(self, name: bytes, depth: int) -> Node | None:
        """A page read back into memory, owned by the caller; None when it cannot be used (then its file is gone)."""
        file = self._file(name)
        try:
            header, fields = _decode(file.read_bytes())
            if (header["version"], header["fingerprint"], header["depth"]) != (_VERSION, self.fingerprint, depth):
                raise KVError("it belongs to another version, model or place")
            ids = [self._unpack(group, depth, _of_group(fields, i)) for i, group in enumerate(self.manager.groups)]
        except OutOfPages:
            return None
        except (OSError, KVError, KeyError, ValueError, TypeError) as error:
            _log.warning("prefix page %s is not usable (%s); it was removed and is computed anew", file, error)
            self.counters["damaged"] += 1
            self._remove(file.name)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        self.counters["loaded"] += 1
        return Node(depth, ids, on_disk=True)

    # -- content -----------------------------------------------------------------------------------------------

    def _codec(self, group: StreamGroup, depth: int) -> Codec:
        is_sink = depth < self.manager.config.num_sink_pages
        return CODECS["none"] if is_sink or group.warm is None else group.codec

    def _pack(self, group: StreamGroup, node: Node, number: int) -> Fields:
        """Tokens `[rows * H, ...]` as the page's tier stores them, and the summaries of their keys."""
        ids, codec = node.ids[number], self._codec(group, node.depth)
        records = group.pages.fields
        warm = records["warm"][ids].long()
        if codec.name != "none" and group.warm is not None and bool((warm >= 0).all()):
            tokens = {name: field[warm] for name, field in group.warm.fields.items()}
        else:
            tokens = codec.encode(*group._tokens(ids))
        return tokens | {f"summary.{name}": records[name][ids] for name in _summary_fields(group)}

    def _unpack(self, group: StreamGroup, depth: int, fields: Fields) -> Tensor:
        """New pages with this content, int64 ids `[rows * H]`."""
        codec, num_pages = self._codec(group, depth), group.streams_per_slot
        g = group.geometry
        expected = codec.fields(group.page_size, g.k_dim, g.v_dim, g.dtype)
        for name, (shape, dtype) in expected.items():
            if tuple(fields[name].shape) != (num_pages, *shape) or fields[name].dtype != dtype:
                raise KVError(f"field {name} has another shape or type than this model's pages")
        for name in _summary_fields(group):
            if len(fields[f"summary.{name}"]) != num_pages:
                raise KVError(f"field summary.{name} has another shape than this model's pages")
        return insert_pages(group, codec.name, {name: fields[name] for name in expected}, _summaries(group, fields))

    # -- files -------------------------------------------------------------------------------------------------

    def _file(self, name: bytes) -> Path:
        return self.directory / (name.hex() + _SUFFIX)

    def _oldest_first(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.directory) as entries:
            found = [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        return sorted(found, key=lambda entry: entry.stat().st_mtime)

    def _remove(self, file_name: str) -> None:
        self._sizes.pop(file_name, None)
        with contextlib.suppress(OSError):
            (self.directory / file_name).unlink()

    def _shrink(self) -> None:
        """Down to nine tenths of the limit, so that it does not happen at every page."""
        if self.num_bytes <= self.max_bytes:
            return
        with contextlib.suppress(OSError):
            for entry in self._oldest_first():
                if self.num_bytes <= 0.9 * self.max_bytes:
                    return
                self._remove(entry.name)
                self.counters["removed"] += 1


def insert_pages(group: StreamGroup, codec_name: str, tokens: Fields, summaries: Fields) -> Tensor:
    """New pages (int64 ids `[N]`, one owner each) of stored content: codes, or full precision for codec `none`.

    Raises OutOfPages, in which case nothing changed.
    """
    num_pages = len(next(iter(tokens.values())))
    if codec_name == "none":
        ids = group._new_pages(num_pages)
        units, pool = group.pages.fields["hot"][ids].long(), group.hot
    else:
        assert group.warm is not None
        group.warm.reserve(num_pages)
        ids, pool = group.pages.allocate(num_pages), group.warm
        units = pool.allocate(num_pages)
        records = group.pages.fields
        for name, value in (("hot", -1), ("cold", -1), ("hot_refs", 0), ("skip", 0), ("reopened", 0)):
            records[name][ids] = value
        records["warm"][ids] = units.int()
        if group.statistics is not None:
            records["observed"][ids] = 0
    for name, values in tokens.items():
        pool.fields[name][units] = values.to(group.geometry.device)
    for name, values in summaries.items():
        group.pages.fields[name][ids] = values.to(group.geometry.device)
    return ids


def _of_group(fields: Fields, number: int) -> Fields:
    prefix = f"{number}."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _summary_fields(group: StreamGroup) -> FieldSpec:
    return group.scorer.fields(group.geometry.k_dim)


def _summaries(group: StreamGroup, fields: Fields) -> Fields:
    return {name: fields[f"summary.{name}"] for name in _summary_fields(group)}


def _encode(header: dict[str, object], fields: Fields) -> bytes:
    layout = {name: [str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in fields.items()}
    text = json.dumps(header | {"fields": layout}).encode()
    payload = b"".join(value.contiguous().cpu().view(torch.uint8).numpy().tobytes() for value in fields.values())
    content = _MAGIC + len(text).to_bytes(4, "little") + text + payload
    return content + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _decode(content: bytes) -> tuple[dict[str, object], Fields]:
    """Header and fields; raises KVError when anything is not as it was written."""
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC) or hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise KVError("its checksum does not match: the file is damaged or cut off")
    start = len(_MAGIC) + 4
    length = int.from_bytes(body[len(_MAGIC) : start], "little")
    header = json.loads(body[start : start + length])
    fields, at, buffer = {}, start + length, bytearray(body)
    for name, (kind, shape) in header["fields"].items():
        dtype = getattr(torch, kind)
        count = 1
        for size in shape:
            count *= size
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
        fields[name] = raw.clone().view(dtype).view(shape)
        at += count * dtype.itemsize
    return header, fields


def _write(file: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
