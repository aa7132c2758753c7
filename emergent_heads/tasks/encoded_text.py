"""Text on disk, as token ids: files into documents, documents into a byte-pair encoding, and both kept.

The ids of a text are worked out once per machine and memory-mapped from then on, so that many runs, and many processes
at the same time, read the same pages.
"""

import hashlib
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import glob, has_magic
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from emergent_heads.errors import ArgumentError
from emergent_heads.storage import cache_folder, digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STANDARD_LIBRARY = "stdlib"
END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "held-out")
_LAYOUT = 1  # of the kept files; another number makes them anew
_LONGEST_PIECE = 2**20  # characters encoded at once, so that memory stays bounded

TokenIds = Int[np.ndarray, " token"]


@dataclass(frozen=True)
class TextSource:
    """Which text: files, and what parts them into documents.

    Attributes:
        paths: files, patterns such as "texts/**/*.txt", or "stdlib".
        separator: text that parts the documents of a file; None: a file is one document.
    """

    paths: tuple[str, ...]
    separator: str | None

    def documents(self) -> list[str]:
        """The documents that are not empty, in the order of the files.

        Raises:
            ArgumentError: a file is missing, or is no UTF-8 text.
        """
        return _documents(self._files(), self.separator)

    def digest(self) -> str:
        """SHA-256 of the documents, 32 hexadecimal digits; worked out again when a file's size or time changes.

        Raises:
            ArgumentError: as `documents`.
        """
        return _digest(self._files(), self.separator)

    def _files(self) -> "tuple[_File, ...]":
        """The files, those of a pattern in the order of their names."""
        found: list[_File] = []
        for path in self.paths:
            if path == STANDARD_LIBRARY:
                modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
                found += [_File.of(module, ascii_only=True) for module in modules]
                continue
            full = str(Path(path).expanduser())
            # Not Path.glob, which takes no absolute pattern.
            matching = sorted(glob(full, recursive=True)) if has_magic(full) else [full]  # noqa: PTH207
            files = [_File.of(Path(each), ascii_only=False) for each in matching if Path(each).is_file()]
            if not files:
                advice = f"; for the files of a folder give a pattern: {path}/**/*.txt" if Path(full).is_dir() else ""
                raise ArgumentError(f"there is no text file {path}{advice}")
            found += files
        return tuple(found)


class _File(NamedTuple):
    """A file as it stands, so that what was worked out from it is worked out again when it changes."""

    path: str
    size: int
    changed_ns: int
    ascii_only: bool

    @classmethod
    def of(cls, path: Path, *, ascii_only: bool) -> "_File":
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, ascii_only)

    def read(self) -> str:
        """The text, without what is not ASCII if so asked."""
        raw = Path(self.path).read_bytes()
        try:
            text = raw.decode("ascii" if self.ascii_only else "utf-8", "ignore" if self.ascii_only else "strict")
        except UnicodeDecodeError as error:
            raise ArgumentError(f"{self.path} is no UTF-8 text ({error.reason} at byte {error.start})") from error
        return text.replace("\r\n", "\n")


