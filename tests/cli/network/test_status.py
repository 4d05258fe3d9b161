"""`penstock network status`: what it draws, and the command with a stand-in for the server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.network.picture import PLAIN, render
from penstock.cli.ui.columns import breadth, labels, shortened, without_domain
from tests import warm
from tests.cli.network.network_status import node, pipe, route, segment, status
from tests.server import clean_environment
from tests.terminal import CTRL_C, Person

TWO = status(
    pipe(
        segment("a", "0:10"),
        segment("b", "10:30", seconds=0.0, load=0.0, kv_used=0),
        route=route(("a", "0:10"), ("b", "10:30"), recoveries=1, last_pause=0.8, last_reason="node c is gone"),
        kv_tokens=412_000,
    ),
    nodes=[node("a"), node("b", links=[{"node": "a", "round_trip": 0.001, "bytes_per_second": 2.4e6}])],
)


def block(text: str, number: int) -> list[str]:
    """One of the parts between blank lines."""
    return text.split("\n\n")[number].rstrip("\n").splitlines()


# ---- what is drawn ----


def test_two_nodes_are_shown_with_all_about_them() -> None:
    assert render(TWO, 80).splitlines() == [
        "Network home · 2 nodes · open: any machine may join",
        "  a listens on tcp/127.0.0.1:7447",
        "",
        "  node   state   serves         round trip   version",
        "  a      ready   smollm2-135m    this node   0.1.0",
        "  b      ready   layers only       0.40 ms   0.1.0",
        "",
        "  slow link a → b: 2.4 MB/s",
        "",
        "smollm2-135m · 30 layers on 2 nodes · ✓ complete",
        "",
        "     0                   10                                      30",
        "  a  ███████████████████▉",
        "  b                      ████████████████████████████████████████",
        "",
        "  node   layers   computes on     a pass   load   KV used   leased   total",
        "  a      0:10     cpu bfloat16   2.10 ms   30 %      1.2k     100k    100k",
        "  b      10:30    cpu bfloat16         –    0 %         0     100k    100k",
        "",
        "  memory     room for 412,000 tokens of text, all requests together",
        "  route      a 0:10 → b 10:30 → a",
        "  why        It is the only one.",
        "  in flight  2 of at most 2 steps; a round trip takes 30.0 ms",
        "  recovered  once; the last pause took 800 ms: node c is gone",
    ]


def test_how_hidden_states_travel_is_shown_where_they_do() -> None:
    wire = {"format": "bfloat16", "token_bytes": 1152}
    over = pipe(segment("a", "0:10"), segment("b", "10:30"), route=route(("a", "0:10"), ("b", "10:30")), wire=wire)
    nodes = [node("a"), node("b")]
    assert "  wire       bfloat16, 1,152 bytes a token on each hop" in render(status(over, nodes=nodes), 80).splitlines()
    alone = pipe(segment("a", "0:30"), route=route(("a", "0:30")), wire=wire)
    assert "bfloat16," not in render(status(alone, nodes=nodes), 80)


def test_links_are_shown_with_their_speed_the_slowest_first_and_unknown_ones_left_out() -> None:
    def link(name: str, speed: float) -> dict[str, Any]:
        return {"node": name, "round_trip": 0.1, "bytes_per_second": speed}

    slow = [link(f"n{number}", 1e6 * (9 - number)) for number in range(7)]
    others = [link("b", 0.0), link("c", 1e8), link("gone", 1e3)]
    names = ["a", "b", "c", *(one["node"] for one in slow)]
    text = render(status(nodes=[node("a", links=[*slow, *others]), *map(node, names[1:])]), 80)
    assert [line for line in text.splitlines() if "link" in line or "more" in line] == [
        *(f"  slow link n{number} → a: {9 - number} MB/s" for number in (6, 5, 4, 3, 2, 1, 0)),
        "  link c → a: 100 MB/s",
    ]
    text = render(status(nodes=[node("a", links=[*slow, *others, link("d", 1e9)]), *map(node, [*names[1:], "d"])]), 80)
    assert "… and 1 more (--json has all)" in text


def test_senders_whose_messages_are_refused_again_and_again_are_shown() -> None:
    text = render(status(nodes=[node("a")]) | {"refused_from": {"b": 1200, "c": 9}}, 80)
    shown = [line for line in text.splitlines() if "refused" in line]
    assert shown == ["  warning: 1,200 messages in the name of b were refused; the log says why"]


def test_prompts_being_read_are_shown_with_how_far_each_stage_is() -> None:
    read = route(("b", "0:10"), ("a", "10:30"), reading={"prompts": 2, "tokens": 4000})
    for hop, processed in zip(read["hops"], (2048, 512), strict=True):
        hop["processed"] = processed
    text = render(status(pipe(segment("b", "0:10"), segment("a", "10:30"), route=read), nodes=[node("a"), node("b")]), 80)
    assert "  reading    2 prompts, 4,000 tokens; processed by b 0:10 2,048, a 10:30 512" in text.splitlines()
    idle = read | {"reading": {"prompts": 0, "tokens": 0}}
    assert "reading" not in render(status(pipe(segment("a", "0:30"), route=idle), nodes=[node("a"), node("b")]), 80)


def test_replicas_have_rows_of_their_own_and_draining_ones_another_sign() -> None:
    replicas = [segment("a", "0:10"), segment("b", "10:20"), segment("c", "10:30"), segment("d", "20:30", draining=True)]
    text = render(status(pipe(*replicas), nodes=[node(name) for name in "abcd"]), 80)
    assert block(text, 3) == [
        "     0                   10                  20                  30",
        "  a  ███████████████████▉",
        "  b                      ███████████████████▉",
        "  c                      ████████████████████████████████████████",
        "  d                                          ░░░░░░░░░░░░░░░░░░░░",
        "     ░ draining: finishes running work, accepts nothing new",
    ]
    assert "  d      20:30    cpu bfloat16   2.10 ms   draining" in text


def test_two_ranges_of_a_node_are_in_one_row() -> None:
    ends = pipe(
        segment("a", "28:30"),
        segment("b", "2:28"),
        segment("a", "0:2"),
        route=route(("a", "0:2"), ("b", "2:28"), ("a", "28:30")),
    )
    text = render(status(ends, nodes=[node("a"), node("b")]), 80)
    assert block(text, 3) == [
        "     0   2                                                   28  30",
        "  a  ███▉                                                    ████",
        "  b      ███████████████████████████████████████████████████▉",
    ]
    assert "  route      a 0:2 → b 2:28 → a 28:30\n" in text


def test_ranges_that_overlap_on_a_node_are_in_two_rows() -> None:
    text = render(status(pipe(segment("a", "0:20"), segment("a", "10:30")), nodes=[node("a")]), 80)
    assert block(text, 3)[1:] == [
        "  a  ███████████████████████████████████████▉",
        "  a                      ████████████████████████████████████████",
    ]


def test_holes_are_marked_without_colour_and_told_with_what_to_do() -> None:
    holed = pipe(
        segment("a", "0:2"),
        segment("b", "5:12"),
        missing=("2:5", "12:30"),
        route=route(state="waiting for layers", why="", window=0, round_trip=0.0, in_flight=0),
    )
    text = render(status(holed, nodes=[node("a"), node("b")]), 80)
    assert "smollm2-135m · 30 layers on 2 nodes · ✗ incomplete" in text
    assert block(text, 3) == [
        "           0   2     5             12                                  30",
        "  a        ███▉······              ····································",
        "  b            ······█████████████▉····································",
        "  missing      ^^^^^^              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    ]
    assert text.endswith(
        """
  route      waiting for layers

  Layers 2:5 and 12:30 of smollm2-135m are missing.
  To complete it, run this on a machine with room for it:

    penstock serve --model smollm2-135m --open-network \\
        --connect tcp/127.0.0.1:7447
