"""BlockPool: which blocks of KV memory are held, how often each is shared, and what it contains (the prefix cache).

The same pool runs at each stage, where a block is part of a tensor, and at the origin, where it is only counted. The same calls
in the same order have the same result in both, so the origin knows what fits without asking.

Layers that look back over different distances are in different groups (WindowGroups). A block holds the KV of `block_size`
tokens in the layers of any one group. A table has a row for every `block_size` tokens: a block of each group, side by side.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from copy import copy
from itertools import takewhile

NULL_BLOCK = 0  # never handed out; padding points here, and the front of a table whose blocks no token sees any more


class BlockPool:
    """Blocks of `block_size` tokens each, with the ids in `blocks`, or for `blocks` rows of tables if that is a number.

    A block is free, held (reference count > 0), or idle: not held, but its content can be found by key and shared again,
    until it is the least recently used one and is taken for something else.

    windows: of each group: how many positions a token sees, itself included; None for all before it.
    capacity: rows of tables that fit if no block is behind a window. Leases are counted in rows, too; everything else in blocks.
    """

    def __init__(
        self,
        blocks: int | Sequence[int],
        block_size: int,
        *,
        prefix_cache: bool = True,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        assert block_size > 0
        assert windows
        assert all(window is None or window > 0 for window in windows)
        self.groups = len(windows)
        ids = range(1, blocks * self.groups + 1) if isinstance(blocks, int) else blocks
        self.capacity = len(ids) // self.groups
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.windows = tuple(windows)
        self._bounded = [group for group, window in enumerate(windows) if window is not None]
        self._free = list(reversed(ids))  # a stack: warm blocks are used again first
        self._refs = dict.fromkeys(ids, 0)
        self._key: dict[int, bytes] = {}  # of blocks that can be found
        self._by_key: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # in order of release: the first is the least recently used

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._idle)

    @property
    def blocks(self) -> Iterable[int]:
        return self._refs.keys()

    @property
    def held(self) -> int:
        return self.capacity * self.groups - self.available

    @property
    def held_rows(self) -> int:
        """What is held, in rows of tables."""
        return -(-self.held // self.groups)

    def rows_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def rows_of(self, table: Sequence[int]) -> int:
        return len(table) // self.groups

    def allocate(self) -> int:
        """Take one block for new content. The caller must check `available` first."""
        block = self._take()
        self._refs[block] = 1
        return block

    def extend(self, table: MutableSequence[int], rows: int) -> None:
        """Make a table this long, with new blocks. The caller must check `available` first."""
        for _ in range(rows * self.groups - len(table)):
            table.append(self.allocate())

    def truncate(self, table: MutableSequence[int], rows: int) -> None:
        """Cut a table to this many rows, and release the rest."""
        keep = rows * self.groups
        self.release(table[keep:])
        del table[keep:]

    def shrink(self, rows: int) -> list[int]:
        """Remove blocks for this many rows (at most `available`), and return them."""
        removed = [self._take() for _ in range(rows * self.groups)]
        for block in removed:
            del self._refs[block]  # it has no key: no lookup can find it
        self.capacity -= rows
        return removed

    def grow(self, blocks: Sequence[int]) -> None:
        """Add blocks to the pool, for whole rows."""
        for block in blocks:
            assert block not in self._refs
            self._refs[block] = 0
            self._free.append(block)
        self.capacity += len(blocks) // self.groups

    def first_seen(self, rows: int, group: int = 0) -> int:
        """The first row whose block of a group is still seen by tokens after this many full rows."""
        window = self.windows[group]
        return 0 if window is None else max(0, rows * self.block_size + 1 - window) // self.block_size

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Find the rows of the longest cached prefix of the key chain, without holding them. Blocks that the tokens after it do
        not see need not be cached, and are NULL_BLOCK."""
        if self.windows == (None,):
            return list(takewhile(bool, map(self._by_key.get, keys)))  # type: ignore[arg-type]
        rows, groups = self._cached_rows(keys), self.groups
        found = [NULL_BLOCK] * (rows * groups)
        for group in range(groups):
            for row in range(self.first_seen(rows, group), rows):
                found[row * groups + group] = self._by_key[_name(keys[row], group)]
        return found

    def _cached_rows(self, keys: Sequence[bytes]) -> int:
        """How many rows of the key chain can be used: of a group with a window, those that the next token sees must be cached."""
        rows, by_key = len(keys), self._by_key
        for group, window in enumerate(self.windows):
            if window is None:
                rows = next((row for row in range(rows) if _name(keys[row], group) not in by_key), rows)
        reached = dict.fromkeys(self._bounded, rows)  # by group: from this row on, all are cached up to `rows`
        while True:
            before = rows
            for group in self._bounded:
                row = min(reached[group], rows)
                while row > min(self.first_seen(rows, group), max(rows - 1, 0)):
                    row -= 1
                    if _name(keys[row], group) not in by_key:
                        rows = row
                reached[group] = row
            if rows == before:
                return rows

    def hold(self, found: Iterable[int]) -> None:
        """Share the blocks that `lookup` has found."""
        refs, idle = self._refs, self._idle
        for block in found:
            if block != NULL_BLOCK:
                if not refs[block]:
                    del idle[block]
                refs[block] += 1

    def release_outside_window(self, table: MutableSequence[int], rows: int) -> None:
        """Release the blocks of a table that no token after its first `rows` ones sees, and put NULL_BLOCK in their place."""
        groups = self.groups
        for group in self._bounded:
            end = start = self.first_seen(rows, group)
            while start and table[(start - 1) * groups + group] != NULL_BLOCK:
                start -= 1
            unseen = range(start * groups + group, end * groups, groups)
            self.release([table[i] for i in unseen])
            for i in unseen:
                table[i] = NULL_BLOCK

    def count_idle(self, found: Iterable[int]) -> int:
        """How many of these blocks are idle."""
        return sum(map(self._idle.__contains__, found))

    def commit(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Make rows of a table findable by their keys, except for blocks whose key another block has already."""
        if not self.prefix_cache:
            return
        names = keys if self.groups == 1 else (_name(key, group) for key in keys for group in range(self.groups))
        for block, name in zip(blocks, names, strict=False):
            if block != NULL_BLOCK and block not in self._key and name not in self._by_key:
                self._key[block] = name
                self._by_key[name] = block

    def release(self, table: Iterable[int]) -> None:
        """Release the blocks of a table, the last first, so that the start of a prefix outlives its end."""
        refs, keys, idle = self._refs, self._key, self._idle
        for block in reversed([block for block in table if block != NULL_BLOCK]):
            refs[block] = left = refs[block] - 1
            if not left:
                if block in keys:
                    idle[block] = None
                else:
                    self._free.append(block)

    def exclusive(self, table: Iterable[int]) -> list[int]:
        """The blocks that become available if only this table is released."""
        return [block for block in table if block != NULL_BLOCK and self._refs[block] == 1]

    def refs(self, block: int) -> int:
        return self._refs[block]

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block = next(iter(self._idle))
        del self._idle[block]
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._key.pop(block, None)
        if key is not None:
            del self._by_key[key]


def _name(key: bytes, group: int) -> bytes:
    """The key under which a group's block of a row is found."""
    return key + bytes((group,)) if group else key


class KeyChain:
    """The keys of a sequence's full blocks. Each is a hash of its block and all before it.

    Keyed with a secret of the origin, so that a stage can compare keys but cannot test texts against them.
    owner: begins the chain, so that only sequences of one owner share blocks; "" is the operator.
    """

    def __init__(self, secret: bytes, block_size: int, owner: str = "") -> None:
        self._secret = secret
        self._size = block_size
        self._root = hashlib.blake2b(owner.encode(), key=secret, digest_size=16, person=b"owner").digest() if owner else b""
        self.keys: list[bytes] = []

    def up_to(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of the first `count` blocks of `tokens`. Tokens are only ever appended."""
        keys, size = self.keys, self._size
        if len(keys) < count:
            start = len(keys) * size
            content = array("I", tokens[start : count * size]).tobytes()
            step = len(content) // (count - len(keys))
            last = keys[-1] if keys else self._root
            for at in range(0, len(content), step):
                last = hashlib.blake2b(last + content[at : at + step], key=self._secret, digest_size=16).digest()
                keys.append(last)
        return keys[:count]

    def fork(self) -> KeyChain:
        """A chain that begins with the keys known so far, for another output of the same prompt."""
        other = copy(self)
        other.keys = list(self.keys)
        return other
