"""A vLLM server's page of metrics, made with prometheus_client as vLLM makes it, and an HTTP server that serves it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, generate_latest


class FakeVllm:
    """One server life: counters from zero, the names and labels of vLLM's v1/spec_decode/metrics.py."""

    def __init__(self, positions: int = 3, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self.engines = engines
        self.positions = positions
        labels = ["model_name", "engine"]
        self.plain = {
            name: Counter(f"vllm:spec_decode_{name}", name, labels, registry=self.registry)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        }
        self.by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "per position", [*labels, "position"], registry=self.registry
        )
        self.ended = Counter("vllm:request_success", "ended", [*labels, "finished_reason"], registry=self.registry)
        for engine in range(engines):
            self.work([0] * positions, 0, engine=engine)

    def work(self, by_position: list[int], drafts: int, k: int | None = None, engine: int = 0) -> None:
        """Count `drafts` drafts of k tokens, by_position[i] of them accepted at position i, and a request per 25 of them."""
        for at, reason in enumerate(("stop", "length", "abort")):
            self.ended.labels("m", str(engine), reason).inc(drafts // 25 if at == 0 else 0)
        counts = (drafts, drafts * (k or self.positions), sum(by_position))
        for counter, count in zip(self.plain.values(), counts, strict=True):
            counter.labels("m", str(engine)).inc(count)
        for at in range(self.positions):
            self.by_position.labels("m", str(engine), str(at)).inc(by_position[at] if at < len(by_position) else 0)

    def page(self) -> str:
        return generate_latest(self.registry).decode()


class Site:
    """What is served just now: a page, a status code, or nothing."""

    def __init__(self) -> None:
        self.server: FakeVllm | None = FakeVllm()
        self.status = 200
        self.body: str | None = None
        self.url = ""

    def text(self) -> str:
        return self.body if self.body is not None else self.server.page() if self.server else ""


@contextmanager
def serving() -> Iterator[Site]:
    """Serve a Site on a free loopback port."""
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = site.text().encode() if self.path == "/metrics" else b"no such page"
            self.send_response(site.status if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
