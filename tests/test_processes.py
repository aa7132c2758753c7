"""Work in other processes: what comes back, what does not, and what a death costs."""

import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from emergent_heads.processes import Local, ProcessDiedError, load_module


def test_processes_answer_fail_and_die_one_by_one():
    with Local(1) as processes:
        good = processes.submit(os.getpid)
        threads = processes.submit(torch.get_num_threads)
        bad = processes.submit(int, "x")
        no_answer = processes.submit(eval, "lambda: 1")
        no_job = processes.submit(lambda: 1)
        dead = processes.submit(eval, "__import__('os').kill(__import__('os').getpid(), 9)")
        again = processes.submit(os.getpid)
        assert good.result() != os.getpid()
        assert threads.result() == 1
        with pytest.raises(ValueError, match="invalid literal"):
            bad.result()
        with pytest.raises(RuntimeError, match="what the job returned cannot be pickled"):
            no_answer.result()
        with pytest.raises((AttributeError, pickle.PicklingError)):
            no_job.result()
        with pytest.raises(ProcessDiedError, match="killed by SIGKILL, perhaps for want of memory"):
            dead.result()
        assert again.result() not in (good.result(), os.getpid())


def test_leaving_ends_what_is_at_work_and_drops_what_waits():
    with Local(1) as processes:
        assert processes.submit(int).result() == 0  # it has begun
        at_work, waiting = processes.submit(signal.pause), processes.submit(os.getpid)
    assert waiting.cancelled()
    assert at_work.cancelled() or isinstance(at_work.exception(), ProcessDiedError)


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from emergent_heads.processes import Local\nLocal(1).submit(int).result()")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]


def test_processes_do_not_outlive_a_killed_parent():
    script = (
        "import os, signal\n"
        "from emergent_heads.processes import Local\n"
        "if __name__ == '__main__':\n"
        "    processes = Local(1)\n"
        "    processes.submit(int).result()\n"
        "    processes.submit(signal.pause)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The process holds the other end of stdout, so its end is what `run` waits for.
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL


def test_modules_outside_the_import_path_are_run_once_from_their_file(tmp_path):
    file = tmp_path / "anything.py"
    file.write_text("made = []")
    module = load_module("a_module_from_a_file", file)
    module.made.append(1)
    try:
        assert load_module("a_module_from_a_file", file).made == [1]
    finally:
        del sys.modules["a_module_from_a_file"]
    file.write_text("import a_module_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_module("a_module_from_a_file", file)
    assert "a_module_from_a_file" not in sys.modules
