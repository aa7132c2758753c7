"""Faults of published checkpoints that somebody found and reported, by repository and step.

Nothing here is measured by the library: each entry says what its report says, and where the report is. A repository
may have been mended since; `CheckpointSeries.verify` compares what the hub serves now. The same table as a page:
`python -m emergent_heads.checkpoints.known_issues`.
"""

import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from emergent_heads.errors import KnownBadCheckpointError, KnownIssueWarning

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["wrong weights", "in doubt", "missing", "harmless", "relabelled", "mended", "published scores"]
"""What sort of fault it is; `MEANING` says what each means for a result."""

MEANING: Mapping[Kind, str] = {
    "wrong weights": "the weights are not those of the step: results with them are void. Using one warns, and "
    "`allow_known_bad=False` refuses it.",
    "in doubt": "somebody found the weights odd, and nobody has said why. Using one warns.",
    "missing": "there are no weights; searches pass over the step.",
    "harmless": "odd, but as training left it. Results are marked, nothing else.",
    "relabelled": "the number in the name is not the number of optimiser steps. Results are marked, nothing else.",
    "mended": "was wrong and has been uploaded again: old copies and old results are void. Results are marked, "
    "nothing else.",
    "published scores": "the weights are not in doubt, the scores published with them are.",
}
_WARNED: Collection[Kind] = ("wrong weights", "in doubt")
_REFUSED: Collection[Kind] = ("wrong weights",)
_MARKED: Collection[Kind] = ("wrong weights", "in doubt", "harmless", "relabelled", "mended")
_RESULTS: Mapping[Kind, str] = {
    "wrong weights": "void",
    "in doubt": "in doubt",
    "missing": "none to be had",
    "harmless": "sound",
    "relabelled": "sound, at another step",
    "mended": "void if older than the repair",
    "published scores": "sound",
}


@dataclass(frozen=True)
class KnownIssue:
    """A fault of some steps of some repositories.

    Attributes:
        repositories: on the Hugging Face hub.
        scope: the repositories in words.
        steps: those affected; `step in steps` tells.
        kind: what sort of fault; see `MEANING`.
        what: what the report says, in sentences.
        report: address of the report.
        reported: when, as year-month-day; empty where there is no thread about it.
    """

    repositories: tuple[str, ...]
    scope: str
    steps: Collection[int]
    kind: Kind
    what: str
    report: str
    reported: str

    @property
    def warns(self) -> bool:
        """Whether using one of the steps warns."""
        return self.kind in _WARNED

    @property
    def refused(self) -> bool:
        """Whether `allow_known_bad=False` refuses the steps."""
        return self.kind in _REFUSED

    @property
    def mark(self) -> str:
        """What stands in results: "wrong weights: EleutherAI/pythia#205"."""
        return f"{self.kind}: {self.reference}"

    @property
    def reference(self) -> str:
        """The report in short: "EleutherAI/pythia#205"; its address where it is no numbered thread."""
        place, _, number = self.report.removeprefix("https://github.com/").rpartition("/issues/")
        return f"{place}#{number}" if place else self.report

    @property
    def steps_text(self) -> str:
        """The steps in words: "0, 1, 2, 1000 to 53000 by 1000"."""
        return steps_in_words(self.steps) or "other branches"


def issues_of(repository: str | None, step: int) -> tuple[KnownIssue, ...]:
    """What is known of a step, the gravest first."""
    return tuple(issue for issue in _ISSUES_OF.get(repository or "", ()) if step in issue.steps)


def steps_in_words(steps: Collection[int]) -> str:
    """Steps, ascending, those in even distances joined: "0, 1, 2, 1000 to 53000 by 1000"."""
    return ", ".join(_runs(steps))


def issue_to_mark(repository: str | None, step: int) -> KnownIssue | None:
    """The gravest issue of a step that is to stand in results; None where there is none."""
    return next((issue for issue in issues_of(repository, step) if issue.kind in _MARKED), None)


def met(issue: KnownIssue, series: str, step: int, *, allowed: bool, warned: set[str]) -> None:
    """What happens when a step with such an issue is used: a warning, once for all steps of a series, or a refusal.

    Args:
        issue: one that `warns`.
        series: its name, for the message.
        step: the step that is used.
        allowed: whether wrong weights may be used.
        warned: marks of the issues that the series has warned of; extended.

    Raises:
        KnownBadCheckpointError: the weights are wrong, and that is not allowed.
    """
    if issue.refused and not allowed:
        raise KnownBadCheckpointError(
            f"its published weights are known to be wrong ({issue.report}); allow_known_bad=True uses them anyway"
        )
    if issue.mark in warned:
        return
    warned.add(issue.mark)
    can = "allow_known_bad=False refuses it" if issue.refused else "look at its neighbours before you trust it"
    warnings.warn(
        f"step {step} of {series}, {issue.kind}: {issue.what} See {issue.report} (steps: {issue.steps_text}). Results "
        f"have it in known_issue; {can}, and verify() of the series compares what the hub serves now",
        KnownIssueWarning,
        stacklevel=_callers_level(),
    )


