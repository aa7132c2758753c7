"""Every architecture of the table in docs/architectures.md is what the table says, and its weights can be swapped."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import (
    COLUMNS,
    ENDS,
    EXACT,
    KINDS,
    LENGTHS,
    MEASURED_HERE,
    PLAIN,
    TOKENS,
    check_patches,
    checkpoints,
    editing_softmax,
    later_model,
    outcome,
    read_page,
    truth,
)
from tiny_models import NAMES, VOCABULARY, bridge, config_of, tiny
from torch.nn import functional
from transformers import AttentionInterface
from transformers.models.gpt_neox import modeling_gpt_neox

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.checkpoints.kinds import as_kind
from emergent_heads.checkpoints.weights import Resident, load_model, named_state
from emergent_heads.models.own_attention import Products

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
TABLE, _ = read_page(PAGE.read_text())
RANKED = [name for name in NAMES if TABLE[name][PLAIN] == EXACT]
ONE_OF_EACH_TYPE = list({type(config_of(name)): name for name in reversed(NAMES)}.values())
OWN_ATTENTION = ("GPTNeoFor", "BloomFor", "FalconFor", "MptFor", "XGLMFor")


def test_the_table_has_every_architecture():
    assert list(TABLE) == list(NAMES)
    assert all(list(row) == list(COLUMNS) and all(row.values()) for row in TABLE.values())
    assert len(RANKED) > 40


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_is_measured(name):
    measured = {column: outcome(name, KINDS[column]) for column in MEASURED_HERE}
    assert measured == {column: TABLE[name][column] for column in MEASURED_HERE}


@pytest.mark.parametrize("name", RANKED)
def test_plain_models_are_run_the_short_way_and_their_own_way_only_where_needed(name):
    model = later_model(name)
    assert model.engine.uses_shortcuts
    assert model.runs_own_attention == type(model._model).__name__.startswith(OWN_ATTENTION)


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_swapped_weights_are_those_of_a_fresh_load(name):
    folders = [checkpoints(name).source.folder(step) for step in (0, 1)]
    resident = Resident(folders[0])
    fresh = [named_state(load_model(folder)) for folder in folders]
    assert all(not torch.equal(fresh[0][key], fresh[1][key]) for key, _ in resident.model.named_parameters())
    for step in (1, 0):
        resident.fill(folders[step])
        swapped = named_state(resident.model)
        assert swapped.keys() == fresh[step].keys()
        for key, tensor in swapped.items():
            assert torch.equal(tensor, fresh[step][key]), key


@pytest.mark.parametrize("name", ["GPTNeo", "Falcon grouped", "Bloom", "Mixtral", "DeepSeek-V3"])
def test_handles_of_a_series_rank_as_the_judge_does(name):
    """Through one resident model, whose way to its patterns was found with the weights of the other step."""
    series, expected = checkpoints(name), truth(name)
    task = eh.tasks.from_tokens(TOKENS, expected.targets, LENGTHS)
    series.unload()
    ranking = eh.rank_heads(series[0], series[1], task)
    np.testing.assert_allclose(ranking.delta_p, expected.delta_p, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["GPTNeo", "Falcon grouped", "Bloom"])
def test_a_model_that_runs_its_own_attention_is_left_as_it_was(name):
    model = tiny(name)

    def state():
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        return hooks, sum("forward" in vars(module) for module in model.modules()), model.config._attn_implementation

    before, logits = state(), model(TOKENS).logits
    hooked = eh.hooked(model)
    check_patches(hooked, later_model(name), truth(name))
    with pytest.raises(ZeroDivisionError), hooked.on_pattern(lambda *_: 1 / 0):
        hooked.run(TOKENS)
    assert state() == before
    assert torch.equal(model(TOKENS).logits, logits)


@pytest.mark.parametrize("name", ["GPTNeo", "Bloom", "Falcon ALiBi", "MPT", "GPTJ"])
def test_half_precision_is_read_and_patched_as_the_model_computes_it(name):
    model = tiny(name).to(torch.bfloat16)
    with torch.no_grad():
        own = model(TOKENS).logits[range(len(TOKENS)), ENDS].float()
    hooked = eh.hooked(model)
    torch.testing.assert_close(hooked.logits(TOKENS, ENDS), own, atol=0.1, rtol=0.05)
    patterns = hooked.patterns(TOKENS)
    assert patterns[0].dtype == torch.bfloat16
    eh.check_intervention(hooked)


@pytest.mark.parametrize("name", ["Bloom", "Falcon grouped", "GPTNeo"])
def test_pattern_gradients_are_the_slope_of_p(name):
    model, later = eh.hooked(tiny(name).double()), later_model(name).patterns(TOKENS)
    batch = eh.tasks.from_tokens(TOKENS, truth(name).targets, LENGTHS).batch(
        None, vocabulary_size=VOCABULARY, context=None
    )
    patterns, gradients = model.patterns(batch.tokens), model.pattern_gradients(batch)
    change = later[1][:, 2].double() - patterns[1][:, 2]

    def p(size):
        logits = model.logits_with_patterns(batch.tokens, ENDS, {(1, 2): patterns[1][:, 2] + size * change})
        return logits.double().softmax(-1)[range(len(TOKENS)), batch.targets]

    slope = (p(1e-2) - p(-1e-2)) / 2e-2
    torch.testing.assert_close((gradients[1][:, 2] * change).sum((-1, -2)), slope, atol=1e-5, rtol=2e-2)


def sharper(module, query, key, value, attention_mask, scaling, **kwargs):
    """An eager attention with a scale of its own, which the registered function is not told."""
    return eager_attention(module, 1.5 * query, key, value, attention_mask, scaling, **kwargs)


eager_attention = modeling_gpt_neox.eager_attention_forward


def test_attention_that_computes_something_of_its_own_is_run_as_it_is(monkeypatch):
    monkeypatch.setattr(modeling_gpt_neox, "eager_attention_forward", sharper)
    model = eh.hooked(tiny("GPTNeoX", attn_implementation="eager"))
    assert model.runs_own_attention
    with torch.no_grad():
        plain = model._model(TOKENS).logits[range(len(TOKENS)), ENDS]
    torch.testing.assert_close(model.logits(TOKENS, ENDS), plain, atol=1e-5, rtol=1e-5)
    new = later_model("GPTNeoX").patterns(TOKENS)[1][:1, 2]
    with editing_softmax(LENGTHS[0], lambda layer, old: torch.cat([old[:2], new, old[3:]]) if layer == 1 else old):
        expected = model._model(TOKENS[:1]).logits[:, -1]
    found = model.logits_with_patterns(TOKENS[:1], ENDS[:1], {(1, 2): new})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert (found - plain[:1]).abs().max() > 1e-2


def running_mean(module, query, key, value, attention_mask, **kwargs):
    """Tokens mixed without a pattern, by a function that eager attention knows nothing of."""
    counts = torch.arange(1, value.shape[2] + 1)[:, None]
    return (value.cumsum(2) / counts).transpose(1, 2).contiguous(), None


def test_a_model_that_is_another_when_its_patterns_are_looked_at_is_refused():
    AttentionInterface.register("running_mean", running_mean)
    model = tiny("GPTNeoX")
    model.set_attn_implementation("running_mean")
    with pytest.raises(errors.UnsupportedModelError, match=r'something else .*attn_implementation="eager"'):
        eh.hooked(model)
    assert model.config._attn_implementation == "running_mean"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mamba", "MambaForCausalLM has no attention heads"),
        ("LFM2", r"layer 0, 2 of this Hugging Face Lfm2ForCausalLM: these layers have no attention"),
    ],
)
def test_a_plain_model_without_patterns_is_refused_with_the_reason(name, message):
    with pytest.raises((errors.UnsupportedModelError, errors.InterventionHasNoEffect), match=message):
        eh.hooked(tiny(name))


@pytest.mark.parametrize("name", ["OPT", "GPTNeo"])
def test_a_series_whose_bridge_is_refused_names_the_way_that_works(name):
    """The way of a user: default kind, refusal, then what the message says."""
    series = checkpoints(name)
    task = eh.tasks.from_tokens(TOKENS, truth(name).targets, LENGTHS)
    with pytest.raises(errors.InterventionHasNoEffect, match=r'kind="huggingface".*`series\[step\]`'):
        eh.rank_heads(series[0].load(), series[1].load(), task)
    loaded = eh.rank_heads(series[0].load("huggingface"), series[1].load("huggingface"), task)
    handles = eh.rank_heads(series[0], series[1], task)
    np.testing.assert_allclose(loaded.delta_p, truth(name).delta_p, atol=1e-5, rtol=0)
    np.testing.assert_allclose(handles.delta_p, truth(name).delta_p, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["BioGPT", "CodeGen", "Falcon grouped", "Falcon ALiBi"])
def test_a_series_without_a_bridge_names_the_way_that_works(name):
    with pytest.raises(errors.UnsupportedModelError, match="load it as 'huggingface'"):
        checkpoints(name)[0].load()


def test_what_is_loaded_computes_what_it_was_made_from(monkeypatch):
    """A bridge whose adapter drops a scale, as that of Cohere in transformer-lens 3.9."""
    assert as_kind(tiny("GPTNeoX"), "bridge", None) is not None
    monkeypatch.setattr("transformer_lens.model_bridge.sources.build_bridge_from_module", _scaled_bridge)
    with pytest.raises(errors.UnsupportedModelError, match="computes other logits than the model itself"):
        as_kind(tiny("GPTNeoX"), "bridge", None)


def _scaled_bridge(model, *_args, **_kwargs):
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.01)
    return bridge(model)


def test_contexts_are_those_of_the_config():
    assert eh.hooked(tiny("MPT")).context == 64
    assert eh.hooked(tiny("Bloom")).context is None
    assert eh.hooked(tiny("GPTNeo")).context == 64
    assert eh.hooked(tiny("GPTNeo")).vocabulary_size == VOCABULARY


FUSED = {
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": torch.ones(5, 5).tril(1).bool()},
    "added mask": {"attn_mask": torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(1))},
    "scale": {"is_causal": True, "scale": 0.7},
    "groups": {"is_causal": True, "enable_gqa": True},
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_attention_is_done_in_steps_that_give_the_same(case):
    generator = torch.Generator().manual_seed(0)
    groups = 2 if case == "groups" else 4
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key, value = (torch.randn(2, groups, 5, 8, generator=generator) for _ in range(2))
    expected = functional.scaled_dot_product_attention(query, key, value, **FUSED[case])
    seen = []
    with Products(4, lambda *pair: seen.append(pair)):
        found = functional.scaled_dot_product_attention(query, key, value, **FUSED[case])
    torch.testing.assert_close(found, expected)
    ((pattern, values),) = seen
    torch.testing.assert_close(pattern @ values, expected)


def test_only_products_of_patterns_are_handed_over():
    x = torch.randn(2, 4, 5, 5)
    seen = []
    with Products(4, lambda pattern, _values: seen.append(pattern)):
        x @ x  # before any softmax
        pattern = torch.softmax(x, -1)
        x[..., :3, :] @ x  # of another shape
        (pattern.flatten(0, 1).bfloat16()) @ x.flatten(0, 1).bfloat16()
        pattern @ x  # the second one
    assert [each.shape for each in seen] == [(2, 4, 5, 5)]
