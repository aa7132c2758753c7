"""Neural cellular automata: grids of coloured cells that evolve by random small networks, as data to train on first.

After "Training Language Models via Neural Cellular Automata" (Lee et al. 2026, arXiv 2603.10055) and its public code,
danihyunlee/nca-pre-pretraining and charliezchen/nca-pre-pretraining-jax. A sequence shows a grid at several times,
patch by patch, and the model has to find out by which of many rules it evolves.
"""

import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FEATURES = 16
"""Hidden features of a rule's network."""
FILTERS = 4
"""Filters of its convolution, which the hidden features are linear functions of."""
COMPLEXITY_GRIDS = 10
"""Grids of a trajectory that say how compressible a rule is."""
MOST_TOKENS = 2**20  # of the vocabulary
_DRAWN_AT_ONCE = 128  # random rules; part of the seeded stream
_CELLS_OF_FREQUENCIES = 2**22  # that are evolved for the plateau
_LEAST_SHARE = 0.02  # of random rules that are kept: below, a filter is refused


@dataclass(frozen=True, eq=False)
class RuleNetworks:
    """Networks that give each cell's next colour, in whole numbers.

    Next colour = the largest of `output` · relu(sum over the 3 x 3 cells around of `hidden` at their colours), the
    lowest colour where two are equal. Whole numbers make every sum exact, so a rule does the same on every device.

    Attributes:
        hidden: `[rule, neighbour, colour, feature]`, neighbours in reading order, the cell itself the fifth.
        output: `[rule, colour, feature]`.
    """

    hidden: "Int[np.ndarray, 'rule neighbour colour feature']"
    output: "Int[np.ndarray, 'rule colour feature']"

    def __len__(self) -> int:
        return len(self.hidden)

    @classmethod
    def random(cls, n: int, colours: int, generator: np.random.Generator) -> "RuleNetworks":
        """Networks as Flax draws them by default, which Lee et al. take.

        A 3 x 3 convolution to `FILTERS`, a linear map to `FEATURES`, relu, a linear map to the colours; weights are
        truncated normal with variance 1 / inputs and there are no biases. They are rounded to whole multiples of
        2**-10, 2**-8 and 2**-10, which leaves each sum of the first two maps below 2**24: exact in single precision.
        """
        shapes = ((n, 9, colours, FILTERS), (n, FILTERS, FEATURES), (n, colours, FEATURES))
        inputs = (9 * colours, FILTERS, FEATURES)
        scales = (2**10, 2**8, 2**10)
        convolution, mixing, output = (
            np.rint(_truncated_normal(generator, shape) * (scale / fan_in**0.5)).astype(np.int64)
            for shape, fan_in, scale in zip(shapes, inputs, scales, strict=True)
        )
        return cls(convolution @ mixing[:, None], output)

    def __getitem__(self, rules: "np.ndarray | slice") -> "RuleNetworks":
        return RuleNetworks(self.hidden[rules], self.output[rules])


