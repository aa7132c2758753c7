"""Series on the Hugging Face hub: one repository whose revisions carry the step (`HubSource`).

What asks the hub and keeps what it gives is `HubRepository`, which other sources on the hub share.

Nothing is asked of the hub until a step is used. `HF_ENDPOINT`, `HF_HUB_CACHE` and `HF_HUB_OFFLINE` are read at every
use, so they may be set late. Checkpoints that are to be evicted are fetched into a store of the library's own
(`checkpoints.store`), never into the hub's cache: what the user had there before is never touched.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

from emergent_heads.checkpoints.naming import (
    Named,
    check_pattern,
    name_at,
    named_steps,
    tells_the_name,
    tells_tokens,
)
from emergent_heads.checkpoints.store import Lease, Store
from emergent_heads.errors import ArgumentError, CheckpointError, HubError, NoCheckpointsError
from emergent_heads.storage import cache_folder

CachePolicy = Literal["keep", "evict"]
RETRY_WAITS_S = (1.0, 4.0)
MAIN = "main"
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubRepository:
    """A repository of the hub and what of it lies here.

    Attributes:
        repository: "owner/name".
        cache: "keep" leaves checkpoints in the hub's cache; "evict" deletes each after use.
        disk_budget_gb: most disk (10^9 bytes) that checkpoints fetched under a budget may take, over all series,
            sessions and processes; the least recently used go first, those in use never.
    """

    repository: str
    cache: CachePolicy = "keep"
    disk_budget_gb: float | None = None

    def __post_init__(self) -> None:
        if self.cache not in ("keep", "evict"):
            raise ArgumentError(f"cache={self.cache!r}: use 'keep' or 'evict'")
        if self.disk_budget_gb is not None and not self.disk_budget_gb > 0:
            raise ArgumentError(f"disk_budget_gb={self.disk_budget_gb} must be above 0")
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", self.repository):
            raise ArgumentError(f"{self.repository!r} is no hub repository; write owner/name")

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    def tokenizer_folder(self) -> Path | None:
        """The local folder with the tokenizer of the repository's main revision, fetched when it is not there.

        None where it has none.
        """
        from emergent_heads.checkpoints.weights import TOKENIZER_NAMES, has_tokenizer

        commit = self._commit(MAIN)
        folder = self._snapshot(commit)
        if has_tokenizer(folder):
            return folder
        if offline():
            raise self._not_here(f"the tokenizer of {self.repository}")
        sizes = self._sizes(MAIN, commit)
        for name in ("config.json", *TOKENIZER_NAMES):  # the config may be what tells the tokenizer's class
            if name in sizes:
                self._download(name, MAIN, MAIN, in_hub_cache())
        return folder if has_tokenizer(folder) else None

    # which revisions there are

    @cached_property
    def _commits(self) -> Mapping[str, str]:
        """Revision -> commit, from the hub in one call; offline those in the local cache."""
        if offline():
            return self._local_commits()
        refs = self._ask(None, lambda: self._api().list_repo_refs(self.repository))
        return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}

    def _local_commits(self) -> dict[str, str]:
        refs = _hub_cache() / _cache_name(self.repository) / "refs"
        files = [path for path in refs.rglob("*") if path.is_file()]
        return {path.relative_to(refs).as_posix(): path.read_text().strip() for path in files}

    def _commit(self, revision: str) -> str:
        """The commit of a revision.

        Raises:
            CheckpointError: the hub has no such revision. HubError: it is not in the local cache, offline.
        """
        commit = self._commits.get(revision)
        if commit is not None:
            return commit
        if offline():
            raise self._not_here(f"{self.repository}, revision {revision}")
        raise CheckpointError("the hub has no such revision")

    def _not_here(self, what: str) -> HubError:
        return HubError(f"{what} is not in the local cache, and HF_HUB_OFFLINE is set; unset it to fetch")

    # where files lie

    def _snapshot(self, commit: str) -> Path:
        """The folder of a commit in the hub's cache."""
        return _hub_cache() / _cache_name(self.repository) / "snapshots" / commit

    @property
    def _store(self) -> Store:
        return Store(cache_folder() / "checkpoints", cache_folder() / "checkpoint_leases")

    @property
    def _fetches_into_store(self) -> bool:
        return self.cache == "evict" or self.disk_budget_gb is not None

    def _own_folder(self, key: str) -> Path:
        """The folder of one checkpoint in our own store."""
        return self._store.folder(_cache_name(self.repository), key)

    def _own_copies(self) -> dict[str, Path]:
        """What the checkpoints in our own store are called -> folder."""
        return self._store.whole(_cache_name(self.repository))

    @contextmanager
    def _in_store(self, key: str, called: str, where: str, needs: "Callable[[], Needs]") -> Iterator[Path | None]:
        """The folder of a checkpoint in our own store while it is in use; None where it has no business there.

        Args:
            key: of the checkpoint in the store.
            called: what it is called, for offline use.
            where: its place, for messages.
            needs: asks which files to fetch.
        """
        if not self._fetches_into_store and not self._store.holds(_cache_name(self.repository), key):
            yield None
            return
        with self._store.lease(_cache_name(self.repository), key, evict=self.cache == "evict") as lease:
            if lease.is_whole():
                yield lease.folder
            elif self._fetches_into_store:
                if offline():
                    raise self._not_here(where)
                self._fetch_into_store(lease, called, needs())
                yield lease.folder
            else:
                yield None

    def _fetch_into_store(self, lease: Lease, called: str, needs: "Needs") -> None:
        size = sum(needs.sizes.values())
        if self.disk_budget_gb is not None and size > self.disk_budget_gb * 1e9:
            raise ArgumentError(
                f"disk_budget_gb={self.disk_budget_gb} is less than one checkpoint of {self.repository} "
                f"({size / 1e9:.3g} GB)"
            )
        if lease.reserve(size, self.disk_budget_gb):
            for name in needs.sizes:
                self._download(name, needs.revision, needs.commit, {"local_dir": lease.folder})
            lease.complete(called)

    # fetching

    def _sizes(self, revision: str, commit: str, under: str | None = None) -> dict[str, int]:
        """Path in the repository -> bytes, of the files at the top or in the folder `under`."""
        return {file.path: file.size for file in self._listing(revision, commit, under)}

    def _hashes(self, revision: str, commit: str, under: str | None = None) -> dict[str, str]:
        """The same files -> hash of the content: SHA-256 of large files, git's of others."""
        return {
            file.path: f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}"
            for file in self._listing(revision, commit, under)
        }

    def _listing(self, revision: str, commit: str, under: str | None) -> list[Any]:
        """What the hub says of the files, nothing of which is fetched."""
        if offline():
            raise HubError(
                f"{self.repository}, revision {revision}: what is there can only be asked of the hub, and "
                "HF_HUB_OFFLINE is set; unset it"
            )
        listing = self._ask(
            revision,
            lambda: list(self._api().list_repo_tree(self.repository, path_in_repo=under, revision=commit)),
        )
        return [file for file in listing if hasattr(file, "size")]

    def _download(self, name: str, revision: str, at: str, place: dict[str, Any]) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(
            self._ask(
                revision,
                lambda: hf_hub_download(self.repository, name, revision=at, endpoint=_endpoint(), **place),
            )
        )

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=_endpoint())

    def _ask(self, revision: str | None, call: Callable[[], _T]) -> _T:
        """The answer of the hub, asked again where that may help.

        Raises:
            HubError: names repository, revision and cause; the client's error is its `__cause__`.
        """
        # HTTPError is that of httpx or httpx2, whichever this version of the client is built on
        from huggingface_hub.errors import (
            HFValidationError,
            HTTPError,  # pyright: ignore[reportPrivateImportUsage]
            XetDownloadError,
        )

        for wait in (*RETRY_WAITS_S, None):
            try:
                return call()
            except HFValidationError as error:
                raise ArgumentError(f"{self.repository!r} is no hub repository: {error}") from error
            except (HTTPError, OSError, RuntimeError, XetDownloadError) as error:
                if wait is None or not _may_pass(error):
                    at = f", revision {revision}" if revision else ""
                    raise HubError(f"{self.repository}{at}, from {_endpoint()}: {_cause(error)}") from error
                time.sleep(wait)
        raise AssertionError


