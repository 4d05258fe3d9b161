"""The limits of a key hold, whatever comes when: answers at once, and tokens in any 60 seconds."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.config.keys import KeyLimits
from penstock.doors.access.keys import OWNER, Caller
from penstock.doors.access.meter import MIN_OPEN_ENDED_TOKENS, Meter, Ticket, Used
from penstock.errors import KeyLimit, KeyRevoked, RequestError
from tests.clock import Clock

JOBS, TOKENS = 5, 1000


def caller(name: str = "bob", **limits: int) -> Caller:
    return Caller(f"digest of {name}", name, KeyLimits(**limits))  # type: ignore[arg-type]


# ---- one request after the other ----


def test_a_request_reserves_its_prompt_and_the_most_it_may_generate_and_gives_back_what_it_did_not_use() -> None:
    clock, bob = Clock(), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    ticket = meter.admit(bob, outputs=2, prompt_tokens=100, max_tokens=200)
    assert meter.used(bob) == Used(2, 500)
    ticket.count(100)
    ticket.count(7)
    assert meter.used(bob) == Used(2, 500)
    ticket.close()
    ticket.close()
    ticket.count(50)  # it is over
    assert meter.used(bob) == Used(0, 107)
    clock.now += 61
    assert meter.used(bob) == Used(0, 0)


def test_an_open_answer_keeps_its_reservation_however_long_it_takes() -> None:
    clock, bob = Clock(), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    meter.admit(bob, outputs=1, prompt_tokens=100, max_tokens=800).count(100)
    clock.now += 300
    assert meter.used(bob) == Used(1, 800)


@pytest.mark.parametrize("outputs, context, given", [(1, 8000, 800), (3, 8000, 266), (1, 300, 300)])
def test_answers_with_an_open_end_get_what_the_minute_has_left(outputs: int, context: int, given: int) -> None:
    meter, bob = Meter(Clock()), caller(tokens_per_minute=TOKENS)
    meter.admit(bob, outputs=1, prompt_tokens=50, max_tokens=50).count(100)
    ticket = meter.admit(bob, outputs=outputs, prompt_tokens=100, max_tokens=context, open_ended=True)
    assert ticket.max_tokens == given
    assert meter.used(bob).tokens == 200 + outputs * given


def test_an_open_end_waits_until_there_is_room_for_a_short_answer() -> None:
    clock, bob = Clock(), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    earlier = meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=TOKENS - MIN_OPEN_ENDED_TOKENS)
    earlier.count(TOKENS - MIN_OPEN_ENDED_TOKENS)
    earlier.close()
    with pytest.raises(KeyLimit, match=f"this request may need {MIN_OPEN_ENDED_TOKENS + 1}") as refused:
        meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=8000, open_ended=True)
    assert meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=100, open_ended=True).max_tokens == 100  # all that fits
    clock.now += refused.value.retry_after
    assert meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=8000, open_ended=True).max_tokens >= MIN_OPEN_ENDED_TOKENS


def test_an_open_end_alone_never_keeps_a_request_out_for_ever() -> None:
    ticket = Meter().admit(
        caller(tokens_per_minute=MIN_OPEN_ENDED_TOKENS), outputs=4, prompt_tokens=100, max_tokens=8000, open_ended=True
    )
    assert ticket.max_tokens == (MIN_OPEN_ENDED_TOKENS - 100) // 4


def test_without_a_limit_of_tokens_an_answer_is_as_long_as_the_context_allows() -> None:
    for who in (OWNER, caller(jobs=1)):
        assert Meter().admit(who, outputs=1, prompt_tokens=10, max_tokens=8000, open_ended=True).max_tokens == 8000


def test_what_is_refused_after_it_was_admitted_costs_nothing() -> None:
    meter, bob = Meter(Clock()), caller(tokens_per_minute=TOKENS)
    meter.admit(bob, outputs=1, prompt_tokens=900, max_tokens=100).close()
    assert meter.used(bob) == Used(0, 0)


def test_too_many_answers_at_once_are_told_the_limit_and_what_is_open() -> None:
    meter, bob = Meter(Clock()), caller(jobs=3)
    ticket = meter.admit(bob, outputs=2, prompt_tokens=1, max_tokens=1)
    with pytest.raises(KeyLimit, match="'bob' may have 3 answers open at once; 2 are open, this request asks for 2") as refused:
        meter.admit(bob, outputs=2, prompt_tokens=1, max_tokens=1)
    assert (refused.value.code, refused.value.retry_after) == ("key_limit", 1)
    ticket.close()
    meter.admit(bob, outputs=3, prompt_tokens=1, max_tokens=1)


def test_too_many_tokens_are_told_the_limit_what_is_used_and_when_to_come_back() -> None:
    clock, bob = Clock(), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    ticket = meter.admit(bob, outputs=1, prompt_tokens=500, max_tokens=100)
    ticket.count(600)
    clock.now += 20
    message = "'bob' may use 1000 tokens a minute; 600 are used and 0 reserved for open answers, and this request may need 500"
    with pytest.raises(KeyLimit, match=message) as refused:
        meter.admit(bob, outputs=1, prompt_tokens=400, max_tokens=100)
    assert refused.value.retry_after == 40


def test_where_open_answers_hold_the_room_the_wait_is_short() -> None:
    meter, bob = Meter(Clock()), caller(tokens_per_minute=TOKENS)
    meter.admit(bob, outputs=1, prompt_tokens=100, max_tokens=900)
    with pytest.raises(KeyLimit) as refused:
        meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=1)
    assert refused.value.retry_after == 1


@pytest.mark.parametrize(
    "outputs, prompt_tokens, max_tokens, open_ended, field",
    [
        (6, 1, 1, False, "n"),
        (1, 1001, 50, True, "max_tokens"),
        (1, 1000, 50, True, "max_tokens"),
        (2, 100, 451, False, "max_tokens"),
    ],
)
def test_what_could_never_fit_is_refused_as_wrong(
    outputs: int, prompt_tokens: int, max_tokens: int, open_ended: bool, field: str
) -> None:
    bob = caller(jobs=JOBS, tokens_per_minute=TOKENS)
    with pytest.raises(RequestError) as refused:
        Meter(Clock()).admit(bob, outputs=outputs, prompt_tokens=prompt_tokens, max_tokens=max_tokens, open_ended=open_ended)
    assert refused.value.field == field


def test_keys_do_not_share_their_limits_and_the_owner_has_none() -> None:
    meter = Meter(Clock())
    for who in (caller("bob", jobs=1), caller("eve", jobs=1), OWNER, OWNER):
        meter.admit(who, outputs=1, prompt_tokens=10**9, max_tokens=10**9)
    with pytest.raises(KeyLimit):
        meter.admit(caller("bob", jobs=1), outputs=1, prompt_tokens=1, max_tokens=1)


# ---- revoking ----


def test_a_revoked_key_tells_all_that_it_has_open_and_nobody_else() -> None:
    meter, bob, eve = Meter(Clock()), caller("bob"), caller("eve")
    output: list[str] = []
    for name, who in (("a", bob), ("b", bob), ("closed", bob), ("eve", eve)):
        ticket = meter.admit(who, outputs=1, prompt_tokens=1, max_tokens=1)
        ticket.on_revoked(lambda error, name=name: output.append(f"{name}: {error.message}"))  # type: ignore[misc]
        if name == "closed":
            ticket.close()
    meter.revoke(bob)
    assert sorted(output) == ["a: The key 'bob' is no longer valid.", "b: The key 'bob' is no longer valid."]


def test_who_asks_to_be_told_after_the_key_was_revoked_is_told_at_once() -> None:
    meter, bob = Meter(Clock()), caller()
    ticket = meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=1)
    meter.revoke(bob)
    output: list[KeyRevoked] = []
    ticket.on_revoked(output.append)
    assert [error.code for error in output] == ["key_revoked"]


# ---- whatever comes when ----


@given(
    counted=st.lists(st.tuples(st.integers(0, 40 * 64), st.integers(1, 300)), max_size=12),
    prompt=st.integers(1, 500),
    most=st.integers(1, 500),
    still_open=st.integers(0, 300),
)
def test_who_comes_back_when_told_to_is_admitted_and_a_second_before_is_not(
    counted: list[tuple[int, int]], prompt: int, most: int, still_open: int
) -> None:
    """Times are in 64ths of a second, which floats hold exactly."""
    clock, bob = Clock(), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    earlier = meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=1)
    for pause, tokens in counted:
        clock.now += pause / 64
        earlier.count(tokens)
    earlier.close()
    try:
        if still_open:
            meter.admit(bob, outputs=1, prompt_tokens=0, max_tokens=still_open)
        meter.admit(bob, outputs=1, prompt_tokens=prompt, max_tokens=most)
    except KeyLimit as refused:
        wait = refused.retry_after
    else:
        return
    note(f"told to wait for {wait} s")
    open_now = meter.used(bob).jobs
    if open_now and still_open + prompt + most > TOKENS:
        return  # it depends on when the open one ends
    asked = (prompt, most) if open_now or not still_open else (0, still_open)
    if wait > 1:
        clock.now += wait - 1 - 1 / 8  # a tick is the most that the wait may be too long
        with pytest.raises(KeyLimit):
            meter.admit(bob, outputs=1, prompt_tokens=asked[0], max_tokens=asked[1])
        clock.now += 1 + 1 / 8
    else:
        clock.now += wait
    meter.admit(bob, outputs=1, prompt_tokens=asked[0], max_tokens=asked[1])


@given(began=st.integers(0, 10_000), later=st.integers(60 * 64 - 20, 60 * 64 + 20))
def test_a_token_counts_for_a_minute_and_a_tick_at_most(began: int, later: int) -> None:
    clock, bob = Clock(began / 64), caller(tokens_per_minute=TOKENS)
    meter = Meter(clock)
    ticket = meter.admit(bob, outputs=1, prompt_tokens=1, max_tokens=1)
    ticket.count(1)
    ticket.close()
    clock.now += later / 64
    if later < 60 * 64:
        assert meter.used(bob).tokens == 1
    elif later >= 60 * 64 + 13:  # more than two tenths of a second
        assert meter.used(bob).tokens == 0


class ManyRequests(RuleBasedStateMachine):
    """Requests with an end and without, of which some are still open, some gone; and a ledger of every token, with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.meter, self.bob = Meter(self.clock), caller(jobs=JOBS, tokens_per_minute=TOKENS)
        self.open: list[tuple[Ticket, int]] = []  # and what it may still use
        self.ledger: list[tuple[float, int]] = []

    @rule(outputs=st.integers(1, JOBS), prompt=st.integers(1, 300), most=st.integers(1, 200))
    def ask(self, outputs: int, prompt: int, most: int) -> None:
        before = self.meter.used(self.bob)
        need = prompt + outputs * most
        try:
            ticket = self.meter.admit(self.bob, outputs=outputs, prompt_tokens=prompt, max_tokens=most)
        except KeyLimit:
            assert before.jobs + outputs > JOBS or before.tokens + need > TOKENS
        except RequestError:
            assert need > TOKENS
        else:
            self.open.append((ticket, need))

    @rule(outputs=st.integers(1, JOBS), prompt=st.integers(1, 300), context=st.integers(1, 2000))
    def ask_without_an_end(self, outputs: int, prompt: int, context: int) -> None:
        before = self.meter.used(self.bob)
        least = prompt + outputs * min(context, MIN_OPEN_ENDED_TOKENS, (TOKENS - prompt) // outputs)
        try:
            ticket = self.meter.admit(self.bob, outputs=outputs, prompt_tokens=prompt, max_tokens=context, open_ended=True)
        except KeyLimit:
            assert before.jobs + outputs > JOBS or before.tokens + least > TOKENS
        else:
            assert prompt + outputs * ticket.max_tokens >= least
            self.open.append((ticket, prompt + outputs * ticket.max_tokens))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.open) - 1))
        ticket, left = self.open[number]
        tokens = data.draw(st.integers(0, left))
        ticket.count(tokens)
        self.ledger.append((self.clock.now, tokens))
        self.open[number] = (ticket, left - tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ticket, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        ticket.close()

    @rule(pause=st.integers(0, 70 * 64))
    def wait(self, pause: int) -> None:
        self.clock.now += pause / 64

    @invariant()
    def no_minute_has_more_than_the_limit(self) -> None:
        for end, _ in self.ledger:
            assert sum(tokens for when, tokens in self.ledger if end - 60 < when <= end) <= TOKENS

    @invariant()
    def no_more_answers_are_open_than_the_limit(self) -> None:
        assert self.meter.used(self.bob).jobs == sum(ticket.outputs for ticket, _ in self.open) <= JOBS

    def teardown(self) -> None:
        for ticket, _ in self.open:
            ticket.close()
        self.clock.now += 61
        assert self.meter.used(self.bob) == Used(0, 0)


ManyRequests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManyRequests = ManyRequests.TestCase
