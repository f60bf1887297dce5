"""Connections: senders that are slow or silent, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest

from serving import running
from token_recycling.server import connection, middleware

LIMIT = 0.6
SHORT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 1.0, "seed": 1}


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(connection, "HEADER_SECONDS", LIMIT)
    monkeypatch.setattr(middleware, "MOST_SECONDS", LIMIT)


def request(body, target="/v1/completions", close=True):
    content = json.dumps(body).encode()
    head = (
        f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n" + "Connection: close\r\n" * close + "\r\n"
    )
    return head.encode() + content


class Opened:
    """A connection to the server."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def rest(self):
        """All that comes until the server closes; and the seconds until then."""
        begin, data = time.monotonic(), b""
        while part := self.socket.recv(65536):
            data += part
        return data.decode(), time.monotonic() - begin


def opened(server):
    return Opened(server.url)


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_a_connection_without_a_request_is_closed(server, limits, start):
    with opened(server) as made:
        made.send(start)
        data, seconds = made.rest()
    assert data == ""
    assert LIMIT / 2 < seconds < LIMIT + 2


def test_more_bytes_do_not_move_the_limit(server, limits):
    with opened(server) as made:
        begin = time.monotonic()
        made.send(b"GET /health HTTP/1.1\r\n")
        with suppress(OSError):  # the server has closed
            while time.monotonic() - begin < LIMIT + 3:
                made.send(b"A: 1\r\n")
                time.sleep(0.1)
    assert time.monotonic() - begin < LIMIT + 2


def test_the_headers_of_a_later_request_have_a_limit_too(server, limits):
    with opened(server) as made:
        made.send(request(SHORT, close=False))
        data = made.socket.recv(65536).decode()
        assert data.startswith("HTTP/1.1 200")
        made.send(b"GET /health HTTP/1.1\r\n")
        data, seconds = made.rest()
    assert "HTTP/1.1" not in data
    assert seconds < LIMIT + 2


def test_a_body_that_does_not_arrive(server, limits):
    with opened(server) as made:
        made.send(request(SHORT)[:-5])
        data, seconds = made.rest()
    assert data.startswith("HTTP/1.1 408")
    assert "the request's body did not arrive within 0.6 s" in data
    assert seconds < LIMIT + 2


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_not_cut(server, limits, stream, monkeypatch):
    """The control: the limits are for what clients send."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.05)
    monkeypatch.setattr(middleware, "MOST_SECONDS", 0.05)
    with opened(server) as made:
        made.send(request({**LONG, "stream": stream}))
        data, seconds = made.rest()
    assert seconds > 0.2
    assert data.count('"finish_reason": "') + data.count('"finish_reason":"') == 1


def test_half_a_request_is_no_request(server):
    """The control: without a whole request there is nothing to wait for."""
    with opened(server) as made:
        made.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        made.socket.shutdown(socket.SHUT_WR)
        data, seconds = made.rest()
    assert "200" not in data
    assert seconds < 5


@pytest.mark.parametrize("more", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_sent_more_and_leaves_is_noticed(server, more):
    body = {**LONG, "max_tokens": 1900, "logit_bias": {"1": -100}, "n": 4}
    with opened(server) as made:
        made.send(request(body, close=False))
        end = time.monotonic() + 20
        while server.rows < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        made.send(more)
        time.sleep(0.05)
        before = server.metric("request_success_total", finished_reason="abort")
        made.socket.shutdown(socket.SHUT_WR)
        server.idle(5)
    assert server.metric("request_success_total", finished_reason="abort") > before


def test_a_client_that_sends_too_much_ahead_is_cut(server):
    with opened(server) as made:
        made.send(request(LONG, close=False))
        with suppress(OSError):
            for _ in range(40):
                made.send(b"GET /health HTTP/1.1\r\nA: " + b"x" * 8000)
                time.sleep(0.01)
            made.rest()
    server.idle(5)


def test_a_body_that_nobody_needs_has_a_limit_too(recycler, limits):
    """The answer, a refusal, was sent before the body came."""
    with running(recycler, keys=["secret"]) as served, Opened(served.url) as made:
        begin = time.monotonic()
        made.send(request({**SHORT, "prompt": "x" * 5000}, close=False)[:-4000])
        with suppress(OSError):
            while time.monotonic() - begin < LIMIT + 4:
                made.send(b"x")
                time.sleep(0.1)
    assert time.monotonic() - begin < LIMIT + 3


def test_half_a_body_and_no_more_to_come(server):
    with opened(server) as made:
        made.send(request(SHORT, close=False)[:-5])
        made.socket.shutdown(socket.SHUT_WR)
        data, seconds = made.rest()
    assert "200" not in data
    assert seconds < 5
