"""What others notice of requests that were made to cost much, and of clients that lie."""

from __future__ import annotations

import json
import logging
import socket
import time
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from hostile import CHAT, COMPLETIONS, MOST, Watch, attack, bodies, post, said
from starlette.requests import HTTPConnection
from test_server_process import started

from serving import running
from token_recycling.server import faults
from token_recycling.server.middleware import Authentication

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASKED = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def connected(url):
    place = urlsplit(url)
    made = socket.create_connection((place.hostname, place.port))
    made.settimeout(20)
    return made


def rest(made):
    """Everything until the server closes the connection."""
    found = b""
    while part := made.recv(65536):
        found += part
    return found


def test_the_largest_requests_stop_nobody(server):
    """The margin is that of a test beside others; `slow` has the figures."""
    kinds = {"ids", "ids of ids", "many parts", "unknown fields", "wrong biases", "properties"}
    with Watch(server.url) as watch:
        time.sleep(0.3)
        for name, path, body in bodies(MOST, "<|im_end|>"):
            if name in kinds:
                status, _, answer = post(server.url, path, body)
                assert status == 400, name
                assert len(answer) < 2000, name
    assert max(watch.health) < 2
    assert max(watch.pauses) < 3


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_thousand_hostile_requests(tmp_path, at_once):
    with started(tmp_path, "--quiet") as served:
        attack(served.url, served.process.pid, 300, at_once)  # everything is compiled
        found = attack(served.url, served.process.pid, 1000, at_once)
        log = served.text().partition("try  ")[2]
    print(json.dumps(found))
    assert set(found["statuses"]) <= {200, 400, 404, 429}
    assert found["health"] < 0.5
    assert found["stream"] < 1.5
    before, after = found["memory"]
    assert after < before + 150
    # The command to try, and nothing of the requests; other programs may have slowed the steps.
    assert [line for line in log.splitlines() if "docs/slow.md" not in line][1:] == []


@pytest.mark.parametrize("place", ["chat_template_kwargs", "arguments"])
@pytest.mark.parametrize("depth", [99, 101, 600, 5000])
def test_json_that_is_nested_deeply(server, place, depth):
    deep = '{"a": ' * depth + "1" + "}" * depth
    if place == "arguments":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        body = json.dumps({"messages": asked, "max_tokens": 1})
    else:
        body = json.dumps(said("x"))[:-1] + f', "chat_template_kwargs": {deep}}}'
        depth += 1
    status, _, answer = post(server.url, CHAT, body.encode())
    assert status == (200 if depth <= 100 else 400), answer
    if status == 400:
        assert "the JSON is nested deeper than 100 levels" in json.loads(answer)["error"]["message"]


class TestProxies:
    FORWARDED = {"X-Forwarded-For": "10.1.2.3\x1b[31m" + "a" * 100}

    def caller(self, served, monkeypatch):
        """Who a request is from."""
        found, submit = [], type(served.engine).submit

        def noting(engine, jobs):
            found.extend(job.caller for job in jobs)
            return submit(engine, jobs)

        monkeypatch.setattr(type(served.engine), "submit", noting)
        with connected(served.url) as made:
            lines = f"X-Forwarded-For: {self.FORWARDED['X-Forwarded-For']}\r\n"
            lines += f"Connection: close\r\nContent-Length: {len(ASKED)}\r\n\r\n"
            made.sendall(HEAD.encode() + lines.encode() + ASKED)
            answer = rest(made)
        return found, answer

    def test_nobody_is_believed(self, server, monkeypatch):
        found, _ = self.caller(server, monkeypatch)
        assert found in ([], ["127.0.0.1"])

    def test_clients_do_not_choose_their_address(self, server, monkeypatch):
        monkeypatch.setattr(self, "FORWARDED", {"X-Forwarded-For": "10.1.2.3"})
        assert self.caller(server, monkeypatch)[0] == ["127.0.0.1"]

    def test_a_proxy_that_is_named_does(self, recycler, monkeypatch):
        with running(recycler, proxies=["127.0.0.0/8"]) as served:
            monkeypatch.setattr(self, "FORWARDED", {"X-Forwarded-For": "10.1.2.3"})
            assert self.caller(served, monkeypatch)[0] == ["10.1.2.3"]
            monkeypatch.setattr(self, "FORWARDED", {"X-Forwarded-For": "\u009b" + "a" * 100})
            [name] = self.caller(served, monkeypatch)[0]
            assert name.isprintable()
            assert len(name) < 80


def test_two_lengths_end_the_connection(server):
    both = f"Content-Length: {len(ASKED)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = f"{len(ASKED):x}\r\n".encode() + ASKED + b"\r\n0\r\n\r\n"
    with connected(server.url) as made:
        made.sendall(HEAD.encode() + both.encode() + chunked)
        answer = rest(made)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()
    with connected(server.url) as made:  # the control: with one length it stays
        made.sendall(HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
        answer = b""
        while not answer.endswith(b"}"):
            answer += made.recv(65536)
        assert b"connection: close" not in answer.lower()
        made.settimeout(0.3)
        with pytest.raises(TimeoutError):
            made.recv(1)


@pytest.mark.parametrize(("piece", "status"), [(1, b"400"), (100, b"200")])
def test_bodies_in_small_pieces(server, piece, status):
    body = ASKED + b" " * 150_000
    chunks = (body[at : at + piece] for at in range(0, len(body), piece))
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    with connected(server.url) as made:
        try:
            made.sendall(HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + data)
        except ConnectionError:
            assert piece == 1
        assert made.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_a_slash_at_the_end_does_not_redirect(server):
    for path in ("/v1/models/", "/health/", f"{CHAT}/"):
        answer = httpx.get(server.url + path, headers={"Host": "evil.example"})
        assert answer.status_code == 404
        assert "location" not in answer.headers


def test_a_fault_has_one_traceback(server, monkeypatch, caplog):
    def broken(self, request):
        raise RuntimeError("one line\x1b[31m\nand another")

    monkeypatch.setattr("token_recycling.server.prompts.Prompts.of_chat", broken)
    monkeypatch.setattr(faults, "_seen", set())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            answer = server.post(CHAT, **said("x"))
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "internal error"
    first, *others = (record.getMessage() for record in caplog.records if record.levelno >= 30)
    assert first.count("Traceback") == 1
    line = f"POST {CHAT}: RuntimeError: one line\\x1b[31m and another"
    assert others == [line, line]
    assert first.splitlines()[0] == line


def test_biases_are_those_of_generate(server, recycler):
    prompt = recycler.tokenizer("Once upon a time").input_ids
    plain = recycler.generate(prompt, max_new_tokens=40).token_ids
    biases = {token: (-100.0 if at % 2 else -1.5) for at, token in enumerate(dict.fromkeys(plain))}
    for penalty in (None, 1.3):
        given = {} if penalty is None else {"repetition_penalty": penalty}
        own = recycler.generate(
            prompt,
            max_new_tokens=40,
            sequence_bias={(token,): bias for token, bias in biases.items()},
            **given,
        )
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, **given}
        body["logit_bias"] = {str(token): bias for token, bias in biases.items()}
        assert server.post(COMPLETIONS, **body).json()["choices"][0]["text"] == own.text
        assert own.token_ids != plain


def test_keys_that_end_alike_have_names_of_their_own():
    keys = ["a" * 20 + "1234", "b" * 20 + "1234", "short"]
    told = Authentication(None, keys)
    names = []
    for key in keys:
        scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}
        names.append(told._caller(HTTPConnection(scope))[1])
    assert names == ["key 1 …1234", "key 2 …1234", "key 3"]