def known_issues(repository: str | None = None) -> "pd.DataFrame":
    """Faults of published checkpoints that somebody found and reported; no report of a repository proves nothing.

    Args:
        repository: "owner/name", or the name alone; None for all.

    Returns:
        One row per repository and issue: `repository`; `kind`; `steps` in words and `n_steps` (those of a published
        schedule, or every number of a range); `what` is wrong; `results` ("void", "in doubt", "sound", ...); `on_use`
        ("warns, can be refused", "warns", "marks results", "none"); `report` (address) and `reported` (date).
    """
    import pandas as pd

    columns = ["repository", "kind", "steps", "n_steps", "what", "results", "on_use", "report", "reported"]
    rows = [
        {
            "repository": each,
            "kind": issue.kind,
            "steps": issue.steps_text,
            "n_steps": len(issue.steps),
            "what": issue.what,
            "results": _RESULTS[issue.kind],
            "on_use": _on_use(issue),
            "report": issue.report,
            "reported": issue.reported,
        }
        for issue in ISSUES
        for each in issue.repositories
        if repository is None or repository in (each, each.rpartition("/")[2])
    ]
    return pd.DataFrame(rows, columns=columns)


def mark_of(repository: str | None, step: int) -> str:
    """What is known of a step, in short: "wrong weights: EleutherAI/pythia#205"; "" where nothing is."""
    issue = issue_to_mark(repository, step)
    return issue.mark if issue else ""


def mark_steps(table: "pd.DataFrame", repository: str | None) -> "pd.DataFrame":
    """The table with the column `known_issue` last: of the row's `step`, "" where nothing is known."""
    steps = table["step"] if len(table) else ()
    return table.assign(known_issue=[mark_of(repository, int(step)) for step in steps])


def is_grave(mark: str) -> bool:
    """Whether a mark says that the weights are wrong or in doubt."""
    return mark.partition(":")[0] in _WARNED


def marks_of(*models: object) -> dict[str, str]:
    """Of those models that are checkpoints with a known issue: name -> mark, for a result's `.about`."""
    found: dict[str, str] = {}
    for model in models:
        series, step = getattr(model, "series", None), getattr(model, "step", None)
        if series is not None and step is not None and (mark := series.known_issue(step)):
            found[f"{series.name} at step {step}"] = mark
    return found


def marks_in(tables: "Iterable[tuple[str, pd.DataFrame]]") -> dict[str, str]:
    """Of tables with `step` and `known_issue`, by the name of their series: name and step -> mark."""
    found: dict[str, str] = {}
    for name, table in tables:
        if "known_issue" in table:
            marked = table.loc[table["known_issue"] != "", ["step", "known_issue"]].drop_duplicates()
            found |= {f"{name} at step {step}": mark for step, mark in marked.itertuples(index=False)}
    return found


def as_markdown() -> str:
    """The table as a page of the documentation."""
    parts = [
        "# Known issues of public checkpoints",
        "Faults that somebody found in published checkpoints and reported. `eh.known_issues()` gives the same table; "
        "`series.verify()` compares what the hub serves today. A repository that is not listed has not been proven "
        "sound.",
        "What the kinds mean:",
        "\n".join(f"- **{kind}**: {meaning}" for kind, meaning in MEANING.items()),
    ]
    for kind in MEANING:
        parts.append(f"## {kind.capitalize()}")
        for issue in (issue for issue in ISSUES if issue.kind == kind):
            parts.append(f"### {issue.scope}")
            parts.append(
                f"Steps: {issue.steps_text}. Results: {_RESULTS[kind]}. Report: [{issue.reference}]({issue.report})"
                + (f", {issue.reported}." if issue.reported else ".")
            )
            parts.append(issue.what)
    return "\n\n".join(parts) + "\n"


