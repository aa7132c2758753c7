"""Figures of made-up data as it comes in use, extremes included, and what can be checked of any figure.

To look at them: `python tests/figures.py FOLDER [PART OF A NAME ...]`.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from emergent_heads.experiments import demo as experiments_demo
from emergent_heads.plots import ablation as ablation_plots
from emergent_heads.plots import emergence as emergence_plots
from emergent_heads.plots import frontier as frontier_plots
from emergent_heads.plots import heads as head_plots
from emergent_heads.plots import probes as probe_plots
from emergent_heads.plots import quiet as quiet_plots
from emergent_heads.plots import sae as sae_plots
from emergent_heads.plots import sweeps as sweep_plots
from emergent_heads.plots import training as training_plots
from emergent_heads.plots import verification as verification_plots
from emergent_heads.plots.look import style

PYTHIA = [0, *(2**power for power in range(10)), *range(1000, 144_000, 1000)]
FEATURES = [f"{name}_{place}" for name in ("carry", "partial_sum", "digit", "is_even") for place in range(6)]
FIGURES: dict[str, Callable[[], object]] = {}


def case(name, **arguments):
    """Registers a maker of figures under a name."""

    def register(make):
        FIGURES[name] = lambda: make(**arguments)
        return make

    return register


def rng(seed=0):
    return np.random.default_rng(seed)


def rising(steps, middle, width=0.5):
    return 1 / (1 + np.exp(-(np.log(np.array(steps) + 1.0) - np.log(middle)) / width))


# ---- emergence ----


@case("emergence curve, bisected", steps=[0, 64, 512, 1000, 3000, 4000, 9000, 143_000], pre=3000, post=4000)
@case("emergence curve, scanned", steps=PYTHIA, pre=5000, post=6000)
@case("emergence curve, one point", steps=[0], pre=None, post=None)
@case("emergence curve, narrow", steps=[1000, 1100, 1200, 1300], pre=1100, post=1200)
@case("emergence curve, long name", steps=PYTHIA[::9], pre=5000, post=6000, task="the capital of a country " * 4)
@case("emergence curve, not finite", steps=PYTHIA[::9], pre=None, post=None, missing=True)
def emergence_curve(steps, pre, post, task="string_repetition", missing=False):
    share = rising(steps, 5500)
    p = 0.8 * share
    if missing:
        p = np.full_like(p, np.nan)
    table = pd.DataFrame({"step": steps, "share_matched": share, "share_low": (share - 0.15).clip(0)})
    table = table.assign(share_high=(share + 0.15).clip(0, 1), p_target=p, p_low=p - 0.05, p_high=p + 0.05)
    return emergence_plots.emergence_curve(table, task=task, threshold=0.5, pre=pre, post=post)


@case("emergence curve, scores", sign=1)
@case("emergence curve, negative scores", sign=-1)
def score_curve(sign):
    steps = PYTHIA[::5]
    table = pd.DataFrame({"step": steps, "score": sign * (0.3 + 0.4 * rising(steps, 20_000))})
    return emergence_plots.emergence_curve(
        table, task="ARC-Easy accuracy (0-shot)", threshold=0.4 * sign, pre=20_000, post=25_000
    )


@case("scatter, paper", sizes=["70m", "160m", "410m", "1b", "1.4b"], n_tasks=3, n_seeds=10)
@case("scatter, one series", sizes=["160m"], n_tasks=1, n_seeds=1)
@case("scatter, one size", sizes=["160m"], n_tasks=2, n_seeds=40)
@case("scatter, no sizes", sizes=[None], n_tasks=1, n_seeds=24)
@case("scatter, never", sizes=["70m", "1b"], n_tasks=2, n_seeds=4, never=True)
@case("scatter, many tasks", sizes=["70m", "160m", "410m"], n_tasks=5, n_seeds=5)
def emergence_scatter(sizes, n_tasks, n_seeds, never=False):
    rows = []
    tasks = ["in_context_repetition", "string_repetition", "indirect_object identification of " * 2]
    for task, (index, size), seed in itertools.product(range(n_tasks), enumerate(sizes), range(n_seeds)):
        steps = float(rng(100 * task + 10 * index + seed).lognormal(9 - 0.4 * index, 0.5)) if not never else 143_000.0
        censored = never or steps > 60_000
        status = "never" if censored else ("from the start" if seed == 3 else "emerged")
        rows.append(
            {
                "series": f"pythia-{size or 'of-our-own'}-deduped-seed{seed}",
                "size": size,
                "task": tasks[task % 3] + f" {task}" * (task > 2),
                "steps_to_emergence": 143_000.0 if censored else steps,
                "censored": censored,
                "persistent": None if censored else seed != 1,
                "status": status,
                "last_step": 143_000,
            }
        )
    table = pd.DataFrame(rows)
    groups = table.groupby(["size", "task"], sort=False, dropna=False)["steps_to_emergence"]
    mean = groups.mean().rename("restricted_mean_step").reset_index()
    spread = groups.std().to_numpy() / 2
    low, high = mean["restricted_mean_step"] - spread, mean["restricted_mean_step"] + spread
    return emergence_plots.emergence_scatter(table, mean.assign(restricted_mean_low=low, restricted_mean_high=high))


@case("evaluation, 32 prompts", n=32)
@case("evaluation, one prompt", n=1)
@case("evaluation, 1000 prompts", n=1000)
def evaluation(n):
    p = rng().beta(0.6, 0.8, n)
    return emergence_plots.evaluation(
        pd.DataFrame({"p_target": p, "matched": p + rng(1).normal(0, 0.1, n) > 0.4}), mean=p.mean()
    )


# ---- heads ----


@case("head map, 12 x 12", layers=12, heads=12)
@case("head map, 3 x 4", layers=3, heads=4)
@case("head map, one head", layers=1, heads=1)
@case("head map, 48 x 32", layers=48, heads=32)
@case("head map, 36 x 40", layers=36, heads=40)
@case("head map, 2 x 64", layers=2, heads=64)
@case("head map, 64 x 2", layers=64, heads=2)
@case("head map, negative only", layers=6, heads=8, sign=-1)
@case("head map, screened", layers=12, heads=12, run=40)
@case("head map, nothing happens", layers=4, heads=4, scale=0.0)
@case("head map, tiny", layers=4, heads=4, scale=1e-5)
def head_map(layers, heads, scale=0.2, sign=None, run=None):
    values = scale * rng().standard_t(1.5, (layers, heads)).clip(-4, 4) / 4
    if sign is not None:
        values = sign * np.abs(values)
    if run is not None:
        values[rng(1).permuted(np.arange(values.size)).reshape(values.shape) >= run] = np.nan
    return head_plots.head_map(values)


IOI = [
    "When",
    " Mary",
    " and",
    " John",
    " went",
    " to",
    " the",
    " store",
    ",",
    " John",
    " gave",
    " a",
    " drink",
    " to",
]
ODD = ["$", "a$b$c", "_x^2", "\n", "\t", " ", "", "中文", "🙂", "<b>", "\\frac", "a" * 40, "ÄÖ", "%", "&", "#"]


@case("patterns, indirect object", tokens=IOI, n_heads=4)
@case("patterns, odd tokens", tokens=ODD, n_heads=2)
@case("patterns, one token", tokens=["A"], n_heads=1)
@case("patterns, 32 long tokens", tokens=[f"antidisestablishment{index}" for index in range(32)], n_heads=1)
@case("patterns, 300 tokens", tokens=["x"] * 300, n_heads=3)
@case("patterns, 8 heads", tokens=IOI, n_heads=8)
def pattern_pairs(tokens, n_heads):
    n = len(tokens)

    def pattern(seed):
        values = np.tril(np.exp(2 * rng(seed).normal(size=(n, n))))
        return values / values.sum(1, keepdims=True)

    pairs = [(f"L{9 + head}H{head}  Δp +0.1{head}2", pattern(head), pattern(20 + head)) for head in range(n_heads)]
    return head_plots.pattern_pairs(pairs, tokens)


@case("recovery, 12 x 12", ks=[1, 2, 4, 8, 16, 144], greedy=True)
@case("recovery, one k", ks=[1, 4], greedy=False)
@case("recovery, many ks", ks=[*range(1, 17), 32, 64, 128, 256, 512, 1440], greedy=True)
@case("recovery, all only", ks=[8], greedy=False)
@case("recovery, no gap", ks=[1, 2, 4, 12], greedy=False, missing=True)
@case("recovery, far below 0", ks=[1, 2, 4, 12], greedy=True, scale=-40.0)
def recovery(ks, greedy, missing=False, scale=1.0):
    rows = []
    for k, name in itertools.product(ks, ("ranked", "greedy", "random")):
        if (name == "greedy" and not greedy) or (name != "ranked" and k == ks[-1]):
            continue
        value = scale * {"ranked": 1 - np.exp(-k / 3), "greedy": 1 - np.exp(-k / 2), "random": 0.02 * k}[name]
        value = np.nan if missing else value
        spread = 0.1 * abs(scale)
        rows.append(
            {"k": k, "heads": name, "recovered_gap": value, "recovered_low": value - spread}
            | {"recovered_high": value + spread}
        )
    return head_plots.recovery(pd.DataFrame(rows))


@case("trajectories, 4 heads", n_heads=4, steps=PYTHIA)
@case("trajectories, 24 heads", n_heads=24, steps=PYTHIA[::6])
@case("trajectories, one step", n_heads=2, steps=[512])
@case("trajectories, not finite", n_heads=2, steps=PYTHIA[::6], missing=True)
@case("trajectories, one score", n_heads=3, steps=PYTHIA[::6], score="induction")
def trajectories(n_heads, steps, missing=False, score=None):
    rows = []
    names = ("previous_token", "induction", "duplicate_token", "first_token")
    for step, head in itertools.product(steps, range(n_heads)):
        scores = {name: float(0.8 * rising([step], 800 * (1 + head))[0] * (head % 4 == place))
                  for place, name in enumerate(names)}  # fmt: skip
        if missing:
            scores |= {"induction": np.nan, "duplicate_token": np.nan}
        p = float(rising([step], 6000)[0])
        rows.append({"step": step, "layer": head // 12, "head": head % 12, **scores, "entropy_nats": 1.0})
        rows[-1] |= {"p_target": 0.7 * p, "share_matched": p}
    return head_plots.trajectories(pd.DataFrame(rows), score)


# ---- training and sweeps ----


@case("training, solved", steps=range(50, 5001, 50), solved=2100)
@case("training, 143000 steps", steps=range(1000, 143_001, 1000), solved=None)
@case("training, one row", steps=[100], solved=None)
@case("training, diverged", steps=range(50, 2001, 50), solved=None, diverged=True)
def training(steps, solved, diverged=False):
    steps = np.array(steps)
    gone = 1 / (1 + np.exp(-(steps - steps.mean()) / (0.05 * steps.max() + 1)))
    loss = 0.693 * (1 - gone) + 0.01
    if diverged:
        loss[len(loss) // 2 :] = np.nan
    metrics = pd.DataFrame({"step": steps, "train_loss_nats": loss + 0.02, "loss_nats": loss})
    metrics = metrics.assign(share_learned=gone, exact_match=gone**3)
    return training_plots.training_curve(metrics, plateau=0.693, floor=0.0, solved_step=solved)


@case("sweep, steps by sparsity", x="sparsity", values=[1, 2, 3, 4, 5], by={"attention_bias": [0.0, 5.0]})
@case("sweep, widths", x="d_model", values=[16, 32, 64, 128, 256, 512, 1024], by={})
@case(
    "sweep, named", x="mixer", values=["attention", "mamba2", "gated_delta_net", "rwkv7", "mlp_mixer", "xlstm"], by={}
)
@case("sweep, all seeds", x="runs", values=["all seeds"], by={}, n_seeds=100)
@case("sweep, one run", x="n_heads", values=[4], by={}, n_seeds=1)
@case("sweep, eight groups", x="n_heads", values=[1, 2, 4, 8],
      by={"learning_rate": [1e-4, 3e-4, 1e-3, 3e-3], "d_model": [64, 128]})  # fmt: skip
@case("sweep, twenty-four groups", x="n_heads", values=[1, 2, 4, 8],
      by={"learning_rate": [0.1 / 2**index for index in range(12)], "mixer": ["rwkv", "gated_delta_net"]})  # fmt: skip
@case("sweep, never", x="n_heads", values=[1, 2], by={}, never=True)
@case("sweep, excess loss", x="n_heads", values=[1, 2, 4, 8], by={}, y="excess_loss_nats")
def sweep(x, values, by, y="step_solved", n_seeds=5, never=False):
    rows = []
    for index, value in enumerate(values):
        for group, settings in enumerate(itertools.product(*by.values())):
            for seed in range(n_seeds):
                steps = float(rng(31 * index + 7 * group + seed).lognormal(6 + 0.5 * index, 0.4))
                censored = never or steps > 4000
                row = {x: value, **dict(zip(by, settings, strict=True)), "seed": seed, "steps": 5000}
                rows.append(
                    {**row, y: min(steps, 5000.0) if y == "step_solved" else steps / 1e4, "censored": censored}
                )
    table = pd.DataFrame(rows)
    if y != "step_solved":
        table = table.drop(columns="censored")
    means = table.groupby([*by, x], sort=False)[y].mean().rename("value").reset_index()
    means = means.assign(low=0.8 * means["value"], high=1.3 * means["value"])
    return sweep_plots.sweep(table, means, x=x, y=y, by=list(by))


@case("frontier, 8 budgets", n=8)
@case("frontier, 2 budgets", n=2)
def frontier(n):
    budgets = np.geomspace(1e11, 1e15, n)
    mean = 0.69 * (budgets / 1e11) ** -0.12 * np.where(np.arange(n) > 5, 0.01, 1.0)
    exact = np.clip(np.arange(n) / n, 0, 1)
    table = pd.DataFrame({"flops": budgets, "loss_nats": mean, "loss_nats_low": 0.9 * mean})
    table = table.assign(loss_nats_high=1.1 * mean, exact_match=exact, exact_match_low=exact, exact_match_high=exact)
    seeds = pd.concat([table[["flops", "loss_nats", "exact_match"]] * factor for factor in (0.95, 1.0, 1.05)])
    runs = pd.concat([table[["flops"]].assign(selection_loss_nats=mean * factor) for factor in np.linspace(1, 3, 12)])
    law = ((budgets[0], budgets[max(1, n // 2)]), lambda flops: 0.69 * (flops / 1e11) ** -0.12)
    spans = (budgets[n // 2], budgets[-1])
    return frontier_plots.frontier(
        runs, table, seeds, x="flops", plateau=0.693, floor=0.0, law=law, leaves_at=budgets[n // 2], fast=spans
    )


# ---- probes, quiet features, ablation ----


def probe_table(n_features, n_places, layers, steps=(0,)):
    rows = []
    for (index, feature), place, step in itertools.product(enumerate(FEATURES[:n_features]), range(n_places), steps):
        shares = [float(np.clip(rng(index + place + layer + 1).uniform(-0.2, 1), -0.2, 1)) for layer in layers]
        rows += [
            {"feature": feature, "place": place, "layer": layer, "step": step, "share_removed": share}
            | {"is_best": share == max(shares)}
            for layer, share in zip(layers, shares, strict=True)
        ]
    return pd.DataFrame(rows)


@case("probes, one feature", n_features=1, n_places=8, layers=range(-1, 4))
@case("probes, one place", n_features=3, n_places=1, layers=range(-1, 2))
@case("probes, 3 features", n_features=3, n_places=16, layers=range(-1, 4))
@case("probes, 13 features", n_features=13, n_places=8, layers=range(-1, 12))
@case("probes, 48 layers", n_features=2, n_places=64, layers=range(-1, 48))
def probe_layers(n_features, n_places, layers):
    return probe_plots.layer_maps(probe_table(n_features, n_places, layers))


@case("probe steps, 2 features", n_features=2, n_places=8, steps=range(0, 5001, 500))
@case("probe steps, one step", n_features=1, n_places=4, steps=[0])
@case("probe steps, 154 steps", n_features=3, n_places=2, steps=PYTHIA)
def probe_steps(n_features, n_places, steps):
    return probe_plots.step_maps(probe_table(n_features, n_places, range(-1, 2), steps))


def gap_curves(names, steps, n_runs, start=400):
    rows = []
    for index, name in enumerate(names):
        for run in range(n_runs):
            left = 1 - rising(steps, start * (1 + 0.3 * index) * (1 + 0.05 * run), 0.3)
            rows.append(pd.DataFrame({"feature": name, "run": run, "step": list(steps), "gap_left": left}))
    return pd.concat(rows, ignore_index=True)


@case("transition, one run", n_runs=1, x="step")
@case("transition, ten runs", n_runs=10, x="tokens")
@case("transition, none", n_runs=3, x="step", there=False)
def transition(n_runs, x, there=True):
    table = gap_curves(["loss"], range(0, 20_001, 250), n_runs, start=3000).rename(columns={"step": x})
    return quiet_plots.transition(
        table, x=x, step=3100.0 if there else None, fast_phase=(2000.0, 5200.0) if there else None
    )


@case("quiet, 3 features", n_features=3, n_runs=1)
@case("quiet, 24 features", n_features=24, n_runs=3)
@case("quiet, 7 features, 10 seeds", n_features=7, n_runs=10)
@case("quiet, none learned", n_features=2, n_runs=1, learned=False)
def quiet(n_features, n_runs, learned=True):
    steps = range(0, 20_001, 500)
    names = FEATURES[:n_features]
    verdicts = ["quiet", "loud", "undecided", "not learned"]
    table = pd.DataFrame({"feature": names, "lead_steps": [1000.0 - 400 * index for index in range(n_features)]})
    table["verdict"] = [verdicts[index % 4] if learned else "not learned" for index in range(n_features)]
    table.loc[table["verdict"] == "not learned", "lead_steps"] = np.nan
    curves, losses = gap_curves(names, steps, n_runs), gap_curves(["loss"], steps, n_runs, start=4000)
    return quiet_plots.quiet_features(table, curves, losses, transition=4100.0, fast_phase=(3000.0, 6000.0))


@case("early warning, 20 seeds", n=20, never=3)
@case("early warning, one seed", n=1, never=0)
@case("early warning, nobody warned", n=2, never=0, warned=False)
@case("early warning, narrow", n=10, never=0, width=0.01)
def early_warning(n, never, warned=True, width=0.4):
    warning = rng().lognormal(6, width, n) if warned else np.full(n, np.nan)
    there = 2 * warning * rng(1).lognormal(0, width / 2, n)
    there[n - never :] = np.nan
    status = ["there"] * (n - never) + ["never"] * never
    table = pd.DataFrame({"warning_step": warning, "transition_step": there, "transition_status": status})
    return quiet_plots.early_warning(table, correlation=0.83 if n > 2 else None)


EDITS = ["none", "feature", "random", "matched_variance", "shuffled_labels", "other_features"]


def ablation_tables(n_features, solved, steps=(0,), edits=EDITS):
    rows, controls = [], []
    for step, (index, feature), edit in itertools.product(steps, enumerate(FEATURES[:n_features]), edits):
        exact = float(rising([step], 3000)[0]) if len(steps) > 1 else 0.97
        value = exact * ((0.3 + 0.02 * index) if edit in ("feature", "transplanted") else 1) * solved
        row = {"step": step, "feature": feature, "edit": edit, "exact_match": value, "loss_nats": 0.7 - 0.5 * value}
        for stem, middle in (("exact_match", value), ("loss", row["loss_nats"])):
            row |= {f"{stem}_low": middle - 0.02, f"{stem}_high": middle + 0.02}
        rows.append(row)
        if edit not in ("none", "feature", "pre", "post"):
            noise = rng(index).normal(0, 0.02, 32)
            controls += [
                {"feature": feature, "edit": edit, "exact_match": value + each, "loss_nats": row["loss_nats"] + each}
                for each in noise
            ]
    return pd.DataFrame(rows), pd.DataFrame(controls, columns=["feature", "edit", "exact_match", "loss_nats"])


@case("ablation, one feature", n_features=1, solved=1)
@case("ablation, 10 features", n_features=10, solved=1)
@case("ablation, losses", n_features=2, solved=0)
@case("ablation, no controls", n_features=2, solved=1, edits=["none", "feature"])
@case("transplant", n_features=3, solved=1, edits=["pre", "post", "transplanted", "random", "matched_change"])
def ablation(n_features, solved, edits=EDITS):
    return ablation_plots.ablation(*ablation_tables(n_features, solved, edits=edits))


@case("ablation series, one feature", n_features=1, steps=range(0, 20_001, 1000))
@case("ablation series, 2 features", n_features=2, steps=range(0, 20_001, 1000))
@case("ablation series, 10 features", n_features=10, steps=PYTHIA[::10])
@case("ablation series, one step", n_features=1, steps=[500])
def ablation_series(n_features, steps):
    return ablation_plots.ablation_series(ablation_tables(n_features, 1, list(steps))[0])


# ---- autoencoders, verification ----

READOUTS = ("probe", "latent", "followed", "random")


@case("latents, one feature", n_features=1, n_places=8)
@case("latents, 7 features", n_features=7, n_places=16)
@case("latents, one place", n_features=2, n_places=1)
def latents(n_features, n_places):
    rows = [
        {"feature": feature, "place": place, "prior_loss": 0.69}
        | {f"{name}_loss": 0.69 * float(rng(place + index).uniform()) for index, name in enumerate(READOUTS)}
        for feature in FEATURES[:n_features]
        for place in range(n_places)
    ]
    return sae_plots.comparison(pd.DataFrame(rows))


@case("latent series, one feature", n_features=1, steps=range(0, 20_001, 1000))
@case("latent series, 7 features", n_features=7, steps=PYTHIA[::10])
@case("latent series, one step", n_features=1, steps=[500])
def latent_series(n_features, steps):
    rows, emergence = [], []
    for feature, step in itertools.product(FEATURES[:n_features], steps):
        left = {f"{name}_loss": 0.69 - 0.6 * rising([step], 2000 * (1 + index))[0]
                for index, name in enumerate(READOUTS)}  # fmt: skip
        rows.append({"feature": feature, "step": step, "prior_loss": 0.69, "baseline_loss": 0.6, **left})
    for feature, (index, name) in itertools.product(FEATURES[:n_features], enumerate(READOUTS)):
        emergence.append(
            {"feature": feature, "readout": name, "emergence_step": [2000.0, 4000.0, 6000.0, np.nan][index]}
        )
    return sae_plots.latent_series(pd.DataFrame(rows), pd.DataFrame(emergence))


@case("norms, 154 steps", steps=PYTHIA, n=50)
@case("norms, one step", steps=[1000], n=3)
@case("norms, all zero at most steps", steps=PYTHIA[::10], n=3, zero=True)
def norms(steps, n, zero=False):
    rows = [
        {"step": step, "tensor": f"layer.{tensor}", "rms": 0.0 if zero and step < 100_000 else 1 + index / 200}
        | {"deviation": 9.0 if (index, tensor) == (len(steps) // 2, 1) else 0.0}
        for index, step in enumerate(steps)
        for tensor in range(n)
    ]
    return verification_plots.weight_norms(pd.DataFrame(rows), outlier_at=8.0)


@case("demo", n_series=3)
@case("demo, one series", n_series=1)
def demo(n_series):
    steps = [0, 50, 100, 150, 200, 250, 300, 350, 400, 450]
    points = [
        SimpleNamespace(
            table=pd.DataFrame({"step": steps, "share_matched": rising(steps, 200 + 40 * seed, 0.2)}),
            series=f"seed-{seed}",
            threshold=0.5,
        )
        for seed in range(n_series)
    ]
    curves = {
        point.series: SimpleNamespace(
            table=pd.DataFrame(
                {"k": [1, 1, 2, 2, 4, 4, 8], "heads": [*["ranked", "random"] * 3, "ranked"]}
                | {"recovered_gap": [0.3, 0.0, 0.6, 0.1, 0.9, 0.2, 1.0]}
            )
        )
        for point in points
    }
    return experiments_demo._overview(points, curves)


# ---- what can be checked of any figure ----


def faults(figure) -> list[str]:
    """What a reader would object to: text that is cut, text on text, panels that are too small."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    with style():
        return list(_faults(figure, canvas.get_renderer()))


