"""Messenger: sends messages in sealed parts, no faster than the receiver takes them, and reassembles those that arrive.

Zenoh closes a link on which one of its messages has waited for a lease. It must: while one waits, it cannot even notice that the
other side is dead. A large message on a slow link would wait for longer than that, so it is sent in parts. These may also wait in
buffers of the system, where nothing can overtake them, so only as many are on their way as a SendWindow allows.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from penstock.errors import BadMessage, MalformedMessage, Unreachable
from penstock.network.members.peer_directory import MESSAGE, PART, PARTS_RECEIPT, PeerDirectory
from penstock.network.parts import PART_BYTES, Assembler, Part, Source, offsets, read_part
from penstock.network.router import Bytes, OnMessage, unreachable
from penstock.network.send_window import SendWindow, StreamPosition
from penstock.network.stream import Stream
from penstock.network.trust.keyring import Envelope, Sealed

MAX_WAIT_S = {Stream.DATA: 0.3, Stream.BULK: 0.1}  # that parts may be queued on their way; CONTROL is small and has no window
RECEIPT_TIMEOUT_S = 10.0  # without any receipt, after which parts on their way count as lost
POLL_INTERVAL_S = 0.1  # to notice that the destination of a waiting message is gone

_RECEIPT = struct.Struct(">BQI")  # stream, and the position of the part


class Put(Protocol):
    """Hands something sealed to the network, waiting while that is full. Raises Unreachable.

    wait: also wait a moment for a node that is still starting.
    """

    def __call__(self, node: str, stream: Stream, sealed: Sealed, *, wait: bool) -> None: ...


class Messenger:
    def __init__(
        self, directory: PeerDirectory, put: Put, on_message: OnMessage, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._put = put
        self._on_message = on_message
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._channels: dict[tuple[str, Stream], _Channel] = {}
        self._assembler = Assembler()
        self._bulk_waits = 0  # parts that wait for DATA to the same node
        self._closed = False
        self._messages = itertools.count()

    # ---- sending ----

    def send(self, node: str, data: Bytes, stream: Stream) -> None:
        """Send a message, waiting until the other node has taken most of it. Raises Unreachable."""
        channel = self._channel(node, stream)
        with channel.lock:
            channel.busy = True
            try:
                if len(data) <= PART_BYTES:
                    self._send_whole(channel, data)
                else:
                    self._send_parts(channel, memoryview(data))
            finally:
                channel.busy = False
                if self._bulk_waits:
                    with self._changed:
                        self._changed.notify_all()

    def _channel(self, node: str, stream: Stream) -> _Channel:
        epoch = self._directory.current_epoch(node)
        channel = self._channels.get((node, stream))
        if channel is not None and channel.epoch == epoch:
            return channel
        with self._changed:
            channel = self._channels.get((node, stream))
            if channel is None or channel.epoch != epoch:
                channel = self._channels[node, stream] = _Channel(node, epoch, stream)
            return channel

    def _send_whole(self, channel: _Channel, data: Bytes) -> None:
        """Send a message no longer than a part. It needs no header unless it requests a receipt: most messages carry a single
        token, and every microsecond counts."""
        message = next(self._messages)
        if self._wait_for_turn(channel, StreamPosition(message, len(data)), len(data)):
            self._put_sealed(channel, PART, Part(True, message, 0, len(data), memoryview(data)).pack())
        else:
            self._put_sealed(channel, MESSAGE, bytes(data))

    def _send_parts(self, channel: _Channel, data: memoryview) -> None:
        message = next(self._messages)
        for offset in offsets(len(data)):
            piece = data[offset : offset + PART_BYTES]
            wants_receipt = self._wait_for_turn(channel, StreamPosition(message, offset + len(piece)), len(piece))
            self._put_sealed(channel, PART, Part(wants_receipt, message, offset, len(data), piece).pack())

    def _put_sealed(self, channel: _Channel, kind: int, data: bytes) -> None:
        sealed = self._directory.seal(channel.node, channel.epoch, kind, data, channel.stream)
        self._put(channel.node, channel.stream, sealed, wait=True)

    def _wait_for_turn(self, channel: _Channel, place: StreamPosition, size: int) -> bool:
        """Wait until a part may be sent, and return whether to ask for a receipt with it. Raises Unreachable."""
        window = channel.window
        if window is None:
            if self._is_over(channel):
                raise unreachable(channel.node)
            return False
        with self._changed:
            started = now = self._clock()
            while not self._is_over(channel):
                room = window.has_room(size)
                behind_data = channel.stream is Stream.BULK and self._sends_data(channel.node)
                if room and not behind_data:
                    return window.send(place, size, now)
                self._bulk_waits += behind_data
                self._changed.wait(POLL_INTERVAL_S)
                self._bulk_waits -= behind_data
                now = self._clock()
                if not room and now - max(started, window.progressed_at) > RECEIPT_TIMEOUT_S:
                    window.give_up()
        raise unreachable(channel.node)

    def _sends_data(self, node: str) -> bool:
        channel = self._channels.get((node, Stream.DATA))
        return channel is not None and channel.busy

    def _is_over(self, channel: _Channel) -> bool:
        return self._closed or channel.gone or self._directory.current_epoch(channel.node) != channel.epoch

    # ---- receiving ----

    def receive(self, sender: str, envelope: Envelope, data: bytes) -> None:
        """Take a sealed message, part or receipt, and deliver the message if it is complete."""
        if envelope.kind == MESSAGE and len(data) <= PART_BYTES:
            self._on_message(sender, data)
            return
        try:
            if envelope.kind == MESSAGE:
                raise MalformedMessage(f"A message from '{sender}' has {len(data)} bytes and is not in parts.")
            if envelope.kind == PARTS_RECEIPT:
                self._on_receipt(sender, envelope, data)
                return
            part = read_part(data)
        except BadMessage as error:
            self._directory.refuse(error, sender)
            return
        with self._changed:
            message = self._assembler.add(Source(sender, envelope.sender, envelope.stream), part)
        try:
            if message is not None:
                self._on_message(sender, message)
        finally:
            if part.wants_receipt:
                self._send_receipt(sender, envelope, part)

    def _send_receipt(self, sender: str, envelope: Envelope, part: Part) -> None:
        receipt = _RECEIPT.pack(envelope.stream, part.message, part.offset + len(part.data))
        with contextlib.suppress(Unreachable):  # then it needs none
            sealed = self._directory.seal(sender, envelope.sender, PARTS_RECEIPT, receipt, Stream.CONTROL)
            self._put(sender, Stream.CONTROL, sealed, wait=False)

    def _on_receipt(self, sender: str, envelope: Envelope, data: bytes) -> None:
        if len(data) != _RECEIPT.size or data[0] not in MAX_WAIT_S:
            raise MalformedMessage(f"A receipt from '{sender}' cannot be read.")
        stream, *place = _RECEIPT.unpack(data)
        with self._changed:
            channel = self._channels.get((sender, Stream(stream)))
            if channel is not None and channel.window is not None and channel.epoch == envelope.sender:
                channel.window.on_receipt(StreamPosition(*place), self._clock())
                self._changed.notify_all()

    # ---- ending ----

    def forget(self, node: str, epoch: int) -> None:
        """Drop everything unfinished of a session that has ended. Messages waiting to be sent to it raise Unreachable."""
        with self._changed:
            self._assembler.forget(node, epoch)
            self._end([key for key, channel in self._channels.items() if key[0] == node and channel.epoch == epoch])

    def forget_all(self) -> None:
        with self._changed:
            self._assembler.clear()
            self._end(list(self._channels))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _end(self, keys: list[tuple[str, Stream]]) -> None:
        for key in keys:
            self._channels.pop(key).gone = True
        self._changed.notify_all()


class _Channel:
    """One stream to one session of a node.

    lock: held by the thread that sends a message on it.
    busy: whether a message is being sent on it.
    """

    def __init__(self, node: str, epoch: int, stream: Stream) -> None:
        self.node = node
        self.epoch = epoch
        self.stream = stream
        self.lock = threading.Lock()
        self.window = SendWindow(MAX_WAIT_S[stream]) if stream in MAX_WAIT_S else None
        self.busy = False
        self.gone = False
