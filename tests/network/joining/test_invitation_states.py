"""The life of invitations: made, used, withdrawn, expired, guessed at, with crashes of the authority at any point."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from penstock.errors import ConfigError
from penstock.network.joining import admission, authority, invitation_book
from penstock.network.joining.invitation_book import KEEP_FOR, MAX_OPEN, MAX_WRONG_PROOFS
from penstock.network.joining.join_protocol import JoinRefusal
from penstock.network.joining.join_token import JoinToken
from penstock.network.trust import revocations
from penstock.network.trust.certificates import new_key
from tests.network.joins import admit, created, request_of

KEYS = [new_key() for _ in range(2)]
HOURS = 3
NEVER = 99


class PowerCut(BaseException):
    """Raised at a write, as if the machine had lost power."""


@contextmanager
def power_cut(at_rename: int) -> Iterator[None]:
    """Cut the power before this rename of a file, counted from 0."""
    renames = iter(range(NEVER))
    rename = Path.rename

    def cut(path: Path, target: Path) -> Path:
        if next(renames) == at_rename:
            raise PowerCut
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        yield


class Life(RuleBasedStateMachine):
    """What the authority should say of each token is kept beside it, in a few words."""

    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(os, "fsync", lambda descriptor: None)
        self._folder = tempfile.TemporaryDirectory()
        self.network = created(Path(self._folder.name))
        self.now = datetime.now(UTC)
        self.nodes: dict[str, str] = {}  # by token
        self.closed: dict[str, JoinRefusal] = {}
        self.used: dict[str, int] = {}  # which key
        self.guesses: dict[str, int] = {}
        self.delivered: dict[str, set[bytes]] = {}

    def teardown(self) -> None:
        self._patch.undo()
        self._folder.cleanup()

    @rule(target=tokens, node=st.sampled_from("ab"))
    def invite(self, node: str) -> JoinToken:
        self._close(node, JoinRefusal.WITHDRAWN)
        token = admission.invite_once(self.network, node, lifetime=timedelta(hours=HOURS), now=self.now)
        self.nodes[token.id] = node
        return token

    @rule(token=tokens, key=st.integers(0, len(KEYS) - 1), cut=st.sampled_from([0, 1, NEVER]), lost=st.booleans())
    def join(self, token: JoinToken, key: int, cut: int, lost: bool) -> None:
        """With a power cut before either file is written, or an answer that does not arrive."""
        expected = self._expected(token, key)
        try:
            with power_cut(cut):
                answer = admit(self.network, request_of(token, KEYS[key]), self.now)
        except PowerCut:
            assert expected is JoinRefusal.NONE, "nothing is written for a machine that is refused"
            assert token.id not in self.used
            return
        assert answer.refusal == expected
        if expected is JoinRefusal.NONE:
            self.used[token.id] = key
            if not lost:
                self.delivered.setdefault(token.id, set()).add(answer.certificate)

    @rule(token=tokens)
    def guess(self, token: JoinToken) -> None:
        open_now = self._expected(token, 0) is JoinRefusal.NONE and token.id not in self.used
        request = request_of(token, KEYS[0])
        request.proof = bytes(32)
        assert admit(self.network, request, self.now).refusal == JoinRefusal.INVALID
        if open_now:
            self.guesses[token.id] = self.guesses.get(token.id, 0) + 1
            if self.guesses[token.id] == MAX_WRONG_PROOFS:
                self.closed[token.id] = JoinRefusal.LOCKED

    @rule(token=tokens)
    def withdraw(self, token: JoinToken) -> None:
        was_open = self._expected(token, 0) is JoinRefusal.NONE and token.id not in self.used
        try:
            admission.withdraw(self.network, token.id, now=self.now)
            assert was_open
            self.closed[token.id] = JoinRefusal.WITHDRAWN
        except ConfigError:
            assert not was_open

    @rule(node=st.sampled_from("ab"))
    def revoke(self, node: str) -> None:
        try:
            authority.revoke(self.network, node)
        except ConfigError:
            assert node not in self.nodes.values()
        self._close(node, JoinRefusal.WITHDRAWN)

    @rule(hours=st.integers(1, 2 * HOURS))
    def wait(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @invariant()
    def no_token_gave_two_certificates_and_each_can_be_revoked(self) -> None:
        register = {one.serial for issued in authority._register(self.network).values() for one in issued}
        for certificates in self.delivered.values():
            (certificate,) = certificates
            assert f"{x509.load_der_x509_certificate(certificate).serial_number:x}" in register

    def _expected(self, token: JoinToken, key: int) -> JoinRefusal:
        if token.id in self.used:
            return JoinRefusal.NONE if self.used[token.id] == key else JoinRefusal.USED
        if self.closed.get(token.id) is not None:
            return self.closed[token.id]
        return JoinRefusal.EXPIRED if self.now >= token.expires else JoinRefusal.NONE

    def _close(self, node: str, why: JoinRefusal) -> None:
        for token, name in self.nodes.items():
            if name == node and token not in self.used:
                self.closed[token] = why


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
TestLife = Life.TestCase


@pytest.mark.parametrize("cut", [0, 1])
def test_after_a_power_cut_an_invitation_is_as_it_was_and_what_it_gives_can_be_revoked(tmp_path: Path, cut: int) -> None:
    network = created(tmp_path)
    token = admission.invite_once(network, "laptop")
    with pytest.raises(PowerCut), power_cut(cut):
        admit(network, request_of(token, KEYS[0]))
    answer = admit(network, request_of(token, KEYS[1]))
    assert answer.refusal == JoinRefusal.NONE
    authority.revoke(network, "laptop")
    serial = x509.load_der_x509_certificate(answer.certificate).serial_number
    assert serial in revocations.read(network.revocations_file.read_bytes(), authority.signing_identity(network).certificate)


def test_what_is_long_over_is_forgotten_and_there_are_never_too_many(tmp_path: Path) -> None:
    network, now = created(tmp_path), datetime.now(UTC)
    admission.invite_once(network, "laptop", now=now - KEEP_FOR - timedelta(days=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number in range(MAX_OPEN):
            admission.invite_once(network, f"node{number}", now=now)
    assert [one.node for one in admission.invitations(network)][:2] == ["node0", "node1"]
    with pytest.raises(ConfigError, match=f"There are {MAX_OPEN} open invitations"):
        admission.invite_once(network, "one-more", now=now)
    assert invitation_book.read(network).is_answering(now)
    assert not invitation_book.read(network).is_answering(now + timedelta(hours=8))
