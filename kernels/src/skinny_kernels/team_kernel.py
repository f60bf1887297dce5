"""Runs launches one after another in a team of threads that never waits for one that is held up.

Programs that keep the processor busy take it away from a thread for milliseconds, a hundred times
as long as a piece of a launch takes. So no thread has a part of its own. All of them, the one that
asks for the launches included, do the same: take a piece of the launch that is due, compute it into
memory of their own, claim it, and copy it to where it belongs. Who finishes the last piece of a
launch makes the next one due. A piece that was taken but not claimed after a while is computed by
another thread: it takes the claim away, so that the one that was held up drops what it has. A
thread holds the others up only where it is between a claim and the end of a copy.

A job is a list of launches, its tape, which a thread posts. Helpers wait for jobs: for some
microseconds in a loop, then asleep in the kernel. A job ends when its last launch is finished and
no helper is left in it, as one that is late still reads memory of the job.

All words are int64, and those that threads write are in cache lines of their own.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir

from skinny_kernels.atomics import (
    FUTEX,
    FUTEX_WAIT,
    FUTEX_WAKE,
    GETTID,
    SET_AFFINITY,
    current_core,
    exchange,
    fetch_add,
    fetch_and,
    fetch_or,
    load,
    nanoseconds,
    pause,
    publish,
    replaced,
    system_call,
)
from skinny_kernels.intrinsics import Word, address_of, buffer_of, emits
from skinny_kernels.vectors import I8, I64, LINE, VOID, Emitter

MOST_HELPERS, JOBS = 63, 8  # of a process; jobs that helpers see at a time

# Bytes from the beginning of a team's memory.
POSTED = 0  # jobs posted so far
SLEEPERS = LINE  # helpers that sleep until another job is posted
HELPERS = 2 * LINE  # helpers that were started
CLOCK_GETTIME, SYSCALL, SCHED_GETCPU = range(3 * LINE, 3 * LINE + 24, 8)  # addresses of functions
CORES = 4 * LINE  # a bit for each core that helpers may run on
CORES_BYTES = 2 * LINE
CORES_FLOATS = CORES_BYTES // 4
THREADS = 6 * LINE  # the system's numbers of the helpers
FIRST_JOB = 14 * LINE

# Bytes from the beginning of a job. ``GATE``: helpers inside, flags, and wanted helpers << 32.
GATE = 0
TAPE, CORE = 8, 16  # and the core of the thread that posted the job
DUE = LINE  # index of the launch that is due
DOZING = 2 * LINE  # threads of the job that sleep until the next launch is due
SEATS = 3 * LINE  # one for the thread that posted the job, then one for each helper
JOB_BYTES = SEATS + LINE * (1 + MOST_HELPERS)
JOB_FLOATS = JOB_BYTES // 4
TEAM_BYTES = FIRST_JOB + JOBS * JOB_BYTES
INSIDE, OPEN, OWNED, AWAITED, WANTED = 0xFFFF, 1 << 16, 1 << 17, 1 << 18, 1 << 32

# Bytes from the beginning of a seat: the piece that is computed, the one to be computed next, both
# 0 if there is none or another thread has taken it, and the first one again.
CURRENT, NEXT, EXPECTED = 0, 8, 16
PRESENT = 24  # whether the helper is in the job
# A piece is its number + (1 + index of the launch) << 32.
LAUNCH, CLAIMED = 1 << 32, 1 << 31

# Bytes from the beginning of a tape: the number of launches, then for each of them the addresses of
# kernel and fields, the number of pieces, those taken and finished, and words that are 0 at first.
LAUNCHES, FIRST_LAUNCH, LAUNCH_BYTES = 0, 8, 56
KERNEL, FIELDS, PIECES, TAKEN, FINISHED, COUNTERS, COUNTER_COUNT = range(0, 56, 8)

# Nanoseconds for which threads look in a loop before they sleep: in a job, and between two jobs.
DOZE, IDLE = 30_000, 400_000
# A piece is taken from a thread after this time plus ``PATIENCE`` times that of a piece.
HELD_UP, PATIENCE = 10_000, 1.5
LOOKS = 16  # times that a thread looks between two looks at the clock


@emits
def _call(
    emitter: Emitter, kernel: Word, fields: Word, piece: Word, following: Word, seat: Word
) -> None:
    """Call a kernel (see ``machine_code.Kernel``)."""
    b, kind = emitter.b, ir.FunctionType(VOID, [I8.as_pointer(), I64, I64, I64])
    data = b.inttoptr(fields, I8.as_pointer())
    b.call(b.inttoptr(kernel, kind.as_pointer()), [data, piece, following, seat])


@numba.njit(error_model="numpy")
def _now(team: Any) -> Any:
    """Return the time in nanoseconds."""
    return nanoseconds(load(team + CLOCK_GETTIME))


@numba.njit(error_model="numpy")
def _pause(team: Any, begin: Any) -> tuple[Any, Any]:
    """Let a moment pass; return when the wait began, now if ``begin`` is 0, and its nanoseconds."""
    for _ in range(LOOKS):
        pause()
    now = _now(team)
    if not begin:
        begin = now
    return begin, now - begin


@numba.njit(error_model="numpy")
def _sleep(team: Any, word: Any, value: Any) -> None:
    """Sleep while the low half of a word is that of ``value``, until this thread is woken."""
    system_call(load(team + SYSCALL), FUTEX, word, FUTEX_WAIT, value & 0xFFFFFFFF)


@numba.njit(error_model="numpy")
def _wake(team: Any, word: Any, count: Any) -> None:
    """Wake at most so many threads that sleep because of a word."""
    system_call(load(team + SYSCALL), FUTEX, word, FUTEX_WAKE, count)


@numba.njit(error_model="numpy")
def _avoid(team: Any, core: Any) -> None:
    """Go to another core, if this thread is on this one.

    The kernel may put a thread that is woken on the core of the one that wakes it, where both get
    half of it, while a program elsewhere has a core of its own.
    """
    if core < 0 or core >= 8 * CORES_BYTES or current_core(load(team + SCHED_GETCPU)) != core:
        return
    cores = buffer_of(CORES_FLOATS)
    for word in range(0, CORES_BYTES, 8):
        publish(cores + word, load(team + CORES + word))
    word = cores + core // 64 * 8
    publish(word, load(word) & ~(1 << core % 64))
    _allow(team, 0, cores)
    _allow(team, 0, team + CORES)


@numba.njit(error_model="numpy")
def _allow(team: Any, thread: Any, cores: Any) -> None:
    """Let a thread, 0 for this one, run on these cores only."""
    system_call(load(team + SYSCALL), SET_AFFINITY, thread, CORES_BYTES, cores)


@numba.njit(error_model="numpy")
def _sleep_for(team: Any, job: Any, me: Any, word: Any, value: Any) -> None:
    """Sleep like ``_sleep``, and leave the core of this thread to a helper that is waited for.

    Else that helper would wait for a program on its own core, although this one has become free.
    """
    core = current_core(load(team + SCHED_GETCPU))
    helper = 0
    for n in range(1, load(team + HELPERS) + 1):
        seat = job + SEATS + LINE * n
        if n != me and load(seat + PRESENT) and (not helper or load(seat + CURRENT) & CLAIMED):
            helper = n
    if not helper or core < 0 or core >= 8 * CORES_BYTES:
        _sleep(team, word, value)
        return
    cores = buffer_of(CORES_FLOATS)
    for at in range(0, CORES_BYTES, 8):
        publish(cores + at, 0)
    publish(cores + core // 64 * 8, 1 << core % 64)
    thread = load(team + THREADS + 8 * helper)
    _allow(team, thread, cores)
    _sleep(team, word, value)
    _allow(team, thread, team + CORES)


@numba.njit(error_model="numpy")
def claim(seat: Any) -> Any:
    """Return whether the piece of a seat may be written; it may not be taken away any more."""
    piece = load(seat + EXPECTED)
    return replaced(seat + CURRENT, piece, piece | CLAIMED)


@numba.njit(error_model="numpy")
def _reserve(launch: Any, index: Any, seat: Any) -> Any:
    """Take a piece to be computed next; return whether there was one."""
    number = fetch_add(launch + TAKEN, 1)
    if number >= load(launch + PIECES):
        return False
    publish(seat + NEXT, (index + 1) * LAUNCH + number)
    return True


@numba.njit(error_model="numpy")
def _next(launch: Any, index: Any, seat: Any) -> Any:
    """Return the piece to be computed now; 0: none is left."""
    while True:
        piece = load(seat + NEXT)
        if piece and replaced(seat + NEXT, piece, 0):
            return piece
        if not _reserve(launch, index, seat):
            return 0


@numba.njit(error_model="numpy")
def _compute(team: Any, job: Any, launch: Any, index: Any, piece: Any, seat: Any) -> None:
    """Compute a piece; if it is the launch's last one, make the next launch due."""
    publish(seat + EXPECTED, piece)
    publish(seat + CURRENT, piece)
    following = load(launch + PIECES)
    if _reserve(launch, index, seat):
        following = load(seat + NEXT) % CLAIMED
    _call(load(launch + KERNEL), load(launch + FIELDS), piece % CLAIMED, following, seat)
    if load(seat + CURRENT) != piece | CLAIMED:
        return  # another thread has it
    publish(seat + CURRENT, 0)
    if fetch_add(launch + FINISHED, 1) + 1 < load(launch + PIECES):
        return
    if index + 1 == load(load(job + TAPE) + LAUNCHES):
        fetch_and(job + GATE, ~OPEN)
    exchange(job + DUE, index + 1)
    if fetch_add(job + DOZING, 0):
        _wake(team, job + DUE, MOST_HELPERS)


