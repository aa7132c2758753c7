"""What the resident model holds after swaps, against transformers; damaged, unsafe and identical checkpoints."""

import json
import os

import pytest
import torch
from checkpoints_fixtures import (
    TOKENS,
    logits,
    logits_of,
    save,
    save_as_old_pythia,
    scrambled,
    tiny_gpt2,
    tiny_llama,
    tiny_neox,
)
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXForCausalLM, MixtralConfig, MixtralForCausalLM

from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.checkpoints.weights import Resident
from emergent_heads.errors import (
    CheckpointError,
    RemoteCodeError,
    UnknownStepError,
    UnsafeWeightsError,
    UnsupportedModelError,
)


def resident_logits(series, step):
    """Logits of what `series.hooked(step)` runs on."""
    return series.hooked(step).logits(TOKENS, torch.full((len(TOKENS),), TOKENS.shape[1] - 1))


def assert_swaps_equal_transformers(path, order):
    series = CheckpointSeries.from_directory(path)
    for step in order:
        series.hooked(step)
        assert torch.equal(logits(series._resident.model), logits_of(series.source.folder(step))), f"step {step}"
    return series


@pytest.mark.parametrize("make", [tiny_neox, tiny_gpt2, tiny_llama])
def test_any_order_of_swaps_equals_loading_anew(tmp_path, make):
    for step in (1, 2, 3):
        save(make(step), tmp_path / f"step{step}")
    series = assert_swaps_equal_transformers(tmp_path, (3, 1, 2, 2, 1, 3))
    assert series.problems == {}


def test_the_hooked_model_computes_with_the_swapped_weights(tmp_path):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    for step in (1, 2, 1):
        torch.testing.assert_close(
            resident_logits(series, step), logits_of(tmp_path / f"step{step}")[:, -1], atol=1e-6, rtol=0
        )


def test_one_model_stays_resident(tmp_path):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    model = series.hooked(1)
    addresses = [parameter.data_ptr() for parameter in series._resident.model.parameters()]
    assert series.hooked(2) is model
    assert addresses == [parameter.data_ptr() for parameter in series._resident.model.parameters()]


