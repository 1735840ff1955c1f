"""Full pages that any later sequence with the same beginning may use again.

A node is one logical page of every layer and head. Its name is a hash of its parent's name and its tokens, so it
stands for everything before it as well; the root of a chain is a hash of all that changes the content of pages
(weights, codec, page size, ...) and of the tenant's salt. Parts are typed and length-prefixed, and nothing depends on
PYTHONHASHSEED.

Pages whose keys were computed under sparse attention carry the decode settings in their name: they are found by
requests with the same settings only. Pages stay until `evict` takes the least recently used; parents are always used
later than their children, so the oldest node has none.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.kv.manager import KVManager
from gsm.kv.rules import Rules

if TYPE_CHECKING:
    from gsm.kv.prefix_disk import PrefixDisk

_DIGEST_BYTES = 16


def chain_hash(*parts: str | bytes | Sequence[int]) -> bytes:
    """A digest of typed, length-prefixed parts: ("a", "bc") and ("ab", "c") differ, and so do text and bytes."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        if isinstance(part, str):
            kind, content = b"s", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, bytes):
            kind, content = b"b", part
        else:
            kind, content = b"i", b"".join(int(n).to_bytes(8, "little", signed=True) for n in part)
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return digest.digest()


@dataclass(slots=True)
class Node:
    """One page of every stream: page ids int64 `[rows * H]` for each group of the manager."""

    depth: int
    ids: list[Tensor]
    on_disk: bool = False


@dataclass(slots=True)
class Chain:
    """What a sequence's tokens are called, page by page; grows with the sequence.

    Pages that hold a token from `num_pure_tokens` on were computed under `decode_settings` ("" = nothing special).
    """

    root: bytes
    num_pure_tokens: int
    decode_settings: str
    names: list[bytes] = field(default_factory=list)

    def fork(self) -> Chain:
        return Chain(self.root, self.num_pure_tokens, self.decode_settings, list(self.names))

    def extend(
        self, token_ids: Sequence[int], page_size: int, num_pages: int, is_known: Callable[[bytes], bool]
    ) -> int:
        """Name pages up to `num_pages` while they are known; returns how many are. Tries the pure name first."""
        for page in range(len(self.names), num_pages):
            names = [self._name(token_ids, page_size, page, settings) for settings in self._settings()]
            known = next((name for name in names if is_known(name)), None)
            if known is None:
                return page
            self.names.append(known)
        return num_pages

    def complete(self, token_ids: Sequence[int], page_size: int, num_pages: int) -> None:
        """Name pages up to `num_pages` as this sequence computed them."""
        for page in range(len(self.names), num_pages):
            is_pure = (page + 1) * page_size <= self.num_pure_tokens
            settings = "" if is_pure else self.decode_settings
            self.names.append(self._name(token_ids, page_size, page, settings))

    def _settings(self) -> tuple[str, ...]:
        return ("", self.decode_settings) if self.decode_settings else ("",)

    def _name(self, token_ids: Sequence[int], page_size: int, page: int, settings: str) -> bytes:
        parent = self.names[page - 1] if page else self.root
        return chain_hash(parent, token_ids[page * page_size : (page + 1) * page_size], settings)


