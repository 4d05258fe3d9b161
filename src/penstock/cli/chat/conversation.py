"""The conversation of a chat: its turns, and the messages to send for the next question."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.domain.request import Message

CUT = " […]"  # appended to an unfinished answer when it is sent to the model again


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
    """A question without an answer is not in `turns`, since many chat templates reject two questions in a row.

    last_question: the newest question, answered or not, so that it can be asked again.
    """

    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)
    last_question: str | None = None

    def messages(self, question: str) -> list[Message]:
        """Return the messages to send for `question`."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        history = [message for turn in self.turns for message in turn.messages()]
        return [*system, *history, {"role": "user", "content": question}]

    def add_answer(self, question: str, answer: str, *, cut: bool) -> None:
        """Add an answer, also an unfinished one (`cut`); an empty one is not added."""
        self.last_question = question
        if answer:
            self.turns.append(ChatTurn(question, answer, cut))

    def pop_last_answer(self) -> ChatTurn | None:
        """Remove and return the turn of the last question, if it was answered; `turns.append` puts it back."""
        if self.turns and self.turns[-1].question == self.last_question:
            return self.turns.pop()
        return None

    def clear(self) -> None:
        self.turns = []
        self.last_question = None
