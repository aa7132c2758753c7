"""nnsight models, run here and by a stand-in for nnsight's server: the numbers of the models they wrap."""

import gc
import importlib
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import VOCABULARY, bridge, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.analysis.probes import Probe, Probes

nnsight = pytest.importorskip("nnsight", reason="nnsight is an extra")
nnsight_server = pytest.importorskip("nnsight_server")
names_on_the_hub = pytest.importorskip("nnsight.modeling.huggingface")._ID_CACHE

NAMES = ("GPTNeoX", "Llama", "GPT2", "OLMo2")
REMOTE_NAMES = (*NAMES, "GPTNeo", "Bloom", "Phi3", "Gemma2")
TOKENS = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))
ENDS = (9, 6, 8, 9)
TASK = eh.tasks.from_tokens(TOKENS, [1, 2, 3, 4], ENDS)
LAST = torch.tensor(ENDS) - 1


def tokenizer():
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")


def language_model(model):
    with pytest.warns(FutureWarning, match="LanguageModel is deprecated"):
        return nnsight.LanguageModel(model, tokenizer=tokenizer())


WRAPPERS = {
    "NNsight": nnsight.NNsight,
    "TransformersModel": lambda model: nnsight.TransformersModel(model, tokenizer=tokenizer(), task="text-generation"),
    "LanguageModel": language_model,
}


def sorted_table(result):
    return result.table.sort_values(["layer", "head"], ignore_index=True)


def assert_same_ranking(found, expected):
    np.testing.assert_allclose(found.delta_p, expected.delta_p, atol=1e-5, rtol=0)
    pd.testing.assert_frame_equal(sorted_table(found), sorted_table(expected), atol=1e-5, rtol=1e-5)
    assert np.abs(expected.delta_p).max() > 1e-3, "the patches should change something"


# ---- run here ----


@pytest.fixture(autouse=True)
def _cloudpickle_as_before():
    """A request makes nnsight have all modules outside site-packages pickled by value, in this process for ever."""
    by_value = importlib.import_module("cloudpickle.cloudpickle")._PICKLE_BY_VALUE_MODULES
    before = set(by_value)
    yield
    by_value.intersection_update(before)


