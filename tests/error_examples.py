"""A way to raise each of the library's errors, for the page that explains them."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
from checkpoints_fixtures import save, tiny_neox
from filelock import FileLock
from tiny_models import bridge, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import emergent_heads as eh
from emergent_heads.checkpoints.store import Store


class _RunsCode:
    """What a pickle may hold."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("x",)


def _damaged() -> None:
    folder = save(tiny_neox(0), Path("runs/broken/step2"))
    (folder / "model.safetensors").unlink()
    eh.CheckpointSeries.from_directory("runs/broken")[2].load()


def _pickled() -> None:
    folder = save(tiny_neox(0), Path("runs/pickled/step1"))
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _RunsCode()}, folder / "pytorch_model.bin")
    eh.CheckpointSeries.from_directory("runs/pickled")[1].load()


def _own_code() -> None:
    folder = save(tiny_neox(0), Path("runs/own_code/step1"))
    classes = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    eh.CheckpointSeries.from_directory("runs/own_code")[1].load()


def _empty() -> None:
    shutil.rmtree("runs/empty", ignore_errors=True)
    Path("runs/empty").mkdir(parents=True)
    eh.CheckpointSeries.from_directory("runs/empty")


def _known_issue() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eh.suite("pythia-12b").check_known_issues(50_000)


def _full() -> None:
    store = Store(Path("cache/checkpoints"), Path("cache/checkpoint_leases"))
    with (
        warnings.catch_warnings(),
        patch("emergent_heads.checkpoints.store._this_process", lambda: "node7 process 4242"),
        store.lease("models--me--tiny", "step0", evict=True) as theirs,
        store.lease("models--me--tiny", "step1", evict=True) as ours,
    ):
        warnings.simplefilter("error")
        theirs.reserve(900_000_000, None)
        ours.reserve(800_000_000, 1.0)


def _two_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = eh.hooked(tiny_neox(0), PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?"))
    eh.evaluate(model, eh.tasks.from_table(pd.DataFrame({"prompt": ["a b"], "target": [" c a"]}), name="mine"))


def _not_finite() -> None:
    model = tiny_neox(0)
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.weight.fill_(float("nan"))
    eh.evaluate(model, eh.tasks.from_tokens([[1, 2]], [3]))


def _other_settings() -> None:
    config, task = eh.SmallModelConfig(n_layers=1, d_model=16), eh.tasks.LinearMap(4, 2)
    for steps in (2, 3):
        eh.train(config, task, "runs/lm", steps=steps)


def _in_use() -> None:
    Path("runs/map").mkdir(parents=True, exist_ok=True)
    with FileLock("runs/map/.lock"):
        eh.train(eh.SmallModelConfig(n_layers=1, d_model=16), eh.tasks.LinearMap(4, 2), "runs/map", steps=2)


def _never() -> None:
    trained = {step: tiny_neox(step) for step in (0, 1)}
    series = eh.CheckpointSeries.from_loader(trained, trained.__getitem__, name="mine")
    eh.find_emergence(series, eh.tasks.from_tokens([[1, 2, 3]], [3])).require()


def _other_shape() -> None:
    eh.rank_heads(tiny_neox(0), tiny_neox(0, num_hidden_layers=3), eh.tasks.from_tokens([[1, 2, 3]], [3]))


EXAMPLES: dict[str, Callable[[], object]] = {
    "ArgumentError": lambda: eh.find_emergence(eh.suite("pythia-14m"), eh.tasks.from_tokens([[1]], [1]), threshold=2),
    "UnknownSuiteError": lambda: eh.suite("pythia-160"),
    "UnknownStepError": lambda: eh.suite("pythia-160m")[1500],
    "NoCheckpointsError": _empty,
    "CheckpointError": _damaged,
    "KnownBadCheckpointError": lambda: eh.suite("pythia-2.8b", allow_known_bad=False)[3000].load(),
    "KnownIssueWarning": _known_issue,
    "WaitingWarning": _full,
    "UnsafeWeightsError": _pickled,
    "RemoteCodeError": _own_code,
    "HubError": lambda: eh.CheckpointSeries.from_hub("EleutherAI/pythia-14m").steps,
    "TokenizerError": lambda: eh.evaluate(tiny_neox(0), eh.tasks.string_repetition()),
    "PromptError": _two_tokens,
    "ModelMismatchError": _other_shape,
    "UnsupportedModelError": lambda: eh.hooked({}),
    "InterventionHasNoEffect": lambda: eh.check_intervention(bridge(tiny("OPT"))),
    "NotFiniteError": _not_finite,
    "RunFolderError": _other_settings,
    "RunInUseError": _in_use,
    "OutputError": lambda: eh.evaluate(tiny_neox(0), eh.tasks.from_tokens([[1, 2]], [3])).save("scores.xlsx"),
    "EmergenceError": _never,
}
"""By the error's name; run them in an empty folder, with no hub in reach."""