@numba.njit(error_model="numpy")
def _taken_from(job: Any, index: Any, seats: Any, me: Any, at: Any) -> Any:
    """Take a piece of a launch away from another thread; 0: there is none.

    Args:
        job: the job.
        index: of the launch.
        seats: of the job.
        me: number of this thread's seat.
        at: ``NEXT`` or ``CURRENT``.
    """
    for n in range(seats):
        word = job + SEATS + LINE * n + at
        piece = load(word)
        is_ours = n != me and piece >> 32 == index + 1 and not piece & CLAIMED
        if is_ours and replaced(word, piece, 0):
            return piece
    return 0


@numba.njit(error_model="numpy")
def _await(team: Any, job: Any, index: Any, me: Any, patience: Any) -> Any:
    """Wait until a launch is not due any more; return 0 then, or a piece that is to be computed."""
    seats = 1
    if load(job + GATE):
        seats += load(team + HELPERS)
    begin = 0
    while True:
        for _ in range(LOOKS):
            if load(job + DUE) != index:
                return 0
            pause()
        piece = _taken_from(job, index, seats, me, NEXT)
        if piece:
            return piece
        now = _now(team)
        if not begin:
            begin = now
        if now - begin > HELD_UP + patience:
            piece = _taken_from(job, index, seats, me, CURRENT)
            if piece:
                return piece
            if now - begin > DOZE:
                fetch_add(job + DOZING, 1)
                _sleep_for(team, job, me, job + DUE, index)
                fetch_add(job + DOZING, -1)
                begin = 0


