"""Edits of the residual stream, against full forward passes with hooks set by hand."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import bridge, tiny
from torch.nn import functional

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.models.hooks import editing_input, editing_output
from emergent_heads.models.residual_engine import Edit, Reads

VOCABULARY, ROWS, LENGTH, LAYERS, WIDTH, RUNS = 13, 5, 11, 3, 32, 3
SMALL = {
    "attention": {},
    "Llama style": {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": False},
    "attention only": {"mlp": "none"},
    "linear": {"mixer": "linear"},
    "recurrent": {"mixer": "linear_rnn"},
    "both": {"mixer": ("attention", "linear", "attention")},
}
POSITIONS = torch.tensor([[4, 6, 9], [5, 4, -1], [4, 5, 6], [-1, -1, -1], [8, 7, 6]])
READS = Reads(
    torch.tensor([[3, 5, 9], [9, -1, 10], [4, 5, 6], [0, 1, 10], [7, 6, -1]]), torch.arange(15).view(5, 3) % VOCABULARY
)
THERE = READS.positions >= 0


def small(name, seed=0):
    config = eh.SmallModelConfig(LAYERS, WIDTH, 4, vocabulary_size=VOCABULARY, context=LENGTH + 2, **SMALL[name])
    model = eh.SmallModel(config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # patterns far from uniform
    return model.eval()


def some_tokens(seed=3, rows=ROWS):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def random_edit(layer, positions=POSITIONS, rank=2, per_row=False, seed=0, width=WIDTH):
    """Oblique, of rank `rank`, with targets far from what is there."""
    generator = torch.Generator().manual_seed(100 * seed + layer)
    n_rows, places = positions.shape
    read, write = torch.randn(2, RUNS, places, width, rank, generator=generator) / width**0.5
    target = 3 * torch.randn(RUNS, n_rows if per_row else 1, places, rank, generator=generator)
    return Edit(layer, positions, read, write, target)


def edit_by_hand(edit, run, resid):
    """One position after the other."""
    resid = resid.clone()
    for row, place in itertools.product(range(len(resid)), range(edit.positions.shape[1])):
        position = edit.positions[row, place]
        if position < 0:
            continue
        x = resid[row, position].clone()
        target = edit.target[run, row if edit.target.shape[1] > 1 else 0, place]
        for component in range(edit.read.shape[-1]):
            amount = edit.read[run, place, :, component] @ x - target[component]
            resid[row, position] -= amount * edit.write[run, place, :, component]
    return resid


def by_hand(model, tokens, edits, reads=READS, seen=None):
    """`log_p` and `matched` `[run, row, read]`, by one plain pass per run."""
    hooked = eh.hooked(model)
    log_p, matched = [], []
    for run in range(RUNS):
        handles = []
        for edit in edits:

            def hook(resid, edit=edit, run=run):
                new = edit_by_hand(edit, run, resid)
                if seen is not None:
                    seen[edit.layer, run] = new
                return new

            where = editing_input(hooked.blocks[0], hook) if edit.layer < 0 else None
            handles.append(where or editing_output(hooked.blocks[edit.layer], hook))
        for handle in handles:
            handle.__enter__()
        with torch.no_grad():
            logits = hooked.run(tokens)
        for handle in handles:
            handle.__exit__(None, None, None)
        rows = torch.arange(len(tokens))[:, None]
        at = logits[rows, reads.positions.clamp_min(0)]
        log_p.append(functional.log_softmax(at, -1).gather(-1, reads.targets[..., None])[..., 0])
        matched.append(at.argmax(-1) == reads.targets)
    return torch.stack(log_p), torch.stack(matched)


def assert_same(model, tokens, edits, reads=READS, **options):
    engine = eh.hooked(model).residual_engine
    found = engine.answers(engine.trace(tokens, reads), edits, **options)
    log_p, matched = by_hand(model, tokens, edits, reads)
    there = reads.positions >= 0
    torch.testing.assert_close(found.log_p[:, there], log_p[:, there], atol=1e-5, rtol=0)
    assert torch.equal(found.matched[:, there], matched[:, there])
    return found


@pytest.mark.parametrize("layers", [(-1,), (0,), (1,), (2,), (0, 2), (-1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_answers_equal_full_passes_with_hooks(name, layers):
    model, tokens = small(name), some_tokens()
    expected = "positions" if name in ("attention", "Llama style", "attention only") else "layers"
    assert eh.hooked(model).residual_engine.shortcut == expected
    edits = [random_edit(layer, POSITIONS.roll(layer, 0)) for layer in layers]
    found = assert_same(model, tokens, edits)
    plain = eh.hooked(model).residual_engine.trace(tokens, READS).answers
    if layers == (0, 2):
        assert (found.log_p - plain.log_p).abs()[:, THERE].max() > 0.1


@pytest.mark.parametrize("name", ["GPTNeoX", "Llama", "GPT2", "Gemma2"])
@pytest.mark.parametrize("wrap", [lambda model: model, bridge], ids=["plain", "bridge"])
def test_answers_equal_full_passes_on_other_kinds(name, wrap):
    model = wrap(tiny(name))
    tokens = some_tokens()
    assert eh.hooked(model).residual_engine.shortcut == "layers"
    for layers in ((0,), (1, 2), (-1, 0)):
        assert_same(model, tokens, [random_edit(layer, per_row=True) for layer in layers])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_positions_in_any_layers(data):
    """Rows and layers whose first edit, or first read, comes early or late, or not at all."""
    per_row = st.lists(st.integers(0, LENGTH - 1), min_size=3, max_size=3, unique=True)
    holes = st.lists(st.booleans(), min_size=3, max_size=3)
    edits = []
    for layer in sorted(data.draw(st.sets(st.integers(-1, LAYERS - 1), min_size=1, max_size=3))):
        positions = torch.tensor(data.draw(st.lists(per_row, min_size=2, max_size=2)))
        absent = torch.tensor(data.draw(st.lists(holes, min_size=2, max_size=2)))
        edits.append(random_edit(layer, torch.where(absent, -1, positions)))
    reads = Reads(torch.tensor(data.draw(st.lists(per_row, min_size=2, max_size=2))), torch.ones(2, 3, dtype=int))
    assert_same(MODEL, some_tokens(rows=2), edits, reads)


MODEL = small("Llama style")


@pytest.mark.parametrize("name", ["Llama style", "linear"])
def test_what_stands_after_an_edit_is_what_the_hooks_left(name):
    model, tokens, edits = small(name), some_tokens(), [random_edit(0), random_edit(2, POSITIONS.flip(0))]
    seen = {}
    by_hand(model, tokens, edits, seen=seen)
    engine = eh.hooked(model).residual_engine
    for edit, new in zip(edits, engine.edited(engine.trace(tokens, READS), edits), strict=True):
        for run, (row, place) in itertools.product(range(RUNS), (edit.positions >= 0).nonzero().tolist()):
            expected = seen[edit.layer, run][row, edit.positions[row, place]]
            torch.testing.assert_close(new[run, row, place], expected, atol=1e-5, rtol=1e-5)


def test_a_trace_holds_the_plain_pass():
    model, tokens = small("attention"), some_tokens()
    trace = eh.hooked(model).residual_engine.trace(tokens, READS)
    expected = eh.hooked(model).residual(tokens, [-1, 0, 1, 2], POSITIONS.clamp_min(0))
    for layer, resid in zip((-1, 0, 1, 2), expected, strict=True):
        torch.testing.assert_close(trace.at(layer, POSITIONS), resid)
    logits = model(tokens).log_softmax(-1)[torch.arange(ROWS)[:, None], READS.positions.clamp_min(0)]
    log_p = logits.gather(-1, READS.targets[..., None])[..., 0].detach()
    torch.testing.assert_close(trace.answers.log_p[THERE], log_p[THERE], atol=1e-5, rtol=0)


def test_only_later_positions_and_layers_are_run(monkeypatch):
    """And in the last block only positions from the first one that is read."""
    hooked, tokens = eh.hooked(small("Llama style")), some_tokens()
    engine = hooked.residual_engine
    reads = Reads(torch.full((ROWS, 1), LENGTH - 2), torch.zeros(ROWS, 1, dtype=int))
    trace = engine.trace(tokens, reads)
    calls = []
    continued = type(hooked).continued

    def counted(self, layer, resid, keys_and_values, first=0):
        calls.append((layer, *resid.shape[:2], first))
        return continued(self, layer, resid, keys_and_values, first)

    monkeypatch.setattr(type(hooked), "continued", counted)
    edit = random_edit(0, torch.tensor([[4, 6]]).repeat(ROWS, 1))
    engine.answers(trace, [edit])
    assert calls == [(1, RUNS * ROWS, LENGTH - 4, 0), (2, RUNS * ROWS, LENGTH - 4, LENGTH - 2 - 4)]
    calls.clear()
    engine.answers(trace, [edit], batch_size=ROWS)  # one run at a time
    assert [call[:2] for call in calls] == [(1, ROWS), (2, ROWS)] * RUNS
    calls.clear()
    engine.answers(trace, [random_edit(2)])
    assert calls == []


def test_rows_without_an_edit_keep_their_answers():
    engine, tokens = eh.hooked(small("attention")).residual_engine, some_tokens()
    trace = engine.trace(tokens, READS)
    found = engine.answers(trace, [random_edit(1)])
    torch.testing.assert_close(found.log_p[:, 3], trace.answers.log_p[3].expand(RUNS, -1))  # its positions are all -1
    nowhere = engine.answers(trace, [random_edit(1, torch.full((ROWS, 2), -1))])
    assert torch.equal(nowhere.log_p, trace.answers.log_p.expand(RUNS, -1, -1))


def test_an_attention_bias_is_kept():
    model, tokens = small("Llama style"), some_tokens()
    plain = assert_same(model, tokens, [random_edit(0)])
    with model.attention_bias(torch.eye(LENGTH + 2), 4.0, layers=[1, 2], heads=[0, 3]):
        biased = assert_same(model, tokens, [random_edit(0)])
    assert (biased.log_p - plain.log_p).abs().max() > 0.1


def test_hooks_of_the_user_still_see_and_change_everything():
    model, tokens = small("Llama style"), some_tokens()
    engine = eh.hooked(model).residual_engine
    before = engine.trace(tokens, READS)
    with editing_output(model.blocks[2].attn.hook_v, lambda v: 0 * v):
        assert engine.shortcut == "layers"
        without_values = assert_same(model, tokens, [random_edit(0)])
        old_trace = engine.answers(before, [random_edit(0)])
    assert engine.shortcut == "positions"
    torch.testing.assert_close(old_trace.log_p[:, THERE], without_values.log_p[:, THERE])
    assert (assert_same(model, tokens, [random_edit(0)]).log_p - without_values.log_p).abs().max() > 0.1


def test_a_block_with_a_way_of_its_own_takes_no_shortcut(monkeypatch):
    """A shortcut that does not give what the plain pass gives is not used."""
    model, tokens = small("Llama style"), some_tokens()
    hooked = eh.hooked(model)
    continued = type(hooked).continued
    monkeypatch.setattr(type(hooked), "continued", lambda *args: 1.1 * continued(*args))
    assert hooked.residual_engine.shortcut == "layers"
    assert_same(hooked, tokens, [random_edit(0)])


def test_the_mode_of_the_model_comes_back():
    model = small("attention").train()
    engine = eh.hooked(model).residual_engine
    engine.answers(engine.trace(some_tokens(), READS), [random_edit(0)])
    assert model.training


def test_a_residual_stream_that_does_nothing_is_refused():
    model = small("attention")
    with torch.no_grad():
        model.unembed.weight.zero_()
    with pytest.raises(errors.InterventionHasNoEffect, match="after layer 0"):
        _ = eh.hooked(model).residual_engine


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([], "give at least one"),
        ([random_edit(3)], "between -1 and 2"),
        ([random_edit(1), random_edit(1)], "one a layer"),
        ([random_edit(1, POSITIONS[:, [0, 0]])], "two edits of one position"),
        ([random_edit(1, POSITIONS[:, :1] + 3)], "beyond the 11 tokens"),
    ],
)
def test_edits_that_make_no_sense(edits, message):
    engine = eh.hooked(small("attention")).residual_engine
    with pytest.raises(errors.ArgumentError, match=message):
        engine.answers(engine.trace(some_tokens(), READS), edits)


def test_batch_size_must_be_positive():
    engine = eh.hooked(small("attention")).residual_engine
    with pytest.raises(errors.ArgumentError, match="batch_size=0"):
        engine.answers(engine.trace(some_tokens(), READS), [random_edit(0)], batch_size=0)


def test_one_trace_serves_edits_that_start_earlier_and_later():
    engine, tokens = eh.hooked(small("Llama style")).residual_engine, some_tokens()
    trace = engine.trace(tokens, READS)
    for start in (6, 2, 7, 4, 4, 0, 8):
        edit = random_edit(0, torch.tensor([[start, 10]]).repeat(ROWS, 1))
        fresh = engine.answers(engine.trace(tokens, READS), [edit])
        torch.testing.assert_close(engine.answers(trace, [edit]).log_p, fresh.log_p, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["Llama style", "linear"])
def test_blocks_above_what_is_wanted_are_not_run(name):
    model, tokens = small(name), some_tokens()
    engine = eh.hooked(model).residual_engine
    calls = []
    with editing_output(model.blocks[2].ln1, calls.append):  # stays silent where the block passes its input through
        trace = engine.trace(tokens, READS, up_to=1)
        edited = engine.edited(trace, [random_edit(0), random_edit(1)])
    assert not calls
    torch.testing.assert_close(trace.at(1, POSITIONS), engine.trace(tokens, READS).at(1, POSITIONS))
    whole = engine.edited(engine.trace(tokens, READS), [random_edit(0), random_edit(1)])
    for short, long in zip(edited, whole, strict=True):
        torch.testing.assert_close(short[:, POSITIONS >= 0], long[:, POSITIONS >= 0], atol=1e-5, rtol=1e-5)
