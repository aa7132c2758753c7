"""Which attention heads made a capability emerge: heads ranked by delta_p.

For each head, the pattern it has in the later checkpoint (post) is put into the earlier one (pre), everything else
stays pre's own; delta_p is how much p(target) rises (Baherwani et al. 2026, arXiv 2606.25010, section 2.2). Patterns
are post-softmax attention; `rows="last"` replaces only the row of the answer's position.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.patching import Pair, check_choice, head_patterns, open_pair
from emergent_heads.analysis.pattern_scores import SCORES, pattern_scores
from emergent_heads.errors import ArgumentError
from emergent_heads.models.engine import Head
from emergent_heads.plots import heads as head_plots
from emergent_heads.randomness import numpy_generator
from emergent_heads.results import Result
from emergent_heads.statistics import bootstrap_means, share_interval
from emergent_heads.tasks.task import PromptBatch, PromptTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PatternHook = Callable[..., Tensor]
"""A hook of TransformerLens: called with a pattern `[prompt, head, dest, src]` and `hook=` its hook point."""

_RUNS_AT_A_TIME = 512


@dataclass(frozen=True, repr=False, eq=False)
class HeadRanking(Result):
    """Heads ranked by delta_p, best first.

    The columns of the table, as `.save("heads.csv")` writes them too, in this order; a row per head, all heads there:

    | column | type | what it is |
    |---|---|---|
    | `layer`, `head` | int | the head; both count from 0 |
    | `delta_p` | float | mean over prompts of p(target) with the patch less without; rows are sorted by it, NaN last |
    | `ci_low`, `ci_high` | float | its 95 % bootstrap interval over prompts; NaN for a single prompt |
    | `share_improved` | float, 0 to 1 | prompts whose p(target) rose |
    | `share_matched` | float, 0 to 1 | prompts whose target is the top token with the patch |
    | `delta_log_p_nats`, `delta_log_p_low`, `delta_log_p_high` | float | as `delta_p`, of log p(target) |
    | `first_order_estimate` | float | `method="screen"` only: the gradient's estimate of `delta_p` |
    | `run` | str | `method="screen"` only: "best", "sample", or "not run", where what is measured is NaN |
    | `entropy_nats_pre`, `entropy_nats_post` | float | entropy of the head's pattern in pre and in post |
    | `previous_token_pre`, `previous_token_post` | float, 0 to 1 | its attention to the previous token |
    | `induction_pre`, `induction_post` | float, 0 to 1 | to the token after an earlier occurrence of the same |
    | `duplicate_token_pre`, `duplicate_token_post` | float, 0 to 1 | to earlier occurrences of the same token |
    | `first_token_pre`, `first_token_post` | float, 0 to 1 | to the first token |

    The last ten are means over prompts, NaN where no prompt has a place for the score (`analysis.pattern_scores`).

    Attributes:
        table: as above.
        delta_p: `[layer, head, prompt]`, NaN for heads not run.
        example: one prompt's tokens with every head's pattern before and after, for `plot_patterns`.
        batch: the prompts in use: `.tokens` `[prompt, pos]`, padded on the right, `.positions` of the answers and
            `.targets`.
    """

    delta_p: Float[np.ndarray, "layer head prompt"]
    example: "PatternExample"
    batch: PromptBatch

    def top(self, k: int) -> list[Head]:
        """The k heads that rank highest, as `(layer, head)`."""
        ranked = self.table.dropna(subset=["delta_p"]).head(k)
        return list(zip(ranked["layer"].tolist(), ranked["head"].tolist(), strict=True))

    def to_hooks(self, post: Any, k: int) -> list[tuple[str, PatternHook]]:
        """TransformerLens hooks that put post's patterns of the top k heads into a run over the ranking's prompts.

        ```python
        hooks = heads.to_hooks(series[point.post], k=4)
        logits = model.run_with_hooks(heads.batch.tokens, fwd_hooks=hooks)
        answers = logits[range(len(heads.batch)), heads.batch.positions]
        ```

        With pre as the model this is the run that `recovery_curve` reports for `k` heads. A ranking keeps no patterns
        (those of 1440 heads on 32 prompts of 100 tokens are 1.8 GB), so they are computed here, of these heads alone:
        4 bytes x k x prompts x longest prompt squared.

        Args:
            post: whose patterns to take; as a rule the model or checkpoint that was post in the ranking.
            k: number of heads.

        Returns:
            `(name of the hook point, function)` for each layer that has one of the heads, in order of layers, for
            `run_with_hooks` and `hooks` of a `HookedTransformer` or a `TransformerBridge`. Where the ranking was
            made with `rows="last"`, only the row of each prompt's answer position is replaced. The functions refuse
            tokens of another shape. Whether a bridge uses the patterns that its hooks return is another question:
            `eh.check_intervention(model)` answers it.

        Raises:
            ArgumentError: k is below 1, or the hooks are run on other prompts.
            ModelMismatchError: post has other numbers of layers or heads than the ranking's models.
        """
        if k < 1:
            raise ArgumentError(f"k={k}: give a positive number of heads")
        rows = None if self.about["rows"] == "all" else self.batch.positions
        patterns = head_patterns(post, self.batch, self.top(k), shape=self.delta_p.shape[:2])
        return [
            (f"blocks.{layer}.attn.hook_pattern", _replacing(of_layer, rows)) for layer, of_layer in patterns.items()
        ]

    def headline(self) -> str:
        about = self.about
        return (
            f"HeadRanking: {about['pre']} -> {about['post']}, {about['n_prompts']} prompts of {about['task_name']}; "
            f"p {about['p_pre']:.3f} -> {about['p_post']:.3f}{self.caution}"
        )

    def shown(self) -> pd.DataFrame:
        columns = ["layer", "head", "delta_p", "ci_low", "ci_high", "share_improved", "previous_token_post"]
        return self.table.loc[:, [*columns, "induction_post"]]

    def plot(self) -> "Figure":
        """Map of delta_p over layers and heads."""
        return head_plots.head_map(self.delta_p.mean(axis=-1))

    def plot_patterns(self, k: int = 4) -> "Figure":
        """The top k heads' patterns on one prompt, before and after."""
        delta_p = self.delta_p.mean(axis=-1)
        pairs = [
            (
                f"L{layer}H{head}  Δp {delta_p[layer, head]:+.3f}",
                self.example.pre[layer, head],
                self.example.post[layer, head],
            )
            for layer, head in self.top(k)
        ]
        return head_plots.pattern_pairs(pairs, self.example.texts)


