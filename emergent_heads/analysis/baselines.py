"""What a feature's labels give away without the model: by their frequencies, and by the tokens that can be seen.

A probe has learned only what it reads beyond these.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.analysis.linear_readouts import Activations
from emergent_heads.analysis.probe_data import ProbeData, Site, Target
from emergent_heads.analysis.probe_fits import label_slices
from emergent_heads.analysis.readout_scores import losses

Baseline = Literal["prior_loss", "last_token_loss", "bag_loss"]
BAG_TOKENS = 256
"""Most different tokens that a bag counts, the most frequent ones."""
_PSEUDO_COUNTS = (1.0, 10.0, 100.0)


def token_baselines(data: ProbeData, penalties: Sequence[float]) -> dict[tuple[str, int], dict[Baseline, float]]:
    """Test losses of three predictors by `(feature, place)`.

    * `prior_loss`: the mean label of the training rows.
    * `last_token_loss`: the mean label after each token that can stand where the feature is read, drawn towards the
      prior by a few made-up counts (how many, is chosen on the validation rows). It is the best that any probe can do
      that sees this token alone.
    * `bag_loss`: a probe on the counts of the prompt's tokens so far, the counts of the answer's tokens so far, and
      the last token. In large vocabularies the 256 most frequent tokens of each are counted.

    Args:
        data: rows and labels.
        penalties: values of C to choose from on the validation rows, ascending.
    """
    found: dict[tuple[str, int], dict[Baseline, float]] = {}
    for site in data.sites:
        last = _last_tokens(data, site)
        bag = _bag_losses(data, site, last, penalties)
        for target in site.targets:
            found[target.key] = {
                "prior_loss": _prior_loss(site, target),
                "last_token_loss": _last_token_loss(site, target, last),
                "bag_loss": bag[target.key],
            }
    return found


def _prior_loss(site: Site, target: Target) -> float:
    test = target.labels[:, site.test]
    rates = target.labels[:, site.train].double().mean(1, keepdim=True)
    return _mean_loss(target, rates.expand(test.shape), test)


def _last_token_loss(site: Site, target: Target, last: Int[np.ndarray, " here"]) -> float:
    labels = target.labels[:, site.train].double().numpy()
    seen, token = np.unique(last[site.train], return_inverse=True)
    counts = np.bincount(token, minlength=len(seen) + 1)
    sums = np.stack([np.bincount(token, weights=each, minlength=len(seen) + 1) for each in labels])
    prior = labels.mean(1, keepdims=True)
    places = np.searchsorted(seen, last).clip(max=len(seen) - 1)
    column = np.where(seen[places] == last, places, len(seen))  # a token never seen gets the prior
    tables = [(sums + made_up * prior) / (counts + made_up) for made_up in _PSEUDO_COUNTS]

    def loss(table: np.ndarray, part: slice) -> float:
        return _mean_loss(target, torch.from_numpy(table[:, column[part]]), target.labels[:, part])

    return loss(min(tables, key=lambda table: loss(table, site.validation)), site.test)


def _mean_loss(target: Target, predicted: Float[Tensor, "label row"], labels: Float[Tensor, "label row"]) -> float:
    """Loss of predicted rates, or of predicted values, as a mean over the components."""
    read = predicted if target.continuous else predicted.logit()
    return float(losses(read, labels, continuous=target.continuous).mean())


def _bag_losses(
    data: ProbeData, site: Site, last: Int[np.ndarray, " here"], penalties: Sequence[float]
) -> Mapping[tuple[str, int], float]:
    bag = torch.from_numpy(_bag(data, site, last))
    activations = Activations(bag[site.train])
    found = {}
    for continuous in (False, True):
        targets = [target for target in site.targets if target.continuous == continuous]
        if not targets:
            continue
        labels = torch.cat([target.labels for target in targets])
        solve = activations.ridge if continuous else activations.logistic
        readouts = solve(labels[:, site.train], penalties)
        validation, test = (
            np.stack([losses(each(bag[part]), labels[:, part], continuous=continuous) for each in readouts])
            for part in (site.validation, site.test)
        )
        for target, part in zip(targets, label_slices(targets), strict=True):
            chosen = int(validation[:, part].mean(1).argmin())
            found[target.key] = float(test[chosen, part].mean())
    return found


def _last_tokens(data: ProbeData, site: Site) -> Int[np.ndarray, " here"]:
    """The token at which the site's labels are read."""
    return data.tokens.numpy()[site.rows, site.positions]


def _bag(data: ProbeData, site: Site, last: Int[np.ndarray, " here"]) -> Float[np.ndarray, "here column"]:
    """Counts of tokens in prompt and answer up to the site's position, and its own token as one column each."""
    tokens = data.tokens.numpy()[site.rows]
    position = np.arange(tokens.shape[1])
    visible = position <= site.positions[:, None]
    in_answer = position >= data.answer_starts[site.rows, None]
    columns = [
        _counts(tokens, visible & ~in_answer, site.train),
        _counts(tokens, visible & in_answer, site.train),
        _counts(last[:, None], np.ones((len(last), 1), dtype=bool), site.train),
    ]
    return np.concatenate(columns, axis=1)


def _counts(
    tokens: Int[np.ndarray, "here pos"], counted: np.ndarray, train: slice
) -> Float[np.ndarray, "here column"]:
    """How often each of the most frequent tokens stands in each row, where it counts."""
    seen, times = np.unique(tokens[train][counted[train]], return_counts=True)
    if not len(seen):
        return np.zeros((len(tokens), 0), dtype=np.float32)
    kept = np.sort(seen[np.argsort(-times, kind="stable")[:BAG_TOKENS]])
    row, place = np.nonzero(counted)
    values = tokens[row, place]
    column = np.searchsorted(kept, values).clip(max=len(kept) - 1)
    known = kept[column] == values
    cells = row[known] * len(kept) + column[known]
    found = np.bincount(cells, minlength=len(tokens) * len(kept)).reshape(len(tokens), len(kept))
    return found.astype(np.float32)
