"""Drafts of somebody else's drafter: one line that names it and the fault, or the right text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wrong_drafts

from few import first_of
from token_recycling.drafting.base import DrafterState
from token_recycling.drafting.checked import CheckedDrafter

SCRIPT = Path(__file__).with_name("wrong_drafts.py")


def results_of(*kinds, code=None):
    """What a process of its own says of these kinds, and how it ended."""
    command = [sys.executable, str(SCRIPT), *kinds]
    if code is not None:
        load = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import wrong_drafts"
        command = [sys.executable, "-c", f"{load}; {code}; wrong_drafts.main({list(kinds)!r})"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    return dict(map(json.loads, ended.stdout.splitlines())), ended


@pytest.mark.slow
def test_every_kind():
    results, ended = results_of()
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert list(results) == list(wrong_drafts.DRAFTERS)
    for kind, places in results.items():
        assert len(places) == 5
        for place, outcome in places.items():
            right = kind in wrong_drafts.RIGHT
            assert outcome == "right" if right else outcome.startswith("error: "), (kind, place)


@pytest.mark.parametrize("kind", first_of(["root not valid", "ancestors all True", "no size"]))
def test_without_the_check_they_are_worse(kind):
    """The control: other text, a step for ever (which now ends in one line), a raw error."""
    trusts = (
        "import token_recycling.session as runs; runs.checked = lambda drafter, vocabulary: drafter"
    )
    results, _ = results_of(kind, code=trusts)
    outcomes = results[kind].values()
    expected = {
        "ancestors all True": "OTHER TEXT",
        "root not valid": "error: a step with a draft of wrong has emitted no token",
        "no size": "RAISED TypeError",
    }
    assert any(outcome.startswith(expected[kind]) for outcome in outcomes)


def test_the_drafter_cannot_change_the_roots():
    roots = torch.tensor([3])
    checked = CheckedDrafter(wrong_drafts.Wrong("the roots are written to"), 96)
    with pytest.raises(ValueError, match="root"):
        checked.propose(DrafterState(), roots)
    assert roots.tolist() == [3]
