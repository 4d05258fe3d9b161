"""`penstock network invite`, `join` and `invitations` with tokens that are valid once, as people type them on two machines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli.ui.qr_code import modules
from penstock.config.home import Home
from penstock.network.joining import authority, join_client, joining
from tests.jobs import Run
from tests.network.joins import listening
from tests.server import free_port
from tests.terminal import CTRL_C, CTRL_D, Person

At = Callable[..., tuple[int, str, str]]


@pytest.fixture
def at(quickly: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    """The command line of a machine, in this process. Machine `a` has created a network."""

    def run(machine: str, *args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / machine))
        return quickly("network", *args, stdin=stdin.encode())

    monkeypatch.setattr(join_client, "PATIENCE_S", 0.0)
    assert run("a", "create", "home", "--node", "desk", "--listen", f"tls/127.0.0.1:{free_port()}")[0] == 0
    return run


@contextmanager
def served(tmp_path: Path) -> Iterator[None]:
    with listening(Home(tmp_path / "a").network("home")):
        yield


def test_a_machine_is_invited_joins_and_is_listed_and_another_is_not_let_in(at: At, tmp_path: Path) -> None:
    code, token, err = at("a", "invite", "laptop")
    assert code == 0
    assert re.fullmatch(r"penstock2:[\w-]+\n", token), "nothing but the token"
    assert token.strip() not in err
    for word in ("for one machine, until", "penstock serve", "like a password", "penstock network join TOKEN"):
        assert word in err
    with served(tmp_path):
        code, out, err = at("b", "join", "-", stdin=token)
        assert code == 0, err
        assert "now the node 'laptop' of the network 'home'" in out
        code, _, err = at("c", "join", stdin=token)  # a pipe needs no -
        assert code == 1
        assert "error: The invitation has been used already" in err
        assert "hint: Ask for a new one" in err
    assert not (tmp_path / "c").exists()
    _, out, _ = at("a", "invitations")
    assert re.search(r"^\w{12} +laptop +used +\S+ \S+ +\S+ \S+ from 127\.0\.0\.1$", out, flags=re.MULTILINE)
    (entry,) = json.loads(at("a", "invitations", "--json")[1])["invitations"]
    assert (entry["node"], entry["state"], entry["address"]) == ("laptop", "used", "127.0.0.1")
    assert "laptop" in at("a", "list")[1]
    assert "This renews its certificate" in at("a", "invite", "laptop")[2]


def test_an_open_invitation_is_listed_and_can_be_withdrawn(at: At, tmp_path: Path) -> None:
    assert "There are no invitations" in at("a", "invitations")[1]
    token = at("a", "invite", "laptop", "--expires", "30m", "--days", "5")[1]
    _, out, _ = at("a", "invitations")
    assert re.search(r"^\w{12} +laptop +open ", out, flags=re.MULTILINE)
    assert "1 open invitation: penstock network invitations" in at("a", "list")[1]
    code, out, err = at("a", "invitations", "--withdraw", "laptop")
    assert code == 0
    assert "Withdrew the invitation" in err
    assert " withdrawn " in out
    assert "open invitation" not in at("a", "list")[1]
    with served(tmp_path):
        assert "was withdrawn" in at("b", "join", "-", stdin=token)[2]
    code, _, err = at("a", "invitations", "--withdraw", "laptop")
    assert code == 1
    assert "has no open invitation" in err


def test_revoking_a_node_that_has_not_joined_withdraws_its_invitation(at: At, tmp_path: Path) -> None:
    token = at("a", "invite", "laptop")[1]
    code, out, _ = at("a", "revoke", "laptop")
    assert (code, out) == (0, "Withdrew the open invitation of 'laptop'.\n")
    with served(tmp_path):
        assert "was withdrawn" in at("b", "join", "-", stdin=token)[2]


@pytest.mark.parametrize("kind", [[], ["--offline"]], ids=["once", "offline"])
def test_an_invitation_is_drawn_as_a_code_that_holds_the_token(at: At, kind: list[str]) -> None:
    code, token, output = at("a", "invite", "laptop", "--qr", *kind)
    assert code == 0
    drawn = [line for line in output.splitlines() if not line.strip(" ▀▄█")]
    halves = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}
    rows = [tuple(halves[block][half] for block in line) for line in drawn for half in (0, 1)]
    assert rows[: len(rows[0])] == modules(token.strip())


@pytest.mark.parametrize(
    "columns, shown", [("200", "\x1b\\[30;107m {20,}\x1b\\[0m"), ("60", "60 columns wide; the QR code needs")]
)
def test_a_code_is_drawn_in_black_on_white_where_the_terminal_is_wide_enough(
    at: At, tmp_path: Path, columns: str, shown: str
) -> None:
    person = Person("network", "invite", "phone", "--qr", PENSTOCK_HOME=str(tmp_path / "a"), COLUMNS=columns)
    person.waits_for(shown)
    person.waits_for("penstock2:")
    assert person.leaves() == 0


def test_joining_with_nothing_on_stdin_asks_for_an_invitation(at: At) -> None:
    code, out, err = at("b", "join", stdin="")
    assert (code, out) == (1, "")
    assert "No invitation was given: stdin is empty." in err
    assert "penstock network invite NAME" in err


def test_while_the_node_of_the_authority_is_off_a_machine_is_told_what_to_do(at: At) -> None:
    code, _, output = at("b", "join", at("a", "invite", "laptop")[1].strip())
    assert code == 1
    for word in ("does not answer", "penstock serve", "firewall", "--offline"):
        assert word in output


def test_an_offline_invitation_needs_no_connection_and_says_what_it_holds(at: At) -> None:
    code, token, output = at("a", "invite", "laptop", "--offline")
    assert code == 0
    assert token.startswith("penstock1:")
    assert "It contains a private key" in output
    assert "now the node 'laptop'" in at("b", "join", "-", stdin=token)[1]
    code, _, output = at("a", "invite", "phone", "--offline", "--expires", "1h")
    assert code == 1
    assert "--days" in output
    assert "private key" in re.sub(r"\s+", " ", at("a", "invite", "--help")[1])


def test_a_token_is_not_used_up_by_a_machine_that_cannot_join(at: At, tmp_path: Path) -> None:
    at("b", "create", "home", "--node", "other", "--listen", f"tls/127.0.0.1:{free_port()}")
    token = at("a", "invite", "laptop")[1].strip()
    with served(tmp_path):
        assert "another network that is also called 'home'" in at("b", "join", token)[2]
        assert "needs no invitation" in at("a", "join", token)[2]
        assert at("c", "join", token, "--listen", "tcp/127.0.0.1:1")[0] == 1
        assert at("c", "join", token)[0] == 0


@pytest.mark.parametrize("words", [["invite", "laptop", "--expires", "soon"], ["invite", "laptop", "--expires", "10s"]])
def test_a_time_that_cannot_be_used_is_refused(at: At, words: list[str]) -> None:
    assert at("a", *words)[0] != 0


def test_only_the_machine_that_created_a_network_lists_its_invitations(at: At, tmp_path: Path) -> None:
    network = Home(tmp_path / "a").network("home")
    joining.join(Home(tmp_path / "b"), authority.invite(network, "laptop"))
    joining.use(Home(tmp_path / "b"), "home")
    for words in (["invitations"], ["invite", "phone"]):
        code, _, output = at("b", *words)
        assert code == 1
        assert "created on another machine" in output


def test_a_person_is_asked_for_the_invitation(tmp_path: Path) -> None:
    person = Person("network", "join", PENSTOCK_HOME=str(tmp_path))
    person.waits_for("Invitation .*: ")
    person.types("penstock2:mistyped")
    person.waits_for("error: The invitation")
    assert person.leaves() == 1


@pytest.mark.parametrize("key, shown, code", [(CTRL_C, "\n", 130), (CTRL_D, "\nAborted!\n", 1)], ids=["Ctrl-C", "Ctrl-D"])
def test_a_question_can_be_left_without_an_answer(tmp_path: Path, key: str, shown: str, code: int) -> None:
    person = Person("network", "join", PENSTOCK_HOME=str(tmp_path))
    question = person.waits_for("Invitation .*: ")
    person.presses(key)
    assert person.leaves() == code
    assert re.sub(r"\^[CD][\b]*", "", person.screen) == question + shown


def begin_pairing(tmp_path: Path) -> tuple[Person, Person, str]:
    """Two people, one at either machine, and the words that the second one sees."""
    host = Person("network", "pair", "laptop", PENSTOCK_HOME=str(tmp_path / "a"))
    shown = host.waits_for(r"join --pair 127\.0\.0\.1:\d+\n")
    guest = Person("network", "join", "--pair", shown.split()[-1], PENSTOCK_HOME=str(tmp_path / "b"))
    words = guest.waits_for(r"    \w+ \w+ \w+ \w+\n").splitlines()[-1].strip()
    host.waits_for("The four words that it shows: ")
    return host, guest, words


def test_a_machine_joins_by_four_words(at: At, tmp_path: Path) -> None:
    host, guest, words = begin_pairing(tmp_path)
    host.types(words)
    guest.waits_for("now the node 'laptop' of the network 'home'")
    host.waits_for("'laptop' has joined the network 'home'")
    assert (host.leaves(), guest.leaves()) == (0, 0)


def test_with_other_words_nothing_is_sent(at: At, tmp_path: Path) -> None:
    host, guest, words = begin_pairing(tmp_path)
    for _ in range(3):
        host.types(" ".join(reversed(words.split())) + " no")
        host.waits_for("The words do not match.")
    host.waits_for("error: The words of the two machines do not match. Nothing was sent.")
    guest.waits_for("error: The other machine sent no invitation.")
    assert (host.leaves(), guest.leaves()) == (1, 1)
    assert "There are no invitations" in at("a", "invitations")[1]


def test_a_member_cannot_pair_and_a_token_beside_pair_is_refused(at: At, tmp_path: Path) -> None:
    code, _, output = at("a", "join", "penstock2:x", "--pair", "127.0.0.1")
    assert (code, "--pair: With it, no TOKEN is needed." in output) == (64, True)
    token = at("a", "invite", "laptop", "--offline")[1]
    assert at("b", "join", token.strip())[0] == 0
    code, _, output = at("b", "pair", "phone")
    assert (code, "created on another machine" in output) == (1, True)
