"""The command `token-recycling serve` as a process: its start, its end and what it saves."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx2 as httpx
import pytest

from command import ENVIRONMENT, call
from token_recycling import AdjacencyMatrix

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")
PROGRAM = [sys.executable, "-c", "from token_recycling.cli import main; main()", "serve"]
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
KILLS = 10


class Started:
    """A server; ``url`` is None until it is ready."""

    def __init__(self, folder, *arguments, program=PROGRAM):
        self.log = folder / "log"
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [*program, "--port", "0", "--threads", "1", *map(str, arguments)],
                env=ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=stream,
            )
        self.url = None

    def wait(self):
        begin = time.monotonic()
        while not (found := re.search(r"^API +(http://\S+)/v1$", self.text(), re.M)):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() - begin < 120
            time.sleep(0.05)
        self.url = found[1]
        with httpx.Client(base_url=self.url) as client:
            while True:
                try:
                    client.get("/health").raise_for_status()
                    return self
                except httpx.TransportError:
                    time.sleep(0.05)

    def text(self):
        return self.log.read_text()


@contextmanager
def started(folder, *arguments, **options):
    made = Started(folder, *arguments, **options)
    try:
        yield made.wait()
    finally:
        made.process.kill()
        made.process.wait()


def test_from_start_to_end(tmp_path):
    """The printed curl works; a second server finds the port in use; SIGTERM ends no stream.

    The log has a line for every answer.
    """
    matrix = tmp_path / "learned.safetensors"
    with started(tmp_path, "--matrix", matrix, "--save-minutes", 0.01) as served:
        text = served.text()
        assert re.search(
            r"^model +token-recycling-demo \(.* float32, cpu, context 2048\)$", text, re.M
        )
        line = f"matrix     {matrix} not there yet; will be saved every 0.01 minutes and on exit\n"
        assert line in text
        assert re.search(
            r"^recycling +on \(drafter adaptive, draft size chosen automatically\)", text, re.M
        )
        line = re.search(r"^try +(curl .*)$", text, re.M)[1]
        found = subprocess.run(["sh", "-c", f"{line} -sS"], capture_output=True, timeout=120)
        assert json.loads(found.stdout)["choices"][0]["message"]["content"], found.stderr
        in_words = shlex.split(line)
        assert in_words[-2] == "-d"

        port = served.url.rpartition(":")[2]
        code, out, err = call("serve", "--port", port)
        assert (code, out) == (2, "")
        assert err == (
            f"error: port {port} is in use; stop the other program or choose another with --port\n"
        )

        body = {**BODY, "max_tokens": 900, "temperature": 1.0, "seed": 3}
        whole = httpx.post(served.url + COMPLETIONS, json=body, timeout=60).json()["choices"][0]
        end = time.monotonic() + 10
        while not matrix.exists():  # it is saved every 0.6 seconds, and a fast machine takes less
            assert time.monotonic() < end
            time.sleep(0.05)
        matrix.unlink()
        with httpx.stream(
            "POST", served.url + COMPLETIONS, json={**body, "stream": True}, timeout=60
        ) as answer:
            frames = answer.iter_lines()
            received = [next(frames)]
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(httpx.TransportError):  # it takes no more connections
                httpx.post(served.url + COMPLETIONS, json=BODY, timeout=60)
            received += frames
        assert received[-2] == "data: [DONE]"
        parts = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"]
        assert served.process.wait(timeout=30) == 0
        assert "Traceback" not in served.text()
        assert "finishing answers in progress, for up to 30 s" in served.text()
        form = (
            r"^\d\d:\d\d:\d\d 127\.0\.0\.1: (\d+) \+ (\d+) tokens, MAT \d+\.\d\d, \d+\.\d s, (\w+)$"
        )
        answers = re.findall(form, served.text(), re.M)
        assert len(answers) == 3
        assert answers[1] == answers[2]
    AdjacencyMatrix.load(matrix)


@pytest.mark.server
def test_all_addresses_a_key_and_no_time_to_drain(tmp_path):
    options = ("--host", "0.0.0.0", "--api-key", "secret", "--drain-seconds", 0)
    with started(tmp_path, *options) as served:
        assert served.url.startswith("http://localhost:")
        assert "-H 'Authorization: Bearer YOUR_KEY'" in served.text()
        assert "secret" not in served.text()
        body = {**BODY, "max_tokens": 2000, "temperature": 1.0, "stream": True}
        headers = {"Authorization": "Bearer secret"}
        url = served.url.replace("localhost", "127.0.0.1")
        with (
            httpx.Client(base_url=url, timeout=60, headers=headers) as client,
            client.stream("POST", COMPLETIONS, json=body) as answer,
        ):
            frames = answer.iter_lines()
            next(frames)
            served.process.send_signal(signal.SIGTERM)
            received = [line for line in frames if line]
            assert json.loads(received[-1][6:])["error"]["message"] == "the server is shutting down"
            assert served.process.wait(timeout=10) == 0
        assert "Traceback" not in served.text()


@pytest.mark.server
def test_a_client_that_does_not_read_is_not_waited_for(tmp_path):
    with started(tmp_path, "--drain-seconds", 1) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = {**BODY, "max_tokens": 1500, "stream": True, "logprobs": 5}
        content = json.dumps({**body, "logit_bias": {"2": -100}})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((host, int(port)))
            client.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n\r\n{content}".encode()
            )
            assert client.recv(100)
            time.sleep(1)
            served.process.terminate()
            begin = time.monotonic()
            assert served.process.wait(30) == 0
            assert time.monotonic() - begin < 5
        assert "ERROR" not in served.text()
        assert "Cancel" not in served.text()


@pytest.fixture
def hangups():
    """Let servers take SIGHUP: what ``nohup`` starts, tests too, ignores it, and so would they."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_a_closed_terminal_is_no_loss(tmp_path):
    """SIGHUP ends no stream, and the matrix is saved; the exit code tells if that fails."""
    folder = tmp_path / "learned"
    folder.mkdir()
    for writable in (True, False):
        with started(tmp_path, "--matrix", folder / "matrix.safetensors") as served:
            body = {**BODY, "max_tokens": 300, "stream": True}
            with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=60) as answer:
                frames = answer.iter_lines()
                received = [next(frames)]
                if not writable:
                    shutil.rmtree(folder)
                served.process.send_signal(signal.SIGHUP)
                received += frames
            assert received[-2] == "data: [DONE]"
            assert served.process.wait(timeout=30) == (0 if writable else 1)
            text = served.text()
        assert ("the matrix was not saved" in text) is not writable
        assert (folder / "matrix.safetensors").exists() is writable
        assert "Traceback" not in text


