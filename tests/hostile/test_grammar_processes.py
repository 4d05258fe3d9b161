"""Grammars in processes: what each may take, and that none outlives its use, its client or the server."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.doors.grammar import pool
from penstock.doors.grammar.constraint import HOLD_SHARE, GrammarConstraint, WaitBudget
from penstock.doors.grammar.grammars import Grammars, GrammarTooComplex
from penstock.doors.grammar.remote import Aborted
from penstock.doors.tools import ToolCalling
from penstock.errors import ComputeFailed, KeyLimit, RequestError
from tests.doors.grammar.answers import allowed_tokens
from tests.hostile.bombs import (
    LARK_BOMB,
    LATE_SCHEMA_BOMB,
    SCHEMA_BOMB,
    all_costly,
    cpu_until_gone,
    fork_server_of,
    schema_bomb,
    tools_of,
    until,
)
from tests.hostile.conftest import GIVEN_UP_CPU_S, LONG, SOON, MakeGrammars


def request_of(grammars: Grammars, owner: str | None = None, aborted: threading.Event | None = None) -> Grammars:
    return grammars.for_request(owner, aborted or threading.Event())


# ---- CPU time ----


@pytest.mark.parametrize("kind, bomb", [("json_schema", SCHEMA_BOMB), ("lark", LARK_BOMB)])
def test_a_bomb_is_refused_when_its_time_is_over_and_leaves_nothing_behind(
    make_grammars: MakeGrammars, kind: str, bomb: object
) -> None:
    grammars = make_grammars(compile_cpu_s=SOON)
    server = fork_server_of(grammars)
    before = server.children()
    with pytest.raises(GrammarTooComplex, match=r"takes more than 0\.2 seconds of CPU time") as caught:
        getattr(grammars, kind)(bomb, field="response_format")
    assert caught.value.field == "response_format"
    assert "combine fewer patterns" in caught.value.hint
    until(lambda: server.children() == before)  # which lists zombies, too


def test_a_bomb_that_comes_again_is_refused_at_once(make_grammars: MakeGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars(compile_cpu_s=SOON)
    bomb = schema_bomb(1)
    with pytest.raises(GrammarTooComplex):
        grammars.json_schema(bomb, field="f")
    monkeypatch.setattr(grammars._model.processes, "fork", None)  # no process is needed
    with pytest.raises(GrammarTooComplex):
        request_of(grammars, "another key").json_schema(bomb, field="f")


def test_a_key_that_compiles_all_the_time_waits_and_others_do_not(make_grammars: MakeGrammars) -> None:
    grammars, aborted = make_grammars(), threading.Event()
    hostile = request_of(grammars, "hostile", aborted)
    hostile.regex("first", field="regex")
    server = fork_server_of(grammars)
    grammars._model.pool._accounts["hostile"].compile_budget.spend(1e6)
    before = server.children()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(hostile.regex, "second", field="regex")
        hostile.regex("first", field="regex")  # costs nothing
        request_of(grammars, "honest").regex("second", field="regex")
        request_of(grammars).regex("second", field="regex")  # the operator's
        assert len(set(server.children()) - set(before)) == 2  # others may be about to end
        assert not waiting.done()
        aborted.set()
        with pytest.raises(Aborted):
            waiting.result(60)


@pytest.mark.parametrize("bomb, least", [(False, 0.0), (True, SOON)])
def test_compiling_is_charged_to_its_key_whether_it_is_refused_or_not(
    make_grammars: MakeGrammars, bomb: bool, least: float
) -> None:
    grammars = make_grammars(compile_cpu_s=SOON)
    owner = f"charged {bomb}"
    with suppress(GrammarTooComplex):
        request_of(grammars, owner).json_schema(schema_bomb(7) if bomb else {"type": "integer"}, field="f")
    account = grammars._model.pool._accounts[owner]
    charged = pool.COMPILE_BURST_S - account.compile_budget._left
    assert least + pool.PROCESS_CPU_S - 1e-9 <= charged <= pool.MAX_COMPILE_CHARGE_S


def test_all_grammars_of_a_request_share_its_time(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(compile_cpu_s=SOON)
    request = request_of(grammars)
    request.regex("cheap", field="regex")
    with pytest.raises(GrammarTooComplex):
        request.json_schema(schema_bomb(2), field="f")
    with pytest.raises(GrammarTooComplex):
        request.regex("cheap, and too late", field="regex")
    request_of(grammars).regex("cheap, and too late", field="regex")
    with pytest.raises(GrammarTooComplex):  # it had less time than a request of its own would have
        request_of(grammars).json_schema(schema_bomb(2), field="f")


def test_the_tool_at_fault_is_looked_for_only_while_there_is_time(make_grammars: MakeGrammars) -> None:
    """Each is compiled by itself to find it: the first two are fine, the third is broken, and nobody looks at the fourth."""
    schemas = [{"type": "string"}, {"type": "integer"}, {"type": "string", "pattern": "(?=broken)"}, SCHEMA_BOMB]
    tools = [tools_of(schema, name=f"tool_{i}", strict=True)[0] for i, schema in enumerate(schemas)]
    request = request_of(make_grammars(compile_cpu_s=SOON))
    for order, fields in ((tools, {"tools[2].function.parameters"}), (tools[::-1], {"tools[1].function.parameters", "tools"})):
        plan = ToolCalling(None).plan([{"role": "user", "content": "x"}], order, "required")
        assert plan.grammar is not None
        with pytest.raises(RequestError) as caught:
            plan.grammar.compile(request)
        assert caught.value.field in fields


def test_a_grammar_that_becomes_slow_later_fails_its_own_answers_and_blocks_nobody(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars()
    server = fork_server_of(grammars)
    other = grammars.regex("(a|b)+", field="regex")()
    before = server.children()
    constraint = grammars.json_schema(LATE_SCHEMA_BOMB, field="f")()
    same_grammar = grammars.json_schema(LATE_SCHEMA_BOMB, field="g")()
    late, error = 0, None
    while error is None:
        try:
            mask = constraint.mask()
            if mask is not None:
                constraint.accept(_x_or_any(grammars, mask))
        except RequestError as found:
            error = found
        else:
            late += mask is None
            assert other.mask() is not None
            time.sleep(0.005)
    assert late
    assert (error.field, "takes too much CPU time" in error.message) == ("f", True)
    with pytest.raises(RequestError, match="CPU time"):
        same_grammar.accept(1)
    until(lambda: server.children() == before)
    assert grammars.json_schema(LATE_SCHEMA_BOMB, field="f")().mask() is not None  # compiled again


def _x_or_any(grammars: Grammars, mask: np.ndarray) -> int:
    tokens = [int(token) for token in allowed_tokens(mask)]
    texts = grammars.token_bytes(tokens)
    return next((token for token, text in zip(tokens, texts, strict=True) if set(text) == {ord("x")}), tokens[-1])


@pytest.mark.slow
def test_an_ambiguous_grammar_has_so_much_time_for_an_answer(make_grammars: MakeGrammars) -> None:
    constraint = make_grammars().lark('start: a\na: a a | "x" | "y" | a a a', field="grammar")()
    with pytest.raises(RequestError, match="any further"):
        random_answer(constraint, random.Random(0), limit=10_000)


# ---- memory ----


def test_a_grammar_that_takes_too_much_memory_is_refused(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(compile_cpu_s=600.0, memory_bytes=48 << 20)
    server = fork_server_of(grammars)
    before = server.children()
    with pytest.raises(GrammarTooComplex, match="takes more than 48 MB of memory"):
        grammars.json_schema(SCHEMA_BOMB, field="f")
    until(lambda: server.children() == before)


def test_the_grammars_of_a_key_share_its_memory(make_grammars: MakeGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars()
    monkeypatch.setattr(pool, "BASE_MEMORY_BYTES", 0)
    request = request_of(grammars, "memory")
    used = request.regex("used [0-9]", field="regex")
    unused = request.regex("unused [0-9]", field="regex")._grammar
    account = grammars._model.pool._accounts["memory"]
    monkeypatch.setattr(account, "_max_memory", account.memory - 1)
    gc.collect()
    request.regex("makes room", field="regex")
    assert unused.has_ended
    monkeypatch.setattr(account, "_max_memory", 0)
    with pytest.raises(KeyLimit, match="different schemas and grammars are in use at once"):
        request.regex("no room is left", field="regex")
    assert used().mask() is not None
    assert request_of(grammars, "another key").regex("no room is left", field="regex")


def test_a_grammar_that_grows_beyond_what_its_key_may_have_is_ended(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars()
    constraint = request_of(grammars, "growing").regex("(.*a.{40}b)*x", field="regex")()
    account = grammars._model.pool._accounts["growing"]
    grown = constraint._grammar
    grown._on_growth(grown)
    assert grown.failure is None
    grown.memory = pool.BASE_MEMORY_BYTES + (300 << 20)
    grown._on_growth(grown)
    with pytest.raises(RequestError, match="takes too much memory"):
        constraint.mask()
    assert not account.live


def test_a_key_has_only_so_many_grammars_at_once(make_grammars: MakeGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars()
    monkeypatch.setattr(pool, "MAX_LIVE", 4)
    request = request_of(grammars, "many")
    kept = [request.regex(f"kept {i}", field="regex") for i in range(4)]
    with pytest.raises(KeyLimit) as caught:
        request.regex("one more", field="regex")
    assert caught.value.retry_after > 0
    request_of(grammars, "another key").regex("one more", field="regex")
    kept.pop()
    request.regex("one more", field="regex")


# ---- the step ----


@given(st.lists(st.tuples(st.floats(0, 0.2), st.booleans()), max_size=60))
def test_the_compute_thread_waits_no_longer_than_its_patience(events: list[tuple[float, bool]]) -> None:
    """For two keys that are always late: time passes, then one waits for as long as it may."""
    now = 0.0
    shared = WaitBudget(0.045, clock=lambda: now)
    keys = [WaitBudget(0.036, shared, clock=lambda: now) for _ in range(2)]
    waited = [0.0, 0.0]
    for passed, which in events:
        now += passed
        left = keys[which].left
        assert left <= 0.036
        if left > 0:
            now += left
            waited[which] += left
            keys[which].spend(left)
    assert max(waited) <= 0.036 + HOLD_SHARE * now + 1e-9
    assert sum(waited) <= 0.045 + HOLD_SHARE * now + 1e-9


# ---- the client leaves ----


def starts_to_compile(server: psutil.Process, before: list[psutil.Process]) -> psutil.Process:
    """The process of a grammar, when it is at work."""
    until(lambda: len(server.children()) > len(before))
    (process,) = set(server.children()) - set(before)
    until(lambda: process.cpu_times().user > 0.05)
    return process


def test_when_the_client_leaves_its_grammar_is_given_up(make_grammars: MakeGrammars) -> None:
    grammars, left = make_grammars(**LONG), threading.Event()
    server = fork_server_of(grammars)
    before = server.children()
    with ThreadPoolExecutor(2) as threads:
        at_work = threads.submit(lambda: request_of(grammars, "k", left).json_schema(SCHEMA_BOMB, field="f"))
        process = starts_to_compile(server, before)
        waiting = threads.submit(lambda: request_of(grammars, "k", left).regex("behind it", field="f"))
        left.set()
        for request in (at_work, waiting):
            assert isinstance(request.exception(timeout=60), Aborted)
    assert cpu_until_gone(process) < GIVEN_UP_CPU_S
    until(lambda: server.children() == before)


def test_keys_do_not_wait_for_each_other_and_the_requests_of_one_do(make_grammars: MakeGrammars) -> None:
    grammars, left = make_grammars(**LONG), threading.Event()
    server = fork_server_of(grammars)
    before = server.children()
    with ThreadPoolExecutor(2) as threads:
        bomb = threads.submit(lambda: request_of(grammars, "hostile", left).json_schema(SCHEMA_BOMB, field="f"))
        starts_to_compile(server, before)
        same_key = threads.submit(lambda: request_of(grammars, "hostile").regex("the same key", field="f"))
        assert request_of(grammars, "honest").regex("another key", field="f")
        assert not bomb.done()
        assert not same_key.done()
        left.set()
        assert same_key.result(timeout=60)
        assert isinstance(bomb.exception(), Aborted)


def test_a_grammar_that_nobody_uses_any_more_ends(make_grammars: MakeGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars()
    server = fork_server_of(grammars)
    monkeypatch.setattr(pool, "MAX_USES", 0)  # it is not used again
    before = server.children()
    constraint = grammars.checked_lark('start: "unused"', field="f", keep=False)()
    assert len(server.children()) == len(before) + 1
    del constraint
    until(lambda: server.children() == before)


# ---- the server ends, or a process is killed ----

SERVE = """
import sys, threading
from pathlib import Path
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.pool import GrammarLimits
from tests.hostile.bombs import SCHEMA_BOMB
from tests.hostile.conftest import LONG
grammars = Grammars(Path(sys.argv[1]), vocab=49152, eos_ids={2}, limits=GrammarLimits(**LONG))
idle = grammars.json_object()
print(grammars._model.processes.pid, flush=True)
threading.Thread(target=lambda: grammars.json_schema(SCHEMA_BOMB, field="f"), daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_process_outlives_its_server(default_model_folder: Path, number: int) -> None:
    tokenizer = str(default_model_folder / "tokenizer.json")
    with subprocess.Popen([sys.executable, "-c", SERVE, tokenizer], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        fork_server = psutil.Process(int(server.stdout.readline()))
        until(lambda: len(fork_server.children()) == 2)
        idle, bomb = fork_server.children()
        until(lambda: bomb.cpu_times().user > 0.05)
        server.send_signal(number)
    assert all(cpu_until_gone(process) < GIVEN_UP_CPU_S for process in (fork_server, idle, bomb))


def test_signals_for_the_server_do_not_end_its_grammars(make_grammars: MakeGrammars) -> None:
    """A terminal sends Ctrl-C to all processes, and systemd SIGTERM: the server finishes its answers first."""
    grammars = make_grammars()
    server = fork_server_of(grammars)
    constraint = grammars.regex("[ab]{3}", field="regex")()
    for process in (server, *server.children()):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
    assert not constraint.accept(int(allowed_tokens(constraint.mask())[0]))
    assert grammars.regex("[ab]{4}", field="regex")().mask() is not None


def test_a_process_that_somebody_kills_is_not_the_fault_of_the_grammar(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars()
    server = fork_server_of(grammars)
    before = server.children()
    constraint = grammars.regex("killed [0-9]+", field="regex")()
    (process,) = set(server.children()) - set(before)
    process.kill()
    until(lambda: server.children() == before)
    with pytest.raises(ComputeFailed, match="ended from outside"):
        constraint.accept(1)
    assert grammars.regex("killed [0-9]+", field="regex")().mask() is not None  # compiled again


@pytest.mark.slow
def test_a_fork_server_that_somebody_kills_is_started_again(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(compile_cpu_s=4.0)
    constraint = grammars.regex("[ab]{3}", field="regex")()
    server = fork_server_of(grammars)
    server.kill()
    server.wait()
    assert grammars.regex("[ab]{5}", field="regex")().mask() is not None
    assert fork_server_of(grammars).pid != server.pid
    assert not constraint.accept(int(allowed_tokens(constraint.mask())[0]))  # its own process lives


def test_where_no_process_can_be_started_the_error_says_so(default_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(default_model_folder / "tokenizer.json", vocab=49152, eos_ids={2})
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ComputeFailed, match="The process for grammars cannot be started: No such file") as caught:
        grammars.json_object()
    assert "plain text can" in caught.value.hint
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ComputeFailed, match="it ended at once"):
        grammars.json_object()


def test_the_fork_server_imports_only_what_it_needs() -> None:
    code = "import sys, penstock.doors.grammar.worker; print(*{'torch', 'numpy', 'starlette', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---- all that is known ----


def random_answer(constraint: GrammarConstraint, rng: random.Random, limit: int = 150) -> None:
    for _ in range(limit):
        while (mask := constraint.mask()) is None:
            time.sleep(0.01)
        tokens = [token for token in allowed_tokens(mask) if token not in (0, 2)]
        if not tokens or constraint.accept(int(rng.choice(tokens))):
            return


@pytest.mark.slow
def test_no_costly_grammar_takes_more_than_the_limits(make_grammars: MakeGrammars) -> None:
    """With the real limits, and a random answer for each that can be compiled."""
    grammars = make_grammars()
    server = fork_server_of(grammars)
    at_fork, peak, stop = server.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.05):  # looking for children costs
            for child in server.children():
                with suppress(psutil.NoSuchProcess):
                    peak = max(peak, child.memory_info().rss - at_fork)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcomes: dict[str, str] = {}
    try:
        for name, compile_it in all_costly(grammars).items():
            try:
                random_answer(compile_it()(), random.Random(name))
                outcomes[name] = "answered"
            except RequestError as error:
                outcomes[name] = error.message
    finally:
        stop.set()
        watcher.join()
    assert peak < 300 << 20
    assert "answered" in outcomes.values()