@numba.njit(error_model="numpy")
def _is_full(team: Any) -> Any:
    """Return whether as many threads as there are cores have posted jobs that are not done."""
    owners = 0
    for n in range(JOBS):
        owners += load(team + FIRST_JOB + JOB_BYTES * n + GATE) & OWNED > 0
    return owners > load(team + HELPERS)


@numba.njit(error_model="numpy")
def _work(team: Any, job: Any, me: Any) -> None:
    """Compute pieces of a job until its last launch is finished, or a helper is not needed."""
    tape, seat = load(job + TAPE), job + SEATS + LINE * me
    launches = load(tape + LAUNCHES)
    index, patience = load(job + DUE), 0
    while index < launches:
        if me and _is_full(team):
            return
        launch = tape + FIRST_LAUNCH + LAUNCH_BYTES * index
        is_timed = load(launch + PIECES) > 1  # the first piece, for all of them
        while True:
            piece = _next(launch, index, seat)
            if not piece:
                piece = _await(team, job, index, me, patience)
            if not piece:
                break
            begin = _now(team) if is_timed else 0
            _compute(team, job, launch, index, piece, seat)
            if is_timed:
                patience, is_timed = PATIENCE * (_now(team) - begin), False
        index = load(job + DUE)


@numba.njit(error_model="numpy")
def _reset(tape: Any) -> None:
    """Make a tape ready to be run."""
    for n in range(load(tape + LAUNCHES)):
        launch = tape + FIRST_LAUNCH + LAUNCH_BYTES * n
        publish(launch + TAKEN, 0)
        publish(launch + FINISHED, 0)
        counters = load(launch + COUNTERS)
        for i in range(load(launch + COUNTER_COUNT)):
            publish(counters + 8 * i, 0)


