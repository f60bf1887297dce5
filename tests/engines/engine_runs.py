"""Run an engine in a process of its own, once per configuration, and compare what came."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = Path(__file__).parents[2] / "src" / "token_recycling" / "demo_model"
# In two halves, for tensor parallelism; the bundled model has three heads.
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
LIMIT = 900  # seconds of a run


def widened(folder: Path) -> Path:
    """The bundled model with four heads over two KV heads: the same text."""
    from widen import widen

    if (folder / "model").exists():
        return folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    widen("bundled", str(folder / "shape.json"), folder / "model", dtype="float32")
    return folder / "model"


def serve(driver: str, folder: Path, environment: dict | None = None, **options) -> dict:
    """Return what a driver wrote, with ``log`` and ``code``; the same options run once."""
    options = {"model": str(MODEL), "engine": {}} | options
    given = json.dumps([driver, options, environment], sort_keys=True)
    name = hashlib.sha256(given.encode()).hexdigest()[:12]
    asked, out, log = (folder / f"{name}.{kind}" for kind in ("options", "json", "log"))
    if not log.exists():
        asked.write_text(json.dumps(options))
        with log.open("w") as stream:
            run = subprocess.run(
                [sys.executable, str(FOLDER / driver), str(asked), str(out)],
                cwd=FOLDER,
                env=os.environ | (environment or {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            )
            stream.write(f"\nexit code {run.returncode}\n")
    found = json.loads(out.read_text()) if out.exists() else {}
    return found | {"log": log.read_text()}


def served(*arguments, **options) -> dict:
    """Like ``serve``, and it must have gone well."""
    found = serve(*arguments, **options)
    assert "exit code 0" in found["log"], found["log"][-3000:]
    return found


def same(plain: dict, ours: dict) -> int:
    """How many requests have the same text; of aborted ones as far as both go."""
    pairs = zip(plain["texts"], ours["texts"], strict=True)
    return sum(
        a[: min(len(a), len(b))] == b[: min(len(a), len(b))] and min(len(a), len(b)) > 0
        for a, b in pairs
    )


def mat(found: dict) -> float:
    """Tokens of a step after the first of each request, which must have come one by one."""
    requests = len(found["texts"])
    tokens = sum(map(len, found["texts"])) - requests
    return tokens / (found["steps"] - requests)


def library_mat(requests: list[dict], nodes: int) -> float:
    """The library's own, request by request."""
    from token_recycling import TokenRecycling

    recycler = TokenRecycling.from_pretrained(str(MODEL), nodes=nodes, graph=False)
    accepted = steps = 0
    for request in requests:
        stats = recycler.generate(request["prompt"], max_new_tokens=request["tokens"]).stats
        accepted, steps = accepted + stats.accepted, steps + stats.steps
    return 1 + accepted / steps
