"""Sweeps on real engines: processes, Ray on two nodes, submitit, dask; workers, nodes and drivers are killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from gated_runs import Gate, sweeping, wait_until
from pages import blocks_of

import emergent_heads as eh
from emergent_heads import cli, executors
from emergent_heads.errors import ArgumentError
from emergent_heads.executors import Local, Ray, Slurm, open_executor
from emergent_heads.jobs import Job, run_jobs, values
from emergent_heads.sweeps import grid, run_sweep
from emergent_heads.tasks import LinearMap

DRIVER = Path(__file__).parent / "sweep_driver.py"
PAGE = Path(__file__).parents[1] / "docs" / "executors.md"
PATIENCE_SECONDS = 300


def visible_gpus() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def run_block(engine: str, changes: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the block of the documentation that shows an engine, on one that is there, and checks its sweep."""
    (code,) = [code for language, code in blocks_of(PAGE) if language == "text" and engine in code]
    for shown, here in changes.items():
        assert shown in code
        code = code.replace(shown, here)
    monkeypatch.chdir(folder)
    namespace = {"eh": eh, "runs": grid(LinearMap, state_size=4, sparsity=2, n_layers=1, d_model=16, steps=2)}
    exec(code, namespace)
    assert namespace["sweep"].table["status"].tolist() == ["not solved"], namespace["sweep"].failures


# --- processes of this machine


def test_a_killed_process_costs_the_steps_since_its_last_save_and_no_other_run_a_thing(tmp_path):
    gate = Gate.of(tmp_path / "gate", 3, hold=(0,))
    future = sweeping(gate, tmp_path / "sweep", workers=1)
    process, _ = gate.held(0)
    os.kill(process, signal.SIGKILL)
    gate.let_go()
    gate.check(future.result(PATIENCE_SECONDS), lost=(0,), tmp_path=tmp_path)


def test_workers_share_the_gpus_in_turn(monkeypatch):
    def in_turn(workers: int, gpus: int | None = None) -> list[str | None]:
        return [process._gpus for process in Local(workers, gpus)._processes]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,3")
    assert in_turn(3) == ["GPU-5", "3", "GPU-5"]
    assert in_turn(2, gpus=1) == ["GPU-5", "GPU-5"]
    with Local(1) as local:
        assert local.submit(visible_gpus).result() == "GPU-5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert in_turn(1) == [None]  # there is no GPU to choose from
    assert in_turn(1, gpus=0) == [""]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert in_turn(5) == ["0", "1", "2", "3", "0"]
    assert in_turn(3, gpus=2) == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert in_turn(1) == [None]
    for gpus in (5, -1):
        with pytest.raises(ArgumentError, match=f"gpus is {gpus}; this process sees 0 GPUs"):
            Local(1, gpus)
    with pytest.raises(ArgumentError, match="workers is 0"):
        Local(0)


# --- drivers


def driver(gate: Gate, path: Path, workers: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, DRIVER, gate.folder, str(gate.seeds), path, str(workers), path.parent / "driver.csv"]
    return subprocess.Popen([*map(str, command)])


@pytest.mark.parametrize(
    ("sent", "workers", "status"), [(signal.SIGKILL, 1, [-signal.SIGKILL]), (signal.SIGINT, 0, [1, -signal.SIGINT])]
)
def test_a_driver_that_is_killed_or_interrupted_is_gone_on_with(tmp_path, sent, workers, status):
    gate = Gate.of(tmp_path / "gate", 2, hold=(0,))
    first = driver(gate, tmp_path / "sweep", workers)
    gate.held(0)
    first.send_signal(sent)
    assert first.wait(PATIENCE_SECONDS) in status
    assert not (tmp_path / "driver.csv").exists()
    gate.let_go()
    result = sweeping(gate, tmp_path / "sweep", workers=0).result(PATIENCE_SECONDS)
    gate.check(result, lost=(0,), tmp_path=tmp_path)


