"""Every kind of model gives the same numbers, against transformers' own outputs and hooks set by hand."""

import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER, MAIN, VOCABULARY, bridge, hooked_transformer, tiny
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox import modeling_gpt_neox

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.tasks.task import PromptBatch

PROMPTS, LENGTH = 3, 9


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def batch(tokens):
    return PromptBatch(tokens, torch.tensor([8, 5, 7]), torch.tensor([1, 2, 3]), ((),) * PROMPTS)


def random_patterns(like, seed=1):
    """Causal patterns whose rows sum to one."""
    generator = torch.Generator().manual_seed(seed)
    patterns = [torch.rand(pattern.shape, generator=generator).tril() for pattern in like]
    return [pattern / pattern.sum(-1, keepdim=True) for pattern in patterns]


def all_kinds(name, folder):
    kinds = {"plain": tiny(name), "bridge": bridge(tiny(name))}
    if HAS_HOOKED_TRANSFORMER and name in ("GPTNeoX", "Llama", "Qwen3"):  # what it converts without a hub
        kinds["HookedTransformer"] = hooked_transformer(tiny(name), folder)
    return kinds


@pytest.mark.parametrize("name", [*MAIN, "GPTNeoX sequential", "Gemma2", "Phi"])
def test_logits_patterns_and_residual_stream_are_those_of_transformers(name, tokens, batch, tmp_path):
    reference = tiny(name)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        truth = reference(tokens, output_attentions=True, output_hidden_states=True)
    for kind, model in all_kinds(name, tmp_path).items():
        model = eh.hooked(model)
        logits = model.logits(tokens, batch.positions)
        torch.testing.assert_close(logits, truth.logits[range(PROMPTS), batch.positions], atol=1e-4, rtol=1e-4)
        for layer, pattern in model.patterns(tokens).items():
            torch.testing.assert_close(pattern, truth.attentions[layer], atol=1e-5, rtol=1e-4, msg=f"{kind} {layer}")
        resid = model.residual(tokens, [0, 1])
        # transformers' hidden states: the embedding, then what each block but the last (normed) gives
        torch.testing.assert_close(resid, torch.stack(truth.hidden_states[1:3]), atol=1e-4, rtol=1e-4)
        some = torch.tensor([[0, 2], [5, 1], [3, 3]])
        chosen = model.residual(tokens, [1], some)
        torch.testing.assert_close(chosen[0, 1, 0], resid[1, 1, 5])


@pytest.mark.parametrize("name", [*MAIN, "GPTNeoX sequential", "Gemma2", "Phi"])
def test_shortcuts_give_what_plain_runs_give(name, tokens, batch, tmp_path):
    for model in all_kinds(name, tmp_path).values():
        model = eh.hooked(model)
        trace = model.engine.trace(batch)
        assert model.engine.uses_shortcuts, "the shortcuts should hold for a standard block"
        new = random_patterns(trace.patterns)
        untouched = model.answers(batch).log_p
        for layer in range(model.n_layers):
            heads = [(layer, head) for head in range(model.n_heads)]
            answers = model.engine.patch_heads(trace, new, heads)
            for head in range(model.n_heads):
                patched = {(layer, head): new[layer][:, head]}
                logits = model.logits_with_patterns(tokens, batch.positions, patched)
                expected = logits.log_softmax(-1)[range(PROMPTS), batch.targets]
                torch.testing.assert_close(answers.log_p[head], expected, atol=1e-5, rtol=1e-5)
                assert (expected - untouched).abs().max() > 1e-3, "the patch should change something"


@pytest.mark.parametrize("name", MAIN)
def test_sets_of_heads_and_rows_give_what_plain_runs_give(name, tokens, batch):
    model = eh.hooked(tiny(name))
    trace = model.engine.trace(batch)
    new = random_patterns(trace.patterns)
    masks = torch.rand(7, model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(2)) < 0.4
    masks[0], masks[1] = True, False
    last_row = torch.arange(LENGTH) == batch.positions[:, None]
    for rows in ("all", "last"):
        answers = model.engine.patch_sets(trace, new, masks, rows=rows, batch_size=7)
        for mask, log_p in zip(masks, answers.log_p, strict=True):
            expected = _patched_by_hand(model, tokens, batch, new, mask, last_row if rows == "last" else None)
            torch.testing.assert_close(log_p, expected, atol=1e-5, rtol=1e-5)
    alone = torch.zeros(1, model.n_layers, model.n_heads, dtype=torch.bool)
    alone[0, 1, 2] = True
    single = model.engine.patch_heads(trace, new, [(1, 2)], rows="last").log_p
    torch.testing.assert_close(
        single, model.engine.patch_sets(trace, new, alone, rows="last").log_p, atol=1e-5, rtol=1e-5
    )


