"""A conversation: what was said, and what of it the model is told next."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.domain.request import Message

CUT = " […]"  # how an answer that was not finished ends when the model reads it again


@dataclass(frozen=True, slots=True)
class ChatTurn:
    question: str
    answer: str
    cut: bool = False

    def messages(self) -> list[Message]:
        answer = self.answer + CUT if self.cut else self.answer
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": answer}]


@dataclass(slots=True)
class Conversation:
    """A question without an answer is not in `turns`: many chat templates refuse two questions in a row. `last_question` keeps it, so
    that it can be asked again."""

    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)
    last_question: str | None = None

    def messages(self, question: str) -> list[Message]:
        """All that the model must be told to answer `question`."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        history = [message for turn in self.turns for message in turn.messages()]
        return [*system, *history, {"role": "user", "content": question}]

    def add_answer(self, question: str, answer: str, *, cut: bool) -> None:
        """Remember an answer, also one that broke off; one without a word is none."""
        self.last_question = question
        if answer:
            self.turns.append(ChatTurn(question, answer, cut))

    def pop_last_answer(self) -> ChatTurn | None:
        """Forget the answer to the last question, if there is one; `turns.append` puts it back."""
        if self.turns and self.turns[-1].question == self.last_question:
            return self.turns.pop()
        return None

    def clear(self) -> None:
        self.turns, self.last_question = [], None