def test_two_drivers_on_one_folder_share_the_work_and_give_one_table(tmp_path):
    gate = Gate.of(tmp_path / "gate", 4, hold=(0, 1))
    other = driver(gate, tmp_path / "sweep", workers=0)
    gate.held(0)  # the other trains this one, and this process meets its lock
    result = sweeping(gate, tmp_path / "sweep", workers=0)
    gate.held(1)
    gate.let_go()
    assert other.wait(PATIENCE_SECONDS) == 0
    gate.check(result.result(PATIENCE_SECONDS), lost=(), tmp_path=tmp_path)
    written = pd.read_csv(tmp_path / "driver.csv")
    for column in ("run", "status", "loss_nats", "last_step", "seconds"):
        assert written[column].tolist() == result.result().table[column].tolist()
    left = {path.name for path in (tmp_path / "sweep").rglob("*") if path.name.startswith(".")}
    assert left == {".lock"}


# --- Ray


RAY_NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    module = pytest.importorskip("ray", reason="needs ray, of the extra ray")
    yield module
    module.shutdown()


def endless():
    """A function that turns until it is interrupted; one without a module travels as it is."""

    def turn(begun):
        import time

        try:
            begun.touch()
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            begun.with_name("interrupted").touch()
            raise

    return turn


def test_a_ray_cluster_that_loses_a_node_in_the_middle_of_a_sweep(ray, tmp_path, monkeypatch):
    """And on the node that is left: a worker that is killed, jobs that are cancelled, and the command line."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**RAY_NODE, "include_dashboard": False})
    try:
        node = cluster.add_node(**RAY_NODE)
        gate = Gate.of(tmp_path / "gate", 4, hold=(0, 1))
        with Ray(cluster.address) as executor:
            future = sweeping(gate, tmp_path / "sweep", executor)
            places = [gate.held(seed)[1] for seed in (0, 1)]
            assert len(set(places)) == 2
            assert executor.n_running() == 2
            cluster.remove_node(node)
            gate.let_go()
            result = future.result(PATIENCE_SECONDS)
            gate.check(result, lost=(places.index(node.node_id),), tmp_path=tmp_path)

            running, waiting = (executor.submit(endless(), tmp_path / name) for name in ("one", "two"))
            wait_until((tmp_path / "one").exists)
            assert running.cancel()
            assert waiting.cancel()
            wait_until((tmp_path / "interrupted").exists)

            with Ray() as same:  # stays on the cluster that this process is on
                lost = Gate.of(tmp_path / "second", 1, hold=(0,))
                future = sweeping(lost, tmp_path / "killed", same)
                os.kill(lost.held(0)[0], signal.SIGKILL)
                lost.let_go()
                lost.check(future.result(PATIENCE_SECONDS), lost=(0,), tmp_path=tmp_path / "alone")
            run_block("Ray(", {}, tmp_path, monkeypatch)
            assert ray.is_initialized()
        assert not (tmp_path / "two").exists()
        assert not ray.is_initialized()

        with pytest.raises(ArgumentError, match=f"no Ray at {cluster.address}: .*num_cpus"):
            open_executor("ray", 2, address=cluster.address)
        with open_executor("ray", address=cluster.address, cpus_per_job=0.5) as executor:
            assert [value for _, value in values(run_jobs([Job("one", abs, (-1,))], executor))] == [1]
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_what_ray_refuses_is_said(ray):
    with pytest.raises(ArgumentError, match="Unknown keyword argument"):
        Ray("local", num_cpu=1)
    assert not ray.is_initialized()


# --- Slurm, by submitit's stand-in on this machine


@pytest.fixture
def submitit(monkeypatch):
    module = pytest.importorskip("submitit", reason="needs submitit, of the extra slurm")
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 0)  # no slow disk here to wait for
    return module


def test_a_slurm_job_that_is_killed_or_out_of_time_goes_on_from_its_last_save(submitit, tmp_path):
    """A killed one is handed over again; one that is told that its time is up is queued again by Slurm itself."""
    gate = Gate.of(tmp_path / "gate", 2, hold=(0, 1))
    # Of less than ten minutes, any time is near enough to the end for submitit to take its signal for that.
    with Slurm(tmp_path / "jobs", cluster="local", timeout_min=8) as executor:
        future = sweeping(gate, tmp_path / "sweep", executor)
        os.kill(gate.held(0)[0], signal.SIGKILL)
        os.kill(gate.held(1)[0], signal.SIGUSR2)
        gate.let_go()
        gate.check(future.result(PATIENCE_SECONDS), lost=(0, 1), tmp_path=tmp_path)
        logs = [path.read_text() for path in (tmp_path / "jobs").glob("*_log.err")]
        assert sum("this job is timed-out" in log for log in logs) == 1
        assert len(logs) == 3  # two runs, and the killed one again


def test_the_documented_sweep_by_slurm(submitit, tmp_path, monkeypatch):
    run_block(
        "Slurm(", {"/shared": str(tmp_path), "16,": 'cluster="local",', ', device="cuda"': ""}, tmp_path, monkeypatch
    )


def test_slurm_jobs_are_cancelled_at_the_end(submitit, tmp_path):
    with Slurm(tmp_path / "jobs", cluster="local") as executor:
        with executor.batch():
            job = executor.submit(endless(), tmp_path / "one")
        wait_until((tmp_path / "one").exists)
        assert job.running()
        assert not job.done()
    wait_until(job.done)


def test_an_array_that_is_given_up_before_it_is_submitted_says_why(submitit, tmp_path):
    def give_up() -> None:
        with Slurm(tmp_path / "jobs", cluster="local") as executor, executor.batch():
            executor.submit(abs, -1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert not list((tmp_path / "jobs").glob("*.pkl"))


def test_what_slurm_gets_is_an_array_with_limits(submitit, tmp_path, monkeypatch):
    """On a machine without Slurm, its commands are stood in for; submitit writes the file for sbatch."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, said in {"srun": "", "sbatch": "Submitted batch job 12", "sacct": "JobID|State", "scancel": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/calls\necho "{said}"\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    with Slurm(tmp_path / "jobs", 2, gpus_per_node=1, timeout_min=30, slurm_partition="small") as executor:
        with executor.batch():
            jobs = [executor.submit(abs, number) for number in range(5)]
        assert [job.job.job_id for job in jobs] == [f"12_{number}" for number in range(5)]
    asked = next((tmp_path / "jobs").glob("*.sh")).read_text()  # the others are links to it
    for line in ("--array=0-4%2", "--gpus-per-node=1", "--time=30", "--partition=small", "--cpus-per-task=1"):
        assert f"#SBATCH {line}" in asked
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("/sbatch " in call for call in calls) == 1
    assert sum("/scancel 12_" in call for call in calls) == 5


