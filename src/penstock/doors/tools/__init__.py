"""Tool calling for every model: what to tell the model about tools, which grammar its calls follow, and how to read them."""

from penstock.doors.tools.calling import ToolCalling, ToolPlan
from penstock.doors.tools.grammar import ToolGrammar
from penstock.doors.tools.parser import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent, ToolParser

__all__ = [
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
