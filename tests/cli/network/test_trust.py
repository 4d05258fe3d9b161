"""`penstock network create`, `invite`, `join`, `list`, `revoke`, `use` and `leave`, as people type them on two machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.network import invitations as network_invitations
from penstock.cli.network import options as network_options
from penstock.cli.network.network import app as network_app
from penstock.config.home import Home
from penstock.domain.duration import parse_duration
from penstock.network.joining import authority, joining
from penstock.network.joining.admission import LIFETIME
from penstock.network.joining.invitation import encode
from penstock.network.trust.certificates import NODE_DAYS, load_identity
from tests import warm
from tests.server import clean_environment
from tests.terminal import Person

Done = subprocess.CompletedProcess[str]
Machine = Callable[..., Done]


def machine(home: Path) -> Machine:
    """The command line of a machine whose networks lie there."""

    def penstock(*args: str, stdin: str = "", rc: int = 0) -> Done:
        command = warm.penstock(*args)
        env = clean_environment(PENSTOCK_HOME=str(home))
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, env=env, timeout=60, check=False)
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return penstock


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


def test_two_machines_become_a_network_and_one_is_shut_out_again(homes: tuple[Path, Path]) -> None:
    a, b = map(machine, homes)
    made = a("network", "create", "home", "--node", "desk", "--listen", "tls/127.0.0.1:7447")
    assert "penstock serve" in made.stdout
    assert "penstock network invite NODE" in made.stdout

    invited = a("network", "invite", "laptop", "--offline")
    assert re.fullmatch(r"penstock1:[\w-]+\n", invited.stdout)  # nothing but the token
    assert "like a password" in invited.stderr
    assert invited.stdout.strip() not in invited.stderr

    joined = b("network", "join", "-", stdin=invited.stdout)
    assert "now the node 'laptop' of the network 'home'" in joined.stdout
    (network,) = json.loads(b("network", "list", "--json").stdout)["networks"]
    assert (network["name"], network["node"], network["role"], network["current"]) == ("home", "laptop", "member", True)
    settings = json.loads(b("config", "--json").stdout)["settings"]
    assert settings["network.connect"] == {"value": ["tls/127.0.0.1:7447"], "source": "network home"}
    assert settings["node_id"] == {"value": "laptop", "source": "network home"}

    assert "Revoked 'laptop': 1 certificate." in a("network", "revoke", "laptop").stdout
    assert "Nothing has changed" in a("network", "revoke", "laptop").stdout
    (network,) = json.loads(a("network", "list", "--json").stdout)["networks"]
    assert [(member["node"], member["revoked"]) for member in network["members"]] == [("laptop", True)]

    again = a("network", "invite", "laptop", "--offline")
    assert "lets it in again" in again.stderr
    file = homes[0] / "token.txt"
    file.write_text(again.stdout, encoding="utf-8")
    assert "has a new certificate" in b("network", "join", str(file)).stdout
    assert "This renews its certificate" in a("network", "invite", "laptop", "--offline", "--days", "10").stderr


def test_the_list_marks_the_current_network_and_warns_of_what_ends_soon(homes: tuple[Path, Path]) -> None:
    made, home = (Home(where) for where in homes)
    network = authority.create(made, "home", node="desk", listen="tls/192.0.2.7:7447")
    joining.join(home, authority.invite(network, "laptop", days=12.5))
    authority.create(home, "lab", node="left", listen="tls/192.0.2.8:7447")
    joining.use(home, "lab")
    a, b = map(machine, homes)
    done = b("network", "list")
    assert re.search(r"^    home +laptop +member +\d{4}-\d\d-\d\d$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^\*   lab +left +authority +\d{4}-\d\d-\d\d$", done.stdout, flags=re.MULTILINE)
    assert "The certificate of this node expires in 12 days" in done.stderr
    assert "penstock network invite laptop" in done.stderr
    assert ": invite it again" in a("network", "list").stdout
    b("network", "use", "home")
    assert json.loads(b("config", "--json").stdout)["settings"]["network.name"]["value"] == "home"
    assert b("network", "use", "attic", rc=1).stderr.startswith("error: This machine is in no network 'attic'.\nhint: ")


def test_a_port_that_is_taken_is_replaced_and_that_is_said(homes: tuple[Path, Path]) -> None:
    authority.create(Home(homes[0]), "lab", node="left", listen="tls/192.0.2.8:7447")  # it uses the usual one
    done = machine(homes[0])("network", "create", "home", "--node", "desk")
    assert re.search(r"It will listen at tls/0\.0\.0\.0:(?!7447)\d+\. Port 7447 is in use\.", done.stdout)


def test_leaving_asks_first_and_says_what_it_means(homes: tuple[Path, Path]) -> None:
    network = authority.create(Home(homes[0]), "home", node="desk", listen="tls/192.0.2.7:7447")
    joining.use(Home(homes[0]), "home")
    person = Person("network", "leave", PENSTOCK_HOME=str(homes[0]))
    person.waits_for(r"no node can be invited .*\[y/N\]")
    person.types("n")
    assert person.leaves() == 1
    assert network.key_file.exists()
    a = machine(homes[0])
    a("network", "leave", rc=1)  # nobody there to ask
    assert network.key_file.exists()
    assert "has left 'home'" in a("network", "leave", "--yes").stdout
    assert list((homes[0] / "networks").iterdir()) == []
    assert "in no network" in a("network", "list").stdout
    assert "no current network" in a("network", "leave", "--yes", rc=1).stderr


def test_a_network_that_cannot_be_read_is_listed_with_why_and_can_be_left(homes: tuple[Path, Path]) -> None:
    network = authority.create(Home(homes[0]), "home", node="desk", listen="tls/192.0.2.7:7447")
    network.folder.chmod(0o755)
    a = machine(homes[0])
    assert "chmod 700" in a("network", "list").stderr
    assert "chmod 700" in a("network", "invite", "laptop", "--network", "home", rc=1).stderr
    a("network", "leave", "home", "--yes")


@pytest.mark.parametrize(
    "where, cut", [("argument", slice(0, -5)), ("argument", slice(5, None)), ("file", slice(3, None)), ("stdin", slice(0, 100))]
)
def test_a_token_that_is_damaged_is_refused_and_not_shown(
    where: str, cut: slice, homes: tuple[Path, Path], tmp_path: Path
) -> None:
    network = authority.create(Home(homes[0]), "home", node="desk", listen="tls/192.0.2.7:7447")
    broken = encode(authority.invite(network, "laptop"))[cut]
    file = tmp_path / "token"
    file.write_text(broken, encoding="utf-8")
    argument = {"argument": broken, "file": str(file), "stdin": "-"}[where]
    done = machine(homes[1])("network", "join", argument, stdin=broken, rc=1)
    assert "hint: " in done.stderr
    assert broken[20:60] not in done.stdout + done.stderr
    assert not homes[1].exists()


def test_no_key_is_printed_by_any_command_but_invite(homes: tuple[Path, Path]) -> None:
    network = authority.create(Home(homes[0]), "home", node="desk", listen="tls/192.0.2.7:7447")
    joining.use(Home(homes[0]), "home")
    keys = [load_identity(network.certificate_file.read_bytes(), network.key_file.read_bytes())]
    keys.append(load_identity(network.ca_file.read_bytes(), network.authority_key_file.read_bytes()))
    secrets = [line for key in keys for line in key.key_pem().decode().splitlines()[1:-1]]
    a = machine(homes[0])
    for args in (["network", "list", "--json"], ["config"]):
        done = a(*args)
        assert not [secret for secret in secrets if secret in done.stdout + done.stderr]


def test_the_machine_that_created_a_network_signs_weights_and_no_other_does(
    homes: tuple[Path, Path], tiny_chat_model: Path
) -> None:
    a, b = map(machine, homes)
    a("network", "create", "home", "--node", "desk", "--listen", "tls/127.0.0.1:7447")
    weights = a("models", "hash", str(tiny_chat_model)).stdout.strip()
    assert re.fullmatch("[0-9a-f]{64}", weights)
    assert weights in a("network", "trust", str(tiny_chat_model)).stdout
    assert f"trusts org/other with these weights since {datetime.now(UTC):%Y}" in (
        a("network", "trust", "org/other", "--weights", "0" * 64).stdout
    )
    assert "trusts no weights of org/other any more" in a("network", "trust", "org/other", "--withdraw").stdout
    listed = a("network", "trust").stdout
    assert weights in listed
    assert "withdrawn" in listed
    assert "models pull org/name" in a("network", "trust", "org/name", rc=1).stderr
    assert "needs no signature" in a("network", "trust", "smollm2", rc=1).stderr
    assert "64 digits" in a("network", "trust", "org/other", "--weights", "abc", rc=1).stderr
    assert "contradict" in a("network", "trust", "m", "--weights", "0" * 64, "--withdraw", rc=1).stderr
    assert "A model is missing" in a("network", "trust", "--withdraw", rc=1).stderr

    b("network", "join", "-", stdin=a("network", "invite", "laptop", "--offline").stdout)
    assert "was created on another machine" in b("network", "trust", str(tiny_chat_model), rc=1).stderr


@pytest.mark.parametrize(
    "command", ["create", "invite", "invitations", "join", "list", "use", "revoke", "trust", "leave", "status"]
)
def test_every_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, ["network", command, "-h"], prog_name="penstock")
    assert done.output.startswith(f"Usage: penstock network {command} ")


def test_the_page_about_networks_names_every_command_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "network.md").read_text(encoding="utf-8")
    commands = {found.name or found.callback.__name__ for found in network_app.registered_commands if found.callback}
    assert set(re.findall(r"penstock network ([a-z]+)", page)) == commands


def test_help_comes_without_cryptography_and_knows_its_defaults() -> None:
    program = "import sys, penstock.cli.app, penstock.config.settings; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
    assert network_options.NODE_DAYS == NODE_DAYS
    assert timedelta(seconds=parse_duration(network_invitations.LIFETIME) or 0) == LIFETIME
