"""GET /metrics: the engine's counters for Prometheus, read at each request."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.domain.job import SequenceState
from penstock.engine.hosted_model import HostedLayers, HostedModel
from penstock.engine.routing.origin.stage_progress import prompt_progress
from penstock.stats import Histogram


def render_metrics(
    models: Sequence[HostedLayers],
    *,
    workspace: Mapping[str, int] | None,
    network: Mapping[str, Any],
    responses: Mapping[tuple[str, str, int], int],
    certificates: Mapping[str, datetime],
) -> tuple[bytes, str]:
    """network: what GET /network answers; empty without one. responses: by method, path and status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(models))
    registry.register(NetworkCollector(models, network))
    registry.register(ServerCollector(responses, certificates))
    if workspace is not None:
        registry.register(WorkspaceCollector(workspace))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    def __init__(self, models: Sequence[HostedLayers]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()

    def _counters(self) -> Iterator[Metric]:
        def counter(name: str, text: str, *more: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"penstock_{name}", text, labels=["model", *more])

        prompt = counter("prompt_tokens", "Prompt tokens computed")
        cached = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
        generated = counter("generated_tokens", "Tokens generated")
        preemptions = counter("preemptions", "Sequences whose KV memory was reclaimed for others")
        steps = counter("steps", "Batches run through the model")
        busy = counter("busy_seconds", "Time with work to do")
        compute = counter("compute_seconds", "Time inside the model and the sampler")
        stages = counter("stage_seconds", "Compute time of each segment of layers", "layers")
        jobs = counter("jobs", "Finished jobs, by outcome", "outcome")
        unreachable = counter("unreachable_clients", "Jobs cancelled because their client took no more updates")
        faults = counter("engine_faults", "Unexpected errors in the compute thread")
        lost = counter("lost_network_jobs", "NetworkJobs that never returned")
        recoveries = counter("recoveries", "Pauses of running answers because a route broke")
        shared = counter("shared_passes", "Passes of a segment with work of more than one origin", "layers")
        refused = counter("refused_network_jobs", "NetworkJobs of other nodes that were refused, by reason", "reason")
        for hosted in self._models:
            name, stats = hosted.name, hosted.engine.stats
            prompt.add_metric([name], stats.prompt_tokens)
            cached.add_metric([name], stats.cached_tokens)
            generated.add_metric([name], stats.generated_tokens)
            if isinstance(hosted, HostedModel):
                preemptions.add_metric([name], hosted.engine.sequences.preemptions)
            for stage in list(hosted.engine.stages.values()):
                shared.add_metric([name, str(stage.segment.layers)], stage.shared_passes)
            unreachable.add_metric([name], stats.unreachable_clients)
            faults.add_metric([name], stats.faults)
            lost.add_metric([name], stats.lost_jobs)
            recoveries.add_metric([name], stats.recoveries)
            for reason, count in list(stats.refused.items()):
                refused.add_metric([name, reason], count)
            steps.add_metric([name], stats.steps)
            busy.add_metric([name], stats.busy)
            compute.add_metric([name], stats.compute)
            for layers, seconds in list(stats.stages.items()):
                stages.add_metric([name, layers], seconds)
            for outcome, count in list(stats.jobs.items()):
                jobs.add_metric([name, outcome], count)
        yield from (prompt, cached, generated, preemptions, steps, busy, compute, stages, jobs)
        yield from (unreachable, faults, lost, recoveries, shared, refused)

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"penstock_{name}", text, labels=["model", *more])

        states = gauge("sequences", "Sequences by state", "state")
        open_jobs = gauge("open_jobs", "Jobs accepted and not finished")
        queued = gauge("queued_sequences", "Sequences that wait for memory or a free slot")
        blocks = gauge("kv_blocks", "Blocks of KV memory")
        held = gauge("kv_blocks_held", "Blocks of KV memory held by sequences")
        leased = gauge("stage_kv_blocks_leased", "Blocks of a segment leased by routes", "layers")
        reading = gauge("reading_prompt_tokens", "Tokens of the prompts that did not pass all layers yet")
        passed = gauge("stage_processed_prompt_tokens", "... of which passed each stage of the route", "layers", "node")
        pause = gauge("last_pause_seconds", "Length of the last pause because a route broke")
        for hosted in self._models:
            pause.add_metric([hosted.name], hosted.engine.stats.last_pause)
            for stage in list(hosted.engine.stages.values()):
                leased.add_metric([hosted.name, str(stage.segment.layers)], stage.segment.kv_blocks - stage.unleased)
            if not isinstance(hosted, HostedModel):
                continue
            name, sequences = hosted.name, hosted.engine.sequences
            found = [*list(sequences.queued.values()), *list(sequences.holders.values())]
            counts = Counter(seq.display_state for seq in found)
            for state in (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PAUSED, SequenceState.WAITING_PREEMPT):
                states.add_metric([name, state.name.lower()], counts[state])
            open_jobs.add_metric([name], len(hosted.jobs.open_jobs))
            queued.add_metric([name], len(sequences.queued))
            blocks.add_metric([name], sequences.pool.capacity)
            held.add_metric([name], sequences.pool.held_rows)
            route = hosted.engine.origin.route
            hops = () if route is None else route.hops
            progress = prompt_progress(sequences, len(hops))
            reading.add_metric([name], progress.tokens)
            for hop, tokens in zip(hops, progress.processed, strict=True):
                passed.add_metric([name, str(hop.layers), hop.node], tokens)
        yield from (states, open_jobs, queued, blocks, held, leased, reading, passed, pause)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, attribute in (
            ("queue_seconds", "From arrival until the first tokens were scheduled", "queue_time"),
            ("time_to_first_token_seconds", "From arrival to the first token", "first_token"),
            ("inter_token_latency_seconds", "From one token of an answer to the next", "between_tokens"),
            ("job_seconds", "From arrival to the end of the answer", "job_time"),
        ):
            family = HistogramMetricFamily(f"penstock_{name}", text, labels=["model"])
            for hosted in self._models:
                found: Histogram = getattr(hosted.engine.stats, attribute)
                family.add_metric([hosted.name], *_cumulative(found))
            yield family


