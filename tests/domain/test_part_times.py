"""The times of an answer, added up by part, and the small table of them."""

from __future__ import annotations

from penstock.domain.part_times import PartTimes, TimedPart, format_part_times
from penstock.domain.topology import LayerRange


def times() -> PartTimes:
    found = PartTimes()
    head, hops = TimedPart("head", ("a",)), TimedPart("hops", ("a", "b", "a"))
    first, second = TimedPart("layers", ("a",), LayerRange(0, 9)), TimedPart("layers", ("b",), LayerRange(9, 30))
    found.add([(head, 0.5), (second, 2.0), (hops, 0.1), (first, 1.0)], decode=False)
    for _ in range(2):
        found.add([(second, 0.25), (hops, 0.02)], decode=True)
    return found


def test_parts_come_in_the_order_in_which_tokens_pass_them() -> None:
    summary = times().summary()
    assert [(part.part, part.layers) for part in summary] == [("layers", "0:9"), ("layers", "9:30"), ("hops", ""), ("head", "")]
    assert (summary[1].prefill, summary[1].prefill_passes, summary[1].decode, summary[1].decode_passes) == (2.0, 1, 0.5, 2)


def test_the_table_has_the_mean_of_a_pass_and_of_a_single_hop() -> None:
    assert format_part_times(times().summary()) == [
        "part     where       layers   prompt s   passes   answer s   passes   ms each",
        "layers   a           0:9         1.000        1      0.000        0",
        "layers   b           9:30        2.000        1      0.500        2    250.00",
        "hops     a → b → a               0.100        1      0.040        2     10.00",
        "head     a                       0.500        1      0.000        0",
    ]


def test_without_parts_there_is_no_table() -> None:
    assert format_part_times(()) == []
