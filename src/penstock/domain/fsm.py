"""The state machine of a visit: what happens next to a job on a node, as one pure function.

docs/architecture.md has the table, the drawing and every difference to the text of Language Pipes that it comes from; a test
compares the page with this function.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class JobState(Enum):
    VALIDATING = auto()
    EMBED = auto()
    PROCESS_LAYERS = auto()
    HEAD = auto()
    SEND = auto()
    DONE = auto()


class ComputeStep(Enum):
    """What a job needs next: TOKENIZE when it is new, then EMBED, LAYER, NORM and HEAD for every Span of it."""

    TOKENIZE = auto()
    EMBED = auto()
    LAYER = auto()
    NORM = auto()
    HEAD = auto()


class NextLayer(Enum):
    """Where the next layer of a job is."""

    MISSING = auto()
    LOCAL = auto()
    REMOTE = auto()
    COMPLETE = auto()  # all layers are done


class Facts(NamedTuple):
    """Everything that a transition may depend on."""

    step: ComputeStep = ComputeStep.LAYER
    job_exists: bool = True  # it is one that this node knows, with Spans left to work on
    pipe_complete: bool = True  # all layers are held somewhere, and its route is open
    at_origin: bool = True
    has_ends: bool = True
    prefill_left: bool = False  # no row of the Span is wanted: it is a chunk, and more of its prompt follows
    grantable: bool = True  # ... some of which is not in flight
    next_layer: NextLayer = NextLayer.LOCAL
    update_sent: bool = True
    complete: bool = False  # end of text, a stop, or the length limit


class IllegalTransition(AssertionError):
    """A state was left with facts that cannot occur there: always a bug of ours."""


def next_state(state: JobState, facts: Facts) -> JobState:
    match state:
        case JobState.VALIDATING:
            return _after_validating(facts)
        case JobState.EMBED:
            if not facts.update_sent:
                return JobState.DONE
            return _towards(facts.next_layer)
        case JobState.PROCESS_LAYERS:
            if facts.next_layer is NextLayer.COMPLETE:
                return JobState.VALIDATING if facts.at_origin else JobState.SEND
            return _towards(facts.next_layer)
        case JobState.HEAD:
            ended = facts.complete or not facts.update_sent
            return JobState.DONE if ended or not facts.job_exists or not facts.pipe_complete else JobState.EMBED
        case JobState.SEND:
            return JobState.DONE
    raise IllegalTransition(f"{state.name} has no next state")


def _after_validating(facts: Facts) -> JobState:
    if not facts.job_exists or not facts.pipe_complete:
        return JobState.DONE
    match facts.step:
        case ComputeStep.TOKENIZE | ComputeStep.EMBED:
            return JobState.EMBED
        case ComputeStep.LAYER:
            return JobState.PROCESS_LAYERS
    if not facts.at_origin or not facts.has_ends:
        return JobState.DONE
    if not facts.prefill_left:
        return JobState.HEAD
    return JobState.EMBED if facts.grantable else JobState.DONE


def _towards(next_layer: NextLayer) -> JobState:
    match next_layer:
        case NextLayer.LOCAL:
            return JobState.PROCESS_LAYERS
        case NextLayer.REMOTE:
            return JobState.SEND
        case NextLayer.MISSING:
            return JobState.DONE
    raise IllegalTransition("freshly embedded tokens cannot have passed all layers")