@dataclass(frozen=True, eq=False)
class PatternExample:
    """One prompt's tokens as strings and its patterns `[layer, head, dest, src]` in pre and in post."""

    texts: tuple[str, ...]
    pre: Float[np.ndarray, "layer head dest src"]
    post: Float[np.ndarray, "layer head dest src"]


def rank_heads(
    pre: Any,
    post: Any,
    task: PromptTask,
    *,
    rows: str = "all",
    prompts: str = "all",
    method: str = "exact",
    n_best: int = 16,
    n_sample: int = 16,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeadRanking:
    """Ranks heads by delta_p: post's pattern of one head put into pre, everything else pre's own.

    Args:
        pre, post: the checkpoint before and at the point of emergence: handles of a series, or models of any
            supported kind, mixed too.
        task: the capability.
        rows: "all" replaces whole patterns, "last" only the row of the answer's position.
        prompts: "all", or "flipped" for those that pre gets wrong and post right (the paper's situation).
        method: "exact" runs every head. "screen" estimates every head to first order with one gradient pass, then
            runs the `n_best` with the largest estimates and `n_sample` random others, and reports in
            `.about["screen"]` how well the estimates rank that sample. Estimates never stand in `delta_p`.
        n_best, n_sample: for "screen" only.
        batch_size: largest number of sequences run together; by default chosen from the model's width.
        seed: of the bootstrap and the random sample.
        progress: whether to show a bar.

    Raises:
        ModelMismatchError: the models have different shapes.
        InterventionHasNoEffect: patterns of pre cannot be edited.
        PromptError: a prompt cannot be used, or none is flipped.
    """
    check_choice("method", method, ("exact", "screen"))
    pair = open_pair(pre, post, task, prompts=prompts, rows=rows, every_head=method == "exact", batch_size=batch_size)
    about = {**pair.about, "method": method, "seed": seed}
    n_layers, n_heads = pair.model.n_layers, pair.model.n_heads
    chosen, columns = np.ones((n_layers, n_heads), bool), {}
    if method == "screen":
        estimates = _first_order_estimates(pair, rows)
        chosen, run = _screened(estimates, n_best, n_sample, seed)
        columns = {"first_order_estimate": estimates, "run": run}
    log_p, matched = _patched_answers(pair, chosen, rows, batch_size, progress)
    delta_p = np.exp(log_p) - pair.p_pre
    table = _table(delta_p, log_p - pair.pre.log_p.double().numpy(), matched, _scores(pair), seed, columns)
    if method == "screen":
        about["screen"] = _screen_report(table)
    return HeadRanking(table, delta_p, _example(pair), pair.batch, about=about)


def _patched_answers(
    pair: Pair, chosen: Bool[np.ndarray, "layer head"], rows: str, batch_size: int | None, progress: bool
) -> tuple[Float[np.ndarray, "layer head prompt"], Float[np.ndarray, "layer head prompt"]]:
    """Log p and match with each chosen head patched alone; NaN for the others."""
    log_p = np.full((*chosen.shape, len(pair.batch)), np.nan)
    matched = log_p.copy()
    # A head whose pattern is the same in both models is not run: nothing changes, so its answers are pre's.
    same = np.array([_same_heads(*patterns) for patterns in zip(pair.pre_patterns, pair.post_patterns, strict=True)])
    log_p[chosen & same] = pair.pre.log_p.double().numpy()
    matched[chosen & same] = pair.pre.matched.numpy()
    heads = np.argwhere(chosen & ~same)
    shown = notebook.bar(progress)
    with tqdm(total=len(heads) * len(pair.batch), desc="heads x prompts", leave=False, **shown) as bar:
        for prompts, trace, patterns in pair.traces():
            # Many at a time, so that they are unembedded together; not all, so that the bar moves.
            size = max(1, _RUNS_AT_A_TIME // len(trace.batch))
            for part in (heads[start : start + size] for start in range(0, len(heads), size)):
                layer, head = part.T
                at = list(zip(layer.tolist(), head.tolist(), strict=True))
                answers = pair.model.engine.patch_heads(trace, patterns, at, rows=rows, batch_size=batch_size)
                log_p[layer, head, prompts] = answers.log_p.double().numpy()
                matched[layer, head, prompts] = answers.matched.numpy()
                bar.update(answers.log_p.numel())
    return log_p, matched


def _same_heads(pre: Float[Tensor, "prompt head dest src"], post: Float[Tensor, "prompt head dest src"]) -> np.ndarray:
    return (pre == post).flatten(2).all(-1).all(0).numpy()


def _scores(pair: Pair) -> dict[str, Float[np.ndarray, "layer head"]]:
    shape = (pair.model.n_layers, pair.model.n_heads)
    pre, post = (pattern_scores(torch.cat(of, dim=1), pair.batch) for of in (pair.pre_patterns, pair.post_patterns))
    return {
        f"{name}_{time}": scores[name].nanmean(0).double().numpy().reshape(shape)
        for name in SCORES
        for time, scores in (("pre", pre), ("post", post))
    }


def _table(
    delta_p: Float[np.ndarray, "layer head prompt"],
    delta_log_p: Float[np.ndarray, "layer head prompt"],
    matched: Float[np.ndarray, "layer head prompt"],
    scores: dict[str, Float[np.ndarray, "layer head"]],
    seed: int,
    columns: dict[str, np.ndarray],
) -> pd.DataFrame:
    layer, head = np.indices(delta_p.shape[:2])
    mean, low, high = bootstrap_means(delta_p, seed=seed)
    log_mean, log_low, log_high = bootstrap_means(delta_log_p, seed=seed)
    table = pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            "delta_p": mean.ravel(),
            "ci_low": low.ravel(),
            "ci_high": high.ravel(),
            "share_improved": np.where(np.isnan(mean), np.nan, (delta_p > 0).mean(-1)).ravel(),
            "share_matched": matched.mean(-1).ravel(),
            "delta_log_p_nats": log_mean.ravel(),
            "delta_log_p_low": log_low.ravel(),
            "delta_log_p_high": log_high.ravel(),
            **{name: values.ravel() for name, values in {**columns, **scores}.items()},
        }
    )
    return table.sort_values("delta_p", ascending=False, kind="stable", ignore_index=True)