def _callers_level() -> int:
    """The stack level of the first frame outside the package, seen from who calls this."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "emergent_heads":
        level, frame = level + 1, frame.f_back
    return level


def _on_use(issue: KnownIssue) -> str:
    if issue.refused:
        return "warns, can be refused"
    if issue.warns:
        return "warns"
    return "marks results" if issue.kind in _MARKED and issue.steps else "none"


def _runs(steps: Collection[int]) -> Iterator[str]:
    if isinstance(steps, range) and steps.step == 1:
        yield f"all from {steps.start} to {steps.stop - 1}"
        return
    left = sorted(steps)
    while left:
        gap = left[1] - left[0] if len(left) > 1 else 0
        n = next((n for n in range(1, len(left)) if left[n] - left[n - 1] != gap), len(left))
        if n < 4:
            yield str(left.pop(0))
        else:
            yield f"{left[0]} to {left[n - 1]} by {gap}"
            left = left[n:]


_PYTHIA = "https://github.com/EleutherAI/pythia"
_OLMO = "https://github.com/allenai/OLMo"
_EARLY = (0, *(2**power for power in range(10)))
_SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")


def _pythia_repositories() -> Iterator[str]:
    """Every repository of Pythia v1 and PolyPythias."""
    for place, size in enumerate(_SIZES):
        yield f"EleutherAI/pythia-{size}"
        if place >= 2:
            yield f"EleutherAI/pythia-{size}-deduped"
        if place < 5:
            yield from (f"EleutherAI/pythia-{size}-seed{seed}" for seed in range(1, 10))
    for what in ("data", "weight"):
        yield from (f"EleutherAI/pythia-160m-{what}-seed{seed}" for seed in (1, 2, 3))


_FINAL_ERA = (
    *_EARLY,
    *range(1000, 66_000, 1000),
    *(70_000, 80_000, 90_000, 100_000, 103_000, 110_000, 120_000, 130_000, 140_000),
)
_WEIGHT_SEEDS = ("EleutherAI/pythia-160m-weight-seed1", "EleutherAI/pythia-160m-weight-seed2")
_NOT_AS_LEFT = ("EleutherAI/pythia-2.8b", *(f"EleutherAI/pythia-160m-weight-seed{seed}" for seed in (1, 2, 3)))

ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        ("EleutherAI/pythia-2.8b",),
        "EleutherAI/pythia-2.8b",
        _FINAL_ERA,
        "wrong weights",
        "86 of the 154 step branches serve weights from the end of training: 76 hold the file of `main`, and 10 "
        "(54000, 56000 to 59000, 61000 to 64000 and 143000) share a second file with the same embeddings. All but "
        "143000 are listed here. The other 68 branches, from 66000 on, each have a file of their own. Step 0 and the "
        "whole early schedule are among the wrong ones, so no emergence before step 66000 can be told in this run; an "
        "earlier report of the same is EleutherAI/pythia#195.",
        f"{_PYTHIA}/issues/205",
        "2026-08-14",
    ),
    KnownIssue(
        ("EleutherAI/pythia-12b",),
        "EleutherAI/pythia-12b",
        (50_000, 58_000),
        "wrong weights",
        "The first of three shards (input embedding and early layers) is that of the end of training, the other two "
        "are the step's own. A single checkpoint that jumps can pass for a point of emergence.",
        f"{_PYTHIA}/issues/206",
        "2026-08-14",
    ),
    KnownIssue(
        _WEIGHT_SEEDS,
        "EleutherAI/pythia-160m-weight-seed1 and -seed2",
        (0,),
        "wrong weights",
        "The later checkpoints do not continue from this one: at step 1 the weights are those of the data-seed runs, "
        "which start elsewhere, and one step of training cannot lead there. Not to be used as the start of the run. "
        "The report did not look at weight-seed3.",
        f"{_PYTHIA}/issues/203",
        "2026-07-21",
    ),
    KnownIssue(
        ("allenai/OLMo-2-1124-7B",),
        "allenai/OLMo-2-1124-7B",
        (101_000, 175_000, 300_000),
        "wrong weights",
        "Three branches of stage 1 hold byte-identical shards, so at most one of them is right, and nobody has said "
        "which. The report looked at about 25 branches; there may be more.",
        f"{_OLMO}/issues/915",
        "2026-08-17",
    ),
    KnownIssue(
        ("EleutherAI/pythia-2.8b",),
        "EleutherAI/pythia-2.8b, last step",
        (143_000,),
        "in doubt",
        "The last step and `main` should be the same and are different files, with equal embeddings; which of the two "
        "is the end of training is not said.",
        f"{_PYTHIA}/issues/205",
        "2026-08-14",
    ),
    KnownIssue(
        ("stanford-crfm/arwen-gpt2-medium-x21",),
        "stanford-crfm/arwen-gpt2-medium-x21",
        range(0, 4001),
        "in doubt",
        "From checkpoint 10 on this run looks and behaves as the other nine do around checkpoint 4000, and changes "
        "little until there: its early checkpoints may carry the wrong labels.",
        "https://github.com/stanford-crfm/mistral/issues/199",
        "2023-07-04",
    ),
    *(
        KnownIssue(
            (f"EleutherAI/pythia-410m-seed{seed}",),
            f"EleutherAI/pythia-410m-seed{seed}",
            (step,),
            "missing",
            "The branch is there and holds no weights.",
            f"{_PYTHIA}/issues/202",
            "2026-07-17",
        )
        for seed, step in ((9, 40_000), (6, 88_000), (2, 111_000))
    ),
    KnownIssue(
        ("allenai/OLMo-2-1124-13B",),
        "allenai/OLMo-2-1124-13B",
        range(0, 102_500),
        "missing",
        "Stage 1 has no branches before step 102500, though the list of checkpoints in the OLMo repository begins at "
        "step 0: what emerges early cannot be seen.",
        f"{_OLMO}/issues/842",
        "2025-05-27",
    ),
    KnownIssue(
        ("allenai/OLMo-1B", "allenai/OLMo-1B-hf"),
        "allenai/OLMo-1B",
        range(117_001, 330_000),
        "missing",
        "There are no checkpoints between about step 117000 and step 330000; the maintainers have no others.",
        f"{_OLMO}/issues/879",
        "2025-08-25",
    ),
    KnownIssue(
        ("allenai/OLMo-2-1124-13B",),
        "allenai/OLMo-2-1124-13B, stage 2",
        (),
        "missing",
        "Only the last branch of each ingredient of stage 2 was there; the maintainers began to upload the others in "
        "April 2025.",
        f"{_OLMO}/issues/816",
        "2025-03-26",
    ),
    KnownIssue(
        tuple(name for name in _pythia_repositories() if name not in _NOT_AS_LEFT),
        "Pythia v1 and PolyPythias (all but pythia-2.8b and pythia-160m-weight-seed1 to 3)",
        (0, 1, 2),
        "harmless",
        "The same weights. The learning rate of the first step is 0 (EleutherAI/gpt-neox#1373), so steps 0 and 1 are "
        "one model. Step 2 on the hub is reported equal too (EleutherAI/pythia#198), although the published scores of "
        "steps 1 and 2 differ in all 16 models that have them.",
        f"{_PYTHIA}/issues/83",
        "2023-04-05",
    ),
    KnownIssue(
        tuple(
            f"EleutherAI/pythia-{size}{deduped}-v0"
            for size in ("160m", "410m", "1.4b")
            for deduped in ("", "-deduped")
        ),
        "EleutherAI/pythia-{160m, 410m, 1.4b}-v0 and -deduped-v0",
        tuple(range(1000, 143_001, 1000)),
        "relabelled",
        "Trained with batches of 4M tokens for 71500 steps, and named as if with 2M: the branch step1000 is step 500, "
        "at as many tokens as step 1000 of the other models.",
        f"{_PYTHIA}#quickstart",
        "2023-04-03",
    ),
    KnownIssue(
        ("EleutherAI/pythia-12b-deduped",),
        "EleutherAI/pythia-12b-deduped",
        (32_000,),
        "mended",
        "Did as well as the last checkpoints; uploaded again in June 2023, and plausible since.",
        f"{_PYTHIA}/issues/108",
        "2023-06-06",
    ),
    KnownIssue(
        ("EleutherAI/pythia-160m",),
        "EleutherAI/pythia-160m",
        (143_000,),
        "published scores",
        "LAMBADA accuracy is 0.328 in the published evaluation and 0.121 by a reader's own run of the evaluation "
        "harness, while the two agree at step 13000: don't join the two sources in one curve.",
        f"{_PYTHIA}/issues/118",
        "2023-09-21",
    ),
    KnownIssue(
        ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-2.8b-deduped"),
        "EleutherAI/pythia-2.8b and -deduped",
        (*_EARLY[2:], 1000, 3000, 13_000, 23_000, 33_000),
        "published scores",
        "Of the eight published zero-shot accuracies the two models share all at every step up to 1000 (the other "
        "sizes at steps 0 and 1 at most), and four to seven at steps 3000 to 33000: one model's scores may stand "
        "under both names. Seen by comparing the tables; nobody has said why.",
        f"{_PYTHIA}/tree/main/evals/pythia-v1",
        "",
    ),
)
"""All known issues, the gravest kind first."""

_ISSUES_OF: dict[str, tuple[KnownIssue, ...]] = {
    name: tuple(issue for issue in ISSUES if name in issue.repositories)
    for name in dict.fromkeys(name for issue in ISSUES for name in issue.repositories)
}

if __name__ == "__main__":
    sys.stdout.write(as_markdown())
