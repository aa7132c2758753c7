"""Sparse autoencoders: against SAELens, scikit-learn, dictionaries that were planted, and passes edited by hand."""

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

import emergent_heads as eh
from emergent_heads import errors, sae
from emergent_heads.analysis.ablation_examples import draw_examples
from emergent_heads.analysis.probe_fits import Fitting
from emergent_heads.analysis.probes import Probe, Probes, ProbeSeries
from emergent_heads.models.hooks import editing_output
from emergent_heads.sae.ablation import LATENT_CONTROLS, _Pool
from emergent_heads.sae.autoencoder import OWN, hook_of, layer_of
from emergent_heads.sae.comparison import Comparing, _Reading
from emergent_heads.sae.one_latent import Sparse, fit
from emergent_heads.sae.series import LatentSeries
from emergent_heads.sae.training import HELD_OUT, SPLIT

D_IN, D_SAE, K = 12, 30, 4
ROWS = torch.randn(40, D_IN, generator=torch.Generator().manual_seed(5)) * 2 + 0.5


@pytest.fixture(scope="module")
def sae_lens():
    return pytest.importorskip("sae_lens", reason="needs SAELens, of the extra sae (transformer-lens 3)")


def by_hand(architecture="standard", **settings) -> sae.SparseAutoencoder:
    """Random weights."""
    generator = torch.Generator().manual_seed(3)
    biases = {
        "standard": ("b_enc",),
        "topk": ("b_enc",),
        "abstopk": ("b_enc",),
        "jumprelu": ("b_enc", "threshold"),
        "gated": ("b_gate", "b_mag", "r_mag"),
    }[architecture]
    settings = {"k": K if architecture.endswith("topk") else None, "layer": 0, **settings}
    return sae.SparseAutoencoder(
        architecture,
        torch.randn(D_IN, D_SAE, generator=generator) / D_IN**0.5,
        torch.randn(D_SAE, D_IN, generator=generator) / 3,
        torch.randn(D_IN, generator=generator) / 2,
        {name: torch.rand(D_SAE, generator=generator) - 0.3 * (name != "threshold") for name in biases},
        **settings,
    )


