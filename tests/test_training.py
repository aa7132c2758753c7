"""One run: its steps against plain PyTorch, what is measured, how it ends, and what is told on the way."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from training_runs import CONFIG, QUICK, TASK

from emergent_heads.errors import ArgumentError, NoCheckpointsError
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks.arithmetic import Addition
from emergent_heads.tasks.linear_map import LinearMap
from emergent_heads.tasks.task import SequenceBatch
from emergent_heads.training.evaluation import LEARNED, evaluate
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run, open_run
from emergent_heads.training.seeds import train_seeds
from emergent_heads.training.settings import TrainingSettings

COPY = LinearMap(state_size=2, sparsity=1, seed=1)


def quick(path, config=CONFIG, task=TASK, **changes):
    return train(config, task, path, **{**QUICK, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return quick(tmp_path_factory.mktemp("run"), seed=3)


# ---- the steps ----


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_are_those_of_a_plain_loop(tmp_path, schedule, clip):
    """The oracle is PyTorch's own AdamW, schedule and loss, written out."""
    steps, warmup, rate = 12, 4, 3e-3
    run = quick(tmp_path, steps=steps, warmup_steps=warmup, learning_rate=rate, schedule=schedule, clip=clip, seed=5)
    model = SmallModel(CONFIG.for_task(TASK), 5)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=False, foreach=False)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup, eta_min=rate / 10)
    schedules = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [warmup])
    losses = []
    for step in range(steps):
        tokens = TASK.batch(16, seed=5, step=step).tokens
        loss = functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        (schedules if schedule == "cosine" or step < warmup - 1 else SimpleNamespace(step=lambda: None)).step()
    trained = run.series.last.load()
    for name, weight in model.named_parameters():
        close = (trained.get_parameter(name) - weight).abs() <= 2e-5
        if name == "blocks.0.attn.qkv.bias":
            close = close.view(3, 16)[
                [0, 2]
            ]  # a key's bias changes no pattern: Adam makes steps of its rounding errors
        assert close.all(), name
    torch.testing.assert_close(trained(tokens), model(tokens), rtol=0, atol=1e-4)
    rows = run.metrics.set_index("step")
    assert rows.loc[1, "train_loss_nats"] == pytest.approx(losses[0], abs=1e-6)
    assert rows.loc[8, "train_loss_nats"] == pytest.approx(np.mean(losses[5:8]), abs=1e-5)
    assert rows.loc[12, "train_loss_nats"] == pytest.approx(np.mean(losses[10:]), abs=1e-5)


class Masked(LinearMap):
    """Counts the loss at the last two tokens only."""

    def batch(self, n, **where):
        batch = super().batch(n, **where)
        late = torch.arange(self.length) >= self.length - 2
        return SequenceBatch(batch.tokens, late.expand(n, -1), late.expand(n, -1))


def test_tokens_that_do_not_count_teach_nothing(tmp_path):
    task = Masked(state_size=4, sparsity=2)
    run = quick(tmp_path, task=task, steps=1, warmup_steps=0, weight_decay=0.0)
    first, last = (run.series[step].load() for step in (0, 1))
    moved = (last.pos_embed.weight - first.pos_embed.weight).abs().sum(1)
    assert moved[6] > 0  # the place that predicts the last token
    assert moved[7] == 0  # the last token itself is read by nobody
    model = SmallModel(CONFIG.for_task(task), 0)
    tokens = task.batch(16, seed=0, step=0).tokens
    loss = functional.cross_entropy(model(tokens)[:, -3:-1].flatten(0, 1), tokens[:, -2:].flatten())
    assert run.metrics["train_loss_nats"].iloc[-1] == pytest.approx(loss.item(), abs=1e-6)
    assert run.positions.loc[run.positions["step"] == 1, "loss_nats"].notna().tolist() == [False] * 5 + [True] * 2


def test_data_and_weights_depend_on_the_seed_only(tmp_path, run):
    again = quick(tmp_path / "again", seed=3, evaluate_every=7, n_held_out=10, checkpoints=[24])
    torch.testing.assert_close(
        again.series.last.load().state_dict(), run.series.last.load().state_dict(), rtol=0, atol=0
    )
    other = quick(tmp_path / "other", seed=4)
    assert not torch.equal(other.series.first.load().W_E, run.series.first.load().W_E)