"""
    )


def test_a_pipe_that_nobody_holds_is_one_hole() -> None:
    text = render(status(pipe(missing=("0:30",)), nodes=[node("a")]), 80)
    assert "30 layers on 0 nodes · ✗ incomplete" in text
    assert block(text, 3)[-1].endswith("  " + "^" * 60)


@pytest.mark.parametrize("hole", ["0:1", "40:41", "79:80"])
def test_a_hole_of_one_layer_among_many_is_seen(hole: str) -> None:
    start, end = map(int, hole.split(":"))
    parts = [segment("abc", f"{first}:{last}") for first, last in ((0, start), (end, 80)) if first < last]
    ruler, *_, marks = block(render(status(pipe(*parts, num_layers=80, missing=(hole,)), nodes=[node("a")]), 80), 3)
    assert marks.count("^") == 1
    assert hole.split(":")[start == 79] in ruler.split()


def test_a_command_with_quotes_is_not_broken_into_lines() -> None:
    run = "penstock serve --model 'my models/a --b' " + "--layers 0:30 " * 6
    assert f"\n    {run.rstrip()}\n" in render(status(pipe(missing=("0:30",), run=run.rstrip()), nodes=[node("a")]), 80)


def test_a_node_alone_is_told_how_to_find_others() -> None:
    text = render(status(pipe(segment("a", "0:30"), route=route(("a", "0:30"))), nodes=[node("a")], network=None), 80)
    assert text.startswith("This node is not in a network.\n")
    assert "penstock network create home" in text
    assert "  route      a 0:30\n" in text


def test_in_a_closed_network_a_hole_is_filled_by_invitation() -> None:
    closed = {"name": "home", "open": False, "listen": ["tls/0.0.0.0:7447"], "connect": [], "node_id": "a", "warning": "It ends."}
    holed = pipe(
        segment("a", "0:9"), missing=("9:30",), run="penstock network invite NAME", loading={"b": [[9, 30]]}, room={"a": 1}
    )
    text = render(status(holed, nodes=[node("a"), node("b", loading=["9:30 of smollm2-135m"])], network=closed), 80)
    assert "warning: It ends." in text
    assert "loading    b 9:30" in text
    assert "room       a for 1 layer" in text
    assert text.endswith("""
  To complete it, start a member that is off, or invite a machine with room:
  run this on the machine that created the network, and on the new one, with the
  token that it prints: penstock network join TOKEN, then: penstock serve

    penstock network invite NAME
