"""Which weights a node takes from others: pinned ones, signed ones, ones its user accepts, and never those of a majority."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.home import Home
from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, UntrustedWeights
from penstock.model.architecture.spec import read_spec
from penstock.model.sources.known_models import KNOWN_MODELS
from penstock.network.joining import authority
from penstock.network.trust.certificates import create_authority
from penstock.network.trust.trusted_models import NO_TRUSTED_MODELS, sign
from penstock.peers.weights_trust import WeightsTrust
from penstock.weights.hashing import manifest_of

A, B = "a" * 64, "b" * 64
OPEN = NetworkConfig(listen=("tcp/127.0.0.1:1",), open=True)


@pytest.fixture
def desk(tmp_path: Path) -> NetworkConfig:
    """The settings of a node on the machine that created the network."""
    network = authority.create(Home(tmp_path / "desk"), "home", node="desk", listen="tls/127.0.0.1:7447")
    return NetworkConfig(
        name="home",
        listen=network.listen,
        ca_file=network.ca_file,
        certificate_file=network.certificate_file,
        key_file=network.key_file,
        trusted_file=network.trusted_file,
    )


@pytest.fixture
def member(desk: NetworkConfig, tmp_path: Path) -> NetworkConfig:
    return replace(desk, trusted_file=tmp_path / "member.bin")


def opened(config: NetworkConfig) -> WeightsTrust:
    trust = WeightsTrust(config)
    trust.open()
    return trust


def test_the_pinned_hash_of_a_known_model_is_that_of_the_real_one(default_model_folder: Path) -> None:
    assert [model.manifest for model in KNOWN_MODELS] == [manifest_of(default_model_folder, read_spec(default_model_folder)).hash]


@given(liars=st.integers(0, 50), accepts=st.sampled_from([(), ("any",), (B,)]))
def test_of_a_known_model_nothing_but_the_pinned_weights_is_taken_however_many_offer_others(
    liars: int, accepts: tuple[str, ...]
) -> None:
    trust = opened(replace(OPEN, accept_weights=accepts))
    offered = {B: [f"liar{number}" for number in range(liars)]} if liars else {}
    for name in ("smollm2-135m", "smollm2", "SmolLM2-135M"):
        assert trust.choose(name, offered) == KNOWN_MODELS[0].manifest
        assert not trust.accepts(name, B)


def test_an_open_network_refuses_other_models_unless_the_user_accepts_them() -> None:
    offered = {A: ["a"]}
    with pytest.raises(UntrustedWeights, match=rf"open network nobody vouches .* --accept-weights {A}"):
        opened(OPEN).choose("m", offered)
    assert opened(OPEN).choose("m", {}) == ""
    assert opened(replace(OPEN, accept_weights=(A,))).choose("m", {A: ["a"], B: ["b", "c", "d"]}) == A
    with pytest.raises(UntrustedWeights):
        opened(replace(OPEN, accept_weights=(B,))).choose("m", offered)
    assert opened(replace(OPEN, accept_weights=("any",))).choose("m", offered) == A


def test_any_weights_are_not_those_of_most_nodes_if_they_differ() -> None:
    offered = {A: ["a"], B: ["b", "c", "d"]}
    with pytest.raises(UntrustedWeights, match=rf"different weights of 'm': {A} at a; {B} at b, c, d"):
        opened(replace(OPEN, accept_weights=("any",))).choose("m", offered)
    assert opened(replace(OPEN, accept_weights=("any", A))).choose("m", offered) == A


def test_accepted_weights_are_hashes_or_any() -> None:
    with pytest.raises(ConfigError, match=r"accept_weights .* 64 digits"):
        replace(OPEN, accept_weights=("abc",))


def test_a_closed_network_refuses_what_is_not_signed_and_says_how_to_sign_it(member: NetworkConfig) -> None:
    with pytest.raises(
        UntrustedWeights,
        match=rf"network 'home' has not signed .* penstock network trust 'a b' .* --weights {A}",
    ):
        opened(member).choose("a b", {A: ["a", "b", "c"]})


def test_the_authority_signs_its_own_files_once_and_other_nodes_follow(
    desk: NetworkConfig, member: NetworkConfig, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = opened(desk), opened(member)
    assert here.data == b""
    here.vouch("m", A)
    there.merge("desk", here.data)
    assert there.choose("m", {A: ["a"], B: ["b", "c"]}) == A
    assert opened(member).expected("m") == A, "kept on disk"
    here.vouch("m", B)
    here.vouch("m", B)
    assert here.expected("m") == A, "its own files may have been changed by mistake"
    assert caplog.text.count("penstock network trust m") == 1
    here.vouch("smollm2-135m", B)
    assert here.expected("smollm2-135m") == KNOWN_MODELS[0].manifest
    there.vouch("n", A)
    assert there.expected("n") == "", "only the machine that created the network signs"


def test_what_the_command_signs_reaches_a_running_node_and_a_withdrawal_ends_it(desk: NetworkConfig, tmp_path: Path) -> None:
    network, here = Home(tmp_path / "desk").network("home"), opened(desk)
    authority.trust(network, "m", A)
    here.reload()
    assert here.expected("m") == A
    authority.trust(network, "m", "")
    here.reload()
    with pytest.raises(UntrustedWeights):
        here.choose("m", {A: ["a"]})
    here.vouch("m", A)
    assert here.expected("m") == "", "a withdrawal is not undone by a node that still has the files"


def test_the_consent_of_a_user_does_not_overrule_the_authority(desk: NetworkConfig) -> None:
    opened(desk).vouch("m", A)
    trust = opened(replace(desk, accept_weights=("any", B)))
    assert trust.choose("m", {B: ["b"]}) == A
    assert not trust.accepts("m", B)


def test_a_forged_list_of_a_member_is_logged_once_and_changes_nothing(
    member: NetworkConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trust = opened(member)
    forged = sign("m", B, NO_TRUSTED_MODELS, create_authority("home")).encode()
    for _ in range(3):
        trust.merge("mallory", forged)
    assert trust.expected("m") == ""
    assert caplog.text.count("list of trusted models of node mallory is ignored") == 1