def test_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    quick(tmp_path, steps=2)
    assert torch.equal(torch.rand(3), expected)


def test_mixed_precision_trains_weights_that_stay_in_float32(tmp_path, run):
    mixed = quick(tmp_path, seed=3, dtype="bfloat16")
    weights = mixed.series.last.load().state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert mixed.metrics["loss_nats"].iloc[-1] == pytest.approx(run.metrics["loss_nats"].iloc[-1], abs=0.02)
    assert mixed.metrics["loss_nats"].iloc[-1] != run.metrics["loss_nats"].iloc[-1]


def test_any_mixer_trains(tmp_path):
    run = quick(tmp_path, SmallModelConfig(n_layers=2, d_model=16, n_heads=2, mixer=("attention", "mlp_mixer")))
    assert run.metrics["loss_nats"].iloc[-1] < run.metrics["loss_nats"].iloc[0]
    assert run.series.last.load().config.mixers == ("attention", "mlp_mixer")


# ---- settings ----


def test_the_learning_rate_rises_and_falls_as_said():
    constant = TrainingSettings(steps=100, learning_rate=2.0, warmup_steps=10)
    assert [constant.learning_rate_at(step) for step in (0, 4, 9, 10, 99)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0])
    cosine = TrainingSettings(steps=110, learning_rate=2.0, warmup_steps=10, schedule="cosine")
    halfway = 2.0 * (0.1 + 0.9 / 2)
    assert [cosine.learning_rate_at(step) for step in (9, 10, 60, 110)] == pytest.approx([2.0, 2.0, halfway, 0.2])
    assert TrainingSettings(steps=5, learning_rate=2.0, warmup_steps=0).learning_rate_at(0) == 2.0


def test_checkpoints_are_those_of_pythia_or_of_a_list():
    powers = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert TrainingSettings(steps=3500).checkpoint_steps() == [*powers, 1000, 2000, 3000, 3500]
    assert TrainingSettings(steps=100).checkpoint_steps() == [0, 1, 2, 4, 8, 16, 32, 64, 100]
    assert TrainingSettings(steps=100, checkpoints=[30, 7]).checkpoint_steps() == [7, 30, 100]
    assert TrainingSettings(steps=8, checkpoints=[3], evaluate_every=4).evaluation_steps() == [0, 3, 4, 8]


def test_batches_hold_a_number_of_tokens_whatever_the_length():
    settings = TrainingSettings(steps=1, tokens_per_batch=4096)
    assert [settings.batch_size(LinearMap(state_size=size)) for size in (4, 16, 64)] == [512, 128, 32]
    assert TrainingSettings(steps=1, tokens_per_batch=10).batch_size(LinearMap(state_size=64)) == 1
    assert settings.held_out_size(LinearMap(state_size=16)) == 512
    assert TrainingSettings(steps=1, n_held_out=3).held_out_size(TASK) == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 0}, "steps is 0; it must be a whole number, at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be a whole number, at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"schedule": "cosin"}, "schedule must be constant or cosine, not 'cosin'"),
        ({"dtype": "float16"}, "dtype must be float32 or bfloat16"),
        ({"checkpoints": [3, 11]}, "checkpoints names step 11; the training has the steps 0 to 10"),
        ({"checkpoints": "pythias"}, "checkpoints must be 'pythia' or a list of steps"),
        ({"solved_at": 1.5}, "solved_at is a share"),
        ({"learning_rte": 1.0}, "TrainingSettings has no setting 'learning_rte'; nearest: learning_rate"),
        ({"attention_bias": {"strenght": 3}}, "AttentionBias has no setting 'strenght'; nearest: strength"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, told):
    with pytest.raises(ArgumentError, match=told):
        TrainingSettings(**{"steps": 10, **settings})


def test_settings_survive_the_manifest(tmp_path):
    bias = AttentionBias(2.0, layers=[0], heads=[1], from_step=1, anneal_until=3)
    run = quick(tmp_path, steps=4, attention_bias=bias, checkpoints=[2], betas=(0.8, 0.9))
    expected = TrainingSettings(**{**QUICK, "steps": 4}, attention_bias=bias, checkpoints=[2], betas=(0.8, 0.9))
    assert run.settings == expected
    assert run.settings.bias == bias
    assert run.config == CONFIG.for_task(TASK)
    assert run.task_settings == {**TASK.settings(), "task": "LinearMap"}