""")


def test_a_closed_network_and_its_ways_are_told() -> None:
    network = {"name": "mill", "open": False, "listen": ["tls/0.0.0.0:1"], "connect": ["tls/b:1", "tls/c:1"], "node_id": "a"}
    lines = render(status(nodes=[node("a")], network=network), 80).splitlines()
    assert lines[0] == "Network mill · 1 node · closed: members have certificates"
    assert lines[1] == "  a listens on tls/0.0.0.0:1; connects to tls/b:1, tls/c:1"
    assert lines[-1] == "No node holds layers of any model."


def test_a_node_without_the_ends_of_a_model_says_so() -> None:
    text = render(status(pipe(segment("b", "0:30")), nodes=[node("a"), node("b")]), 80)
    assert (
        "route      none from here: a has not loaded the ends of smollm2-135m, so it\n             serves no requests itself"
        in text
    )


def test_warnings_are_shown() -> None:
    assert "\n  warning: The weights differ.\n" in render(status(pipe(warnings=["The weights differ."]), nodes=[node("a")]), 80)


def test_a_route_that_changes_tells_its_state() -> None:
    changing = pipe(segment("b", "0:30"), route=route(("b", "0:30"), state="recovering", recoveries=3, last_pause=12.3))
    text = render(status(changing, nodes=[node("a"), node("b")]), 80)
    assert "route      b 0:30 → a (recovering)\n" in text
    assert "recovered  3 times; the last pause took 12 s\n" in text


def test_the_node_whose_loss_broke_the_last_route_is_named_until_there_is_another() -> None:
    """And not as the reason of a recovery, which was an earlier one."""
    gone = {"recoveries": 1, "last_pause": 1.0, "last_reason": "node b is gone"}
    broken = pipe(segment("a", "0:2"), missing=("2:30",), route=route(state="none", why="Layers 2:30 are missing.", **gone))
    text = render(status(broken, nodes=[node("a")]), 80)
    assert "lost       the last route: node b is gone\n" in text
    assert "recovered  once; the last pause took 1.00 s\n" in text
    open_again = pipe(segment("a", "0:2"), segment("b", "2:30"), route=route(("a", "0:2"), ("b", "2:30"), **gone))
    text = render(status(open_again, nodes=[node("a"), node("b")]), 80)
    assert " lost " not in text
    assert "recovered  once; the last pause took 1.00 s: node b is gone\n" in text


def test_long_names_of_one_domain_lose_it() -> None:
    names = [f"worker-{number}.rack-12.eu-central-1.compute.internal" for number in range(4)]
    parts = [segment(name, f"{20 * place}:{20 * place + 20}") for place, name in enumerate(names)]
    hops = [(name, f"{20 * place}:{20 * place + 20}") for place, name in enumerate(names)]
    text = render(status(pipe(*parts, num_layers=80, route=route(*hops)), nodes=[node(name) for name in names]), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "  worker-3  60:80" in text.replace("   ", "  ")
    assert "worker-2 40:60 → worker-3 60:80 →\n             worker-0\n" in text


def test_shortened_names_can_be_told_apart() -> None:
    assert list(labels(["alpha-machine", "beta-machine", "c"], 8).values()) == ["alph…ine", "beta…ine", "c"]
    assert list(labels(["machine-of-somebody-1", "machine-of-somebody-2"], 8).values()) == ["mach…y-1", "mach…y-2"]
    in_the_middle = labels([f"{'x' * 20}{digit}{'y' * 20}" for digit in "123"], 10)
    assert len(set(in_the_middle.values())) == 3
    assert all(breadth(name) <= 10 for name in in_the_middle.values())
    assert shortened("日本語の機械", 6) == "日…械"


def test_a_domain_is_left_out_only_where_all_share_it() -> None:
    assert without_domain(["a.x.org", "b.x.org"]) == {"a.x.org": "a", "b.x.org": "b"}
    assert without_domain(["a.x.org", "b"]) == {"a.x.org": "a.x.org", "b": "b"}
    assert without_domain(["x.org", "a.x.org"]) == {"x.org": "x", "a.x.org": "a.x"}
    assert without_domain(["a.x.org"]) == {"a.x.org": "a.x.org"}
    assert without_domain([]) == {}


def test_a_hostile_name_does_not_reach_the_terminal() -> None:
    evil = "ev\x1b[2Jil\r\n\x07\u202e\x9b31m" * 20
    bad = pipe(
        segment(evil, "0:30", device=evil, dtype=evil),
        model=evil,
        explain=evil,
        complete=False,
        run=evil,
        warnings=[evil],
        route=route((evil, "0:30"), why=evil, last_reason=evil, recoveries=1, state=evil),
    )
    text = render(status(bad, nodes=[node(evil, version=evil), node("b", serves=[evil])]), 80)
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_colour_changes_nothing_but_the_colour() -> None:
    coloured = render(TWO, 80, colour=True)
    assert "\x1b[32m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == render(TWO, 80)


def test_there_are_plain_signs_for_terminals_without_the_others() -> None:
    holed = pipe(segment("a", "0:2"), segment("b", "2:9", draining=True), missing=("2:30",), route=route(("a", "0:2")))
    render(status(holed, nodes=[node("a"), node("b" * 70)]), 80).translate(PLAIN).encode("ascii")


ranges = st.sets(st.integers(0, 100), min_size=2, max_size=2).map(lambda ends: f"{min(ends)}:{max(ends)}")
names = st.text(alphabet="abc.-", min_size=1, max_size=60)
segments = st.builds(segment, names, ranges, draining=st.booleans(), kv_used=st.integers(0, 10**7))


@given(held=st.lists(segments, max_size=6), hole=ranges, layers=st.integers(100, 130), width=st.integers(80, 130))
def test_whatever_is_held_fits_the_width(held: list[dict[str, Any]], hole: str, layers: int, width: int) -> None:
    output = status(pipe(*held, num_layers=layers, missing=(hole,)), nodes=[node("a"), *(node(part["node"]) for part in held)])
    assert max(map(breadth, render(output, width).splitlines())) <= width


# ---- the command ----


@contextmanager
def answering(*answers: Any, code: int = 200) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server that gives these answers, the last of them for ever; and what it was asked: paths and keys."""
    asked: list[tuple[str, str]] = []

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization", "")))
            answer = answers[min(len(asked), len(answers)) - 1]
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def network(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = warm.penstock("network", *args)
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=clean_environment(**env), timeout=60, check=False)


