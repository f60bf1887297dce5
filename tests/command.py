"""Running the command line, and the files that it reads."""

import json
import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from tempfile import mkdtemp

import pytest

from token_recycling.cli import main

# For processes of their own, which keep measured costs that no other test is to find.
ENVIRONMENT = {**os.environ, "TOKEN_RECYCLING_CACHE": mkdtemp()}


def call(*arguments):
    """Run the command line; return exit code, stdout and stderr."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    return caught.value.code, out.getvalue(), err.getvalue()


def write_suite(path, questions):
    rows = [{"id": q.id, "kind": q.kind, "turns": q.turns} for q in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