def test_a_task_that_does_not_fit_the_model_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="sequences of 8 tokens and the model takes at most 5"):
        quick(tmp_path / "run", SmallModelConfig(n_layers=1, d_model=16, n_heads=2, context=5))
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"cannot train on the device nonsense.*leave device out for the CPU"):
        quick(tmp_path / "run", device="nonsense")
    assert not (tmp_path / "run").exists()


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    class Wrong(LinearMap):
        def batch(self, n, **where):
            batch = super().batch(n, **where)
            return SequenceBatch(batch.tokens + 1, batch.loss_mask, batch.answer_mask)

    with pytest.raises(ArgumentError, match="token id 2: this model has ids 0 to 1"):
        quick(tmp_path, task=Wrong(state_size=4, sparsity=2))


# ---- what is measured ----


def test_metrics_are_those_of_the_checkpoints(run):
    """Counted by hand, token by token, from the saved models."""
    held_out = TASK.batch(64, seed=3, split="held-out")
    for checkpoint in run.series:
        logits = checkpoint.load()(held_out.tokens[:, :-1]).double().log_softmax(-1)
        losses, right = np.zeros((64, 7)), np.zeros((64, 7), dtype=bool)
        for row in range(64):
            for place in range(7):
                token = held_out.tokens[row, place + 1]
                losses[row, place] = -logits[row, place, token]
                right[row, place] = logits[row, place].argmax() == token
        metrics = run.metrics.set_index("step").loc[checkpoint.step]
        answers = right[:, 3:]  # the second state, tokens 4 to 7
        assert metrics["loss_nats"] == pytest.approx(losses.mean(), abs=1e-5)
        assert metrics["accuracy"] == answers.mean()
        assert metrics["exact_match"] == answers.all(1).mean()
        assert metrics["share_learned"] == (answers.mean(0) >= LEARNED).mean()
        positions = run.positions[run.positions["step"] == checkpoint.step]
        assert positions["position"].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert positions["is_answer"].tolist() == [False] * 3 + [True] * 4
        np.testing.assert_allclose(positions["loss_nats"], losses.mean(0), atol=1e-5)
        np.testing.assert_array_equal(positions["accuracy"], right.mean(0))


def test_a_table_has_a_row_per_evaluation(run):
    metrics = run.metrics
    assert metrics["step"].tolist() == [0, 1, 2, 4, 5, 8, 10, 15, 16, 20, 24]
    assert metrics["tokens"].tolist() == [step * 128 for step in metrics["step"]]
    assert metrics["seconds"].is_monotonic_increasing
    assert math.isnan(metrics["train_loss_nats"].iloc[0])
    assert metrics["learning_rate"].iloc[[1, 2, -1]].tolist() == pytest.approx([6e-4, 1.2e-3, 3e-3])
    assert (metrics["attention_bias"] == 0).all()
    assert run.series.steps == (0, 1, 2, 4, 8, 16, 24)


def test_evaluation_leaves_the_model_as_it_was_and_takes_any_rows_at_a_time():
    model = SmallModel(CONFIG.for_task(TASK), 0).train()
    held_out = TASK.batch(20, seed=0, split="held-out")
    first, second = (evaluate(model, held_out, rows=rows) for rows in (20, 3))
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    assert first.metrics() == pytest.approx(second.metrics(), abs=1e-6)


def test_held_out_sequences_are_the_same_at_all_steps_and_none_of_the_training(tmp_path):
    seen = []

    class Watched(LinearMap):
        def batch(self, n, *, split="train", **where):
            seen.append((split, where.get("step", 0)))
            return super().batch(n, split=split, **where)

    quick(tmp_path, task=Watched(state_size=4, sparsity=2), steps=3)
    assert seen == [("held-out", 0), ("train", 0), ("train", 1), ("train", 2)]


