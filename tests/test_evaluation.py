"""What is measured of one model on one task, against transformers and brute force."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel

import emergent_heads as eh
from emergent_heads.analysis.evaluation import evaluate_batch, score_logits
from emergent_heads.errors import ArgumentError, NotFiniteError, PromptError
from emergent_heads.tasks import PromptBatch, from_tokens


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def prompts(model):
    """Ten prompts of unequal length; the first half asks for the model's own greedy token, the rest for any."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(50, (3 + row % 4,), generator=generator).tolist() for row in range(10)]
    targets = [oracle(model, row).argmax().item() if i < 5 else (7 * i) % 50 for i, row in enumerate(rows)]
    return rows, targets


def task_of(prompts, **named):
    rows, targets = prompts
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]
    return from_tokens(padded, targets, lengths=[len(row) for row in rows], **named)


def oracle(model, row):
    """Log probabilities of the next token, by transformers, one prompt at a time and without padding."""
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)


def test_equals_transformers_prompt_by_prompt(model, prompts):
    rows, targets = prompts
    table = eh.evaluate(model, task_of(prompts)).table
    assert list(table.columns) == ["prompt", "matched", "p_target", "log_p_target_nats", "rank"]
    for row, target, measured in zip(rows, targets, table.itertuples(), strict=True):
        log_p = oracle(model, row)
        assert measured.log_p_target_nats == pytest.approx(log_p[target].item(), abs=1e-4)
        assert measured.p_target == pytest.approx(log_p[target].exp().item(), abs=1e-5)
        assert measured.rank == 1 + (log_p > log_p[target]).sum().item()
        assert measured.matched == (log_p.argmax().item() == target)
    assert table["matched"][:5].all()
    assert not table["matched"].all()


def test_batch_size_changes_nothing(model, prompts):
    whole = eh.evaluate(model, task_of(prompts)).table
    for batch_size in (1, 3, 10, 1000):
        part = eh.evaluate(model, task_of(prompts), batch_size=batch_size).table
        np.testing.assert_array_equal(part[["prompt", "matched", "rank"]], whole[["prompt", "matched", "rank"]])
        np.testing.assert_allclose(part["log_p_target_nats"], whole["log_p_target_nats"], atol=1e-4)


def test_summary_of_an_evaluation(model, prompts):
    evaluation = eh.evaluate(model, task_of(prompts, name="tokens"))
    matched = int(evaluation.table["matched"].sum())
    bounds = stats.binomtest(matched, 10).proportion_ci(method="exact")
    assert evaluation.share == pytest.approx((matched / 10, bounds.low, bounds.high))
    assert evaluation.p_target.value == pytest.approx(evaluation.table["p_target"].mean())
    assert evaluation.p_target.low < evaluation.p_target.value < evaluation.p_target.high
    assert f"tokens in GPT2LMHeadModel: {matched} of 10 prompts matched" in repr(evaluation)
    assert evaluation.about["task"] == "tokens"


def test_ranks_follow_a_stable_sort_so_ties_do_not_depend_on_the_device():
    logits = torch.randint(4, (200, 9), generator=torch.Generator().manual_seed(0)).float()
    targets = torch.arange(200) % 9
    table = score_logits(logits, targets)
    for row in range(200):
        order = sorted(range(9), key=lambda token, row=row: (-logits[row, token], token))
        assert table["rank"][row] == 1 + order.index(int(targets[row]))
        assert table["matched"][row] == (order[0] == targets[row])


def test_a_model_that_knows_nothing_matches_nothing():
    table = score_logits(torch.zeros(3, 100), torch.tensor([5, 50, 99]))
    assert not table["matched"].any()
    np.testing.assert_allclose(table["p_target"], 0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_normalised_in_float32(dtype):
    logits = torch.randn(5, 30_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = score_logits(logits, torch.arange(5))
    exact = logits.double().log_softmax(-1)[torch.arange(5), torch.arange(5)]
    np.testing.assert_allclose(table["log_p_target_nats"], exact, rtol=1e-5)


class Fixed:
    """A model that gives logits made beforehand; tokens hold the row of each prompt."""

    device = torch.device("cpu")

    def __init__(self, logits):
        self.table = logits
        self.rows_seen = []

    def logits(self, tokens, positions):
        self.rows_seen.append(len(tokens))
        return self.table[tokens[:, 0]]


def batch_of(n):
    zeros = torch.zeros(n, dtype=torch.long)
    return PromptBatch(torch.arange(n)[:, None], zeros, zeros, (("row",),) * n)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error_that_names_model_and_prompt(bad):
    logits = torch.zeros(7, 4)
    logits[5, 2] = bad
    with pytest.raises(NotFiniteError, match="logits of run at step 8 are NaN or infinite, first for prompt 5"):
        evaluate_batch(Fixed(logits), batch_of(7), name="run at step 8", batch_size=2)


def test_no_more_prompts_than_batch_size_are_run_at_once():
    model = Fixed(torch.zeros(7, 4))
    evaluate_batch(model, batch_of(7), name="model", batch_size=3)
    assert model.rows_seen == [3, 3, 1]


def test_batch_size_below_one_is_refused():
    with pytest.raises(ArgumentError, match="batch_size is 0"):
        evaluate_batch(Fixed(torch.zeros(1, 4)), batch_of(1), name="model", batch_size=0)


def test_prompts_that_do_not_fit_the_model_are_refused(model):
    with pytest.raises(PromptError):
        eh.evaluate(model, from_tokens([[1, 2, 77]], [3]))
    with pytest.raises(PromptError):
        eh.evaluate(model, from_tokens([[1] * 17], [3]))


def test_a_checkpoint_handle_is_named_by_series_and_step(model, prompts):
    series = eh.CheckpointSeries.from_loader([0, 10], lambda step: model, name="tiny")
    evaluation = eh.evaluate(series[10], task_of(prompts))
    assert evaluation.model == "tiny at step 10"
    np.testing.assert_array_equal(evaluation.table, eh.evaluate(model, task_of(prompts)).table)
