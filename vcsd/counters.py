"""What a server has done so far, as Prometheus reads it. Seconds are those of this machine, never modelled ones."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from host_driver.rows import RowKv

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Counters:
    """Counters of one server, in a registry of their own."""

    def __init__(self, kv: RowKv) -> None:
        self.registry = registry = CollectorRegistry()
        self._kv = kv
        self._ended = Counter("vcsd_requests", "Requests, by how they ended", ["how"], registry=registry)
        self._tokens = Counter("vcsd_tokens", "Tokens made", registry=registry)
        self._iterations = Counter("vcsd_iterations", "Iterations", registry=registry)
        self._served = Gauge("vcsd_requests_served", "Requests that wait or decode", registry=registry)
        self._batch = Gauge("vcsd_batch", "Requests that made a token in the last iteration", registry=registry)
        self._idle = Gauge("vcsd_longest_wait_iterations", "Longest wait of a request for a token", registry=registry)
        self._bytes = Gauge("vcsd_moved_bytes", "K and V moved, by path", ["path"], registry=registry)
        self._held = Gauge("vcsd_held_bytes", "K and V held, by place", ["place"], registry=registry)
        self._peak = Gauge("vcsd_peak_bytes", "K and V held at most, by place", ["place"], registry=registry)
        self._ttft = Histogram("vcsd_ttft_seconds", "Until the first token", buckets=SECONDS, registry=registry)
        self._tbt = Histogram("vcsd_tbt_seconds", "Between two tokens", buckets=SECONDS, registry=registry)
        self.longest_wait = 0

    def ended(self, how: str) -> None:
        """A request has ended, or was rejected."""
        self._ended.labels(how).inc()

    def token(self, waited_s: float, first: bool) -> None:
        """A token was made, so long after the one before, or after its request came."""
        self._tokens.inc()
        (self._ttft if first else self._tbt).observe(waited_s)

    def iteration(self, made: int, served: int, longest_wait: int) -> None:
        """An iteration is over. longest_wait: of those that are served, in iterations."""
        self._iterations.inc()
        self._batch.set(made)
        self._served.set(served)
        self.longest_wait = max(self.longest_wait, longest_wait)
        self._idle.set(self.longest_wait)

    def text(self) -> str:
        """In the format that Prometheus scrapes."""
        table = self._kv.runner.table
        for name, moved in self._kv.real.moved.items():
            self._bytes.labels(name).set(moved)
        for name in table.tiers:
            self._held.labels(name).set(table.used[name])
            self._peak.labels(name).set(table.peak[name])
        return generate_latest(self.registry).decode()