def _patched_by_hand(model, tokens, batch, new, mask, row):
    """A full pass whose patterns are replaced in the attention function itself."""

    def replace(layer, pattern, _values):
        where = mask[layer][None, :, None, None]
        return torch.where(where if row is None else where & row[:, None, :, None], new[layer], pattern)

    with torch.no_grad(), model.on_pattern(replace):
        logits = model.run(tokens)[range(PROMPTS), batch.positions]
    return logits.log_softmax(-1)[range(PROMPTS), batch.targets]


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_residual_edit_equals_an_edited_block_output(name, tokens, batch):
    model = tiny(name)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(5))

    def edit(resid):
        return resid - (resid @ direction)[..., None] * direction / direction.norm() ** 2

    block = model.transformer.h[1] if name == "GPT2" else model.model.layers[1]
    handle = block.register_forward_hook(lambda _module, _args, output: edit(output))
    with torch.no_grad():
        expected = model(tokens).logits[range(PROMPTS), batch.positions]
    handle.remove()
    edited = eh.hooked(model).logits_with_residual(tokens, batch.positions, {1: edit})
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)
    assert (edited - eh.hooked(model).logits(tokens, batch.positions)).abs().max() > 1e-3


def test_pattern_gradients_are_the_slope_of_p(tokens, batch):
    model = eh.hooked(tiny("Llama").double())
    patterns = model.patterns(tokens)
    gradients = model.pattern_gradients(batch)
    changes = random_patterns(patterns.values())
    for layer, head in ((0, 1), (2, 3)):
        change = changes[layer][:, head].double() - patterns[layer][:, head]

        def p(size, at=(layer, head), change=change):
            moved = patterns[at[0]][:, at[1]] + size * change
            logits = model.logits_with_patterns(tokens, batch.positions, {at: moved})
            return logits.double().softmax(-1)[range(PROMPTS), batch.targets]

        slope = (p(1e-2) - p(-1e-2)) / 2e-2
        estimate = (gradients[layer][:, head] * change).sum((-1, -2))
        torch.testing.assert_close(estimate, slope, atol=1e-5, rtol=2e-2)


@pytest.mark.parametrize("name", ["GPTNeo", "GPTJ", "OPT"])
def test_a_bridge_that_drops_pattern_edits_is_refused(name, batch):
    with pytest.raises(errors.InterventionHasNoEffect, match=r'layer 0, 1, 2 .*kind="huggingface"'):
        eh.check_intervention(bridge(tiny(name)))


@pytest.mark.parametrize("name", ["GPTNeo", "GPTJ", "OPT"])
def test_the_plain_model_takes_the_edits_its_bridge_drops(name, batch):
    eh.check_intervention(tiny(name))


def test_output_projections_of_zeros_are_no_dropped_edit():
    model = tiny("GPTNeoX")
    with torch.no_grad():
        for layer in model.gpt_neox.layers:  # as at step 0 of runs that start so
            layer.attention.dense.weight.zero_()
    eh.check_intervention(model)


def test_what_zero_weights_hide_is_looked_at_again_with_the_next_weights(batch):
    """At step 0 a sequential block looks parallel: the attention writes nothing that the MLP could read."""
    resident, later = tiny("Llama"), tiny("Llama")
    with torch.no_grad():
        for layer in resident.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model = eh.hooked(resident)
    assert not model.engine.uses_shortcuts
    resident.load_state_dict(later.state_dict())
    trace, expected = model.engine.trace(batch), eh.hooked(later)
    assert model.engine.uses_shortcuts
    new = random_patterns(trace.patterns)
    heads = [(0, 1), (1, 2), (2, 3)]
    answers = model.engine.patch_heads(trace, new, heads).log_p
    for (layer, head), log_p in zip(heads, answers, strict=True):
        logits = expected.logits_with_patterns(batch.tokens, batch.positions, {(layer, head): new[layer][:, head]})
        truth = logits.log_softmax(-1)[range(PROMPTS), batch.targets]
        torch.testing.assert_close(log_p, truth, atol=1e-5, rtol=1e-5)


class _SquashedAttention(modeling_gpt_neox.GPTNeoXAttention):
    """An attention whose output is not linear in what the heads write."""

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return torch.tanh(output), weights


def test_shortcuts_are_dropped_where_they_do_not_hold(tokens, batch):
    model = tiny("GPTNeoX")
    for layer in model.gpt_neox.layers:
        layer.attention.__class__ = _SquashedAttention
    model = eh.hooked(model)
    trace = model.engine.trace(batch)
    assert not model.engine.uses_shortcuts
    new = random_patterns(trace.patterns)
    answers = model.engine.patch_heads(trace, new, [(1, 0), (1, 3)])
    for index, head in enumerate((0, 3)):
        logits = model.logits_with_patterns(tokens, batch.positions, {(1, head): new[1][:, head]})
        expected = logits.log_softmax(-1)[range(PROMPTS), batch.targets]
        torch.testing.assert_close(answers.log_p[index], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "bridge"])
