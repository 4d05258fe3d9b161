"""What attention keeps between steps never changes what it says, whatever the batch does from step to step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.topology import LayerRange
from penstock.model.attention import Piece
from penstock.model.segment import LlmModel
from penstock.model.spec import spec_from_config
from penstock.model.weights import WeightFiles

SPEC = spec_from_config(
    {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 64,
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention"],
    }
)
BLOCKS, SIZE = 64, 4


class Random(WeightFiles):
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def read(self, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, torch.Tensor], bytes]:
        return {name: torch.randn(shape, generator=self._generator) * 0.3 for name, shape in sorted(shapes.items())}, b""


def segment(*, keeps: bool) -> LlmModel:
    model = LlmModel(
        SPEC, LayerRange(0, 2), Random(), dtype=torch.float32, device=torch.device("cpu"), kv_blocks=BLOCKS, block_size=SIZE
    )
    model._attention._max_kept = 10_000 if keeps else 0
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[LlmModel, LlmModel]:
    return segment(keeps=True), segment(keeps=False)


class Sequences:
    """Sequences with tables of their own, run through both models alike."""

    def __init__(self, pair: tuple[LlmModel, LlmModel]) -> None:
        self.models = pair
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.free = list(range(1, BLOCKS + 1))
        self.reused = 0

    def run(self, spans: list[tuple[int, int]]) -> None:
        pieces = []
        for name, n in spans:
            table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            while len(table) * SIZE < start + n:
                table.append(self.free.pop())
            pieces.append(Piece(start, n, table))
            self.lengths[name] = start + n
        total = sum(n for _, n in spans)
        hidden = torch.randn(total, SPEC.hidden, generator=torch.Generator().manual_seed(total + sum(self.lengths.values())))
        before = self.models[0]._attention._kept
        kept, plain = (model.process(hidden.clone(), pieces) for model in self.models)
        self.reused += any(g in before for g in self.models[0]._attention._kept)
        torch.testing.assert_close(kept, plain, atol=1e-5, rtol=1e-5)

    def rewind(self, name: int, length: int) -> None:
        self.lengths[name] = min(length, self.lengths[name])

    def drop(self, name: int) -> None:
        self.free += self.tables.pop(name, [])
        self.lengths.pop(name, None)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.sets(st.integers(0, 4), min_size=1)),
        st.tuples(st.just("decode"), st.just({0, 1, 2, 3, 4})),
        st.tuples(st.just("chunk"), st.integers(0, 4), st.integers(2, 9)),
        st.tuples(st.just("rewind"), st.integers(0, 4), st.integers(1, 5)),
        st.tuples(st.just("drop"), st.integers(0, 4)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(script=steps)
def test_kept_or_gathered_the_answer_is_the_same(pair: tuple[LlmModel, LlmModel], script: list[tuple[object, ...]]) -> None:
    sequences = Sequences(pair)
    for what, *details in script:
        if max(sequences.lengths.values(), default=0) > 40:
            break
        match what, details:
            case "decode", [names]:
                sequences.run([(name, 1) for name in sorted(names)])  # type: ignore[call-overload]
            case "chunk", [name, n]:
                others = [(other, 1) for other in sorted(sequences.lengths) if other != name]
                sequences.run([*others, (name, n)])  # type: ignore[list-item]
            case "rewind", [name, length]:
                if name in sequences.lengths:
                    sequences.rewind(name, length)  # type: ignore[arg-type]
            case "drop", [name]:
                sequences.drop(name)  # type: ignore[arg-type]


def test_the_same_sequences_going_on_are_not_gathered_again(pair: tuple[LlmModel, LlmModel]) -> None:
    sequences = Sequences(pair)
    sequences.run([(0, 5), (1, 9)])
    for _ in range(20):
        sequences.run([(0, 1), (1, 1)])
    assert sequences.reused == 19


def test_a_pass_that_fails_leaves_nothing_kept(pair: tuple[LlmModel, LlmModel], monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(pair)
    sequences.run([(0, 5), (1, 9)])
    sequences.run([(0, 1), (1, 1)])
    layer = pair[0]._layers[1]

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    down = layer.down
    layer.down = broken  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        pair[0].process(torch.randn(2, SPEC.hidden), [Piece(6, 1, sequences.tables[0]), Piece(10, 1, sequences.tables[1])])
    layer.down = down
    assert pair[0]._attention._kept == []
    sequences.run([(0, 1), (1, 1)])
