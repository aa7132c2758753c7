"""A run taken elsewhere as GPT-NeoX or Llama folders computes what it computed here; what cannot be one is refused."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from training_runs import QUICK, TASK
from transformers import AutoModelForCausalLM, AutoTokenizer

import emergent_heads.training.export as export_module
from emergent_heads.analysis.emergence import find_emergence
from emergent_heads.analysis.heads import rank_heads
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, OutputError, UnknownStepError, UnsupportedModelError
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks import CellularAutomaton, TextCorpus, from_tokens
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run

SIZE = {"vocabulary_size": 11, "context": 16}
NEOX = SmallModelConfig.gpt_neox(2, 24, 3, d_mlp=20)


def randomised(config) -> SmallModel:
    """A model none of whose weights is zero or one, so that each counts."""
    model = SmallModel(config, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


def same_function(model: SmallModel, other, n_rows: int = 5) -> None:
    """Logits and patterns of the two are equal on random tokens, in float32."""
    generator = torch.Generator().manual_seed(1)
    shape = (n_rows, model.config.context)
    tokens = torch.randint(model.config.vocabulary_size, shape, generator=generator)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        out = other(tokens, output_attentions=True)
    torch.testing.assert_close(out.logits, logits, rtol=1e-5, atol=1e-5)
    for layer, pattern in enumerate(out.attentions):
        torch.testing.assert_close(cache["pattern", layer], pattern, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (NEOX, "GPTNeoXForCausalLM"),
        (replace(NEOX, biases=False), "GPTNeoXForCausalLM"),
        (SmallModelConfig.transformer_pp(2, 24, 3), "LlamaForCausalLM"),
    ],
)
def test_a_model_of_transformers_has_the_same_logits_and_patterns(config, kind):
    model = randomised(replace(config, **SIZE))
    before = torch.get_rng_state()
    other = model.to_huggingface()
    assert torch.equal(torch.get_rng_state(), before)
    assert type(other).__name__ == kind
    assert sum(each.numel() for each in other.parameters()) >= sum(each.numel() for each in model.parameters())
    same_function(model, other.eval())
    model.embed.weight += 1.0  # the weights are a copy
    assert not torch.equal(other.get_input_embeddings().weight, model.embed.weight)


def test_a_gpt_neox_has_the_settings_of_one():
    assert (NEOX.norm, NEOX.positions, NEOX.mlp, NEOX.biases, NEOX.unembedding_bias) == (
        "layer",
        "rotary",
        "gelu",
        True,
        False,
    )
    assert SmallModel(replace(NEOX, **SIZE)).unembed.bias is None
    assert SmallModelConfig(**NEOX.settings()) == NEOX
    assert SmallModelConfig(1, 8).unembedding_bias
    assert not SmallModelConfig(1, 8, biases=False).unembedding_bias
    assert "unembed_bias" not in SmallModelConfig(1, 8).settings()  # which older runs do not have either


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": "learned"}, "nearest is a GPT-NeoX, but positions is 'learned' and must be 'rotary'"),
        ({"unembed_bias": True}, "unembed_bias is True and must be False"),
        ({"norm": "rms"}, "norm is 'rms' and must be 'layer'"),
        ({"mlp": "none"}, "mlp is 'none' and must be 'gelu'"),
        ({"mlp": "swiglu", "norm": "rms"}, "nearest is a Llama, but biases is True and must be False"),
        ({"mixer": ("attention", "linear"), "positions": "none"}, r"mixer is \('attention', 'linear'\) and must be"),
        ({"d_head": 4}, "d_head is 4 and must be d_model / n_heads, 8"),
    ],
)
def test_what_transformers_has_no_model_for_is_refused(changes, said):
    config = replace(NEOX, **SIZE, **changes)
    with pytest.raises(UnsupportedModelError, match=said) as refused:
        SmallModel(config).to_huggingface()
    assert "SmallModelConfig." in str(refused.value)


def test_an_attention_bias_is_refused():
    model = randomised(replace(NEOX, **SIZE))
    model.set_attention_bias(torch.ones(16, 16), 2.0)
    with pytest.raises(UnsupportedModelError, match="attention bias"):
        model.to_huggingface()
    model.set_attention_bias(None)
    same_function(model, model.to_huggingface().eval())


# --- runs

STEPS = [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
LEARNING = CellularAutomaton(state_size=4, states=3, symbols=5, rules=2, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    how = {"steps": 40, "checkpoints": STEPS, "tokens_per_batch": 256, "learning_rate": 3e-2, "progress": False}
    return train(NEOX, LEARNING, tmp_path_factory.mktemp("runs") / "neox", **how)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return run.export_huggingface(tmp_path_factory.mktemp("exports") / "of" / "neox")


def test_every_checkpoint_is_a_folder_that_transformers_loads(run, exported):
    assert {path.name for path in exported.iterdir()} == {"run.json", *(f"step{step}" for step in STEPS)}
    for step in (0, 40):
        assert {"config.json", "model.safetensors"} <= {path.name for path in (exported / f"step{step}").iterdir()}
        other = AutoModelForCausalLM.from_pretrained(exported / f"step{step}").eval()
        assert other.dtype == torch.float32
        same_function(run.series[step].load(), other)
    assert json.loads((exported / "run.json").read_text()) == run.manifest


def test_steps_can_be_chosen(run, tmp_path):
    path = run.export_huggingface(str(tmp_path / "some"), steps=[40, 8, 8])
    assert {each.name for each in path.iterdir()} == {"run.json", "step8", "step40"}
    with pytest.raises(UnknownStepError):
        run.export_huggingface(tmp_path / "none", steps=[7])
    with pytest.raises(ArgumentError, match="no steps to export"):
        run.export_huggingface(tmp_path / "none", steps=[])
    assert {each.name for each in tmp_path.iterdir()} == {"some"}


def test_analyses_of_the_export_give_what_those_of_the_run_give(run, exported):
    """Prompts whose targets are what the trained model says, which it comes to say in the course of its training."""
    tokens = LEARNING.batch(12, seed=3, split="held-out").tokens[:, :9]
    with torch.no_grad():
        targets = run.series.last.load()(tokens)[:, -1].argmax(-1)
    task = from_tokens(tokens.tolist(), targets.tolist())
    there = CheckpointSeries.from_directory(exported)
    assert there.steps == run.series.steps
    points = [find_emergence(series, task, "scan") for series in (run.series, there)]
    assert points[0].pre is not None
    same_tables(*(point.table for point in points))
    rankings = [rank_heads(series.first, series.last, task) for series in (run.series, there)]
    assert rankings[0].table["delta_p"].abs().max() > 1e-3
    same_tables(*(ranking.table for ranking in rankings))


def same_tables(first: pd.DataFrame, second: pd.DataFrame) -> None:
    names = [name for name in first if pd.api.types.is_numeric_dtype(first[name])]
    assert len(names) >= 3
    assert list(first) == list(second)
    for name in names:
        np.testing.assert_allclose(
            first[name].to_numpy(float), second[name].to_numpy(float), rtol=1e-3, atol=1e-6, err_msg=name
        )


def test_a_run_on_text_takes_its_tokenizer_along(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"the cat number {i} sat on the mat and ate {i * 7} rats" for i in range(60)))
    text = TextCorpus(str(file), vocabulary_size=48, context=8, separator="\n\n")
    run = train(NEOX, text, tmp_path / "run", **QUICK, progress=False)
    path = run.export_huggingface(tmp_path / "hf", steps=[24])
    tokenizer = AutoTokenizer.from_pretrained(path / "step24")
    said = "the cat sat on 21 mats"
    ids = tokenizer(said)["input_ids"]
    assert ids == text.tokenizer(said)["input_ids"]
    assert tokenizer.decode(ids) == said
    series = CheckpointSeries.from_directory(path)
    assert series[24].tokenizer()(said)["input_ids"] == ids


def test_the_same_export_is_left_as_it_is_and_another_is_refused(run, exported, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in exported.rglob("*")}
    assert run.export_huggingface(exported) == exported
    assert {path: path.stat().st_mtime_ns for path in exported.rglob("*")} == before
    with pytest.raises(OutputError, match="another run or of other steps"):
        run.export_huggingface(exported, steps=[0])
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(OutputError, match="is no export of a run"):
            run.export_huggingface(path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert (run.export_huggingface(tmp_path / "empty", steps=[0]) / "step0" / "config.json").is_file()


def test_an_export_that_breaks_off_leaves_nothing(run, tmp_path, monkeypatch):
    made = []

    def breaking(model):
        if made:
            raise KeyboardInterrupt
        made.append(model.to_huggingface())
        return made[0]

    monkeypatch.setattr(export_module, "to_huggingface", breaking)
    with pytest.raises(KeyboardInterrupt):
        run.export_huggingface(tmp_path / "hf")
    assert made
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file_is_told(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*choose a folder"):
        run.export_huggingface(tmp_path / "file" / "hf")


def test_steps_with_an_attention_bias_are_refused_and_those_after_it_are_not(tmp_path):
    bias = AttentionBias(2.0, anneal_until=8)
    run = train(NEOX, TASK, tmp_path / "run", **QUICK, attention_bias=bias, progress=False)
    with pytest.raises(UnsupportedModelError, match="has it at 4 of the steps to export, step 0 for one"):
        run.export_huggingface(tmp_path / "hf")
    path = run.export_huggingface(tmp_path / "hf", steps=[8, 24])
    same_function(run.series[8].load(), AutoModelForCausalLM.from_pretrained(path / "step8").eval())


def test_a_run_that_cannot_be_exported_says_so_before_anything_is_written(tmp_path):
    run = train(SmallModelConfig(1, 16, 2), TASK, tmp_path / "run", **QUICK, progress=False)
    assert isinstance(run, Run)
    with pytest.raises(UnsupportedModelError, match=r"SmallModelConfig\.gpt_neox"):
        run.export_huggingface(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
