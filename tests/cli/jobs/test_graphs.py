"""Jobs that come after others, on the command line: `penstock work --after`, `penstock flow --children` and `--tree`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.cli.jobs.flow_tree import MAX_DRAWN_DEPTH, forest
from penstock.errors import UnknownJob
from penstock.workspace.flow import Flow
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.jobs import Run, cli, fail, finish

NOWHERE = "1736700000_12345_0"


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    Workspace(tmp_path / "ws", create=True)
    return tmp_path / "ws"


def submit(ws: Path, *after: str) -> str:
    return Work(ws).submit("hi", after=after)


def after(ws: Path, job: str) -> dict[str, str]:
    request = Flow(ws).describe(job).request
    assert request is not None
    return dict(request.after)


def drawing(page: str) -> list[str]:
    """The first two columns of the tree."""
    lines = page.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == ["job"])
    rows = lines[start + 1 :]
    return [
        re.match(r"  (.*?\S) {2,}(queued|running|done|failed)\b", row).expand(r"\1 \2") for row in rows[: [*rows, ""].index("")]
    ]  # type: ignore[union-attr]


# ---- work --after ----


def test_parents_are_given_by_id_or_with_names_and_in_several_options(ws: Path) -> None:
    a, b, c = submit(ws), submit(ws), submit(ws)
    done = cli("work", ws, "--after", f"left={a}, right={b}", "--after", c, f"{{{{left}}}} or {{{{ {c} }}}}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert after(ws, done.stdout.decode().strip()) == {"left": a, "right": b, c: c}


@pytest.mark.parametrize(
    "given, prompt, message",
    [
        (
            "left={job}",
            "{{lfet}}",
            "PROMPT: The prompt has {{lfet}}, but none of its parent jobs has that name. The names are left",
        ),
        ("{job}", "{{left}}", "The names are {job}: write {{{job}}}, or name a parent left."),
        ("left=", "hi", "--after: after = '' cannot be used. Give the id of a job"),
        ("{job},", "hi", "--after: after = '' cannot be used."),
        ("={job}", "hi", "--after: '={job}' has no name. Write NAME=ID, or the ID alone."),
        ("{job} {job}", "hi", "--after: '{job} {job}' names several jobs. Put commas between them."),
        ("a={job} b={job}", "hi", "names several jobs. Put commas between them."),
        ("a b={job}", "hi", "--after: after = 'a b' cannot be used. Give names of letters, digits, _ and -."),
        ("x={job},x=1_1_1", "hi", "--after: x names two jobs."),
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(ws: Path, quickly: Run, given: str, prompt: str, message: str) -> None:
    job = submit(ws)
    code, out, error = quickly("work", ws, "--after", given.replace("{job}", job), prompt)
    assert (code, out) == (64, "")
    assert message.replace("{job}", job) in " ".join(error.split())
    assert [entry.name for entry in (ws / "input" / "ready").iterdir()] == [job]


def test_a_parent_or_a_workspace_that_is_not_there_is_named_and_nothing_is_made(tmp_path: Path, ws: Path, quickly: Run) -> None:
    code, out, error = quickly("work", ws, "--after", NOWHERE, "hi")
    assert (code, out) == (1, "")
    assert error.startswith(f"error: There is no job {NOWHERE} in {ws}.")
    assert list((ws / "input" / "ready").iterdir()) == []
    code, out, error = quickly("work", tmp_path / "none", "--after", NOWHERE, "hi")
    assert (code, out) == (1, "")
    assert error.startswith(f"error: {tmp_path / 'none'} does not exist.")
    assert not (tmp_path / "none").exists()


# ---- flow ----


def test_who_asks_for_a_waiting_child_learns_whom_it_waits_for(ws: Path, quickly: Run) -> None:
    a, b = submit(ws), submit(ws)
    child = submit(ws, a, b)
    finish(ws, a, "ok")
    assert quickly("flow", ws, child)[2].startswith(f"not ready: The job {child} is queued. It waits for {b}. Wait for it:")
    output = json.loads(quickly("flow", ws, child, "--json")[1])
    assert (output["request"]["after"], output["waits_for"]) == ({a: a, b: b}, [b])
    assert f"waits for {b}\n" in quickly("flow", ws)[1]
    fail(ws, b)
    assert json.loads(quickly("flow", ws, child, "--json")[1])["waits_for"] == [], "it will fail, and waits for nobody"


def test_who_comes_after_what_was_cancelled_is_told_that_it_will_fail(ws: Path, quickly: Run) -> None:
    parent = submit(ws)
    child = submit(ws, parent)
    grandchild = submit(ws, child)
    assert quickly("flow", ws, "--cancel", parent)[0] == 0
    why = f"The job {parent} failed: The job was cancelled."
    assert f"will fail: {why}\n" in quickly("flow", ws)[1]
    for job in (child, grandchild):
        code, out, err = quickly("flow", ws, job)
        assert (code, out) == (2, "")
        assert err.startswith(f"not ready: The job {job} is queued. It will fail: {why} Submit it again")
    assert json.loads(quickly("flow", ws, child, "--json")[1])["will_fail"] == why


def test_who_retries_a_job_whose_parent_failed_is_told_that_it_will_fail_as_well(ws: Path, quickly: Run) -> None:
    parent = submit(ws)
    child = submit(ws, parent)
    fail(ws, parent)
    fail(ws, child)
    code, again, output = quickly("flow", ws, "--retry", child)
    assert (code, after(ws, again.strip())) == (0, {parent: parent})
    assert output == f"It will fail too: The job {parent} failed: The pump is broken.\n"


def test_children_are_listed_as_jobs_are(ws: Path, quickly: Run) -> None:
    parent, other = submit(ws), submit(ws)
    children = [submit(ws, parent) for _ in range(3)]
    submit(ws, other)
    finish(ws, parent, "ok")
    finish(ws, children[0], "ok")
    code, page, _ = quickly("flow", ws, "--children", parent)
    assert code == 0
    assert page.startswith(f"{ws} after {parent}: 2 queued, 1 done.\n")
    assert re.findall(r"^  (\d+_\d+_\d+)", page, flags=re.MULTILINE) == children[::-1]
    output = json.loads(quickly("flow", ws, "--children", parent, "--json", "--limit", "1")[1])
    assert (output["counts"]["queued"], [job["id"] for job in output["jobs"]]) == (2, children[-1:])
    assert quickly("flow", ws, "--children", children[0])[1] == f"{ws} after {children[0]}: There are no jobs.\n"
    assert quickly("flow", ws, "--children", NOWHERE)[2].startswith(f"error: There is no job {NOWHERE}")


def test_a_tree_has_a_job_under_each_parent_and_what_comes_after_it_once(ws: Path, quickly: Run) -> None:
    top = submit(ws)
    left, right = submit(ws, top), submit(ws, top)
    join = submit(ws, left, right)
    last = submit(ws, join)
    submit(ws)  # alone
    finish(ws, top, "ok")
    fail(ws, left)
    page = quickly("flow", ws, "--tree")[1]
    assert page.startswith(f"{ws}: 4 queued, 1 done, 1 failed.\nNo server is working")
    assert drawing(page) == [
        f"{top} done",
        f"├─ {left} failed",
        f"│  └─ {join} queued",
        f"│     └─ {last} queued",
        f"└─ {right} queued",
        f"   └─ {join} (above) queued",
    ]
    assert page.splitlines()[-2].startswith("(above): it comes after several jobs")
    assert page.endswith("\n1 independent job not shown.\n")


def test_a_tree_can_begin_at_a_job(ws: Path, quickly: Run) -> None:
    top = submit(ws)
    middle = submit(ws, top)
    low = submit(ws, middle)
    page = quickly("flow", ws, "--tree", middle)[1]
    assert page.startswith(f"{ws} from {middle} on: 2 queued.\n")
    assert drawing(page) == [f"{middle} queued", f"└─ {low} queued"]
    output = json.loads(quickly("flow", ws, "--tree", middle, "--json")[1])
    assert (output["roots"], {job["id"]: job["children"] for job in output["jobs"]}) == ([middle], {middle: [low], low: []})
    assert quickly("flow", ws, "--tree", NOWHERE)[0] == 1


def test_trees_are_the_newest_first_and_as_many_as_wanted(ws: Path, quickly: Run) -> None:
    roots = [submit(ws) for _ in range(3)]
    children = [submit(ws, root) for root in roots]
    page = quickly("flow", ws, "--tree", "--limit", "2")[1]
    assert drawing(page) == [f"{roots[2]} queued", f"└─ {children[2]} queued", f"{roots[1]} queued", f"└─ {children[1]} queued"]
    assert page.endswith("\n1 more trees: use --limit N to see more.\n")
    output = json.loads(quickly("flow", ws, "--tree", "--limit", "2", "--json")[1])
    assert (output["roots"], output["hidden"], output["alone"]) == (roots[:0:-1], 1, 0)


def test_a_long_chain_is_drawn_as_far_as_it_can_be_read_and_told_whole(ws: Path, quickly: Run) -> None:
    chain = [submit(ws)]
    for _ in range(MAX_DRAWN_DEPTH + 5):
        chain.append(submit(ws, chain[-1]))
    page = quickly("flow", ws, "--tree")[1]
    rows = drawing(page)
    assert len(rows) == MAX_DRAWN_DEPTH + 1
    assert rows[-1].endswith(f"└─ {chain[MAX_DRAWN_DEPTH]} (more below) queued")
    assert "(more below): --tree JOB shows its children." in page
    assert len(json.loads(quickly("flow", ws, "--tree", "--json")[1])["jobs"]) == len(chain)


def test_a_circle_made_by_hand_has_no_place_in_a_tree(ws: Path, quickly: Run) -> None:
    for job, other in (("1_1_1", "1_1_2"), ("1_1_2", "1_1_1")):
        folder = ws / "input" / "ready" / job
        folder.mkdir()
        (folder / "prompt.txt").write_text("hi", encoding="utf-8")
        (folder / "request.json").write_text(json.dumps({"after": {"it": other}}), encoding="utf-8")
    assert drawing(quickly("flow", ws, "--tree")[1]) == ["1_1_1 queued", "└─ 1_1_2 queued"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--children"], "JOB: There is no id on stdin. For example: penstock flow WORKSPACE --children"),
        (["--tree", "--children", "1_2_3"], "--children and --tree cannot be combined."),
        (["--tree", "--tag", "x"], "--tag: It does not go with --tree"),
        (["--tree", "--timeout", "3"], "--timeout: It does not go with --tree"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(ws: Path, quickly: Run, args: list[str], message: str) -> None:
    code, out, error = quickly("flow", ws, *args)
    assert (code, out) == (64, "")
    assert message in error


def test_a_tree_of_a_job_that_is_cleaned_away_meanwhile_is_told_so() -> None:
    with pytest.raises(UnknownJob, match="1_2_3"):
        forest([], "1_2_3", 10)
