"""A keyboard interrupt at the end of any context manager leaves no mode of PyTorch on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, enable

TESTS = Path(__file__).parents[1]


def interrupted(number, call):
    """Interrupt a call where the ``number``-th context manager ends; return whether it was."""
    left = [number]

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_name == "__exit__" and code.co_filename.endswith("contextlib.py"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def modes_after_interrupts():
    """The modes after each of the interrupts of three kinds of calls."""
    model, (prompt,) = make("llama"), random_prompts([9])
    ids, expected = torch.tensor([prompt]), plain(model, prompt, 6)
    recycler, after = TokenRecycling(model, nodes=4), []
    with enable(model):
        calls = (
            lambda: recycler.generate(prompt, max_new_tokens=6),
            lambda: list(recycler.stream(prompt, max_new_tokens=6)),
            lambda: model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0),
        )
        for call in calls:
            call()
            number = 1
            while interrupted(number, call):
                after.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
                number += 1
    assert number > 5
    if all(modes == (False, True) for modes in after):
        assert recycler.generate(prompt, max_new_tokens=6).token_ids == expected
    return after


@pytest.mark.parametrize("broken", [False, True])
def test_modes_after_interrupts(broken):
    """In a process of its own, whose modes the control leaves wrong."""
    code = f"""if True:
        import sys
        sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
        import test_interrupts as tests
        if {broken}:
            from skinny_kernels.modes import RestoredModes
            RestoredModes.__exit__ = lambda *about: None
        after = tests.modes_after_interrupts()
        sys.exit(0 if set(after) == {{(False, True)}} else 3)
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == (3 if broken else 0), ended.stderr.decode()[-2000:]
