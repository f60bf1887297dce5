"""The team of threads that runs launches: right whoever is held up, and nothing ever hangs."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import numba
import pytest
import torch
from torch.nn import functional

from skinny_kernels import launch, team, team_kernel
from skinny_kernels.cores import usable_cores
from skinny_kernels.linear import product
from skinny_kernels.machine_code import Kernel

pytestmark = pytest.mark.skipif(
    not team.is_available() or usable_cores() < 2, reason="there is no team of threads here"
)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


TESTS = os.path.dirname(__file__)


@numba.njit(error_model="numpy")
def hold_up(fields, piece, following, seat, form):
    """Add 1 to the word of a piece; the first thread that begins piece 0 is held up before.

    fields: begun, microseconds, clock, then a word for each piece. ``form`` 1: nothing is claimed.
    """
    address = team_kernel.address_of(fields)
    if piece == 0 and team_kernel.fetch_add(address, 1) == 0:
        begin = team_kernel.nanoseconds(team_kernel.load(address + 16))
        wait = 1000 * team_kernel.load(address + 8)
        while team_kernel.nanoseconds(team_kernel.load(address + 16)) - begin < wait:
            team_kernel.pause()
    if form == 1:
        team_kernel.claim(seat)
    elif not team_kernel.claim(seat):
        return
    team_kernel.fetch_add(address + 8 * (3 + piece), 1)


def run_held_up(form, microseconds, pieces=40, launches=3):
    kernel = Kernel(hold_up, form, in_pieces=True)
    fields = [(ctypes.c_int64 * (3 + pieces))() for _ in range(launches)]
    for words in fields:
        words[1], words[2] = microseconds, team.atomics.function("clock_gettime")
    team.run(launch.tape([(kernel, words, pieces) for words in fields]), 2)
    return [list(words)[3:] for words in fields]


def test_a_piece_that_is_held_up_is_computed_by_another_thread():
    """All pieces of three launches are written once, whoever is late."""
    for _ in range(5):
        assert run_held_up(0, 30_000) == [[1] * 40] * 3


def test_the_control_writes_a_piece_twice():
    """Without heed to the claim, the one that was held up writes too."""
    found = [run_held_up(1, 30_000) for _ in range(5)]
    assert any(2 in words for tries in found for words in tries)


def test_jobs_of_several_threads_at_once():
    found = []

    def work():
        torch.manual_seed(0)
        w, x = torch.randn(300, 200), torch.randn(5, 200)
        expected = product(x, w)
        assert torch.allclose(expected, functional.linear(x, w), atol=1e-4)
        found.extend(torch.equal(product(x, w), expected) for _ in range(300))

    threads = [threading.Thread(target=work) for _ in range(12)]  # more than there are jobs
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 12 * 300
    assert all(found)


def test_threads_that_end():
    """A thousand threads, each of which launches and ends; the helpers stay few."""
    w, x = torch.randn(64, 64), torch.randn(3, 64)
    expected = product(x, w)
    found = []
    for _ in range(1000):
        thread = threading.Thread(target=lambda: found.append(torch.equal(product(x, w), expected)))
        thread.start()
        thread.join(30)
    assert found == [True] * 1000
    assert team._team.helpers <= usable_cores() - 1


def test_pieces_of_nothing():
    kernel = Kernel(hold_up, 0, in_pieces=True)
    launch.launch(kernel, (ctypes.c_int64 * 3)(), 0, 2)


SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
from skinny_kernels.linear import product
torch.manual_seed(0)
torch.set_num_threads(2)
w, x = torch.randn(600, 500), torch.randn(4, 500)
expected = product(x, w)
{body}
"""


def in_another_process(body, seconds=100):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=TESTS, body=body)],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


FORK = """
stop = False
def work():
    while not stop:
        product(x, w)
other = threading.Thread(target=work)
other.start()
for n in range(100):
    child = os.fork()
    if not child:
        for _ in range(5):
            assert torch.equal(product(x, w), expected)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
other.join()
print("forked")
"""


def test_a_process_that_is_forked_in_the_middle_of_a_job():
    assert in_another_process(FORK) == ["forked"]


IDLE = """
def used():
    times = os.times()
    return times.user + times.system
for _ in range(200):
    product(x, w)
time.sleep(0.2)
begin = used()
time.sleep(1)
print(used() - begin)
"""


def test_threads_that_have_nothing_to_do_sleep():
    (seconds,) = in_another_process(IDLE)
    assert float(seconds) < 0.05


INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
def interrupt():
    for _ in range(300):
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)
other, caught = threading.Thread(target=interrupt), 0
other.start()
while other.is_alive():
    try:
        while other.is_alive():
            assert torch.equal(product(x, w), expected)
    except KeyboardInterrupt:
        caught += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert torch.equal(product(x, w), expected)
print("caught" if caught > 100 else caught)
"""


def test_interrupts():
    assert in_another_process(INTERRUPT) == ["caught"]


def test_helpers_leave_signals_to_python():
    """A signal that a helper took would not interrupt what waits."""
    product(torch.randn(4, 64), torch.randn(640, 64))
    masks = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status") as file:
            masks += [int(line.split()[1], 16) for line in file if line.startswith("SigBlk")]
    bit = 1 << signal.SIGINT - 1
    assert sum(bool(mask & bit) for mask in masks) >= team._team.helpers > 0
