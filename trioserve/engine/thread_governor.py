"""`ThreadGovernor`: how many threads compute a step, on a machine that does other things too.

The threads of a decode wait for each other after every node of its graph. If one of them shares a
core with another process, all of them stand still while that one runs, and a decode may take a
hundred times as long. Fewer threads, each with a core to itself, are then much faster.

Threads that wait for each other poll, so on a quiet machine `n` of them use `n` seconds of CPU
time a second. If they get less, or if steps take much longer than before, a trial compares fewer
threads with the current number. Below the maximum, a trial now and then compares more threads. A
trial takes a few steps and ends early if it goes badly. Each failure doubles the time until the
next one.
"""

from __future__ import annotations

import math

import attrs

#: A batch of this many tokens is heavy: its threads compute for long before they synchronize.
HEAVY = 32

#: Steps are judged in windows of this many steps, or of this many seconds.
WINDOW = 8
WINDOW_S = 0.3
#: A longer pause starts a new window: the load on the machine may have changed.
MAX_PAUSE_S = 2.0

#: Steps are suspicious if the threads got this many cores fewer than they could have used,
LOST_CORES = 0.3
#: or if they take this many times as long as usual.
SLOW = 1.5
#: The usual cost rises by this factor in a window: steps take longer as texts grow.
DRIFT = 1.02

#: A trial succeeds if its steps take at most this share of the usual time. At `CLEAR`, it need not
#: be compared with the current number of threads again.
GAIN = 0.9
CLEAR = 0.1
#: It ends early if each of its first steps takes this many times as long, or any one far longer.
HOPELESS = 1.1
EARLY = 3
FAR_LONGER = 1.5

#: A step may be interrupted once it takes this many times the usual time, and this many seconds.
OVERDUE = 2.5
MIN_LIMIT_S = 0.02

#: Seconds between trials, doubled by each failure. For a trial of more threads, idle time counts
#: too: what took the cores may be gone. For fewer, only the time of steps counts.
MIN_WAIT_S = 0.5
MAX_WAIT_S = 60.0
#: The wait is this many times what the last trial lost; after a success with fewer threads, this
#: many times what each of its steps saved.
PER_LOSS = 10.0
PER_GAIN = 3.0
#: A trial of more threads failed, too, if they were not kept for this many seconds.
LASTING_S = 10.0


@attrs.define
class _Window:
    """Steps of about the same size that were computed with the same number of threads."""

    end: float = -math.inf
    costs: list[float] = attrs.field(factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, step: Step) -> bool:
        """Add a step; after a long pause it is the first one. Returns whether that is enough."""
        if step.end - step.seconds - self.end > MAX_PAUSE_S:
            self.costs.clear()
            self.seconds = self.cpu_seconds = 0.0
        self.costs.append(step.cost)
        self.seconds += step.seconds
        self.cpu_seconds += step.cpu_seconds
        self.end = step.end
        return self.is_full

    @property
    def is_full(self) -> bool:
        return len(self.costs) >= WINDOW or self.seconds >= WINDOW_S

    @property
    def cost(self) -> float:
        """Mean cost of a step in the window, in seconds per token."""
        return sum(self.costs) / len(self.costs)


class Step:
    """A step that was computed.

    Args:
        n_tokens: of its batch.
        seconds: how long it took.
        cpu_seconds: used by all threads of the process meanwhile.
        end: when it ended (monotonic).
    """

    __slots__ = ("cost", "cpu_seconds", "end", "seconds", "size")

    def __init__(self, n_tokens: int, seconds: float, cpu_seconds: float, end: float) -> None:
        self.seconds, self.cpu_seconds, self.end = seconds, cpu_seconds, end
        #: The same for steps with about as many tokens.
        self.size = n_tokens.bit_length()
        #: The value to compare. A few tokens take about as long as one; many do not.
        self.cost = seconds / n_tokens if n_tokens >= HEAVY else seconds


@attrs.define
class _Trial:
    """Steps with other threads, and then again with those in use, which cost `usual` before."""

    candidate: int
    size: int
    usual: float
    steps: _Window
    again: _Window

    @property
    def threads(self) -> int | None:
        """The threads of its next step; None: those in use."""
        return None if self.steps.is_full else self.candidate

    @property
    def end(self) -> float:
        return max(self.steps.end, self.again.end)

    @property
    def lost(self) -> float:
        """Seconds that its steps took longer than usual."""
        return max(0.0, self.steps.seconds * (1 - self.usual / self.steps.cost))

    @property
    def saved(self) -> float:
        """Seconds that each of its steps was shorter than usual."""
        return self.steps.seconds / len(self.steps.costs) * (self.usual / self.steps.cost - 1)

    def add(self, step: Step) -> bool | None:
        """Add a step; returns whether the trial has succeeded or failed, None while it runs."""
        steps, again = self.steps, self.again
        (again if steps.is_full else steps).add(step)
        if len(steps.costs) >= EARLY and min(steps.costs) > HOPELESS * self.usual:
            return False
        if max(steps.costs) > FAR_LONGER * self.usual:
            return False
        if not steps.is_full:
            return None
        if steps.cost > GAIN * self.usual:
            return False
        if steps.cost <= CLEAR * self.usual:
            return True
        # The machine, or the texts, may have changed in the middle of it.
        return steps.cost <= GAIN * again.cost if again.is_full else None


@attrs.define
class _Waits:
    """The earliest time of the next trial of a kind."""

    next: float = -math.inf
    wait: float = MIN_WAIT_S
    failures: int = 0

    def fail(self, now: float, lost: float = 0.0) -> None:
        """Postpone the next trial, for longer if `lost` seconds were lost; double the wait."""
        self.failures += 1
        self.next = now + min(max(self.wait, PER_LOSS * lost), MAX_WAIT_S)
        self.wait = min(2 * self.wait, MAX_WAIT_S)

    def reset(self, next_: float) -> None:
        self.next, self.wait, self.failures = next_, MIN_WAIT_S, 0