def test_the_model_is_left_as_it_was(kind, batch):
    model = tiny("GPTNeoX") if kind == "plain" else bridge(tiny("GPTNeoX"))
    model(batch.tokens)  # a bridge sets hooks of its own at its first pass
    model.train()

    def state():
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        forwards = sum("forward" in vars(module) for module in model.modules())
        extras = sum("_emergent_heads_on_pattern" in vars(module) for module in model.modules())
        inner = model if kind == "plain" else model.original_model
        return hooks, forwards, extras, model.training, inner.config._attn_implementation

    before = state()
    hooked = eh.hooked(model)
    trace = hooked.engine.trace(batch)
    hooked.engine.patch_heads(trace, random_patterns(trace.patterns), [(1, 0)])
    hooked.pattern_gradients(batch)
    with pytest.raises(ZeroDivisionError):
        hooked.logits_with_residual(batch.tokens, batch.positions, {0: lambda _: 1 / 0})
    assert state() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batches_are_halved_when_memory_runs_out(batch, monkeypatch):
    model = eh.hooked(tiny("Llama"))
    trace = model.engine.trace(batch)
    new = random_patterns(trace.patterns)
    heads = [(0, head) for head in range(4)]
    expected = model.engine.patch_heads(trace, new, heads).log_p
    tried = []
    run = model.engine._run_heads

    def with_little_memory(trace, layer, heads, new):
        tried.append(len(heads))
        if len(heads) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return run(trace, layer, heads, new)

    monkeypatch.setattr(model.engine, "_run_heads", with_little_memory)
    torch.testing.assert_close(model.engine.patch_heads(trace, new, heads).log_p, expected, atol=1e-6, rtol=1e-6)
    assert tried == [4, 2, 1, 1, 1, 1]


def test_no_batch_is_larger_than_asked_for(batch, monkeypatch):
    model = eh.hooked(tiny("Llama"))
    trace = model.engine.trace(batch)
    rows = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda tokens: rows.append(len(tokens) * (tokens.shape[1] > 1)) or run(tokens))
    new = random_patterns(trace.patterns)
    masks = torch.ones(5, model.n_layers, model.n_heads, dtype=torch.bool)
    model.engine.patch_heads(trace, new, [(0, head) for head in range(4)], batch_size=6)
    model.engine.patch_sets(trace, new, masks, batch_size=6)
    assert max(rows) == 6


def test_bad_input_is_named(batch):
    model = tiny("GPT2")
    with pytest.raises(errors.UnsupportedModelError, match="int"):
        eh.hooked(3)
    with pytest.raises(errors.ArgumentError, match="layer 7: this model has layers 0 to 2"):
        eh.hooked(model).residual(batch.tokens, [7])
    with pytest.raises(errors.ArgumentError, match="70 tokens; this model takes at most 64"):
        eh.hooked(model).logits(torch.zeros(1, 70, dtype=torch.long), torch.tensor([69]))
    hooked = eh.hooked(model)
    trace = hooked.engine.trace(batch)
    with pytest.raises(errors.ArgumentError, match="batch_size=0"):
        hooked.engine.patch_heads(trace, trace.patterns, [(0, 0)], batch_size=0)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    with pytest.raises(errors.NotFiniteError):
        eh.hooked(model).answers(batch)


def test_a_model_without_a_language_model_head_is_refused():
    from transformers import AutoModel

    with pytest.raises(errors.UnsupportedModelError, match="AutoModelForCausalLM"):
        eh.hooked(AutoModel.from_config(tiny("GPT2").config))


def test_hooked_is_idempotent_and_asks_a_checkpoint_handle():
    model = eh.hooked(tiny("GPT2"))
    handle = type("Handle", (), {"hooked": lambda self: model})()
    assert eh.hooked(model) is model
    assert eh.hooked(handle) is model
    assert "n_layers=3" in repr(model)


def test_half_precision_models_are_read_in_float32(tokens, batch):
    model = AutoModelForCausalLM.from_config(tiny("Llama").config).to(torch.bfloat16)
    assert eh.hooked(model).logits(tokens, batch.positions).dtype == torch.float32


def test_a_set_is_started_at_its_first_patched_layer(batch, monkeypatch):
    model = eh.hooked(tiny("Llama"))
    trace = model.engine.trace(batch)
    starts = []
    start_at = model.engine._starting_at
    monkeypatch.setattr(
        model.engine, "_starting_at", lambda layer, resid: starts.append(layer) or start_at(layer, resid)
    )
    masks = torch.zeros(3, model.n_layers, model.n_heads, dtype=torch.bool)
    masks[0, 1, 0] = masks[1, 0, 0] = masks[2, 2, 3] = True
    model.engine.patch_sets(trace, random_patterns(trace.patterns), masks, batch_size=PROMPTS)
    assert starts == [2, 1, 0]