@dataclass(frozen=True)
class HubSource(HubRepository):
    """Checkpoints as revisions of a repository.

    Attributes:
        pattern: name of a revision, with `{step}` for the step, `{billions}` for the tokens seen in 10^9, and `*` for
            parts that do not matter.
        known_steps: the published schedule; None to read the steps from the repository's branches and tags.
        trust_remote_code: run the model code of the repository.
        tokens_per_step: tokens of one step, where names tell no tokens.
        tokenizer_repository: where the tokenizer is, if the checkpoints have none.
    """

    pattern: str = "step{step}"
    known_steps: tuple[int, ...] | None = None
    trust_remote_code: bool = False
    tokens_per_step: int | None = None
    tokenizer_repository: str | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.known_steps is not None and not tells_the_name(self.pattern):
            raise ArgumentError(f"pattern={self.pattern!r}: known steps do not name a revision where parts are open")
        super().__post_init__()

    def steps(self) -> tuple[int, ...]:
        return self.known_steps if self.known_steps is not None else tuple(sorted(self._revisions))

    def tokens_seen(self, step: int) -> int | None:
        if tells_tokens(self.pattern):
            return self._revisions[step].tokens
        return None if self.tokens_per_step is None else step * self.tokens_per_step

    def where(self, step: int) -> str:
        revision = self._revision(step)
        commit = self._commits.get(revision) if "_commits" in self.__dict__ else None
        copies = [folder for folder in self._places(commit) if folder.is_dir()] if commit else []
        return f"{self.repository}, revision {revision}" + "".join(f", copy in {folder}" for folder in copies[:1])

    def identity(self, step: int) -> str | None:
        """Repository and commit, found without fetching weights; None where the hub has no such revision."""
        commit = self._commits.get(self._revision(step))
        return commit and f"{self.repository}@{commit}"

    def hashes(self, step: int) -> dict[str, str]:
        """File name -> hash of its content, by one question to the hub; no file is fetched.

        Raises:
            CheckpointError: the hub has no such revision. HubError: the hub does not answer.
        """
        revision = self._revision(step)
        return self._hashes(revision, self._commit(revision))

    def fetch_into(self, folder: Path, step: int, name: str) -> Path:
        """One small file of a step, fetched into a folder of the caller's."""
        revision = self._revision(step)
        return self._download(name, revision, self._commit(revision), {"local_dir": folder})

    @contextmanager
    def fetched(self, step: int) -> Iterator[Path]:
        """The local folder with config, weights and, where there is one, tokenizer, while it is read.

        What is not there is fetched. With `cache="evict"` it is gone afterwards.

        Raises:
            CheckpointError: the hub has no such revision, or no weights in it.
            HubError: the hub cannot be reached, refuses, or sends broken files.
        """
        revision = self._revision(step)
        commit = self._commit(revision)
        if _is_whole(kept := self._snapshot(commit)):
            yield kept
            return
        where = f"{self.repository}, revision {revision}"
        with self._in_store(commit, revision, where, lambda: self._needs(revision, commit)) as own:
            if own is None and offline():
                raise self._not_here(where)
            yield own or self._fetch_into_hub_cache(self._needs(revision, commit))

    def tokenizer_folders(self, folder: Path) -> tuple[Path, ...]:
        from emergent_heads.checkpoints.weights import has_tokenizer

        if self.tokenizer_repository is None or has_tokenizer(folder):
            return (folder,)
        other = HubRepository(self.tokenizer_repository).tokenizer_folder()
        return (other,) if other else ()

    # which revisions there are

    def _revision(self, step: int) -> str:
        return name_at(self.pattern, step) if self.known_steps is not None else self._revisions[step].name

    @cached_property
    def _revisions(self) -> dict[int, Named]:
        """Step -> revision, for the revisions that fit the pattern."""
        found = named_steps(self.pattern, self._commits, self.repository)
        if not found:
            names = ", ".join(list(self._commits)[:5]) or "none"
            place = "the local cache (HF_HUB_OFFLINE is set)" if offline() else "the hub"
            raise NoCheckpointsError(
                f"{place} has no revision of {self.repository} that fits pattern={self.pattern!r}; "
                f"revisions there are: {names}"
            )
        return found

    def _local_commits(self) -> dict[str, str]:
        own = {revision: folder.name for revision, folder in self._own_copies().items()}
        return own | super()._local_commits()

    def _places(self, commit: str) -> tuple[Path, Path]:
        """Where a copy may lie: in the hub's cache, or in our own store."""
        return self._snapshot(commit), self._own_folder(commit)

    # fetching

    def _needs(self, revision: str, commit: str) -> "Needs":
        from emergent_heads.checkpoints.weights import TOKENIZER_NAMES, weight_entry

        sizes = self._sizes(revision, commit)
        entry = weight_entry(sizes)
        if entry is None or "config.json" not in sizes:
            raise CheckpointError(f"the revision has no {'weights' if entry is None else 'config.json'}")
        names = ["config.json", *(name for name in TOKENIZER_NAMES if name in sizes)]
        if self.trust_remote_code:
            names += [name for name in sizes if name.endswith(".py")]
        names += self._shards(revision, commit, entry, sizes) if entry.endswith(".json") else [entry]
        return Needs(revision, commit, {name: sizes[name] for name in names})

    def _shards(self, revision: str, commit: str, index: str, sizes: Mapping[str, int]) -> list[str]:
        """The index of sharded weights and the shards that it lists."""
        from emergent_heads.checkpoints.weights import shard_names

        with TemporaryDirectory() as folder:  # before any room is reserved, which has to be for all files at once
            listed = shard_names(self._download(index, revision, commit, {"local_dir": Path(folder)}))
        if missing := [name for name in listed if name not in sizes]:
            raise CheckpointError(f"{missing[0]}, which {index} lists, is missing")
        return [index, *listed]

    def _fetch_into_hub_cache(self, needs: "Needs") -> Path:
        for name in needs.sizes:
            # config.json is asked for by revision, which leaves the revision's commit in the cache for offline use
            at = needs.revision if name == "config.json" else needs.commit
            self._download(name, needs.revision, at, in_hub_cache())
        return self._snapshot(needs.commit)


