"""Reading a Hugging Face checkpoint folder, and moving its weights into a model that is already in memory.

No pickle is run: weights come from safetensors files, or from `pytorch_model.bin` by `torch.load(weights_only=True)`.
Every tensor is read once; the same pass copies it, tells whether it is finite, and takes the numbers that tell two
checkpoints apart.
"""

import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emergent_heads.errors import (
    CheckpointError,
    RemoteCodeError,
    TokenizerError,
    UnsafeWeightsError,
    UnsupportedModelError,
)

WEIGHT_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers prefers them."""

TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_NOT_ABOUT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")
# Numbers handled at a time: half a megabyte, so the sum finds the copy still in the processor's cache.
_CHUNK = 1 << 17

Fingerprint = tuple[float, ...]
StoredWeights = Mapping[str, Callable[[], Tensor]]
"""Name of each stored tensor, and a function that reads it."""


def weight_entry(names: Collection[str]) -> str | None:
    """The file by which transformers would find the weights among `names`; None when there is none."""
    return next((name for name in WEIGHT_NAMES if name in names), None)


def shard_names(index: Path) -> list[str]:
    """The weight files that an index file lists."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index.name} cannot be read ({error})") from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of the checkpoint in `folder`.

    Raises:
        CheckpointError: there are none, or a listed one is missing.
    """
    entry = weight_entry([path.name for path in folder.iterdir()] if folder.is_dir() else [])
    if entry is None:
        raise CheckpointError(f"no weights; looked for {', '.join(WEIGHT_NAMES)}")
    files = [folder / name for name in (shard_names(folder / entry) if entry.endswith(".index.json") else [entry])]
    if missing := [path.name for path in files if not path.is_file()]:
        raise CheckpointError(f"{missing[0]}, which {entry} lists, is missing")
    return files


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError("no config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json is damaged ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json is damaged (no JSON object)")
    return config


def architecture_of(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """The part of the config in `folder` that decides what the weights mean, under the names of this transformers.

    Checkpoints of which it is equal can share one model in memory.

    Raises:
        CheckpointError: the config is missing or damaged.
        RemoteCodeError, UnsupportedModelError: as `load_model`.
    """
    from transformers import AutoConfig

    _check_known(read_config(folder), trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"transformers cannot read its config.json: {_first_line(error)}") from error
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_ABOUT_THE_MODEL}


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's vocabulary lies in `folder`."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(*folders: Path) -> Any | None:
    """The tokenizer in the first of `folders` that has one; None when none has. The hub is never asked.

    Raises:
        TokenizerError: the files are there and transformers cannot read them.
    """
    from transformers import AutoTokenizer

    for folder in folders:
        if has_tokenizer(folder):
            try:
                return AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError, KeyError, ImportError) as error:
                raise TokenizerError(f"the tokenizer in {folder} cannot be read: {_first_line(error)}") from error
    return None


def load_model(folder: Path, *, trust_remote_code: bool = False, device: "torch.device | str" = "cpu") -> Any:
    """A new Hugging Face causal language model with the weights in `folder`, in float32, eval mode, without gradients.

    Raises:
        CheckpointError: weights or config are missing or damaged, or leave part of the model at random values.
        UnsafeWeightsError: reading the weights would run code.
        RemoteCodeError: the model needs code from its repository and `trust_remote_code` is False.
        UnsupportedModelError: transformers knows no causal language model of that type.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    _check_known(config, trust_remote_code)
    with stored_weights(folder):
        pass  # damaged or unsafe files are told apart here, before transformers sees them
    try:
        with without_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load it: {_first_line(error)}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the weights of {len(missing)} of the model's tensors are missing, {missing[0]} for one; "
            "they would stay at random values"
        )
    model.eval().requires_grad_(False).to(device)
    for tensor in {id(tensor): tensor for tensor in named_state(model).values()}.values():
        tensor.data = tensor.data.clone()  # transformers maps the file, which the user may write again or evict
    return model


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """No bar of transformers' own for each checkpoint that is read or written."""
    from transformers.utils import logging

    # Not `disable_progress_bar`, which would also change what the user has set for the hub's bars, for good.
    before = logging.set_tqdm_hook(lambda _factory, args, _options: logging.EmptyTqdm(*args))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _check_known(config: Mapping[str, Any], trust_remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if "auto_map" in config and not trust_remote_code:
        raise RemoteCodeError(
            f"a model of type {model_type!r} needs Python code from its repository, which is not run unasked; "
            "read that code, then pass trust_remote_code=True"
        )
    if "auto_map" not in config:
        raise UnsupportedModelError(f"transformers has no causal language model of type {model_type!r}")


@contextmanager
def stored_weights(folder: Path) -> Iterator[StoredWeights]:
    """The tensors stored in `folder`, each read from the file when its function is called.

    Raises:
        CheckpointError: a weight file is missing or damaged. UnsafeWeightsError: reading it would run code.
    """
    with ExitStack() as stack:
        stored: dict[str, Callable[[], Tensor]] = {}
        for path in weight_files(folder):
            stored |= _open_safetensors(path, stack) if path.suffix == ".safetensors" else _open_pickle(path)
        yield stored


@contextmanager
def stored_in(path: Path) -> Iterator[StoredWeights]:
    """The tensors stored in one file, each read when its function is called.

    Raises:
        CheckpointError: the file is damaged. UnsafeWeightsError: reading it would run code.
    """
    with ExitStack() as stack:
        yield _open_safetensors(path, stack) if path.suffix == ".safetensors" else _open_pickle(path)


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, Callable[[], Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is damaged ({_first_line(error)})") from error

    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: file.get_tensor(name)

    return {name: reader(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping


def _open_pickle(path: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files older than torch 1.6 cannot be mapped
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if _is_pickle(path) and "unsupported" in str(error).lower():
            raise UnsafeWeightsError(
                f"reading {path.name} would run code stored in it ({_refused(error)}); "
                "convert it to safetensors in a place that may run that code"
            ) from error
        raise CheckpointError(f"{path.name} is damaged (no weights in the format of torch.save)") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path.name} is damaged ({_first_line(error)})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path.name} holds no plain mapping of names to tensors")
    return {name: (lambda tensor=tensor: tensor) for name, tensor in tensors.items()}


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Everything in `model` that a checkpoint decides, by every name it has (tied tensors have several)."""
    return dict(model.state_dict(keep_vars=True))


def fingerprint(model: nn.Module) -> Fingerprint:
    """Numbers that tell the weights of `model` from those of another step: sums and samples of every tensor.

    Raises:
        CheckpointError: a parameter is NaN or infinite.
    """
    return tuple(number for name, tensor in _distinct(named_state(model)) for number in _measured(name, tensor))


def copy_state(stored: StoredWeights, model: nn.Module) -> Fingerprint:
    """Copies stored tensors into the tensors of the same names in `model`, and gives the fingerprint.

    Raises:
        CheckpointError: the names or shapes are others than the model's, or a parameter is NaN or infinite.
    """
    state = named_state(model)
    for verb, other in (("lacks", set(state) - set(stored)), ("has", set(stored) - set(state))):
        if other:
            raise CheckpointError(f"it {verb} {min(other)}, unlike the model of the run")
    numbers: list[float] = []
    with torch.no_grad():
        for name, tensor in _distinct(state):
            source = _read(stored, name)
            if source.shape != tensor.shape:
                raise CheckpointError(
                    f"{name} has shape {list(source.shape)} where the model has {list(tensor.shape)}"
                )
            numbers += _measured(name, tensor, source)
    return tuple(numbers)


class Resident:
    """One model in memory that takes the weights of one checkpoint after another, in place.

    How the names in the files belong to the model's tensors is learned once for each set of names, by comparing the
    files with what transformers made of them, so renamed, prefixed and tied tensors are handled as transformers does.
    Where that is no plain renaming (fused or split tensors), transformers loads each checkpoint anew and its state is
    copied.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False, device: "torch.device | str" = "cpu") -> None:
        """Loads the checkpoint in `folder`; see `load_model` for what it raises."""
        self.architecture = architecture_of(folder, trust_remote_code)
        self.model: Any = load_model(folder, trust_remote_code=trust_remote_code, device=device)
        self._trust_remote_code = trust_remote_code
        self._state = named_state(self.model)
        self._plans: dict[frozenset[str], dict[str, str] | None] = {}
        self.fingerprint: Fingerprint = fingerprint(self.model)
        with stored_weights(folder) as stored:
            self._plans[frozenset(stored)] = self._learn_names(stored)

    def fill(self, folder: Path) -> Fingerprint:
        """Replaces every tensor of the model by the one in `folder` and gives the fingerprint.

        Raises:
            CheckpointError: the weights are missing, damaged, of another shape or not finite. The model is then a
                mixture until the next call that succeeds.
        """
        with stored_weights(folder) as stored, torch.no_grad():
            plan = self._plans.get(frozenset(stored))
            if plan is not None:
                self.fingerprint = self._copy(stored, plan)
            else:
                self._copy_as_transformers_reads(folder)
                self.fingerprint = fingerprint(self.model)
                if frozenset(stored) not in self._plans:
                    self._plans[frozenset(stored)] = self._learn_names(stored)
        return self.fingerprint

    def _copy(self, stored: StoredWeights, plan: Mapping[str, str]) -> Fingerprint:
        numbers: dict[int, list[float]] = {}
        for stored_name, name in plan.items():
            target, source = self._state[name].data, _read(stored, stored_name)
            if source.shape != target.shape:
                raise CheckpointError(
                    f"{stored_name} has shape {list(source.shape)} where the config asks for {list(target.shape)}"
                )
            if id(self._state[name]) in numbers:  # the other name of a tied tensor
                if not torch.equal(target, source.to(target)):
                    raise CheckpointError(f"{stored_name} differs from the tensor that the config ties it to")
            else:
                numbers[id(self._state[name])] = _measured(name, self._state[name], source)
        return tuple(number for _, tensor in _distinct(self._state) for number in numbers[id(tensor)])

    def _copy_as_transformers_reads(self, folder: Path) -> None:
        fresh = load_model(folder, trust_remote_code=self._trust_remote_code)
        if len(_distinct(named_state(fresh))) != len(_distinct(self._state)):
            raise CheckpointError("its tensors are tied in another way than those of the series' other checkpoints")
        try:
            self.model.load_state_dict(fresh.state_dict(), strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"its weights do not fit the model: {_first_line(error)}") from error

    def _learn_names(self, stored: StoredWeights) -> dict[str, str] | None:
        """Stored name -> name in the model, proven on the checkpoint now in the model; None if not one to one."""
        plan: dict[str, str] = {}
        left: list[str] = []
        for stored_name in stored:
            name = self._same_or_suffix(stored_name)
            if name is not None and self._holds(name, _read(stored, stored_name)):
                plan[stored_name] = name
            else:
                left.append(stored_name)
        filled = {id(self._state[name]) for name in plan.values()}
        for name, tensor in _distinct(self._state):
            if id(tensor) in filled:
                continue
            matches = [stored_name for stored_name in left if self._holds(name, _read(stored, stored_name))]
            if len(matches) != 1:
                return None
            plan[matches[0]] = name
        return plan

    def _same_or_suffix(self, stored_name: str) -> str | None:
        if stored_name in self._state:
            return stored_name
        matches = [
            name for name in self._state if name.endswith(f".{stored_name}") or stored_name.endswith(f".{name}")
        ]
        return matches[0] if len(matches) == 1 else None

    def _holds(self, name: str, tensor: Tensor) -> bool:
        held = self._state[name]
        return held.shape == tensor.shape and torch.equal(held.data, tensor.to(held))


def _distinct(state: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Each tensor once, under the first of its names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def _read(stored: StoredWeights, name: str) -> Tensor:
    from safetensors import SafetensorError

    try:
        return stored[name]()
    except (SafetensorError, RuntimeError, OSError) as error:
        raise CheckpointError(f"the weights of {name} are damaged ({_first_line(error)})") from error


@torch.no_grad()
def _measured(name: str, tensor: Tensor, source: Tensor | None = None) -> list[float]:
    """Sum and a few values of `tensor`, after copying `source` into it where one is given.

    A NaN or an infinity anywhere makes the sum NaN or infinite, so one sum is a complete test.
    """
    flat = tensor.data.view(-1) if tensor.is_contiguous() else None
    if flat is None or tensor.numel() <= _CHUNK:
        values = tensor.data if source is None else tensor.data.copy_(source)
        sums = [values.sum(dtype=torch.float32)]
        flat = values.reshape(-1)
    else:
        chunks = flat.split(_CHUNK)
        if source is None:
            sums = [chunk.sum(dtype=torch.float32) for chunk in chunks]
        else:
            pairs = zip(chunks, source.reshape(-1).split(_CHUNK), strict=True)
            sums = [chunk.copy_(new).sum(dtype=torch.float32) for chunk, new in pairs]
    total = float(torch.stack(sums).double().sum())
    if isinstance(tensor, nn.Parameter) and not torch.isfinite(torch.tensor(total)) and not flat.isfinite().all():
        raise CheckpointError(f"its weights are not finite: {name} holds NaN or infinite values")
    return [total, *flat[:: max(1, flat.numel() // 3)][:3].double().tolist()]


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2)[:1] in (b"P", b"\x80")  # a zip archive, as torch.save writes them, or a bare pickle


def _refused(error: BaseException) -> str:
    """Which object the weights-only reader would not make."""
    words = str(error).split("GLOBAL ")
    return words[1].split()[0] if len(words) > 1 else "an object that is no tensor"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text and not isinstance(error, KeyError) else type(error).__name__
