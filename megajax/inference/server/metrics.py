"""Metrics for Prometheus. Where one means the same as one of vLLM, it has its name, after `megajax:`.

https://docs.vllm.ai/en/latest/design/metrics.html
"""

import functools
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megajax.inference.engine import Stats
from megajax.inference.server.engine_loop import compilations
from megajax.inference.server.engine_thread import Generation, Part

# Upper bounds of the buckets of the histograms, in seconds.
REQUEST_SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class Metrics:
    """An observer of an EngineThread."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]):
        """stats: returns the newest ones; called when the metrics are read."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats, compilations()))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", REQUEST_SECONDS
        ).labels(model_name)
        self._token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample.", TOKEN_SECONDS
        ).labels(model_name)
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its last token.", REQUEST_SECONDS
        ).labels(model_name)
        self._finished = functools.partial(
            Counter(
                "megajax:request_success", "Samples by why they ended; abort: the client left, or the time was over.",
                ["model_name", "finished_reason"], registry=self.registry,
            ).labels,
            model_name,
        )  # fmt: skip

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"megajax:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

    def produced(self, generation: Generation, part: Part, now: float) -> None:
        count = len(part.output.tokens)
        before = generation.last_seen.get((part.prompt, part.output.index))
        if before is None:
            self._first_token.observe(now - generation.arrival)
        else:
            for _ in range(count):
                self._token.observe((now - before) / count)
        if part.output.finish_reason is not None:
            self._whole.observe(now - generation.arrival)
            self._finished(part.output.finish_reason).inc()

    def left(self, num_unfinished: int) -> None:
        self._finished("abort").inc(num_unfinished)


class _EngineCollector(Collector):
    """What the engine counts itself."""

    def __init__(self, model_name: str, stats: Callable[[], Stats], num_compilations: Callable[[], int]):
        self._model_name = model_name
        self._stats = stats
        self._num_compilations = num_compilations

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        gauges = {
            "num_requests_running": ("Requests that are being generated.", stats.num_running),
            "num_requests_waiting": ("Requests that wait for pages or a place.", stats.num_waiting),
            "kv_cache_usage_perc": ("Used fraction of the pages; 1 is all.", stats.pages_used / stats.num_pages),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "prefix_cache_queries": ("Tokens of prompts that were looked up.", stats.prefix_queries),
            "prefix_cache_hits": ("Tokens of prompts that were found.", stats.prefix_hits),
            "num_preemptions": ("Requests that lost their pages to others.", stats.preemptions),
            "spec_decode_num_draft_tokens": ("Tokens that were drafted.", stats.drafted),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.", stats.accepted),
            "compiled_programs": (
                "Programs that XLA has compiled; constant after warm-up.",
                stats.compiled_programs + self._num_compilations(),
            ),
        }
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                family = kind(f"megajax:{name}", text, labels=["model_name"])
                family.add_metric([self._model_name], value)
                yield family
