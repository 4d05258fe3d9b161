"""What arrives when: made-up requests with the lengths and the timing of real ones. The same seed makes the same traffic.

Open loop: a request arrives on schedule whether or not earlier ones were answered, like requests of people who do not know of
each other. Gaps between arrivals are exponential (a Poisson process). No text occurs twice, so no prefix cache can help.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN_ID = 100  # below lie special tokens
_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part place
case week company system program question work government number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea body information back parent face others level office door
health person art war history party result change morning reason research girl guy moment air teacher force education foot
boy age policy music market sense nation plan college interest death experience effect use class control care field
development role effort rate heart drug show leader light voice wife police mind price report decision son view relationship
town road arm difference value building action season society tax director position player record paper space ground form
event official matter center couple site project activity star table need court
"""
WORDS = _NOUNS.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal: half of all values are below `middle`, and a few are far above. `spread` is the sigma of the logarithm."""

    middle: float
    spread: float
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        return max(self.least, min(self.most, round(chance.lognormvariate(math.log(self.middle), self.spread))))


# Many short questions, some pasted texts; answers from a phrase to a page. Shorter than what large models are asked for, in
# proportion to what two cores can do in a minute.
QUESTION_WORDS = Lengths(middle=60, spread=0.9, least=6, most=700)
ANSWER_TOKENS = Lengths(middle=48, spread=0.7, least=8, most=200)


@dataclass(frozen=True, slots=True)
class Chat:
    at: float  # seconds after the start
    text: str
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    at: float  # seconds after the start
    ids: list[int]
    new_tokens: int
    long: bool


def poisson(chance: random.Random, rate: float) -> Iterator[float]:
    """Times of arrival, without end; the first is at 0."""
    at = 0.0
    while True:
        yield at
        at += chance.expovariate(rate)


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def chats(seed: str, *, rate: float, seconds: float) -> list[Chat]:
    """A mixture of chats that arrive during this many seconds; at least one."""
    lengths, arrivals = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/arrivals")
    found: list[Chat] = []
    for at in poisson(arrivals, rate):
        if at > seconds:
            return found
        found.append(_chat(lengths, at))
    raise AssertionError("time goes on")


def burst(seed: str, count: int) -> list[Chat]:
    """The same mixture, all at once."""
    lengths = random.Random(f"{seed}/lengths")
    return [_chat(lengths, 0.0) for _ in range(count)]


def equal_chats(seed: str, count: int, *, question_words: int, new_tokens: int) -> list[Chat]:
    """Chats of one length, all at once."""
    chance = random.Random(seed)
    return [Chat(0.0, words(chance, question_words), new_tokens) for _ in range(count)]


def long_among_short(
    seed: str, count: int, *, vocab: int, rate: float | None, long_share: float = 0.05, long_tokens: int = 4096
) -> list[Prompt]:
    """Short chats with some long prompts among them; without a rate, all at once.

    Exactly that share is long, at random positions: drawn independently, the load would vary by half.
    """
    chance = random.Random(seed)
    long_ones = set(chance.sample(range(count), k=max(1, round(count * long_share))))
    arrivals = poisson(chance, rate) if rate else iter([0.0] * count)
    found = []
    for number in range(count):
        length = long_tokens if number in long_ones else chance.randint(30, 100)
        ids = chance.choices(range(FIRST_TOKEN_ID, vocab), k=length)
        found.append(Prompt(next(arrivals), ids, chance.randint(32, 64), number in long_ones))
    return found


def _chat(chance: random.Random, at: float) -> Chat:
    return Chat(at, words(chance, QUESTION_WORDS.draw(chance)), ANSWER_TOKENS.draw(chance))
