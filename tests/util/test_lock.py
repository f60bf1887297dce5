"""The lock of a recycler's calls."""

import os
import threading

import pytest

from token_recycling.util.lock import FairLock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not():
    lock, owned, end = FairLock(), threading.Event(), threading.Event()

    def owner():
        with lock.acquired(wait=True):
            owned.set()
            end.wait()

    thread = threading.Thread(target=owner, daemon=True)
    thread.start()
    owned.wait()
    child = os.fork()
    if not child:
        with lock.acquired(wait=False) as mine:
            os._exit(0 if mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    with lock.acquired(wait=False) as mine:  # the parent's is still owned
        assert not mine
    end.set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_was_forked_inside_the_block_leaves_it():
    lock, child = FairLock(), -1
    try:
        with lock.acquired(wait=True) as acquired:
            assert acquired
            child = os.fork()
        if child == 0:
            with lock.acquired(wait=False) as again:
                os._exit(0 if again else 4)
    finally:
        if child == 0:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
