"""Jobs that come after others: whom they wait for, what goes into their prompts, and why some are never run."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadJob, KeyTaken, RequestError, UnknownJob
from penstock.workspace.flow import Status
from penstock.workspace.store.files import MAX_PROMPT_BYTES, PROMPT, REQUEST, RESULT, USAGE, Place
from penstock.workspace.store.job_id import is_job_id, later_than, order
from penstock.workspace.store.outcomes import done
from penstock.workspace.store.parents import check_placeholders, fill_prompt, resolve_prompt
from penstock.workspace.store.request import MAX_PARENTS, WorkRequest, parse_request
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.worker import pool as pool_module
from penstock.workspace.worker.scanner import Scanner
from tests.workspace.queues import Queue, until
from tests.workspace.runners import REFUSED, text_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

A, B, C = "1000_1_1", "1000_1_2", "1000_1_3"
some_name = st.text("ab_-é7", min_size=1, max_size=3)
some_id = st.builds("{}_{}_{}".format, *[st.integers(0, 3)] * 3)


def end(queue: Queue, job_id: str, text: str = "the end") -> None:
    """As another server would."""
    held = queue.workspace.claim(job_id)
    assert held is not None
    queue.workspace.finish(held, done(text, {}))


def asked(after: dict[str, str], **more: Any) -> bytes:
    return json.dumps({"after": after, **more}).encode()


def why(queue: Queue, job_id: str) -> str:
    result = queue.flow.get(job_id)
    assert result.status is Status.FAILED
    return result.text


# ---- prompts ----


@given(st.lists(st.tuples(st.text("? {}\n"), some_name, st.integers(0, 2))), st.dictionaries(some_name, st.text("{}ab ")))
def test_results_are_put_in_once_and_never_looked_at_again(pieces: list[tuple[str, str, int]], known: dict[str, str]) -> None:
    results = {name: known.get(name, f"{{{{{name}}}}}") for _, name, _ in pieces}
    prompt = "".join(f"{text}|{{{{{' ' * space}{name}{' ' * space}}}}}" for text, name, space in pieces)
    assert fill_prompt(prompt, results) == "".join(f"{text}|{results[name]}" for text, name, _ in pieces)


@pytest.mark.parametrize(
    "prompt", ["{left}", "{{}}", "{{ }}", "{{a b}}", "{{a.b}}", "{ {left} }", "{{left}", "}}left{{", "{{\nleft}}"]
)
def test_braces_without_a_name_are_text(prompt: str) -> None:
    check_placeholders(prompt, ["right"])
    assert fill_prompt(prompt, {}) == prompt


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(queue: Queue) -> None:
    (job,) = queue.submit("parent")
    with pytest.raises(RequestError, match=r"has \{\{lfet\}\}.*The names are left, other: write \{\{left\}\}") as refused:
        queue.work.submit("{{left}} {{lfet}}", after={"left": job, "other": job})
    assert refused.value.field == "prompt"
    assert queue.names(Place.READY) == {job}


def test_braces_mean_nothing_to_a_job_without_parents(queue: Queue) -> None:
    jobs = queue.submit("{{left}}")
    queue.drain()
    queue.check(jobs, ["{{left}}"])


# ---- requests ----


@pytest.mark.parametrize(
    "after",
    ["1_1_1", ["1_1_1"], {"a": "../x"}, {"a": 7}, {"a b": A}, {"": A}, {"ä" * 201: A}, {B: A}, {f"n{i}": A for i in range(65)}],
    ids=str,
)
def test_what_cannot_be_a_parent_is_refused(after: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(asked(after))
    assert refused.value.field == "after"


def test_parents_are_kept_in_the_request_and_belong_to_what_is_asked() -> None:
    request = WorkRequest(after={"left": A, B: B})
    assert json.loads(request.to_json()) == {"after": {"left": A, B: B}}
    assert parse_request(request.to_json()) == request
    assert request.digest(b"x") == WorkRequest(after={B: B, "left": A}).digest(b"x")
    assert request.digest(b"x") != WorkRequest(after={"left": B, B: B}).digest(b"x")
    assert WorkRequest(after={f"n{i}": A for i in range(MAX_PARENTS)}).after


def test_a_key_with_parents_is_one_job_also_when_they_are_gone(queue: Queue) -> None:
    first, second = queue.submit("a", "b")
    job = queue.work.submit("c", after=[first], key="k")
    with pytest.raises(KeyTaken):
        queue.work.submit("c", after=[second], key="k")
    queue.drain()
    queue.workspace.throw_away([first], Place.OUTPUT)
    assert queue.work.submit("c", after=[first], key="k") == job


def test_a_parent_that_is_not_there_is_refused_and_nothing_is_submitted(queue: Queue) -> None:
    (job,) = queue.submit("a")
    with pytest.raises(UnknownJob, match=f"There is no job {A}"):
        queue.work.submit("b", after=[job, A])
    with pytest.raises(RequestError, match="is a string"):
        queue.work.submit("b", after=job)
    assert queue.names(Place.READY) | queue.names(Place.WRITING) == {job}


@given(st.lists(some_id, max_size=4), some_id)
def test_an_id_sorts_after_those_it_comes_after_and_changes_only_for_that(others: list[str], job_id: str) -> None:
    later = later_than(others, job_id)
    assert is_job_id(later)
    assert all(order(later) > order(other) for other in others)
    assert later.split("_")[1:] == job_id.split("_")[1:]
    assert later == job_id or any(order(job_id) <= order(other) for other in others)


def test_a_child_sorts_after_a_parent_from_the_future(queue: Queue) -> None:
    queue.plant("9000000000_9_9", {PROMPT: b"x"})
    (child,) = queue.submit("y", after=["9000000000_9_9"])
    assert child.startswith("9000000001_")
    last = "_".join(["9" * 18] * 3)
    queue.plant(last, {PROMPT: b"x"})
    with pytest.raises(RequestError, match="No id sorts after"):
        queue.submit("y", after=[last])


# ---- running ----


def test_a_diamond_is_run_from_top_to_bottom_with_the_results_of_each(queue: Queue) -> None:
    (top,) = queue.submit("top")
    left, right = (queue.work.submit(f"{side} of {{{{{top}}}}}", after=[top]) for side in ("left", "right"))
    join = queue.work.submit("{{l}} and {{ r }} and {{l}}", after={"l": left, "r": right, "unmentioned": top})
    assert queue.drain() == []
    above = {side: text_of(f"{side} of {text_of('top')}") for side in ("left", "right")}
    queue.check([join], [f"{above['left']} and {above['right']} and {above['left']}"])
    ended = [one.job_id for one in queue.ends]
    assert (ended[0], ended[-1], len(ended)) == (top, join, 4)


def test_a_child_is_taken_at_once_when_its_parent_ends_here(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SCAN_INTERVAL_S", 10_000.0)
    chain = queue.submit("0")
    for number in range(1, 5):
        chain += queue.submit(f"{number}", after=chain[-1:])
    with queue.pool():
        queue.check(chain, "01234")


def test_a_child_is_taken_when_another_server_ended_its_parent(queue: Queue) -> None:
    (parent,) = queue.submit("parent")
    held = queue.workspace.claim(parent)
    assert held is not None
    child = queue.work.submit("after {{p}}", after={"p": parent})
    with queue.pool() as pool:
        until(lambda: pool.describe()["queued"] == 1, "the child to be seen")
        assert queue.flow.describe(child).waits_for == (parent,)
        queue.workspace.finish(held, done("{{p}}", {}))
        queue.check([child], ["after {{p}}"])


def test_a_child_is_counted_and_not_offered_and_nothing_is_due_while_it_waits(queue: Queue) -> None:
    """Looked at with a scanner of our own, which no pool drives."""
    (parent,) = queue.submit("parent", model="mill")
    child = queue.work.submit("child", after=[parent])
    scanner = Scanner(queue.workspace, lambda: None)
    for _ in range(2):
        scanner.scan()
        scanner.read_new_jobs()
        assert (len(scanner), scanner.unread, scanner.first(lambda model: model is None)) == (2, 0, None)
    end(queue, parent)
    scanner.scan()
    assert (len(scanner), scanner.unread) == (1, 1)
    scanner.read_new_jobs()
    found = scanner.first(lambda model: True)
    assert found is not None
    assert found.job_id == child


def test_jobs_behind_one_whose_model_is_not_here_are_left(queue: Queue) -> None:
    (parent,) = queue.submit("0", model="mill")
    (child,) = queue.submit("1", after=[parent], model="fake")
    (grandchild,) = queue.submit("2", after=[child])
    (good,) = queue.submit("good")
    left = queue.drain()
    assert {job.job_id: job.model for job in left} == {parent: "mill", child: None, grandchild: None}
    queue.check([good], ["good"])
    assert queue.drain(queue.runner(models=("fake", "mill"))) == []
    queue.check([parent, child, grandchild], "012")


def test_a_job_behind_one_that_cannot_be_taken_does_not_hold_up_a_drain(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    (odd,) = queue.submit("odd")
    chain = queue.submit("child", after=[odd])
    chain += queue.submit("grandchild", after=chain)
    held = queue.workspace.claim(odd)
    assert held is not None
    held.release()  # as when its server dies

    def stumble(workspace: Workspace, held: HeldJob) -> int:
        raise ValueError("nobody has thought of this")

    monkeypatch.setattr(Workspace, "count_isolated_runs", stumble)
    pool = pool_module.Pool(queue.workspace, queue.runner())
    assert pool.drain() == []
    assert pool.blocked == {odd, *chain}
    assert queue.names(Place.READY) == set(chain)


# ---- failing ----


def test_a_failed_job_fails_all_after_it_and_each_names_who_failed_first(queue: Queue) -> None:
    (root,) = queue.submit(f"this is {REFUSED}")
    chain = queue.submit("1", after=[root])
    for number in range(2, 6):
        chain += queue.submit(f"{number}", after=chain[-1:])
    queue.drain()
    output = f"The job {root} failed: This prompt is refused."
    assert why(queue, chain[0]).startswith(f"{output} This job comes after it, and was not run.")
    for above, job in itertools.pairwise(chain):
        assert why(queue, job) == f"{output} This job comes after {above}, which was not run either.\n"
        assert queue.flow.get(job).usage["error"]["code"] == "parent_failed"
    assert not queue.made.read_bytes(), "none of them was run"


def test_a_child_does_not_wait_for_others_when_one_has_failed(queue: Queue) -> None:
    slow, doomed = queue.submit("slow", "doomed", model="mill")
    (child,) = queue.submit("child", after=[slow, doomed])
    queue.work.cancel(doomed)
    assert [job.job_id for job in queue.drain()] == [slow]
    assert f"The job {doomed} failed: The job was cancelled." in why(queue, child)


def test_a_child_fails_with_its_parent_although_its_own_model_is_not_here(queue: Queue) -> None:
    (parent,) = queue.submit(REFUSED)
    (child,) = queue.submit("child", after=[parent], model="mill")
    assert queue.drain() == []
    assert "This prompt is refused." in why(queue, child)


def test_a_parent_that_was_removed_fails_its_child(queue: Queue) -> None:
    (parent,) = queue.submit("parent")
    (child,) = queue.submit("child", after=[parent])
    end(queue, parent)
    queue.workspace.throw_away([parent], Place.OUTPUT)
    queue.drain()
    assert why(queue, child).startswith(f"The job {parent} was removed.")


def test_a_reason_does_not_grow_and_a_parent_need_not_give_one(queue: Queue) -> None:
    for job, usage in {"1_1_1": {"error": {"message": "x" * 5000}}, "1_1_2": {"error": [7]}, "1_1_3": {}}.items():
        queue.plant(job, {USAGE: json.dumps(usage).encode()}, Place.FAILED)
    children = [queue.submit("child", after=[job])[0] for job in ("1_1_1", "1_1_2", "1_1_3")]
    children += queue.submit("grandchild", after=children[:1])
    queue.drain()
    assert [len(queue.flow.get(job).usage["error"]["message"]) for job in (children[0], children[3])] == [600, 600]
    assert "The job 1_1_2 failed: no reason is recorded." in why(queue, children[1])
    assert "The job 1_1_3 failed: no reason is recorded." in why(queue, children[2])


def test_a_circle_made_by_hand_is_malformed_and_waits_for_nobody(queue: Queue) -> None:
    queue.plant(A, {PROMPT: b"x", REQUEST: asked({"b": B})})
    queue.plant(B, {PROMPT: b"x", REQUEST: asked({"a": A})})
    queue.plant(C, {PROMPT: b"x", REQUEST: asked({"me": C})})
    assert queue.drain() == []
    assert why(queue, A).startswith(f"Its parent {B} does not have an earlier id than the job itself.")
    assert f"The job {A} failed: Its parent {B}" in why(queue, B)
    assert "does not have an earlier id" in why(queue, C)


def test_a_job_made_by_hand_with_an_unknown_name_fails(queue: Queue) -> None:
    queue.plant(A, {PROMPT: b"x"})
    queue.plant(B, {PROMPT: b"{{b}}", REQUEST: asked({"a": A})})
    queue.drain()
    assert "The prompt has {{b}}" in why(queue, B)


def test_results_that_make_the_prompt_too_large_or_empty_fail_the_child(queue: Queue) -> None:
    (parent,) = queue.submit("parent")
    much = queue.work.submit("{{p}}{{p}}!", after={"p": parent})
    end(queue, parent, "x" * (MAX_PROMPT_BYTES // 2))
    (silent,) = queue.submit("silent")
    nothing = queue.work.submit("{{p}}", after={"p": silent})
    end(queue, silent, "")
    queue.drain()
    assert f"the prompt has {MAX_PROMPT_BYTES + 1} bytes" in why(queue, much)
    assert "the prompt is empty" in why(queue, nothing)


@pytest.mark.parametrize("data, message", [(b"forged", "was changed"), (None, "is missing"), (b"\xff", "is not UTF-8")])
def test_a_result_that_somebody_changed_is_not_passed_on(queue: Queue, data: bytes | None, message: str) -> None:
    parent = queue.plant(A, {RESULT: b"x"}, Place.OUTPUT)
    if data == b"forged":
        (parent / USAGE).write_bytes(b'{"outcome": "done", "sha256": "0"}')
    if data is None:
        (parent / RESULT).unlink()
    else:
        (parent / RESULT).write_bytes(data)
    request = WorkRequest(after={"a": A})
    assert resolve_prompt(queue.workspace, B, request, "it is not read where nobody asks") == "it is not read where nobody asks"
    with pytest.raises(BadJob, match=f"{RESULT} of its parent {A} {message}"):
        resolve_prompt(queue.workspace, B, request, "{{a}}")


# ---- clients ----


def test_a_retry_of_a_child_comes_after_the_same_jobs(queue: Queue) -> None:
    (parent,) = queue.submit("parent")
    child = queue.work.submit("of {{p}}", after={"p": parent})
    queue.drain()
    again = queue.work.retry(child)
    request = queue.flow.describe(again).request
    assert request is not None
    assert request.after == {"p": parent}
    queue.drain()
    assert queue.flow.get(again).data == queue.flow.get(child).data
    queue.workspace.throw_away([parent], Place.OUTPUT)
    with pytest.raises(UnknownJob):
        queue.work.retry(child)


def test_children_are_told_newest_first_and_not_those_of_others(queue: Queue) -> None:
    first, second = queue.submit("a", "b")
    children = queue.submit("c", "d", after=[first])
    queue.submit("e", after=children[:1])
    end(queue, first)
    assert [view.job_id for view in queue.flow.children(first)] == children[::-1]
    assert queue.flow.children(second) == []
    with pytest.raises(UnknownJob):
        queue.flow.children(A)


def test_cleaning_leaves_what_an_open_job_comes_after(queue: Queue) -> None:
    wanted, other = queue.submit("a", "b")
    (child,) = queue.submit("c", after=[wanted])
    end(queue, wanted)
    end(queue, other)
    assert queue.flow.gc(older_than=-1).jobs == 1
    assert queue.names(Place.OUTPUT) == {wanted}
    held = queue.workspace.claim(child)
    assert held is not None
    assert queue.flow.gc(older_than=-1).jobs == 0, "it runs, and may have to begin again"
    queue.workspace.finish(held, done("c", {}))
    assert queue.flow.gc(older_than=-1).jobs == 2
