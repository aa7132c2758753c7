"""Rankings, recovery and trajectories, against TransformerLens' own patching, brute force and a hand-built model."""

import itertools
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from induction_model import INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD, hand_built_pair
from tiny_models import HAS_HOOKED_TRANSFORMER, MAIN, VOCABULARY, bridge, hooked_transformer, tiny
from transformer_lens import head_detector, patching

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.analysis.pattern_scores import pattern_scores
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.tasks.task import PromptBatch

PROMPTS, LENGTH = 4, 10


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def targets():
    return torch.randint(VOCABULARY, (PROMPTS,), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def task(tokens, targets):
    return eh.tasks.from_tokens(tokens, targets)


def by_head(ranking, column="delta_p"):
    return ranking.table.pivot_table(index="layer", columns="head", values=column, dropna=False).to_numpy()


def transformer_lens_delta_p(pre, post, tokens, targets):
    """TransformerLens' own loop: the other checkpoint's cache, one full forward pass per head."""

    def p_target(logits):
        return logits[:, -1].softmax(-1)[range(PROMPTS), targets].mean()

    with torch.no_grad():
        _, cache = post.run_with_cache(tokens)
        patched = patching.get_act_patch_attn_head_pattern_all_pos(pre, tokens, cache, p_target)
        return (patched - p_target(pre(tokens))).numpy()


@pytest.mark.parametrize("name", [*MAIN, "GPTNeoX sequential"])
def test_delta_p_equals_transformer_lens_on_every_kind(name, tokens, targets, task, tmp_path):
    pairs = {
        "plain": (tiny(name, 0), tiny(name, 1)),
        "bridge": (bridge(tiny(name, 0)), bridge(tiny(name, 1))),
    }
    if HAS_HOOKED_TRANSFORMER and name in ("GPTNeoX", "Llama", "Qwen3"):
        pairs["HookedTransformer"] = tuple(hooked_transformer(tiny(name, seed), tmp_path) for seed in (0, 1))
    truth = transformer_lens_delta_p(*pairs["bridge"], tokens, targets)
    assert np.abs(truth).max() > 1e-3
    for pre, post in pairs.values():
        np.testing.assert_allclose(by_head(eh.rank_heads(pre, post, task)), truth, atol=1e-5, rtol=0)
    if "HookedTransformer" in pairs:
        own = transformer_lens_delta_p(*pairs["HookedTransformer"], tokens, targets)
        np.testing.assert_allclose(own, truth, atol=1e-5, rtol=0)
    mixed = eh.rank_heads(pairs["plain"][0], pairs["bridge"][1], task)
    np.testing.assert_allclose(by_head(mixed), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAIN)
def test_own_patterns_change_nothing(name, task):
    ranking = eh.rank_heads(tiny(name), tiny(name), task)
    assert (ranking.table["delta_p"] == 0).all()
    assert (ranking.table["delta_log_p_nats"] == 0).all()


def test_own_patterns_change_nothing_when_they_are_run_too(task):
    """The shortcut for unchanged heads is not what makes their delta_p vanish."""
    model = eh.hooked(tiny("Llama"))
    batch = task.batch(None, vocabulary_size=VOCABULARY, context=None)
    trace = model.engine.trace(batch)
    heads = list(itertools.product(range(model.n_layers), range(model.n_heads)))
    patched = model.engine.patch_heads(trace, trace.patterns, heads).log_p
    torch.testing.assert_close(patched, model.answers(batch).log_p.expand_as(patched), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["GPTNeoX", "Qwen3"])
def test_all_heads_together_equal_a_pass_with_all_patterns_replaced(name, tokens, targets, task):
    pre, post = bridge(tiny(name, 0)), bridge(tiny(name, 1))
    with torch.no_grad():
        _, cache = post.run_with_cache(tokens)
        hooks = [
            (f"blocks.{layer}.attn.hook_pattern", lambda _, hook: cache[hook.name])
            for layer in range(pre.cfg.n_layers)
        ]
        logits = pre.run_with_hooks(tokens, fwd_hooks=hooks)
    truth = logits[:, -1].softmax(-1)[range(PROMPTS), targets].mean().item()
    curve = eh.recovery_curve(tiny(name, 0), tiny(name, 1), task, [(0, 0)], ks=(1,), controls=0)
    everything = curve.table.set_index("k").loc[12]
    assert everything["p"] == pytest.approx(truth, abs=1e-6)
    assert everything["n_sets"] == 1


def test_the_last_row_alone_equals_a_hook_on_that_row(tokens, targets, task):
    pre, post = bridge(tiny("Llama", 0)), bridge(tiny("Llama", 1))
    ranking = by_head(eh.rank_heads(pre, post, task, rows="last"))
    with torch.no_grad():
        _, cache = post.run_with_cache(tokens)

        def p_target(hooks):
            logits = pre.run_with_hooks(tokens, fwd_hooks=hooks)[:, -1]
            return logits.softmax(-1)[range(PROMPTS), targets].mean().item()

        for layer, head in itertools.product(range(3), range(4)):

            def last_row(pattern, hook, head=head):
                pattern = pattern.clone()
                pattern[:, head, -1] = cache[hook.name][:, head, -1]
                return pattern

            delta_p = p_target([(f"blocks.{layer}.attn.hook_pattern", last_row)]) - p_target([])
            assert ranking[layer, head] == pytest.approx(delta_p, abs=1e-5)


def test_a_hand_built_induction_model_has_its_two_known_heads_on_top():
    pre, post, vocabulary = hand_built_pair()
    task = eh.tasks.in_context_repetition(n_prompts=24, length=10, n_repeated=3, vocabulary=vocabulary, seed=1)
    assert eh.evaluate(post, task).share.value == 1
    assert eh.evaluate(pre, task).share.value < 0.5
    ranking = eh.rank_heads(pre, post, task)
    assert set(ranking.top(2)) == {PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD}
    table = ranking.table.set_index(["layer", "head"])
    assert table.loc[PREVIOUS_TOKEN_HEAD, "previous_token_post"] > 0.95
    assert table.loc[INDUCTION_HEAD, "induction_post"] > 0.95
    assert ranking.table["delta_p"][1] > 0.3 > 0.05 > ranking.table["delta_p"][2:].abs().max()
    flipped = eh.rank_heads(pre, post, task, prompts="flipped")
    assert flipped.about["n_prompts"] == round((1 - flipped_share(pre, task)) * 24)
    assert set(flipped.top(2)) == {PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD}
    curve = eh.recovery_curve(pre, post, task, ranking, ks=(1, 2), controls=40).table.set_index(["k", "heads"])
    assert curve.loc[(2, "ranked"), "recovered_gap"] == pytest.approx(1, abs=0.05)
    assert curve.loc[(2, "ranked"), "recovered_gap"] > curve.loc[(2, "random"), "recovered_gap"]


def flipped_share(pre, task):
    return eh.evaluate(pre, task).share.value


def test_ranked_numbers_do_not_depend_on_the_batch_size_nor_on_other_prompts(tokens, targets, task):
    pre, post = tiny("OLMo2", 0), tiny("OLMo2", 1)
    whole = eh.rank_heads(pre, post, task)
    np.testing.assert_allclose(eh.rank_heads(pre, post, task, batch_size=PROMPTS).delta_p, whole.delta_p, atol=1e-6)
    one = eh.rank_heads(pre, post, eh.tasks.from_tokens(tokens[2:3], targets[2:3]))
    np.testing.assert_allclose(one.delta_p[..., 0], whole.delta_p[..., 2], atol=1e-6)
    assert one.table["ci_low"].isna().all()  # one prompt has no spread


def test_prompts_of_different_lengths_are_read_at_their_own_end(tokens, targets):
    pre, post = tiny("GPT2", 0), tiny("GPT2", 1)
    lengths = [10, 4, 7, 9]
    together = eh.rank_heads(pre, post, eh.tasks.from_tokens(tokens, targets, lengths=lengths))
    for row, length in enumerate(lengths):
        alone = eh.rank_heads(pre, post, eh.tasks.from_tokens(tokens[row : row + 1, :length], targets[row : row + 1]))
        np.testing.assert_allclose(together.delta_p[..., row], alone.delta_p[..., 0], atol=1e-6)


def test_the_table_says_what_the_arrays_say(task):
    ranking = eh.rank_heads(tiny("GPTNeoX", 0), tiny("GPTNeoX", 1), task)
    table = ranking.table
    assert table["delta_p"].is_monotonic_decreasing
    for row in table.itertuples():
        values = ranking.delta_p[row.layer, row.head]
        assert row.delta_p == pytest.approx(values.mean())
        assert row.share_improved == (values > 0).mean()
        assert row.ci_low <= row.delta_p <= row.ci_high
        assert values.min() - 1e-12 <= row.ci_low <= row.ci_high <= values.max() + 1e-12
    assert ranking.top(3) == list(zip(table["layer"][:3], table["head"][:3], strict=True))
    assert ranking.about["n_prompts"] == PROMPTS
    assert "p 0.0" in repr(ranking)


def test_pattern_scores_are_transformer_lens_head_detectors_and_plain_loops(tokens):
    tokens = tokens.clone()
    tokens[:, 5:] = tokens[:, :5]  # so that every prompt repeats itself
    patterns = torch.rand(PROMPTS, 2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)).tril()
    patterns = patterns / patterns.sum(-1, keepdim=True)
    batch = PromptBatch(tokens, torch.full((PROMPTS,), LENGTH - 1), tokens[:, 0], ((),) * PROMPTS)
    scores = pattern_scores(patterns, batch)
    for prompt, head in itertools.product(range(PROMPTS), range(2)):
        row, attention = tokens[prompt], patterns[prompt, head]
        expected = _scores_by_loops(row.tolist(), attention.tolist())
        for name, value in expected.items():
            assert scores[name][prompt, head].item() == pytest.approx(value, abs=1e-6), name
        for name, detection in (
            ("previous_token", head_detector.get_previous_token_head_detection_pattern(row[None])),
            ("duplicate_token", head_detector.get_duplicate_token_head_detection_pattern(row[None])),
            ("induction", head_detector.get_induction_head_detection_pattern(row[None])),
        ):
            destinations = int((detection.sum(-1) > 0).sum())
            detected = (attention * detection).sum().item() / destinations
            assert scores[name][prompt, head].item() == pytest.approx(detected, abs=1e-6), name


