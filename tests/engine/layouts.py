"""Random networks for Hypothesis: which node holds which layers, how jobs are read and batched, and the requests."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import NOTHING_PRIVATE, PrivateLayers
from penstock.simulate.node import Machine
from tests.engine.world import Faults

NAMES = "abcd"

configs = st.builds(
    EngineConfig,
    policy=st.sampled_from(POLICY_NAMES),
    chunk=st.integers(1, 12),
    max_sequences=st.integers(1, 8),
    block_size=st.integers(1, 5),
    prefix_cache=st.booleans(),
    window=st.sampled_from([None, None, 1, 2, 5]),
)
params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 3]),
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.9]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 0]),
)
# few letters and a common beginning: prefixes are shared often
prompts = st.builds(
    lambda common, own: [1, 2, 3, 4, 5, 6, 7, 8][:common] + own,
    st.integers(0, 8),
    st.lists(st.integers(1, 3), min_size=1, max_size=10),
)
rates = st.sampled_from([0.0, 0.0, 0.02, 0.05, 0.1])
faults = st.builds(Faults, drop=rates, duplicate=rates, delay=rates, reorder=rates, corrupt=rates)


@st.composite
def networks(
    draw: st.DrawFn, *, most_nodes: int = 4, most_layers: int = 6, origins: int = 1, least_blocks: int = 12
) -> tuple[int, list[Machine]]:
    """Draw the number of layers, and nodes that together hold all of them; the first `origins` nodes take jobs. Layers are cut
    and distributed at random: an origin can have none, a node several ranges, and ranges of different nodes can overlap. First
    and last layers on an origin can be private."""
    layers = draw(st.integers(1, most_layers))
    names = NAMES[: draw(st.integers(origins, most_nodes))]
    held: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for _ in range(draw(st.integers(1, 2))):
        cuts = [0, *sorted(draw(st.sets(st.integers(1, layers), max_size=layers)) - {layers}), layers]
        for start, end in itertools.pairwise(cuts):
            owner = draw(st.sampled_from(names))
            first, last = max(0, start - draw(st.integers(0, 2))), min(layers, end + draw(st.integers(0, 2)))
            new = {layer for layer in range(first, last) if all(not a <= layer < b for a, b in held[owner])}
            held[owner] += zip(
                sorted(layer for layer in new if layer - 1 not in new),
                sorted(layer + 1 for layer in new if layer + 1 not in new),
                strict=True,
            )
    blocks = st.integers(least_blocks, 30)
    places = [
        Machine(
            name,
            tuple(sorted(held[name])),
            ends=index < origins,
            blocks=draw(blocks),
            private=draw(_kept(held[name], layers)) if index < origins else NOTHING_PRIVATE,
        )
        for index, name in enumerate(names)
    ]
    return layers, places


def _kept(held: list[tuple[int, int]], layers: int) -> st.SearchStrategy[PrivateLayers]:
    """As many of the first and last layers as it has, or fewer."""
    first = max((end for start, end in held if start == 0), default=0)
    last = max((layers - start for start, end in held if end == layers), default=0)
    return st.builds(PrivateLayers, st.integers(0, first), st.integers(0, last))
