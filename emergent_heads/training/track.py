"""One run while it is trained."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from emergent_heads.models.small import SmallModel
from emergent_heads.tasks.task import SequenceBatch
from emergent_heads.training.evaluation import evaluate, is_solved
from emergent_heads.training.folder import History, ResumePoint, RunFolder, RunStatus
from emergent_heads.training.learner import Learner, Plan


@dataclass(eq=False)
class Track:
    """One run while it is trained.

    Attributes:
        plan, folder, seed: what it is.
        held_out: its held-out sequences.
        model: with the weights of the step that `history` is at, whenever the learner has written them back.
        moments: the optimizer's running means at that step.
        history: what was measured of it.
        status: "unfinished" until it ends.
        diverged_step: first step at which something was not finite.
    """

    plan: Plan
    folder: RunFolder
    seed: int
    held_out: SequenceBatch
    model: SmallModel
    moments: dict[str, Tensor]
    history: History
    status: RunStatus = "unfinished"
    diverged_step: int | None = None
    _clock: float = field(default_factory=time.perf_counter)

    @classmethod
    def start_or_resume(cls, plan: Plan, folder: RunFolder, seed: int) -> "Track":
        """The run in the folder, or a new one; the folder is locked."""
        n = plan.settings.held_out_size(plan.task)
        # Drawn on the CPU, so that a run on any device is measured by the same sequences.
        batch = plan.task.batch(n, seed=seed, split="held-out")
        held_out = SequenceBatch(
            batch.tokens.to(plan.device), batch.loss_mask.to(plan.device), batch.answer_mask.to(plan.device)
        )
        model = plan.new_model(seed)
        folder.clear_leftovers()
        point = folder.resume_point() if folder.status() == "unfinished" else None
        if point is None:
            carried = plan.initial.weights if plan.initial is not None else None
            folder.begin(plan.about(), plan.pattern, carried, plan.task.tokenizer)
            return cls(plan, folder, seed, held_out, model, {}, History())
        folder.check_tokenizer(plan.task.tokenizer)
        model.load_state_dict(point.weights)
        return cls(plan, folder, seed, held_out, model, point.moments, point.history)

    def learner(self) -> Learner:
        """What trains this run alone; it trains the track's own model and moments."""
        learner = Learner(self.plan, self.seed, self.model, self.moments, self.history.step)
        self.moments = learner.moments
        return learner

    @property
    def is_answer(self) -> np.ndarray:
        """`[pos]`, whether each token but the first is an answer in any held-out sequence."""
        return self.held_out.answer_mask[:, 1:].any(dim=0).cpu().numpy()

    def passed(self, step: int, losses: Sequence[float]) -> None:
        """Notes steps that were done, up to `step`, by their training losses."""
        now = time.perf_counter()
        self.history.seconds += now - self._clock
        self.history.step = step
        self.history.train_losses += losses
        self._clock = now

    def measure(self, *, keep: bool) -> dict[str, float]:
        """Evaluates the model at the present step, keeps it as a checkpoint if asked to, and ends a run that is over.

        Returns:
            The row of the metrics.
        """
        plan, history, settings = self.plan, self.history, self.plan.settings
        lost = history.first_lost_step()
        evaluation = evaluate(self.model, self.held_out, rows=plan.batch_size, dtype=settings.dtype)
        row = history.add(
            evaluation,
            tokens=history.step * plan.batch_size * plan.task.length,
            learning_rate=settings.learning_rate_at(max(0, history.step - 1)),
            attention_bias=settings.bias.strength_at(history.step) if settings.bias else 0.0,
        )
        if lost is not None or not evaluation.finite or not _is_finite(self.model):
            self.status, self.diverged_step = "diverged", lost or history.step
            return row
        if history.solved_step is None and is_solved(
            evaluation, plateau=plan.task.plateau, floor=plan.task.floor, solved_at=settings.solved_at
        ):
            history.solved_step = history.step
        if history.step == settings.steps:
            self.status = "finished"
        elif settings.stop_when_solved and history.solved_step is not None:
            self.status = "solved"
        if keep or self.status != "unfinished":
            self.folder.save_checkpoint(history.step, self.model.state_dict())
        return row

    def save(self) -> None:
        """Writes the point to go on from, or the end of the run."""
        if self.status == "unfinished":
            point = ResumePoint(self.model.state_dict(), self.moments, self.history)
            self.folder.save_resume_point(point, self.is_answer)
        else:
            about = {**self.plan.about(), "diverged_step": self.diverged_step}
            self.folder.finish(self.status, about, self.history, self.is_answer)


def _is_finite(model: SmallModel) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.parameters())
