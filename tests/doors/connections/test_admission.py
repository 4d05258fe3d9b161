"""Which connections are closed for others, by rules that hold after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.doors.connections.admission import Admission, client_address
from penstock.doors.connections.open_files import connections_that_fit

MAX_OPEN, MAX_WAITING = 6, 3


class Connections(RuleBasedStateMachine):
    """Clients of three addresses, against a list of those that wait in the order in which they began to."""

    def __init__(self) -> None:
        super().__init__()
        self.admission: Admission[int] = Admission(MAX_OPEN, MAX_WAITING)
        self.addresses: dict[int, str] = {}
        self.waiting: list[int] = []
        self.count = 0

    @rule(address=st.sampled_from("abc"))
    def connect(self, address: str) -> None:
        self.count += 1
        neighbours = [one for one in self.waiting if self.addresses[one] == address]
        too_many = len(neighbours) >= MAX_WAITING or len(self.addresses) == MAX_OPEN
        candidates = (neighbours or self.waiting) if too_many else []
        full = len(self.addresses) == MAX_OPEN and not self.waiting
        verdict = self.admission.admit(self.count, address)
        assert verdict == (not full, candidates[0] if candidates else None)
        if candidates:
            self._forget(candidates[0])
        if not full:
            self.addresses[self.count] = address
            self.waiting.append(self.count)

    @precondition(lambda self: self.addresses)
    @rule(data=st.data())
    def send_request(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.addresses)))
        self.admission.set_busy(one)
        self.waiting = [other for other in self.waiting if other != one]

    @precondition(lambda self: self.addresses)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.addresses)))
        self.admission.set_waiting(one)
        if one not in self.waiting:
            self.waiting.append(one)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        one = data.draw(st.integers(1, self.count))  # it may have been closed before
        self.admission.remove(one)
        self.admission.set_waiting(one)  # comes too late
        if one in self.addresses:
            self._forget(one)

    def _forget(self, one: int) -> None:
        del self.addresses[one]
        self.waiting = [other for other in self.waiting if other != one]

    @invariant()
    def agrees(self) -> None:
        assert len(self.admission) == len(self.addresses) <= MAX_OPEN
        assert self.admission.longest_waiting() == (self.waiting[0] if self.waiting else None)


TestConnections = Connections.TestCase


@pytest.mark.parametrize(
    "host,address",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_has_one_address_however_many_it_can_use(host: str, address: str) -> None:
    assert client_address(host) == address


@pytest.mark.parametrize("open_files,connections", [(256, 16), (1024, 256), (4096, 1792), (1 << 20, 524032), (-1, 1 << 20)])
def test_connections_leave_files_for_everything_else(open_files: int, connections: int) -> None:
    assert connections_that_fit(open_files) == connections
