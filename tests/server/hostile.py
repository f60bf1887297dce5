"""Requests that were made to cost much: deep, long, wide, of wrong types, full of special tokens.

python tests/server/hostile.py --url http://127.0.0.1:8000 --pid PID [--count 1000]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

MIB = 2**20
MOST = 4 * MIB - 200  # bytes of a body that is read
FIELD, BIAS, WRONG_BIAS = '"f%d": 1', '"%d": 1', '"%d": true'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def said(content) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def filled(begin: str, part: str, end: str, size: int) -> bytes:
    """Return ``part`` as often as it fits between ``begin`` and ``end``."""
    times = max(1, (size - len(begin) - len(end)) // len(part))
    return (begin + part * times + end).encode()


def keys(size: int, form: str) -> str:
    return ", ".join(form % number for number in range(size // (len(form) + 6)))


def bodies(size: int, special: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, path and body of requests of about ``size`` bytes."""
    hello = json.dumps(said("Hello"))[1:-1]
    text = '{"messages": [{"role": "user", "content": "'
    yield "ids", COMPLETIONS, filled('{"prompt": [', "1, ", '"a"]}', size)
    yield "ids of ids", COMPLETIONS, filled('{"prompt": [', "[1], ", '"a"]}', size)
    yield "strings", COMPLETIONS, filled('{"prompt": [', '"a", ', "1]}", size)
    yield "booleans", COMPLETIONS, filled('{"prompt": [', "true, ", "true]}", size)
    yield "objects", COMPLETIONS, filled('{"prompt": [', "{}, ", "{}]}", size)
    yield "no messages", CHAT, filled('{"messages": [', "1, ", '"a"]}', size)
    yield "empty messages", CHAT, filled('{"messages": [', "{}, ", "{}]}", size)
    message = '{"role": "user", "content": ""}'
    yield "many messages", CHAT, filled('{"messages": [', message + ", ", message + "]}", size)
    part = '{"type": "text", "text": ""}'
    begin = '{"messages": [{"role": "user", "content": ['
    yield "many parts", CHAT, filled(begin, part + ", ", part + '], "x": 1}]}', size)
    yield "wrong parts", CHAT, filled(begin, '{"type": "image"}, ', part + "]}]}", size)
    yield "unknown fields", CHAT, f"{{{hello}, {keys(size, FIELD)}}}".encode()
    yield "long field", CHAT, f'{{{hello}, "{"a" * size}": 1}}'.encode()
    yield "long model", CHAT, f'{{{hello}, "model": "{"é" * (size // 2)}"}}'.encode()
    yield "biases", CHAT, f'{{{hello}, "logit_bias": {{{keys(size, BIAS)}}}}}'.encode()
    wrong = f'{{{hello}, "logit_bias": {{{keys(min(size, 60_000), WRONG_BIAS)}}}}}'
    yield "wrong biases", CHAT, wrong.encode()
    many = {**said("Hello"), "logit_bias": {str(n): 1.0 for n in range(4000)}, "n": 8}
    yield "biases for many", CHAT, json.dumps(many).encode()
    yield "stops", CHAT, filled(f'{{{hello}, "stop": [', '"a", ', '"a"]}', size)
    tool = '{"type": "function", "function": {"name": "f"}}'
    yield "tools", CHAT, filled(f'{{{hello}, "tools": [', tool + ", ", tool + "]}", size)
    tools = f'{{{hello}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": '
    properties = keys(size, '"p%d": {"type": "string"}')
    yield "properties", CHAT, f'{tools}{{"properties": {{{properties}}}}}}}}}]}}'.encode()
    form = f'{{{hello}, "response_format": {{"type": "json_schema", "json_schema": '
    schema = f'{{"name": "x", "schema": {{"properties": {{{properties}}}}}}}'
    yield "schema", CHAT, f"{form}{schema}}}}}".encode()
    yield "enum", CHAT, filled(form + '{"name": "x", "schema": {"enum": [', "1, ", "2]}}}}", size)
    kwargs = f'{{{hello}, "chat_template_kwargs": '
    yield "variables", CHAT, f"{kwargs}{{{keys(size, FIELD)}}}}}".encode()
    for depth in (90, 600, size // 12):
        deep = '{"a": ' * depth + "1" + "}" * depth
        yield f"deep variables {depth}", CHAT, f"{kwargs}{deep}}}".encode()
        yield f"deep schema {depth}", CHAT, f'{form}{{"name": "x", "schema": {deep}}}}}}}'.encode()
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        yield f"deep arguments {depth}", CHAT, json.dumps({"messages": asked}).encode()
    yield "brackets", CHAT, b"[" * size
    yield "escapes", CHAT, filled(text, '\\"', '"}]}', size)
    yield "control characters", CHAT, filled(text, "\\u0001", '"}]}', size)
    yield "unterminated", CHAT, filled(text, "a", "", size)
    yield "special tokens", CHAT, filled(text, special, '"}], "max_tokens": 2}', size)
    yield "special and text", CHAT, filled(text, special + " a ", '"}], "max_tokens": 2}', size)
    begin = '{"max_tokens": 2, "prompt": "'
    yield "special completion", COMPLETIONS, filled(begin, special, '"}', size)
    for name, part in (("letters", "a"), ("spaces", " "), ("words", "the "), ("signs", "%}{{ ")):
        yield f"{name} in a chat", CHAT, filled(text, part, '"}], "max_tokens": 2}', size)
        yield name, COMPLETIONS, filled(begin, part, '"}', size)
    yield "emoji", COMPLETIONS, filled(begin, "\U0001f9d1\u200d", '"}', size // 4)
    yield "numbers", COMPLETIONS, filled('{"max_tokens": ', "9", "}", size)


def requests(count: int, special: str, seed: int = 0) -> list[tuple[str, str, bytes]]:
    """Return ``count`` requests of all kinds, half of them as large as possible."""
    rng = random.Random(seed)
    found: list[tuple[str, str, bytes]] = []
    sizes = (MOST, 400_000, MOST, 60_000)
    for size in sizes:
        found += bodies(size, special)
    whole = [found[i % len(found)] for i in range(count)]
    rng.shuffle(whole)
    return whole


def post(url: str, path: str, body: bytes, timeout: float = 120) -> tuple[int, float, bytes]:
    """Send a request; return status, seconds and the answer; status 0: the server hung up."""
    place = urlsplit(url)
    made = http.client.HTTPConnection(place.hostname, place.port, timeout=timeout)
    begin = time.monotonic()
    try:
        made.request("POST", path, body, {"Content-Type": "application/json"})
        answer = made.getresponse()
        return answer.status, time.monotonic() - begin, answer.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, time.monotonic() - begin, b""
    finally:
        made.close()


@dataclass
class Watch:
    """Measures what others notice: the time of ``/health``, and the pauses of a stream."""

    url: str
    health: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._threads = [threading.Thread(target=f) for f in (self._ask, self._stream)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        place = urlsplit(self.url)
        while not self._ended.is_set():
            begin = time.monotonic()
            made = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
            made.request("GET", "/health")
            assert made.getresponse().read()
            made.close()
            self.health.append(time.monotonic() - begin)
            time.sleep(0.01)

    def _stream(self) -> None:
        place = urlsplit(self.url)
        body = {"prompt": "Once upon a time", "max_tokens": 1000, "stream": True}
        body |= {"logit_bias": {"0": -100, "2": -100}, "temperature": 1.0}
        while not self._ended.is_set():
            made = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
            made.request(
                "POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"}
            )
            answer, before = made.getresponse(), None
            assert answer.status == 200, answer.read()
            while (line := answer.readline()) and not self._ended.is_set():
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if before is not None:
                        self.pauses.append(now - before)
                    before = now
            made.close()


def resident(pid: int) -> float:
    """MiB of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def attack(url: str, pid: int, count: int, at_once: int) -> dict:
    """Send requests; return what others noticed of it."""
    asked = requests(count, "<|im_end|>")
    slow: dict[str, float] = {}
    statuses: dict[int, int] = {}

    def send(request: tuple[str, str, bytes]) -> None:
        name, path, body = request
        status, seconds, _ = post(url, path, body)
        slow[name] = max(slow.get(name, 0.0), seconds)
        statuses[status] = statuses.get(status, 0) + 1

    post(url, COMPLETIONS, b'{"prompt": "x", "max_tokens": 4}')
    before = resident(pid)
    with Watch(url) as watch, ThreadPoolExecutor(at_once) as pool:
        time.sleep(0.5)
        begin = time.monotonic()
        list(pool.map(send, asked))
        seconds = time.monotonic() - begin
    time.sleep(10)
    slowest = sorted(slow.items(), key=lambda item: -item[1])[:8]
    return {
        "requests": count,
        "at_once": at_once,
        "seconds": round(seconds, 1),
        "health": round(max(watch.health), 3),
        "stream": round(max(watch.pauses), 3),
        "statuses": statuses,
        "memory": [round(before), round(resident(pid))],
        "slowest": {name: round(time_, 2) for name, time_ in slowest},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8])
    given = parser.parse_args()
    for number in given.at_once:
        print(json.dumps(attack(given.url, given.pid, given.count, number)), flush=True)
