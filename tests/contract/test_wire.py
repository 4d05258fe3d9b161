"""What nodes send to each other, byte for byte: nodes of another version have to understand it."""

from __future__ import annotations

import json
import typing
from dataclasses import replace

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import (
    AskWeights,
    Bounce,
    BounceReason,
    CloseRoute,
    Echo,
    Lease,
    LegReport,
    Mark,
    Message,
    OpenRoute,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
    WeightsPart,
)
from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Position, Refusal, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.model.architecture.spec import fingerprint, spec_from_config
from penstock.model.files.weight_files import HashedTensor
from penstock.network.codec import PROTOCOL, decode, decode_record, encode, encode_record
from penstock.network.parts import Part
from penstock.network.stream import Stream
from penstock.network.trust.keyring import Envelope, OpenKeyring
from penstock.network.zenoh.presence import Address
from penstock.weights.manifest import HashedFile, Manifest
from tests.contract.fake_node import MODEL_CONFIG
from tests.contract.snapshot import FOLDER, check_json

WIRE = "wire.json"
ROUTE = RouteId("kitchen", 1_700_000_000, 3)
BLOCK_KEYS = (bytes(range(16)), bytes(range(16, 32)))
HASH = "0123456789abcdef" * 4
LEGS = (Leg(LayerRange(0, 10), "kitchen", "attic"), Leg(LayerRange(20, 30), "attic", "kitchen"))
THROUGH_LAYERS = NetworkJob(
    ROUTE,
    12,
    spans=[Span(5, 1, 2, 3, 4, 2, 1, BLOCK_KEYS), Span(6, 0, 0, 0, 0, 1, 1)],
    notices=[Notice(number, kind, 5, 1, 7, BLOCK_KEYS, 9) for number, kind in enumerate(NoticeKind)],
    refusals=[Refusal(5, 1, 2, verdict, 300, "cellar") for verdict in Verdict],
    services=[0.25, 0.5],
    transfers=[0.125],
    step=ComputeStep.LAYER,
    current_layer=10,
    hidden=PackedHidden("float32", 3, 2, bytes(range(24))),
)

