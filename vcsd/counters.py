"""Server metrics for Prometheus: wall-clock time, and the simulated time of drives."""

from __future__ import annotations

from csd_spec.optional import MissingExtraError, is_installed
from host_driver.kv_table import KvTable

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ServerCounts:
    """What a server counts for its own reports.

    Attributes:
        tokens: Tokens of all requests.
        longest_wait: Longest wait of a request for a token, iterations.
    """

    def __init__(self) -> None:
        self.longest_wait = self.tokens = 0

    def ended(self, how: str, served: int | None = None) -> None:
        """Count a finished or rejected request. `served`: requests that are left, if it was one of them."""

    def token(self, waited_s: float, first: bool) -> None:
        """Count a token, `waited_s` after the previous one or, for the first, after the request's arrival."""
        self.tokens += 1

    def iteration(self, tokens: int, served: int, longest_wait: int) -> None:
        """Count an iteration. `longest_wait`: iterations since the last token, of the request that waits longest."""
        self.longest_wait = max(self.longest_wait, longest_wait)

    def text(self) -> str:
        """Metrics in Prometheus text format; raises MissingExtraError."""
        raise MissingExtraError("/metrics", "prometheus_client", "metrics")


class ServerMetrics(ServerCounts):
    """Metrics of one server, in its own registry."""

    def __init__(self, kv: KvTable) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

        super().__init__()
        self.registry = registry = CollectorRegistry()
        self._kv, self._latest = kv, generate_latest
        self._ended = Counter("vcsd_requests", "Finished requests, by reason", ["how"], registry=registry)
        self._tokens = Counter("vcsd_tokens", "Tokens generated", registry=registry)
        self._iterations = Counter("vcsd_iterations", "Iterations", registry=registry)
        self._served = Gauge("vcsd_requests_served", "Requests queued or running", registry=registry)
        self._batch = Gauge("vcsd_batch", "Requests that got a token in the last iteration", registry=registry)
        self._idle = Gauge("vcsd_longest_wait_iterations", "Longest wait of a request for a token", registry=registry)
        self._bytes = Gauge("vcsd_moved_bytes", "KV data moved, by route", ["path"], registry=registry)
        self._held = Gauge("vcsd_held_bytes", "KV data stored, by tier", ["place"], registry=registry)
        self._peak = Gauge("vcsd_peak_bytes", "Peak of KV data stored, by tier", ["place"], registry=registry)
        self._ttft = Histogram("vcsd_ttft_seconds", "Time to first token (TTFT)", buckets=SECONDS, registry=registry)
        self._tbt = Histogram("vcsd_tbt_seconds", "Time between tokens (TBT)", buckets=SECONDS, registry=registry)
        self._simulated = Gauge(
            "vcsd_simulated_seconds", "Simulated time of the drives, by work", ["work"], registry=registry
        )
        self._steps = Gauge("vcsd_drive_steps", "Decode steps in drives", registry=registry)
        self._link = Gauge("vcsd_link_bytes", "Bytes between host and drives", registry=registry)

    def ended(self, how: str, served: int | None = None) -> None:
        self._ended.labels(how).inc()
        if served is not None:
            self._served.set(served)

    def token(self, waited_s: float, first: bool) -> None:
        super().token(waited_s, first)
        self._tokens.inc()
        (self._ttft if first else self._tbt).observe(waited_s)

    def iteration(self, tokens: int, served: int, longest_wait: int) -> None:
        super().iteration(tokens, served, longest_wait)
        self._iterations.inc()
        self._batch.set(tokens)
        self._served.set(served)
        self._idle.set(self.longest_wait)

    def text(self) -> str:
        table = self._kv.runner.table
        for name, moved in dict(self._kv.real.moved).items():  # iterations add routes meanwhile
            self._bytes.labels(name).set(moved)
        for name in table.tiers:
            self._held.labels(name).set(table.used[name])
            self._peak.labels(name).set(table.peak[name])
        if self._kv.drives:
            traffic = self._kv.drives.driver.traffic
            self._simulated.labels("decode").set(traffic.total.ns / 1e9)
            self._simulated.labels("prefill").set(traffic.prefill_ns / 1e9)
            self._steps.set(traffic.step_count)
            self._link.set(traffic.link_bytes)
        return self._latest(self.registry).decode()


def counters_of(kv: KvTable) -> ServerCounts:
    """Metrics where Prometheus's client is installed, otherwise the counts alone, which reports of a server need."""
    return ServerMetrics(kv) if is_installed("prometheus_client") else ServerCounts()
