"""How many blocks texts need, held against a text that is read chunk by chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.blocks import NULL_BLOCK, BlockPool
from penstock.domain.kv_need import UNBOUNDED, KvNeed

windows = st.lists(st.sampled_from([None, 1, 4, 5, 30]), min_size=1, max_size=4)


@given(windows=windows, size=st.integers(1, 5), ahead=st.integers(1, 12), tokens=st.integers(1, 90), data=st.data())
def test_a_text_that_is_read_within_its_room_holds_no_more_than_it_was_said_to_need(
    windows: list[int | None], size: int, ahead: int, tokens: int, data: st.DataObject
) -> None:
    need, pool, table = KvNeed(windows, size, ahead), BlockPool(100, size, windows=windows), list[int]()
    scheduled = passed = 0
    while scheduled < tokens:
        room = need.room(scheduled, passed // size)
        if room <= 0 or data.draw(st.booleans()):
            assert scheduled > passed or room > 0, "it can always go on when nothing is in flight"
            passed = data.draw(st.integers(min(passed + 1, scheduled), scheduled))
            pool.release_outside_window(table, passed // size)
            continue
        rest = need.rest(pool.rows_of(table), passed // size, tokens)
        before = pool.held
        scheduled += data.draw(st.integers(1, min(room, tokens - scheduled)))
        pool.extend(table, pool.rows_for(scheduled))
        assert pool.held - before <= rest
        assert pool.held == sum(block != NULL_BLOCK for block in table) <= need.whole(tokens)


@given(windows=windows, size=st.integers(1, 5), ahead=st.integers(1, 12), rows=st.integers(0, 60))
def test_the_longest_text_is_the_last_that_fits(windows: list[int | None], size: int, ahead: int, rows: int) -> None:
    need = KvNeed(windows, size, ahead)
    longest = need.longest(rows)
    assert need.whole(longest) <= rows * len(windows)
    if longest < UNBOUNDED:
        assert need.whole(longest + 1) > rows * len(windows)


def test_without_windows_a_text_needs_all_its_blocks() -> None:
    need = KvNeed((None,), 16, 2048)
    assert need.whole(100) == 7
    assert need.rest(3, 2, 100) == 4
    assert need.longest(10) == 160


def test_five_of_six_layers_with_a_window_leave_room_for_a_long_text() -> None:
    """Gemma 3 12B: memory for 8,192 tokens in all layers."""
    need = KvNeed((1024, 1024, 1024, 1024, 1024, None), 16, 2048)
    assert need.longest(512) == (512 * 6 - 5 * 193) * 16 == 33_712