def _example(pair: Pair) -> PatternExample:
    end = int(pair.batch.positions[0]) + 1
    pre, post = (
        np.stack([patterns[0, :, :end, :end].float().numpy() for patterns in of])
        for of in (pair.pre_patterns, pair.post_patterns)
    )
    return PatternExample(pair.batch.texts[0][:end], pre, post)


def _replacing(
    new: Mapping[int, Float[Tensor, "prompt dest src"]], rows: Int[Tensor, " prompt"] | None
) -> PatternHook:
    """A hook that puts in the new patterns of one layer's heads, whole or only one row of each prompt."""
    expected = next(iter(new.values())).shape

    def put_in(pattern: Float[Tensor, "prompt head dest src"], hook: Any = None) -> Tensor:
        found = (pattern.shape[0], *pattern.shape[2:])
        if found != expected:
            raise ArgumentError(
                f"patterns of {found[0]} prompts and {found[-1]} tokens at {getattr(hook, 'name', 'a hook')}: these "
                f"hooks are for the ranking's {expected[0]} prompts of {expected[-1]} tokens (padding included); run "
                "the model on `.batch.tokens` of the ranking"
            )
        pattern = pattern.clone()
        for head, own in new.items():
            if rows is None:
                pattern[:, head] = own.to(pattern)
            else:
                prompts, at = torch.arange(len(own), device=pattern.device), rows.to(pattern.device)
                pattern[prompts, head, at] = own.to(pattern)[prompts, at]
        return pattern

    return put_in