@pytest.mark.parametrize("name", NAMES)
def test_rankings_and_curves_are_those_of_the_other_kinds(name):
    expected = eh.rank_heads(tiny(name, 0), tiny(name, 1), TASK)
    assert_same_ranking(eh.rank_heads(bridge(tiny(name, 0)), bridge(tiny(name, 1)), TASK), expected)
    curve = eh.recovery_curve(tiny(name, 0), tiny(name, 1), TASK, expected, ks=(1, 3), controls=3)
    for wrap in WRAPPERS.values():
        assert_same_ranking(eh.rank_heads(wrap(tiny(name, 0)), wrap(tiny(name, 1)), TASK), expected)
    again = eh.recovery_curve(
        *map(nnsight.NNsight, (tiny(name, 0), tiny(name, 1))), TASK, expected, ks=(1, 3), controls=3
    )
    pd.testing.assert_frame_equal(again.table, curve.table, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_patterns_and_the_residual_stream_are_what_traces_read(name):
    model = nnsight.NNsight(tiny(name))
    model._module.set_attn_implementation("eager")
    ours = eh.hooked(model)
    path_of = {module: path for path, module in model._module.named_modules()}
    block, attention = (model.get(path_of[modules[1]]) for modules in (ours.blocks, ours.attention))
    with torch.no_grad(), model.trace(TOKENS):
        pattern = attention.output[1].save()
        out = block.output
        resid = (out[0] if isinstance(out, tuple) else out).save()
        logits = model.output.logits.save()
    torch.testing.assert_close(ours.patterns(TOKENS, [1])[1], pattern, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.residual(TOKENS, [1])[0], resid, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.logits(TOKENS, LAST), logits[range(4), LAST], atol=1e-5, rtol=1e-5)
    edits = {1: lambda resid: resid * 0.5}
    with torch.no_grad(), model.trace(TOKENS):
        out = block.output
        block.output = (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5
        edited = model.output.logits.save()
    torch.testing.assert_close(
        ours.logits_with_residual(TOKENS, LAST, edits), edited[range(4), LAST], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_ablations_are_those_of_the_plain_model(name):
    tokens = torch.randint(50, (40, 7), generator=torch.Generator().manual_seed(0))
    feature = eh.Feature("first token is even", "binary", (tokens[:, :1] % 2 == 0).float(), [3])
    probe = Probe(feature.name, "binary", 0, 0, np.random.default_rng(0).standard_normal((1, 32)), np.zeros(1))
    best = pd.DataFrame([{"feature": feature.name, "place": 0, "layer": 0, "is_best": True}])
    probes = Probes(best, {(feature.name, 0, 0): probe})
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    found = [
        eh.ablate_features(model, task, probes, 2, features=feature)
        for model in (tiny(name), nnsight.NNsight(tiny(name)))
    ]
    pd.testing.assert_frame_equal(found[0].table, found[1].table, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*has a submodule named 'input'")
def test_probes_of_a_wrapped_small_model_are_the_models_own():
    task = eh.tasks.Addition(bits=6)
    model = eh.SmallModel(eh.SmallModelConfig.transformer_pp(2, 16).for_task(task))
    tables = [
        eh.fit_probes(each, task, n_train=200, n_test=50, n_untrained=0, progress=False).table
        for each in (model, nnsight.NNsight(model))
    ]
    pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_traces_before_and_after_are_the_users_own(implementation):
    model = nnsight.NNsight(tiny("GPTNeoX"))
    model._module.set_attn_implementation(implementation)
    controllers = [module.__dict__["forward"] for module in model._module.modules()]

    def traced():
        with torch.no_grad(), model.trace(TOKENS):
            model.gpt_neox.layers[0].mlp.output[:] = 0
            z = model.gpt_neox.layers[1].attention.dense.input.save()
            logits = model.output.logits.save()
        return z, logits

    before = traced()
    ours = eh.hooked(model)
    torch.testing.assert_close(ours.logits(TOKENS, LAST), eh.hooked(tiny("GPTNeoX")).logits(TOKENS, LAST))
    eh.rank_heads(model, tiny("GPTNeoX", 1), TASK)
    eh.check_intervention(model)
    for old, new in zip(before, traced(), strict=True):
        torch.testing.assert_close(new, old, atol=0, rtol=0)
    assert model._module.config._attn_implementation == implementation
    assert [module.__dict__["forward"] for module in model._module.modules()] == controllers


def test_a_model_without_its_weights_loads_them(folders):
    model = far(folders("Llama")[0])
    assert not model.dispatched
    assert_same_ranking(
        eh.rank_heads(model, tiny("Llama", 1), TASK), eh.rank_heads(tiny("Llama", 0), tiny("Llama", 1), TASK)
    )
    assert model.dispatched


def test_stored_edits_are_refused():
    model = nnsight.NNsight(tiny("GPTNeoX"))
    with model.edit(inplace=True):
        model.gpt_neox.layers[0].mlp.output[:] = 0
    with pytest.raises(errors.UnsupportedModelError, match=r"clear_edits"):
        eh.hooked(model)
    model.clear_edits()
    assert eh.hooked(model).kind == "nnsight NNsight of a Hugging Face GPTNeoXForCausalLM"


# ---- traps ----


def test_writing_the_second_output_of_attention_does_nothing_and_is_not_what_is_done_here():
    """The known trap: the pattern that an attention returns is a copy of what it has used already."""
    model = nnsight.NNsight(tiny("GPTNeoX"))
    model._module.set_attn_implementation("eager")

    def logits(written):
        with torch.no_grad(), model.trace(TOKENS):
            attention = model.gpt_neox.layers[1].attention
            if written:
                out, pattern = attention.output
                attention.output = (out, torch.zeros_like(pattern))
            found = model.output.logits.save()
        return found

    torch.testing.assert_close(logits(True), logits(False), atol=0, rtol=0)
    ours = eh.hooked(model)
    eh.check_intervention(ours)
    nothing = {(1, head): torch.zeros(4, 9, 9) for head in range(4)}
    moved = ours.logits_with_patterns(TOKENS, LAST, nothing) - ours.logits(TOKENS, LAST)
    assert moved.abs().max() > 1e-3


def test_sdpa_gives_no_patterns_in_a_trace_but_here():
    model = nnsight.NNsight(tiny("Llama"))
    assert model._module.config._attn_implementation == "sdpa"
    with torch.no_grad(), model.trace(TOKENS):
        pattern = nnsight.save([model.model.layers[0].self_attn.output[1]])
    assert pattern[0] is None
    assert set(eh.hooked(model).patterns(TOKENS)) == {0, 1, 2}


def test_labels_of_source_are_not_used(server, folders, monkeypatch):
    """They follow the source of transformers and changed with nnsight 0.8."""

    def refused(self):
        raise AssertionError("a label of .source was asked for")

    local = nnsight.NNsight(tiny("Llama")), nnsight.NNsight(tiny("Llama", 1))
    remote = [eh.hooked(far(folder), remote=True) for folder in served(server, folders("Llama"))]
    monkeypatch.setattr(nnsight.Envoy, "source", property(refused))
    assert_same_ranking(eh.rank_heads(*remote, TASK), eh.rank_heads(*local, TASK))


@pytest.mark.parametrize("remote", [False, True])
def test_prompts_of_different_lengths_are_not_padded_on_the_left(remote, server, folders):
    """GPT-2 counts positions from the first column, so padding on the left would change its answers."""
    folder = served(server, folders("GPT2"))[0]
    model = far(folder)
    assert model.tokenizer.padding_side == "left"
    answers = eh.hooked(model, remote=remote).answers(TASK.batch(None, vocabulary_size=VOCABULARY, context=None))
    alone = tiny("GPT2")
    for row, end in enumerate(ENDS):
        with torch.no_grad():
            log_p = alone(TOKENS[row : row + 1, :end]).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(answers.log_p[row], log_p[row + 1], atol=1e-5, rtol=1e-5)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("remote", [False, True])
def test_memory_does_not_grow_over_rankings(remote, server, folders):
    pre, post = (far(folder) for folder in served(server, folders("Llama")))

    def rank():
        eh.rank_heads(eh.hooked(pre, remote=remote), eh.hooked(post, remote=remote), TASK)

    rank()
    before = live_tensors()
    for _ in range(3):
        rank()
    assert live_tensors() <= before


# ---- where nnsight's own tracing cannot be used ----

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import nnsight, torch
import emergent_heads as eh
from test_nnsight import TASK, WRAPPERS
from tiny_models import tiny
torch.set_num_threads(1)
found = []
models = [WRAPPERS["TransformersModel"](tiny("GPT2", seed)) for seed in (0, 1)]
for remote in (False, "local"):
    found.append(eh.rank_heads(*(eh.hooked(model, remote=remote) for model in models), TASK).delta_p.sum())
print(*found)
"""


@pytest.mark.parametrize("how", ["stdin", "exec"])
def test_scripts_without_a_file(how, request, monkeypatch):
    """nnsight reads a trace's source from its file; ours are in one, wherever the script is. Local and remote way."""
    script = SCRIPT.format(tests=str(request.path.parent))
    if how == "stdin":
        command = [sys.executable, "-W", "ignore", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = [float(number) for number in done.stdout.split()]
    else:
        monkeypatch.setattr(sys, "path", [*sys.path])  # nnsight's dry run leaves it in another order
        names = {}
        exec(script, names)
        found = names["found"]
    expected = eh.rank_heads(tiny("GPT2", 0), tiny("GPT2", 1), TASK).delta_p.sum()
    np.testing.assert_allclose(found, [expected, expected], atol=1e-5)


def test_nothing_needs_nnsight(request):
    script = f"""
    import sys
    sys.path.insert(0, {str(request.path.parent)!r})
    sys.modules["nnsight"] = None  # to import it is an error
    import emergent_heads as eh
    from tiny_models import tiny
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    print(len(eh.rank_heads(tiny("GPT2"), tiny("GPT2", 1), eh.tasks.from_tokens(tokens, [1, 2])).table))
    try:
        eh.hooked(object())
    except eh.errors.UnsupportedModelError:
        print("refused")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stdout.split() == ["12", "refused"], done.stderr


# ---- run by a server ----


@pytest.fixture
def server(monkeypatch):
    standing = nnsight_server.Server()
    # A package that is installed is not sent by itself, as one that lies in a checkout is.
    monkeypatch.setattr("nnsight.ndif._PULLED_ENV", True)
    monkeypatch.setattr("cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES", set())
    monkeypatch.setattr(
        "nnsight.intervention.backends.remote.RemoteBackend.request", lambda self, *args: standing.answer(self, *args)
    )
    return standing


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of an architecture's earlier and later checkpoint."""

    def made(name):
        root = tmp_path_factory.getbasetemp() / f"nnsight {name}"
        if not root.exists():
            for seed in (0, 1):
                tiny(name, seed).save_pretrained(root / f"step{seed}")
        return [str(root / f"step{seed}") for seed in (0, 1)]

    return made


def far(folder):
    """A model whose weights are at the server only."""
    names_on_the_hub[folder] = folder  # else the hub is asked how it spells the name
    return nnsight.TransformersModel(folder, tokenizer=tokenizer(), task="text-generation")


def served(server, folders):
    for folder in folders:
        model = far(folder)
        model.dispatch()
        server.models[model.to_model_key()] = model
    return folders


@pytest.fixture
def pair(server, folders):
    """Pre and post at the server."""

    def made(name):
        return [eh.hooked(far(folder), remote=True) for folder in served(server, folders(name))]

    return made


@pytest.mark.parametrize(("name", "rows"), [*((name, "all") for name in REMOTE_NAMES), ("Llama", "last")])
def test_a_ranking_is_one_request_to_each_model(name, rows, server, pair):
    pre, post = pair(name)
    found = eh.rank_heads(pre, post, TASK, rows=rows)
    assert_same_ranking(found, eh.rank_heads(tiny(name, 0), tiny(name, 1), TASK, rows=rows))
    assert [request.model_key for request in server.requests] == [m._envoy.to_model_key() for m in (post, pre)]
    assert all(request.env["attn_implementation"] == "eager" for request in server.requests)
    for model in (pre, post):
        assert not model._envoy.dispatched
        assert {parameter.device.type for parameter in model._envoy._module.parameters()} == {"meta"}
    assert found.about["pre"].endswith("step0")


@pytest.mark.parametrize("name", NAMES)
def test_curves_and_what_is_read_remotely(name, server, pair):
    pre, post = pair(name)
    here = [eh.hooked(tiny(name, seed)) for seed in (0, 1)]
    ranked = eh.rank_heads(pre, post, TASK)
    assert len(server.requests) == 2
    curve = eh.recovery_curve(pre, post, TASK, ranked, ks=(1, 3), controls=3)
    assert len(server.requests) == 4, "post's patterns and all sets; pre's own pass is known from the ranking"
    expected = eh.recovery_curve(*here, TASK, ranked, ks=(1, 3), controls=3)
    pd.testing.assert_frame_equal(curve.table, expected.table, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pre.logits(TOKENS, LAST), here[0].logits(TOKENS, LAST), atol=1e-4, rtol=1e-4)
    for layer, pattern in pre.patterns(TOKENS, [2, 0]).items():
        torch.testing.assert_close(pattern, here[0].patterns(TOKENS, [layer])[layer], atol=1e-6, rtol=1e-4)
    some = torch.tensor([[0, 2], [5, 1], [3, 3], [8, 0]])
    for positions in (None, some):
        found, own = (model.residual(TOKENS, [2, -1, 0], positions) for model in (pre, here[0]))
        torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
    evaluated = [eh.evaluate(model, TASK).table for model in (pre, here[0])]
    pd.testing.assert_frame_equal(*evaluated, atol=1e-5, rtol=1e-4)


def test_flipped_prompts_need_no_further_request(server, pair):
    before, after = (eh.hooked(tiny("Llama", seed)).logits(TOKENS, LAST).argmax(-1) for seed in (0, 1))
    task = eh.tasks.from_tokens(TOKENS, torch.cat([before[:1], after[1:]]), ENDS)
    found = eh.rank_heads(*pair("Llama"), task, prompts="flipped")
    assert_same_ranking(found, eh.rank_heads(tiny("Llama", 0), tiny("Llama", 1), task, prompts="flipped"))
    assert found.about["n_prompts"] == 3
    assert len(server.requests) == 2


@pytest.mark.parametrize("remote_side", [0, 1])
def test_one_side_can_be_here(remote_side, server, pair):
    sides = [tiny("GPT2", 0), tiny("GPT2", 1)]
    sides[remote_side] = pair("GPT2")[remote_side]
    found = eh.rank_heads(*sides, TASK, batch_size=5)
    assert_same_ranking(found, eh.rank_heads(tiny("GPT2", 0), tiny("GPT2", 1), TASK))
    assert len(server.requests) == 1


def test_a_request_is_small_and_goes_where_it_is_told(server, folders):
    pre, post = (eh.hooked(far(folder), remote="http://here") for folder in served(server, folders("Llama")))
    assert pre._envoy.attn_implementation == "sdpa"
    eh.rank_heads(pre, post, TASK)
    assert {request.host for request in server.requests} == {"http://here"}
    patterns = 4 * len(TOKENS) * 12 * 45  # bytes of the lower triangles
    for request, (sends, receives) in zip(server.requests, [(0, patterns), (patterns, patterns)], strict=True):
        assert request.sent < sends + 10_000
        assert request.received < receives + 10_000
    assert pre._envoy.attn_implementation == "sdpa", "the model's own setting comes back"


def test_a_server_that_drops_edits_is_found_out(server, pair, monkeypatch):
    """A patched run that silently is a plain one is what users have met."""
    mediator = nnsight.intervention.interleaver.Mediator
    swap = mediator.swap.__func__

    def dropping(cls, location, value):
        if "layers.1.self_attn.o_proj" not in location:
            swap(cls, location, value)

    monkeypatch.setattr(mediator, "swap", classmethod(dropping))
    pre, post = pair("Llama")
    with pytest.raises(errors.InterventionHasNoEffect, match=r"layer 1 does not change .* remote .*step0"):
        eh.rank_heads(pre, post, TASK)
    with pytest.raises(errors.InterventionHasNoEffect, match="layer 1 does not change"):
        pre.check_pattern_edits()


def test_a_server_without_eager_attention_is_found_out(server, pair):
    pre, post = pair("Llama")
    server.heeds_env = False
    with pytest.raises(errors.InterventionHasNoEffect, match=r"layer 0, 1, 2 .* returns no patterns"):
        eh.rank_heads(pre, post, TASK)


def test_values_that_cannot_be_read_are_found_out(pair):
    with pytest.raises(errors.UnsupportedModelError, match="not what its patterns and values give"):
        eh.rank_heads(*pair("CodeGen"), TASK)


def test_output_projections_of_zero_are_no_dropped_edit(server, pair):
    pre, post = pair("Llama")
    with torch.no_grad():
        server.models[pre._envoy.to_model_key()]._module.model.layers[1].self_attn.o_proj.weight.zero_()
    found = eh.rank_heads(pre, post, TASK)
    assert not found.delta_p[1].any()
    assert not pre.engine.conclusive


def test_a_server_that_computes_in_bfloat16(server, pair):
    pre, post = pair("Llama")
    for model in server.models.values():
        model._module.to(torch.bfloat16)
    found = eh.rank_heads(pre, post, TASK)
    here = eh.rank_heads(*(tiny("Llama", seed).to(torch.bfloat16) for seed in (0, 1)), TASK)
    assert found.about["dtype"] == here.about["dtype"] == "bfloat16"
    exact = eh.rank_heads(tiny("Llama", 0), tiny("Llama", 1), TASK).delta_p
    for ranking in (found, here):  # rounded to three digits at every step
        np.testing.assert_allclose(ranking.delta_p, exact, atol=0.2 * np.abs(exact).max())


def test_damaged_weights_are_found_out(server, pair):
    pre, post = pair("Llama")
    with torch.no_grad():
        server.models[pre._envoy.to_model_key()]._module.lm_head.weight[0] = torch.nan
    with pytest.raises(errors.NotFiniteError, match="remote"):
        eh.rank_heads(pre, post, TASK)


def test_what_cannot_be_had_remotely_is_refused(server, pair, folders):
    pre, post = pair("Llama")
    with pytest.raises(errors.UnsupportedModelError, match="screen"):
        eh.rank_heads(pre, post, TASK, method="screen")
    with pytest.raises(errors.UnsupportedModelError, match="edits of the residual stream"):
        eh.check_intervention(pre)
    for refused in (
        lambda: pre.residual_engine,
        lambda: pre.run(TOKENS),
        lambda: pre.on_pattern(lambda *_: None),
        lambda: pre.on_z(0, lambda _: None),
        lambda: pre.project(0, TOKENS),
        lambda: pre.logits_with_patterns(TOKENS, LAST, {}),
    ):
        with pytest.raises(errors.UnsupportedModelError, match="run it here"):
            refused()
    with pytest.raises(errors.ArgumentError, match="at most"):
        pre.logits(torch.zeros(1, 10_000, dtype=torch.long), LAST[:1])
    with pytest.raises(errors.ArgumentError, match="layers 0 to 2"):
        pre.residual(TOKENS, [3])
    with pytest.raises(errors.ArgumentError, match=r"make an nnsight\.TransformersModel"):
        eh.hooked(nnsight.NNsight(tiny("Llama")), remote=True)
    with pytest.raises(errors.ArgumentError, match="only an nnsight model"):
        eh.hooked(tiny("Llama"), remote=True)
    with pytest.raises(errors.UnsupportedModelError, match="0 of 3 layers"):
        eh.hooked(far(folders("DeepSeek-V3")[0]), remote=True)
