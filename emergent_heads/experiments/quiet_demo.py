"""The second part of the demo: what a model learns before its loss moves, and whether it needs it afterwards."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from emergent_heads.experiments.recipes import ALGORITHMS, ROWS, checkpoint_steps
from emergent_heads.plots.figure import save_figure
from emergent_heads.storage import check_writable

if TYPE_CHECKING:
    from emergent_heads.analysis.ablation import Ablation
    from emergent_heads.analysis.quiet import QuietFeatures

BITS = 8
STEPS = 400
FEATURES = ("carry", "first_operand")


def run_quiet_demo(out: Path | str, *, steps: int = STEPS) -> Iterator[str]:
    """Trains a small model to add, probes its checkpoints, ablates what they found, and tells what comes out.

    Args:
        out: folder for the run, tables (.csv) and figures (.png). A finished training in it is used again.
        steps: of training.

    Raises:
        RunFolderError: the folder holds another training.
        OutputError: the folder does not take files.
    """
    out = Path(out)
    check_writable(out / "features.csv")
    from emergent_heads.analysis.ablation import ablate_features
    from emergent_heads.analysis.probes import probe_series
    from emergent_heads.analysis.quiet import classify_features
    from emergent_heads.models.small import SmallModelConfig
    from emergent_heads.tasks import Addition
    from emergent_heads.training.loop import train

    task = Addition(BITS)
    recipe = dict(ALGORITHMS["small"])
    shape = {name: recipe.pop(name) for name in list(recipe) if name in SmallModelConfig.__dataclass_fields__}
    config = SmallModelConfig(**shape)
    example = task.text(task.solve("01100000+11000000")[0])
    yield (
        f"Training a transformer of two layers to add numbers of {BITS} bits, lowest bit first: {example} is "
        "6 + 3 = 9."
    )
    run = train(
        config,
        task,
        out / "run",
        steps=steps,
        tokens_per_batch=ROWS * task.length,
        evaluate_every=max(1, steps // 50),
        checkpoints=checkpoint_steps(steps, ratio=1.3),
        **recipe,
    )
    probes = probe_series(run.series, task, FEATURES, path=out / "probes", n_train=2000)
    features = classify_features(probes, run.metrics)
    features.save(out / "features.csv")
    save_figure(features.plot(), out / "features.png")
    yield f"\n{features!r}"
    # After the last block only the unembedding reads: what later positions take from a feature, they take below.
    effect = ablate_features(run.series.last, task, probes.last.at_layers([0]), how="leace")
    effect.save(out / "ablation.csv")
    save_figure(effect.plot(), out / "ablation.png")
    yield f"\n{effect!r}"
    yield "\n" + "\n".join(_sentences(features, effect))
    yield f"\nTables and figures are in {out}/; begin with {out / 'features.png'} and {out / 'ablation.png'}."


def _sentences(features: "QuietFeatures", effect: "Ablation") -> Iterator[str]:
    """What came out, in words."""
    from emergent_heads.analysis.ablation import CONTROLS

    task = features.transition
    found = {row["feature"]: row for row in features.table.to_dict("records")}
    kept = effect.table.pivot(index="feature", columns="edit", values="exact_match")
    edits = [edit for edit in CONTROLS if edit in kept]
    if task.step is None:
        yield "The loss never left its plateau; try more steps."
    for name, of_feature in found.items():
        if task.step is not None and of_feature["emergence_step"] == of_feature["emergence_step"]:
            yield (
                f"{name}: its probe is half-way from baseline to best at step {of_feature['emergence_step']:.0f}, "
                f"the loss half-way from plateau to floor at step {task.step:.0f}; when the loss begins to fall, the "
                f"probe has {of_feature['share_removed_at_start']:.0%} of its baseline's loss removed."
            )
        row = kept.loc[name].to_dict()
        controls = ", ".join(f"{edit.replace('_', ' ')} {row[edit]:.2f}" for edit in edits)
        yield (
            f"{name}: erased after the first block (LEACE), exact match goes from {row['none']:.2f} to "
            f"{row['feature']:.2f}; controls: {controls}."
        )
