"""Checkpoints that are files in TransformerLens' format, against transformer-lens' own loader on a loopback hub."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints_fixtures import tiny_tokenizer
from hub_server import serving, use_hub

import emergent_heads as eh
from emergent_heads.checkpoints.kinds import kind_of_own_format
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.checkpoints.transformerlens_format import from_old_layout
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    HubError,
    NoCheckpointsError,
    UnsafeWeightsError,
    UnsupportedModelError,
)

IS_3 = kind_of_own_format() == "hooked_transformer"
SIZES = {"n_layers": 2, "d_model": 16, "d_mlp": 32, "d_head": 8, "n_heads": 2, "n_ctx": 12, "d_vocab": 64}
TOKENS = torch.tensor([[3, 5, 7, 9, 3, 5], [2, 4, 6, 8, 2, 4]])
STEPS = (262144, 2621440, 1_100_480_512)  # of NeelNanda/GELU_1L512W_C4_Code, whose files are checkpoints/tokens_*.pth
CONFIGS = {
    "gelu-1l": {"act_fn": "gelu", "attn_only": False, "normalization": "LN"},
    "attn-only-2l": {"act_fn": None, "attn_only": True, "normalization_type": "LN"},
    "solu-1l": {"act_fn": "solu_ln", "attn_only": False, "normalization": "LN"},
    "solu-1l-pile": {"act_fn": "solu_ln", "attn_only": False, "normalization_type": "LN"},
}


_DIMENSIONS = ("d_model", "n_heads", "d_head", "d_mlp", "d_vocab")


def weights(alias: str, seed: int, **changes) -> dict[str, torch.Tensor]:
    """Random weights as the files have them; the oldest under other names and turned."""
    config = SIZES | CONFIGS[alias] | changes
    width, heads, size, mlp, vocabulary = (config[name] for name in _DIMENSIONS)
    shapes = {"embed.W_E": (vocabulary, width), "pos_embed.W_pos": (config["n_ctx"], width)}
    shapes |= {"unembed.W_U": (width, vocabulary), "ln_final.w": (width,), "ln_final.b": (width,)}
    for layer in range(config["n_layers"]):
        block = {f"ln1.{name}": (width,) for name in "wb"}
        block |= {f"attn.W_{name}": (heads, width, size) for name in "QKV"} | {"attn.W_O": (heads, size, width)}
        block |= {f"attn.b_{name}": (heads, size) for name in "QKV"} | {"attn.b_O": (width,)}
        if not config["attn_only"]:
            block |= {f"ln2.{name}": (width,) for name in "wb"}
            block |= {"mlp.W_in": (width, mlp), "mlp.b_in": (mlp,), "mlp.W_out": (mlp, width), "mlp.b_out": (width,)}
        if config["act_fn"] == "solu_ln":
            block |= {f"mlp.ln.{name}": (mlp,) for name in "wb"}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    if alias.endswith("-pile"):
        made = {
            name.replace("ln_final", "norm").replace("ln", "norm"): value.transpose(-2, -1) if "W_" in name else value
            for name, value in made.items()
        }
    else:  # as old versions stored them, and without the bias of the unembedding in one file
        made |= {f"blocks.{layer}.attn.mask": torch.ones(99, 99).tril().bool() for layer in range(config["n_layers"])}
        made |= {"unembed.b_U": torch.randn(vocabulary, generator=generator)} if seed % 2 else {}
    return made


def repository(alias: str) -> str:
    return next(iter(eh.suites().set_index("name").loc[[alias], "repository"]))


def plant(folder: Path, alias: str, **changes) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES | CONFIGS[alias] | changes))
    for seed, step in enumerate(STEPS):
        torch.save(weights(alias, seed), folder / "checkpoints" / f"tokens_{step:012}.pth")
    torch.save(weights(alias, 2), folder / "model_final.pth")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    path = tmp_path_factory.mktemp("served")
    return {(repository(alias), "main"): plant(path / alias, alias) for alias in CONFIGS}


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    with serving(folders) as running:
        use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Serves one repository "me/own" whose files a function may spoil first."""
    running = []

    def start(spoil=lambda folder: None, alias="gelu-1l", **changes):
        folder = plant(tmp_path / "own", alias, **changes)
        spoil(folder)
        running.append(serving({("me/own", "main"): folder}))
        hub = running[0].__enter__()
        use_hub(monkeypatch, hub, tmp_path / "cache")
        return hub, CheckpointSeries.from_hub("me/own", "checkpoints/*_{step}.pth")

    yield start
    for each in running:
        each.__exit__(None, None, None)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS)


