"""ToolGrammar: the grammar of answers with calls. A call that has begun can only become a valid one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.domain.constraint import ConstraintFactory
from penstock.doors.grammar.grammars import Grammars, GrammarTooComplex
from penstock.doors.tools.formats import ToolFormat
from penstock.doors.tools.offer import ToolOffer
from penstock.errors import RequestError

MAX_TOOLS_BYTES = 128 * 1024  # of the grammar with the schemas of all tools
MAX_CALLS = 32  # in one answer, so that a model that repeats itself ends


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """What an answer without calls looks like: an expression in Lark, and the field of the request that asks for it."""

    rule: str
    field: str


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """answer: None if an answer without calls can be any text; otherwise there is no text before a call either."""

    format: ToolFormat
    offer: ToolOffer
    answer: AnswerRule | None = None

    def compile(self, grammars: Grammars) -> ConstraintFactory:
        """Compile the grammar; do not call it on the event loop."""
        text = self.lark(grammars.special_tokens)
        try:
            return grammars.checked_lark(text, field="tools")
        except GrammarTooComplex:
            raise
        except RequestError:
            with contextlib.suppress(GrammarTooComplex):  # compiling them one by one took too long
                if self.answer is not None:
                    grammars.checked_lark(f"start: {self.answer.rule}", field=self.answer.field, keep=False)
                for function in self.offer.callable:  # report the function whose schema is at fault, if it is just one
                    lone = f"start: %json {json.dumps(function.schema(self._schema_count))}"
                    grammars.checked_lark(lone, field=f"{function.field}.parameters", keep=False)
            raise

    @property
    def _schema_count(self) -> int:
        return len(self.offer.callable) + (self.answer is not None)

    def lark(self, special: Mapping[str, int]) -> str:
        """The grammar in Lark. special: ids of the markers that are special tokens."""
        rules: list[str] = []
        size = 0
        for rule in self._rules(special):
            rules.append(rule)
            size += len(rule)
            if size > MAX_TOOLS_BYTES:
                raise RequestError(
                    f"All tools together have more than {MAX_TOOLS_BYTES} bytes.", field="tools", hint="Shorten them."
                )
        return "\n".join(rules) + "\n"

    def _rules(self, special: Mapping[str, int]) -> Iterator[str]:
        form = self.format
        functions = self.offer.callable
        opening = form.begin + form.before
        for i, function in enumerate(functions):
            yield f"arguments_{i}: %json {json.dumps(function.schema(self._schema_count))}"
            tail = f"arguments_{i} {self._terms(form.after, special)}"
            yield f"call_{i}: {self._terms(form.before + function.name + form.middle, special)} {tail}"
            yield f"first_{i}: {self._terms(opening + function.name + form.middle, special)} {tail}"
            # The first call without its marker, which ends the text before it.
            rest = opening.removeprefix(form.marker) + function.name + form.middle
            yield f"rest_{i}: {self._terms(rest, special)} {tail}"
        for kind in ("call", "first", "rest"):
            yield f"{kind}: " + " | ".join(f"{kind}_{i}" for i in range(len(functions)))
        more = f"({self._terms(form.between, special)} call){{0,{MAX_CALLS - 1}}}" if form.parallel and self.offer.several else ""
        yield f"more: {more} {self._terms(form.end, special)}"
        yield from self._start(special)

    def _start(self, special: Mapping[str, int]) -> Iterator[str]:
        form = self.format
        if self.offer.must:
            yield "start: first more"
        elif self.answer is not None:
            yield "start: answer | first more"
            yield f"answer: {self.answer.rule}"
        elif not form.anywhere:
            tag = f"{self._terms(form.tag, special)}?" if form.tag in special else ""
            yield f"start: TEXT | {tag} first more"
            looks = r"\s*".join(re.escape(part).replace("/", r"\/") for part in ("{", '"name"'))
            yield f"TEXT: /(?s:.*)/ & ~/{looks}(?s:.*)/"
        elif form.marker in special:
            yield f"start: TEXT | TEXT {self._terms(form.marker, special)} rest more"
            yield "TEXT: /(?s:.*)/"
        else:
            yield "start: TEXT | announced rest more"
            yield f"announced[lazy]: TEXT {json.dumps(form.marker)}"
            yield "TEXT: /(?s:.*)/"

    def _terms(self, text: str, special: Mapping[str, int]) -> str:
        """A text in Lark: quoted, with special tokens by id."""
        markers = [marker for marker in self.format.markers if marker in special]
        pieces = re.split("|".join(f"({re.escape(marker)})" for marker in markers), text) if markers else [text]
        return " ".join(f"<[{special[piece]}]>" if piece in markers else json.dumps(piece) for piece in pieces if piece)
