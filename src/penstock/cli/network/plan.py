"""`penstock network plan`: which placement of the layers is best for one stream, and which for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.client.server_url import UrlOption
from penstock.cli.network.what_if import running_network
from penstock.cli.options import JsonOption
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json, print_table
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.simulate.placements import ComparedPlacement


def plan(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Compare placements of the layers by simulation.

    Takes nodes, speeds and links from the running network, and simulates one stream and sixteen on the layers as they are held
    now, on as few machines as possible, and on all machines by their speed.
    """
    with ProgressBars() as bars:
        bars.start()
        network = running_network(url)

        from penstock.simulate.placements import compare

        found = compare(network)
    best_for_one = max(found, key=lambda one: one.one)
    best_for_many = max(found, key=lambda one: one.many)
    if as_json:
        print_json({"placements": found, "best_for_one_stream": best_for_one.name, "best_for_many": best_for_many.name})
        return
    print_table(
        ["placement", "layers", "one stream", "first token", "16 streams"],
        [_row(one) for one in found],
        numbers=range(2, 5),
    )
    print()
    for what, best in (("one stream", best_for_one), ("many", best_for_many)):
        print(f"Best for {what}: {best.name}.")
    _say_how([one for one in (best_for_one, best_for_many) if one.name != found[0].name])


def _row(one: ComparedPlacement) -> list[str]:
    layers = ", ".join(f"{node} {','.join(ranges)}" for node, ranges in one.layers.items())
    first = "-" if one.first_token is None else format_seconds(one.first_token)
    return [one.name, layers, f"{one.one:.1f} tokens/s", first, f"{one.many:.1f} tokens/s"]


def _say_how(better: Sequence[ComparedPlacement]) -> None:
    """Print the command that gives each node its layers."""
    for one in {one.name: one for one in better}.values():
        print(f"\nFor {one.name}:")
        for node, ranges in one.layers.items():
            print(f"  on {node}: penstock serve --layers {','.join(ranges)}")