def test_a_run_says_what_it_is_and_draws_its_curve(run):
    assert repr(run).startswith(f"Run({run.name}: LinearMap, attention, n_layers=1, d_model=16, seed 3, finished at")
    assert (run.status, run.seed, run.solved_step, run.manifest["steps_done"]) == ("finished", 3, None, 24)
    assert open_run(run.path) == run
    lines = {line.get_label(): line for line in run.plot().axes[0].lines}
    assert lines["floor"].get_ydata()[0] == TASK.floor
    assert lines["plateau"].get_ydata()[0] == TASK.plateau
    np.testing.assert_array_equal(lines["held-out loss"].get_ydata(), run.metrics["loss_nats"])


# ---- the attention bias ----


def test_a_bias_reaches_the_pattern_while_it_trains(tmp_path):
    patterns = {}
    tokens = TASK.batch(2, seed=0).tokens[:, :-1]

    def keep(step, model, loss):
        patterns[step] = model.run_with_cache(tokens)[1]["blocks.0.attn.hook_pattern"]

    quick(tmp_path, attention_bias=30.0, steps=3, on_step=keep)
    right = TASK.pattern()[:7, :7]
    for pattern in patterns.values():
        shares = (pattern * right).sum(-1)[:, :, right.any(-1)]
        assert (shares > 0.999).all()  # all attention of the answers' predictors is where it should be


def test_a_bias_removes_the_plateau(tmp_path):
    config, task = SmallModelConfig(n_layers=1, d_model=32, n_heads=8), LinearMap(state_size=8, sparsity=2, seed=0)
    learned = {
        bias: quick(tmp_path / str(bias), config, task, steps=60, tokens_per_batch=512, attention_bias=bias)
        for bias in (10.0, None)
    }
    assert learned[None].metrics["share_learned"].iloc[-1] == 0
    assert learned[10.0].metrics["share_learned"].iloc[-1] == 1


def test_a_bias_comes_and_goes_by_its_steps():
    bias = AttentionBias(8.0, from_step=10, anneal_until=30)
    assert [bias.strength_at(step) for step in (0, 9, 10, 15, 20, 30, 99)] == [0, 0, 8.0, 6.0, 4.0, 0, 0]
    assert [bias.changes_at(step) for step in (0, 5, 10, 20, 30, 31)] == [True, False, True, True, True, False]
    assert AttentionBias(8.0, from_step=3).strength_at(10**6) == 8.0
    assert AttentionBias.read(0.0) is None


def test_a_checkpoint_has_the_bias_it_was_trained_with(tmp_path):
    run = quick(
        tmp_path, checkpoints=[0, 2, 6, 24], attention_bias=AttentionBias(4.0, heads=[1], from_step=2, anneal_until=10)
    )
    strengths = run.metrics.set_index("step")["attention_bias"]
    assert strengths.loc[[0, 2, 6, 24]].tolist() == [0, 4.0, 2.0, 0]
    held_out = TASK.batch(64, seed=0, split="held-out")
    pattern = TASK.pattern().float()
    for checkpoint in run.series:
        model = checkpoint.load()
        bias = model.blocks[0].attn.bias
        if strengths[checkpoint.step]:
            torch.testing.assert_close(bias, torch.stack([0 * pattern, strengths[checkpoint.step] * pattern]))
        else:
            assert bias is None
        measured = evaluate(model, held_out, rows=64).loss_nats
        assert measured == pytest.approx(run.metrics.set_index("step").loc[checkpoint.step, "loss_nats"], abs=1e-6)
        hooked = run.series.hooked(checkpoint.step)
        torch.testing.assert_close(hooked.run(held_out.tokens[:4, :-1]), model(held_out.tokens[:4, :-1]))


@pytest.mark.parametrize(
    ("bias", "told"),
    [
        (AttentionBias(3.0, layers=[1]), "layer 1: this model has layers 0 to 0"),
        (AttentionBias(3.0, heads=[0, 2]), "head 2: this model has heads 0 to 1"),
    ],
)
def test_a_bias_on_what_is_not_there_is_refused(tmp_path, bias, told):
    with pytest.raises(ArgumentError, match=told):
        quick(tmp_path / "run", attention_bias=bias)
    assert not (tmp_path / "run").exists()


