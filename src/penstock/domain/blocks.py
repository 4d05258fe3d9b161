"""BlockPool: which blocks of KV memory are held, how often each is shared, and what it contains (the prefix cache).

The same pool runs at each stage, where a block is part of a tensor, and at the origin, where it is only counted. The same calls
in the same order have the same result in both, so the origin knows what fits without asking.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from copy import copy
from itertools import takewhile

NULL_BLOCK = 0  # never handed out; padding points here, and the front of a table whose blocks no token sees any more


class BlockPool:
    """Blocks of `block_size` tokens each, with the ids in `blocks`, or 1 to `blocks` if that is a number.

    A block is free, held (reference count > 0), or idle: not held, but its content can be found by key and shared again,
    until it is the least recently used one and is taken for something else.

    window: how many positions a token sees, itself included; None for all before it.
    """

    def __init__(
        self, blocks: int | Sequence[int], block_size: int, *, prefix_cache: bool = True, window: int | None = None
    ) -> None:
        assert block_size > 0
        assert window is None or window > 0
        ids = range(1, blocks + 1) if isinstance(blocks, int) else blocks
        self.capacity = len(ids)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.window = window
        self._free = list(reversed(ids))  # a stack: warm blocks are used again first
        self._refs = dict.fromkeys(ids, 0)
        self._key: dict[int, bytes | None] = dict.fromkeys(ids)
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
        return self.capacity - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """Take one block for new content. The caller must check `available` first."""
        block = self._take()
        self._refs[block] = 1
        return block

    def shrink(self, count: int) -> list[int]:
        """Remove this many blocks (at most `available`), and return them."""
        removed = [self._take() for _ in range(count)]
        for block in removed:
            del self._refs[block], self._key[block]
        self.capacity -= count
        return removed

    def grow(self, blocks: Iterable[int]) -> None:
        """Add blocks to the pool."""
        for block in blocks:
            assert block not in self._refs
            self._refs[block], self._key[block] = 0, None
            self._free.append(block)
            self.capacity += 1

    def first_seen(self, blocks: int) -> int:
        """The first block that the tokens after this many full ones see."""
        return 0 if self.window is None else max(0, blocks * self.block_size + 1 - self.window) // self.block_size

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Find the blocks of the longest cached prefix of the key chain, without holding them. Those that the tokens after it do
        not see need not be cached, and are NULL_BLOCK."""
        if self.window is None:
            return list(takewhile(bool, map(self._by_key.get, keys)))  # type: ignore[arg-type]
        found: list[int] = []
        usable = cached = 0  # cached: how many in a row
        for key in keys:
            block = self._by_key.get(key, NULL_BLOCK)
            found.append(block)
            cached = cached + 1 if block != NULL_BLOCK else 0
            if cached and cached >= len(found) - self.first_seen(len(found)):
                usable = len(found)
        unseen = self.first_seen(usable)
        return [NULL_BLOCK] * unseen + found[unseen:usable]

    def hold(self, found: Iterable[int]) -> None:
        """Share the blocks that `lookup` has found."""
        refs, idle = self._refs, self._idle
        for block in found:
            if block != NULL_BLOCK:
                if not refs[block]:
                    del idle[block]
                refs[block] += 1

    def release_unseen(self, table: MutableSequence[int], blocks: int) -> None:
        """Release the blocks of a table that no token after its first `blocks` ones sees, and put NULL_BLOCK in their place."""
        end = start = self.first_seen(blocks)
        while start and table[start - 1] != NULL_BLOCK:
            start -= 1
        self.release(table[start:end])
        for i in range(start, end):
            table[i] = NULL_BLOCK

    def count_idle(self, found: Iterable[int]) -> int:
        """How many of these blocks are idle."""
        return sum(map(self._idle.__contains__, found))

    def commit(self, block: int, key: bytes) -> None:
        """Make a block findable by its key, unless another block has that key already."""
        if self.prefix_cache and block != NULL_BLOCK and self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def release(self, table: Iterable[int]) -> None:
        """Release the blocks of a table, the last first, so that the start of a prefix outlives its end."""
        refs, keys, idle = self._refs, self._key, self._idle
        for block in reversed([block for block in table if block != NULL_BLOCK]):
            refs[block] = left = refs[block] - 1
            if not left:
                if keys[block] is None:
                    self._free.append(block)
                else:
                    idle[block] = None

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
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None


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