def _faults(figure, renderer):
    page = figure.bbox
    texts, hidden = [], _not_drawn(figure)
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and bool(artist.get_text().strip())):
        if text.get_visible() and id(text) not in hidden:
            texts.append((text.get_text(), text.get_window_extent(renderer), text.get_rotation() % 90))
    for text, box, _ in texts:
        if box.x0 < page.x0 - 1 or box.y0 < page.y0 - 1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1:
            yield f"{text!r} is cut"
    upright = [(text, box) for text, box, rotation in texts if rotation == 0]
    boxes = np.array([box.extents for _, box in upright]).reshape(-1, 4)
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    on = ((high - low) > [-2, 1.5]).all(-1)  # beside one another, two pixels stand between them
    for i, j in zip(*np.nonzero(np.triu(on, 1)), strict=True):
        yield f"{upright[i][0]!r} on {upright[j][0]!r}"
    for axes in figure.axes:
        size = axes.get_window_extent(renderer)
        if min(size.width, size.height) < 0.05 * figure.dpi:
            yield f"a panel of {size.width:.0f} x {size.height:.0f} pixels"
    width, height = figure.get_size_inches()
    if max(width, height / 2) > 12:
        yield f"a page of {width:.1f} x {height:.1f} inches"


def _not_drawn(figure) -> set[int]:
    """Ids of texts that are not drawn: labels of ticks beyond the limits, and of axes that are off."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = axis._update_ticks() if axes.axison else []
            ticks = [tick for tick in (*axis.majorTicks, *axis.minorTicks) if tick not in drawn]
            hidden |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    return hidden


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FIGURES.items():
        if not sys.argv[2:] or any(part in name for part in sys.argv[2:]):
            figure = make()
            wrong = faults(figure)
            print(name, *figure.get_size_inches().round(1), len(wrong), wrong[:4])
            figure.savefig(folder / f"{name.replace(' ', '_').replace(',', '')}.png")
