"""What only a real network can do: processes that die and freeze, taken ports and names, certificates, relays."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, Unreachable, Untrusted
from penstock.network.members.peer_directory import MAX_GREETING_BYTES
from penstock.network.parts import PART_BYTES
from penstock.network.stream import Stream
from penstock.network.zenoh.router import ZenohRouter
from penstock.network.zenoh.session import session_settings
from tests.network.certificates import Authority
from tests.network.nets import Participant, ZenohNet, closing, free_port, wait_for

ROOT = Path(__file__).parents[3]
LEASE = 1000  # milliseconds


@pytest.fixture
def net() -> Iterator[ZenohNet]:
    with closing(ZenohNet(lease_ms=LEASE)) as net:
        yield net


@contextlib.contextmanager
def echo_process(node_id: str, contact: str, lease_ms: int = LEASE) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.network.echo", node_id, str(lease_ms), contact],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def echoes(member: Participant, node: str, data: bytes) -> bool:
    with contextlib.suppress(Unreachable):
        member.router.send(node, data)
    return (node, data) in member.received


def joined(stack: contextlib.ExitStack, config: NetworkConfig, node_id: str) -> Participant:
    router = ZenohRouter(config, node_id, time.time_ns())
    stack.callback(router.close)
    router.publish(node_id.encode())
    return Participant(router)


# ---- processes that die and freeze ----


def test_a_killed_process_vanishes_long_before_its_lease() -> None:
    with closing(ZenohNet(lease_ms=600_000)) as net:  # the test would not wait for it
        home = net.join("home", b"home")
        with echo_process("away", net.contact, 600_000) as process:
            wait_for(lambda: home.sees("home", "away"), "the other process")
            wait_for(lambda: echoes(home, "away", b"hello"), "its answer")
            process.kill()
            wait_for(lambda: home.sees("home"), "it to vanish")
            with pytest.raises(Unreachable):
                home.router.send("away", b"hello")


def test_a_frozen_process_vanishes_after_the_lease_and_comes_back(net: ZenohNet) -> None:
    home, other = net.join("home", b"home"), net.join("other", b"other")
    with echo_process("away", net.contact) as process:
        wait_for(lambda: home.sees("home", "other", "away") and other.sees("home", "other", "away"), "everybody")
        wait_for(lambda: echoes(other, "away", b"before"), "its answer")
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: home.sees("home", "other") and other.sees("home", "other"), "it to vanish")
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: home.sees("home", "other", "away"), "it to come back to the one it knows")
        assert home.router.records()["away"] == f"record of {process.pid}".encode()
        wait_for(lambda: echoes(home, "away", b"after"), "its answer")
        wait_for(lambda: other.sees("home", "other", "away"), "it to come back to the one it was told of")
        wait_for(lambda: echoes(other, "away", b"after"), "its answer")


@pytest.mark.parametrize("size, stream", [(4 << 20, Stream.DATA), (1000, Stream.DATA), (1000, Stream.CONTROL)])
def test_a_send_to_a_frozen_process_ends_and_the_others_are_served_meanwhile(net: ZenohNet, size: int, stream: Stream) -> None:
    home, other = net.join("home", b"home"), net.join("other", b"other")
    with echo_process("away", net.contact) as process:
        wait_for(lambda: home.sees("home", "other", "away"), "everybody")
        wait_for(lambda: echoes(home, "away", b"before"), "its answer")
        process.send_signal(signal.SIGSTOP)
        outcome: list[Exception] = []

        def pour() -> None:
            try:
                while True:
                    home.router.send("away", bytes(size), stream)
            except Unreachable as error:
                outcome.append(error)

        pouring = threading.Thread(target=pour, daemon=True)
        pouring.start()
        home.router.send("other", b"meanwhile")
        wait_for(lambda: ("home", b"meanwhile") in other.received, "the other node's message")
        wait_for(lambda: outcome, "the sender to learn of it")
        pouring.join()
        home.router.send("other", b"afterwards")
        wait_for(lambda: ("home", b"afterwards") in other.received, "the other node's message")


@pytest.mark.slow
def test_closing_with_a_full_wire_to_a_frozen_process_ends_all_threads() -> None:
    before = set(threading.enumerate())
    with closing(ZenohNet(lease_ms=3000)) as net:
        home = net.join("home", b"home")
        with echo_process("away", net.contact, 3000) as process:
            wait_for(lambda: echoes(home, "away", b"before"), "its answer")
            process.send_signal(signal.SIGSTOP)

            def pour() -> None:
                with contextlib.suppress(Unreachable):
                    while True:
                        home.router.send("away", bytes(4 << 20))

            threading.Thread(target=pour, daemon=True).start()
            time.sleep(0.5)  # long enough to fill the wire
            home.router.close()
            wait_for(lambda: set(threading.enumerate()) <= before, "all threads to end")


def test_a_node_can_start_before_the_one_it_knows(caplog: pytest.LogCaptureFixture) -> None:
    contact = f"tcp/127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        early = joined(stack, NetworkConfig(connect=(contact,), open=True), "early")
        assert "still trying" in caplog.text
        joined(stack, NetworkConfig(listen=(contact,), open=True), "late")
        wait_for(lambda: early.sees("early", "late"), "the late one")


# ---- taken ports and names ----


def test_a_taken_port_is_an_error_that_names_it(net: ZenohNet) -> None:
    net.join("home")
    router = ZenohRouter(NetworkConfig(listen=(net.contact,), open=True), "other", 1)
    with pytest.raises(ConfigError, match=f"cannot listen at {net.contact}: the port is in use") as caught:
        router.start(lambda sender, data: None, lambda: None)
    assert "network.listen" in caught.value.hint
    router.close()


@pytest.mark.parametrize("endpoint", ["tcp/192.0.2.1:7447", "tcp/no-such-host.invalid:7447"])
def test_an_endpoint_that_cannot_be_is_an_error_that_names_it(endpoint: str) -> None:
    router = ZenohRouter(NetworkConfig(listen=("tcp/127.0.0.1:0", endpoint), open=True), "home", 1)
    with pytest.raises(ConfigError, match=f"cannot listen at .*{endpoint}"):
        router.start(lambda sender, data: None, lambda: None)


def test_a_taken_name_is_an_error_and_leaves_no_threads(net: ZenohNet) -> None:
    net.join("home", b"home")
    net.join("twin", b"first")
    before = set(threading.enumerate())
    second = net.router("twin", time.time_ns())
    with pytest.raises(ConfigError, match=r"already has a live node named 'twin'.*--node-id"):
        second.start(lambda sender, data: None, lambda: None)
    assert set(threading.enumerate()) <= before


def test_a_node_that_restarts_after_a_crash_waits_for_its_old_self_to_vanish(net: ZenohNet) -> None:
    home = net.join("home", b"home")
    with echo_process("away", net.contact) as process:
        wait_for(lambda: home.sees("home", "away"), "the first life")
        process.send_signal(signal.SIGSTOP)  # like a machine without power: nobody closes its connections
        net.join("away", b"second life")
        wait_for(lambda: home.router.records().get("away") == b"second life", "the second life")


def test_of_two_that_took_a_name_at_once_the_later_one_wins(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        ours, theirs = (f"tcp/127.0.0.1:{port}" for port in ports)
        older = joined(stack, NetworkConfig(listen=(ours,), open=True), "twin")
        newer = joined(stack, NetworkConfig(listen=(theirs,), open=True), "twin")
        older.router.publish(b"older")
        newer.router.publish(b"newer")
        third = joined(stack, NetworkConfig(connect=(ours, theirs), open=True), "third")  # brings them together
        wait_for(lambda: third.router.records().get("twin") == b"newer", "the record of the winner")
        wait_for(lambda: caplog.text.count("another node has taken the name 'twin'") == 1, "the loser's warning")
        newer.router.close()
        wait_for(lambda: third.router.records().get("twin") == b"older", "the one that is left")


# ---- closed networks ----


@pytest.mark.parametrize("protocol", ["tls", "quic"])
def test_the_invited_find_each_other_in_a_closed_network(tmp_path: Path, protocol: str) -> None:
    authority, contact = Authority(tmp_path), f"{protocol}/127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        home = joined(stack, authority.invite("home").config(listen=(contact,)), "home")
        guests = [joined(stack, authority.invite(name).config(connect=(contact,)), name) for name in ("left", "right")]
        for member in (home, *guests):
            wait_for(lambda member=member: member.sees("home", "left", "right"), "the invited")
        guests[0].router.send("right", b"across")
        wait_for(lambda: guests[1].received == [("left", b"across")], "the message")


def test_clients_of_a_closed_network_reach_each_other_through_a_router(tmp_path: Path) -> None:
    authority, contact = Authority(tmp_path), f"tls/127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        joined(stack, authority.invite("relay").config(listen=(contact,), mode="router"), "relay")
        left, right = (
            joined(stack, authority.invite(name).config(connect=(contact,), mode="client"), name) for name in ("left", "right")
        )
        wait_for(lambda: left.sees("relay", "left", "right") and right.sees("relay", "left", "right"), "everybody")
        left.router.send("right", b"across")
        wait_for(lambda: right.received == [("left", b"across")], "the message")


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    home, other = authority.invite("home"), authority.invite("other")
    rogue = Authority(tmp_path, "stranger").invite("home", trusting=authority.file)
    mixed = replace(home, key_file=other.key_file)
    absent = replace(home, ca_file=tmp_path / "absent.pem")
    for papers, name in ((mixed, "other.key"), (absent, "absent.pem"), (rogue, "stranger/home.pem"), (other, "other.pem")):
        router = ZenohRouter(papers.config(listen=("tls/127.0.0.1:0",)), "home", 1)
        with pytest.raises((ConfigError, Untrusted), match=name):
            router.start(lambda sender, data: None, lambda: None)


# ---- relays ----


def test_two_clients_reach_each_other_through_a_router() -> None:
    contact = f"tcp/127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        relay = joined(stack, NetworkConfig(listen=(contact,), mode="router", open=True), "relay")
        clients = [joined(stack, NetworkConfig(connect=(contact,), mode="client", open=True), name) for name in ("left", "right")]
        for member in (relay, *clients):
            wait_for(lambda member=member: member.sees("relay", "left", "right"), "everybody")
        large = os.urandom(4 << 20)
        clients[0].router.send("right", b"across")
        clients[0].router.send("right", large)
        wait_for(lambda: clients[1].received == [("left", b"across"), ("left", large)], "the messages")
        clients[1].router.close()
        wait_for(lambda: clients[0].sees("relay", "left"), "the other client to vanish")
        with pytest.raises(Unreachable):
            clients[0].router.send("right", b"hello")


def test_clients_find_each_other_again_when_their_router_restarts() -> None:
    contact = f"tcp/127.0.0.1:{free_port()}"
    config = NetworkConfig(listen=(contact,), mode="router", open=True)
    with contextlib.ExitStack() as stack:
        relay = joined(stack, config, "relay")
        left, right = (
            joined(stack, NetworkConfig(connect=(contact,), mode="client", open=True), name) for name in ("left", "right")
        )
        wait_for(lambda: left.sees("relay", "left", "right"), "everybody")
        relay.router.close()
        wait_for(lambda: left.sees("left") and right.sees("right"), "everybody to vanish")
        time.sleep(2 * 1.0)  # past the time that a client gives one try to connect
        joined(stack, config, "relay")
        wait_for(lambda: left.sees("relay", "left", "right"), "everybody to come back")
        left.router.send("right", b"again")
        wait_for(lambda: right.received == [("left", b"again")], "the message")


def test_a_client_waits_for_its_router_and_can_be_closed_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    contact = f"tcp/127.0.0.1:{free_port()}"
    config = NetworkConfig(connect=(contact,), mode="client", open=True)
    client, impatient = ZenohRouter(config, "client", 1), ZenohRouter(config, "impatient", 1)
    starting = [
        threading.Thread(target=router.start, args=(lambda sender, data: None, lambda: None), daemon=True)
        for router in (client, impatient)
    ]
    for thread in starting:
        thread.start()
    wait_for(lambda: caplog.text.count(f"no answer from {contact}") == 2, "the warnings")
    impatient.close()
    starting[1].join()
    with contextlib.ExitStack() as stack:
        joined(stack, NetworkConfig(listen=(contact,), mode="router", open=True), "relay")
        stack.callback(client.close)
        wait_for(lambda: "relay" in client.records(), "the relay")


# ---- streams ----


def test_control_has_priority_on_a_link_and_bulk_cannot_be_starved_on_it(net: ZenohNet) -> None:
    """Zenoh closes a link on which a message of lower priority has waited for a lease."""
    from zenoh import Priority

    presence = net.join("home", b"home").router._presence
    found = {stream: presence._outlet_to("away", stream).publisher.priority for stream in Stream}
    assert found == {Stream.CONTROL: Priority.REAL_TIME, Stream.DATA: Priority.DATA_HIGH, Stream.BULK: Priority.DATA_HIGH}


# ---- sizes ----


def test_zenoh_takes_all_that_nodes_send_each_other_and_not_much_more() -> None:
    link = session_settings(NetworkConfig(listen=("tcp/127.0.0.1:0",), open=True))["transport"]["link"]
    assert max(MAX_GREETING_BYTES, PART_BYTES) < link["rx"]["max_message_size"] - (1 << 16) < 2 * MAX_GREETING_BYTES


# ---- manners ----


def test_zenoh_writes_nothing_to_the_terminal(tmp_path: Path) -> None:
    program = """
