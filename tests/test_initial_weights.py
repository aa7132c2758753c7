"""A run starts from exactly the weights it names, says so, and goes on without the run they came from."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from training_runs import CONFIG, QUICK, TASK, same_runs

from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    ModelMismatchError,
    NoCheckpointsError,
    RunFolderError,
    UnknownStepError,
)
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.storage import digest
from emergent_heads.sweeps import RunSpec, run_sweep
from emergent_heads.tasks import Addition, CellularAutomaton, LinearMap
from emergent_heads.training.folder import RunFolder
from emergent_heads.training.learner import Plan
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run
from emergent_heads.training.seeds import train_seeds
from emergent_heads.training.settings import TrainingSettings

OTHER = CellularAutomaton(state_size=4, states=2, symbols=5, rules=4, seed=0)
"""Another vocabulary than `TASK` has, in sequences as long."""
ROTARY = replace(CONFIG, positions="rotary")
EMBEDDINGS = {"embed.weight", "unembed.weight", "unembed.bias"}


def quick(path, config=ROTARY, task=TASK, **changes):
    return train(config, task, path, **{**QUICK, "progress": False, **changes})


def weights_of(run, step):
    return run.series[step].load().state_dict()


def equal(first, second):
    return {name for name in first if torch.equal(first[name], second[name])}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    return quick(tmp_path_factory.mktemp("runs") / "earlier")


@pytest.mark.parametrize("named", ["run", "folder", "text", "checkpoint"])
def test_a_run_starts_from_the_weights_it_names(named, earlier, tmp_path):
    start = {"run": earlier, "folder": earlier.path, "text": str(earlier.path), "checkpoint": earlier.series[8]}[named]
    step = 8 if named == "checkpoint" else 24
    run = quick(tmp_path / "run", seed=1, init_from=start)
    assert equal(weights_of(run, 0), wanted := weights_of(earlier, step)) == set(wanted)
    assert run.manifest["init_from"] == run.init_from
    told = {name: value for name, value in run.init_from.items() if name != "digest"}
    assert told == {"run": "earlier", "step": step, "carry": "all"}
    assert f"from earlier step {step} (all)" in repr(run)
    assert f"earlier step {step} (all)" in run._repr_html_()


def test_the_steps_after_are_those_of_a_fresh_optimizer(earlier, tmp_path):
    steps = 6
    run = quick(tmp_path / "run", seed=1, init_from=earlier, steps=steps, clip=None)
    model = earlier.series.last.load().requires_grad_(True)
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in model.parameters() if each.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = QUICK["learning_rate"] * min(1.0, (step + 1) / QUICK["warmup_steps"])
        batch = TASK.batch(run.settings.batch_size(TASK), seed=1, step=step)
        losses = torch.nn.functional.cross_entropy(
            model(batch.tokens[:, :-1]).transpose(1, 2), batch.tokens[:, 1:], reduction="none"
        )
        optimizer.zero_grad()
        losses[batch.loss_mask[:, 1:]].mean().backward()
        optimizer.step()
    for name, weight in weights_of(run, steps).items():
        torch.testing.assert_close(weight, model.state_dict()[name].detach(), rtol=1e-4, atol=1e-6)


def test_embeddings_can_be_drawn_anew_from_the_new_seed(earlier, tmp_path):
    run = quick(tmp_path / "run", task=OTHER, seed=7, init_from=earlier, carry="all but embeddings")
    begun, old = weights_of(run, 0), weights_of(earlier, 24)
    assert equal({name: begun[name] for name in set(begun) - EMBEDDINGS}, old) == set(old) - EMBEDDINGS
    drawn = SmallModel(ROTARY.for_task(OTHER), 7).state_dict()
    assert equal(begun, drawn) >= EMBEDDINGS
    assert run.init_from["carry"] == "all but embeddings"
    assert "from earlier step 24 (all but embeddings)" in repr(run)


def test_the_digest_is_of_what_is_carried(earlier, tmp_path):
    runs = {
        carry: quick(tmp_path / carry, seed=1, init_from=earlier, carry=carry)
        for carry in ("all", "all but embeddings")
    }
    old = weights_of(earlier, 24)
    for carry, run in runs.items():
        names = sorted(set(old) - (EMBEDDINGS if carry != "all" else set()))
        assert run.init_from["digest"] == digest(*(part for name in names for part in (name, old[name])))


def test_learned_positions_are_carried(tmp_path):
    first = quick(tmp_path / "first", CONFIG)
    run = quick(tmp_path / "run", CONFIG, OTHER, init_from=first, carry="all but embeddings", seed=1)
    assert torch.equal(weights_of(run, 0)["pos_embed.weight"], weights_of(first, 24)["pos_embed.weight"])


LONGER = LinearMap(state_size=6, sparsity=2, seed=0)


@pytest.mark.parametrize(
    ("config", "task", "carry", "said"),
    [
        (replace(ROTARY, n_layers=2), TASK, "all", "n_layers 1 there, 2 here"),
        (replace(ROTARY, n_heads=4), TASK, "all", "n_heads 2 there, 4 here; d_head 8 there, 4 here"),
        (replace(ROTARY, d_mlp=32), TASK, "all", "d_mlp 64 there, 32 here"),
        (replace(ROTARY, norm="rms"), TASK, "all", "norm layer there, rms here"),
        (replace(ROTARY, mixer="mamba", positions="none"), TASK, "all", "mixer"),
        (replace(ROTARY, unembed_bias=False), TASK, "all", "unembed_bias True there, False here.*all but embeddings"),
        (ROTARY, OTHER, "all", 'vocabulary_size 2 there, 5 here; carry="all but embeddings"'),
        (replace(ROTARY, n_layers=2), OTHER, "all but embeddings", "n_layers 1 there, 2 here; give the model"),
    ],
)
def test_weights_that_mean_something_else_are_refused_before_anything_is_made(
    config, task, carry, said, earlier, tmp_path
):
    with pytest.raises(ModelMismatchError, match=said):
        quick(tmp_path / "run", config, task, init_from=earlier, carry=carry)
    assert not (tmp_path / "run").exists()


def test_positions_of_another_context_are_refused_and_rotary_ones_have_none(tmp_path, earlier):
    first = quick(tmp_path / "first", CONFIG)
    with pytest.raises(ModelMismatchError, match=f"context of {TASK.length} and this model has {LONGER.length}"):
        quick(tmp_path / "run", CONFIG, LONGER, init_from=first)
    assert not (tmp_path / "run").exists()
    long = quick(tmp_path / "long", replace(CONFIG, context=LONGER.length))
    assert quick(tmp_path / "same", CONFIG, LONGER, init_from=long).status == "finished"
    assert quick(tmp_path / "rotary", ROTARY, LONGER, init_from=earlier).status == "finished"


def test_mixers_with_weights_for_each_position_need_the_same_context(tmp_path):
    config = replace(CONFIG, mixer="mlp_mixer", positions="none")
    first = quick(tmp_path / "first", config)
    with pytest.raises(ModelMismatchError, match=r"blocks\.0\.mixer\..*give both models the same context"):
        quick(tmp_path / "run", config, LONGER, init_from=first)
    assert not (tmp_path / "run").exists()


def test_an_attention_bias_stays_behind(tmp_path):
    first = quick(tmp_path / "first", attention_bias=3.0)
    assert first.series.last.load().blocks[0].attn.bias is not None
    run = quick(tmp_path / "run", init_from=first)
    assert run.series.first.load().blocks[0].attn.bias is None
    assert "attention_bias" not in {path.stem for path in run.path.iterdir()}


# --- what names a start


def unfinished(path, **changes):
    def stop(step, model, loss):
        if step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(path, on_step=stop, **{"save_every_seconds": 0, **changes})
    return Run.open(path)


def test_a_run_that_is_not_finished_has_no_last_checkpoint_but_others(tmp_path):
    first = unfinished(tmp_path / "first")
    with pytest.raises(ArgumentError, match=r"first is not finished.*init_from=run.series"):
        quick(tmp_path / "run", init_from=first)
    run = quick(tmp_path / "run", init_from=first.series[4])
    assert run.init_from["step"] == 4


def test_a_diverged_run_has_no_last_checkpoint_but_others(tmp_path):
    first = quick(tmp_path / "first", learning_rate=1e30, clip=None)
    assert first.status == "diverged"
    with pytest.raises(ArgumentError, match="first has diverged"):
        quick(tmp_path / "run", init_from=first)
    assert quick(tmp_path / "run", init_from=first.series[0]).init_from["step"] == 0


@pytest.mark.parametrize(
    ("start", "error", "said"),
    [
        (lambda path, run: path / "nowhere", NoCheckpointsError, "nowhere is no run folder"),
        (lambda path, run: 7, ArgumentError, "init_from takes a run, its folder, or run.series"),
        (lambda path, run: run.series, ArgumentError, "init_from takes a run"),
        (lambda path, run: run.series[7], UnknownStepError, "7"),
        (
            lambda path, run: CheckpointSeries.from_loader([1], lambda step: 0)[1],
            ArgumentError,
            "no checkpoint of a run",
        ),
    ],
)
def test_what_names_no_start_is_refused(start, error, said, earlier, tmp_path):
    with pytest.raises(error, match=said):
        quick(tmp_path / "run", init_from=start(tmp_path, earlier))
    assert not (tmp_path / "run").exists()


def test_wrong_ways_to_carry_are_refused(earlier, tmp_path):
    with pytest.raises(ArgumentError, match="carry must be 'all' or 'all but embeddings', not 'some'"):
        quick(tmp_path / "run", init_from=earlier, carry="some")
    with pytest.raises(ArgumentError, match="goes with init_from"):
        quick(tmp_path / "run", carry="all but embeddings")


def test_a_damaged_checkpoint_is_named(earlier, tmp_path):
    shutil.copytree(earlier.path, tmp_path / "first")
    (tmp_path / "first" / "checkpoints" / "step_00000024.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"first, step 24: .*damaged"):
        quick(tmp_path / "run", init_from=tmp_path / "first")


# --- the start belongs to the run


def test_a_run_of_another_start_is_refused(earlier, tmp_path):
    unfinished(tmp_path / "run", init_from=earlier)
    for start, carry, said in (
        (None, "all", "init_from"),
        (earlier.series[8], "all", "init_from.step 24 there, 8 now"),
        (earlier, "all but embeddings", "init_from.carry all there, all but embeddings now"),
    ):
        with pytest.raises(RunFolderError, match=said):
            quick(tmp_path / "run", init_from=start, carry=carry)
    with pytest.raises(RunFolderError, match="init_from None there"):
        quick(earlier.path, init_from=earlier.series[8])


def test_a_start_that_was_trained_anew_is_another_start(earlier, tmp_path):
    shutil.copytree(earlier.path, tmp_path / "first")
    unfinished(tmp_path / "run", init_from=tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    quick(tmp_path / "first", seed=5)
    with pytest.raises(RunFolderError, match=r"init_from\.digest"):
        quick(tmp_path / "run", init_from=tmp_path / "first")


def test_runs_without_a_start_are_what_they_were(earlier):
    assert "init_from" not in earlier.manifest
    assert earlier.init_from is None
    plan = Plan.of(ROTARY, TASK, earlier.settings, "cpu")
    assert RunFolder(earlier.path, plan.identity(0)).status() == "finished"
    assert set(plan.identity(0)) == {"config", "task", "seed", "training"}
    assert "unembed_bias" not in earlier.manifest["config"]


@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_run_goes_on_bit_for_bit_without_the_earlier_one(saved, earlier, tmp_path):
    for place in ("here", "there"):
        shutil.copytree(earlier.path, tmp_path / place / "first")
    whole = quick(tmp_path / "whole", seed=1, init_from=tmp_path / "there" / "first")
    first = Run.open(tmp_path / "here" / "first")
    another = first.series[8]
    unfinished(tmp_path / "run", seed=1, init_from=first, save_every_seconds=0 if saved else 1000)
    assert (tmp_path / "run" / "resume.safetensors").exists() == saved
    shutil.rmtree(first.path)
    with pytest.raises(NoCheckpointsError):  # that it was begun with another checkpoint is known, too
        quick(tmp_path / "run", seed=1, init_from=another)
    run = quick(tmp_path / "run", seed=1, init_from=first)
    assert same_runs(run.path, whole.path)
    assert run.init_from == whole.init_from
    assert not (run.path / "initial.safetensors").exists()
    assert quick(tmp_path / "run", seed=1, init_from=first.path).status == "finished"  # done, and still gone
    with pytest.raises(NoCheckpointsError):
        quick(tmp_path / "run", seed=1, init_from=first.path.with_name("second"))


def test_weights_kept_for_a_resume_are_checked(earlier, tmp_path):
    shutil.copytree(earlier.path, tmp_path / "first")
    unfinished(tmp_path / "run", init_from=tmp_path / "first", save_every_seconds=1000)
    shutil.rmtree(tmp_path / "first")
    kept = tmp_path / "run" / "initial.safetensors"
    content = bytearray(kept.read_bytes())
    content[-2] ^= 1
    kept.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"init_from\.digest"):
        quick(tmp_path / "run", init_from=tmp_path / "first")
    kept.unlink()
    with pytest.raises(NoCheckpointsError, match="first is no run folder"):
        quick(tmp_path / "run", init_from=tmp_path / "first")


# --- several seeds


def test_seeds_start_from_one_run_or_from_one_each(earlier, tmp_path):
    second = quick(tmp_path / "second", seed=3)
    how = {**QUICK, "progress": False, "seeds": [1, 2]}
    together = train_seeds(ROTARY, TASK, tmp_path / "one", init_from=earlier, **how)
    assert [run.init_from["run"] for run in together] == ["earlier"] * 2
    each = train_seeds(ROTARY, TASK, tmp_path / "each", init_from=[earlier, second], **how)
    assert [run.init_from["run"] for run in each] == ["earlier", "second"]
    alone = quick(tmp_path / "alone", seed=2, init_from=second)
    for step in (0, 24):
        for name, weight in weights_of(each[1], step).items():
            torch.testing.assert_close(weight, weights_of(alone, step)[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="init_from has 1 runs for 2 seeds"):
        train_seeds(ROTARY, TASK, tmp_path / "wrong", init_from=[earlier], **how)


# --- sweeps


TRAINING = TrainingSettings(**QUICK)


def spec(task=TASK, seed=0, **more):
    return RunSpec(ROTARY, task, replace(TRAINING, **more.pop("training", {})), seed, **more)


def test_names_of_runs_without_a_start_are_what_they_were():
    # Made by the version before runs could start from another.
    run = RunSpec(
        SmallModelConfig(1, 16, 2), LinearMap(state_size=4, sparsity=2, seed=0), TrainingSettings(steps=24), 3
    )
    assert run.name == "LinearMap-state_size=4-sparsity=2-attention-1x16x2-seed=3-1bd8bc66c2"
    plus = RunSpec(SmallModelConfig.transformer_pp(2, 16, 2), Addition(bits=4), TrainingSettings(steps=24), 3)
    assert plus.name == "Addition-bits=4-attention-2x16x2-seed=3-e2a6db4cee"


def test_the_name_tells_where_a_run_starts():
    drawn = spec(OTHER)
    runs = [
        spec(OTHER, init_from=parent, carry=carry)
        for parent in (spec(), spec(seed=1), spec(training={"steps": 25}))
        for carry in ("all but embeddings",)
    ]
    runs.append(spec(init_from=spec()))
    runs.append(spec(init_from=spec(), carry="all but embeddings"))
    assert len({run.name for run in [drawn, *runs]}) == 6
    assert all("-from=LinearMap-" in run.name for run in runs)
    assert runs[0].settings["init_from"] == spec().name
    assert drawn.settings.keys() == {"config", "task", "training", "seed"}


def test_a_run_that_would_not_fit_is_refused_when_it_is_described():
    with pytest.raises(ModelMismatchError, match='carry="all but embeddings"'):
        spec(OTHER, init_from=spec())
    with pytest.raises(ArgumentError, match="goes with init_from"):
        spec(carry="all but embeddings")


def test_a_sweep_trains_what_its_runs_start_from_first_and_once(tmp_path):
    grandparent = spec()
    parent = spec(OTHER, 1, init_from=grandparent, carry="all but embeddings")
    children = [spec(OTHER, seed, init_from=parent, training={"steps": 10}) for seed in (2, 3)]
    result = run_sweep(children, tmp_path / "sweep", workers=0, progress=False)
    assert result.table["run"].tolist() == [run.name for run in children]
    there = {path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()}
    assert there == {run.name for run in [grandparent, parent, *children]}
    manifest = tmp_path / "sweep" / parent.name / "manifest.json"
    assert json.loads(manifest.read_text())["init_from"]["run"] == grandparent.name
    written = manifest.stat().st_mtime_ns
    run_sweep([*children, spec(OTHER, 4, init_from=parent)], tmp_path / "sweep", workers=0, progress=False)
    assert manifest.stat().st_mtime_ns == written

    by_hand = quick(tmp_path / grandparent.name)
    by_hand = quick(tmp_path / parent.name, task=OTHER, seed=1, init_from=by_hand, carry="all but embeddings")
    by_hand = quick(tmp_path / "child", task=OTHER, seed=2, init_from=by_hand, steps=10)
    assert same_runs(by_hand.path, tmp_path / "sweep" / children[0].name)


def test_a_run_whose_start_fails_is_told_of(tmp_path):
    lost = spec(training={"learning_rate": 1e30, "clip": None})
    result = run_sweep([spec(seed=1), spec(seed=1, init_from=lost)], tmp_path, workers=0, progress=False)
    assert result.table["status"].tolist()[1] == "failed"
    (said,) = result.failures.values()
    assert lost.name in said
    assert "has diverged" in said


def test_the_table_tells_where_runs_start(tmp_path):
    runs = [
        spec(seed=0),
        spec(seed=0, init_from=spec(OTHER, 5), carry="all but embeddings"),
        spec(seed=0, init_from=spec(OTHER, 6, training={"steps": 10}), carry="all but embeddings"),
        spec(seed=1, init_from=spec(OTHER, 7, training={"steps": 10}), carry="all but embeddings"),
    ]
    result = run_sweep(runs, tmp_path, workers=0, progress=False)
    assert result.varying == ("init_from", "carry", "init_from_steps")
    assert result.table["init_from"].tolist() == ["none", *["CellularAutomaton"] * 3]
    assert result.table["carry"].tolist() == ["none", *["all but embeddings"] * 3]
    assert result.table["init_from_steps"].tolist()[1:] == [24, 10, 10]
    assert result.summary["n_seeds"].tolist() == [1, 1, 2]
