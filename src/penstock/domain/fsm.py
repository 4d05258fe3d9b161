"""The state machine of a visit: what happens next to a job on a node, as one pure function.

The table comes from Language Pipes, with two corrections. HEAD leads to EMBED, never to SEND or PROCESS_LAYERS: the new
token is not embedded yet, and EMBED decides between local and remote one step later. And a pipelined prompt adds a row:
a chunk that returns while the rest of its prompt is in flight has nothing left to do, so its visit is DONE while the
sequence continues.
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
    """What a job needs next. NORM is computed together with HEAD, so no visit waits for it."""

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
    job_exists: bool = True
    pipe_complete: bool = True
    at_origin: bool = True
    has_ends: bool = True
    prefill_left: bool = False  # the prompt has tokens that did not pass all layers yet
    grantable: bool = True  # ... and some of them are not in flight
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
            return JobState.DONE if facts.complete or not facts.update_sent else JobState.EMBED
        case JobState.SEND:
            return JobState.DONE
    raise IllegalTransition(f"{state.name} has no next state")


def _after_validating(facts: Facts) -> JobState:
    if not facts.job_exists or not facts.pipe_complete:
        return JobState.DONE
    match facts.step:
        case ComputeStep.TOKENIZE:
            return JobState.EMBED
        case ComputeStep.LAYER:
            return JobState.PROCESS_LAYERS
        case ComputeStep.HEAD:
            if not facts.at_origin or not facts.has_ends:
                return JobState.DONE
            if not facts.prefill_left:
                return JobState.HEAD
            return JobState.EMBED if facts.grantable else JobState.DONE
    raise IllegalTransition(f"no visit starts at the step {facts.step.name}")


def _towards(next_layer: NextLayer) -> JobState:
    match next_layer:
        case NextLayer.LOCAL:
            return JobState.PROCESS_LAYERS
        case NextLayer.REMOTE:
            return JobState.SEND
        case NextLayer.MISSING:
            return JobState.DONE
    raise IllegalTransition("freshly embedded tokens cannot have passed all layers")