def test_a_bias_needs_attention_and_a_right_pattern(tmp_path):
    mixer = SmallModelConfig(n_layers=1, d_model=16, n_heads=2, mixer="mlp_mixer")
    with pytest.raises(ArgumentError, match="an attention bias needs attention"):
        quick(tmp_path / "run", mixer, attention_bias=3.0)
    assert not (tmp_path / "run").exists(), "nothing is begun that cannot be done"

    class NoPattern(LinearMap):
        def pattern(self):
            raise ArgumentError("no single right attention pattern")

    with pytest.raises(ArgumentError, match="no single right attention pattern"):
        quick(tmp_path, task=NoPattern(state_size=4, sparsity=2), attention_bias=3.0)
    with pytest.raises(ArgumentError, match="anneal_until must come after from_step 5, not at 5"):
        AttentionBias(3.0, from_step=5, anneal_until=5)
    with pytest.raises(ArgumentError, match="heads is empty"):
        AttentionBias(3.0, heads=[])


# ---- ends ----


def test_a_solved_run_stops_where_it_is_solved(tmp_path):
    settings = {"steps": 400, "tokens_per_batch": 512, "learning_rate": 1e-2, "evaluate_every": 10}
    config = SmallModelConfig(n_layers=1, d_model=16, n_heads=1)
    run = train(config, COPY, tmp_path / "stopped", stop_when_solved=True, checkpoints=[0], **settings)
    assert run.status == "solved"
    assert run.solved_step == run.manifest["steps_done"] == run.metrics["step"].iloc[-1] < 400
    last = run.metrics.iloc[-1]
    assert last["exact_match"] >= 0.99 or last["loss_nats"] <= COPY.plateau - 0.98 * (COPY.plateau - COPY.floor)
    assert (run.metrics["exact_match"].iloc[:-1] < 0.99).all()
    assert run.series.steps == (0, run.solved_step)
    assert repr(run).count(f"solved at step {run.solved_step}") == 2
    again = train(config, COPY, tmp_path / "stopped", stop_when_solved=True, checkpoints=[0], **settings)
    assert again == run
    on = train(config, COPY, tmp_path / "on", checkpoints=[0], **{**settings, "steps": run.solved_step + 3})
    assert (on.status, on.solved_step, on.manifest["steps_done"]) == ("finished", run.solved_step, run.solved_step + 3)


def test_what_counts_as_solved_can_be_set(tmp_path, monkeypatch):
    monkeypatch.setattr("emergent_heads.training.evaluation.SOLVED_EXACT_MATCH", 2.0)  # by the loss alone
    settings = {"steps": 100, "tokens_per_batch": 512, "learning_rate": 1e-2, "stop_when_solved": True}
    run = train(CONFIG, COPY, tmp_path, **settings, solved_at=0.2, evaluate_every=1)
    assert run.status == "solved"
    goal = COPY.plateau - 0.2 * (COPY.plateau - COPY.floor)
    assert run.metrics["loss_nats"].iloc[-1] <= goal < run.metrics["loss_nats"].iloc[-2]


def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(tmp_path):
    run = quick(tmp_path, learning_rate=1e38, warmup_steps=0, checkpoints=[0, 1, 12])
    assert run.status == "diverged"
    assert run.manifest["diverged_step"] == 1
    assert "diverged at step 1" in repr(run)
    assert run.series.steps == (0,)
    assert all(weight.isfinite().all() for weight in run.series.last.load().parameters())
    assert quick(tmp_path, learning_rate=1e38, warmup_steps=0, checkpoints=[0, 1, 12]) == run


def test_the_step_of_a_divergence_is_the_first_whose_loss_is_no_number(tmp_path):
    def break_at_7(step, model, loss):
        if step == 7:
            model.unembed.weight.data[0, 0] = math.nan

    run = quick(tmp_path, on_step=break_at_7, checkpoints=[0, 5, 20], evaluate_every=20, save_every_seconds=0)
    assert (run.status, run.manifest["diverged_step"], run.manifest["steps_done"]) == ("diverged", 8, 20)
    assert run.series.steps == (0, 5)
    assert math.isnan(run.metrics["loss_nats"].iloc[-1])


def test_a_run_that_is_lost_from_the_start_has_no_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(SmallModel, "initialise", lambda self, seed: self.embed.weight.data.fill_(math.inf))
    run = quick(tmp_path)
    assert (run.status, run.manifest["diverged_step"]) == ("diverged", 0)
    with pytest.raises(NoCheckpointsError, match="not trained that far"):
        _ = run.series


