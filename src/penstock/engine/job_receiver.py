"""JobReceiver: decodes messages from other nodes and hands each to its engine, or bounces it to its origin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sized
from typing import Any

from penstock.domain.fsm import HEAD_STEP
from penstock.domain.messages import (
    AskWeights,
    Bounce,
    BounceReason,
    Control,
    Echo,
    Mark,
    Message,
    OpenRoute,
    RouteOffer,
    WeightsPart,
)
from penstock.domain.span import NetworkJob
from penstock.engine.engine import Engine
from penstock.errors import BadMessage, DamagedMessage
from penstock.network.link_meter import LinkMeter
from penstock.network.rate_limit import RateLimit

MAX_METERS = 256  # senders
MAX_MESSAGES_PER_S = 10_000  # of a sender; an honest node cannot encode nearly as many
MAX_CONTROL_PER_S = 500  # ... of those that the compute thread answers; an honest one sends about twenty for each model
BURST_S = 10  # a sender that was silent may send this many seconds' worth at once
MAX_TRANSFER_S = 3600.0


class JobReceiver:
    """Runs on threads of the network, one for each stream: `on_message` may be called by several at once.

    decode: checks length, version, checksum and shape before anything else is read. Nothing else reads the raw data.
    engines: by model; may grow at any time.
    on_transfer: called with the sender, bytes and seconds of every NetworkJob.
    """

    def __init__(
        self,
        decode: Callable[[Any], Message],
        engines: Mapping[str, Engine],
        send: Callable[[str, Message], None],
        on_weights: Callable[[str, AskWeights | WeightsPart], None] = lambda sender, message: None,
        on_echo: Callable[[str, Echo], None] = lambda sender, echo: None,
        on_transfer: Callable[[str, int, float], None] = lambda sender, size, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode = decode
        self._engines = engines
        self._send = send
        self._on_weights = on_weights
        self._on_echo = on_echo
        self._on_transfer = on_transfer
        self._clock = clock
        self._meters: dict[str, LinkMeter] = {}  # by sender
        self._messages = RateLimit(MAX_MESSAGES_PER_S, MAX_MESSAGES_PER_S * BURST_S, clock)
        self._control = RateLimit(MAX_CONTROL_PER_S, MAX_CONTROL_PER_S * BURST_S, clock)

    def on_message(self, sender: str, data: Sized) -> None:
        if not self._messages.allows(sender):
            self._refuse_rate(sender)
            return
        try:
            message = self._decode(data)
        except BadMessage as error:
            for engine in list(self._engines.values())[:1]:
                engine.count_refused(error.code, sender, str(error))
            if isinstance(error, DamagedMessage) and error.route is not None and error.number is not None:
                self._bounce(sender, Bounce(error.route, error.number, BounceReason.DAMAGED))
            return
        size = len(data)
        if isinstance(message, (NetworkJob, Mark)):
            self._measure(sender, message, size)
            if isinstance(message, NetworkJob) and not self._is_from_predecessor(sender, message):
                size -= message.packed_bytes
                message.hidden = None  # it will be refused: free its memory now
        elif isinstance(message, Echo):
            self._on_echo(sender, message)
            return
        elif isinstance(message, (AskWeights, WeightsPart)):
            self._on_weights(sender, message)
            return
        elif not self._control.allows(sender):
            self._refuse_rate(sender)
            return
        elif isinstance(message, OpenRoute) and message.model not in self._engines:
            known = ", ".join(self._engines)
            self._send(
                sender, RouteOffer(message.route, reason=f"it does not hold {message.model} (it holds {known or 'nothing yet'})")
            )
            return
        for engine in self._engines_of(message):
            engine.deliver(sender, message, size)

    def _refuse_rate(self, sender: str) -> None:
        for engine in list(self._engines.values())[:1]:
            engine.count_refused("rate_limit", sender, "it sends more messages than this node accepts")

    def _measure(self, sender: str, message: NetworkJob | Mark, size: int) -> None:
        """Record how long a message was on its way. A NetworkJob carries these times back to its origin."""
        meter = self._meters.get(sender)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._meters.clear()
            meter = self._meters.setdefault(sender, LinkMeter())  # another thread may have been quicker
        seconds = min(MAX_TRANSFER_S, meter.observe(message.sent, self._clock()))
        if isinstance(message, NetworkJob):
            message.transfers.append(seconds)
            self._on_transfer(sender, size, seconds)

    def _engines_of(self, message: Control | NetworkJob | Mark) -> list[Engine]:
        """The engines that a message is for. Only OpenRoute names the model; the first engine answers for an unknown route."""
        if isinstance(message, OpenRoute):
            return [self._engines[message.model]]
        engines = list(self._engines.values())
        return [engine for engine in engines if engine.concerns(message.route)] or engines[:1]

    def _is_from_predecessor(self, sender: str, job: NetworkJob) -> bool:
        back = job.step is HEAD_STEP
        for engine in list(self._engines.values()):
            if (engine.origin if back else engine.host).is_predecessor(sender, job.route):
                return True
        return False

    def _bounce(self, sender: str, bounce: Bounce) -> None:
        """Tell the origin, but only if the sender is our predecessor on that route: any node can name any route."""
        for engine in list(self._engines.values()):
            if bounce.route.origin == engine.pipe.node:
                engine.deliver(sender, bounce)
            elif engine.host.is_predecessor(sender, bounce.route):
                self._send(bounce.route.origin, bounce)