def _scores_by_loops(row, attention):
    n = len(row)
    duplicates = {i: [j for j in range(i) if row[j] == row[i]] for i in range(n)}
    with_any = [i for i in range(n) if duplicates[i]]
    return {
        "previous_token": np.mean([attention[i][i - 1] for i in range(1, n)]),
        "first_token": np.mean([attention[i][0] for i in range(1, n)]),
        "duplicate_token": np.mean([sum(attention[i][j] for j in duplicates[i]) for i in with_any]),
        "induction": np.mean([sum(attention[i][j + 1] for j in duplicates[i]) for i in with_any]),
        "entropy_nats": np.mean([-sum(a * np.log(a) for a in attention[i] if a > 0) for i in range(n)]),
    }


def test_scores_leave_padding_out_and_are_missing_where_nothing_repeats():
    tokens = torch.tensor([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]])
    patterns = torch.full((2, 1, 5, 5), 0.2).tril()
    scores = pattern_scores(patterns, PromptBatch(tokens, torch.tensor([2, 4]), tokens[:, 0], ((),) * 2))
    assert scores["duplicate_token"].isnan().all()
    unpadded = PromptBatch(tokens[:1, :3], torch.tensor([2]), tokens[:1, 0], ((),))
    short = pattern_scores(patterns[:1, :, :3, :3], unpadded)
    for name, value in short.items():
        torch.testing.assert_close(scores[name][:1], value, equal_nan=True)