class PrefixIndex:
    """Nodes of one manager, in memory and, where `disk` is given, beyond it."""

    def __init__(self, manager: KVManager, fingerprint: str, disk: PrefixDisk | None = None) -> None:
        self.manager = manager
        self.fingerprint = fingerprint
        self.disk = disk
        self.nodes: OrderedDict[bytes, Node] = OrderedDict()  # least recently used first
        manager.holders.append(self._held_ids)
        self.counters = {"queries": 0, "hits": 0, "evicted": 0, "loaded": 0}  # queries and hits in tokens

    def chain(
        self, salt: str, num_pure_tokens: int, decode_settings: str, adapter: str = "", fingerprint: str | None = None
    ) -> Chain:
        """The (still empty) chain of a sequence of tenant `salt`, under another content fingerprint than the index's
        where one is given."""
        root = chain_hash(fingerprint or self.fingerprint, adapter, salt)
        return Chain(root, num_pure_tokens, decode_settings)

    def match(self, chain: Chain, token_ids: Sequence[int], rules: Rules | None = None) -> tuple[int, int]:
        """A new sequence that begins with the longest known prefix: its slot and its length in tokens.

        `rules` are those of `KVManager.add_sequence`. At least one token is left to compute. Pages are owned by the new
        sequence at once.
        """
        page_size = self.manager.config.page_size
        most = (len(token_ids) - 1) // page_size
        chain.names.clear()
        num_pages = chain.extend(token_ids, page_size, most, self.nodes.__contains__)
        if self.disk is not None:
            num_pages = self._load(chain, token_ids, most)
        self.counters["queries"] += len(token_ids)
        self.counters["hits"] += num_pages * page_size
        self._touch(chain.names)
        slot = self.manager.add_sequence(rules)
        if num_pages:
            self._adopt(slot, [self.nodes[name] for name in chain.names])
        return slot, num_pages * page_size

    def insert(self, chain: Chain, slot: int, token_ids: Sequence[int], first: int, last: int) -> None:
        """Keep pages [first, last) of a sequence; `last` may not exceed its completed pages."""
        page_size = self.manager.config.page_size
        chain.complete(token_ids, page_size, last)
        for page in range(first, last):
            name = chain.names[page]
            if name not in self.nodes and (page == 0 or chain.names[page - 1] in self.nodes):
                node = self._node_of(slot, page)
                if node is None:
                    break
                self._own(node)
                self.nodes[name] = node
        self._touch(chain.names[:last])

    def evict(self) -> bool:
        """Give back the oldest page that nobody else holds; False when there is none."""
        for name, node in self.nodes.items():
            if self._is_idle(node):
                if self.disk is not None and not node.on_disk:
                    self.disk.save(name, node)
                self._forget(name)
                self.counters["evicted"] += 1
                return True
        return False

    def clear(self) -> None:
        """Give back everything (pages that sequences hold stay theirs)."""
        for name in list(self.nodes):
            self._forget(name)

    @property
    def num_pages(self) -> int:
        return len(self.nodes)

    def save_some(self, most: int) -> int:
        """Write up to `most` nodes that are not on disk yet; returns how many were written. For idle moments."""
        if self.disk is None:
            return 0
        todo = [(name, node) for name, node in self.nodes.items() if not node.on_disk][:most]
        for name, node in todo:
            self.disk.save(name, node)
            node.on_disk = True  # a failed write is not tried again
        return len(todo)

    def _held_ids(self, group_number: int) -> Tensor:
        """Page ids int64 that the index owns in a group, for `KVManager.check_integrity`."""
        found = [node.ids[group_number] for node in self.nodes.values()]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    # -- pages -------------------------------------------------------------------------------------------------

    def _node_of(self, slot: int, page: int) -> Node | None:
        columns = [group.table[slot, : len(group.rows), :, page].reshape(-1).long() for group in self.manager.groups]
        return Node(page, columns) if all(bool((ids >= 0).all()) for ids in columns) else None

    def _adopt(self, slot: int, nodes: list[Node]) -> None:
        """Make `nodes` the beginning of the empty sequence `slot`; it claims the sinks alone in full precision."""
        num_pages, sinks = len(nodes), self.manager.config.num_sink_pages
        for index, group in enumerate(self.manager.groups):
            group.fit_table(slot + 1, num_pages)
            ids = torch.stack([node.ids[index] for node in nodes])  # [pages, rows * H]
            group.pages.retain(ids.reshape(-1))
            group.pages.fields["hot_refs"][ids[:sinks].reshape(-1)] += 1
            rows = ids.view(num_pages, len(group.rows), -1).permute(1, 2, 0)
            group.table[slot, : len(group.rows), :, :num_pages] = rows.int()
        state = self.manager.sequences[slot]
        state.num_tokens = num_pages * self.manager.config.page_size
        state.num_complete = num_pages
        state.demoted = range(sinks, max(sinks, num_pages))

    def _own(self, node: Node) -> None:
        """The index becomes an owner of a page; sinks are kept in full precision as every sequence keeps them."""
        for group, ids in zip(self.manager.groups, node.ids, strict=True):
            group.pages.retain(ids)
            if node.depth < self.manager.config.num_sink_pages:
                group.pages.fields["hot_refs"][ids] += 1

    def _forget(self, name: bytes) -> None:
        node = self.nodes.pop(name)
        wants_hot = node.depth < self.manager.config.num_sink_pages
        for group, ids in zip(self.manager.groups, node.ids, strict=True):
            group._release(ids, wants_hot)

    def _is_idle(self, node: Node) -> bool:
        return all(int(group.pages.refs[ids[0]]) == 1 for group, ids in zip(self.manager.groups, node.ids, strict=True))

    def _touch(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            if name in self.nodes:
                self.nodes.move_to_end(name)

    def _load(self, chain: Chain, token_ids: Sequence[int], most: int) -> int:
        """Continue a match on disk: everything that is there is read at once."""
        disk = self.disk
        assert disk is not None
        page_size, num_known = self.manager.config.page_size, len(chain.names)
        chain.extend(token_ids, page_size, most, lambda name: name in self.nodes or disk.has(name))
        for page in range(num_known, len(chain.names)):
            name = chain.names[page]
            node = self.nodes.get(name) or disk.load(name, page)
            if node is None:
                del chain.names[page:]
                break
            if name not in self.nodes:
                self.nodes[name] = node
                self.counters["loaded"] += 1
        return len(chain.names)
