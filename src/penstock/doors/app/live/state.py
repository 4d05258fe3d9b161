"""Gathers the LiveState of a node, and cuts it to what each key sees."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock import __version__
from penstock.config.keys import NO_LIMITS
from penstock.domain.job import Job
from penstock.doors.access.keys import Caller, Canonical
from penstock.doors.app.live.types import (
    EndedLiveJob,
    LiveJob,
    LiveLink,
    LiveModel,
    LiveNode,
    LiveSegment,
    LiveState,
)
from penstock.doors.app.status import kv_of, state_of
from penstock.engine.hosted_model import HostedLayers, HostedModel
from penstock.engine.job_factory import EndedJob
from penstock.engine.routing.origin.origin import Origin
from penstock.peers.report import describe_route

MAX_ENDED_JOBS = 100  # of each model, that a watcher sees
MAX_LINKS = 16  # of each node; those in use come first


@dataclass(frozen=True, slots=True)
class Gathered:
    """The state of all keys, before it is cut to what one of them sees."""

    state: LiveState
    submitters: Mapping[str, str]  # by the id of a job

    def seen_by(self, caller: Caller, canonical: Canonical) -> LiveState:
        """Leave out what a key does not see. The owner sees all; a key with limits sees nothing about the work of others."""
        state = self.state
        if caller.owner is None:
            return state

        def own(jobs: Mapping[str, Any]) -> dict[str, Any]:
            kept = {job_id: job for job_id, job in jobs.items() if self.submitters[job_id] == caller.owner}
            return {job_id: {name: value for name, value in job.items() if name != "key"} for job_id, job in kept.items()}

        mine: LiveState = {**state, "scope": "own_jobs", "jobs": own(state["jobs"]), "ended": own(state["ended"])}
        if caller.name is not None:
            mine["key"] = caller.name
        if caller.limits == NO_LIMITS:
            return mine
        mine["scope"] = "limited"
        mine["models"] = {
            name: {"num_layers": model["num_layers"], "complete": model["complete"]}
            for name, model in state["models"].items()
            if caller.may_use(name, canonical)
        }
        for name in ("network", "nodes", "workspace"):
            mine.pop(name, None)  # type: ignore[misc]
        return mine


def gather(
    node_id: str,
    hosted: Sequence[HostedLayers],
    network: Mapping[str, Any],
    *,
    draining: bool,
    workspace: Mapping[str, int] | None,
    key_names: Mapping[str, str],
    wall_offset: float,
) -> Gathered:
    """Read everything, without asking the compute threads for anything.

    network: what GET /network answers; empty without one. key_names: by the submitter of a job. wall_offset: Unix time minus
    monotonic time.
    """
    served = [one for one in hosted if isinstance(one, HostedModel)]
    jobs = {job.job_id: (job, model.name) for model in served for job in model.jobs.open_jobs}
    ended = {one.job_id: (one, model.name) for model in served for one in model.jobs.ended_jobs[-MAX_ENDED_JOBS:]}
    state: LiveState = {
        "scope": "all",
        "node": node_id,
        "version": __version__,
        "draining": draining,
        "nodes": _nodes(network) if network else {node_id: _this_node(served, draining)},
        "models": _models(hosted, network),
        "jobs": {job_id: _job(job, model, key_names, wall_offset) for job_id, (job, model) in jobs.items()},
        "ended": {job_id: _ended_job(one, model, key_names, wall_offset) for job_id, (one, model) in ended.items()},
    }
    if workspace is not None:
        state["workspace"] = dict(workspace)
    if network:
        facts = network["network"]
        state["network"] = {"name": facts["name"], "open": facts["open"]}
    submitters = {job_id: job.request.submitter for job_id, (job, _) in jobs.items()}
    return Gathered(state, submitters | {job_id: one.submitter for job_id, (one, _) in ended.items()})


# ---- nodes ----


def _this_node(served: Sequence[HostedModel], draining: bool) -> LiveNode:
    state: Literal["draining", "ready"] = "draining" if draining else "ready"
    return {"here": True, "version": __version__, "state": state, "serves": [one.name for one in served], "links": {}}


def _nodes(network: Mapping[str, Any]) -> dict[str, LiveNode]:
    found: dict[str, LiveNode] = {}
    for node in network["nodes"]:
        name = node["node"]
        states: tuple[Literal["draining", "loading", "starting"], ...] = ("draining", "loading", "starting")
        one: LiveNode = {
            "here": node["self"],
            "version": node["version"],
            "state": next((state for state in states if node[state]), "ready"),
            "serves": node["serves"],
            "links": {link["node"]: _link(link) for link in node["links"][:MAX_LINKS]},
        }
        if node["round_trip"] is not None:
            one["round_trip"] = node["round_trip"]
        if name in network["traffic"]:
            one["sent_bytes"] = network["traffic"][name]["sent_bytes"]
        found[name] = one
    return found


def _link(link: Mapping[str, Any]) -> LiveLink:
    known: LiveLink = {}
    if link["round_trip"]:
        known["round_trip"] = link["round_trip"]
    if link["bytes_per_second"]:
        known["bytes_per_second"] = link["bytes_per_second"]
    return known


# ---- models ----


def _models(hosted: Sequence[HostedLayers], network: Mapping[str, Any]) -> dict[str, LiveModel]:
    here = {one.name: one for one in hosted}
    found: dict[str, LiveModel] = {}
    for pipe in network.get("pipes", ()):
        name = _free_name(pipe["model"], found)
        found[name] = _pipe(pipe)
        if name in here:
            found[name] |= _own_work(here[name], pipe["route"])
    for name, one in here.items():
        if name not in found:
            route = describe_route(one.engine.origin) if isinstance(one.engine.origin, Origin) else None
            found[name] = _standalone(one) | _own_work(one, route)
    return found


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Number a name that is taken: two architectures in a network may have the same."""
    numbered = (f"{name} ({number})" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _pipe(pipe: Mapping[str, Any]) -> LiveModel:
    found: LiveModel = {
        "num_layers": pipe["num_layers"],
        "complete": pipe["complete"],
        "missing": pipe["missing"],
        "loading": pipe["loading"],
        "segments": {f"{one['node']} {one['layers'][0]}:{one['layers'][1]}": _segment(one) for one in pipe["segments"]},
    }
    if pipe["run"]:
        found["fill"] = pipe["run"]
    return found


def _segment(segment: Mapping[str, Any]) -> LiveSegment:
    known: dict[str, Any] = {name: value for name, value in segment.items() if value is not None}
    return known  # type: ignore[return-value]


def _standalone(hosted: HostedLayers) -> LiveModel:
    pipe, size = hosted.engine.pipe, hosted.engine.config.block_size
    segments: dict[str, LiveSegment] = {}
    for stage in list(hosted.engine.stages.values()):
        start, end = stage.segment.layers
        segments[f"{pipe.node} {start}:{end}"] = {
            "node": pipe.node,
            "layers": (start, end),
            "device": hosted.device,
            "dtype": hosted.dtype,
            "kv_tokens": stage.segment.kv_blocks * size,
            "kv_leased": (stage.segment.kv_blocks - stage.unleased) * size,
            "kv_used": stage.held * size,
            "seconds": round(stage.mean_pass_seconds, 6),
            "draining": False,
        }
    return {
        "num_layers": pipe.num_layers,
        "complete": pipe.is_complete(),
        "missing": list(_holes(pipe.num_layers, [one["layers"] for one in segments.values()])),
        "loading": {},
        "segments": segments,
    }


def _holes(num_layers: int, held: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    reached = 0
    for start, end in sorted(held):
        if start > reached:
            yield reached, start
        reached = max(reached, end)
    if reached < num_layers:
        yield reached, num_layers


def _own_work(hosted: HostedLayers, route: Mapping[str, Any] | None) -> LiveModel:
    stats = hosted.engine.stats
    total, used = kv_of(hosted)
    preemptions = hosted.engine.sequences.preemptions if isinstance(hosted, HostedModel) else 0
    work: dict[str, Any] = {
        "kv_tokens": total,
        "kv_used": used,
        "counters": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "preemptions": preemptions,
            "steps": stats.steps,
            "busy": round(stats.busy, 3),
            "compute": round(stats.compute, 3),
            "ended": dict(list(stats.jobs.items())),
        },
    }
    if isinstance(hosted, HostedModel):
        sequences = hosted.engine.sequences
        work |= {"context": hosted.context, "queued": len(sequences.queued), "running": len(sequences.holders)}
    if route is not None:
        work["route"] = {
            "state": route["state"],
            "hops": [{"node": hop["node"], "layers": hop["layers"]} for hop in route["hops"]],
            "in_flight": route["in_flight"],
            "window": route["window"],
            "round_trip": round(route["round_trip"], 6),
            "between_nodes": round(route["between_nodes"], 6),
            "reading": route["reading"]["tokens"],
            "recoveries": route["recoveries"],
            "last_pause": round(route["last_pause"], 3),
            "lost": route["lost"],
        }
    return work  # type: ignore[return-value]


# ---- jobs ----


def _job(job: Job, model: str, key_names: Mapping[str, str], wall_offset: float) -> LiveJob:
    sequences = list(job.sequences)
    found: LiveJob = {
        "model": model,
        "source": job.request.source.value,
        "state": state_of(job, sequences),
        "arrived": round(job.arrival + wall_offset, 3),
        "stale": job.is_stale(time.monotonic()),
        "outputs": job.sampling.n,
        "priority": job.priority,
        "prompt_tokens": len(job.prompt_ids),
        "prefilled": job.prefilled,
        "generated": sum(seq.generated for seq in sequences),
        "max_tokens": job.max_tokens,
        "preemptions": job.preemptions,
    }
    if job.last_update is not None:
        found["updated"] = round(job.last_update + wall_offset, 1)
    if job.request.submitter:
        found["key"] = key_names.get(job.request.submitter, job.request.submitter)
    return found


def _ended_job(job: EndedJob, model: str, key_names: Mapping[str, str], wall_offset: float) -> EndedLiveJob:
    found: EndedLiveJob = {
        "model": model,
        "source": job.source.value,
        "outcome": job.outcome,
        "ended": round(job.ended + wall_offset, 3),
        "seconds": round(job.seconds, 3),
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "generated": job.generated,
        "preemptions": job.preemptions,
        "priority": job.priority,
    }
    if job.queued is not None:
        found["queued"] = round(job.queued, 4)
    if job.first_token is not None:
        found["first_token"] = round(job.first_token, 4)
    if job.submitter:
        found["key"] = key_names.get(job.submitter, job.submitter)
    return found