def test_a_screen_runs_the_best_and_a_sample_and_never_shows_an_estimate_as_delta_p(task):
    pre, post = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    exact = by_head(eh.rank_heads(pre, post, task))
    screened = eh.rank_heads(pre, post, task, method="screen", n_best=4, n_sample=5, seed=2)
    table = screened.table
    assert table["run"].value_counts().to_dict() == {"best": 4, "sample": 5, "not run": 3}
    assert table["delta_p"].notna().equals(table["run"] != "not run")
    best = table.nlargest(4, "first_order_estimate")
    assert set(best["run"]) == {"best"}
    for row in table.dropna(subset="delta_p").itertuples():
        assert row.delta_p == pytest.approx(exact[row.layer, row.head], abs=1e-6)
    assert len(screened.top(12)) == 9
    report = screened.about["screen"]
    sample = table[table["run"] == "sample"]
    assert report["spearman_on_sample"] == pytest.approx(
        sample["first_order_estimate"].corr(sample["delta_p"], method="spearman")
    )


def test_first_order_estimates_are_exact_to_first_order(tokens, targets):
    """Between a model and a barely changed copy of it, estimate and delta_p agree."""
    pre, post = tiny("Llama", 0).double(), tiny("Llama", 0).double()
    with torch.no_grad():
        for layer in post.model.layers:
            layer.self_attn.q_proj.weight += 1e-4 * torch.randn(
                layer.self_attn.q_proj.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double
            )
    task = eh.tasks.from_tokens(tokens, targets)
    for rows in ("all", "last"):
        table = eh.rank_heads(pre, post, task, method="screen", n_best=6, n_sample=6, rows=rows).table
        scale = table["delta_p"].abs().max()
        np.testing.assert_allclose(table["first_order_estimate"], table["delta_p"], atol=2e-2 * scale)