# ---- what is told on the way ----


def test_callbacks_get_every_step(tmp_path, run):
    steps, losses, models = [], [], set()

    def keep(step, model, loss):
        losses.append(loss.item())
        models.add(id(model))

    quick(tmp_path, seed=3, on_step=[lambda step, model, loss: steps.append(step), keep])
    assert steps == list(range(1, 25))
    assert len(models) == 1
    assert np.mean(losses[20:24]) == pytest.approx(run.metrics["train_loss_nats"].iloc[-1])


def test_progress_shows_steps_loss_and_time_left(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    quick(tmp_path / "shown", progress=False)
    assert not capfd.readouterr().err
    import emergent_heads.training.reporting as reporting

    real = reporting.tqdm
    monkeypatch.setattr(reporting, "tqdm", lambda **options: real(**{"disable": False, **options}))
    quick(tmp_path / "run")
    shown = capfd.readouterr().err
    assert "run: 100%" in shown
    assert "24/24" in shown
    assert "loss=" in shown


class FakeWandb(SimpleNamespace):
    def __init__(self):
        super().__init__(rows=[], finished=[], begun=[])

    def init(self, **about):
        self.begun.append(about)
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self, exit_code):
        self.finished.append(exit_code)


def test_wandb_gets_each_row_of_the_metrics(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = quick(tmp_path / "run", wandb="heads")
    assert fake.begun[0]["project"] == "heads"
    assert fake.begun[0]["name"] == "run"
    assert fake.begun[0]["config"]["training"]["learning_rate"] == 3e-3
    assert [step for step, _ in fake.rows] == run.metrics["step"].tolist()
    assert [values["loss_nats"] for _, values in fake.rows] == run.metrics["loss_nats"].tolist()
    assert fake.finished == [0]
    own = FakeWandb()  # a run of the caller's, who ends it too
    quick(tmp_path / "own", wandb=own)
    assert len(own.rows) == len(fake.rows)
    assert not own.finished


def test_wandb_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ArgumentError, match="pip install wandb"):
        quick(tmp_path, wandb="heads")


def test_the_manifest_says_where_the_numbers_come_from(run):
    assert run.manifest["versions"]["torch"] == torch.__version__
    assert run.manifest["device"] == "cpu"
    assert run.manifest["sequences_per_batch"] == 16
    assert (run.manifest["floor"], run.manifest["plateau"]) == (TASK.floor, TASK.plateau)
    assert isinstance(Run.open(run.path).config, SmallModelConfig)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_learns_the_same_and_goes_on_where_it_stopped(tmp_path, dtype):
    copying = LinearMap(state_size=3, sparsity=1, symbols=8, seed=1)
    settings = {"steps": 120, "tokens_per_batch": 512, "learning_rate": 1e-2, "device": "cuda", "dtype": dtype}

    def stop_at_50(step, model, loss):
        if step == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path / "run", task=copying, **settings, on_step=stop_at_50, save_every_seconds=0)
    run = quick(tmp_path / "run", task=copying, **settings)
    whole = quick(tmp_path / "whole", task=copying, **settings)
    assert run.metrics["loss_nats"].iloc[-1] == pytest.approx(whole.metrics["loss_nats"].iloc[-1], abs=1e-3)
    assert run.metrics["accuracy"].iloc[-1] > 0.9
    together = train_seeds(CONFIG, copying, tmp_path / "seeds", seeds=[0, 1], **{**QUICK, **settings})
    assert together[0].metrics["loss_nats"].iloc[-1] == pytest.approx(whole.metrics["loss_nats"].iloc[-1], abs=0.05)


@pytest.mark.parametrize("task", [LinearMap(matrix=[[1, 1], [0, 1]]), Addition(3, "paper")])
def test_a_run_knows_its_task(tmp_path, task):
    run = train(SmallModelConfig(1, 8, 2), task, tmp_path, steps=1, tokens_per_batch=32, n_held_out=4, progress=False)
    assert Run.open(run.path).task == task


def test_a_run_does_not_know_a_task_of_the_users_own(run):
    manifest = {**run.manifest, "task": {"task": "Mine"}}
    with pytest.raises(ArgumentError, match="no task of the library"):
        _ = Run(run.path, manifest).task
