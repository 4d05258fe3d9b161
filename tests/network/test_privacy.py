"""What leaves an origin: every byte of every message and record is searched for its text, its token ids and plain hashes."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.domain.fsm import ComputeStep
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Span
from penstock.engine.hosted_model import HostedModel
from penstock.network.codec import encode
from penstock.network.in_process import Hub
from penstock.simulate.node import Machine
from tests.engine.world import GREEDY, World
from tests.network.listening import CONFIG, Exchange, Node, answer
from tests.network.nets import wait_for

PROMPT = (
    "Elephants remember watering places throughout extraordinarily prolonged droughts, because grandmothers repeatedly guided "
    "youngsters towards hidden riverbeds underneath the sandstone mountains. Explain how Professor Featherstonehaugh verified "
    "that observation during several expeditions, and whether colleagues questioned her measurements afterwards."
)
RUN = 4  # ids in a row: fewer can occur by chance


# ---- the search ----


def leaks(data: bytes, secret: Exchange) -> list[str]:
    """What of a secret can be found in these bytes."""
    found = [f"the word {word!r}" for word in _words(secret.text) if word.encode() in data]
    found += [f"ids as {how}" for how, run in _runs(secret.ids) if run in data]
    found += [f"a hash: {how}" for how, digest in _hashes(secret.ids) if digest in data]
    return found


def _words(text: str) -> set[str]:
    return {form for word in re.findall(r"\w{4,}", text) for form in (word, word.lower())}


def _packings() -> dict[str, Callable[[Sequence[int]], bytes]]:
    plain: dict[str, Callable[[Sequence[int]], bytes]] = {
        f"{8 * size} bits, {order}-endian": lambda ids, size=size, order=order: b"".join(i.to_bytes(size, order) for i in ids)  # type: ignore[misc]
        for size in (2, 4, 8)
        for order in ("little", "big")
    }
    return plain | {
        "msgpack": lambda ids: b"".join(map(msgspec.msgpack.encode, ids)),
        "text": lambda ids: ", ".join(map(str, ids)).encode(),
    }


PACKINGS = _packings()


def _runs(ids: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    for how, pack in PACKINGS.items():
        for at in range(len(ids) - RUN + 1):
            yield how, pack(ids[at : at + RUN])


def _hashes(ids: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Of every block of ids, and of all ids up to its end, and chained; whole, and cut to the length of a key."""
    hashers: dict[str, Callable[[bytes], bytes]] = {
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
        "blake2b": lambda data: hashlib.blake2b(data).digest(),
        "blake2b-16": lambda data: hashlib.blake2b(data, digest_size=16).digest(),
    }
    size = CONFIG.block_size
    for (how, pack), (name, digest) in itertools.product(PACKINGS.items(), hashers.items()):
        chained = b""
        for end in range(size, len(ids) + 1, size):
            chained = digest(chained + pack(ids[end - size : end]))
            for data in (digest(pack(ids[end - size : end])), digest(pack(ids[:end])), chained):
                yield f"{name} of {how}", data[:16]


# ---- the search finds what it should ----

IDS = list(range(1000, 1048))
SECRET = Exchange("a Thunderstorm gathers", IDS)
JOB = NetworkJob(RouteId("a", 1, 0), 0, [], step=ComputeStep.LAYER)


def _hidden(data: bytes) -> NetworkJob:
    data += b"\0" * (-len(data) % 4)
    rows = len(data) // 4
    return replace(JOB, spans=[Span(0, 0, 0, 0, 0, rows, 0)], hidden=PackedHidden("float32", rows, 1, data))


def _key(data: bytes) -> NetworkJob:
    return replace(JOB, notices=[Notice(0, NoticeKind.STEP_COMPLETED, 0, 0, 0, (data[:16],))])


@pytest.mark.parametrize(
    "message",
    [
        _hidden(b"... Thunderstorm ..."),
        _hidden(b"... thunderstorm ..."),
        *(_hidden(pack(IDS[7:12])) for pack in PACKINGS.values()),
        _key(hashlib.sha256(PACKINGS["32 bits, little-endian"](IDS[16:32])).digest()),
        _key(hashlib.md5(PACKINGS["msgpack"](IDS[:32]), usedforsecurity=False).digest()),
        _key(hashlib.blake2b(PACKINGS["32 bits, little-endian"](IDS[:16]), digest_size=16).digest()),
    ],
)
def test_the_search_finds_what_is_there(message: NetworkJob) -> None:
    assert leaks(encode(message), SECRET)


def test_the_search_finds_nothing_where_nothing_is() -> None:
    assert leaks(encode(_hidden(bytes(range(256)) * 40)), SECRET) == []


# ---- what a real origin sends ----


@pytest.fixture(scope="module")
def pair(default_model_folder: Path) -> Iterator[tuple[Node, Node]]:
    """An origin that keeps the first and the last layer, and a node with those between."""
    hub = Hub()
    nodes = (Node(hub, "origin", [(0, 1), (29, 30)], ends=True, wire="fp32"), Node(hub, "other", [(1, 29)]))
    yield nodes
    for node in nodes:
        node.close()


@pytest.mark.slow
def test_no_text_no_ids_and_no_plain_hashes_leave_an_origin(pair: tuple[Node, Node]) -> None:
    origin, other = pair
    hosted = origin.hosted
    assert isinstance(hosted, HostedModel)
    wait_for(lambda: hosted.engine.origin is not None and hosted.engine.origin.route is not None, "a route")
    first = answer(origin, PROMPT)
    second = answer(origin, PROMPT + " Furthermore, mention elephants.")  # whose beginning is known by its keys
    everything = [*origin.router.left, *other.router.left]
    assert hosted.engine.stats.cached_tokens > CONFIG.block_size, "keys did travel"
    assert sum(map(len, everything)) > len(first.ids) * 576 * 4, "hidden states did travel"
    for data in everything:
        for secret in (first, second):
            assert leaks(data, secret) == []


@pytest.mark.slow
def test_no_embedding_leaves_an_origin_that_keeps_the_first_layer(pair: tuple[Node, Node]) -> None:
    origin, _ = pair
    assert origin.ends is not None
    secret = answer(origin, PROMPT)
    rows = [row.numpy().tobytes() for row in origin.ends.compute_embed(secret.ids)]
    assert rows[3] in encode(_hidden(b"".join(rows))), "it would be seen"
    every = b"".join(origin.router.left)
    assert not any(row in every for row in rows)


def test_two_origins_have_different_keys_for_the_same_prompt() -> None:
    """Or a stage could tell that two nodes ask the same."""
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 4),)), Machine("o", (), ends=True))
    world.open_routes("a", "o")
    world.watching = True
    for name in "aoao":
        world.ask(name, list(range(1, 15)), GREEDY)
        world.run(0.5)
    world.finish()
    keys: dict[str, set[bytes]] = {"a": set(), "o": set()}
    for sender, _, message in world.seen:
        if sender in keys and isinstance(message, NetworkJob):
            keys[sender] |= {key for part in [*message.notices, *message.spans] for key in part.keys}
    assert keys["a"]
    assert len(keys["a"]) == len(keys["o"])
    assert not keys["a"] & keys["o"]