class NetworkCollector(Collector):
    """Nodes and pipes; a node without a network counts itself, and its models as one pipe each."""

    def __init__(self, models: Sequence[HostedLayers], network: Mapping[str, Any]) -> None:
        self._models = models
        self._network = network

    def collect(self) -> Iterator[Metric]:
        text = "Messages that could not be opened or read, by the sender that they name"
        refused = CounterMetricFamily("penstock_refused_messages", text, labels=["sender"])
        for sender, count in self._network.get("refused_from", {}).items():
            refused.add_metric([sender], count)
        nodes = GaugeMetricFamily("penstock_nodes", "Live nodes of the network, this one included")
        nodes.add_metric([], len(self._network.get("nodes", ())) or 1)
        usable = GaugeMetricFamily("penstock_model_complete", "1 if all layers of a model are held, else 0", labels=["model"])
        pipes = GaugeMetricFamily("penstock_complete_pipes", "Pipes that hold all layers of a model", labels=["model"])
        found = self._pipes()
        for name in dict.fromkeys(name for name, _, _ in found):  # two architectures may have one name
            usable.add_metric([name], any(complete for other, complete, _ in found if other == name))
            pipes.add_metric([name], sum(count for other, _, count in found if other == name))
        yield from (refused, nodes, usable, pipes)

    def _pipes(self) -> list[tuple[str, bool, int]]:
        """The models of the network, each with whether it is complete, and how many of its pipes are."""
        if self._network:
            pipes = self._network["pipes"]
            return [(pipe["model"], pipe["complete"], sum(part["complete"] for part in pipe["pipes"])) for pipe in pipes]
        alone = [(hosted.name, hosted.engine.pipe.is_complete()) for hosted in self._models]
        return [(name, complete, int(complete)) for name, complete in alone]


class ServerCollector(Collector):
    def __init__(self, responses: Mapping[tuple[str, str, int], int], certificates: Mapping[str, datetime]) -> None:
        self._responses = responses
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        answered = CounterMetricFamily(
            "penstock_http_responses", "Answers of the API, by route and status", labels=["method", "route", "status"]
        )
        for (method, path, status), count in sorted(self._responses.items()):
            answered.add_metric([method, path, str(status)], count)
        expiry = GaugeMetricFamily(
            "penstock_certificate_expiry_timestamp_seconds", "When a certificate of this node expires", labels=["certificate"]
        )
        for name, expires in self._certificates.items():
            expiry.add_metric([name], expires.timestamp())
        build = InfoMetricFamily("penstock_build", "The versions of this server")
        build.add_metric([], {"version": __version__, "python": platform.python_version(), "torch": version("torch")})
        yield from (answered, expiry, build)


class WorkspaceCollector(Collector):
    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        now = GaugeMetricFamily("penstock_workspace_jobs", "Queued and running jobs of the workspace", labels=["state"])
        ended = CounterMetricFamily(
            "penstock_workspace_ended_jobs", "Jobs of the workspace that finished here", labels=["outcome"]
        )
        for state in ("queued", "running"):
            now.add_metric([state], self._counts[state])
        for outcome in ("done", "failed"):
            ended.add_metric([outcome], self._counts[outcome])
        yield from (now, ended)


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), list(histogram.counts), strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets, histogram.total
