"""The kinds a checkpoint can be loaded as, against the plain model's logits."""

import pytest
import torch
from checkpoints_fixtures import TOKENS, logits, logits_of, save, tiny_gpt2, tiny_llama, tiny_neox
from transformers import GPTNeoXForCausalLM

from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, UnsupportedModelError

try:
    from transformer_lens import HookedTransformer
except ImportError:
    HookedTransformer = None

needs_tl3 = pytest.mark.skipif(HookedTransformer is None, reason="HookedTransformer is in transformer-lens 3.x only")


def series_of(path, model, tokenizer=False, **options):
    save(model, path / "step1", tokenizer=tokenizer)
    return CheckpointSeries.from_directory(path, **options)


@pytest.mark.parametrize("make", [tiny_neox, tiny_gpt2, tiny_llama])
def test_a_bridge_computes_what_the_plain_model_does(tmp_path, make):
    from transformer_lens.model_bridge import TransformerBridge

    bridge = series_of(tmp_path, make(1)).first.load()
    assert isinstance(bridge, TransformerBridge)
    torch.testing.assert_close(logits(bridge), logits_of(tmp_path / "step1"), atol=1e-5, rtol=0)
    assert not bridge.training
    assert not any(parameter.requires_grad for parameter in bridge.parameters())


@needs_tl3
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [tiny_neox, tiny_llama])
def test_a_hooked_transformer_computes_what_the_plain_model_does(tmp_path, make):
    model = series_of(tmp_path, make(1), tokenizer=True, kind="hooked_transformer").first.load()
    assert isinstance(model, HookedTransformer)
    torch.testing.assert_close(logits(model), logits_of(tmp_path / "step1"), atol=1e-5, rtol=0)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.tokenizer.get_vocab()["w7"] == 7


@needs_tl3
def test_a_rotary_base_that_transformer_lens_ignores_is_refused(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    series = series_of(tmp_path, tiny_neox(1, rope_parameters=rope))
    torch.testing.assert_close(logits(series.first.load()), logits_of(tmp_path / "step1"), atol=1e-5, rtol=0)
    with pytest.raises(UnsupportedModelError, match="ignores the rotary base 500"):
        series.first.load("hooked_transformer")


@needs_tl3
def test_a_model_that_transformer_lens_cannot_convert_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"cannot convert this GPT2LMHeadModel .*load as 'bridge'"):
        series_of(tmp_path, tiny_gpt2(1)).first.load("hooked_transformer")


@pytest.mark.skipif(HookedTransformer is not None, reason="transformer-lens 3.x has HookedTransformer")
def test_without_hooked_transformer_the_message_says_so(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"gone since 4\.0"):
        series_of(tmp_path, tiny_neox(1)).first.load("hooked_transformer")


def test_the_kind_of_the_series_can_be_overruled(tmp_path):
    series = series_of(tmp_path, tiny_neox(1), kind="huggingface")
    assert isinstance(series.first.load(), GPTNeoXForCausalLM)
    assert not isinstance(series.first.load("bridge"), GPTNeoXForCausalLM)
    with pytest.raises(ArgumentError, match="kind='vllm'"):
        series.first.load("vllm")


def test_a_loader_decides_its_kind_itself():
    series = CheckpointSeries.from_loader([1], tiny_neox)
    with pytest.raises(ArgumentError, match="decides what it returns"):
        series.first.load("bridge")


@needs_tl3
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loader_may_return_hooked_transformers(tmp_path):
    """The call of transformer-lens users; masks in its buffers hold infinities that are no damage."""
    folders = series_of(tmp_path, tiny_neox(1))
    series = CheckpointSeries.from_loader([1], lambda step: folders[step].load("hooked_transformer"))
    positions = torch.full((len(TOKENS),), TOKENS.shape[1] - 1)
    found = series.hooked(1).logits(TOKENS, positions)
    torch.testing.assert_close(found, logits_of(tmp_path / "step1")[:, -1], atol=1e-5, rtol=0)
    assert series.problems == {}
