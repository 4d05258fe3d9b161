"""Text as it streams: whole characters only, stop strings cut off, possible ones held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sequences.output_text import OutputText


class Letters:
    """A stream in which a token is a piece of text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def stream(pieces: list[str], stops: list[str], rest: str = "") -> tuple[list[str], str | None]:
    output = OutputText(Letters(pieces, rest), stops)
    said = []
    for i in range(len(pieces)):
        piece = output.push(i)
        said.append(piece.text)
        if piece.stop is not None:
            return said, piece.stop
    last = output.finish()
    return [*said, last.text], last.stop


def test_what_could_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert stream(["a<", "en", "x"], ["<end>"]) == (["a", "", "<enx", ""], None)


def test_a_stop_string_over_several_tokens_is_cut_off() -> None:
    assert stream(["a<", "en", "d>b"], ["<end>"]) == (["a", "", ""], "<end>")


def test_of_two_stop_strings_the_earlier_one_counts() -> None:
    assert stream(["one two three"], ["three", "two"]) == (["one "], "two")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert stream(["a<e"], ["<end>"]) == (["a", "<e"], None)


def test_a_stop_string_completed_by_the_last_bytes_is_found() -> None:
    assert stream(["a<en"], ["<end>"], rest="d>") == (["a", ""], "<end>")


def test_before_min_tokens_nothing_stops() -> None:
    output = OutputText(Letters(["<end>"]), ["<end>"])
    assert output.push(0, may_stop=False).text == "<end>"


@given(
    st.lists(st.text("ab<", max_size=4), max_size=12), st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_streaming_says_what_cutting_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    places = [(whole.find(stop), stop) for stop in stops if stop in whole]
    expected = whole[: min(places)[0]] if places else whole
    said, stop = stream(pieces, stops)
    assert (stop is not None) == bool(places)
    if stop is None:
        assert "".join(said) == expected
    else:
        # tokens come one by one: a stop string that ends earlier counts, even if another began earlier
        assert whole.startswith("".join(said) + stop)
        assert not any(other in "".join(said) for other in stops)
