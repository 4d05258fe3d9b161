"""Blocks and their content: sharing, eviction, and that two pools with the same history agree."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.domain.blocks import NULL_BLOCK, BlockPool, KeyChain


def test_a_released_block_with_known_content_is_found_again() -> None:
    pool = BlockPool(4, 16)
    block = pool.allocate()
    pool.commit([block], [b"key"])
    pool.release([block])
    assert pool.lookup([b"key"]) == [block]
    assert pool.available == 4


def test_the_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(2, 16)
    for key in (b"old", b"new"):
        block = pool.allocate()
        pool.commit([block], [key])
        pool.release([block])
    pool.allocate()
    assert pool.lookup([b"old"]) == []
    assert len(pool.lookup([b"new"])) == 1


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    pool = BlockPool(2, 16)
    table = [pool.allocate(), pool.allocate()]
    for block, key in zip(table, (b"head", b"tail"), strict=True):
        pool.commit([block], [key])
    pool.release(table)
    pool.allocate()
    assert pool.lookup([b"head", b"tail"]) == [table[0]]


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    pool = BlockPool(2, 16, prefix_cache=False)
    block = pool.allocate()
    pool.commit([block], [b"key"])
    pool.release([block])
    assert pool.lookup([b"key"]) == []


def test_a_key_covers_everything_before_it() -> None:
    one, other = KeyChain(b"s", 2), KeyChain(b"s", 2)
    assert one.up_to([1, 2, 3, 4], 2)[1] != other.up_to([9, 2, 3, 4], 2)[1]


def test_keys_mean_nothing_without_the_origins_secret() -> None:
    assert KeyChain(b"a", 2).up_to([1, 2], 1) != KeyChain(b"b", 2).up_to([1, 2], 1)


def test_a_chain_begins_with_its_owner() -> None:
    tokens = [1, 2, 3, 4]
    keys = [KeyChain(b"a", 2, owner).up_to(tokens, 2) for owner in ("", "x", "y", "x")]
    assert keys[1] == keys[3]
    assert len({key for chain in keys[:3] for key in chain}) == 6, "no block of one owner is found by another"


def filled(pool: BlockPool, blocks: int) -> tuple[list[int], list[bytes]]:
    """A table whose blocks are all known by their keys."""
    table, keys = [pool.allocate() for _ in range(blocks)], [bytes([i]) for i in range(blocks)]
    for block, key in zip(table, keys, strict=True):
        pool.commit([block], [key])
    return table, keys


def test_blocks_before_the_window_are_released_and_leave_an_empty_front() -> None:
    pool = BlockPool(8, 4, windows=(6,))
    table, _ = filled(pool, 5)
    before = list(table)
    pool.release_outside_window(table, 4)  # the next token, at position 16, sees 11 to 16
    assert table == [NULL_BLOCK, NULL_BLOCK, *before[2:]]
    assert pool.available == 8 - 3
    pool.release_outside_window(table, 4)
    pool.release_outside_window(table, 2)
    assert pool.available == 8 - 3
    assert pool.exclusive(table) == before[2:]
    pool.release(table)
    assert pool.available == 8


def test_a_cached_prefix_needs_only_the_blocks_that_the_next_token_sees() -> None:
    pool = BlockPool(6, 4, windows=(6,))
    table, keys = filled(pool, 5)
    before = list(table)
    pool.release_outside_window(table, 4)
    for _ in range(3):
        pool.allocate()  # takes the one that was never used, and evicts the two that are idle
    assert pool.lookup(keys) == [NULL_BLOCK] * 3 + before[3:]
    assert pool.lookup(keys[:4]) == [NULL_BLOCK] * 2 + before[2:4]
    assert pool.lookup(keys[:3]) == [], "its second block is gone"
    held = pool.held
    pool.hold(pool.lookup(keys))
    assert pool.held == held
    assert [pool.refs(block) for block in before[2:]] == [1, 2, 2]


def test_what_is_no_block_any_more_gets_no_key() -> None:
    pool = BlockPool(2, 4, windows=(1,))
    pool.commit([NULL_BLOCK], [b"key"])
    assert pool.lookup([b"key"]) == []


class TwinPools(RuleBasedStateMachine):
    """The origin's count and a stage's blocks: the same calls must leave them equal, and every block accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = [BlockPool(6, 4), BlockPool(6, 4)]
        self.tables: list[list[int]] = []

    @precondition(lambda self: self.pools[0].available > 0)
    @rule()
    def open_a_table(self) -> None:
        blocks = {pool.allocate() for pool in self.pools}
        assert len(blocks) == 1
        self.tables.append([blocks.pop()])

    @precondition(lambda self: self.tables and self.pools[0].available > 0)
    @rule(which=st.integers(0, 5))
    def grow(self, which: int) -> None:
        blocks = {pool.allocate() for pool in self.pools}
        assert len(blocks) == 1
        self.tables[which % len(self.tables)].append(blocks.pop())

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5), content=st.integers(0, 4))
    def commit(self, which: int, content: int) -> None:
        block = self.tables[which % len(self.tables)][-1]
        for pool in self.pools:
            pool.commit([block], [bytes([content])])

    @rule(content=st.integers(0, 4))
    def share(self, content: int) -> None:
        found = [pool.lookup([bytes([content])]) for pool in self.pools]
        assert found[0] == found[1]
        if found[0]:
            for pool in self.pools:
                pool.hold(found[0][:1])
            self.tables.append(found[0])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        table = self.tables.pop(which % len(self.tables))
        for pool in self.pools:
            pool.release(table)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        held = [block for table in self.tables for block in table]
        for pool in self.pools:
            assert pool.available + len(set(held)) == pool.capacity
            assert all(pool.refs(block) == held.count(block) for block in held)
        assert NULL_BLOCK not in held


TestTwinPools = TwinPools.TestCase


def test_keys_do_not_depend_on_how_many_are_computed_at_once() -> None:
    tokens = list(range(40))
    whole = KeyChain(b"s", 4).up_to(tokens, 10)
    chain = KeyChain(b"s", 4)
    assert [chain.up_to(tokens[: 4 * count], count)[-1] for count in range(1, 11)] == whole
    assert chain.up_to(tokens, 3) == whole[:3]
    assert len(set(whole)) == 10


def test_a_fork_begins_with_the_same_keys_and_goes_its_own_way() -> None:
    chain = KeyChain(b"s", 2)
    chain.up_to([1, 2], 1)
    fork = chain.fork()
    assert fork.up_to([1, 2, 3, 4], 2) == KeyChain(b"s", 2).up_to([1, 2, 3, 4], 2)
    assert chain.up_to([1, 2, 9, 9], 2) == KeyChain(b"s", 2).up_to([1, 2, 9, 9], 2)