def explicit(own: sae.SparseAutoencoder, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Latents and reconstruction of one row, one latent after the other."""
    weights = {name: value.double().numpy() for name, value in own.biases.items()}
    enc, dec, b_dec = (getattr(own, name).double().numpy() for name in ("W_enc", "W_dec", "b_dec"))
    scale, shift, x = 1.0, 0.0, row
    if own.normalisation == "constant_norm_rescale":
        scale = np.linalg.norm(row) / np.sqrt(D_IN)
        x = row / scale
    if own.normalisation == "layer_norm":
        shift, scale = row.mean(), row.std(ddof=1)
        x = (row - shift) / (scale + 1e-5)
    x = x - b_dec * own.b_dec_is_taken_off
    norms = np.linalg.norm(dec, axis=1)
    latents = np.zeros(D_SAE)
    for j in range(D_SAE):
        read = x @ enc[:, j]
        if own.architecture == "gated":
            on = read + weights["b_gate"][j] > 0
            latents[j] = on * max(0, read * np.exp(weights["r_mag"][j]) + weights["b_mag"][j])
            continue
        read += weights["b_enc"][j]
        if own.architecture == "jumprelu":
            latents[j] = max(0, read) if read > weights["threshold"][j] else 0
        elif own.architecture == "standard":
            latents[j] = max(0, read)
        else:
            latents[j] = read * (norms[j] if own.by_decoder_norm else 1)
    if own.architecture.endswith("topk"):
        size = np.abs(latents) if own.architecture == "abstopk" else latents
        latents[np.argsort(-size)[K:]] = 0
        latents = latents if own.architecture == "abstopk" else latents.clip(0)
    written = (latents / norms if own.by_decoder_norm else latents) @ dec + b_dec
    return latents, written * scale + shift


KINDS = [
    ("standard", {}),
    ("standard", {"b_dec_is_taken_off": False, "normalisation": "layer_norm"}),
    ("topk", {}),
    ("topk", {"by_decoder_norm": True, "normalisation": "constant_norm_rescale"}),
    ("abstopk", {"by_decoder_norm": True}),
    ("jumprelu", {"normalisation": "layer_norm"}),
    ("gated", {"b_dec_is_taken_off": False}),
    ("gated", {"normalisation": "constant_norm_rescale"}),
]
NAMES = [f"{architecture} {' '.join(settings)}" for architecture, settings in KINDS]


# ---- latents ----


@pytest.mark.parametrize(("architecture", "settings"), KINDS, ids=NAMES)
def test_latents_are_those_of_the_definition(architecture, settings):
    own = by_hand(architecture, **settings)
    latents, rebuilt = own.encode(ROWS), own.reconstruct(ROWS)
    expected = [explicit(own, row.double().numpy()) for row in ROWS]
    np.testing.assert_allclose(latents, np.stack([each for each, _ in expected]), atol=2e-5)
    np.testing.assert_allclose(rebuilt, np.stack([each for _, each in expected]), atol=2e-5)
    assert (latents != 0).any()


@pytest.mark.parametrize(("architecture", "settings"), KINDS, ids=NAMES)
def test_contributions_of_latents_add_up_to_the_reconstruction(architecture, settings):
    own = by_hand(architecture, **settings)
    rest = own.decode(torch.zeros(len(ROWS), D_SAE), of=ROWS)
    contributions = own.amounts(ROWS)[..., None] * own.W_dec
    torch.testing.assert_close(contributions.sum(1) + rest, own.reconstruct(ROWS), atol=2e-5, rtol=1e-5)


def test_directions_are_those_of_reading_and_writing():
    own = by_hand(normalisation="layer_norm")
    row, push = ROWS[:1], torch.full((D_IN,), 0.7)
    torch.testing.assert_close(own.encode(row), own.encode(row + push), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own.encoder_directions @ push, torch.zeros(D_SAE), atol=1e-6, rtol=0)
    torch.testing.assert_close(own.decoder_directions.norm(dim=1), torch.ones(D_SAE))


def test_quality_is_that_of_the_definition():
    own = by_hand("topk", b_dec_is_taken_off=True)
    quality = own.measured(ROWS)
    left = (ROWS - own.reconstruct(ROWS)).double().square().sum()
    spread = (ROWS.double() - ROWS.double().mean(0)).square().sum()
    assert quality.explained_variance == pytest.approx(float(1 - left / spread))
    latents = own.encode(ROWS)
    assert quality.l0 == pytest.approx(float((latents != 0).sum() / len(ROWS)))
    assert quality.n_dead == int((latents == 0).all(0).sum())


def test_normalised_rows_are_asked_for():
    own = by_hand(normalisation="layer_norm")
    with pytest.raises(errors.ArgumentError, match="reconstruct"):
        own.decode(own.encode(ROWS))
    with pytest.raises(errors.ArgumentError, match="rows of width 5"):
        own.encode(torch.zeros(2, 5))


def test_layers_have_the_names_of_transformerlens():
    assert [layer_of(hook_of(layer)) for layer in (-1, 0, 3)] == [-1, 0, 3]
    assert layer_of("blocks.2.hook_resid_pre") == 1
    for other in ("blocks.2.hook_mlp_out", "blocks.1.attn.hook_z", "layers.3", None):
        assert layer_of(other) is None


# ---- folders of SAELens ----


@pytest.mark.parametrize(("architecture", "settings"), KINDS, ids=NAMES)
def test_what_is_saved_is_loaded(tmp_path, architecture, settings):
    own = by_hand(architecture, **settings)
    again = sae.load(own.save(tmp_path / "sae"))
    assert torch.equal(again.reconstruct(ROWS), own.reconstruct(ROWS))
    assert (again.layer, again.k, again.architecture) == (0, own.k, architecture)


@pytest.mark.parametrize(("architecture", "settings"), KINDS, ids=NAMES)
def test_saelens_reads_what_is_saved(sae_lens, tmp_path, architecture, settings):
    own = by_hand(architecture, **settings)
    theirs = sae_lens.SAE.load_from_disk(str(own.save(tmp_path / "sae")))
    assert_same(own, theirs)


def assert_same(own, theirs):
    with torch.no_grad():
        torch.testing.assert_close(own.encode(ROWS), theirs.encode(ROWS), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.reconstruct(ROWS), theirs(ROWS), atol=1e-5, rtol=1e-5)


def lens_folder(sae_lens, path: Path, architecture: str, *, training=False, **settings):
    """A folder written by SAELens itself, with random weights."""
    name = {"standard": "Standard", "topk": "TopK", "abstopk": "AbsTopK", "jumprelu": "JumpReLU", "gated": "Gated"}
    kind = "TrainingSAE" if training else "SAE"
    classes = [f"{name[architecture]}{kind}{end}" for end in ("Config", "")]
    modules = [module for key, module in sys.modules.items() if key.startswith("sae_lens.saes.")]
    config, model = (next(getattr(each, wanted) for each in modules if hasattr(each, wanted)) for wanted in classes)
    metadata = sae_lens.saes.sae.SAEMetadata(hook_name="blocks.1.hook_resid_post", model_name="tiny")
    theirs = model(config(d_in=D_IN, d_sae=D_SAE, metadata=metadata, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 3)
        if architecture == "jumprelu":
            theirs.threshold.abs_()
    if training:
        theirs.save_inference_model(path)
    else:
        theirs.save_model(path)
    return theirs


LENS_KINDS = [
    ("standard", {"apply_b_dec_to_input": False}),
    ("topk", {"k": K, "rescale_acts_by_decoder_norm": True}),
    ("topk", {"k": K, "training": True}),
    ("abstopk", {"k": K, "normalize_activations": "layer_norm"}),
    ("jumprelu", {"normalize_activations": "constant_norm_rescale"}),
    ("jumprelu", {"training": True}),
    ("gated", {"normalize_activations": "layer_norm"}),
    ("gated", {"training": True}),
]


@pytest.mark.parametrize(("architecture", "settings"), LENS_KINDS, ids=[f"{name} {s}" for name, s in LENS_KINDS])
def test_folders_of_saelens_are_read_as_it_reads_them(sae_lens, tmp_path, architecture, settings):
    lens_folder(sae_lens, tmp_path, architecture, **settings)
    own, theirs = sae.load(tmp_path), sae_lens.SAE.load_from_disk(str(tmp_path))
    assert_same(own, theirs)
    assert (own.layer, own.name, own.architecture) == (1, "blocks.1.hook_resid_post", architecture)


def test_batch_topk_is_read_as_the_jumprelu_it_is_saved_as(sae_lens, tmp_path):
    config = sae_lens.BatchTopKTrainingSAEConfig(d_in=D_IN, d_sae=D_SAE, k=K)
    theirs = sae_lens.BatchTopKTrainingSAE(config)
    theirs.topk_threshold.fill_(0.05)
    theirs.save_inference_model(tmp_path / "inference")
    own = sae.load(tmp_path / "inference")
    assert own.architecture == "jumprelu"
    assert_same(own, sae_lens.SAE.load_from_disk(str(tmp_path / "inference")))
    theirs.save_model(tmp_path / "training")
    with pytest.raises(errors.UnsupportedModelError, match="save_inference_model"):
        sae.load(tmp_path / "training")


def test_a_scale_outside_the_weights_is_found_or_asked_for(sae_lens, tmp_path):
    theirs = lens_folder(sae_lens, tmp_path, "topk", k=K, normalize_activations="expected_average_only_in")
    with pytest.raises(errors.ArgumentError, match="activation_scale"):
        sae.load(tmp_path)
    assert_same(sae.load(tmp_path, activation_scale=1.0), sae_lens.SAE.load_from_disk(str(tmp_path)))
    theirs.fold_activation_norm_scaling_factor(1.7)
    assert_same(sae.load(tmp_path, activation_scale=1.7), theirs)
    sae_lens.training.activation_scaler.ActivationScaler(1.7).save(str(tmp_path / "activation_scaler.json"))
    assert_same(sae.load(tmp_path), theirs)


def test_folders_from_before_version_6(sae_lens, tmp_path):
    lens_folder(sae_lens, tmp_path, "topk", k=K)
    old = {"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "hook_point": "blocks.3.hook_resid_pre"}
    old |= {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}, "normalize_activations": False}
    (tmp_path / "cfg.json").write_text(json.dumps(old))
    own = sae.load(tmp_path)
    assert (own.layer, own.architecture) == (2, "topk")
    assert_same(own, sae_lens.SAE.load_from_disk(str(tmp_path)))


def change_config(path, **values):
    config = json.loads((path / "cfg.json").read_text())
    (path / "cfg.json").write_text(json.dumps({**config, **values}))


def change_weights(path, **values):
    weights = {**load_file(path / "sae_weights.safetensors"), **values}
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, path / "sae_weights.safetensors")


WRONG = {
    "no config": (lambda path: (path / "cfg.json").unlink(), errors.CheckpointError, "has no cfg.json"),
    "no weights": (lambda path: (path / "sae_weights.safetensors").unlink(), errors.CheckpointError, "has no sae_"),
    "cut config": (lambda path: (path / "cfg.json").write_text('{"d_in"'), errors.CheckpointError, "cannot be read"),
    "a list": (lambda path: (path / "cfg.json").write_text("[1]"), errors.CheckpointError, "no names and values"),
    "cut weights": (
        lambda path: (path / "sae_weights.safetensors").write_bytes(b"12345678"),
        errors.CheckpointError,
        "cannot be read",
    ),
    "a weight less": (lambda path: change_weights(path, b_enc=None), errors.CheckpointError, "lacks b_enc"),
    "a weight more": (lambda path: change_weights(path, r_mag=torch.ones(D_SAE)), errors.CheckpointError, "r_mag"),
    "shape": (lambda path: change_weights(path, b_enc=torch.ones(3)), errors.CheckpointError, r"shape \[3\]"),
    "not finite": (
        lambda path: change_weights(path, b_dec=torch.full((D_IN,), torch.nan)),
        errors.CheckpointError,
        "b_dec is not finite",
    ),
    "fine-tuned": (
        lambda path: change_weights(path, scaling_factor=torch.full((D_SAE,), 2.0)),
        errors.UnsupportedModelError,
        "fine-tuning",
    ),
    "transcoder": (
        lambda path: change_config(path, architecture="transcoder"),
        errors.UnsupportedModelError,
        "another place than it reads",
    ),
    "unknown": (
        lambda path: change_config(path, architecture="topkk"),
        errors.UnsupportedModelError,
        "nearest: topk",
    ),
    "whitening": (
        lambda path: change_config(path, normalize_activations="covariance_whitening"),
        errors.UnsupportedModelError,
        "fold_activation_whitening",
    ),
    "heads": (
        lambda path: change_config(path, reshape_activations="hook_z"),
        errors.UnsupportedModelError,
        "attention heads",
    ),
    "activation": (
        lambda path: change_config(path, activation_fn="tanh-relu"),
        errors.UnsupportedModelError,
        "tanh-relu",
    ),
    "k": (lambda path: change_config(path, architecture="topk", k=99), errors.CheckpointError, "k is 99"),
}


@pytest.mark.parametrize("what", WRONG)
def test_odd_folders_are_refused_by_name(tmp_path, what):
    spoil, error, message = WRONG[what]
    path = by_hand().save(tmp_path / "sae")
    spoil(path)
    with pytest.raises(error, match=message):
        sae.load(path)


def test_the_layer_can_be_said_where_the_folder_does_not(tmp_path):
    path = by_hand(layer=None, metadata={"hook_name": "layers.3"}).save(tmp_path / "sae")
    assert sae.load(path).layer is None
    assert sae.load(path, layer=3).layer == 3
    with pytest.raises(errors.ArgumentError, match="after layer 0"):
        sae.load(by_hand().save(tmp_path / "other"), layer=1)
    with pytest.raises(errors.ArgumentError, match="activation_scale=2"):
        sae.load(tmp_path / "other", activation_scale=2.0)


# ---- readouts of one latent ----


def some_latents(generator, n=300):
    """Sparse, dense, never active, always the same, and separating."""
    z = generator.standard_normal((n, 6))
    z[:, 0] = np.where(z[:, 0] > 1, z[:, 0], 0)
    z[:, 1] = 0
    z[:, 2] = 3.0
    z[:, 3] = np.where(z[:, 3] < 0, 4 * z[:, 3], 0)
    return z


def test_one_latent_readouts_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    z, new = some_latents(generator), some_latents(generator, 80)
    labels, new_labels = (np.stack([x[:, 0] > 0, x[:, 3] < -2, x[:, 4] + x[:, 0] > 0.3]) for x in (z, new))
    continuous, new_continuous = (np.stack([x[:, 0] * 2 + x[:, 4], x[:, 5]]) for x in (z, new))
    x, new_x = (Sparse.of(lambda rows: rows, torch.from_numpy(each), z.shape[1]) for each in (z, new))
    found = fit(x, torch.from_numpy(labels).double(), continuous=False)
    losses = found.losses(new_x, torch.from_numpy(new_labels).double())
    ridge = fit(x, torch.from_numpy(continuous), continuous=True)
    errors_of = ridge.losses(new_x, torch.from_numpy(new_continuous))
    for j in range(z.shape[1]):
        spread = z[:, j].std() if z[:, j].std() > 1e-9 else 1.0
        for i, (train, test) in enumerate(zip(labels, new_labels, strict=True)):
            theirs = LogisticRegression(C=1.0, tol=1e-12, max_iter=10_000).fit(z[:, [j]] / spread, train)
            assert float(found.slopes[i, j]) == pytest.approx(theirs.coef_[0, 0] / spread, abs=1e-5)
            p = theirs.predict_proba(new[:, [j]] / spread)
            assert float(losses[i, j]) == pytest.approx(log_loss(test, p, labels=[False, True]), abs=1e-6)
        for i, (train, test) in enumerate(zip(continuous, new_continuous, strict=True)):
            theirs = Ridge(alpha=1.0).fit(z[:, [j]] / spread, train)
            expected = ((theirs.predict(new[:, [j]] / spread) - test) ** 2).mean()
            assert float(errors_of[i, j]) == pytest.approx(expected, abs=1e-9)


# ---- a planted dictionary ----

N_DIRECTIONS, WIDTH, COPIES = 8, 16, 50  # so many that labels cannot be told by the tokens
PAIRS = np.repeat(np.array(list(combinations(range(N_DIRECTIONS), 2))), COPIES, axis=0)


@pytest.fixture(scope="module")
def dictionary():
    """Unit vectors, not orthogonal."""
    directions = torch.randn(N_DIRECTIONS, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(directions, dim=1)


@pytest.fixture(scope="module")
def planted(dictionary):
    """A model whose embedding of each token is a sum of two of the directions, by random amounts."""
    config = eh.SmallModelConfig.transformer_pp(1, WIDTH, 2, vocabulary_size=len(PAIRS), context=8)
    model = eh.SmallModel(config, seed=0).eval()
    amounts = 1 + 2 * torch.rand(len(PAIRS), 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.embed.weight.copy_((amounts[:, :, None] * dictionary[PAIRS]).sum(1))
    return model


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(4).integers(len(PAIRS), size=(900, 6))


def holds(tokens, at):
    """`[row, place, direction]`: whether the token holds the direction."""
    return (PAIRS[tokens[:, at]][..., None] == np.arange(N_DIRECTIONS)).any(axis=2)


@pytest.fixture(scope="module")
def planted_task(tokens):
    return eh.tasks.from_tokens(tokens, np.zeros(len(tokens), int))


FEATURE = eh.Feature("holds", "multilabel", lambda tokens: holds(tokens, [2, 4]), [2, 4])
PROBES = {"n_train": 600, "n_test": 150, "layers": [-1, 0], "n_untrained": 0, "progress": False}


@pytest.fixture(scope="module")
def planted_probes(planted, planted_task):
    return eh.fit_probes(planted, planted_task, FEATURE, **PROBES)


@pytest.fixture(scope="module")
def right(dictionary):
    """The autoencoder that has the planted directions as its latents 3 to 10, and 5 that nothing activates."""
    exact = torch.linalg.pinv(dictionary)
    never = torch.zeros(WIDTH, 1)
    others = torch.nn.functional.normalize(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(7)), dim=1)
    w_enc = torch.cat([never.expand(-1, 3), exact, never.expand(-1, 2)], dim=1)
    w_dec = torch.cat([others[:3], dictionary, others[3:]])
    b_enc = torch.full((13,), -1e-3)
    return sae.SparseAutoencoder("standard", w_enc, w_dec, torch.zeros(WIDTH), {"b_enc": b_enc}, layer=-1)


def test_latents_that_carry_a_feature_are_found(right, planted, planted_task, planted_probes):
    found = sae.compare_features(planted_probes, right, planted, planted_task, features=FEATURE, progress=False)
    table = found.table
    assert len(table) == 2 * N_DIRECTIONS
    assert (table["latent"] == table["component"] + 3).all()
    assert (table["latent_loss"] < 0.03).all()
    assert (table["gap_closed"] > 0.95).all()
    assert (table["random_gap_closed"] < 0.8).all()
    means = table[["shuffled_loss", "prior_loss"]].mean()
    assert means["shuffled_loss"] == pytest.approx(means["prior_loss"], rel=0.05)
    assert (table["slope"] > 0).all()
    assert (table["nearest_latent"].isin(range(3, 11))).all()
    assert found.latents_of("holds") == {place: tuple(range(3, 11)) for place in (0, 1)}
    assert "holds" in repr(found)
    assert found.plot().axes[0].get_title() == "holds"
    with pytest.raises(errors.ArgumentError, match="n_best=9"):
        found.latents_of("holds", 9)
    with pytest.raises(errors.ArgumentError, match="was not compared"):
        found.latents_of("hold")


def test_numbers_of_one_latent_are_those_of_the_definition(right, planted, tokens, planted_task, planted_probes):
    found = sae.compare_features(planted_probes, right, planted, planted_task, features=FEATURE, progress=False)
    row = found.table.iloc[3]
    probe = planted_probes.probe("holds", int(row["place"]), -1)
    unit = probe.weights[3] / np.linalg.norm(probe.weights[3])
    assert row["decoder_cosine"] == pytest.approx(float(right.W_dec[6].numpy() @ unit), abs=1e-5)
    enc = right.W_enc[:, 6].numpy()
    assert row["encoder_cosine"] == pytest.approx(enc @ unit / np.linalg.norm(enc), abs=1e-5)
    mean_probe_loss = found.table.groupby("place")["probe_loss"].mean()
    of_table = planted_probes.table.loc[planted_probes.table["layer"] == -1].set_index("place")
    np.testing.assert_allclose(mean_probe_loss, of_table["loss"], atol=1e-4)
    np.testing.assert_allclose(found.table.groupby("place")["prior_loss"].mean(), of_table["prior_loss"], atol=1e-6)
    share = holds(tokens, [2])[:, 0, 3].mean()
    assert row["active"] == pytest.approx(share, abs=0.1)


def test_random_latents_are_as_often_active_and_the_best_is_chosen(right, planted, planted_task, planted_probes):
    comparing = Comparing.open(eh.hooked(planted), planted_task, planted_probes, FEATURE, seed=0)
    found = comparing.compare(eh.hooked(planted), planted_probes, right, n_best=1).table
    for _, site, x in Fitting((-1,), (1.0,), 0, 1.0).blocks(eh.hooked(planted), comparing.data):
        reading = _Reading(site, x, right, 0)
        counts = (right.encode(x[site.train]) != 0).sum(0)
        random = reading._random.only(site.train)
        np.testing.assert_allclose(random.active, counts[counts > 0], atol=3)  # but for ties: tokens come again
        (target,) = site.targets
        labels, dense = target.labels.numpy(), np.zeros((len(x), random.n_latents))
        dense[reading._random.rows, reading._random.latents] = reading._random.values
        for component, (train, test) in enumerate(zip(labels[:, site.train], labels[:, site.test], strict=True)):
            losses = []
            for z in dense.T[..., None]:
                z = z / z[site.train].std()
                fitted = LogisticRegression(C=1.0, tol=1e-10).fit(z[site.train], train)
                losses.append([log_loss(y, fitted.predict_proba(z[part])) for part, y in
                               ((site.train, train), (site.test, test))])  # fmt: skip
            row = found.loc[(found["place"] == target.place) & (found["component"] == component)].iloc[0]
            assert row["random_loss"] == pytest.approx(min(losses)[1], abs=1e-4)


def test_what_does_not_belong_together_is_refused(right, planted, planted_task, planted_probes, dictionary):
    compare = {"features": FEATURE, "progress": False}
    other = eh.SmallModel(planted.config, seed=1).eval()
    with pytest.raises(errors.ModelMismatchError, match="another checkpoint"):
        sae.compare_features(planted_probes, right, other, planted_task, **compare)
    with pytest.raises(errors.ModelMismatchError, match="width 12"):
        sae.compare_features(planted_probes, by_hand(layer=-1), planted, planted_task, **compare)
    only = planted_probes.at_layers([0])
    with pytest.raises(errors.ArgumentError, match="probe its layer too"):
        sae.compare_features(only, right, planted, planted_task, **compare)
    unnamed = sae.SparseAutoencoder("standard", right.W_enc, right.W_dec, right.b_dec, right.biases)
    with pytest.raises(errors.ArgumentError, match=r"say eh\.sae\.load"):
        sae.compare_features(planted_probes, unnamed, planted, planted_task, **compare)
    strange = eh.Feature("strange", "binary", lambda tokens: tokens[:, [2]] > 9, [2])
    with pytest.raises(errors.ArgumentError, match="no probe of a feature 'strange'"):
        sae.compare_features(planted_probes, right, planted, planted_task, features=strange, progress=False)
    made = Probes(planted_probes.table, planted_probes.weights)
    with pytest.raises(errors.ArgumentError, match="do not say"):
        sae.compare_features(made, right, planted, planted_task, **compare)


# ---- training ----

TRAINING = {"layer": -1, "d_sae": 2 * N_DIRECTIONS, "k": 2, "n_activations": 60_000, "batch_size": 128}
TRAINING |= {"learning_rate": 3e-3, "n_held_out": 500, "progress": False}


@pytest.fixture(scope="module")
def learned(sae_lens, planted, tokens):
    return sae.train(planted, tokens, **TRAINING)


def test_planted_directions_are_learned(learned, dictionary):
    cosines = (dictionary @ learned.decoder_directions.T).amax(1)
    assert (cosines > 0.95).all()
    assert learned.quality.explained_variance > 0.95
    assert learned.quality.l0 <= 2
    assert "explained variance" in repr(learned)


def test_what_was_trained_is_kept_as_a_folder_of_saelens(sae_lens, learned, tmp_path):
    learned.save(tmp_path)
    again, theirs = sae.load(tmp_path), sae_lens.SAE.load_from_disk(str(tmp_path))
    x = torch.randn(20, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(again.reconstruct(x), theirs(x), atol=1e-5, rtol=1e-5)
    assert again.quality == learned.quality
    assert (again.layer, theirs.cfg.metadata.hook_name) == (-1, "blocks.0.hook_resid_pre")
    assert again.metadata[OWN]["k"] == 2


def test_training_is_seeded_and_disturbs_and_says_nothing(sae_lens, planted, tokens, capfd):
    short = {**TRAINING, "n_activations": 1000}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sae.train(planted, tokens, **short)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    with torch.no_grad():
        second = sae.train(planted, tokens, **short)
    assert torch.equal(first.W_dec, second.W_dec)
    assert not torch.equal(first.W_dec, sae.train(planted, tokens, **short, seed=1).W_dec)
    assert capfd.readouterr() == ("", "")


def test_the_scale_of_the_residual_stream_is_part_of_the_weights(sae_lens, planted, tokens):
    large = eh.SmallModel(planted.config, seed=0).eval()
    with torch.no_grad():
        large.embed.weight.copy_(50 * planted.embed.weight)
    first, second = (sae.train(model, tokens, **{**TRAINING, "n_activations": 5000}) for model in (planted, large))
    x = planted.embed.weight[:50].detach()
    torch.testing.assert_close(second.reconstruct(50 * x), 50 * first.reconstruct(x), rtol=1e-2, atol=1e-2)
    assert first.b_dec.norm() > 0.1  # without it, any scale would do


class Seen(eh.tasks.Addition):
    """Keeps the batches that are asked for."""

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        batch = super().batch(n, seed=seed, step=step, split=split, device=device)
        self.__dict__.setdefault("asked", []).append((split, step, batch))
        return batch


@pytest.mark.parametrize("positions", ["all", [3, 5], lambda tokens: tokens == 2], ids=["all", "list", "function"])
def test_real_tokens_are_trained_on(sae_lens, monkeypatch, positions):
    task = Seen(3)
    config = eh.SmallModelConfig.transformer_pp(1, 8, 2).for_task(task)
    model = eh.SmallModel(config, seed=0).eval()
    read = []
    monkeypatch.setattr(
        sae.SparseAutoencoder, "measured", lambda self, x: read.append(x) or sae.Quality(0.0, 0.0, 0, 4, len(x))
    )
    sae.train(
        model, task, layer=0, d_sae=4, k=2, n_activations=100, batch_size=50, n_held_out=200, positions=positions,
        progress=False,
    )  # fmt: skip
    assert {split for split, _, _ in task.asked} == {SPLIT, HELD_OUT}
    (first,) = [batch for split, step, batch in task.asked if split == HELD_OUT and step == 0]
    inputs = first.tokens[:, :-1]
    resid = eh.hooked(model).residual(inputs, [0])[0]
    expected = []
    for row in range(len(inputs)):
        last = int(first.answer_mask[row].nonzero().max()) - 1  # the model reads no further than it must
        for position in range(last + 1):
            token = int(inputs[row, position])
            if positions == "all" or (token == 2 if callable(positions) else position in positions):
                expected.append(resid[row, position])
    n = min(200, len(expected))
    torch.testing.assert_close(read[0][:n], torch.stack(expected)[:n])


def test_fixed_rows_are_divided(sae_lens, planted, tokens, monkeypatch):
    from emergent_heads.sae.training import _Source

    source = _Source.of(torch.from_numpy(tokens[:100].repeat(2, axis=0)), eh.hooked(planted), 0, "all")
    train = torch.cat([source.draw(64, number, False)[0] for number in range(12)])
    held_out = torch.cat([source.draw(64, number, True)[0] for number in range(3)])
    rows = {tuple(row) for row in train.tolist()}
    assert len(rows) == 90
    assert not rows & {tuple(row) for row in held_out.tolist()}
    ahead = source.draw(180, 0, False)[0]
    _, counts = np.unique(ahead.numpy(), axis=0, return_counts=True)
    assert (counts == 2).all()  # each row once before any comes again


WRONG_TRAINING = {
    "layer": ({"layer": 1}, "layer 1: this model has layers 0 to 0"),
    "k": ({"k": 99}, "k is 99"),
    "rows": ({"data": torch.zeros(3, 4)}, r"token ids"),
    "one row": ({"data": torch.ones(5, 4, dtype=torch.long)}, "one row only"),
    "place": ({"positions": [9]}, "positions 0 to 5"),
    "word": ({"positions": "last"}, "'all', a list"),
    "no mask": ({"positions": lambda tokens: tokens}, "True or False"),
    "nothing": ({"positions": lambda tokens: tokens < 0}, "no real token"),
    "rate": ({"learning_rate": 0.0}, "learning_rate"),
}


@pytest.mark.parametrize("what", WRONG_TRAINING)
def test_arguments_of_training_are_checked(sae_lens, planted, tokens, what):
    changed, message = WRONG_TRAINING[what]
    arguments = {**TRAINING, "n_activations": 200, "data": tokens, **changed}
    with pytest.raises(errors.ArgumentError, match=message):
        sae.train(planted, arguments.pop("data"), **arguments)


def test_training_without_saelens_says_what_to_install(planted, tokens, monkeypatch):
    monkeypatch.setitem(sys.modules, "sae_lens", None)
    with pytest.raises(errors.ArgumentError, match=r"pip install 'emergent-heads\[sae\]'"):
        sae.train(planted, tokens, **TRAINING)


# ---- ablation ----

TASK = eh.tasks.Addition(3)
N, N_REFERENCE = 40, 60


@pytest.fixture(scope="module")
def adder():
    return eh.SmallModel(eh.SmallModelConfig.transformer_pp(2, D_IN, 2).for_task(TASK), seed=0).eval()


@pytest.fixture(scope="module")
def adder_probes(adder):
    """Random ones: what is subtracted are latents."""
    rows, weights = [], {}
    generator = np.random.default_rng(0)
    for feature in TASK.features:
        for place in range(3):
            key = (feature.name, place, 0)
            weights[key] = Probe(feature.name, "binary", place, 0, generator.standard_normal((1, D_IN)), np.zeros(1))
            rows.append(
                {**dict(zip(("feature", "place", "layer"), key, strict=True)), "penalty": 1.0, "is_best": True}
            )
    return Probes(pd.DataFrame(rows).assign(validation_loss=0.5), weights)


def ablate(model, probes, latents, own, controls=3, **options):
    options = {"n": N, "n_reference": N_REFERENCE, "progress": False, **options}
    return sae.ablate_latents(model, TASK, probes, latents, own, controls, **options)


@pytest.mark.parametrize(("architecture", "settings"), KINDS[1:6:2], ids=NAMES[1:6:2])
def test_latents_are_subtracted_as_by_hand(adder, adder_probes, architecture, settings):
    own = by_hand(architecture, **settings)
    latents = {"carry": {0: [1], 1: [2, 7], 2: [1, 9]}, "first_operand": 5}
    found = ablate(adder, adder_probes, latents, own)
    test, _ = draw_examples(TASK, eh.hooked(adder), N, N_REFERENCE, 0)
    for feature, by_place in (("carry", latents["carry"]), ("first_operand", {0: [5], 1: [5], 2: [5]})):
        positions = test.values(TASK.feature(feature)).positions

        def edit(resid, positions=positions, by_place=by_place):
            resid = resid.clone()
            for row in range(len(resid)):
                for place, some in by_place.items():
                    x = resid[row, positions[row, place]].clone()
                    for latent in some:
                        resid[row, positions[row, place]] -= own.amounts(x)[latent] * own.W_dec[latent]
            return resid

        with torch.no_grad(), editing_output(eh.hooked(adder).blocks[0], edit):
            log_p = adder(test.inputs).log_softmax(-1)
        at = test.reads.positions.clamp_min(0)
        chosen = log_p.gather(1, at[:, :, None].expand(-1, -1, log_p.shape[2]))
        losses = -chosen.gather(2, test.reads.targets[:, :, None])[:, :, 0].numpy()
        expected = np.where(test.in_loss, losses, 0).sum(1) / test.in_loss.sum(1).mean()
        np.testing.assert_allclose(found.loss[feature, "latents"][0], expected, atol=2e-5)
        assert not np.allclose(expected, found.loss[feature, "none"][0], atol=1e-4)


def test_both_ablations_stand_in_one_table(adder, adder_probes):
    own = by_hand(normalisation="constant_norm_rescale")
    found = ablate(adder, adder_probes, {"carry": {0: 1, 1: 2, 2: (3, 8)}}, own, probe_kinds=("random",))
    assert found.table["edit"].tolist() == ["none", "feature", "random", "latents", *LATENT_CONTROLS]
    of_probe = eh.ablate_features(
        adder, TASK, adder_probes, 3, features="carry", kinds=("random",), n=N, n_reference=N_REFERENCE, progress=False
    )
    pd.testing.assert_frame_equal(found.table.iloc[:3], of_probe.table)
    table, controls = found.table.set_index("edit"), found.controls.set_index("edit")
    assert table.loc["turned_latents", "removed_norm"] == pytest.approx(table.loc["latents", "removed_norm"], rel=1e-5)
    np.testing.assert_allclose(controls.loc["turned_latents", "removed_norm"], table.loc["latents", "removed_norm"])
    assert table.loc["latents", "rank"] == pytest.approx(4 / 3)
    for kind in ("matched_latents", "other_latents"):
        for name in controls.loc[kind, "name"]:
            first, second, third = (set(part.split(", ")) for part in name.split("; "))
            assert "1" not in first
            assert "2" not in second
            assert not {"3", "8"} & third
            assert len(third) == 2
    sizes = np.abs(np.log(controls["removed_norm"] / table.loc["latents", "removed_norm"])).groupby("edit").mean()
    assert sizes["matched_latents"] < sizes["other_latents"]
    assert table.loc["none", "prior_loss"] == table.loc["latents", "prior_loss"]
    assert found.latents == {"carry": {0: (1,), 1: (2,), 2: (3, 8)}}
    assert "without latents" in repr(found)
    labels = [label.get_text() for label in found.plot().axes[0].get_yticklabels()]
    assert "latents subtracted" in labels


def test_matched_latents_are_the_nearest_in_mean_square():
    own = by_hand()
    pool = _Pool.of(ROWS, (4,), own)
    squares = (own.amounts(ROWS)[..., None] * own.W_dec).square().sum(2).mean(0).log()
    others = [latent for latent in range(D_SAE) if latent != 4 and torch.isfinite(squares[latent])]
    nearest = sorted(others, key=lambda latent: abs(float(squares[latent] - squares[4])))[:8]
    generator = np.random.default_rng(0)
    assert {pool.draw(generator, matched=True)[0] for _ in range(200)} == set(nearest)
    assert {pool.draw(generator, matched=False)[0] for _ in range(2000)} == set(others)


def test_share_of_variance_is_that_of_the_reference_rows(adder, adder_probes):
    own = by_hand()
    found = ablate(adder, adder_probes, {"carry": 4}, own, controls=0)
    _, reference = draw_examples(TASK, eh.hooked(adder), N, N_REFERENCE, 0)
    resid = eh.hooked(adder).residual(reference.inputs, [0])[0]
    shares = []
    for positions in reference.values(TASK.feature("carry")).positions.T:
        x = resid[torch.arange(len(resid)), torch.from_numpy(positions)]
        left = x - own.amounts(x)[:, [4]] * own.W_dec[4]
        shares.append(1 - float(left.var(0).sum() / x.var(0).sum()))
    row = found.table.set_index("edit").loc["latents"]
    assert row["removed_variance"] == pytest.approx(np.mean(shares), abs=1e-4)


def test_what_cannot_be_ablated_fails_loudly(adder, adder_probes):
    silent = by_hand()
    silent.biases["b_enc"][4] = -100.0
    with pytest.raises(errors.InterventionHasNoEffect, match="latents 4 are not active"):
        ablate(adder, adder_probes, {"carry": 4}, silent)
    too_early = eh.Feature("too_early", "binary", lambda tokens: tokens[:, [2]], [2])
    probe = Probe("too_early", "binary", 0, 1, np.ones((1, D_IN)), np.zeros(1))
    row = {"feature": "too_early", "place": 0, "layer": 1, "is_best": True, "validation_loss": 0.5, "penalty": 1.0}
    of_last_layer = Probes(pd.DataFrame([row]), {("too_early", 0, 1): probe})
    with pytest.raises(errors.InterventionHasNoEffect, match="nothing that is read comes after"):
        ablate(adder, of_last_layer, {"too_early": range(D_SAE)}, by_hand(layer=1), features=too_early)
    for latents, message in (
        ({"carry": 30}, "latents 0 to 29"),
        ({"carry": []}, "no latents are given"),
        ({"carry": {7: 1}}, "other places"),
        ([1, 2], "latents is a list"),
        ({"carry": "a"}, "a latent of 'carry'"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            ablate(adder, adder_probes, latents, by_hand())
    with pytest.raises(errors.ArgumentError, match="no latents are given for feature 'carry'"):
        ablate(adder, adder_probes, {"first_operand": 1}, by_hand(), features="carry")
    with pytest.raises(errors.ArgumentError, match="kinds"):
        ablate(adder, adder_probes, {"carry": 1}, by_hand(), kinds=("random",))


def test_a_comparison_says_which_latents(right, planted, planted_task, planted_probes):
    compared = sae.compare_features(planted_probes, right, planted, planted_task, features=FEATURE, progress=False)
    found = sae.ablate_latents(
        planted, planted_task, planted_probes, compared, right, 2, features=FEATURE, n=40, n_reference=60,
        probe_kinds=(), progress=False,
    )  # fmt: skip
    row = found.table.set_index("edit").loc["latents"]
    assert row["rank"] == N_DIRECTIONS
    assert row["removed_variance"] > 0.99  # nothing but the planted directions is there
    assert row["refit_loss"] > 0.9 * row["prior_loss"]
    assert found.table.set_index("edit").loc["none", "refit_loss"] < 0.5 * row["prior_loss"]


# ---- along a series ----


def planted_series(planted):
    """The directions come in at step 20; before, the embedding is noise."""

    def load(step):
        if step >= 20:
            return planted
        model = eh.SmallModel(planted.config, seed=3).eval()
        with torch.no_grad():
            model.embed.weight.copy_(
                torch.randn(planted.embed.weight.shape, generator=torch.Generator().manual_seed(9))
            )
        return model

    return eh.CheckpointSeries.from_loader([10, 20, 30], load, name="planted")


SERIES = {name: value for name, value in TRAINING.items() if name != "layer"}


def test_latents_along_a_series(sae_lens, planted, planted_task, tokens, tmp_path, monkeypatch):
    series = planted_series(planted)
    probes = eh.probe_series(series, planted_task, FEATURE, **PROBES)
    options = {**SERIES, "layer": -1, "data": tokens, "features": FEATURE, "path": tmp_path}
    found = sae.latent_series(series, planted_task, probes, **options)
    losses = found.table.groupby("step")[["probe_loss", "latent_loss", "followed_loss", "random_loss"]].mean()
    assert losses.loc[10, "latent_loss"] > 2 * losses.loc[[20, 30], "latent_loss"].max()
    last = found.table.loc[found.table["step"] == 30]
    np.testing.assert_array_equal(last["followed_loss"], last["latent_loss"])
    np.testing.assert_allclose(  # the same model, so the same latents
        found.table.loc[found.table["step"] == 20, "followed_loss"], last["followed_loss"], atol=1e-6
    )
    emergence = found.emergence.set_index("readout")
    assert emergence.loc["latent", "status"] == "crossed"
    assert tuple(emergence.loc["latent", ["emergence_low", "emergence_high"]]) == (10, 20)
    assert abs(emergence.loc["latent", "lag_steps"]) < 10
    assert found.autoencoders["step"].tolist() == [10, 20, 30]
    assert "planted" in repr(found)
    found.plot()

    def refuse(*_arguments, **_options):
        raise AssertionError("trained again")

    monkeypatch.setattr("emergent_heads.sae.series.train", refuse)
    again = sae.latent_series(series, planted_task, probes, **options)
    pd.testing.assert_frame_equal(again.table, found.table)
    with pytest.raises(errors.RunFolderError, match="n_activations 60000 there, 10000 here"):
        sae.latent_series(series, planted_task, probes, **{**options, "n_activations": 10_000})
    with monkeypatch.context() as changed:
        changed.setattr(series, "identity", lambda step: "other weights")
        with pytest.raises(AssertionError, match="trained again"):
            sae.latent_series(series, planted_task, probes, **options)
    (tmp_path / "step_00000010" / "cfg.json").unlink()
    with pytest.raises(AssertionError, match="trained again"):
        sae.latent_series(series, planted_task, probes, **options)


def made_series(latent, probe=(0.7, 0.1, 0.1, 0.1), followed=(0.7, 0.7, 0.7, 0.1)) -> LatentSeries:
    """Given losses at the steps 10, 20, 30, 40."""
    losses = {"probe": probe, "latent": latent, "followed": followed}
    columns = {f"{name}_loss": values for name, values in losses.items()}
    columns |= {f"{name}_validation_loss": values for name, values in losses.items()}
    table = pd.DataFrame({"step": [10, 20, 30, 40], **columns}).assign(
        feature="f", kind="binary", place=0, component=0, baseline_loss=0.7, prior_loss=0.7, random_loss=0.69,
        known_issue="",
    )  # fmt: skip
    about = {"least_share": 0.1, "layer": 1, "series": "made"}
    return LatentSeries(
        table, pd.DataFrame(), {}, ProbeSeries(table, {}, about={"plateau": 1.0, "floor": 0.0}), about=about
    )


def test_lags_are_counted_from_the_probe():
    found = made_series(latent=(0.7, 0.7, 0.1, 0.1)).emergence.set_index("readout")
    assert found["emergence_step"].round(6).tolist()[:3] == [
        pytest.approx(np.exp(np.mean(np.log([low, low + 10]))), rel=0.02) for low in (10, 20, 30)
    ]
    assert found.loc["latent", "lag_steps"] == pytest.approx(10, abs=1)
    assert tuple(found.loc["latent", ["lag_least", "lag_most"]]) == (0, 20)
    assert found.loc["followed", "lag_steps"] == pytest.approx(20, abs=1)
    assert found.loc["random", "status"] == "never"
    before = made_series(latent=(0.7, 0.1, 0.1, 0.1), probe=(0.7, 0.7, 0.1, 0.1)).emergence.set_index("readout")
    assert before.loc["latent", "lag_steps"] == pytest.approx(-10, abs=1)


def test_latents_are_classified_as_probes_are():
    found = made_series(latent=(0.7, 0.1, 0.1, 0.1))
    metrics = pd.DataFrame({"step": [10, 20, 30, 40], "loss_nats": [1.0, 1.0, 1.0, 0.0]})
    runs = [found.as_probes("latent")] * 3
    assert eh.classify_features(runs, [metrics] * 3).quiet == ["f"]
    with pytest.raises(errors.ArgumentError, match="readout"):
        found.as_probes("decoder")


def test_a_series_needs_probes_and_steps(planted, planted_task, planted_probes):
    series = planted_series(planted)
    with pytest.raises(errors.ArgumentError, match="probe_series"):
        sae.latent_series(series, planted_task, planted_probes, layer=-1)
    probes = ProbeSeries(planted_probes.table.assign(step=20), {20: planted_probes})
    with pytest.raises(errors.ArgumentError, match="1 checkpoint"):
        sae.latent_series(series, planted_task, probes, layer=-1)
    with pytest.raises(errors.ArgumentError, match="least_share"):
        sae.latent_series(series, planted_task, probes, layer=-1, least_share=1.5)