@dataclass(frozen=True, eq=False)
class EncodedText:
    """The token ids of a text.

    Attributes:
        tokenizer: what encodes it; its end-of-text token is also what begins a text, and what unknown bytes become.
        splits: by split, its documents one after the other, an end-of-text token after each. Do not write to it.
        counts: `[vocabulary]`, how often each token occurs in "train".
    """

    tokenizer: "PreTrainedTokenizerFast"
    splits: Mapping[str, TokenIds]
    counts: Int[np.ndarray, " vocabulary"]


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, *, end_of_text: str | None = END_OF_TEXT
) -> "PreTrainedTokenizerFast":
    """A byte-level byte-pair encoding of at most `vocabulary_size` tokens, trained on `texts`.

    Args:
        texts: what it is trained on.
        vocabulary_size: tokens, the bytes of the texts and the end-of-text token among them.
        end_of_text: the token, with id 0, that begins and ends a text, as in GPT-2 and Pythia, and that stands for
            bytes the texts do not have; None for no such token.

    Raises:
        ArgumentError: the texts have more different bytes than the vocabulary takes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=end_of_text))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [end_of_text] if end_of_text else []
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocabulary_size:  # the trainer takes every byte, whatever it is told
        raise ArgumentError(
            f"vocabulary_size {vocabulary_size} is too small: the text alone has "
            f"{tokenizer.get_vocab_size() - len(special)} different bytes, and the end of a text is a token too; give "
            f"{tokenizer.get_vocab_size()} or more"
        )
    return _wrapped(tokenizer, end_of_text)


def encoded_text(source: TextSource, vocabulary_size: int, held_out_share: float) -> EncodedText:
    """The text as token ids, from the cache folder or made now and kept there.

    Raises:
        ArgumentError: the text cannot be read, is one document only, or needs a larger vocabulary.
    """
    made_by = metadata.version("tokenizers")
    key = digest("text", _LAYOUT, made_by, source.digest(), vocabulary_size, held_out_share)
    return _kept(cache_folder() / "texts" / key, source, vocabulary_size, held_out_share)


def held_out(documents: Sequence[str], share: float) -> Iterator[bool]:
    """Whether each document is held out: by a hash of its text, so copies go together and the order says nothing.

    In the order of their hashes, documents are held out that still fit into this share of the characters; if none
    does, the shortest.

    Raises:
        ArgumentError: there are not two different documents.
    """
    sizes: dict[bytes, int] = {}
    hashes = [hashlib.sha256(document.encode()).digest() for document in documents]
    for document, key in zip(documents, hashes, strict=True):
        sizes[key] = sizes.get(key, 0) + len(document)
    if len(sizes) < 2:
        raise ArgumentError(
            f"the text has {len(sizes)} document, and one must be held out; give more files, or a separator that "
            'parts the documents of a file, such as separator="\\n\\n"'
        )
    left, chosen = share * sum(sizes.values()), set[bytes]()
    for key in sorted(sizes):
        if sizes[key] <= left:
            chosen.add(key)
            left -= sizes[key]
    chosen = chosen or {min(sizes, key=lambda key: (sizes[key], key))}
    return (key in chosen for key in hashes)


@lru_cache(maxsize=8)
def _kept(folder: Path, source: TextSource, vocabulary_size: int, held_out_share: float) -> EncodedText:
    if not folder.is_dir():
        made = _encode(source.documents(), vocabulary_size, held_out_share)
        try:
            _keep(folder, made)
        except OSError:  # a cache that cannot be written costs time and memory, never the result
            return made
    return _open(folder)


def _encode(documents: Sequence[str], vocabulary_size: int, held_out_share: float) -> EncodedText:
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for document, kept_back in zip(documents, held_out(documents, held_out_share), strict=True):
        parts["held-out" if kept_back else "train"].append(document)
    tokenizer = train_tokenizer(parts["train"], vocabulary_size)
    dtype = np.uint16 if vocabulary_size <= 2**16 else np.uint32
    splits = {split: _token_ids(tokenizer, parts[split]).astype(dtype) for split in SPLITS}
    return EncodedText(tokenizer, splits, np.bincount(splits["train"], minlength=vocabulary_size))


def _token_ids(tokenizer: "PreTrainedTokenizerFast", documents: Sequence[str]) -> TokenIds:
    """All documents, an end-of-text token after each."""
    end = np.array([tokenizer.eos_token_id], dtype=np.uint32)
    found: list[TokenIds] = []
    for document in documents:
        for piece in _pieces(document):
            found.append(np.array(tokenizer.backend_tokenizer.encode(piece).ids, dtype=np.uint32))
        found.append(end)
    return np.concatenate(found)


def _pieces(document: str) -> Iterator[str]:
    """The document, a long one in pieces that end with a line where there are lines."""
    start = 0
    while len(document) - start > _LONGEST_PIECE:
        end = document.rfind("\n", start, start + _LONGEST_PIECE) + 1 or start + _LONGEST_PIECE
        yield document[start:end]
        start = end
    yield document[start:]


def _keep(folder: Path, text: EncodedText) -> None:
    """Writes the files under a temporary name and renames the folder; who comes second leaves the first's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        new = Path(temporary) / folder.name
        new.mkdir()
        text.tokenizer.backend_tokenizer.save(str(new / "tokenizer.json"))
        for name, array in {**text.splits, "counts": text.counts}.items():
            np.save(new / f"{name}.npy", array)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _open(folder: Path) -> EncodedText:
    from tokenizers import Tokenizer

    tokenizer = _wrapped(Tokenizer.from_file(str(folder / "tokenizer.json")), END_OF_TEXT)
    # As plain arrays: the same mapped pages, without what np.memmap adds to every look-up.
    splits = {split: np.asarray(np.load(folder / f"{split}.npy", mmap_mode="r")) for split in SPLITS}
    return EncodedText(tokenizer, splits, np.load(folder / "counts.npy"))


def _wrapped(tokenizer: object, end_of_text: str | None) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    names = ("bos_token", "eos_token", "unk_token") if end_of_text else ()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict.fromkeys(names, end_of_text))


def _documents(files: Sequence[_File], separator: str | None) -> list[str]:
    texts = (file.read() for file in files)
    parts = (part for text in texts for part in ([text] if separator is None else text.split(separator)))
    return [part for part in parts if part.strip()]


@lru_cache(maxsize=64)
def _digest(files: tuple[_File, ...], separator: str | None) -> str:
    return digest(*_documents(files, separator))
