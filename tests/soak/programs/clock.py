"""What the agents of all programs share: a tool, the shape of the answer, and how the end is reported."""

import json
from typing import Literal

from pydantic import BaseModel

QUESTION = "Where is it noon?"
calls: list[str] = []


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def clock(zone: Literal["UTC", "CET"]) -> str:
    """The time."""
    calls.append(zone)
    return "noon"


def report(name: str, output: City) -> None:
    print(json.dumps({"name": name, "calls": len(calls), "output": output.model_dump()}))
    calls.clear()
