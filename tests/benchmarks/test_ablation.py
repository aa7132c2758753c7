"""Taking a feature out of a model with its controls, against plain full passes with hooks in the same run, one thread.

Prints the ratio of CPU times (the machine may be shared); the numbers must be equal. `make bench` runs it.
"""

import time

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

import emergent_heads as eh
from emergent_heads.analysis.ablation import CONTROLS
from emergent_heads.analysis.ablation_controls import edits_of, plan, reference_at
from emergent_heads.analysis.probes import Probe, Probes
from emergent_heads.analysis.subspaces import probe_removal
from emergent_heads.models.hooks import editing_output

pytestmark = pytest.mark.benchmark

TASK = eh.tasks.Addition(bits=16)
ROWS, CONTROLS_PER_KIND, WANTED, REPEATS = 1000, 32, 4.0, 2
LAYERS = {  # after which block each carry is taken out
    "all after block 0": [0] * 16,
    "blocks 1 to 3 in turn": [1 + place % 3 for place in range(16)],
}


def probes_at(layers):
    generator = np.random.default_rng(0)
    weights = {
        ("carry", place, layer): Probe(
            "carry", "binary", place, layer, generator.standard_normal((1, 64)), generator.standard_normal(1)
        )
        for place, layer in enumerate(layers)
    }
    rows = [
        {"feature": "carry", "place": place, "layer": layer, "is_best": True} for place, layer in enumerate(layers)
    ]
    return Probes(pd.DataFrame(rows), weights)


def plain_pass(model, batch, edits):
    """Exact match and loss of each row; `edits` are the directions `[place, d_model]` by layer and their positions."""
    tokens = batch.tokens

    def hook(positions, directions):
        def edit(resid):
            resid = resid.clone()
            x = resid[:, positions]
            resid[:, positions] = x - (x * directions).sum(-1, keepdim=True) * directions
            return resid

        return edit

    hooks = [editing_output(model.blocks[layer], hook(*edit)) for layer, edit in edits.items()]
    for each in hooks:
        each.__enter__()
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    for each in hooks:
        each.__exit__(None, None, None)
    counts = batch.loss_mask[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    exact = ((logits.argmax(-1) == tokens[:, 1:]) | ~counts).all(1)
    return exact.numpy(), torch.where(counts, losses.view(counts.shape), 0).sum(1).numpy()


def seconds(run):
    start = time.process_time()
    found = run()
    return found, time.process_time() - start


@pytest.mark.parametrize("name", LAYERS)
def test_ablation_against_plain_passes(name, capsys):
    torch.set_num_threads(1)
    model = eh.SmallModel(eh.SmallModelConfig.transformer_pp(4, 64).for_task(TASK), seed=0).eval()
    probes = probes_at(LAYERS[name])
    eh.ablate_features(model, TASK, probes, 2, n=20, n_reference=20, kinds=("random", "shuffled_labels"))  # imports
    batch = TASK.batch(ROWS, seed=0, split="ablation")
    ours, plain = [], []
    for _ in range(REPEATS):
        found, own = seconds(
            lambda: eh.ablate_features(model, TASK, probes, CONTROLS_PER_KIND, n=ROWS, kinds=("random",))
        )
        ours.append(own)
        directions = drawn_directions(model, probes)
        expected, loop = seconds(
            lambda directions=directions: [
                plain_pass(model, batch, {}),
                *(plain_pass(model, batch, of) for of in directions),
            ]
        )
        plain.append(loop)
    exact, loss = (np.stack(of) for of in zip(*expected, strict=True))
    counts = batch.loss_mask.sum(1).double().mean().item()
    edits = ("none", "feature", "random")
    difference = np.abs(np.concatenate([found.loss["carry", edit] for edit in edits]) * counts - loss).max()
    np.testing.assert_array_equal(np.concatenate([found.exact["carry", edit] for edit in edits]), exact)
    assert difference < 1e-4  # of a row's 18 tokens together
    everything, all_kinds = seconds(lambda: eh.ablate_features(model, TASK, probes, CONTROLS_PER_KIND, n=ROWS))
    runs = 1 + sum(map(len, (everything.loss["carry", edit] for edit in everything.table["edit"][1:])))
    ratio, passes = min(plain) / min(ours), len(expected)
    with capsys.disabled():
        print(
            f"\n{name}: {passes} plain passes {min(plain):.1f} s, ablate_features {min(ours):.2f} s: {ratio:.1f} times"
            f" faster (wanted {WANTED:g}), equal to {difference:.0e}; with all kinds of controls ({runs} runs) "
            f"{all_kinds:.1f} s: {min(plain) / passes * runs / all_kinds:.1f} times"
        )


def drawn_directions(model, probes):
    """The unit directions that `ablate_features` takes out, by run: the feature's, then the random ones."""
    from emergent_heads.analysis.ablation import Measured

    feature = TASK.feature("carry")
    options = {"n": 20, "n_reference": 20, "seed": 0}
    measured = Measured.open(eh.hooked(model), TASK, probes, [feature], "probe", **options)
    sites = measured.sites[feature]
    reference = reference_at(feature, sites, measured.reference, measured.reference_resid)
    own = [
        probe_removal("projection", site.probe.weights, site.probe.intercepts, at.moments)
        for site, at in zip(sites, reference, strict=True)
    ]
    options = {"how": "projection", "kinds": CONTROLS[:1], "controls": CONTROLS_PER_KIND, "seed": 0}
    plans = plan(feature, sites, reference, own, {}, measured.reference, **options)
    positions = measured.test.values(feature).positions
    return [
        {edit.layer: (edit.positions[0], edit.read[run, :, :, 0]) for edit in edits}
        for runs in plans.runs
        for edits in [edits_of(runs.removals, sites, positions, measured.like())]
        for run in range(len(runs.names))
    ]
