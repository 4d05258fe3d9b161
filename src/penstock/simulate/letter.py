"""Letter: a message as it travels between simulated nodes. Everything but the values of hidden states is encoded for real."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.messages import Message
from penstock.domain.span import NetworkJob, PackedHidden
from penstock.network.codec import decode, encode
from penstock.network.router import Bytes
from penstock.simulate.hollow import HollowHidden

THIN_BYTES = 4  # per row: one value stands for a row of any width


@dataclass(slots=True)
class Letter:
    """An encoded message. size: its length on the wire. width, dtype: of hidden states sent without values; width 0 if none."""

    data: Bytes
    size: int
    width: int = 0
    dtype: HiddenFormat = "float32"

    @classmethod
    def of(cls, data: Bytes) -> Letter:
        """Wrap a complete message."""
        return cls(data, len(data))

    def __len__(self) -> int:
        return self.size


def encode_letter(message: Message, sent: float) -> Letter:
    if not isinstance(message, NetworkJob) or not isinstance(message.hidden, HollowHidden):
        return Letter.of(encode(message, sent))
    hidden = message.hidden
    message.hidden = PackedHidden("float32", hidden.rows, 1, bytes(THIN_BYTES * hidden.rows))
    data = encode(message, sent)
    message.hidden = hidden
    return Letter(data, len(data) - THIN_BYTES * hidden.rows + hidden.packed_bytes, hidden.width, hidden.dtype)


def decode_letter(letter: Letter) -> Message:
    message = decode(letter.data)
    if letter.width and isinstance(message, NetworkJob) and message.hidden is not None:
        message.hidden = HollowHidden(message.hidden.rows, letter.width, letter.dtype)
    return message
