"""Clients that leave, stall or send too much; wrong keys, a full queue, a model that fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import httpx2 as httpx
import pytest

from serving import running
from token_recycling.model.target import TreeTarget

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 1.0, "seed": 1}
SHORT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
STORY = "The cat sat on the mat, and the dog ran to the door. " * 110
MIB = 2**20
ENDED = 5.0  # seconds in which a step is over, however busy the machine


def address(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def sent(url, body, path=COMPLETIONS, receive=None):
    """A connection on which a request has been sent."""
    with socket.socket() as made:
        if receive:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        made.connect(address(url))
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        made.sendall(head.encode() + content)
        yield made


def wait_for(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 30
        time.sleep(0.002)


@pytest.fixture
def right(server):
    """Check after a test that the server answers as before."""
    before = server.post(COMPLETIONS, **SHORT).json()["choices"]
    yield
    server.idle()
    assert server.post(COMPLETIONS, **SHORT).json()["choices"] == before


@pytest.fixture
def slower(monkeypatch):
    """Steps take some milliseconds more: otherwise an answer may end before its client leaves."""
    forward = TreeTarget._forward

    def slow(self, *args, **options):
        time.sleep(0.005)
        return forward(self, *args, **options)

    monkeypatch.setattr(TreeTarget, "_forward", slow)


@pytest.mark.usefixtures("right")
class TestDisconnects:
    @pytest.mark.usefixtures("slower")
    @pytest.mark.parametrize("stream", [False, True])
    def test_while_it_is_decoded(self, server, stream):
        aborted = server.metric("request_success_total", finished_reason="abort")
        generated = server.metric("generation_tokens_total")
        with sent(server.url, {**LONG, "stream": stream}):
            wait_for(lambda: server.metric("generation_tokens_total") > generated + 20)
        server.idle(ENDED)
        assert server.metric("request_success_total", finished_reason="abort") == aborted + 1
        assert server.metric("generation_tokens_total") < generated + 1400

    def test_of_one_of_several_choices(self, server):
        generated = server.metric("generation_tokens_total")
        with sent(server.url, {**LONG, "n": 3}):
            wait_for(lambda: server.rows == 3)
        server.idle(ENDED)
        assert server.metric("generation_tokens_total") < generated + 4000

    def test_while_the_prompt_is_read(self, recycler):
        """The rest of the prompt is not read."""
        read, forward = [], TreeTarget._forward

        def slow(self, tokens, *args, **options):
            read.append(tokens.shape[1])
            time.sleep(0.3)
            return forward(self, tokens, *args, **options)

        with running(recycler, prefix=0) as served, pytest.MonkeyPatch.context() as patch:
            patch.setattr(TreeTarget, "_forward", slow)
            patch.setattr("token_recycling.defaults.PREFILL_CHUNK", 512)
            with sent(served.url, {**SHORT, "prompt": STORY}):
                wait_for(lambda: read)
            served.idle(ENDED)
            assert sum(read) < 1200
            assert served.metric("generation_tokens_total") in (0, None)

    @pytest.mark.usefixtures("slower")
    def test_in_the_queue(self, recycler):
        with running(recycler, rows=1) as served:
            with sent(served.url, LONG):
                wait_for(lambda: served.rows == 1)
                with sent(served.url, SHORT):
                    wait_for(lambda: served.metric("num_requests_waiting") == 1)
                wait_for(lambda: served.metric("num_requests_waiting") == 0)
                assert served.rows == 1
            served.idle(ENDED)

    def test_in_the_middle_of_the_body(self, server):
        with socket.create_connection(address(server.url)) as made:
            made.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                "Content-Length: 500\r\n\r\n{".encode()
            )
            time.sleep(0.1)

    def test_at_once_and_many_times(self, server):
        for number in range(60):
            with sent(server.url, {**LONG, "stream": bool(number % 2), "seed": number}):
                time.sleep(0.003 * (number % 7))
        server.idle(ENDED)


class TestSlowClients:
    def test_one_that_does_not_read_stops_nobody(self, server):
        other = httpx.post(server.url + COMPLETIONS, json=SHORT).json()["choices"][0]["text"]
        body = {**LONG, "stream": True, "logprobs": 5}
        with sent(server.url, body, receive=2048) as slow:
            slow.recv(100)
            for _ in range(5):
                assert server.post(COMPLETIONS, **SHORT).json()["choices"][0]["text"] == other
            server.idle(60)  # what it has not read waits in memory, not in the batch
            data = b""
            slow.settimeout(30)
            while b"data: [DONE]" not in data:
                data += slow.recv(65536)
        text = b"".join(data.splitlines()).decode(errors="replace")
        assert text.count('"finish_reason": null') > 20

    def test_one_that_does_not_finish_its_body_stops_nobody(self, server):
        with socket.create_connection(address(server.url)) as made:
            made.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            assert server.post(COMPLETIONS, **SHORT).status_code == 200


def test_a_grammar_that_takes_seconds_stops_nobody(server):
    schema = {"type": "integer", "multipleOf": 99991}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(server.post(CHAT, **body, n=4, response_format=form))
    )
    thread.start()
    times = []
    while thread.is_alive():
        begin = time.monotonic()
        assert server.post(COMPLETIONS, **SHORT).status_code == 200
        times.append(time.monotonic() - begin)
    assert answers[0].status_code == 200
    assert len(times) > 1


class TestLargeBodies:
    def content(self, size):
        return json.dumps({"prompt": "a" * size}).encode()

    def test_with_their_length(self, server):
        answer = httpx.post(server.url + COMPLETIONS, content=self.content(10 * MIB))
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"

    def test_in_chunks(self, server):
        pieces = (b"a" * 65536 for _ in range(160))
        headers = {"Content-Type": "application/json"}
        with suppress(httpx.WriteError):  # the server may close before everything is sent
            answer = httpx.post(server.url + COMPLETIONS, content=pieces, headers=headers)
            assert answer.status_code == 413

    def test_below_the_limit_the_prompt_is_too_long(self, server):
        headers = {"Content-Type": "application/json"}
        begin = time.monotonic()
        answer = httpx.post(
            server.url + COMPLETIONS, content=self.content(3 * MIB), headers=headers
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - begin < 1  # it is not tokenised


class TestKeys:
    @pytest.fixture(scope="class")
    def locked(self, recycler):
        with running(recycler, keys=["first", "second"]) as served:
            yield served

    @pytest.mark.parametrize(
        "header",
        [
            None,
            "Bearer wrong",
            "Bearer",
            "Bearer first second",
            "Basic first",
            "first",
            "Bearer FIRST",
        ],
    )
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
    def test_wrong_ones(self, locked, header, path):
        headers = {} if header is None else {"Authorization": header}
        if path == "/v1/models":
            answer = locked.get(path, headers=headers)
        else:
            answer = locked.post(path, headers=headers, **SHORT)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key"
        wrong = header is not None and header.startswith("Bearer ")
        says = "this server requires an API key: send Authorization: Bearer KEY"
        assert error["message"] == ("wrong API key" if wrong else says)

    def test_the_body_is_not_read(self, locked):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
        with socket.create_connection(address(locked.url)) as made:
            made.settimeout(10)
            made.sendall(head)
            assert made.recv(100).startswith(b"HTTP/1.1 401")

    def test_bytes_that_are_no_text(self, locked):
        with socket.create_connection(address(locked.url)) as made:
            made.sendall(
                b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n"
            )
            assert made.recv(100).startswith(b"HTTP/1.1 401")

    @pytest.mark.parametrize("key", ["first", "second"])
    def test_right_ones(self, locked, key):
        headers = {"Authorization": f"bearer {key}"}
        assert locked.post(COMPLETIONS, headers=headers, **SHORT).status_code == 200

    @pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/about"])
    def test_pages_without_one(self, locked, path):
        assert locked.get(path).status_code == 200


class TestOrigins:
    HEADERS = {"Origin": "http://page.example"}
    ASKED = {**HEADERS, "Access-Control-Request-Method": "POST"}

    def test_other_pages_are_not_allowed(self, server):
        answer = httpx.options(server.url + CHAT, headers=self.ASKED)
        assert answer.status_code == 405
        answer = server.post(COMPLETIONS, headers=self.HEADERS, **SHORT)
        assert "Access-Control-Allow-Origin" not in answer.headers

    def test_those_that_are_named_are(self, recycler):
        with running(recycler, origins=["http://page.example"]) as served:
            for answer in (
                httpx.options(served.url + CHAT, headers=self.ASKED),
                served.post(COMPLETIONS, headers=self.HEADERS, **SHORT),
            ):
                assert answer.status_code == 200
                assert answer.headers["Access-Control-Allow-Origin"] == "http://page.example"


class TestFullQueue:
    def test_one_more_gets_429(self, recycler):
        with running(recycler, rows=1, waiting=1) as served:
            with sent(served.url, LONG):
                wait_for(lambda: served.rows == 1)
                with sent(served.url, LONG):
                    wait_for(lambda: served.metric("num_requests_waiting") == 1)
                    for stream in (False, True):
                        answer = served.post(COMPLETIONS, **SHORT, stream=stream)
                        assert answer.status_code == 429
                        assert int(answer.headers["Retry-After"]) >= 1
                        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            served.idle(ENDED)
            assert served.post(COMPLETIONS, **SHORT).status_code == 200

    def test_choices_that_do_not_fit_are_refused_together(self, recycler):
        with running(recycler, rows=2, waiting=1) as served:
            with sent(served.url, LONG):
                wait_for(lambda: served.rows == 1)
                assert served.post(COMPLETIONS, **SHORT, n=3).status_code == 429
                assert served.metric("num_requests_waiting") == 0
            served.idle()
            never = served.post(COMPLETIONS, **SHORT, n=4)
            assert never.status_code == 400
            assert "more than this server takes at once (3)" in never.json()["error"]["message"]
            assert len(served.post(COMPLETIONS, **SHORT, n=3).json()["choices"]) == 3


class TestTwoCallers:
    """One sends more than the server takes; the other must not wait for that, or be refused."""

    HEADERS = tuple({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

    def flood(self, served, headers, count):
        """Send requests from threads; return the list that gets their statuses."""
        found = []

        def ask():
            found.append(served.post(COMPLETIONS, headers=headers, **LONG).status_code)

        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        return found, threads

    def test_the_other_gets_its_places(self, recycler):
        with running(recycler, keys=["one", "two"], rows=1, waiting=8) as served:
            statuses, threads = self.flood(served, self.HEADERS[0], 12)
            wait_for(
                lambda: served.metric("num_requests_waiting") == 8 and statuses.count(429) == 3
            )
            others, more = self.flood(served, self.HEADERS[1], 4)
            wait_for(lambda: statuses.count(429) == 7)  # four gave their places up
            assert 429 not in others
            # Both have four places now, so a fifth is refused as for anybody.
            refused = served.post(COMPLETIONS, headers=self.HEADERS[1], **SHORT)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            served.engine.end_answers_in(0.0)
            served.engine.stop()
            for thread in (*threads, *more):
                thread.join()

    def test_many_connections_of_one_caller_get_no_more(self, recycler):
        """The control: they are one caller, and the queue is full for all of them."""
        with running(recycler, keys=["one"], rows=1, waiting=2) as served:
            statuses, threads = self.flood(served, self.HEADERS[0], 3)
            # The three arrive one by one: two may wait for a moment before one of them is taken.
            wait_for(lambda: served.metric("num_requests_waiting") == 2 and served.rows == 1)
            assert served.post(COMPLETIONS, headers=self.HEADERS[0], **SHORT).status_code == 429
            assert 429 not in statuses
            served.engine.end_answers_in(0.0)
            served.engine.stop()
            for thread in threads:
                thread.join()


class TestModelThatFails:
    """The requests of a failed step get 500; later ones are answered."""

    @pytest.fixture
    def broken(self, recycler):
        """A server, and a function that lets the next forward with few tokens fail."""
        forward, fail = TreeTarget._forward, threading.Event()

        def failing(self, tokens, *args, **options):
            if fail.is_set():
                fail.clear()
                raise RuntimeError("CUDA out of memory\nand more lines")
            return forward(self, tokens, *args, **options)

        with running(recycler) as served, pytest.MonkeyPatch.context() as patch:
            patch.setattr(TreeTarget, "_forward", failing)
            yield served, fail

    def check(self, answer):
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error"
        assert error["message"] == "RuntimeError: CUDA out of memory and more lines"

    def test_while_a_prompt_is_read(self, broken):
        served, fail = broken
        before = served.post(COMPLETIONS, **SHORT).json()["choices"]
        fail.set()
        self.check(served.post(COMPLETIONS, **{**SHORT, "prompt": "Another text"}))
        assert served.post(COMPLETIONS, **SHORT).json()["choices"] == before

    def test_while_others_are_decoded(self, broken):
        served, fail = broken
        before = served.post(COMPLETIONS, **SHORT).json()["choices"]
        answers = []
        body = {**LONG, "max_tokens": 1900}
        threads = [
            threading.Thread(target=lambda: answers.append(served.post(COMPLETIONS, **body)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.rows == 3)
        fail.set()
        for thread in threads:
            thread.join()
        for answer in answers:
            self.check(answer)
        assert served.metric("request_success_total", finished_reason="error") == 3
        served.idle()
        assert served.post(COMPLETIONS, **SHORT).json()["choices"] == before

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_an_engine_that_stops_fails_its_requests(self, recycler):
        def broken():
            if served.metric("num_requests_running"):
                raise OSError("unexpected")

        with running(recycler) as served:
            served.engine._on_tick = broken
            assert served.post(COMPLETIONS, **LONG).status_code == 500
            wait_for(lambda: not served.engine.alive)
            assert served.get("/health").status_code == 503
            assert served.post(COMPLETIONS, **SHORT).status_code == 503

    def test_in_the_middle_of_a_stream(self, broken):
        served, fail = broken
        frames = []
        body = {**LONG, "stream": True}
        with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    frames.append(line)
                if len(frames) == 1:
                    fail.set()
        assert "RuntimeError" in json.loads(frames[-1].removeprefix("data: "))["error"]["message"]
        assert served.post(COMPLETIONS, **SHORT).status_code == 200
