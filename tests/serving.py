"""A server in this process, for tests."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2 as httpx

from token_recycling.server.app import Server, create_app
from token_recycling.server.engine import Engine
from token_recycling.server.metrics import Metrics
from token_recycling.server.prefixes import PrefixCaches
from token_recycling.server.run import http_server
from token_recycling.server.scopes import MatrixScopes

NAME = "demo"


@dataclass
class Running:
    """A server that answers at ``url``."""

    url: str
    engine: Engine

    def post(self, path="/v1/chat/completions", *, headers=None, **body):
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=60, **options)

    def metric(self, name, **labels):
        """The value of a metric of Prometheus."""
        labels = {"model_name": NAME, **labels}
        registry = self.engine.metrics.registry
        return registry.get_sample_value(f"token_recycling:{name}", labels)

    @property
    def rows(self):
        """The number of rows that are decoded."""
        return len(self.engine._batch.rows)

    def idle(self, seconds=10.0):
        """Wait until nothing is decoded or waiting; return the seconds that it took."""
        begin = time.monotonic()
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() - begin < seconds, "still busy"
            time.sleep(0.005)
        return time.monotonic() - begin


@contextmanager
def running(
    recycler, *, keys=(), scope="shared", rows=8, waiting=64, prefix=2**26, origins=(), proxies=()
):
    """Serve ``recycler`` until the end of the block."""
    metrics = Metrics(NAME)
    engine = Engine(
        recycler,
        metrics,
        MatrixScopes(recycler.drafter, scope),
        PrefixCaches(prefix),
        most_rows=rows,
        most_waiting=waiting,
    )
    about = {"recycling": "on", "context": 2048}
    app = create_app(Server(engine, NAME, list(keys), about), origins)
    sock = socket.create_server(("127.0.0.1", 0))
    server = http_server(app, drain_seconds=5, trusted_proxies=proxies)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    decoding = threading.Thread(target=engine.run, daemon=True)
    decoding.start()
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(url, engine)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        engine.stop()
    assert not thread.is_alive()
    assert not engine.alive
