"""What a notebook notices: HTML, figures shown once, nothing printed or changed, and interrupts that cost little."""

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import VOCABULARY, bridge, tiny

import emergent_heads as eh
from emergent_heads import notebook
from emergent_heads.analysis import evaluation
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.results import Result

EVIL = '<b onclick="x">$a$ & $b$</b>'
TOKENS = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))


class Page(HTMLParser):
    """The text of a page and its tags; fails where they do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self._open, self.classes = "", [], [], set()
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert dict(attrs).keys() <= {"class", "style"}
        self.tags.append(tag)
        self._open.append(tag)
        self.classes |= set(dict(attrs).get("class", "").split())

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def repetition(n_prompts=4):
    return eh.tasks.in_context_repetition(n_prompts=n_prompts, length=6, n_repeated=4, vocabulary=range(20, 90))


# ---- HTML ----


def test_a_result_shows_its_lines_and_its_table_as_they_are():
    class Noted(Result):
        def headline(self):
            return EVIL

        def notes(self):
            return ["caveat: x < y"]

    found = Noted(pd.DataFrame({"feature": [EVIL] * 40, EVIL: np.arange(40) / 3}))
    page = Page(found._repr_html_())
    assert "b" not in page.tags
    assert page.text.count(EVIL) > 10
    assert "caveat: x < y" in page.text
    assert "40 rows" in page.text
    assert page.text.count("\n") < 400
    assert {"tex2jax_ignore", "mathjax_ignore"} <= page.classes  # "$a$" is no mathematics
    assert repr(found).splitlines()[0] == EVIL
    assert repr(found).splitlines()[-1] == "caveat: x < y"
    assert "rows" not in Page(Result(found.table.head(3))._repr_html_()).text


def test_every_result_has_the_one_html_repr_of_results():
    pending = [Result]
    while pending:
        pending += (subclasses := pending.pop().__subclasses__())
        for each in subclasses:
            assert "_repr_html_" not in vars(each), f"{each.__name__}: add to `notes` instead"


def test_a_point_of_emergence_shows_its_caveats():
    scores = pd.DataFrame({"model": "<i>", "step": [0, 10, 20, 30], EVIL: [0.0, 0.9, 0.2, 0.9]})
    table = eh.emergence_from_table(scores, 0.5, score=EVIL, strategy="bisect")
    point = table.points[0]
    assert point.caveats
    page = Page(point._repr_html_())
    assert f"{EVIL} in <i>: emerged between" in page.text
    for caveat in point.caveats:
        assert f"caveat: {caveat}" in page.text
        assert f"caveat: {caveat}" in repr(point)
    assert EVIL[:20] in Page(table._repr_html_()).text


def test_series_and_checkpoints_show_what_they_are_and_ask_nobody(emerging_series):
    series = CheckpointSeries.from_directory(emerging_series)
    series.problems[series.steps[1]] = EVIL
    page = Page(series._repr_html_())
    assert EVIL in page.text
    assert f"{len(series)}: {series.steps[0]}" in page.text
    assert EVIL in Page(series[series.steps[1]]._repr_html_()).text
    of_hub = CheckpointSeries.from_hub("someone/model")  # no network in tests: a request would be an error
    assert "not asked for yet" in Page(of_hub._repr_html_()).text
    assert "someone/model" in Page(of_hub._repr_html_()).text
    known = Page(eh.suite("pythia-160m", seed=3)[1000]._repr_html_())
    assert "2097152000" in known.text


def test_models_show_their_shape(emerging_series):
    shown = Page(eh.hooked(bridge(tiny("GPT2")))._repr_html_()).text
    for said in ("TransformerBridge", "n_layers3", "n_heads4", "context64", "dtypefloat32"):
        assert said in shown


def test_tasks_show_their_settings_and_some_prompts():
    page = Page(eh.tasks.from_table(pd.DataFrame({"prompt": [EVIL] * 5, "target": [" x"] * 5}))._repr_html_())
    assert page.text.count(EVIL[:20]) == 3
    assert "' x'" in page.text  # the space is seen
    assert "digits8" in Page(eh.tasks.string_repetition(n_prompts=4)._repr_html_()).text
    assert (
        Page(eh.tasks.in_context_repetition(n_prompts=4)._repr_html_()).tags.count("table") == 1
    )  # needs a tokenizer
    addition = Page(eh.tasks.Addition(bits=3)._repr_html_()).text
    assert "Addition" in addition
    assert "bits3" in addition


def test_a_run_shows_where_it_stands(tmp_path):
    config = eh.SmallModelConfig(n_layers=1, d_model=8, n_heads=2)
    task = eh.tasks.LinearMap(state_size=3, sparsity=2)
    run = eh.train(config, task, tmp_path / "a<b>run", steps=4, evaluate_every=2, n_held_out=8, progress=False)
    page = Page(run._repr_html_())
    for said in ("a<b>run", "LinearMap", "n_layers=1", "finished at step 4", "loss_nats"):
        assert said in page.text


def test_cards_cut_long_values_and_leave_out_what_is_missing():
    page = Page(notebook.card("title", {"long": "x" * 1000, "none": None}))
    assert page.text.count("x") == 199
    assert "none" not in page.text


# ---- in a notebook ----


@pytest.fixture(scope="module")
def cells():
    """Outputs of cells that are run one after another by Jupyter, with its own backend of matplotlib."""
    pytest.importorskip("ipykernel", reason="needs Jupyter, of the extra notebook")
    client = pytest.importorskip("nbclient", reason="needs Jupyter, of the extra notebook")
    nbformat = pytest.importorskip("nbformat")
    sources = [
        "import sys\nimport numpy as np\nimport pandas as pd\nfrom emergent_heads import results\n"
        "from emergent_heads.plots.heads import head_map",
        "figure = head_map(np.eye(3))",
        "figure",
        "print('matplotlib.pyplot' in sys.modules)",
        "import matplotlib.pyplot as plt",
        "head_map(np.eye(3))",
        "print(plt.get_fignums())",
        "results.Result(pd.DataFrame({'a': [1]}))",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        client.NotebookClient(made, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in made.cells]


def images(outputs) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_a_figure_is_shown_once_with_pyplot_or_without(cells):
    assert [images(outputs) for outputs in cells] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert [len(outputs) for outputs in cells] == [0, 0, 1, 1, 0, 1, 1, 1]
    assert cells[3][0]["text"] == "False\n"
    assert cells[6][0]["text"] == "[]\n"
    assert "text/html" in cells[7][0]["data"]


# ---- global state ----

_WORKFLOW = """
import io, json, logging, os, random, signal, sys, warnings
import matplotlib, numpy, pandas, torch, tqdm.auto, transformers, transformer_lens, huggingface_hub
from pathlib import Path
import transformers.models.gpt_neox.modeling_gpt_neox
import transformer_lens.model_bridge.sources, scipy.stats  # what these set when they are imported is theirs