class ThreadGovernor:
    """Chooses how many threads compute a step. Use it from the inference thread only.

    Light steps (few tokens) and heavy steps (many) have separate ones. Heavy steps are rarer, so
    until they have been measured, their number follows the other one.

    Args:
        choices: how many threads a step may have, from the fewest to the most.
        follower: that of heavy steps.
    """

    def __init__(self, choices: range, follower: ThreadGovernor | None = None) -> None:
        self.threads = choices[-1]  # trials aside
        self.changes = 0  # by trials
        self._choices, self._follower = choices, follower
        self._trial: _Trial | None = None
        self._judged = -math.inf  # when the last trial ended
        self._raised = -math.inf  # when one of more threads succeeded
        self._windows: dict[int, _Window] = {}  # by size, like the next two
        self._usual: dict[int, float] = {}
        self._last: dict[int, float] = {}  # what the last step cost
        self._fewer, self._more = _Waits(), _Waits()
        self._in_steps = 0.0  # seconds

    def plan(self, n_tokens: int) -> tuple[int, float | None]:
        """Choose the threads of a step, and the seconds after which it is overdue.

        None: it may take its time.
        """
        trial, threads, usual, size = self._trial, self.threads, None, n_tokens.bit_length()
        if trial is not None:
            if trial.size == size:
                threads, usual = trial.threads or threads, trial.usual
        elif threads > self._choices[0] and self._in_steps >= self._fewer.next:
            usual = self._usual.get(size) or self._last.get(size)
        if usual is None:
            return threads, None
        return threads, max(MIN_LIMIT_S, OVERDUE * usual * (n_tokens if n_tokens >= HEAVY else 1))

    def give_up(self, step: Step) -> None:
        """Learn from a step that had the threads of `plan`, was overdue and was ended.

        If it was one of a trial, that is over. If not, a trial of fewer threads begins.
        """
        self._in_steps += step.seconds
        trial = self._trial
        if trial is not None:
            is_again = trial.threads is None
            (trial.again if is_again else trial.steps).add(step)
            self._conclude(trial, is_again, step.end)
            return
        threads = self._with_fewer(self.threads - step.cpu_seconds / step.seconds)
        self._trial = _Trial(threads, step.size, step.cost, _Window(step.end), _Window(step.end))

    def observe(self, step: Step) -> None:
        """Learn from a step that had the threads of `plan`, and end a trial that has enough."""
        self._in_steps += step.seconds
        self._last[step.size] = step.cost
        trial = self._trial
        if trial is None:
            window = self._windows.get(step.size)
            if window is None:
                window = self._windows[step.size] = _Window()
            if window.add(step):
                del self._windows[step.size]
                self._judge(window, step)
        elif step.end - step.seconds - trial.end > MAX_PAUSE_S:
            self._trial = None  # earlier measurements are out of date
        elif trial.size == step.size and (succeeded := trial.add(step)) is not None:
            self._conclude(trial, succeeded, step.end)

    def follow(self, threads: int, now: float) -> None:
        """Use the number of the other kind of steps, unless trials have lately set it here."""
        if now - self._judged > MAX_WAIT_S:
            self._change(max(self._choices[0], min(threads, self._choices[-1])))
            self._more.reset(now + MIN_WAIT_S)

    def _judge(self, window: _Window, step: Step) -> None:
        """Decide whether to start a trial, by a window that is full with this step."""
        now, size = step.end, step.size
        cost, lost = window.cost, self.threads - window.cpu_seconds / window.seconds
        usual = self._usual.get(size, cost)
        self._usual[size] = min(cost, usual * DRIFT)
        is_slow = cost > SLOW * usual and len(window.costs) == WINDOW
        threads = self.threads
        if (lost > LOST_CORES or is_slow) and self._in_steps >= self._fewer.next:
            threads = self._with_fewer(lost)
        if threads == self.threads and now >= self._more.next:
            most = self._choices[-1]  # as if the other load had ended; or one more
            threads = min(most, (most, threads + 1)[self._more.failures % 2])
        if threads != self.threads:
            self._trial = _Trial(threads, size, cost, _Window(now), _Window(now))

    def _with_fewer(self, lost: float) -> int:
        """Leave a core to each other process; or use as many as were granted; or guess."""
        threads, most = self.threads, self._choices[-1]
        granted = max(threads - lost, 1e-3)
        n_others = threads * (most / granted - 1)  # if all are granted the same
        options = (round(most - n_others), int(granted), threads - 1, threads // 2)
        option = options[self._fewer.failures % len(options)]
        return max(self._choices[0], min(option, threads - 1))

    def _conclude(self, trial: _Trial, succeeded: bool, now: float) -> None:
        self._trial = None
        self._judged = now
        fewer = trial.candidate < self.threads
        if not succeeded:
            if fewer:
                self._fewer.fail(self._in_steps, trial.lost)
            else:
                self._more.fail(now, trial.lost)
            self._usual[trial.size] = trial.usual  # so this is the real cost
            return
        self._change(trial.candidate)
        if self._follower is not None:
            self._follower.follow(self.threads, now)
        self.changes += 1
        self._fewer.reset(self._in_steps)
        if not fewer:
            self._raised = now
        elif now - self._raised < LASTING_S:
            self._more.fail(now)
        else:
            self._more.reset(now + min(max(MIN_WAIT_S, PER_GAIN * trial.saved), MAX_WAIT_S))

    def _change(self, threads: int) -> None:
        self.threads = threads
        self._trial = None
        self._windows.clear()
        self._usual.clear()
        self._last.clear()
