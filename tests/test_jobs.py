"""Jobs on any executor: what comes back, what is handed over again, and what the bar says."""

import pickle
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from queue import Empty

import pytest

from emergent_heads import jobs as jobs_module
from emergent_heads.errors import ArgumentError, RunInUseError
from emergent_heads.jobs import TRIES, Job, run_jobs, values
from emergent_heads.processes import Local


def named(*numbers: int, function=abs) -> list[Job]:
    return [Job(str(number), function, (number,)) for number in numbers]


def reciprocal(number: int) -> float:
    return 1 / number


class Awaited:
    """A future that can only be waited for."""

    def __init__(self, run):
        self.result = run


class Asked(Awaited):
    """A future that can be asked whether it is done, which it is the second time."""

    def __init__(self, run):
        super().__init__(run)
        self._asked = 0

    def done(self):
        self._asked += 1
        return self._asked > 1


def at_once(run):
    future = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future


class Executor:
    """Gives futures of some kind, and notes what it is given."""

    def __init__(self, kind=at_once):
        self.kind, self.submitted = kind, []

    def submit(self, function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        self.submitted.append(arguments[0].arguments)
        return self.kind(lambda: function(*arguments))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only waiting moves."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    class Bell(jobs_module.SimpleQueue):
        def get(self, timeout):
            if self.empty():
                told.now += timeout
                raise Empty
            return super().get()

    told = Clock()
    monkeypatch.setattr(jobs_module, "time", told)
    monkeypatch.setattr(jobs_module, "SimpleQueue", Bell)
    return told


@pytest.fixture
def bar(monkeypatch):
    """What the progress bar is told: a list of what it was given."""
    said = []

    class Bar:
        def __init__(self, **how):
            self.how = how

        def update(self, n=1):
            said.append(n)

        def set_postfix(self, values):
            said.append(values)

        def close(self):
            said.append("closed")

    monkeypatch.setattr(jobs_module, "tqdm", lambda **how: (said.append(how), Bar())[1])
    return said


@pytest.mark.parametrize("kind", [at_once, Asked, Awaited])
def test_each_job_comes_back_with_what_it_returned_or_raised(kind):
    ended = {each.job.name: each for each in run_jobs(named(2, 0, 4, function=reciprocal), Executor(kind))}
    assert {name: each.value for name, each in ended.items()} == {"2": 0.5, "0": None, "4": 0.25}
    assert isinstance(ended["0"].error, ZeroDivisionError)
    assert "in reciprocal" in ended["0"].traceback
    assert ended["2"].error is None


def test_executors_of_the_standard_library_and_processes_and_this_process():
    with ThreadPoolExecutor(2) as pool:
        assert sorted(value for _, value in values(run_jobs(named(-1, -2, -3), pool))) == [1, 2, 3]
    for workers in (0, 1):
        assert sorted(value for _, value in values(run_jobs(named(-1, -2), workers=workers))) == [1, 2]
    assert list(run_jobs([], workers=None)) == []
    assert list(run_jobs([], Executor())) == []


def test_values_raise_the_first_error():
    with pytest.raises(ZeroDivisionError):
        list(values(run_jobs(named(1, 0, function=reciprocal), Executor())))


@pytest.mark.parametrize("kind", [at_once, Asked, Awaited])
def test_a_job_whose_worker_is_lost_is_handed_over_again(kind):
    lost = {"twice": 2, "always": 99}
    calls = []

    class Losing(Executor):
        def submit(self, function, *arguments):
            (name,) = arguments[0].arguments
            calls.append(name)
            lost[name] = lost.get(name, 0) - 1
            return kind(self._lose if lost[name] >= 0 else lambda: function(*arguments))

        def _lose(self):
            raise ConnectionError("the node went away")

    asked = [Job(name, str.upper, (name,)) for name in ("twice", "never", "always")]
    ended = {each.job.name: each for each in run_jobs(asked, Losing())}
    assert (ended["twice"].value, ended["never"].value) == ("TWICE", "NEVER")
    assert isinstance(ended["always"].error, ConnectionError)
    assert "the node went away" in ended["always"].traceback
    assert [calls.count(name) for name in ("twice", "never", "always")] == [3, 1, TRIES]


class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def unsendable(counted):
    with counted.open("a") as file:
        file.write("x")
    raise Unsendable("a cause", 2)


def test_an_error_that_cannot_be_sent_is_still_the_job_s_own(tmp_path):
    (ended,) = run_jobs([Job("one", unsendable, (tmp_path / "calls",))], workers=1)
    assert (tmp_path / "calls").read_text() == "x"
    assert str(ended.error) == "Unsendable: a cause"
    assert "in unsendable" in ended.traceback


# --- what another process is at


def in_use(times: dict[str, int], asked: list, clock):
    def job(name: str) -> str:
        asked.append((name, clock.now))
        times[name] = times.get(name, 0) - 1
        if times[name] >= 0:
            raise RunInUseError("another process is training")
        return name

    return job


def test_a_job_that_another_process_is_at_rests_ever_longer_while_others_are_done(clock):
    asked = []
    job = in_use({"busy": 9}, asked, clock)
    ended = [each.job.name for each in run_jobs([Job(name, job, (name,)) for name in ("busy", "b", "c")])]
    assert ended == ["b", "c", "busy"]
    times = [when for name, when in asked if name == "busy"]
    rests = [after - before for before, after in pairwise(times)]
    assert rests == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])  # and not lost, however often


