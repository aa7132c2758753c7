"""The engine that edits the residual stream: the numbers of one full forward pass with hooks per run, with less work.

* Layers below the lowest edit are run once: runs start from the kept residual stream.
* Positions before the first edited one are run once: a small model with attention keeps their keys and values, and
  runs compute later positions only, in the last block only from the first position that is read.
* Many runs go together as one batch, and only the positions that are read are unembedded.

The shortcuts are tried once per model against plain passes with hooks, and are not used where they do not reproduce
them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.errors import ArgumentError
from emergent_heads.models.engine import in_batches
from emergent_heads.models.hooked import EMBEDDING, Answers, HookedModel, KeysAndValues, read_answers
from emergent_heads.models.hooks import StandIns, editing_input, editing_output, keep_in, without_running
from emergent_heads.randomness import torch_generator

Shortcut = Literal["positions", "layers", "none"]
"""What is not run again: positions and layers before the first edit, layers only, or nothing."""

# Numbers in the widest activation of a batch: on a CPU such that it stays in the cache, and matrices keep their speed.
_CPU_ELEMENTS = 2**20
_CPU_LEAST_POSITIONS = 1024
_GPU_ELEMENTS = 2**25

_Given = TypeVar("_Given")


@dataclass(frozen=True, eq=False)
class Reads:
    """Which predictions are read.

    Attributes:
        positions: `[row, read]`, where the model predicts; -1 for none.
        targets: `[row, read]`, the token that comes next there.
    """

    positions: Int[Tensor, "row read"]
    targets: Int[Tensor, "row read"]

    @cached_property
    def first(self) -> int:
        """The first position that any row reads."""
        there = self.positions[self.positions >= 0]
        return int(there.min()) if len(there) else 0

    def nothing(self) -> "Reads":
        """No reads, of the same rows."""
        return Reads(self.positions[:, :0], self.targets[:, :0])


@dataclass(frozen=True, eq=False)
class Edit:
    """A linear change of the residual stream after one layer, for several runs: x -> x - write (read^T x - target).

    Attributes:
        layer: after this block; -1 for what enters the first one.
        positions: `[row, place]`, all different in a row; -1 for no edit.
        read, write: `[run, place, d_model, rank]`; zero columns where a place has a lower rank.
        target: `[run, row, place, rank]`, what read^T x becomes where read^T write is the identity; one row for all.
    """

    layer: int
    positions: Int[Tensor, "row place"]
    read: Float[Tensor, "run place d_model rank"]
    write: Float[Tensor, "run place d_model rank"]
    target: Float[Tensor, "run row place rank"]

    @cached_property
    def start(self) -> int | None:
        """The first position that is edited in any row; None for none."""
        there = self.positions[self.positions >= 0]
        return int(there.min()) if len(there) else None

    @cached_property
    def same_in_all_rows(self) -> bool:
        """Whether all rows are edited at the same positions."""
        return bool((self.positions == self.positions[:1]).all()) and bool((self.positions >= 0).all())

    def runs(self, start: int, stop: int) -> "Edit":
        """The same edit, of some of its runs."""
        parts = (part[start:stop] for part in (self.read, self.write, self.target))
        return replace(self, **dict(zip(("read", "write", "target"), parts, strict=True)))

    def new_values(self, x: Float[Tensor, "run row place d_model"]) -> Float[Tensor, "run row place d_model"]:
        """What takes the place of the residual stream `x` at the edited positions; one run of it serves all."""
        if len(x) == 1:
            component = torch.einsum("rpd,npdk->nrpk", x[0], self.read)
        else:
            component = torch.einsum("nrpd,npdk->nrpk", x, self.read)
        return x - torch.einsum("nrpk,npdk->nrpd", component - self.target, self.write)

    def apply(self, resid: Float[Tensor, "run row pos d_model"], start: int) -> Float[Tensor, "run row place d_model"]:
        """Changes `resid`, whose first position is `start`, in place; gives the new values."""
        if self.same_in_all_rows and self.start is not None and self.start >= start:
            places = self.positions[0] - start
            new = self.new_values(resid[:, :, places])
            resid[:, :, places] = new
            return new
        at = self.positions - start
        rows = torch.arange(len(at), device=at.device)[:, None]
        new = self.new_values(resid[:, rows, at.clamp_min(0)])
        edited, place = (at >= 0).nonzero(as_tuple=True)
        resid[:, edited, at[edited, place]] = new[:, edited, place]
        return new


@dataclass(eq=False)
class _Room:
    """Keys and values of several runs; those from `written_from` on are of some run."""

    keys: Float[Tensor, "run_row pos head d_head"]
    values: Float[Tensor, "run_row pos head d_head"]
    written_from: int


@dataclass(frozen=True, eq=False)
class ResidualTrace:
    """One forward pass over some rows, kept so that edited runs can start from it.

    Attributes:
        tokens, reads: of the rows.
        answers: what is read with nothing edited, `[row, read]`.
        resid: the residual stream after each layer, -1 (what enters the first block) included.
        keys_and_values: by layer; empty where later positions cannot be run alone.
    """

    tokens: Int[Tensor, "row pos"]
    reads: Reads
    answers: Answers
    resid: dict[int, Float[Tensor, "row pos d_model"]]
    keys_and_values: dict[int, KeysAndValues]
    _rooms: dict[tuple[int, int], "_Room"] = field(default_factory=dict)

    def room(self, layer: int, n_runs: int, start: int) -> KeysAndValues:
        """Keys and values for so many runs, to be written from `start` on; before, they are those of this pass.

        Kept, because filling them anew for every batch would take longer than attention itself.
        """
        kept = self.keys_and_values[layer]
        room = self._rooms.get((layer, n_runs))
        if room is None:
            room = _Room(*(each.repeat(n_runs, 1, 1, 1) for each in kept), written_from=start)
            self._rooms[layer, n_runs] = room
        if start > room.written_from:
            part = slice(room.written_from, start)
            for each, old in zip((room.keys, room.values), kept, strict=True):
                each.unflatten(0, (n_runs, len(old)))[:, :, part] = old[:, part]
        room.written_from = start
        return room.keys, room.values

    def at(self, layer: int, positions: Int[Tensor, "row place"]) -> Float[Tensor, "row place d_model"]:
        """The residual stream after a layer at some positions; what stands for -1 means nothing."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return self.resid[layer][rows, positions.clamp_min(0)]