def _first_order_estimates(pair: Pair, rows: str) -> Float[np.ndarray, "layer head"]:
    """Mean over prompts of gradient of p(target) times the change of the pattern (attribution patching)."""
    total = torch.zeros(pair.model.n_layers, pair.model.n_heads, dtype=torch.float64)
    for _, trace, patterns in pair.traces():
        batch = trace.batch
        for layer, gradient in enumerate(pair.model.pattern_gradients(batch)):
            first_order = gradient * (patterns[layer] - trace.patterns[layer])
            if rows == "last":
                first_order = first_order[torch.arange(len(batch)), :, batch.positions][:, :, None]
            total[layer] += first_order.double().sum((0, 2, 3)).cpu()
    return (total / len(pair.batch)).numpy()


def _screened(
    estimates: Float[np.ndarray, "layer head"], n_best: int, n_sample: int, seed: int
) -> tuple[Bool[np.ndarray, "layer head"], np.ndarray]:
    """Which heads to run: those with the largest estimates, and a random sample of the rest."""
    if n_best < 1 or n_sample < 0:
        raise ArgumentError(
            f"n_best={n_best}, n_sample={n_sample}: give at least one best head and no negative sample"
        )
    order = np.argsort(-estimates, axis=None, kind="stable")
    best, rest = order[:n_best], order[n_best:]
    sample = numpy_generator(seed, "screen sample").choice(rest, size=min(n_sample, len(rest)), replace=False)
    run = np.full(estimates.size, "not run", dtype=object)
    run[best], run[sample] = "best", "sample"
    run = run.reshape(estimates.shape)
    return run != "not run", run


def _screen_report(table: pd.DataFrame) -> dict[str, Any]:
    """How well the estimates rank the random sample, and how often the sample holds a head that should be on top."""
    sample, best = table.loc[table["run"] == "sample"], table.loc[table["run"] == "best"]
    report: dict[str, Any] = {"n_best": len(best), "n_sample": len(sample)}
    estimated, measured = (sample[column].to_numpy() for column in ("first_order_estimate", "delta_p"))
    if len(sample) > 2 and np.ptp(estimated) > 0 and np.ptp(measured) > 0:  # a constant has no ranks
        report["spearman_on_sample"] = float(np.corrcoef(stats.rankdata(estimated), stats.rankdata(measured))[0, 1])
    if len(sample):
        missed = int((measured > np.median(best["delta_p"].to_numpy())).sum())
        share = share_interval(missed, len(sample))
        report["share_of_sample_above_median_best"] = share._asdict()
    return report
