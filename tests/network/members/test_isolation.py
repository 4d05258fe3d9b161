"""Solitude: a node that expects somebody and meets nobody is told of it once."""

from __future__ import annotations

import pytest

from penstock.network.members.isolation import WARN_AFTER_S, IsolationMonitor


def output(solitude: IsolationMonitor, *looks: tuple[float, bool]) -> list[float]:
    """The times at which the user is told, of looks at a time and whether the node is alone then."""
    return [now for now, alone in looks if solitude.should_warn(alone, now)]


def test_it_is_told_once_after_a_while() -> None:
    assert output(IsolationMonitor(expects_peers=True), (5, True), (6, True), (5 + WARN_AFTER_S, True), (99, True)) == [
        5 + WARN_AFTER_S
    ]


def test_who_is_the_first_one_expects_nobody() -> None:
    assert output(IsolationMonitor(expects_peers=False), (0, True), (WARN_AFTER_S, True), (99, True)) == []


@pytest.mark.parametrize("expects_peers", [False, True])
def test_who_has_met_somebody_expects_somebody_again(expects_peers: bool) -> None:
    solitude = IsolationMonitor(expects_peers=expects_peers)
    assert output(solitude, (0, True), (20, False), (21, True), (20 + WARN_AFTER_S, True), (21 + WARN_AFTER_S, True)) == [
        21 + WARN_AFTER_S
    ]
    assert output(solitude, (90, False), (91, True), (92 + WARN_AFTER_S, True)) == [92 + WARN_AFTER_S], "and so each time"
