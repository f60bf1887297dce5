"""The recipe of docs/transformers.md for ``transformers serve``, asked by OpenAI's client."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from token_recycling.checkpoint.load import BUNDLED_MODEL

pytestmark = pytest.mark.clients
DOCS = Path(__file__).parents[2] / "docs" / "transformers.md"
PROMPTS = ["Once upon a time there was a king", "Tom has 12 marbles. He", "The fox"]
# Written to the end of the server's log: what the recyclers of the process have done.
WITH_STATISTICS = """
import atexit, runpy, sys
from token_recycling.integrations import transformers
made, start = [], transformers.Enabled.__init__
def init(self, recycler):
    start(self, recycler)
    made.append(recycler)
transformers.Enabled.__init__ = init
atexit.register(lambda: print("MAT", [recycler.stats.mat for recycler in made]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextmanager
def served(folder, program):
    """A client of ``transformers serve``, run by a Python program; and its log, a file."""
    openai = pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, log = folder / "serve.py", folder / "log"
    script.write_text(program)
    arguments = ["serve", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-c", WITH_STATISTICS, str(script), *arguments],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            for _ in range(240):
                assert server.poll() is None, log.read_text()
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield client, log
        finally:
            server.send_signal(signal.SIGINT)  # uvicorn passes SIGTERM on, which ends at once
            server.wait(timeout=60)


def texts(client):
    """Answers of both endpoints, whole and streamed."""
    model = str(BUNDLED_MODEL)
    found = []
    for prompt in PROMPTS:
        options = {"model": model, "max_tokens": 40, "temperature": 0}
        found.append(client.completions.create(prompt=prompt, **options).choices[0].text)
        messages = [{"role": "user", "content": prompt}]
        answer = client.chat.completions.create(messages=messages, **options)
        found.append(answer.choices[0].message.content)
        parts = client.chat.completions.create(messages=messages, stream=True, **options)
        found.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
    return found


def test_the_recipe_recycles_and_the_text_is_the_same(tmp_path):
    [recipe] = [
        block
        for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
        if "ModelManager" in block
    ]
    answers = {}
    for name, program in {
        "plain": "from transformers.cli.transformers import main\nmain()\n",
        "ours": recipe,
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        with served(folder, program) as (client, log):
            answers[name] = texts(client)
        said = re.findall(r"^MAT \[(.*)\]$", log.read_text(), re.MULTILINE)
        assert len(said) == 1, log.read_text()
        assert bool(said[0]) is (name == "ours")
    assert answers["plain"] == answers["ours"]
    assert len(set(answers["ours"])) > 4
    assert float(said[0]) > 1.2