class ResidualEngine:
    """Edited runs of one model; `model.residual_engine` makes and keeps it.

    Making one runs the model on a few tokens, to see that edits do something and which shortcuts hold.

    Attributes:
        shortcut: the one in use.

    Raises:
        InterventionHasNoEffect: an edit of the residual stream after some layer does not change the output.
    """

    def __init__(self, model: HookedModel) -> None:
        model.check_residual_edits()
        self._model = model
        self._last = model.n_layers - 1
        self._stand_ins = StandIns()
        self._holds: dict[Shortcut, bool] = {"positions": model.continues, "layers": True, "none": True}
        self._try_out()

    @property
    def shortcut(self) -> Shortcut:
        if self._holds["positions"] and self._model.continues:
            return "positions"
        return "layers" if self._holds["layers"] else "none"

    def rows_per_trace(self, length: int) -> int:
        """How many rows of this length are best traced together."""
        return max(1, self._positions_per_batch() // length)

    def trace(self, tokens: Int[Tensor, "row pos"], reads: Reads, *, up_to: int | None = None) -> ResidualTrace:
        """One forward pass that keeps what edited runs start from.

        Args:
            tokens: of the rows.
            reads: what is to be read.
            up_to: blocks after this layer are not run, so that `edited` can be asked for up to it, and no answers.
        """
        model = self._model
        tokens, reads = tokens.to(model.device), _on(reads, model.device)
        resid: dict[int, Tensor] = {}
        keys_and_values: dict[int, KeysAndValues] = {}
        last = self._last if up_to is None else up_to
        with model.evaluating(), ExitStack() as stack:
            if self.shortcut == "positions":
                stack.enter_context(model.keeping_keys_and_values(keys_and_values))
            stack.enter_context(self._blocks_up_to(last))
            stack.enter_context(editing_input(model.blocks[0], keep_in(resid, EMBEDDING)))
            for layer in range(last + 1):
                stack.enter_context(editing_output(model.blocks[layer], keep_in(resid, layer)))
            answers = self._answers_of_a_pass(tokens, reads)
        return ResidualTrace(tokens, reads, answers, resid, keys_and_values)

    def answers(self, trace: ResidualTrace, edits: Sequence[Edit], *, batch_size: int | None = None) -> Answers:
        """What is read in each of the runs: `[run, row, read]`.

        Args:
            trace: pass of this model over the rows.
            edits: one per edited layer, all of the same runs.
            batch_size: largest number of sequences run together; halved by itself when memory runs out.
        """
        edits = self._checked(trace, edits)
        n_runs = len(edits[0].read)

        shortcut = self._shortcut_from(trace)

        def run(start: int, stop: int) -> Answers:
            return self._run(trace, [edit.runs(start, stop) for edit in edits], shortcut)

        parts = in_batches(run, n_runs, self._runs_per_batch(trace, edits, shortcut, batch_size))
        return Answers(*(torch.cat(of) for of in zip(*parts, strict=True)))

    def edited(self, trace: ResidualTrace, edits: Sequence[Edit]) -> list[Float[Tensor, "run row place d_model"]]:
        """The residual stream at the edited places as the runs have it right after each edit; -1 means nothing."""
        edits = self._checked(trace, edits)
        found: dict[int, Tensor] = {}
        if (shortcut := self._shortcut_from(trace)) == "positions":
            with self._model.evaluating():
                self._later_positions(trace, edits, found)
        else:
            unembedding = without_running(self._model.unembedding)
            with self._model.evaluating(), unembedding, self._blocks_up_to(edits[-1].layer):
                self._whole_sequences(trace, edits, shortcut, self._model.run, found)
        return [found[edit.layer] for edit in edits]

    # ---- runs ----

    def _shortcut_from(self, trace: ResidualTrace) -> Shortcut:
        if self.shortcut == "positions" and trace.keys_and_values:
            return "positions"
        return "layers" if self._holds["layers"] else "none"

    def _run(self, trace: ResidualTrace, edits: list[Edit], shortcut: Shortcut) -> Answers:
        n_runs = len(edits[0].read)
        if all(edit.start is None for edit in edits):
            return Answers(*(part.expand(n_runs, *part.shape) for part in trace.answers))
        with self._model.evaluating():
            if shortcut == "positions":
                return self._answers_of_later_positions(trace, edits)
            reads = Reads(trace.reads.positions.repeat(n_runs, 1), trace.reads.targets.repeat(n_runs, 1))
            answers = self._whole_sequences(
                trace, edits, shortcut, lambda tokens: self._answers_of_a_pass(tokens, reads)
            )
        return Answers(*(part.unflatten(0, (n_runs, -1)) for part in answers))

    def _answers_of_later_positions(self, trace: ResidualTrace, edits: list[Edit]) -> Answers:
        """Runs of the positions from the first edited one on; what is read before is what the plain pass gave."""
        reads = trace.reads
        resid, start = self._later_positions(trace, edits)
        rows = torch.arange(len(reads.positions), device=resid.device)[:, None]
        at = resid[:, rows, (reads.positions - start).clamp_min(0)]
        found = read_answers(
            self._model.unembedded(at.flatten(0, 2)).float(), reads.targets.repeat(len(resid), 1).flatten()
        )
        same = (reads.positions < start).cpu()  # -1, no read, too
        return Answers(
            *(
                torch.where(same, old, new.view(len(resid), *old.shape))
                for old, new in zip(trace.answers, found, strict=True)
            )
        )

    def _later_positions(
        self, trace: ResidualTrace, edits: list[Edit], found: dict[int, Tensor] | None = None
    ) -> tuple[Float[Tensor, "run row pos d_model"], int]:
        """The residual stream after the last block, and the position it starts at.

        Puts the new values of each edit into `found` where that is given, and stops after the last edit.
        """
        model, n_runs = self._model, len(edits[0].read)
        by_layer = {edit.layer: edit for edit in edits}
        n_positions = trace.tokens.shape[1]
        start = n_positions
        shape = (n_runs, len(trace.tokens), 0, model.d_model)
        resid = trace.resid[EMBEDDING].new_empty(shape)
        for layer in range(edits[0].layer, (edits[-1].layer if found is not None else self._last) + 1):
            if start < n_positions:
                first = max(start, trace.reads.first) if layer == self._last and found is None else start
                room = trace.room(layer, n_runs, start)
                resid = model.continued(layer, resid.flatten(0, 1), room, first - start).unflatten(0, shape[:2])
                start = first
            if (edit := by_layer.get(layer)) is None:
                continue
            earliest = n_positions if edit.start is None else edit.start
            if layer == self._last and found is None:
                earliest = max(earliest, trace.reads.first)
            if earliest < start:
                kept = trace.resid[layer][:, earliest:start].expand(n_runs, -1, -1, -1)
                resid = torch.cat([kept, resid], dim=2)
                start = earliest
            if start < n_positions:
                new = edit.apply(resid, start)
                if found is not None:
                    found[layer] = new
            elif found is not None:
                found[layer] = trace.at(layer, edit.positions).expand(n_runs, -1, -1, -1)
        return resid, start

    def _whole_sequences(
        self,
        trace: ResidualTrace,
        edits: list[Edit],
        shortcut: Shortcut,
        run: Callable[[Tensor], _Given],
        found: dict[int, Tensor] | None = None,
    ) -> _Given:
        """`run` of the rows, as often as there are runs, with the edits in place."""
        n_runs, n_rows = len(edits[0].read), len(trace.tokens)
        blocks, lowest = self._model.blocks, edits[0].layer

        def editing(edit: Edit) -> Callable[[Tensor], Tensor]:
            def changed(resid: Tensor) -> Tensor:
                resid = resid.unflatten(0, (n_runs, n_rows)).clone()
                new = edit.apply(resid, 0)
                if found is not None:
                    found[edit.layer] = new
                return resid.flatten(0, 1)

            return changed

        with ExitStack() as stack:
            if shortcut != "none" and lowest != EMBEDDING:
                kept = trace.resid[lowest].repeat(n_runs, 1, 1)
                stack.enter_context(self._stand_ins.passing_through(blocks[:lowest]))
                stack.enter_context(self._stand_ins.returning(blocks[lowest], kept))
            for edit in edits:
                if edit.layer == EMBEDDING:
                    stack.enter_context(editing_input(blocks[0], editing(edit)))
                else:
                    stack.enter_context(editing_output(blocks[edit.layer], editing(edit)))
            return run(trace.tokens.repeat(n_runs, 1))

    def _answers_of_a_pass(self, tokens: Int[Tensor, "row pos"], reads: Reads) -> Answers:
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        at = reads.positions.clamp_min(0)
        with editing_input(self._model.unembedding, lambda resid: resid[rows, at]):
            logits = self._model.run(tokens).float()
        answers = read_answers(logits.flatten(0, 1), reads.targets.flatten())
        return Answers(*(part.view(at.shape) for part in answers))

    @contextmanager
    def _blocks_up_to(self, layer: int) -> Iterator[None]:
        """Blocks after this layer pass their input through."""
        later = self._model.blocks[layer + 1 :] if self._holds["layers"] else []
        with self._stand_ins.passing_through(later):
            yield

    # ---- sizes, checks ----

    def _checked(self, trace: ResidualTrace, edits: Sequence[Edit]) -> list[Edit]:
        """The edits by ascending layer."""
        ordered = sorted(edits, key=lambda edit: edit.layer)
        layers = [edit.layer for edit in ordered]
        if not edits or len(set(layers)) < len(layers) or not EMBEDDING <= layers[0] <= layers[-1] <= self._last:
            raise ArgumentError(
                f"edits at layers {layers}: give at least one, one a layer, between -1 and {self._last}"
            )
        for edit in ordered:
            taken = edit.positions.sort(dim=1).values
            if bool(((taken[:, 1:] == taken[:, :-1]) & (taken[:, 1:] >= 0)).any()):
                raise ArgumentError(f"two edits of one position at layer {edit.layer}: give each position once a row")
            if edit.positions.numel() and int(edit.positions.max()) >= trace.tokens.shape[1]:
                raise ArgumentError(f"an edit beyond the {trace.tokens.shape[1]} tokens of the sequences")
        return ordered

    def _positions_per_batch(self) -> int:
        width = 4 * self._model.d_model
        if self._model.device.type == "cpu":
            return max(_CPU_LEAST_POSITIONS, _CPU_ELEMENTS // width)
        return _GPU_ELEMENTS // width

    def _runs_per_batch(
        self, trace: ResidualTrace, edits: Sequence[Edit], shortcut: Shortcut, batch_size: int | None
    ) -> int:
        """How many runs go together: so many sequences, or as many positions as are run at full speed."""
        n, length = trace.tokens.shape
        if batch_size is not None:
            if batch_size < 1:
                raise ArgumentError(f"batch_size={batch_size}: give a positive number of sequences")
            return max(1, batch_size // n)
        if shortcut == "positions":
            length -= min((edit.start for edit in edits if edit.start is not None), default=0)
        return max(1, self._positions_per_batch() // (n * length))

    def _try_out(self) -> None:
        """A few edits by plain passes with hooks, and by each shortcut."""
        model = self._model
        tokens = model.sample_tokens(2, 7)
        length = tokens.shape[1]
        reads = Reads(
            torch.tensor([[length - 1, 0], [length - 2, length - 1]], device=model.device),
            torch.zeros(2, 2, dtype=torch.long, device=model.device),
        )
        with model.evaluating(), without_running(model.unembedding), self._stand_ins.noting_outputs(model.blocks):
            model.run(tokens)
        trace = self.trace(tokens, reads)
        edits = [_random_edit(model, layer, length) for layer in sorted({0, model.n_layers // 2, self._last})]
        trials = [edits, *([edit] for edit in edits)]
        possible: list[Shortcut] = [each for each, holds in self._holds.items() if holds and each != "none"]
        for shortcut in possible:
            self._holds[shortcut] = False
        plain = [self.answers(trace, trial) for trial in trials]
        for shortcut in reversed(possible):
            self._holds[shortcut] = True  # so that it is in use
            self._holds[shortcut] = all(
                self._gives(answers, trace, trial) for answers, trial in zip(plain, trials, strict=True)
            )

    def _gives(self, plain: Answers, trace: ResidualTrace, edits: Sequence[Edit]) -> bool:
        """Whether the shortcut in use gives what the plain passes gave."""
        try:
            short = self.answers(trace, edits)
        except RuntimeError:  # shapes that do not go together: a block that does something of its own
            return False
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(self._model.dtype, 5e-2)
        return torch.allclose(short.log_p, plain.log_p, rtol=tolerance, atol=tolerance)


def _random_edit(model: HookedModel, layer: int, length: int) -> Edit:
    """Two runs that shift a random direction, at places of their own in each row."""
    generator = torch_generator(0, "random edit", layer)
    direction = torch.randn(2, 2, model.d_model, 1, generator=generator).to(model.device, model.dtype)
    direction = direction / direction.norm(dim=2, keepdim=True)
    target = torch.full((2, 1, 2, 1), 3.0, device=model.device, dtype=model.dtype)
    positions = torch.tensor([[length // 2, length - 1], [length - 2, -1]], device=model.device)
    return Edit(layer, positions, direction, direction, target)


def _on(reads: Reads, device: torch.device) -> Reads:
    return Reads(reads.positions.to(device), reads.targets.to(device))