@dataclass(frozen=True)
class NeuralCellularAutomata(SequenceTask):
    """Grids of cells in several colours, each grid computed from the one before by one of `rules` random networks.

    A network looks at the 3 x 3 cells around a cell (the grid wraps around) and gives the cell's next colour. A grid
    is written as a start token, its square patches row by row and an end token; the colours of a patch are the digits
    of a token to the base `colours`, the first cell's counting least. Patch tokens come first in the vocabulary, then
    start and end.

    Random rules that soon come to rest are too easy and others look like noise, so rules are kept by how far their
    trajectory compresses: gzip's size of the patch tokens of `COMPLEXITY_GRIDS` grids, over their own size, must lie
    in `complexity`. That is done once, when the task first needs its rules. Each sequence takes one of them at random
    and a fresh first grid: cells drawn independently, with frequencies of the colours drawn for each sequence, then
    evolved `burn_in` times unseen.

    The loss counts every token but the first; the answers are the patches of all grids but the first, which follow
    from the rule. Two differences from Lee et al.: theirs samples the colours at a temperature of 1e-4, which is the
    largest score but for near ties, and leaves the first grid and the start and end tokens out of the loss. Their
    16,000 rules take about a millisecond each to draw.

    Attributes:
        grid: cells along an edge of the grid.
        colours: states of a cell.
        patch: cells along an edge of a patch; divides the grid.
        length: tokens of a sequence, which is cut in the middle of a grid if need be.
        rules: number of rules.
        burn_in: steps before the first grid that is shown.
        complexity: least and greatest compressed size of a rule's trajectory, as a share of its own size.
        token_bytes: bytes a token takes before compression: 4 as in Lee et al., where even noise of 10,000 tokens
            compresses to 0.66. For 256 tokens or fewer take 1; nothing reaches 0.5 with 4.
        seed: of the draw of the rules, not of the sequences.

    Raises:
        ArgumentError: a number outside its range, a patch that does not divide the grid, more than 2**20 tokens or
            more than the bytes hold, or bounds of the complexity that are no range. Also, when the rules are needed,
            bounds that hardly any random rule lies in.
    """

    grid: int = 12
    colours: int = 10
    patch: int = 2
    length: int = 1024
    rules: int = 1024
    burn_in: int = 10
    complexity: Sequence[float] = (0.5, 1.0)
    token_bytes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {"grid": 3, "colours": 2, "patch": 1, "length": 2, "rules": 1, "burn_in": 0, "seed": 0}
        for name, least in (numbers | {"token_bytes": 1}).items():
            self._set(name, whole_number(name, getattr(self, name), least=least))
        if self.grid % self.patch:
            raise ArgumentError(
                f"patches of {self.patch} x {self.patch} cells do not tile a grid of {self.grid} x {self.grid}; "
                "choose a patch that divides the grid"
            )
        if self.vocabulary_size > MOST_TOKENS:
            raise ArgumentError(
                f"{self.colours} colours in patches of {self.patch} x {self.patch} cells make {self.vocabulary_size} "
                f"tokens, more than {MOST_TOKENS}; choose fewer colours or smaller patches"
            )
        if self.token_bytes not in (1, 2, 4) or self.start > 256**self.token_bytes:
            raise ArgumentError(
                f"token_bytes is {self.token_bytes}; it must be 1, 2 or 4 and hold all {self.start} patch tokens"
            )
        bounds = tuple(float(bound) for bound in self.complexity)
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]:
            raise ArgumentError(f"complexity is {self.complexity!r}; give two numbers from 0, the smaller first")
        self._set("complexity", bounds)

    @property
    def patches(self) -> int:
        """Patches of a grid."""
        return (self.grid // self.patch) ** 2

    @property
    def start(self) -> int:
        """Token before a grid; also the number of patch tokens. The token after a grid is the next one."""
        return self.colours ** (self.patch**2)

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids: all patches, start and end."""
        return self.start + 2

    @property
    def grids(self) -> int:
        """Grids of a sequence, the last one perhaps in part."""
        return -(-self.length // (self.patches + 2))

    @cached_property
    def networks(self) -> RuleNetworks:
        """The rules that passed the filter. Drawn once; the same for all sequences.

        Raises:
            ArgumentError: hardly any random rule has a trajectory in `complexity`.
        """
        kept: list[RuleNetworks] = []
        seen: list[np.ndarray] = []
        passed = 0
        while passed < self.rules:
            generator = numpy_generator(self.seed, "neural cellular automata", len(seen))
            drawn = RuleNetworks.random(_DRAWN_AT_ONCE, self.colours, generator)
            advance = self._advance(*self._tensors(drawn, "cpu"))
            grids = self._trajectories(self._first_cells(len(drawn), generator), advance, COMPLEXITY_GRIDS)
            seen.append(self.compressed_share(grids))
            good = (seen[-1] >= self.complexity[0]) & (seen[-1] <= self.complexity[1])
            kept.append(drawn[good])
            passed += int(good.sum())
            if len(seen) >= 8 and passed < _LEAST_SHARE * len(seen) * _DRAWN_AT_ONCE:
                self._refuse_bounds(np.concatenate(seen), passed)
        hidden, output = (np.concatenate([getattr(part, name) for part in kept]) for name in ("hidden", "output"))
        return RuleNetworks(hidden, output)[: self.rules]

    def _refuse_bounds(self, shares: "Float[np.ndarray, ' rule']", passed: int) -> None:
        low, middle, high = np.quantile(shares, [0.1, 0.5, 0.9])
        raise ArgumentError(
            f"only {passed} of {len(shares)} random rules compress to a share in complexity = {self.complexity}; they "
            f"compress to {low:.2f}, {middle:.2f} and {high:.2f} (a tenth, half and nine tenths of them to less). "
            "Choose other bounds, or fewer token_bytes"
        )

    def compressed_share(self, grids: "Int[Tensor, 'row time y x']") -> "Float[np.ndarray, ' row']":
        """How far a trajectory compresses: gzip's size of its patch tokens over their own; near 0 at rest."""
        tokens = self._patch_tokens(grids).flatten(1).numpy().astype(f"<u{self.token_bytes}")
        return np.array([len(gzip.compress(row.tobytes(), 9, mtime=0)) / row.nbytes for row in tokens])

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` fresh sequences, evolved on `device` and the same on every device.

        The first call draws and filters the rules.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own: "train", "held-out".
            device: where the batch is made.

        Raises:
            ArgumentError: fewer than 1 sequence, or a filter that hardly any rule passes.
        """
        import torch

        whole_number("n", n, least=1)
        generator = numpy_generator(seed, self.name, split, step)
        rule = torch.from_numpy(generator.integers(self.rules, size=n))
        grids = self._evolved(self._first_cells(n, generator), rule, torch.device(device))
        position = torch.arange(self.length, device=device)
        place = position % (self.patches + 2)
        is_patch = (place > 0) & (place <= self.patches)
        return SequenceBatch(
            tokens=self.encode(grids)[:, : self.length].contiguous(),
            loss_mask=(position >= 1).expand(n, -1),
            answer_mask=(is_patch & (position >= self.patches + 2)).expand(n, -1),
        )

    def next_grids(self, grids: "Int[Tensor, 'row y x']", rule: "Int[Tensor, ' row']") -> "Int[Tensor, 'row y x']":
        """Each grid one step on, by the rule of this number."""
        hidden, output = self._networks_on(grids.device)
        advance = self._advance(hidden[rule.to(grids.device)], output[rule.to(grids.device)])
        return advance(grids.flatten(1)).view_as(grids)

    def encode(self, grids: "Int[Tensor, 'row time y x']") -> "Int[Tensor, 'row pos']":
        """Grids as tokens: start, patches, end of each."""
        import torch

        patches = self._patch_tokens(grids)
        ends = [torch.full_like(patches[..., :1], token) for token in (self.start, self.start + 1)]
        return torch.cat([ends[0], patches, ends[1]], dim=-1).flatten(1)

    def decode(self, tokens: "Int[Tensor, 'row pos']") -> "Int[Tensor, 'row time y x']":
        """The whole grids of sequences; a last one in part is left out."""
        import torch

        whole = tokens.shape[1] // (self.patches + 2)
        patches = tokens[:, : whole * (self.patches + 2)].view(len(tokens), whole, self.patches + 2)[..., 1:-1]
        digits = patches[..., None] // torch.from_numpy(self._place_values).to(tokens.device) % self.colours
        edge = self.grid // self.patch
        cells = digits.view(len(tokens), whole, edge, edge, self.patch, self.patch).transpose(3, 4)
        return cells.reshape(len(tokens), whole, self.grid, self.grid)

    def is_valid(self, tokens: "Int[Tensor, 'row pos']") -> "Bool[np.ndarray, ' row']":
        """Which rows are grids as they should be written, each following from the one before by one and the same rule.

        Whether the first grid can come about is not asked.
        """
        import torch

        tokens = tokens.cpu()
        place = torch.arange(tokens.shape[1]) % (self.patches + 2)
        delimiters = torch.where(place == 0, self.start, self.start + 1)
        is_patch = (place > 0) & (place <= self.patches)
        well_formed = torch.where(is_patch, (tokens >= 0) & (tokens < self.start), tokens == delimiters).all(dim=1)
        return np.array([bool(good) and self._has_rule(row) for good, row in zip(well_formed, tokens, strict=True)])

    def _has_rule(self, tokens: "Int[Tensor, ' pos']") -> bool:
        """Whether some rule makes these grids."""
        import torch

        span = self.patches + 2
        rule = torch.arange(self.rules)
        for time, grid in enumerate(self.decode(tokens[None])[0], start=1):
            shown = tokens[time * span : (time + 1) * span]
            following = self.encode(self.next_grids(grid.expand(len(rule), -1, -1), rule)[:, None])
            rule = rule[(following[:, : len(shown)] == shown).all(dim=1)]
        return len(rule) > 0

    @cached_property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Loss of a model that knows where patches stand and how often each occurs, in nats.

        The entropy of the patches' frequencies, estimated from sequences of all rules in turn (a fixed stream, with
        Miller and Madow's correction for rare patches that were not seen).
        """
        import torch

        steps = self.burn_in + self.grids
        n = int(np.clip(_CELLS_OF_FREQUENCIES // (steps * self.grid**2), 1024, 8192))
        generator = numpy_generator(self.seed, "frequencies of patches")
        grids = self._evolved(self._first_cells(n, generator), torch.arange(n) % self.rules, torch.device("cpu"))
        tokens = self.encode(grids)[:, 1 : self.length].numpy()
        counts = np.unique(tokens[tokens < self.start], return_counts=True)[1]
        patches = counts.sum()
        entropy = -(counts / patches * np.log(counts / patches)).sum() + (len(counts) - 1) / (2 * patches)
        return float(entropy * patches / tokens.size)

    @cached_property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A bound, in nats, that no model's loss lies below; none need reach it.

        Without burn-in, the first grid's cells are independent draws that nobody can predict better than by their
        frequencies (simulated, to about 0.2 %). What is left of that chance after a burn-in is not known, and the
        bound is 0. Finding out the rule costs a model more, which is not counted.
        """
        if self.burn_in:
            return 0.0
        frequencies = _frequencies(numpy_generator(self.seed, "frequencies of colours"), 100_000, self.colours)
        cells = min(self.patches, self.length - 1) * self.patch**2
        return cells * float(-(frequencies * np.log(frequencies)).sum(axis=1).mean()) / (self.length - 1)

    def _first_cells(self, n: int, generator: np.random.Generator) -> "Int[Tensor, 'row cell']":
        """Cells drawn independently, with frequencies of the colours of each row's own."""
        import torch

        bounds = _frequencies(generator, n, self.colours).cumsum(axis=1)[:, None, :-1]
        return torch.from_numpy((generator.random((n, self.grid**2, 1)) > bounds).sum(axis=-1))

    def _evolved(
        self, cells: "Int[Tensor, 'row cell']", rule: "Int[Tensor, ' row']", device: "torch.device"
    ) -> "Int[Tensor, 'row time y x']":
        """The grids of a sequence from its very first one, by the rule of this number."""
        import torch

        place = torch.device("cpu") if device.type == "mps" else device  # Apple's GPUs have no double precision
        hidden, output = (part[rule.to(place)] for part in self._networks_on(place))
        return self._trajectories(cells.to(place), self._advance(hidden, output), self.grids).to(device)

    def _trajectories(
        self, cells: "Int[Tensor, 'row cell']", advance: "Callable[[Tensor], Tensor]", grids: int
    ) -> "Int[Tensor, 'row time y x']":
        """So many grids after the burn-in."""
        import torch

        for _ in range(self.burn_in):
            cells = advance(cells)
        shown = [cells]
        for _ in range(grids - 1):
            shown.append(advance(shown[-1]))
        return torch.stack(shown, dim=1).view(len(cells), grids, self.grid, self.grid)

    def _advance(
        self, hidden: "Float[Tensor, 'row entry feature']", output: "Float[Tensor, 'row colour feature']"
    ) -> "Callable[[Tensor], Tensor]":
        """The step from `[row, cell]` to the next, each row by its own network."""
        import torch

        device, n, cells = hidden.device, len(hidden), self.grid**2
        row = torch.arange(n, device=device)[:, None]
        places = (row * cells + torch.from_numpy(self._neighbours.ravel()).to(device)).flatten()
        entry = torch.arange(9, device=device).repeat(cells) * self.colours  # where a neighbour's colours begin
        entries = (row * hidden.shape[1] + entry).flatten()
        bags = torch.arange(0, len(places), 9, device=device)
        table = hidden.flatten(0, 1)
        # A score is a whole number times the number of colours, so less the colour it tells which colour it is of, and
        # the lowest wins where two are equal. That is faster than asking for the place of the largest.
        less = -torch.arange(self.colours, device=device, dtype=torch.float64)[None, :, None]

        def advance(grids: "Int[Tensor, 'row cell']") -> "Int[Tensor, 'row cell']":
            seen = grids.flatten().index_select(0, places).add_(entries)
            features = torch.nn.functional.embedding_bag(seen, table, bags, mode="sum").relu_().double()
            scores = torch.baddbmm(less, output, features.view(n, cells, FEATURES).transpose(1, 2))
            return scores.amax(dim=1).long().neg_().remainder_(self.colours)

        return advance

    def _tensors(self, networks: RuleNetworks, device: "torch.device | str") -> "tuple[Tensor, Tensor]":
        """Networks in floating point, which holds their whole numbers exactly; see `_advance`."""
        import torch

        hidden = torch.from_numpy(networks.hidden).flatten(1, 2)
        output = torch.from_numpy(networks.output * self.colours)
        return hidden.to(device, torch.float32), output.to(device, torch.float64)

    def _networks_on(self, device: "torch.device") -> "tuple[Tensor, Tensor]":
        if device not in self._networks_by_device:
            self._networks_by_device[device] = self._tensors(self.networks, device)
        return self._networks_by_device[device]

    @cached_property
    def _networks_by_device(self) -> "dict[torch.device, tuple[Tensor, Tensor]]":
        return {}

    @cached_property
    def _neighbours(self) -> "Int[np.ndarray, 'cell neighbour']":
        """The 3 x 3 cells around each cell in reading order, across the edges of the grid."""
        cells = np.arange(self.grid**2).reshape(self.grid, self.grid)
        shifts = [(-y, -x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        return np.stack([np.roll(cells, shift, axis=(0, 1)).ravel() for shift in shifts], axis=1)

    @cached_property
    def _place_values(self) -> "Int[np.ndarray, ' cell']":
        """What each cell of a patch, row by row, counts in the patch's token."""
        return self.colours ** np.arange(self.patch**2)

    def _patch_tokens(self, grids: "Int[Tensor, 'row time y x']") -> "Int[Tensor, 'row time patch']":
        import torch

        edge = self.grid // self.patch
        cells = grids.reshape(*grids.shape[:2], edge, self.patch, edge, self.patch).transpose(3, 4)
        values = torch.from_numpy(self._place_values).to(grids.device)
        return (cells.reshape(*grids.shape[:2], self.patches, self.patch**2) * values).sum(dim=-1)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass in its own __post_init__

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: what was computed from them need not travel to another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _frequencies(generator: np.random.Generator, n: int, colours: int) -> "Float[np.ndarray, 'row colour']":
    """Softmax of standard normal numbers."""
    weights = np.exp(generator.standard_normal((n, colours)))
    return weights / weights.sum(axis=1, keepdims=True)


def _truncated_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> "Float[np.ndarray, '...']":
    """Normal numbers between -2 and 2, scaled to unit variance."""
    from scipy.special import ndtri

    tail = 0.5 * math.erfc(2**0.5)  # of a normal number below -2
    inside = ndtri(tail + (1 - 2 * tail) * generator.random(shape))
    variance = 1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / (1 - 2 * tail)
    return inside / math.sqrt(variance)