def test_what_slurm_refuses_is_said(submitit, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match="no Slurm on this machine"):
        Slurm(tmp_path)
    for wrong in ({"memory": 3}, {"timeout_min": "long"}, {"slurm_partitoin": "small"}):
        with pytest.raises(ArgumentError, match="submitit refuses these parameters"):
            Slurm(tmp_path, cluster="local", **wrong)
    with pytest.raises(ArgumentError, match="workers is 0"):
        Slurm(tmp_path, 0, cluster="local")


# --- dask


def test_a_killed_worker_of_dask(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed", reason="needs distributed, of the extra dev")
    gate = Gate.of(tmp_path / "gate", 3, hold=(0,))
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
    with (
        distributed.LocalCluster(**settings, local_directory=str(tmp_path)) as cluster,
        distributed.Client(cluster) as client,
    ):
        run_block("dask", {"tcp://scheduler:8786": client.scheduler.address}, tmp_path, monkeypatch)
        future = sweeping(gate, tmp_path / "sweep", client.get_executor())
        os.kill(gate.held(0)[0], signal.SIGKILL)
        gate.let_go()
        gate.check(future.result(PATIENCE_SECONDS), lost=(0,), tmp_path=tmp_path)


# --- by name, and on the command line


def test_executors_by_name(submitit, tmp_path, monkeypatch):
    with open_executor("local", 2, gpus=0) as local:
        assert isinstance(local, Local)
    with open_executor("local") as local:
        assert len(local._processes) == executors.cores()
    with open_executor("slurm", 3, folder=tmp_path, cluster="debug") as slurm:
        assert isinstance(slurm, Slurm)
        assert slurm.submit(abs, -2).result() == 2
    with open_executor("slurm", folder=tmp_path, cluster="debug", cpus_per_task=2) as slurm:
        assert slurm.submit(torch.get_num_threads).result() == 2
    torch.set_num_threads(1)
    with pytest.raises(ArgumentError, match="no executor 'dask'"):
        open_executor("dask")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="workers is 0"):
        open_executor("local", 0)
    with pytest.raises(ArgumentError, match=r"options of the executor local: .*'gpu'"):
        open_executor("local", gpu=1)
    for package, make in {"ray": Ray, "submitit": lambda: Slurm(tmp_path)}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ArgumentError, match=rf"needs {package}, which is not installed: pip install"):
            make()