def test_the_command_asks_the_server_with_the_key_and_draws() -> None:
    with answering(TWO) as (url, asked):
        done = network("status", "--url", f"{url}/v1", PENSTOCK_API_KEY="k", COLUMNS="80", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", render(TWO, 80))
    assert asked == [("/network", "Bearer k")]


def test_a_pipe_without_these_signs_gets_plain_ones() -> None:
    with answering(TWO) as (url, _):
        done = network("status", PENSTOCK_URL=url, PYTHONIOENCODING="ascii", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  a  ####################\n" in done.stdout
    assert "?" not in done.stdout


def test_json_is_what_the_server_told() -> None:
    with answering(TWO) as (url, _):
        done = network("status", "--json", "--url", url)
    assert json.loads(done.stdout) == TWO


def test_watch_draws_it_again_until_ctrl_c() -> None:
    holed = status(pipe(segment("a", "0:10"), missing=("10:30",)), nodes=[node("a")])
    with answering(holed, TWO) as (url, _):
        person = Person("network", "status", "--watch", "--url", url, COLUMNS="80", NO_COLOR="1")
        person.waits_for("Layers 10:30 of smollm2-135m are missing")
        person.waits_for(r"\x1b\[H\x1b\[2J.*complete.*recovered")
        person.presses(CTRL_C)
        assert person.leaves() == 0
    assert "\x1b[32m" not in person.screen


def test_a_terminal_gets_colours() -> None:
    with answering(TWO) as (url, _):
        person = Person("network", "status", "--url", url, NO_COLOR="")
        person.waits_for("\x1b\\[32m✓ complete")
        assert person.leaves() == 0


@pytest.mark.parametrize("body, code", [(b"<html>", 404), (b'{"error": {"message": "No."}}', 404), (b"{}", 200)])
def test_what_is_not_penstock_is_told(body: bytes, code: int) -> None:
    with answering(body, code=code) as (url, _):
        done = network("status", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"The server at {url} is not a Penstock server." in done.stderr


def test_a_refusal_is_told_as_it_is() -> None:
    with answering({"error": {"message": "The API key is wrong."}}, code=401) as (url, _):
        done = network("status", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The API key is wrong.\nhint: Set PENSTOCK_API_KEY to a valid key.")


@pytest.mark.parametrize("args", [["-h"], ["status", "-h"]])
def test_the_commands_explain_themselves(args: list[str]) -> None:
    done = network(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: penstock {' '.join(['network', *args[:-1]])}")


# ---- pipes by their ids ----


def test_each_pipe_is_shown_by_its_id_with_its_segments() -> None:
    segments = [segment("a", "0:10", pipe="3f2a"), segment("b", "10:30", pipe="3f2a"), segment("c", "0:10", pipe="9c01")]
    pipes = [{"id": "3f2a", "complete": True, "missing": []}, {"id": "9c01", "complete": False, "missing": [[10, 30]]}]
    there = pipe(*segments, pipes=pipes, route=route(("a", "0:10"), ("b", "10:30"), pipes=["3f2a"]))
    text = render(status(there, nodes=[node("a"), node("b"), node("c")]), 100)
    assert "  pipe 3f2a  complete: a 0:10, b 10:30\n" in text
    assert "  pipe 9c01  lacks 10:30: c 0:10\n" in text
    assert "a 0:10 → b 10:30 → a (pipe 3f2a)\n" in text


def test_a_server_that_names_no_pipes_is_shown_without_them() -> None:
    text = render(status(pipe(segment("a", "0:30"), route=route(("a", "0:30"))), nodes=[node("a")]), 100)
    assert "  pipe " not in text
