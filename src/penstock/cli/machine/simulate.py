"""`penstock simulate`: what machines would do together, without the machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.client.server_url import UrlOption
from penstock.cli.network.what_if import read_network
from penstock.cli.options import JsonOption
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json, print_table
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.simulate.report import SimulationReport, Spread
    from penstock.simulate.scenario import Scenario

MAX_ROWS = 24  # of nodes and of links; --json has all


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO]", help="A TOML file, or the name of a scenario that comes with Penstock.")
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timeline into this SVG file.")] = None,
    from_network: Annotated[
        bool, typer.Option("--from-network", help="Take nodes, speeds and links from the running network instead.")
    ] = False,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="... without this node; may be given several times.")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="SPEC", help='... and with another one, such as "speed=2,memory=24GB"; likewise.'),
    ] = None,
    load: Annotated[
        str | None, typer.Option(metavar="LOAD", help='What is asked of it: "2/s, 500+200" or "8 streams, 500+200".')
    ] = None,
    seconds: Annotated[float | None, typer.Option(metavar="SECONDS", help="Simulate this long instead.")] = None,
    url: UrlOption = None,
) -> None:
    """Simulate a network: what would these machines do?

    Runs the real scheduler, routes, placement and recovery on a virtual clock, with layers that only take time. A scenario says
    which machines there are, how quick they and their links are, what is asked of them and what happens to them; see
    docs/simulation.md. Without SCENARIO, lists those that come with Penstock.
    """
    _check_options(
        scenario, from_network=from_network, only_there={"--without": without, "--with": with_, "--load": load, "--url": url}
    )
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError("--seconds must be above 0, and finite.")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise ConfigError(f"The plot {plot} cannot be drawn: only SVG is.", hint="Name a file that ends in .svg.")
    for flag, value in (("--seconds", seconds), ("--plot", plot)):
        if value is not None and scenario is None and not from_network:
            raise ConfigError(f"{flag} needs a SCENARIO.", hint="`penstock simulate` lists those that come with Penstock.")
    with ProgressBars() as bars:
        bars.start()

        from penstock.simulate.report import report
        from penstock.simulate.scenario_file import read_scenario, shipped
        from penstock.simulate.simulation import Simulation

        if from_network:
            chosen = read_network(url, without=without or (), added=with_ or (), load=load, seconds=seconds)
        elif scenario is not None:
            chosen = _lasting(read_scenario(scenario), seconds)
        else:
            bars.clear()
            if as_json:
                print_json({"scenarios": shipped()})
            else:
                print("\n".join(shipped()))
            return
        simulation = Simulation(chosen, lambda now: bars("simulating", int(now), int(chosen.seconds)))
        simulation.run()
    found = report(simulation)
    if plot is not None:
        from penstock.simulate.plot import plot as draw

        plot.write_text(draw(found), encoding="utf-8")
    if as_json:
        print_json(found.as_json())
        return
    _show(found)
    if plot is not None:
        print(f"\nThe timeline is in {plot}.")


def _check_options(scenario: str | None, *, from_network: bool, only_there: dict[str, object]) -> None:
    if from_network and scenario is not None:
        raise ConfigError("A scenario and --from-network exclude each other.", hint="Leave one of them out.")
    if not from_network and (given := [name for name, value in only_there.items() if value]):
        raise ConfigError(f"{given[0]} needs --from-network.", hint="A scenario file says these things itself.")


def _lasting(scenario: Scenario, seconds: float | None) -> Scenario:
    from dataclasses import replace

    return scenario if seconds is None else replace(scenario, seconds=seconds)


# ---- as text ----


def _show(found: SimulationReport) -> None:
    print(f"{found.scenario}: {len(found.nodes):,} nodes, {found.seconds:g} simulated seconds\n")
    print_table(
        ["", "p50", "p99", "max"],
        [_spread("first token", found.first_token_s), _spread("between tokens", found.between_tokens_s)],
        numbers=range(1, 4),
    )
    print()
    print_table(["what", "figure"], _figures(found), numbers=[1])
    print()
    nodes = sorted(found.nodes, key=lambda node: -node.busy) if len(found.nodes) > MAX_ROWS else found.nodes
    rows = [
        [node.node, ",".join(node.layers) or "-", f"{node.busy:.0%}", f"{node.passes:,}", f"{node.kv_tokens:,}"] for node in nodes
    ]
    print_table(["node", "layers", "busy", "passes", "KV tokens"], rows[:MAX_ROWS], numbers=range(2, 5))
    _say_more(len(rows), "nodes")
    if found.links:
        print()
        rows = [[f"{link.sender} -> {link.receiver}", f"{link.busy:.0%}", format_bytes(link.bytes)] for link in found.links]
        print_table(["link", "busy", "sent"], rows[:MAX_ROWS], numbers=[1, 2])
        _say_more(len(rows), "links")
    for error, count in found.errors.items():
        print(f"\n{count:,} jobs failed: {error}")


def _spread(name: str, spread: Spread) -> list[str]:
    return [name, *("-" if value is None else format_seconds(value) for value in (spread.p50, spread.p99, spread.max))]


def _figures(found: SimulationReport) -> Iterator[list[str]]:
    jobs = found.jobs
    yield ["tokens per second", f"{found.tokens_per_second:,.1f}"]
    yield ["prompt tokens per second", f"{found.prompt_tokens_per_second:,.1f}"]
    yield ["jobs started", f"{jobs.started:,}"]
    yield ["jobs done", f"{jobs.done:,}"]
    yield ["jobs failed", f"{jobs.failed:,}"]
    if jobs.unfinished:
        yield ["jobs unfinished", f"{jobs.unfinished:,}"]
    yield ["preemptions", f"{found.preemptions:,}"]
    yield ["broken routes", f"{found.broken_routes:,}"]
    yield ["recoveries", f"{found.recoveries:,}"]
    yield ["longest pause", format_seconds(found.longest_pause_s)]
    yield ["NetworkJobs lost", f"{found.lost_network_jobs:,}"]
    yield ["node visits", f"{found.node_visits:,}"]
    yield ["simulated a CPU second", f"{found.node_visits_per_cpu_second:,.0f} visits"]


def _say_more(count: int, what: str) -> None:
    if count > MAX_ROWS:
        print(f"{count - MAX_ROWS:,} more {what}: --json has all.")