SWEEP = """
import emergent_heads as eh
runs = eh.grid(eh.tasks.LinearMap, state_size=4, sparsity=2, n_layers=1, d_model=16, steps=2, seed=range(2))
"""


@pytest.fixture
def sweep_file(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(SWEEP)
    return tmp_path / "mine.py"


def test_a_sweep_by_slurm_on_the_command_line(submitit, sweep_file, tmp_path, capsys):
    line = ["sweep", str(sweep_file), "--out", str(tmp_path / "out"), "--together", "2", "--executor", "slurm"]
    line += ["--workers", "2", "--executor-option", "cluster=local", "--executor-option", "timeout_min=5"]
    assert cli.main(line) == 0, capsys.readouterr().err
    assert "sweep of 2 runs: 2 not solved" in capsys.readouterr().out
    assert len(list((tmp_path / "out" / "slurm").glob("*_result.pkl"))) == 1  # both seeds in one job


WRONG = {
    "workers for this process, elsewhere": (
        ["--executor", "slurm", "--workers", "0"],
        "--workers is 0; with --executor slurm",
    ),
    "options for this process": (["--workers", "0", "--executor-option", "gpus=0"], "with --executor-option give"),
    "an option without a value": (["--executor-option", "gpus"], "--executor-option gpus: write NAME=VALUE"),
    "an option of another": (["--executor-option", "gpus_per_job=1"], "options of the executor local: .*gpus_per_job"),
    "an unknown executor": (["--executor", "dask"], "invalid choice 'dask'|dask"),
    "no GPU here": (["--device", "cuda"], "no device 'cuda' here|device"),
    "too few together": (["--together", "0"], "together is 0"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_wrong_options_are_refused(options, said, command, sweep_file, tmp_path, capsys):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    what = [str(sweep_file)] if command == "sweep" else ["context-length"]
    assert cli.main([command, *what, "--out", str(tmp_path / "out"), *options]) == 2
    told = capsys.readouterr().err
    assert re.search(said, told), told
    assert not list(tmp_path.glob("out/*"))


# --- on GPUs


def seen_gpus() -> list[str]:
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


@pytest.mark.gpu
def test_each_process_works_on_a_gpu_of_its_own():
    here = seen_gpus()
    with Local(len(here) + 1) as local:
        seen = [local.submit(seen_gpus).result() for _ in range(len(here) + 1)]
    assert seen == [[here[number % len(here)]] for number in range(len(here) + 1)]
    with Local(1, gpus=0) as local:
        assert local.submit(seen_gpus).result() == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sweep_in_bfloat16_and_a_ranking_in_float32(tmp_path, device):
    """Seeds together, on a GPU in a worker, are the runs that each is alone; their heads rank as on the CPU."""
    task = LinearMap(state_size=4, sparsity=2, seed=0)
    settings = {"n_layers": 2, "d_model": 32, "n_heads": 2, "steps": 60, "tokens_per_batch": 512, "evaluate_every": 20}
    runs = grid(task, **settings, dtype="bfloat16", learning_rate=3e-3, seed=range(4))
    how = {"workers": int(device == "cuda"), "device": device, "progress": False}
    together = run_sweep(runs, tmp_path / "together", together=4, **how)
    alone = run_sweep(runs, tmp_path / "alone", **how)
    assert not together.failures | alone.failures
    losses = [result.table["loss_nats"].to_numpy() for result in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert (losses[0] < task.plateau).all()

    folder = tmp_path / "together" / runs[0].name
    assert json.loads((folder / "manifest.json").read_text())["device"].startswith(device)
    sequences = task.batch(8, seed=1).tokens
    prompts = eh.tasks.from_tokens(sequences[:, :-1].tolist(), sequences[:, -1].tolist())
    ranked = []
    for place in (device, "cpu"):
        series = eh.CheckpointSeries.from_run(folder, device=place)
        assert {weight.dtype for weight in series.last.load().parameters()} == {torch.float32}
        ranking = eh.rank_heads(series.first, series.last, prompts).table.sort_values(["layer", "head"])
        ranked.append(ranking["delta_p"].to_numpy())
    assert ranked[0] == pytest.approx(ranked[1], abs=1e-5)
    assert abs(ranked[0]).max() > 1e-4
