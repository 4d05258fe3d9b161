"""`penstock chat`: a conversation in the terminal, with a server or a model in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.chat.backend import ALONE, AloneOption, choose_model_name, open_backend
from penstock.cli.chat.conversation import Conversation
from penstock.cli.client.server_url import UrlOption
from penstock.cli.exits import print_error
from penstock.cli.options import OptionalModel, wrong_usage
from penstock.cli.ui.bars import ProgressBars
from penstock.domain.sampling import SamplingParams
from penstock.errors import PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.cli.chat.backend import ChatBackend
    from penstock.cli.chat.reply import Reply
    from penstock.cli.ui.terminal import Terminal

RETRY_TEMPERATURE = 0.7  # at 0, /retry would get the same answer
TOO_LONG = ("context_length_exceeded", "prompt_too_long")


def chat(
    url: UrlOption = None,
    model: OptionalModel = None,
    alone: AloneOption = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop an answer after this many tokens.", show_default=False)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 always takes the most likely word, 1 varies a lot; by default what the model's makers recommend."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers with a temperature repeatable.")] = None,
) -> None:
    """Chat with a model.

    The server is --url or PENSTOCK_URL, or the one of this machine if it answers and has the model. Otherwise the network that
    this machine has joined answers, if any. Otherwise, and with --alone, the model is loaded into this process. The API key is
    taken from PENSTOCK_API_KEY.

    Ctrl-C stops an answer, Ctrl-D exits, /help shows more. From a pipe each line is answered, and only answers go to stdout.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    wanted = {name: value for name, value in options.items() if value is not None}
    with wrong_usage():
        SamplingParams(**wanted)  # type: ignore[arg-type]

    from penstock.cli.ui.terminal import Terminal

    terminal = Terminal()
    if url is not None and alone:
        raise typer.BadParameter(f"It does not go with {ALONE}.", param_hint="--url")
    with ProgressBars() as bars, open_backend(url, model, bars, alone=alone) as (backend, name):
        bars.clear()
        talk = Chat(backend, name, Conversation(system or None), wanted, terminal, bars)
        if terminal.interactive:
            terminal.note(f"Chatting with {name} {backend.place}. /help shows the commands, Ctrl-D exits.")
            talk.run_interactive()
        else:
            talk.run_piped()


class Leave(Exception):
    """The user ends the chat."""


