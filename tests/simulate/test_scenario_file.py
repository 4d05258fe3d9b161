"""Scenario files: what they say, and how what they must not say is refused."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.simulate.link_table import LinkTable
from penstock.simulate.scenario import EventKind, Scenario
from penstock.simulate.scenario_file import parse_scenario, read_scenario, shipped

BASE = """\
seconds = 60
[model]
layers = 8
hidden = 64
[[nodes]]
name = "attic"
layers = "0:4"
ends = true
[[nodes]]
name = "cellar"
count = 2
layers = "4:8"
[[load]]
origin = "attic"
streams = 1
prompt = 10
answer = 5
"""


def scenario(more: str = "", base: str = BASE) -> Scenario:
    return parse_scenario(base + more)


@pytest.mark.parametrize(
    "more, line, problem",
    [
        ("[[load]]\norigin = 'attic'\nstreams = 1\nprompt = 1\nanswer = 1\nanswr = 2\n", 23, "[load] has no key 'answr'"),
        ("[[links]]\nrtt = 3\n", 19, "[links] has no key 'rtt'"),
        ("[[events]]\nat = 1\nkil = 'attic'\n", 20, "[events] has no key 'kil'"),
        ("[engine]\npolicy = 'lrs'\nchunks = 5\n", 20, "[engine] has no key 'chunks'"),
        ("[engine]\npolicy = 'best'\n", 18, "There is no policy 'best'"),
        ("[network]\nwire = 'fp8'\n", 19, "is not one of auto, fp32, bf16, int8"),
        ("[network]\nlisten = 'x'\n", 19, "[network] has no key 'listen'"),
        ("[extra]\n", 18, "The scenario has no key 'extra'"),
        ("[[nodes]]\nname = 'x'\nmemory = '4GB'\nspeed = 3\n", 21, "[nodes] has no key 'speed'"),
        ("[[nodes]]\nname = 'x'\n", 18, "x needs layers, or memory"),
        ("[[nodes]]\nname = 'x'\nlayers = '4:9'\n", 20, "the model has 8 layers"),
        ("[[nodes]]\nname = 'x'\nlayers = '4-8'\n", 20, "is not layers"),
        ("[[nodes]]\nname = 'attic'\nlayers = '4:8'\n", 19, "there are two nodes attic"),
        ("[[links]]\nbetween = ['attic', 'roof']\n", 19, "there is no node roof"),
        ("[[nodes]]\nname = 'x'\nlayers = '²:8'\n", 20, "is not layers"),
        ("[[nodes]]\nname = 'x'\ncount = 281474976710655\nlayers = '4:8'\n", 20, "more than 5,000 nodes"),
        ("[[load]]\norigin = 'attic'\nstreams = 100001\nprompt = 1\nanswer = 1\n", 20, "is not at most 100,000"),
        ("[[events]]\nat = 1\nevery = 1e-308\nkill = 'attic'\n", 20, "too many events"),
        ("[[links]]\nmbit = 0\n", 19, "mbit = 0 is not a number above 0"),
        ("[[links]]\nloss = 2\n", 19, "loss = 2 is not a share"),
        ("[[events]]\nat = 1\nkill = 'attic'\njoin = 'attic'\n", 18, "an event needs one of"),
        ("[[events]]\nat = 1\ncut = 'attic'\n", 20, "is not two names"),
        ("[[load]]\norigin = 'cellar'\nstreams = 1\nprompt = 1\nanswer = 1\n", 19, "cellar is not a node with ends"),
        ("[[load]]\norigin = 'attic'\nprompt = 1\nanswer = 1\n", 18, "one of per_second, at and streams"),
        ("[[load]]\norigin = 'attic'\nstreams = 1\nprompt = [5, 2]\nanswer = 1\n", 21, "is not a number of tokens"),
        ("[[load]]\norigin = 'attic'\nstreams = 1\nanswer = 1\n", 18, "[load] needs prompt"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(more: str, line: int, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        scenario(more)
    assert f"line {line}:" in refused.value.message
    assert problem in refused.value.message


def test_text_that_is_no_toml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is not TOML.*line 1"):
        parse_scenario("seconds = \n")


def test_text_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        parse_scenario(f"x = {'[' * 5000}{']' * 5000}")


def test_a_file_that_is_not_there_names_the_scenarios_that_are() -> None:
    with pytest.raises(ConfigError, match="thousand"):
        read_scenario("nowhere.toml")


def test_a_count_makes_numbered_nodes() -> None:
    found = scenario()
    assert [machine.name for machine in found.machines] == ["attic", "cellar-1", "cellar-2"]
    assert found.members("cellar") == ("cellar-1", "cellar-2")
    assert found.members("attic") == ("attic",)


def test_every_form_of_load_is_read() -> None:
    rows = "".join(
        f"[[load]]\norigin = 'attic'\n{form}\nprompt = [100, 2000]\nanswer = 5\n" for form in ("per_second = 0.5", "at = [0, 10]")
    )
    streams, poisson, listed = scenario(rows).loads
    assert (streams.streams, poisson.per_second, listed.at) == (1, 0.5, (0.0, 10.0))
    assert (streams.prompt, poisson.prompt) == ((10, 10), (100, 2000))


def test_every_event_is_read_and_may_repeat() -> None:
    single = "".join(
        f"[[events]]\nat = {at}\n{what} = 'attic'\n" for at, what in enumerate(["kill", "freeze", "thaw", "leave", "join"])
    )
    pairs = "".join(f"[[events]]\nat = 9\n{what} = ['attic', 'cellar-1']\n" for what in ("cut", "heal"))
    found = scenario(single + pairs + "[[events]]\nat = 50\nevery = 5\nkill = 'cellar'\n").events
    assert {event.what for event in found} == {*EventKind}
    assert [event.at for event in found if event.names == ("cellar",)] == [50.0, 55.0, 60.0]


def test_a_node_whose_first_event_is_to_join_is_not_there_before() -> None:
    found = scenario(
        "[[events]]\nat = 9\njoin = 'cellar-2'\n[[events]]\nat = 5\nkill = 'cellar-1'\n[[events]]\nat = 8\njoin = 'cellar-1'\n"
    )
    assert found.absent == {"cellar-2"}


def test_links_between_named_nodes_count_before_groups_sites_and_the_rest() -> None:
    site = BASE.replace("count = 2\n", 'count = 2\nsite = "house"\n')
    table = LinkTable(
        scenario(
            "[[links]]\nrtt_ms = 40\n[[links]]\nbetween = ['attic', 'cellar-1']\nrtt_ms = 10\n"
            "[[links]]\nbetween = ['attic', 'cellar']\nrtt_ms = 20\n[[links]]\nsame_site = true\nrtt_ms = 1\n",
            site,
        )
    )
    trips = [table.speed(*pair).round_trip for pair in (("attic", "cellar-1"), ("cellar-2", "attic"), ("cellar-1", "cellar-2"))]
    assert trips == [0.01, 0.02, 0.001]
    assert table.speed("attic", "elsewhere").round_trip == 0.04


def test_placement_decides_by_memory_where_no_layers_are_given() -> None:
    text = BASE.replace("hidden = 64", "hidden = 64\nlayer_bytes = 1_000_000_000\nkv_bytes = 1000")
    text = text.replace('layers = "0:4"', 'memory = "5.2GB"').replace('layers = "4:8"', 'memory = "20GB"')
    attic, one, two = scenario(base=text).machines
    assert attic.ranges[0][0] == 0
    assert 0 < attic.ranges[0][1] < 8, "it holds what fits"
    assert one.ranges == ((attic.ranges[0][1], 8),), "the next one fills the rest"
    assert two.ranges, "and the last one copies"


def test_a_machine_that_cannot_hold_its_layers_is_refused() -> None:
    text = BASE.replace("hidden = 64", "hidden = 64\nlayer_bytes = 1_000_000_000")
    with pytest.raises(ConfigError, match=r"attic has 2 GB of memory; its 4 layers"):
        scenario(base=text.replace('layers = "0:4"', 'layers = "0:4"\nmemory = "2GB"'))


@pytest.mark.parametrize("name", ["home", "lab", "internet", "thousand"])
def test_the_shipped_scenarios_hold_all_layers(name: str) -> None:
    assert name in shipped()
    found = read_scenario(name)
    held = {layer for machine in found.machines for start, end in machine.ranges for layer in range(start, end)}
    assert held == {*range(found.model.layers)}


def test_the_largest_scenario_is_a_thousand_nodes_in_a_hundred_pipes() -> None:
    found = read_scenario("thousand")
    assert len(found.machines) == 1000
    assert len({*found.sites.values()}) == 100
    assert len(found.members(found.loads[0].origin)) == 100
    kinds = [event.what for event in found.events]
    assert 58 <= kinds.count(EventKind.KILL) <= 62
    assert 58 <= kinds.count(EventKind.JOIN) <= 62
