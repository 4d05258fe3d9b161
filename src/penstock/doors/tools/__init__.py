"""Tool calling for every model: the prompt, the grammar of calls, and the parser that reads them."""

from penstock.doors.tools.calling import ToolCalling, ToolPlan
from penstock.doors.tools.grammar import AnswerRule, ToolGrammar
from penstock.doors.tools.parser import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent, ToolParser

__all__ = [
    "AnswerRule",
    "ArgumentsDelta",
    "CallFinished",
    "CallStarted",
    "TextDelta",
    "ToolCalling",
    "ToolEvent",
    "ToolGrammar",
    "ToolParser",
    "ToolPlan",
]