@pytest.mark.server
def test_a_second_interrupt_ends_at_once(tmp_path):
    with started(tmp_path) as served:
        body = {**BODY, "max_tokens": 2000, "temperature": 1.0, "stream": True}
        with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=60) as answer:
            next(answer.iter_lines())
            for _ in range(2):
                served.process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            assert served.process.wait(timeout=10) == 0
        assert "Traceback" not in served.text()


# Saves after every step, so that a kill hits a save.
SAVING = """
from token_recycling.cli import main
from token_recycling.integrations.engines.keep import MatrixKeeper
MatrixKeeper.tick = MatrixKeeper.save
main()
"""


@pytest.mark.server
def test_killed_during_a_save_the_file_stays_whole(tmp_path):
    matrix = tmp_path / "learned.safetensors"
    program = [sys.executable, "-c", SAVING, "serve"]
    chance, hit = random.Random(KILLS), 0
    for _ in range(KILLS):
        with started(tmp_path, "--matrix", matrix, program=program) as served:
            body = {**BODY, "max_tokens": 1500, "stream": True}
            with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=60) as answer:
                frames = answer.iter_lines()
                next(frames)
                time.sleep(chance.uniform(0.05, 0.2))
                served.process.send_signal(signal.SIGKILL)
            served.process.wait()
        AdjacencyMatrix.load(matrix)
        left = [file for file in tmp_path.iterdir() if file not in (matrix, served.log)]
        hit += bool(left)  # a new file that was not complete
        for file in left:
            file.unlink()
    print(f"{hit} of {KILLS} kills hit a save")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--matrix", "/proc/x.safetensors"], "cannot write to the folder of the matrix file"),
        (["--matrix", "/no/such/folder/x.safetensors"], "folder"),
        (["--matrix", "/tmp"], "--matrix is the folder /tmp; give a file"),
        (["--allowed-origin", "example.org"], "https://example.org"),
        (["--allowed-origin", "https://example.org/"], "--allowed-origin is https://example.org/"),
        (["--allowed-origin", "http://[::1"], "--allowed-origin is http://[::1"),
        (["--allowed-origin", "https://*.example"], "--allowed-origin is https://*.example"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--host", "a..b"], "--host is a..b; there is no such address"),
        (["--host", "a" * 64], "there is no such address"),
        (["--matrix-scope", "everyone"], "choose one of shared, key, request"),
        (["--matrix-scope", "key"], "--matrix-scope key needs --api-key"),
        (["--matrix-scope", "request", "--matrix", "/no/such"], "no matrix file at /no/such"),
        (["--port", 70000], "--port is 70000; choose 0 to 65535"),
        (["--batch", 0], "--batch is 0; choose 1 to 256"),
        (["--queue", -1], "--queue is -1"),
        (["--prefix-cache", -1], "--prefix-cache is -1"),
        (["--save-minutes", 0], "--save-minutes is 0"),
        (["--drain-seconds", -1], "--drain-seconds is -1"),
        (["--trusted-proxy", "proxy.example"], "--trusted-proxy is proxy.example; give an IP"),
        (["--host", "no.such.host.invalid"], "there is no such address"),
        (["--host", "192.0.2.1", "--port", 0], "cannot use 192.0.2.1:0"),
        (["--api-key", "é"], "--api-key is empty or not printable ASCII"),
        (["--api-key", ""], "--api-key is empty or not printable ASCII"),
        (["/no/such/model"], "no such file or folder"),
    ],
)
def test_wrong_options_are_one_line(arguments, says):
    code, out, err = call("serve", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("keys", ["", " "])
def test_an_empty_secret_is_no_open_server(monkeypatch, keys):
    monkeypatch.setenv("TOKEN_RECYCLING_API_KEY", keys)
    code, _, err = call("serve")
    assert code == 2
    assert err == (
        "error: TOKEN_RECYCLING_API_KEY is empty; set a key, or unset it to require none\n"
    )


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("token_recycling.cli.serve.find_spec", lambda name: None)
    code, _, err = call("serve")
    assert code == 2
    assert "pip install 'token-recycling[serve]'" in err