random.seed(3); numpy.random.seed(4); torch.manual_seed(5)
torch.set_num_threads(1)
pandas.set_option("display.max_rows", 77)
numpy.set_printoptions(precision=3)
matplotlib.rcParams["font.size"] = 13
warnings.filterwarnings("ignore", message="of the user's own")
logging.getLogger("transformer_lens").setLevel(logging.ERROR)
huggingface_hub.utils.disable_progress_bars()

def state():
    loggers = {name: each for name, each in logging.root.manager.loggerDict.items() if hasattr(each, "level")}
    return {
        "loggers": {name: (each.level, str(each.handlers), each.propagate, each.disabled)
                    for name, each in loggers.items()},
        "root logger": (logging.root.level, str(logging.root.handlers), logging.root.manager.disable),
        "warnings": (list(map(str, warnings.filters)), warnings.showwarning.__qualname__),
        "rcParams": {name: str(dict.__getitem__(matplotlib.rcParams, name)) for name in dict(matplotlib.rcParams)},
        "pyplot": "matplotlib.pyplot" in sys.modules,
        "torch": (str(torch.get_default_dtype()), str(torch.get_default_device()), torch.get_num_threads(),
                  torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                  torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
                  str(torch._tensor_str.PRINT_OPTS)),
        "random": (str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "numpy": (str(numpy.geterr()), str(numpy.get_printoptions())),
        "pandas": {name: str(pandas.get_option(name)) for name in
                   ("display.max_rows", "display.precision", "display.max_columns", "display.max_colwidth")},
        "tqdm": (tqdm.auto.tqdm.monitor_interval, str(sorted(name for name in vars(tqdm.tqdm)))),
        "hub bars": huggingface_hub.utils.are_progress_bars_disabled(),
        "transformers": (transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()),
        "process": (os.getcwd(), dict(os.environ), str(sys.excepthook), sys.path,
                    [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]),
    }

before = state()
import emergent_heads as eh
from emergent_heads.checkpoints.series import CheckpointSeries

series = CheckpointSeries.from_directory(sys.argv[1])
out = Path(sys.argv[2])
task = eh.tasks.in_context_repetition(n_prompts=4, length=6, n_repeated=4, vocabulary=range(20, 90))
point = eh.find_emergence(series, task)
heads = eh.rank_heads(series.first, series.last, task)
curve = eh.recovery_curve(series.first, series.last, task, heads, ks=(1, 2), controls=3)
tracks = eh.head_trajectories(series, task, heads.top(1), steps=series.steps[-2:])
hooks = heads.to_hooks(series.last, k=1)
addition = eh.tasks.Addition(bits=4)
run = eh.train(eh.SmallModelConfig(n_layers=1, d_model=8, n_heads=2), addition, out / "run", steps=6,
               evaluate_every=2, n_held_out=16, checkpoints=[0, 3, 6])
probes = eh.probe_series(run.series, addition, n_train=200, n_test=60, n_untrained=1)
effect = eh.ablate_features(run.series.last, addition, probes.last, controls=2, n=40, n_reference=40)
evaluated = eh.evaluate(series.last, task)
for result in (point, heads, curve, tracks, run, probes, probes.last, effect, evaluated):
    repr(result), result._repr_html_()
    result.plot().savefig(io.BytesIO())
heads.save(out / "heads.csv")
after = state()

new = set(after["loggers"]) - set(before["loggers"])
after["loggers"] = {name: each for name, each in after["loggers"].items() if name in before["loggers"]}
changed = {}
for name in before:
    if before[name] != after[name]:
        changed[name] = [str(before[name])[:2000], str(after[name])[:2000]]
        if isinstance(before[name], dict):
            changed[name] = {key: [str(before[name].get(key)), str(after[name].get(key))]
                             for key in {*before[name], *after[name]} if before[name].get(key) != after[name].get(key)}
(out / "changed.json").write_text(json.dumps({"changed": changed, "own": [n for n in new if "emergent" in n]}))
"""


@pytest.fixture(scope="module")
def workflow(tmp_path_factory, emerging_series):
    """One small workflow in a process of its own: what it changed, and what it printed."""
    out = tmp_path_factory.mktemp("workflow")
    environment = {**os.environ, "EMERGENT_HEADS_CACHE": str(out / "cache")}
    for name in ("MPLBACKEND", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", _WORKFLOW, str(emerging_series), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "changed.json").read_text()), done.stdout, done.stderr


def test_no_settings_of_other_libraries_change(workflow):
    assert workflow[0] == {"changed": {}, "own": []}


def test_nothing_is_printed_but_bars(workflow):
    _, out, bars = workflow
    assert out == ""
    assert bars.count("%|") >= 5
    left = re.sub(r"[^\r\n]*(\d+%\||\d+(run|it|step|checkpoint)? ?\[)[^\r\n]*", "", bars)
    assert left.strip() == ""


def test_bars_are_off_where_they_are_not_wanted_and_by_the_environment(monkeypatch):
    def shown(progress):
        # tqdm reads the environment when it is imported
        imports = "from tqdm.auto import tqdm; from emergent_heads.notebook import bar"
        code = f"{imports}; list(tqdm([1], **bar({progress})))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr

    assert shown(True) == ""  # TQDM_DISABLE is set in tests
    monkeypatch.delenv("TQDM_DISABLE")
    assert "1/1" in shown(True)
    assert shown(False) == ""


def test_every_bar_is_tqdm_autos_and_obeys_the_caller_and_the_environment():
    bars = 0
    for path in Path(eh.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tqdm"):
                assert node.module == "tqdm.auto", path
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("tqdm") for alias in node.names), path
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "tqdm":
                bars += 1
                named = [keyword.arg for keyword in node.keywords]
                assert "disable" not in named, f"{path}: use notebook.bar"
                assert None in named, f"{path}: take progress, and give **notebook.bar(progress)"
    assert bars > 10


# ---- interrupts ----


def weights_of(series, step):
    return [tensor.clone() for tensor in series.hooked(step)._module.state_dict().values()]


def hooks_of(model) -> list:
    """All hooks and stand-ins on a model's modules."""
    found = []
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found += [module.__dict__["forward"]] if "forward" in module.__dict__ else []
    return found


def test_a_stopped_search_keeps_what_it_evaluated(emerging_series, monkeypatch):
    undisturbed = eh.find_emergence(CheckpointSeries.from_directory(emerging_series), repetition(), strategy="scan")
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", os.environ["EMERGENT_HEADS_CACHE"] + "-of-its-own")
    calls, real = [], evaluation.evaluate_batch

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(evaluation, "evaluate_batch", stopped)
    series = CheckpointSeries.from_directory(emerging_series)
    with pytest.raises(KeyboardInterrupt):
        eh.find_emergence(series, repetition(), strategy="scan")
    assert series.problems == {}
    again = eh.find_emergence(series, repetition(), strategy="scan")
    assert len(calls) == len(series) + 1
    assert again.table["reused"].sum() == 2
    pd.testing.assert_frame_equal(
        again.table.drop(columns="reused"), undisturbed.table.drop(columns="reused"), check_exact=True
    )


def test_a_swap_of_weights_that_is_stopped_half_way_is_done_again(emerging_series, monkeypatch):
    series, other = (CheckpointSeries.from_directory(emerging_series) for _ in range(2))
    first, last = series.steps[0], series.steps[-1]
    series.hooked(first)
    real, copied = torch.Tensor.copy_, []

    def stopped(self, *arguments, **options):
        copied.append(1)
        if len(copied) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", stopped)
        with pytest.raises(KeyboardInterrupt):
            series.hooked(last)
    assert len(copied) == 4
    assert series.problems == {}
    for step in (first, last, first):
        for mine, right in zip(weights_of(series, step), weights_of(other, step), strict=True):
            assert torch.equal(mine, right)


@pytest.mark.parametrize("at", [3, 20, 60, 75])
@pytest.mark.parametrize("wrap", [lambda model: model, bridge], ids=["plain", "bridge"])
def test_a_stopped_ranking_leaves_the_model_as_it_was(wrap, at, monkeypatch):
    pre, post = wrap(tiny("GPTNeoX", 0)), wrap(tiny("GPTNeoX", 1))
    task = eh.tasks.from_tokens(TOKENS, [1, 2, 3, 4])
    with torch.no_grad():
        _ = pre(TOKENS), post(TOKENS)  # a bridge sets hooks of its own at its first pass
    before = {id(model): hooks_of(model) for model in (pre, post)}
    expected = eh.rank_heads(wrap(tiny("GPTNeoX", 0)), wrap(tiny("GPTNeoX", 1)), task)
    calls, real = [], torch.nn.functional.linear

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", stopped)
        with pytest.raises(KeyboardInterrupt):
            eh.rank_heads(pre, post, task)
    for model in (pre, post):
        assert hooks_of(model) == before[id(model)]
    assert torch.is_grad_enabled()
    np.testing.assert_array_equal(eh.rank_heads(pre, post, task).delta_p, expected.delta_p)


@pytest.mark.parametrize("at", [1, 3])
def test_a_stopped_ranking_of_handles_leaves_the_series_right(at, emerging_series, monkeypatch):
    from emergent_heads.models.engine import PatchEngine

    series, other = (CheckpointSeries.from_directory(emerging_series) for _ in range(2))
    first, last = series.steps[0], series.steps[-1]
    name = "trace" if at == 1 else "patch_heads"

    def stopped(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PatchEngine, name, stopped)
        with pytest.raises(KeyboardInterrupt):
            eh.rank_heads(series[first], series[last], repetition())
    ranked = eh.rank_heads(series[first], series[last], repetition())
    np.testing.assert_array_equal(ranked.delta_p, eh.rank_heads(other[first], other[last], repetition()).delta_p)
    for step in (last, first):
        for mine, right in zip(weights_of(series, step), weights_of(other, step), strict=True):
            assert torch.equal(mine, right)


def test_a_file_is_whole_or_not_there_when_saving_is_stopped(tmp_path, monkeypatch):
    found = Result(pd.DataFrame({"a": range(5)}))
    kept = found.save(tmp_path / "kept.csv").read_text()

    def stopped(_self, path, **_options):
        Path(path).write_text("half of")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_csv", stopped)
        for name in ("kept.csv", "new.csv"):
            with pytest.raises(KeyboardInterrupt):
                found.save(tmp_path / name)
    assert (tmp_path / "kept.csv").read_text() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.csv", "kept.csv.about.json"]