@dataclass(frozen=True)
class Needs:
    """What to fetch for a checkpoint: files and their bytes, in this order; messages call the commit `revision`."""

    revision: str
    commit: str
    sizes: Mapping[str, int]


def in_hub_cache() -> dict[str, Any]:
    """Where `_download` is to put a file that stays."""
    return {"cache_dir": _hub_cache()}


def _is_whole(folder: Path) -> bool:
    """Whether config, weights and a tokenizer lie in `folder`.

    A folder without a tokenizer may be one that another program fetched in part, so the hub is asked unless offline.
    """
    from emergent_heads.checkpoints.weights import TOKENIZER_NAMES, weight_files

    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_NAMES)
    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder)) and (has_tokenizer or offline())
    except CheckpointError:
        return False


def _cache_name(repository: str) -> str:
    return "models--" + repository.replace("/", "--")


def _endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _hub_cache() -> Path:
    from huggingface_hub import constants

    if own := os.environ.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)


def offline() -> bool:
    """Whether the user wants nothing asked of the hub."""
    from huggingface_hub import constants

    said = os.environ.get("HF_HUB_OFFLINE", os.environ.get("TRANSFORMERS_OFFLINE", ""))
    return constants.HF_HUB_OFFLINE or said.upper() in ("1", "ON", "YES", "TRUE")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _behind(error: BaseException) -> BaseException:
    """The client wraps what went wrong into "not in the local cache"; this is what went wrong."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error


def _may_pass(error: BaseException) -> bool:
    """Whether asking again can help: not for refusals and unknown names, nor for a full or read-only disk."""
    behind = _behind(error)
    status = _status(behind)
    if status is not None:
        return status >= 500 or status in (408, 429)
    return getattr(behind, "errno", None) is None or isinstance(behind, (ConnectionError, TimeoutError))


def _cause(error: BaseException) -> str:
    behind = _behind(error)
    status = _status(behind)
    if status in (401, 403, 404):
        return f"the hub says {status}: no such repository or revision, or one that needs `hf auth login`"
    if status is not None:
        return f"the hub answers with status {status}"
    text = str(behind).strip()
    reason = text.splitlines()[0].strip() if text else type(behind).__name__
    if getattr(behind, "errno", None) in (None, errno.ECONNREFUSED) and "Consistency" not in reason:
        return f"it cannot be reached ({reason}); set HF_HUB_OFFLINE=1 to work with what is in the local cache"
    return reason