def test_recovery_of_one_head_is_its_delta_p_and_greedy_is_brute_force(task):
    pre, post = tiny("Qwen3", 0), tiny("Qwen3", 1)
    ranking = eh.rank_heads(pre, post, task)
    curve = eh.recovery_curve(pre, post, task, ranking, ks=(1, 2, 3), controls=15, order="greedy")
    rows = curve.table.set_index(["heads", "k"])
    gap = ranking.about["p_post"] - ranking.about["p_pre"]
    assert rows.loc[("ranked", 1), "recovered_gap"] == pytest.approx(ranking.table["delta_p"][0] / gap, rel=1e-5)
    chosen = []
    for _ in range(3):
        every = [head for head in itertools.product(range(3), range(4)) if head not in chosen]
        p = [
            eh.recovery_curve(pre, post, task, [*chosen, head], ks=(len(chosen) + 1,), controls=0).table["p"][0]
            for head in every
        ]
        chosen.append(every[int(np.argmax(p))])
    assert curve.greedy == tuple(chosen)
    assert rows.loc[("greedy", 3), "p"] == pytest.approx(max(p), abs=1e-6)


def test_random_sets_match_the_layers_and_the_p_value_counts_them(task, monkeypatch):
    from emergent_heads.analysis import recovery

    pre, post = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    heads = [(0, 1), (0, 3), (2, 2)]
    drawn = recovery._random_sets(frozenset(heads), 4, 200, 0)
    assert all(sorted(layer for layer, _ in chosen) == [0, 0, 2] for chosen in drawn)
    assert len(set(drawn)) == 24  # all (4 choose 2) x 4 sets come up
    counts = pd.Series(drawn).value_counts()
    assert counts.max() < 30  # none is preferred: mean 8.3
    assert recovery._random_sets(frozenset(heads), 4, 200, 0) == drawn
    assert recovery._random_sets(frozenset((1, head) for head in range(4)), 4, 200, 0) == []
    curve = eh.recovery_curve(pre, post, task, heads, ks=(3,), controls=200, seed=0).table
    p_of = {
        chosen: eh.recovery_curve(pre, post, task, list(chosen), ks=(3,), controls=0).table["p"][0]
        for chosen in set(drawn)
    }
    p = np.array([p_of[chosen] for chosen in drawn])
    ranked, random = curve.iloc[0], curve.iloc[1]
    assert random["p"] == pytest.approx(p.mean(), abs=1e-7)
    assert ranked["p_value"] == pytest.approx((1 + (p >= ranked["p"] - 1e-9).sum()) / 201)