from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError
from penstock.network.zenoh.router import ZenohRouter
import sys
one = ZenohRouter(NetworkConfig(listen=(sys.argv[1],), connect=("tcp/127.0.0.1:1",), open=True), "one", 1)
one.start(lambda sender, data: None, lambda: None)
try:
    ZenohRouter(NetworkConfig(listen=(sys.argv[1],), open=True), "two", 1).start(lambda sender, data: None, lambda: None)
except ConfigError:
    pass
one.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, f"tcp/127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={key: value for key, value in os.environ.items() if key != "RUST_LOG"} | {"PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == ""
    assert [
        line for line in done.stderr.splitlines() if "still trying" not in line
    ] == []  # our own warning, by logging's last resort


def test_a_process_that_forgets_to_close_still_ends() -> None:
    program = """
from penstock.config.network import NetworkConfig
from penstock.network.zenoh.router import ZenohRouter
router = ZenohRouter(NetworkConfig(listen=("tcp/127.0.0.1:0",), open=True), "one", 1)
router.publish(b"one")
router.start(lambda sender, data: None, lambda: None)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", program], timeout=60, env=env, check=False).returncode == 0


def test_networks_of_different_names_do_not_see_each_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    contact = f"tcp/127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        red = joined(stack, NetworkConfig(name="red", listen=(contact,), open=True), "one")
        blue = joined(stack, NetworkConfig(name="blue", connect=(contact,), open=True), "two")
        also_red = joined(stack, NetworkConfig(name="red", connect=(contact,), open=True), "three")
        wait_for(lambda: red.sees("one", "three") and also_red.sees("one", "three"), "the red ones")
        assert blue.sees("two")


def test_importing_the_router_does_not_import_zenoh() -> None:
    program = "import sys, penstock.network.zenoh.router; sys.exit('zenoh' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60, check=False).returncode == 0
