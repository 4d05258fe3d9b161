"""The state machine of a visit: what happens next to a job on a node, as one pure function.

docs/architecture.md has the table, the drawing and every difference from the Language Pipes text that it is based on; a test
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


# Names for members that every visit asks for: before Python 3.12, to get an attribute of an Enum takes as long as a call.
VALIDATING, EMBED, PROCESS_LAYERS, HEAD, SEND, DONE = JobState
MISSING, LOCAL, REMOTE, COMPLETE = NextLayer
TOKENIZE_STEP, EMBED_STEP, LAYER_STEP, NORM_STEP, HEAD_STEP = ComputeStep
ENTERING = TOKENIZE_STEP, EMBED_STEP


class Facts(NamedTuple):
    """Everything that a transition may depend on."""

    step: ComputeStep = LAYER_STEP
    job_exists: bool = True  # it is one that this node knows, with Spans left to work on
    pipe_complete: bool = True  # all layers are held somewhere, and its route is open
    at_origin: bool = True
    has_ends: bool = True
    prefill_left: bool = False  # no row of the Span is wanted: it is a chunk, and more of its prompt follows
    grantable: bool = True  # ... some of which is not in flight
    next_layer: NextLayer = LOCAL
    update_sent: bool = True
    complete: bool = False  # end of text, a stop, or the length limit


class IllegalTransition(AssertionError):
    """A state was left with facts that cannot occur there: always a bug of ours."""


def next_state(state: JobState, facts: Facts) -> JobState:
    if state is VALIDATING:
        return _after_validating(facts)
    if state is EMBED:
        return _towards(facts.next_layer) if facts.update_sent else DONE
    if state is PROCESS_LAYERS:
        if facts.next_layer is COMPLETE:
            return VALIDATING if facts.at_origin else SEND
        return _towards(facts.next_layer)
    if state is HEAD:
        ended = facts.complete or not facts.update_sent
        return DONE if ended or not facts.job_exists or not facts.pipe_complete else EMBED
    if state is SEND:
        return DONE
    raise IllegalTransition(f"{state.name} has no next state")


def _after_validating(facts: Facts) -> JobState:
    if not facts.job_exists or not facts.pipe_complete:
        return DONE
    if facts.step is LAYER_STEP:
        return PROCESS_LAYERS
    if facts.step in ENTERING:
        return EMBED
    if not facts.at_origin or not facts.has_ends:
        return DONE
    if not facts.prefill_left:
        return HEAD
    return EMBED if facts.grantable else DONE


def _towards(next_layer: NextLayer) -> JobState:
    if next_layer is LOCAL:
        return PROCESS_LAYERS
    if next_layer is REMOTE:
        return SEND
    if next_layer is MISSING:
        return DONE
    raise IllegalTransition("freshly embedded tokens cannot have passed all layers")