def test_only_the_first_checkpoint_is_loaded_by_transformers(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tiny_neox(step), tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    series.hooked(1)
    monkeypatch.setattr(GPTNeoXForCausalLM, "from_pretrained", None)
    series.hooked(2)
    series.hooked(3)
    assert torch.equal(series._resident.model.lm_head.weight, tiny_neox(3).lm_head.weight)


def test_callers_own_models_do_not_change_with_the_series(tmp_path):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    own = series[1].load("huggingface")
    series.hooked(2)
    assert torch.equal(logits(own), logits_of(tmp_path / "step1"))
    assert not own.training
    assert {(parameter.dtype, parameter.requires_grad) for parameter in own.parameters()} == {(torch.float32, False)}


def test_models_do_not_depend_on_the_file_once_loaded(tmp_path):
    """transformers maps the file into memory, so writing it again would change the model or end the process."""
    save(tiny_neox(1), tmp_path / "step1")
    series = CheckpointSeries.from_directory(tmp_path)
    own = series[1].load("huggingface")
    series.hooked(1)
    expected = logits_of(tmp_path / "step1")
    weights = tmp_path / "step1" / "model.safetensors"
    with weights.open("r+b") as file:  # in place: the same file, other numbers
        file.seek(weights.stat().st_size // 2)
        file.write(bytes(weights.stat().st_size // 2))
    assert not torch.equal(logits_of(tmp_path / "step1"), expected)
    assert torch.equal(logits(own), expected)
    assert torch.equal(logits(series._resident.model), expected)


def test_swaps_leave_the_files_as_they_were(tmp_path):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"step{step}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    series = CheckpointSeries.from_directory(tmp_path)
    for step in (1, 2, 1):
        series.hooked(step)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_old_pythia_pickles_and_new_safetensors_mix_in_one_series(tmp_path):
    """Half precision, `embed_out` for `lm_head`, and buffers that are no parameters any more."""
    save_as_old_pythia(tiny_neox(1), tmp_path / "step1")
    save_as_old_pythia(tiny_neox(2), tmp_path / "step2")
    save(tiny_neox(3), tmp_path / "step3")
    assert_swaps_equal_transformers(tmp_path, (1, 2, 3, 2, 1))


def test_old_pythia_names_are_learned_once(tmp_path, monkeypatch):
    for step in (1, 2):
        save_as_old_pythia(tiny_neox(step), tmp_path / f"step{step}")
    resident = Resident(tmp_path / "step1")
    monkeypatch.setattr(GPTNeoXForCausalLM, "from_pretrained", None)
    resident.fill(tmp_path / "step2")
    assert torch.equal(resident.model.lm_head.weight, tiny_neox(2).lm_head.weight.half().float())


def test_weights_saved_from_the_model_without_its_head_name_are_found(tmp_path):
    """Base-model names, as in the first GPT-2 files: `wte.weight` for `transformer.wte.weight`."""
    for step in (1, 2):
        model = tiny_gpt2(step)
        folder = save(model, tmp_path / f"step{step}")
        weights = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_swaps_equal_transformers(tmp_path, (1, 2, 1))


def test_both_names_of_a_tied_tensor_in_the_file(tmp_path):
    for step in (1, 2):
        model = tiny_gpt2(step)
        folder = save(model, tmp_path / f"step{step}")
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert_swaps_equal_transformers(tmp_path, (1, 2, 1))


def test_tensors_that_transformers_fuses_are_swapped_whole(tmp_path):
    """Mixtral's experts are separate in the file and one tensor in the model: no renaming maps one to the other."""
    config = MixtralConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=64,
        num_local_experts=2,
    )
    for step in (1, 2):
        save(scrambled(MixtralForCausalLM(config), step), tmp_path / f"step{step}")
    stored = load_file(tmp_path / "step1" / "model.safetensors")
    resident = Resident(tmp_path / "step1")
    assert set(stored) != set(resident.model.state_dict())
    resident.fill(tmp_path / "step2")
    assert torch.equal(logits(resident.model), logits_of(tmp_path / "step2"))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_checkpoints(tmp_path, suffix):
    for step in (1, 2):
        folder = tmp_path / f"step{step}"
        tiny_neox(step).save_pretrained(folder, max_shard_size="8KB")
        if suffix == "bin":
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            for file in folder.glob("*.safetensors"):
                torch.save(load_file(file), file.with_suffix(".bin"))
                file.unlink()
            (folder / "model.safetensors.index.json").unlink()
            index["weight_map"] = {k: v.replace(".safetensors", ".bin") for k, v in index["weight_map"].items()}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert len(list((tmp_path / "step1").glob(f"*.{suffix}"))) > 2
    series = assert_swaps_equal_transformers(tmp_path, (1, 2, 1))
    shard = sorted((tmp_path / "step2").glob(f"*.{suffix}"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, which .*index.json lists, is missing"):
        series.hooked(2)


def test_a_checkpoint_of_another_shape_gets_a_model_of_its_own(tmp_path):
    save(tiny_neox(1), tmp_path / "step1")
    save(tiny_neox(2, num_hidden_layers=3), tmp_path / "step2")
    assert_swaps_equal_transformers(tmp_path, (1, 2, 1))


def test_a_checkpoint_of_the_same_shape_with_another_config_gets_a_model_of_its_own(tmp_path):
    """The weights fit, and would compute something else."""
    save(tiny_neox(1), tmp_path / "step1")
    save(tiny_neox(2, use_parallel_residual=False), tmp_path / "step2")
    assert_swaps_equal_transformers(tmp_path, (1, 2, 1))


# faults


def spoil_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_infinity(folder):
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.embed_in.weight"][0, 0] = float("-inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def spoil_missing(folder):
    (folder / "model.safetensors").unlink()


def spoil_tensor_missing(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["gpt_neox.layers.0.attention.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_shape(folder):
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.0.attention.dense.weight"] = torch.zeros(16, 8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_config(folder):
    (folder / "config.json").write_text('{"model_type": "gpt_')


def spoil_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all" * 50)


FAULTS = {
    spoil_nan: r"layers\.1\.mlp\.dense_h_to_4h\.weight holds NaN",
    spoil_infinity: r"embed_in\.weight holds NaN or infinite",
    spoil_truncated: r"model\.safetensors is damaged",
    spoil_missing: r"no weights; looked for model\.safetensors",
    spoil_tensor_missing: r"attention\.dense\.weight",
    spoil_shape: r"attention\.dense\.weight|transformers cannot load it",
    spoil_config: r"config\.json is damaged",
    spoil_pickle: r"pytorch_model\.bin is damaged",
}


@pytest.mark.parametrize(("spoil", "message"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("first_use", [True, False])
def test_a_damaged_step_is_noted_and_the_others_stay_usable(tmp_path, spoil, message, first_use):
    for step in (1, 2, 3):
        save(tiny_neox(step), tmp_path / f"step{step}")
    spoil(tmp_path / "step2")
    series = CheckpointSeries.from_directory(tmp_path)
    if not first_use:
        series.hooked(1)
    with pytest.raises(CheckpointError, match=message) as caught:
        series.hooked(2)
    assert str(caught.value).startswith(f"step 2 of {tmp_path.name} ({tmp_path / 'step2'}): ")
    assert series.problems == {2: str(caught.value)}
    for step in (1, 3):
        series.hooked(step)
        assert torch.equal(logits(series._resident.model), logits_of(tmp_path / f"step{step}"))
    with pytest.raises(CheckpointError, match=message):
        series[2].load("huggingface")
    assert set(series.problems) == {2}


def test_a_repaired_step_is_no_problem_any_more(tmp_path):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"step{step}")
    spoil_truncated(tmp_path / "step2")
    series = CheckpointSeries.from_directory(tmp_path)
    with pytest.raises(CheckpointError):
        series.hooked(2)
    save(tiny_neox(2), tmp_path / "step2")
    series.hooked(2)
    assert series.problems == {}


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("the-code-ran",)


@pytest.mark.parametrize("first_use", [True, False])
def test_a_pickle_that_needs_code_is_refused_and_not_run(tmp_path, monkeypatch, first_use):
    monkeypatch.chdir(tmp_path)
    save(tiny_neox(1), tmp_path / "step1")
    folder = save(tiny_neox(2), tmp_path / "step2")
    (folder / "model.safetensors").unlink()
    torch.save({**tiny_neox(2).state_dict(), "extra": RunsCode()}, folder / "pytorch_model.bin")
    series = CheckpointSeries.from_directory(tmp_path)
    if not first_use:
        series.hooked(1)
    for use in (series.hooked, lambda step: series[step].load()):
        with pytest.raises(UnsafeWeightsError, match=r"would run code stored in it \(\w+\.mkdir\); convert"):
            use(2)
    assert not (tmp_path / "the-code-ran").exists()
    assert 2 in series.problems


@pytest.mark.parametrize("order", [(1, 5, 9, 7), (9, 7, 5, 1), (5, 9, 1, 7)])
def test_identical_checkpoints_are_noted_whatever_the_order_and_stay_usable(tmp_path, order):
    for step in (1, 5, 9):
        save(tiny_neox(0), tmp_path / f"step{step}")
    save(tiny_neox(7), tmp_path / "step7")
    series = CheckpointSeries.from_directory(tmp_path)
    for step in order:
        series.hooked(step)
    same = "weights identical to step 1"
    assert series.problems == {5: same, 9: same}


def test_one_changed_number_is_not_identical(tmp_path):
    model = tiny_neox(1)
    save(model, tmp_path / "step1")
    with torch.no_grad():
        model.gpt_neox.layers[1].mlp.dense_4h_to_h.weight[7, 7] += 0.01
    save(model, tmp_path / "step2")
    series = CheckpointSeries.from_directory(tmp_path)
    series.hooked(1)
    series[2].load("huggingface")
    assert series.problems == {}


def test_loading_and_swapping_see_the_same_weights_as_identical(tmp_path):
    for step in (1, 2):
        save(tiny_neox(0), tmp_path / f"step{step}")
    save(tiny_neox(3), tmp_path / "step3")
    series = CheckpointSeries.from_directory(tmp_path)
    series.hooked(3)
    series.hooked(1)
    series[2].load("huggingface")
    assert series.problems == {2: "weights identical to step 1"}


def test_models_that_need_their_own_code_are_refused(tmp_path):
    folder = tmp_path / "step1"
    save(tiny_neox(1), folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own_model", "auto_map": code}))
    series = CheckpointSeries.from_directory(tmp_path)
    for use in (series.hooked, lambda step: series[step].load()):
        with pytest.raises(RemoteCodeError, match="trust_remote_code=True"):
            use(1)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own_model"}))
    with pytest.raises(UnsupportedModelError, match="'own_model'"):
        series.hooked(1)


def test_code_of_the_model_is_run_only_when_the_caller_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = save(tiny_llama(1), tmp_path / "step1")
    expected = logits_of(folder)
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_model'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own_model", "auto_map": code}))
    with pytest.raises(RemoteCodeError):
        CheckpointSeries.from_directory(tmp_path).first.load("huggingface")
    series = CheckpointSeries.from_directory(tmp_path, trust_remote_code=True)
    model = series.first.load("huggingface")
    assert type(model).__name__ == "OwnForCausalLM"
    assert torch.equal(logits(model), expected)


def test_memory_does_not_grow_over_twenty_swaps(tmp_path):
    """The allocator's own count, at a shape of 13 MB; the 160m shape is in benchmarks/test_swap.py."""
    psutil = pytest.importorskip("psutil", reason="needs psutil to read the memory of this process")
    shape = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 8192, "num_hidden_layers": 6}
    for step in (1, 2):
        save(tiny_neox(step, **shape), tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    for step in (1, 2):
        series.hooked(step)
    before = psutil.Process().memory_info().rss
    for swap in range(20):
        series.hooked(1 + swap % 2)
    size = (tmp_path / "step1" / "model.safetensors").stat().st_size
    assert psutil.Process().memory_info().rss - before < size / 2


def test_unload_drops_the_resident_model(tmp_path):
    save(tiny_neox(1), tmp_path / "step1")
    series = CheckpointSeries.from_directory(tmp_path)
    series.hooked(1)
    series.unload()
    assert series._resident is None
    series.hooked(1)
    assert torch.equal(logits(series._resident.model), logits_of(tmp_path / "step1"))


# loader functions


def test_a_loader_function_is_a_series():
    loaded = []

    def load(step):
        loaded.append(step)
        return tiny_neox(step)

    series = CheckpointSeries.from_loader([20, 10], load, name="mine", seed=4)
    assert (series.steps, series.seed, series.identity(10), loaded) == ((10, 20), 4, None, [])
    assert isinstance(series[20].load(), GPTNeoXForCausalLM)
    for step in (10, 20, 10):
        torch.testing.assert_close(resident_logits(series, step), logits(tiny_neox(step))[:, -1], atol=1e-6, rtol=0)
    assert loaded == [20, 10, 20, 10]
    with pytest.raises(UnknownStepError, match="nearest: 10, 20"):
        series[15]


def test_a_loader_that_fails_or_returns_bad_weights_is_noted():
    def load(step):
        if step == 1:
            raise OSError("no file for step 1")
        model = tiny_neox(step)
        if step == 2:
            with torch.no_grad():
                model.lm_head.weight[0, 0] = float("inf")
        return model

    series = CheckpointSeries.from_loader([1, 2, 3], load)
    for step, message in ((1, "OSError: no file for step 1"), (2, "lm_head.weight holds NaN or infinite")):
        with pytest.raises(CheckpointError, match=message):
            series.hooked(step)
    series.hooked(3)
    assert set(series.problems) == {1, 2}


def test_a_mistake_in_a_loader_is_not_taken_for_missing_weights():
    series = CheckpointSeries.from_loader([1], lambda step: undefined_name)
    with pytest.raises(NameError):
        series.hooked(1)
    assert series.problems == {}