def test_with_an_executor_too_nothing_is_asked_before_its_rest_is_over(clock):
    asked = []
    job = in_use({"busy": 3}, asked, clock)

    class Here:
        def submit(self, function, *arguments):
            return at_once(lambda: function(*arguments))

    assert [each.value for each in run_jobs([Job("busy", job, ("busy",))], Here())] == ["busy"]
    assert [when - asked[0][1] for _, when in asked] == pytest.approx([0, 0.5, 1.5, 3.5])


# --- arrays, interrupts, modules


def test_what_is_handed_over_first_is_one_batch():
    class Batching(Executor):
        batches, inside = 0, False

        @contextmanager
        def batch(self):
            self.batches, self.inside = self.batches + 1, True
            yield
            self.inside = False

        def submit(self, function, *arguments):
            (number,) = arguments[0].arguments
            if len(self.submitted) == 3:
                assert not self.inside
            future = super().submit(function, *arguments)
            if number == 2 and len(self.submitted) < 4:
                future = at_once(lambda: 1 / 0)
            return future

    executor = Batching()
    assert sorted(value for _, value in values(run_jobs(named(1, 2, 3), executor))) == [1, 2, 3]
    assert (executor.batches, len(executor.submitted)) == (1, 4)
    assert list(run_jobs([], executor)) == []
    assert executor.batches == 1


def test_leaving_early_cancels_what_has_not_ended():
    cancelled = []

    class Open:
        def __init__(self, name):
            self.name = name

        def done(self):
            return self.name == "1"

        def result(self):
            return self.name

        def cancel(self):
            if self.name == "2":
                raise RuntimeError("cannot be cancelled")
            cancelled.append(self.name)

    class Never:
        def submit(self, function, *arguments):
            return Open(str(arguments[0].arguments[0]))

    for _ in run_jobs(named(1, 2, 3, 4), Never()):
        break
    assert cancelled == ["3", "4"]

    cancelled.clear()

    def interrupted():
        raise KeyboardInterrupt

    class Interrupted(Never):
        def submit(self, function, *arguments):
            return Awaited(interrupted) if arguments[0].arguments == (1,) else super().submit(function, *arguments)

    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(named(1, 3, 4), Interrupted()))
    assert cancelled == ["3", "4"]


def test_a_worker_loads_modules_before_what_is_of_their_classes(tmp_path, monkeypatch):
    """A module off the import path, with a class whose instance travels."""
    file = tmp_path / "off_the_path.py"
    file.write_text("class Thing:\n    size = 3\n\ndef size(thing):\n    return thing.size\n")
    module = jobs_module.load_module("off_the_path", file)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    try:
        job = Job("one", module.size, (module.Thing(),))
        with Local(1) as processes:
            (ended,) = run_jobs([job], processes, modules=["off_the_path"])
            assert ended.value == 3, ended.traceback
    finally:
        del sys.modules["off_the_path"]


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match="leave them out"):
        list(run_jobs(named(1), Executor(), workers=2))
    with pytest.raises(ArgumentError, match="workers is -1"):
        list(run_jobs(named(1), workers=-1))


# --- the bar


def test_the_bar_counts_pieces_and_says_what_failed(bar):
    asked = [Job("a", abs, (1,), size=3), Job("b", reciprocal, (0,), size=2)]
    list(run_jobs(asked, Executor(Awaited), title="sweep", unit="run", done_before=4))
    assert {name: bar[0][name] for name in ("total", "initial", "desc", "unit")} == {
        "total": 9,
        "initial": 4,
        "desc": "sweep",
        "unit": "run",
    }
    assert [each for each in bar if isinstance(each, int)] == [3, 2]
    assert bar[1] == {"unfinished": 2, "failed": 0}  # such futures do not say what is running
    assert bar[-2:] == [{"unfinished": 0, "failed": 1}, "closed"]


class Running(Asked):
    """A future that says whether it is running."""

    begun = True

    def running(self):
        return self.begun


class Waiting(Running):
    begun = False


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([Running, Running, Waiting], {"running": 2, "failed": 0}),
        ([Running, Asked, Asked], {"running": 1, "failed": 0}),
        ([Waiting, Waiting, Waiting], {"unfinished": 3, "failed": 0}),  # as dask's: they never say that they run
    ],
)
def test_the_bar_says_what_is_running_where_that_is_known(bar, kinds, said):
    list(run_jobs(named(1, 2, 3), Executor(lambda run: kinds.pop(0)(run))))
    assert bar[1] == said


def test_the_bar_asks_an_executor_that_knows_and_says_what_is_at_work_elsewhere(bar, clock):
    class Knowing(Executor):
        def n_running(self):
            return 7

    list(run_jobs(named(1, 2), Knowing()))
    assert bar[1] == {"running": 2, "failed": 0}  # not more than there are
    bar.clear()
    job = in_use({"busy": 4}, [], clock)
    list(run_jobs([Job("busy", job, ("busy",))]))
    assert {"running": 0, "elsewhere": 1, "failed": 0} in bar