@pytest.fixture
def load_theirs(hub, tmp_path, monkeypatch):
    """What transformer-lens' own loader makes of a checkpoint, as it is stored."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "".join(template[1:]))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))

    def load(alias: str, step: int):
        if IS_3:
            from transformer_lens import HookedTransformer

            return HookedTransformer.from_pretrained_no_processing(
                alias, checkpoint_value=step, cache_dir=str(tmp_path / "theirs")
            )
        from transformer_lens.model_bridge.sources.tl_legacy import boot  # pyright: ignore[reportMissingImports]

        return boot(repository(alias), checkpoint_value=step)

    return load


# as transformer-lens reads them


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformer-lens' own loader
@pytest.mark.parametrize("alias", CONFIGS)
def test_models_compute_what_transformer_lens_computes(hub, load_theirs, alias):
    series = eh.suite(alias)
    for step in (STEPS[0], STEPS[2], STEPS[1]):
        expected = logits(load_theirs(alias, step))
        assert torch.equal(logits(series[step].load()), expected)
        series.hooked(step)
        assert torch.equal(logits(series._resident), expected)
    assert len({id(series.hooked(step)) for step in STEPS}) == 1
    assert series.problems == {}


def test_names_numbers_and_tokens(hub):
    series = eh.suite("gelu-1l")
    assert repr(series) == "CheckpointSeries(GELU_1L512W_C4_Code, steps not asked for yet)"
    assert hub.requests == []
    assert series.steps == STEPS
    assert [series.tokens_seen(step) for step in STEPS] == list(STEPS)  # the last is above 10^9, so they are tokens
    name = "checkpoints/tokens_000000262144.pth"
    assert series.source.where(STEPS[0]) == f"NeelNanda/GELU_1L512W_C4_Code, file {name}"
    commit = hub.commit("NeelNanda/GELU_1L512W_C4_Code", "main")
    assert series.identity(STEPS[0]) == f"NeelNanda/GELU_1L512W_C4_Code@{commit}/{name}"
    assert (series.kind, series.size) == (kind_of_own_format(), "1l")
    assert not any("resolve" in request for request in hub.requests)


def test_numbers_that_count_steps_are_no_tokens(serve):
    def as_steps(folder: Path) -> None:
        for step, path in enumerate(sorted((folder / "checkpoints").iterdir())):
            path.rename(path.with_name(f"run_{step * 100}.pth"))

    _, series = serve(as_steps)
    assert (series.steps, series.tokens_seen(100)) == ((0, 100, 200), None)


def test_the_ranking_of_heads_is_that_of_transformer_lens_hooks(hub):
    series = eh.suite("attn-only-2l")
    task = eh.tasks.from_tokens(TOKENS, torch.tensor([7, 6]))
    pre, post = (series[step].load() for step in STEPS[:2])
    found = eh.rank_heads(series[STEPS[0]], series[STEPS[1]], task).table.set_index(["layer", "head"])["delta_p"]
    with torch.no_grad():
        patterns = post.run_with_cache(TOKENS)[1]
        plain = pre(TOKENS)
        for layer in range(2):
            for head in range(2):
                name = f"blocks.{layer}.attn.hook_pattern"

                def replace(pattern, hook, name=name, head=head):
                    pattern = pattern.clone()
                    pattern[:, head] = patterns[name][:, head]
                    return pattern

                patched = pre.run_with_hooks(TOKENS, fwd_hooks=[(name, replace)])
                gained = (patched.softmax(-1) - plain.softmax(-1))[[0, 1], -1, [7, 6]].mean()
                assert found[layer, head] == pytest.approx(float(gained), abs=1e-6)


def test_the_tokenizer_is_the_one_that_the_config_names(tmp_path, monkeypatch):
    own = plant(tmp_path / "own", "gelu-1l", tokenizer_name="NeelNanda/gpt-neox-tokenizer-digits")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    served = {("me/own", "main"): own, ("NeelNanda/gpt-neox-tokenizer-digits", "main"): tmp_path / "tokenizer"}
    with serving(served) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        series = CheckpointSeries.from_hub("me/own", "checkpoints/*_{step}.pth")
        assert series[STEPS[0]].tokenizer().get_vocab()["w7"] == 7
        assert series.hooked(STEPS[0]).tokenizer.get_vocab()["w7"] == 7


def test_no_random_state_is_used(hub):
    state = torch.get_rng_state()
    eh.suite("gelu-1l")[STEPS[0]].load()
    assert torch.equal(torch.get_rng_state(), state)


# what cannot be had


def test_kinds_that_the_format_does_not_become(hub):
    series = eh.suite("gelu-1l")
    other = "bridge" if IS_3 else "hooked_transformer"
    message = f"load as '{kind_of_own_format()}'; .*takes edits of patterns" if IS_3 else "gone since 4.0"
    with pytest.raises(UnsupportedModelError, match=message):
        series[STEPS[0]].load(other)
    with pytest.raises(UnsupportedModelError, match="transformers cannot read it"):
        series[STEPS[0]].load("huggingface")
    assert not any("resolve" in request for request in hub.requests)


def test_positions_added_to_keys_and_queries(serve):
    _, series = serve(alias="attn-only-2l", shortformer_pos=True)
    if IS_3:
        assert series[STEPS[0]].load().cfg.positional_embedding_type == "shortformer"
    else:
        with pytest.raises(UnsupportedModelError, match=r"shortformer\) need transformer-lens 3.x"):
            series[STEPS[0]].load()


class _RunsCode:
    def __reduce__(self):
        return print, ("this code ran",)


def spoiled(**changes):
    """Writes other weights into the second file."""

    def spoil(folder: Path) -> None:
        made = weights("gelu-1l", 1)
        for name, value in changes.items():
            name = name.replace("__", ".")
            made.pop(name) if value is None else made.__setitem__(name, value)
        torch.save(made, folder / "checkpoints" / f"tokens_{STEPS[1]:012}.pth")

    return spoil


def cut(folder: Path) -> None:
    path = folder / "checkpoints" / f"tokens_{STEPS[1]:012}.pth"
    path.write_bytes(path.read_bytes()[:1000])


def with_code(folder: Path) -> None:
    torch.save({"embed.W_E": _RunsCode()}, folder / "checkpoints" / f"tokens_{STEPS[1]:012}.pth")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (spoiled(embed__W_E=torch.full((64, 16), torch.nan)), CheckpointError, "not finite"),
        (spoiled(blocks__0__mlp__W_in=None), CheckpointError, "it lacks blocks.0.mlp"),
        (spoiled(blocks__2__mlp__W_in=torch.zeros(16, 32)), CheckpointError, "it has blocks.2.mlp"),
        (spoiled(blocks__0__attn__W_Q=torch.zeros(2, 16, 9)), CheckpointError, "do not fit the model: .*W_Q"),
        (cut, CheckpointError, "is damaged"),
        (with_code, UnsafeWeightsError, "would run code stored in it"),
    ],
)
def test_spoiled_weights_are_a_problem_of_their_step_only(serve, capfd, spoil, error, message):
    _, series = serve(spoil)
    for use in (lambda: series[STEPS[1]].load(), lambda: series.hooked(STEPS[1])):
        with pytest.raises(error, match=f"step {STEPS[1]} of own .me/own, file checkpoints/tokens_.*{message}"):
            use()
    assert list(series.problems) == [STEPS[1]]
    series.hooked(STEPS[0])
    with pytest.raises(error, match=message):  # swapped into the resident model
        series.hooked(STEPS[1])
    series.hooked(STEPS[2])
    assert torch.equal(logits(series._resident), logits(series[STEPS[2]].load()))
    assert "this code ran" not in capfd.readouterr().out


def test_identical_files_are_noted(serve):
    def copy(folder: Path) -> None:
        first, second, _ = sorted((folder / "checkpoints").iterdir())
        second.write_bytes(first.read_bytes())

    _, series = serve(copy)
    for step in STEPS[:2]:
        series.hooked(step)
    assert series.problems == {STEPS[1]: f"weights identical to step {STEPS[0]}"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"d_model": None}, "config.json has no d_model"), ({"act_fn": None}, "config.json has no act_fn")],
)
def test_a_config_that_lacks_something(serve, changes, message):
    _, series = serve(**changes)
    with pytest.raises(CheckpointError, match=message):
        series.hooked(STEPS[0])


def test_a_config_of_another_activation_is_refused(serve):
    _, series = serve(act_fn="wavy")
    with pytest.raises(UnsupportedModelError, match=r"cannot make the model of config\.json: .*wavy"):
        series.hooked(STEPS[0])


def test_a_repository_without_files_that_fit(serve):
    serve()
    with pytest.raises(
        NoCheckpointsError, match=r"no file of me/own that fits .*files there are: checkpoints/tokens_"
    ):
        _ = CheckpointSeries.from_hub("me/own", "checkpoints/step_{step}.pth").steps
    with pytest.raises(NoCheckpointsError, match=r"files there are: config\.json, model_final\.pth"):
        _ = CheckpointSeries.from_hub("me/own", "{step}.pth").steps
    with pytest.raises(ArgumentError, match="only the name of the file may be open"):
        CheckpointSeries.from_hub("me/own", "*/{step}.pth")


def test_two_files_of_one_step(serve):
    _, series = serve(lambda folder: torch.save({}, folder / "checkpoints" / "other_262144.pth"))
    with pytest.raises(ArgumentError, match="are both step 262144"):
        _ = series.steps


# what is kept


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.pth") if not file.is_symlink())


def test_a_second_session_fetches_nothing_again_and_works_offline(hub, monkeypatch):
    eh.suite("gelu-1l").hooked(STEPS[0])
    hub.requests.clear()
    eh.suite("gelu-1l").hooked(STEPS[0])
    assert not any("resolve" in request for request in hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    series = eh.suite("gelu-1l")
    assert series.steps == STEPS[:1]
    series.hooked(STEPS[0])
    assert hub.requests == []
    with pytest.raises(HubError, match="NeelNanda/SoLU_1L512W_C4_Code, revision main is not in the local cache"):
        _ = eh.suite("solu-1l").steps


def test_evicted_files_leave_nothing(hub, tmp_path):
    series = eh.suite("gelu-1l", cache="evict")
    for step in STEPS:
        series.hooked(step)
        assert weight_bytes(tmp_path / "cache") == 0
    assert hub.fetched("tokens_000000262144.pth") == 1


def test_the_disk_budget_counts_single_files(hub, folders, tmp_path, monkeypatch):
    size = (folders[repository("gelu-1l"), "main"] / "checkpoints" / "tokens_000000262144.pth").stat().st_size
    series = eh.suite("gelu-1l", disk_budget_gb=2.5 * size / 1e9)
    for step in STEPS:
        series.hooked(step)
    assert 0 < weight_bytes(tmp_path / "cache") <= 2.5 * size
    again = eh.suite("gelu-1l", disk_budget_gb=2.5 * size / 1e9)
    hub.requests.clear()
    again.hooked(STEPS[2])
    assert not any(request.endswith(".pth") for request in hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = eh.suite("gelu-1l", disk_budget_gb=2.5 * size / 1e9)
    assert here.steps == STEPS[1:]
    here.hooked(STEPS[1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(ArgumentError, match="less than one checkpoint"):
        eh.suite("gelu-1l", disk_budget_gb=0.5 * size / 1e9).hooked(STEPS[0])


def test_passing_trouble_is_outlived_and_lasting_trouble_is_told(hub):
    hub.fail("tokens_000000262144.pth", status=503, times=1)
    eh.suite("gelu-1l").hooked(STEPS[0])
    hub.fail("tokens_000002621440.pth", status=503)
    with pytest.raises(HubError, match="status 503"):
        eh.suite("gelu-1l").hooked(STEPS[1])


@pytest.mark.parametrize("n_layers", [1, 6, 8, 10])
def test_the_oldest_weights_are_turned_as_transformer_lens_turns_them(n_layers):
    try:
        from transformer_lens.pretrained.weight_conversions import convert_neel_solu_old_weights as convert
    except ImportError:
        from transformer_lens.model_bridge.sources.tl_legacy import (  # pyright: ignore[reportMissingImports]
            _convert_neel_solu_old_weights as convert,
        )
    old = weights("solu-1l-pile", 0, n_layers=n_layers)
    expected = convert(dict(old), SimpleNamespace(n_layers=n_layers))
    found = from_old_layout(old, n_layers)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