def test_a_curve_inherits_how_the_ranking_was_made(task):
    pre, post = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    ranking = eh.rank_heads(pre, post, task, rows="last")
    curve = eh.recovery_curve(pre, post, task, ranking, ks=(1,), controls=0)
    assert curve.about["rows"] == "last"
    assert curve.table["p"][0] - ranking.about["p_pre"] == pytest.approx(ranking.table["delta_p"][0], abs=1e-6)


def test_bad_input_is_named(task, tokens, targets):
    pre, post = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    shallow = type(post)(type(post.config)(**(post.config.to_dict() | {"num_hidden_layers": 2})))
    with pytest.raises(errors.ModelMismatchError, match=r"n_layers 3 in pre, 2 in post"):
        eh.rank_heads(pre, shallow, task)
    with pytest.raises(errors.PromptError, match="none of the 4 prompts is wrong in pre and right in post"):
        eh.rank_heads(pre, pre, task, prompts="flipped")
    for wrong in ({"rows": "first"}, {"prompts": "some"}, {"method": "fast"}, {"batch_size": 0}):
        with pytest.raises(errors.ArgumentError, match=next(iter(wrong))):
            eh.rank_heads(pre, post, task, **wrong)
    with pytest.raises(errors.ArgumentError, match=r"\(3, 0\).*layers go from 0 to 2"):
        eh.recovery_curve(pre, post, task, [(3, 0)])
    with pytest.raises(errors.ArgumentError, match="twice"):
        eh.recovery_curve(pre, post, task, [(1, 0), (1, 0)])
    with pytest.raises(errors.ArgumentError, match="ks"):
        eh.recovery_curve(pre, post, task, [(1, 0)], ks=(0,))
    with pytest.raises(errors.PromptError):
        eh.rank_heads(pre, post, eh.tasks.from_tokens(tokens + 10, targets))
    with pytest.raises(errors.InterventionHasNoEffect):
        eh.rank_heads(bridge(tiny("OPT", 0)), bridge(tiny("OPT", 1)), task)