MESSAGES: dict[str, Message] = {
    "a step through the layers": THROUGH_LAYERS,
    "a step on its way home": replace(THROUGH_LAYERS, step=ComputeStep.HEAD, hidden=PackedHidden("bfloat16", 2, 2, bytes(8))),
    "a step without hidden states": NetworkJob(ROUTE, 13, [], step=ComputeStep.LAYER),
    "open a route": OpenRoute(ROUTE, "smollm2-135m", "00112233", LEGS, 576, 16, 100, True, 10.0),
    "an offer for a route": RouteOffer(ROUTE, 100, 4),
    "a refused route": RouteOffer(ROUTE, reason="busy", retry_after=1.5),
    "close a route": CloseRoute(ROUTE),
    "ping": Ping(ROUTE, 123_456_789, 100, 11),
    "pong": Pong(ROUTE, 123_456_789, 0.5, 1.5, 70, (LegReport(10, 13, 4096, (12,), (11, 10)),)),
    "lease": Lease(ROUTE, 123_456_789, 100, 80),
    "mark": Mark(ROUTE, 10, 13),
    "stage progress": StageProgress(ROUTE, 10, (Position(7, 1, 2, 4096), Position(8, 0, 0, 512))),
    **{f"bounce, {reason.name.lower().replace('_', ' ')}": Bounce(ROUTE, 12, reason) for reason in BounceReason},
    "bounce of a ping": Bounce(ROUTE, -1, BounceReason.FLOOD),
    "ask for weights": AskWeights(1, "smollm2-135m", HASH, "layer:7", 1024, 4096),
    "ask for a manifest": AskWeights(2, "smollm2-135m", "", "manifest", 0, 4096),
    "a part of weights": WeightsPart(1, 1024, 8192, data=b"weights"),
    "refused weights": WeightsPart(1, reason="busy", retry_after=2.0),
    "echo": Echo(123_456_789),
    "answer to an echo": Echo(123_456_789, answer=True),
}
RECORDS = {
    "a node's record": NodeRecord(
        node="kitchen",
        epoch=1_700_000_000,
        version="0.1.0",
        protocol=PROTOCOL,
        pid=4321,
        draining=True,
        serves=("smollm2-135m",),
        endpoints=("tls/kitchen:7447", "tls/10.0.0.5:7447"),
        segments=(
            MetaModel(
                node="kitchen",
                process="1700000000.0",
                model="smollm2-135m",
                pipe="smollm2-135m/00112233",
                shape="00112233",
                num_layers=30,
                layers=LayerRange(0, 10),
                weight_hash=HASH,
                dtype="bfloat16",
                device="cpu",
                kv_blocks=1000,
                kv_free=900,
                kv_held=50,
                block_size=16,
                seconds=0.25,
                load=0.5,
                draining=True,
            ),
        ),
        offers=(
            Offer(
                model="smollm2-135m",
                shape="00112233",
                num_layers=30,
                room=5,
                claims=(LayerRange(10, 12), LayerRange(20, 30)),
                pinned=(LayerRange(0, 10),),
                max_pipes=2,
                weights=HASH,
                gives=True,
            ),
        ),
        links=(Link("attic", 0.0012, 2.4e6), Link("cellar", 0.03)),
    ),
    "the record of a node that knows of trusted models": NodeRecord(
        node="attic", epoch=7, version="0.1.0", protocol=PROTOCOL, pid=1, trusted=b"penstock trusted models 1\n\x90"
    ),
    "the record of a node that knows when revocations were signed": NodeRecord(
        node="attic", epoch=7, version="0.1.0", protocol=PROTOCOL, pid=1, stamp=b"penstock revocation stamp 1\n\x90"
    ),
    "the record of a node that just started": NodeRecord(node="attic", epoch=7, version="0.1.0", protocol=PROTOCOL, pid=1),
}


def test_messages_and_records_stay_byte_for_byte() -> None:
    found = {name: encode(message).hex() for name, message in MESSAGES.items()}
    check_json(WIRE, found | {name: encode_record(record).hex() for name, record in RECORDS.items()})


def test_stored_bytes_are_read_as_what_they_were() -> None:
    stored = {name: bytes.fromhex(data) for name, data in json.loads((FOLDER / WIRE).read_text(encoding="utf-8")).items()}
    for name, message in MESSAGES.items():
        arrived = decode(stored[name])
        assert (type(arrived), arrived) == (type(message), message), name
    for name, record in RECORDS.items():
        assert decode_record(stored[name]) == record, name


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in MESSAGES.values()} == {*typing.get_args(Message)}


def test_what_else_nodes_compare_or_exchange_stays() -> None:
    """Nodes work together only if they come to the same fingerprint of a model, the same hash of its weights, the same keys in
    Zenoh, and read each other's cards and envelopes."""
    tensor = HashedTensor("model.layers.0.mlp.up_proj.weight", "BF16", (16, 8), HASH)
    files = (HashedFile("tokenizer.json", 9, HASH),)
    manifest = Manifest('{"model_type": "llama"}', ((tensor,),), (replace(tensor, name="model.norm.weight"),), files, "language.")
    check_json(
        "wire_agreements.json",
        {
            "protocol": PROTOCOL,
            "fingerprint of a model": fingerprint(spec_from_config(MODEL_CONFIG, (0,))),
            "manifest": manifest.encode().decode(),
            "hash of a manifest": manifest.hash,
            "hash of layers": manifest.layer_hash(LayerRange(0, 1)),
            "card in an open network": OpenKeyring("kitchen", 7).card().hex(),
            "envelope": Envelope(1, Stream.BULK, 2, 3, 4).pack().hex(),
            "part of a message": Part(True, 5, 6, 9, memoryview(b"end")).pack().hex(),
            "root of keys in Zenoh": Address("home", "kitchen", 7).root,
        },
    )
