"""Blocks of KV memory: who holds which, how often it is shared, and what it contains (the prefix cache).

The same pool runs at each stage, where a block is a place in a tensor, and at the origin, where it is only counted:
given the same calls in the same order both come to the same end, so the origin knows what fits without asking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0  # never handed out; padding points here


class BlockPool:
    """Blocks of `block_size` tokens each: those given, or 1 to `blocks`. Nothing depends on what they are called.

    A block is free, held (reference count > 0), or idle: nobody holds it but its content is known by key, so it can be
    shared again until the least recently used of them is taken for something else.
    """

    def __init__(self, blocks: int | Sequence[int], block_size: int, *, prefix_cache: bool = True) -> None:
        assert block_size > 0
        ids = range(1, blocks + 1) if isinstance(blocks, int) else blocks
        self.capacity, self.block_size, self.prefix_cache = len(ids), block_size, prefix_cache
        self._free = list(reversed(ids))  # a stack: warm blocks are used again first
        self._refs = dict.fromkeys(ids, 0)
        self._key: dict[int, bytes | None] = dict.fromkeys(ids)
        self._by_key: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # in order of release: the first is the least recently used

    @property
    def available(self) -> int:
        """Blocks that can be allocated now (the published headroom)."""
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
        """One block for new content. The caller has looked at `available`."""
        block = self._take()
        self._refs[block] = 1
        return block

    def shrink(self, count: int) -> list[int]:
        """Make the pool smaller by so many blocks (`available` at most), and say which."""
        removed = [self._take() for _ in range(count)]
        for block in removed:
            del self._refs[block], self._key[block]
        self.capacity -= count
        return removed

    def grow(self, blocks: Iterable[int]) -> None:
        """Make the pool larger."""
        for block in blocks:
            assert block not in self._refs
            self._refs[block], self._key[block] = 0, None
            self._free.append(block)
            self.capacity += 1

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of the key chain. Takes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def share(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def commit(self, block: int, key: bytes) -> None:
        """From now on the block can be found by its content. A content that another block holds already stays there."""
        if self.prefix_cache and self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def release(self, table: Iterable[int]) -> None:
        """Give the blocks of a table back, the last first, so that the head of a prefix outlives its tail."""
        for block in reversed(list(table)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def exclusive(self, table: Iterable[int]) -> list[int]:
        """The blocks that become available when this table alone is released."""
        return [block for block in table if self._refs[block] == 1]

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
    """The keys of a sequence's full blocks: each covers its block and all before it.

    Keyed with a secret of the origin's: a stage can compare keys but cannot try out texts against them.
    """

    def __init__(self, secret: bytes, block_size: int) -> None:
        self._secret, self._size = secret, block_size
        self.keys: list[bytes] = []

    def up_to(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of the first `count` blocks of `tokens`, whose earlier part never changes."""
        keys, size = self.keys, self._size
        while len(keys) < count:
            at = len(keys) * size
            hasher = hashlib.blake2b(keys[-1] if keys else b"", key=self._secret, digest_size=16)
            for token in tokens[at : at + size]:
                hasher.update(token.to_bytes(4, "little"))
            keys.append(hasher.digest())
        return keys[:count]
