"""What other nodes and their users hand over: messages, records, parts, cards, greetings, invitations, signed lists."""

from __future__ import annotations

import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import AskWeights, CloseRoute, Echo, OpenRoute, Ping, WeightsPart
from penstock.domain.meta_model import NodeRecord
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.errors import BadMessage, Untrusted
from penstock.network import frame, parts
from penstock.network.codec import PROTOCOL, decode, decode_record, encode, encode_record
from penstock.network.joining import invitation
from penstock.network.joining.token_text import from_text, to_text
from penstock.network.members.peer_directory import PeerDirectory
from penstock.network.members.roster import Roster
from penstock.network.stream import Stream
from penstock.network.trust import revocations, trusted_models
from penstock.network.trust.keyring import Sealed
from tests.fuzz.target import Target, TargetMaker, damaged
from tests.network.certificates import Authority
from tests.network.messages import decode_job

ROUTE = RouteId("kitchen", 7, 1)
MESSAGES = [
    decode_job(2, 16),
    OpenRoute(ROUTE, "m", "s", (Leg(LayerRange(0, 10), "kitchen", "attic"),), 576, 16, 100, True, 3.0),
    CloseRoute(ROUTE),
    Ping(ROUTE, 1, 2),
    AskWeights(1, "m", "0" * 64, "ends", 0, 1),
    WeightsPart(1, 0, 9, data=b"weights"),
    Echo(1),
]
RECORD = NodeRecord(node="kitchen", epoch=7, version="0.1", protocol=PROTOCOL, pid=1)


def raw_messages() -> Target:
    """Bytes as they arrive; most have a wrong checksum."""

    def check(data: bytes) -> None:
        for read in (decode, decode_record):
            with suppress(BadMessage):
                read(data)

    return Target(damaged([*map(encode, MESSAGES), encode_record(RECORD)]), check)


def sealed_messages() -> Target:
    """Damaged headers in a frame whose checksum is right, as a hostile member would send them."""
    frames = [frame.unpack(encode(message)) for message in MESSAGES]
    headers = [bytes(found.header) for found in frames]

    def check(case: tuple[int, bytes, bytes]) -> None:
        kind, header, tensor = case
        try:
            found = decode(frame.pack(kind, header, tensor))
        except BadMessage:
            return
        assert decode(encode(found)) == found

    kinds = st.sampled_from([found.kind for found in frames]) | st.integers(0, 255)
    return Target(st.tuples(kinds, damaged(headers), st.sampled_from([b"", *(bytes(found.tensor) for found in frames)])), check)


def span_columns() -> Target:
    """Columns of Spans that contradict each other, in a header that is in order otherwise."""
    jobs = [decode_job(sequences, 16) for sequences in (1, 2, 300)]
    headers = [msgspec.msgpack.decode(frame.unpack(encode(job)).header) for job in jobs]
    packed = damaged([column for header in headers for column in header[2] if isinstance(column, bytes)])
    column = packed | st.integers(0, 2**64 - 1) | st.integers(0, 3)
    keys = st.lists(st.tuples(st.integers(0, 4), st.lists(st.binary(min_size=16, max_size=16), max_size=2)), max_size=2)

    def check(spans: tuple[object, ...]) -> None:
        header = [ROUTE, 1, spans, [], [], [], [], ComputeStep.HEAD.value, 0, None, 0.0]
        try:
            found = decode(frame.pack(1, msgspec.msgpack.encode(header)))
        except BadMessage:
            return
        assert isinstance(found, NetworkJob)
        assert decode(encode(found)) == found
        assert len(found.spans) == spans[0]

    counts = st.sampled_from([1, 2, 300]) | st.integers(0, 1 << 17)
    return Target(st.tuples(counts, packed, *[column] * 6, st.just([]) | keys), check)


def node_records() -> Target:
    found = frame.unpack(encode_record(RECORD))

    def check(header: bytes) -> None:
        try:
            record = decode_record(frame.pack(found.kind, header))
        except BadMessage:
            return
        assert decode_record(encode_record(record)) == record

    return Target(damaged([bytes(found.header)]), check)


