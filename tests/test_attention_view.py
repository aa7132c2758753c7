"""Attention patterns of a prompt in CircuitsVis, read back from the page."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, bridge, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.checkpoints.series import CheckpointSeries

WORDS = ["<unk>", "Mary", "John", "</script><b>", '"quoted"', "&amp;", "ä"]
TOKENS = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def circuitsvis():
    return pytest.importorskip("circuitsvis", reason="needs CircuitsVis, of the extra notebook")


@pytest.fixture
def tokenizer():
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<unk>")


def shown(view):
    """What the page hands to CircuitsVis, from the object that its script ends with."""
    (properties,) = re.findall(r"^ *(\{.*\})$", str(view), flags=re.MULTILINE)
    return json.loads(properties)


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_shows_the_models_own_patterns(circuitsvis, wrapped):
    model = tiny("Llama", 1)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        attentions = model(TOKENS[:1], output_attentions=True).attentions
    properties = shown(eh.attention_view(bridge(model) if wrapped else model, TOKENS[0]))
    assert properties["tokens"] == [str(token) for token in TOKENS[0].tolist()]
    assert properties["attentionHeadNames"] == [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    truth = torch.cat([layer[0] for layer in attentions]).numpy()
    np.testing.assert_allclose(properties["attention"], truth, atol=1e-4)
    assert (properties["minValue"], properties["maxValue"]) == (0, 1)


def test_heads_keep_the_order_of_the_ranking_and_prompts_end_where_they_end(circuitsvis):
    task = eh.tasks.from_tokens(TOKENS, [1, 2], lengths=[7, 4])
    ranking = eh.rank_heads(tiny("GPTNeoX", 0), tiny("GPTNeoX", 1), task)
    heads = ranking.top(3)
    for prompt in (task, ranking.batch):
        properties = shown(eh.attention_view(tiny("GPTNeoX", 1), prompt, heads=heads, row=1))
        assert properties["attentionHeadNames"] == [f"L{layer}H{head}" for layer, head in heads]
        assert np.shape(properties["attention"]) == (3, 4, 4)
        assert len(properties["tokens"]) == 4
    layer = shown(eh.attention_view(tiny("GPTNeoX", 1), TOKENS[0].tolist(), layers=[2]))
    assert layer["attentionHeadNames"] == ["L2H0", "L2H1", "L2H2", "L2H3"]


def test_text_is_shown_as_it_is_and_cannot_leave_its_script(circuitsvis, tokenizer):
    model = eh.hooked(tiny("GPT2"), tokenizer)
    view = eh.attention_view(model, " ".join(WORDS[1:]), layers=[0])
    assert shown(view)["tokens"] == WORDS[1:]
    for page in (view.cdn_src, view.local_src):
        assert page.count("</script") == 1
        assert "<b>" not in page.split("CircuitsVis.render(")[-1]
    assert view._repr_html_().endswith("</script>")


def test_a_checkpoint_of_a_series_will_do(circuitsvis, emerging_series):
    series = CheckpointSeries.from_directory(emerging_series)
    task = eh.tasks.in_context_repetition(n_prompts=2, length=6, vocabulary=range(20, 90))
    properties = shown(eh.attention_view(series.last, task, layers=[0]))
    truth = series.last.hooked().patterns(task.batch(None, vocabulary_size=10**6, context=None).tokens[:1], [0])[0]
    np.testing.assert_allclose(properties["attention"], truth[0].numpy(), atol=1e-4)


def test_bad_input_is_named(circuitsvis, tokenizer):
    model = tiny("GPT2")
    task = eh.tasks.from_tokens(TOKENS, [1, 2])
    for arguments, message in (
        ({"prompt": task, "layers": [0], "heads": [(0, 0)]}, "both given"),
        ({"prompt": task, "layers": [3]}, r"\(3, 0\).*layers go from 0 to 2"),
        ({"prompt": task, "heads": [(0, 4)]}, "heads from 0 to 3"),
        ({"prompt": task, "heads": []}, "no heads to show"),
        ({"prompt": task, "row": 2}, "row=2: there are 2 prompts"),
        ({"prompt": TOKENS}, r"shape \[2, 7\]"),
        ({"prompt": [0.5, 1.0]}, "float64"),
        ({"prompt": [VOCABULARY]}, f"token id {VOCABULARY}: the model knows 0 to {VOCABULARY - 1}"),
        ({"prompt": torch.zeros(0, dtype=torch.long)}, "the prompt is empty"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            eh.attention_view(model, **arguments)
    with pytest.raises(errors.TokenizerError, match="a prompt as text needs a tokenizer"):
        eh.attention_view(model, "Mary")
    with pytest.raises(errors.ArgumentError, match=r"12 heads on 500 tokens are 3,000,000 numbers.*layers="):
        eh.attention_view(tiny("Llama"), [1] * 500)


def test_without_circuitsvis_the_message_says_how_to_install_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "circuitsvis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "circuitsvis", None)
    with pytest.raises(errors.ArgumentError, match=r'pip install "emergent-heads\[notebook\]"'):
        eh.attention_view(tiny("GPT2"), TOKENS[0])