class Chat:
    def __init__(
        self,
        backend: ChatBackend,
        model: str,
        conversation: Conversation,
        wanted: Mapping[str, Any],  # the sampling settings that the user gave
        terminal: Terminal,
        bars: ProgressBars,
    ) -> None:
        self._backend = backend
        self._model = model
        self._conversation = conversation
        self._wanted = wanted
        self._terminal = terminal
        self._bars = bars
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/retry": self._retry,
            "/clear": self._clear,
            "/system": self._system,
            "/model": self._choose_model,
            "/help": self._help,
            "/exit": self._exit,
            "/quit": self._exit,
            "/bye": self._exit,
        }

    def run_interactive(self) -> None:
        """Answer until the user exits. Errors are printed, and the chat continues."""
        warned = False  # the last input was Ctrl-C at the prompt
        while True:
            try:
                line = self._terminal.read()
                warned = False
                self._handle_line(line)
            except (EOFError, Leave) as end:
                if isinstance(end, EOFError):
                    print()
                return
            except KeyboardInterrupt:
                print()
                if warned:
                    return
                warned = True
                self._terminal.note("To exit: Ctrl-C once more, Ctrl-D or /exit.")
            except PenstockError as error:
                print_error(error.message, error.hint)

    def run_piped(self) -> None:
        """Answer each line until the end of input or the first error, since later lines may depend on it."""
        while True:
            try:
                self._handle_line(self._terminal.read())
            except (EOFError, Leave):
                return

    def _handle_line(self, line: str) -> None:
        if line.startswith("/"):
            word, *rest = line.split(maxsplit=1)
            self._command(word)(rest[0].strip() if rest else "")
        elif line.strip():
            self._answer(line.strip(), self._wanted)

    def _command(self, word: str) -> Callable[[str], None]:
        if word in self._commands:
            return self._commands[word]
        from difflib import get_close_matches

        near = get_close_matches(word, self._commands, n=1)
        suggestion = f"Did you mean {near[0]}?" if near else "/help lists the commands."
        raise RequestError(
            f"There is no command {word}; nothing was sent.", hint=f"{suggestion} To send a slash, put a space before it."
        )

    # ---- answers ----

    def _answer(self, question: str, wanted: Mapping[str, Any]) -> Reply:
        from penstock.cli.chat.reply import collect_reply

        def show(text: str) -> None:
            self._bars.clear()
            self._terminal.print_answer(text)

        messages = self._conversation.messages(question)
        reply = collect_reply(lambda: self._backend.ask(self._model, messages, wanted), show=show, progress=self._bars)
        self._bars.clear()
        self._terminal.end_line(after_key=reply.interrupted)
        self._conversation.add_answer(question, reply.text, cut=not reply.complete)
        if not self._terminal.interactive:
            if reply.interrupted:
                raise KeyboardInterrupt
            if reply.error is not None:
                raise reply.error
        elif reply.error is not None:
            print_error(reply.error.message, _next_step(reply.error, bool(reply.text)))
        elif reply.interrupted and not reply.text:
            self._terminal.note("(stopped before the first word: the question is dropped, /retry asks it again)")
        else:
            self._terminal.note(f"({reply.summary()})")
        return reply

    def _retry(self, _: str) -> None:
        question = self._conversation.last_question
        if question is None:
            raise RequestError("There is no question to retry.")
        if self._wanted.get("temperature") == 0 or "seed" in self._wanted:
            self._terminal.note("(With temperature 0 or a seed the same question gets the same answer.)")
        before = self._conversation.pop_last_answer()
        lively = {"temperature": RETRY_TEMPERATURE, **self._wanted}  # or the same question would get the same answer
        if not self._answer(question, lively).text and before is not None:
            self._conversation.turns.append(before)

    # ---- other commands ----

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._terminal.note("The conversation was cleared.")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
        now = self._conversation.system
        self._terminal.note(f"The system message is: {now}" if now else "There is no system message.")

    def _choose_model(self, name: str) -> None:
        names = self._backend.models()
        if name:
            self._model = choose_model_name(name, names, self._backend.place)
            self._terminal.note(f"Now chatting with {name}.")
        else:
            self._terminal.note("\n".join(f"{'*' if known == self._model else ' '} {known}" for known in names))

    def _help(self, _: str) -> None:
        from penstock.cli.ui.terminal import history_file

        print(HELP.format(history=history_file()), file=sys.stderr)

    def _exit(self, _: str) -> None:
        raise Leave


def _next_step(error: PenstockError, has_text: bool) -> str:
    if error.code in TOO_LONG or getattr(error, "reason", "") in TOO_LONG:
        return "/clear clears the conversation to make room."
    so_far = "The answer so far is kept. " if has_text else ""
    if error.code == "unreachable":
        return f"{so_far}/retry asks again once the server is back."
    return f"{error.hint} {so_far}/retry asks again.".strip()


HELP = """\
  /retry         ask the last question again; the new answer replaces the old one
  /clear         clear the conversation
  /system TEXT   set the system message; /system shows it, /system - removes it
  /model NAME    switch to another model; /model lists them
  /help          show this
  /exit          exit (also /quit, /bye, Ctrl-D)

  Ctrl-C stops an answer; the text so far stays in the conversation.
  A line that ends with \\ continues on the next line.
  To send a message that starts with a slash, put a space before it.
  The up key brings back earlier lines, which are stored in {history}."""