def message_parts() -> Target:
    """Parts in any order, of any message: what is put together is whole, and what waits is bounded."""
    whole = bytes(range(256)) * 4
    seeds = [
        parts.Part(True, number, offset, len(whole), memoryview(whole)[offset : offset + 512]).pack()
        for number in (1, 2)
        for offset in (0, 512)
    ]
    source = parts.Source("kitchen", 1, Stream.DATA)

    def check(pieces: list[bytes]) -> None:
        assembler = parts.Assembler()
        for piece in pieces:
            try:
                part = parts.read_part(piece)
            except BadMessage:
                continue
            message = assembler.add(source, part)
            assert message is None or len(message) == part.total
            held = sum(found.size for found in assembler._unfinished.values())
            assert held == assembler._size <= parts.MAX_UNFINISHED_BYTES

    return Target(st.lists(damaged(seeds, max_edits=1), max_size=6), check)


def cards() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        here, there = authority.invite("kitchen").keyring(1), authority.invite("attic").keyring(2)
    here.meet(there.card())
    there.meet(here.card())
    sealed = [there.seal("kitchen", 1, kind, b"a record" * kind) for kind in range(5)]
    directory = PeerDirectory(here, Roster(), None, on_change=lambda: None, on_revoked=lambda: None)
    asking = PeerDirectory(there, Roster(), None, on_change=lambda: None, on_revoked=lambda: None)

    def check(case: tuple[bytes, bytes, bytes, bytes]) -> None:
        card, question, envelope, body = case
        before = set(here._met)
        for act in (
            lambda: here.meet(card),
            lambda: directory.answer(question),
            lambda: directory.accept_answer("attic", 2, question),
            lambda: directory.open("attic", Sealed(envelope, body)),
        ):
            with suppress(Untrusted, BadMessage):
                act()
        assert set(here._met) == before, "a name was believed without its certificate"

    greetings = damaged([asking.question(), asking.answer(directory.question())])
    envelopes, bodies = (damaged([getattr(one, name) for one in sealed], max_edits=2) for name in ("envelope", "body"))
    return Target(st.tuples(damaged([there.card(), here.card()]), greetings, envelopes, bodies), check)


def invitations() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        authority.invite("attic")
        identity = authority._issued["attic"]
        token = invitation.encode(
            invitation.Invitation("home", authority.identity.certificate, identity, ("tls/10.0.0.1:7447",), authority.revoke())
        )
    packed = from_text(invitation.TOKEN_PREFIX, token, invitation.MAX_TOKEN_CHARS)
    contents = zlib.decompress(packed)

    def resealed(packed: bytes) -> str:
        return to_text(invitation.TOKEN_PREFIX, packed)

    def check(text: str) -> None:
        with suppress(Untrusted):
            assert invitation.decode(text).network == "home"

    typed = damaged([token.encode()]).map(lambda data: data.decode("utf-8", "replace"))
    return Target(typed | damaged([packed]).map(resealed) | damaged([contents]).map(zlib.compress).map(resealed), check)


def signed_lists() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        authority.invite("attic")
        revoked = authority.revoke("attic")
    trusted = trusted_models.sign("m", "0" * 64, trusted_models.NO_TRUSTED_MODELS, authority.identity).encode()
    certificate = authority.identity.certificate
    known = [revocations.read(revoked, certificate).records, trusted_models.read(trusted, certificate).records]

    def check(data: bytes) -> None:
        for read, signed in zip((revocations.read, trusted_models.read), known, strict=True):
            try:
                found = read(data, certificate)
            except Untrusted:
                continue
            assert all(signed.get(name) == record for name, record in found.records.items()), "a record that was not signed"

    return Target(damaged([revoked, trusted]), check)


def msgpack_of_cards() -> Target:
    """Cards that can be decoded, with values that no node would send."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        here, there = authority.invite("kitchen").keyring(1), authority.invite("attic").keyring(2)
    certificate, epoch, session_key, signature = msgspec.msgpack.decode(there.card())
    binary = damaged([certificate, session_key, signature], max_edits=2)
    fields = st.tuples(binary, st.integers(-1, 2**64 - 1) | st.just(epoch), binary | st.just(bytes(32)), binary)

    def check(card: tuple[bytes, int, bytes, bytes]) -> None:
        try:
            here.meet(msgspec.msgpack.encode(card))
        except Untrusted:
            return
        assert card[:3] == (certificate, epoch, session_key), "a card was believed that its owner did not sign"

    return Target(fields, check)


TARGETS: dict[str, TargetMaker] = {
    "network: raw messages": raw_messages,
    "network: sealed messages": sealed_messages,
    "network: columns of Spans": span_columns,
    "network: records": node_records,
    "network: parts": message_parts,
    "network: cards, greetings": cards,
    "network: made-up cards": msgpack_of_cards,
    "network: invitations": invitations,
    "network: signed lists": signed_lists,
}