class TestHooks:
    """`to_hooks` in TransformerLens' own `run_with_hooks`, against the library's patched runs."""

    LENGTHS = (10, 4, 7, 9)

    def pair(self, kind, name, tmp_path):
        if kind == "bridge":
            return bridge(tiny(name, 0)), bridge(tiny(name, 1))
        if not HAS_HOOKED_TRANSFORMER:
            pytest.skip("transformer-lens 4 has no HookedTransformer")
        return tuple(hooked_transformer(tiny(name, seed), tmp_path) for seed in (0, 1))

    @pytest.mark.parametrize("rows", ["all", "last"])
    @pytest.mark.parametrize("name", ["GPTNeoX", "Llama", "Qwen3"])
    @pytest.mark.parametrize("kind", ["bridge", "hooked_transformer"])
    def test_a_run_with_them_is_the_patched_run(self, kind, name, rows, tokens, targets, tmp_path):
        pre, post = self.pair(kind, name, tmp_path)
        task = eh.tasks.from_tokens(tokens, targets, lengths=list(self.LENGTHS))
        heads = eh.rank_heads(pre, post, task, rows=rows)
        curve = eh.recovery_curve(pre, post, task, heads, ks=(1, 4), controls=0).table.set_index("k")
        batch = heads.batch
        assert batch.positions.tolist() == [length - 1 for length in self.LENGTHS]
        for k in (1, 4, 12):
            hooks = heads.to_hooks(post, k=k)
            layers = sorted({layer for layer, _ in heads.top(k)})
            assert [at for at, _ in hooks] == [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
            with torch.no_grad():
                logits = pre.run_with_hooks(batch.tokens, fwd_hooks=hooks)[range(PROMPTS), batch.positions]
            p = logits.softmax(-1)[range(PROMPTS), batch.targets].mean().item()
            assert p == pytest.approx(curve.loc[k, "p"], abs=1e-6)
            if rows == "all":
                post_patterns = eh.hooked(post).patterns(batch.tokens)
                patterns = {(layer, head): post_patterns[layer][:, head] for layer, head in heads.top(k)}
                truth = eh.hooked(pre).logits_with_patterns(batch.tokens, batch.positions, patterns)
                torch.testing.assert_close(logits, truth, atol=1e-4, rtol=1e-5)
        assert p != pytest.approx(heads.about["p_pre"], abs=1e-3)  # the hooks do something

    def test_post_may_be_of_another_kind_and_the_prompts_the_flipped_ones(self, tokens, targets):
        pre, post = tiny("Llama", 0), tiny("Llama", 1)
        with torch.no_grad():
            flipped = [1, 3]
            targets[flipped] = post(tokens).logits[flipped, -1].argmax(-1)
        heads = eh.rank_heads(pre, post, eh.tasks.from_tokens(tokens, targets), prompts="flipped")
        assert torch.equal(heads.batch.tokens, tokens[flipped])
        ((layer, head),) = heads.top(1)
        ((_, hook),) = heads.to_hooks(post, k=1)
        before, after = (eh.hooked(model).patterns(tokens[flipped])[layer] for model in (pre, post))
        own = before.clone()
        put_in = hook(before, hook=None)
        assert torch.equal(before, own)  # not edited in place
        assert torch.equal(put_in[:, head], after[:, head])
        others = [other for other in range(4) if other != head]
        assert torch.equal(put_in[:, others], own[:, others])

    def test_other_prompts_and_other_models_are_refused(self, task, tokens):
        heads = eh.rank_heads(tiny("GPTNeoX", 0), tiny("GPTNeoX", 1), task)
        hooks = heads.to_hooks(tiny("GPTNeoX", 1), k=2)
        for wrong in (tokens[:2], tokens[:, :5]):
            with pytest.raises(errors.ArgumentError, match=r"ranking's 4 prompts of 10 tokens.*\.batch\.tokens"):
                bridge(tiny("GPTNeoX", 0)).run_with_hooks(wrong, fwd_hooks=hooks)
        shallow = tiny("GPTNeoX")
        shallow = type(shallow)(type(shallow.config)(**(shallow.config.to_dict() | {"num_hidden_layers": 2})))
        with pytest.raises(errors.ModelMismatchError, match=r"2 layers of 4 heads.*3 layers of 4"):
            heads.to_hooks(shallow, k=2)
        with pytest.raises(errors.ArgumentError, match="k=0"):
            heads.to_hooks(tiny("GPTNeoX", 1), k=0)


MEASURED = [
    *("delta_p", "ci_low", "ci_high", "share_improved", "share_matched"),
    *("delta_log_p_nats", "delta_log_p_low", "delta_log_p_high"),
]
PATTERN_SCORES = [
    f"{score}_{time}"
    for score in ("entropy_nats", "previous_token", "induction", "duplicate_token", "first_token")
    for time in ("pre", "post")
]


@pytest.mark.parametrize("screened", [False, True])
def test_the_columns_of_a_saved_ranking_are_those_of_its_documentation(screened, task, tmp_path):
    how = {"method": "screen", "n_best": 4, "n_sample": 2} if screened else {}
    ranking = eh.rank_heads(tiny("GPTNeoX", 0), tiny("GPTNeoX", 1), task, **how)
    read = pd.read_csv(ranking.save(tmp_path / "heads.csv"))
    expected = {"layer": "i", "head": "i"} | dict.fromkeys(MEASURED, "f")
    expected |= {"first_order_estimate": "f", "run": "O"} if screened else {}
    expected |= dict.fromkeys(PATTERN_SCORES, "f")
    assert list(read) == list(expected) == list(ranking.table)
    assert {name: "O" if dtype == "str" else dtype.kind for name, dtype in read.dtypes.items()} == expected
    assert len(read) == 12
    rows = [row for row in type(ranking).__doc__.splitlines() if row.strip().startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert [name for name in documented if screened or name not in ("first_order_estimate", "run")] == list(expected)


def test_results_are_saved_with_what_made_them(task, tmp_path):
    ranking = eh.rank_heads(tiny("GPTNeoX", 0), tiny("GPTNeoX", 1), task)
    pd.testing.assert_frame_equal(pd.read_csv(ranking.save(tmp_path / "heads.csv")), ranking.table)
    assert (tmp_path / "heads.csv.about.json").read_text().count('"task"') == 1
    with pytest.raises(errors.OutputError, match=r"\.xlsx"):
        ranking.save(tmp_path / "heads.xlsx")


def test_figures_are_drawn(task, tmp_path):
    pre, post = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    ranking = eh.rank_heads(pre, post, task)
    curve = eh.recovery_curve(pre, post, task, ranking, ks=(1, 2), controls=5, order="greedy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that is missing, a layout that does not fit
        for index, figure in enumerate((ranking.plot(), ranking.plot_patterns(3), curve.plot())):
            figure.savefig(tmp_path / f"{index}.png")
    assert len(ranking.plot().axes[0].images[0].get_array()) == 3


class TestSeries:
    """On real checkpoints, of the small series in which in-context repetition emerges."""

    @pytest.fixture
    def series(self, emerging_series):
        return CheckpointSeries.from_directory(emerging_series)

    @pytest.fixture
    def repetition(self):
        return eh.tasks.in_context_repetition(n_prompts=16, length=12, n_repeated=8, vocabulary=range(20, 90))

    def test_handles_share_one_resident_model_and_rank_as_models_do(self, series, repetition):
        pre, post = series.steps[-4], series.steps[-1]
        by_handle = eh.rank_heads(series[pre], series[post], repetition)
        models = [series[step].load("huggingface") for step in (pre, post)]
        by_model = eh.rank_heads(*models, repetition)
        np.testing.assert_allclose(by_handle.delta_p, by_model.delta_p, atol=1e-6)
        assert f"step {pre}" in by_handle.about["pre"]
        assert f"step {post}" in by_handle.about["post"]
        curve = eh.recovery_curve(series[pre], series[post], repetition, by_handle, ks=(1,), controls=0)
        assert curve.about["p_post"] == pytest.approx(by_handle.about["p_post"])

    def test_trajectories_are_each_checkpoints_own_scores(self, series, repetition):
        steps = (series.steps[0], series.steps[-1])
        followed = eh.head_trajectories(series, repetition, [(0, 1), (1, 2)], steps=steps)
        assert followed.table[["step", "layer", "head"]].to_numpy().tolist() == [
            [step, *head] for step in steps for head in ((0, 1), (1, 2))
        ]
        model = eh.hooked(series[steps[1]].load("huggingface"))
        batch = repetition.batch(None, vocabulary_size=model.vocabulary_size, context=model.context)
        scores = pattern_scores(model.patterns(batch.tokens)[1], batch)
        row = followed.table.iloc[-1]
        for name, values in scores.items():
            assert row[name] == pytest.approx(values.nanmean(0)[2].item(), abs=1e-5)
        assert row["share_matched"] == eh.evaluate(model, repetition).share.value
        followed.plot()
        with pytest.raises(errors.ArgumentError, match=r"\(5, 0\)"):
            eh.head_trajectories(series, repetition, [(5, 0)], steps=steps)
        with pytest.raises(errors.UnknownStepError):
            eh.head_trajectories(series, repetition, [(0, 0)], steps=[7])