@numba.njit(error_model="numpy")
def _free_job(team: Any) -> Any:
    """Return a job that nobody owns, and own it; 0: there is none."""
    for n in range(JOBS):
        job = team + FIRST_JOB + JOB_BYTES * n
        if load(job + GATE) == 0 and replaced(job + GATE, 0, OWNED):
            return job
    return 0


@numba.njit(error_model="numpy")
def run(team: Any, tape: Any, helpers: Any) -> None:
    """Run the launches of a tape in this thread and at most so many helpers."""
    team, tape = address_of(team), address_of(tape)
    _reset(tape)
    job = _free_job(team) if helpers else 0
    if not job:
        job = buffer_of(JOB_FLOATS)
        publish(job + GATE, 0)
        helpers = 0
    publish(job + TAPE, tape)
    publish(job + DUE, 0)
    publish(job + DOZING, 0)
    for at in (CURRENT, NEXT):
        publish(job + SEATS + at, 0)
    if not helpers:
        _work(team, job, 0)
        publish(job + GATE, 0)
        return
    publish(job + CORE, current_core(load(team + SCHED_GETCPU)))
    publish(job + GATE, helpers * WANTED + OWNED + OPEN)
    fetch_add(team + POSTED, 1)
    if fetch_add(team + SLEEPERS, 0):
        _wake(team, team + POSTED, helpers)
    _work(team, job, 0)
    _leave_alone(team, job)
    publish(job + GATE, 0)


@numba.njit(error_model="numpy")
def _leave_alone(team: Any, job: Any) -> None:
    """Wait until no helper is in a job, which is closed."""
    begin = 0
    while load(job + GATE) & INSIDE:
        begin, waited = _pause(team, begin)
        if waited > DOZE:
            gate = fetch_or(job + GATE, AWAITED) | AWAITED
            if gate & INSIDE:
                _sleep_for(team, job, 0, job + GATE, gate)


@numba.njit(error_model="numpy")
def _join(team: Any, job: Any, me: Any) -> Any:
    """Work at a job if it wants help; return whether it did."""
    gate = load(job + GATE)
    if not gate & OPEN or gate & INSIDE >= gate >> 32 or _is_full(team):
        return False
    seat = job + SEATS + LINE * me
    publish(seat + CURRENT, 0)
    publish(seat + NEXT, 0)
    if replaced(job + GATE, gate, gate + 1):
        publish(seat + PRESENT, 1)
        _avoid(team, load(job + CORE))
        _work(team, job, me)
        publish(seat + PRESENT, 0)
        if fetch_add(job + GATE, -1) & AWAITED:
            _wake(team, job + GATE, 1)
    return True


@numba.njit(error_model="numpy")
def help_forever(seat: Any) -> None:
    """Work at jobs; ``seat``: address of the team, plus the number of this helper, from 1 on."""
    me = seat % LINE
    team = seat - me
    publish(team + THREADS + 8 * me, system_call(load(team + SYSCALL), GETTID, 0, 0, 0))
    begin = first = 0
    while True:
        posted = load(team + POSTED)
        worked = False
        for n in range(JOBS):
            job = (first + n) % JOBS
            if _join(team, team + FIRST_JOB + JOB_BYTES * job, me):
                worked, first = True, job + 1
                break
        if worked:
            begin = 0
            continue
        begin, waited = _pause(team, begin)
        if waited > IDLE:
            fetch_add(team + SLEEPERS, 1)
            _sleep(team, team + POSTED, posted)
            fetch_add(team + SLEEPERS, -1)
            begin = 0
