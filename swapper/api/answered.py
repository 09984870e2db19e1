"""Model calls that were answered, counted in plain numbers and told to Prometheus at a scrape.

Invariant: counting one takes no lock and makes nothing: it stands on the way of every call. All of it is counted in the
event loop's thread, where scrapes are answered too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class _Waits:
    """Of one model: calls by bucket, the last one beyond all bounds, and the seconds they waited in all."""

    counts: list[int]
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Answered(Collector):
    """`bounds`: upper bounds of the waits' buckets, seconds, rising."""

    bounds: Sequence[float]
    _calls: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    _waits: dict[str, _Waits] = field(default_factory=dict[str, _Waits])

    def count(self, tenant: str, code: int, waited_ms: int) -> None:
        """One more."""
        key = (tenant, code)
        self._calls[key] = self._calls.get(key, 0) + 1
        waits = self._waits.get(tenant)
        if waits is None:
            waits = self._waits[tenant] = _Waits([0] * (len(self.bounds) + 1))
        seconds = waited_ms / 1000
        waits.counts[bisect_left(self.bounds, seconds)] += 1
        waits.seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        words = "Model calls that were answered, by HTTP status; 499: the client left before."
        requests = CounterMetricFamily("swapper_requests", words, labels=["model", "code"])
        for (tenant, code), count in self._calls.items():
            requests.add_metric([tenant, str(code)], count)
        words = "How long a model call waited before it was sent to its server."
        waited = HistogramMetricFamily("swapper_request_wait_seconds", words, labels=["model"])
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for tenant, waits in self._waits.items():
            buckets = [*zip(names, map(float, accumulate(waits.counts)), strict=True)]
            waited.add_metric([tenant], buckets=buckets, sum_value=waits.seconds)
        yield from (requests, waited)
