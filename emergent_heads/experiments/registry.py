"""The findings that can be reproduced, by name. Importing this brings no torch: the work is in each one's home.

The claims are those of "Emergent Capabilities Arise Randomly from Learning Sparse Attention Patterns"
(arXiv 2606.25010).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

from emergent_heads.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from emergent_heads.experiments.study import Study

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")


@dataclass(frozen=True)
class Experiment:
    """One finding.

    Attributes:
        name: on the command line.
        title: the finding in a few words.
        claim: what the paper says, in one sentence.
        rule: what makes the claim hold or not, fixed before the runs.
        home: module and name of the `Study` that does the work.
        notes: how scale "small" differs from what the paper did, and what else was tried.
    """

    name: str
    title: str
    claim: str
    rule: str
    home: str
    notes: str = ""

    def study(self) -> "Study":
        """The runs, the judgement and the figure; imports torch."""
        module, name = self.home.split(":")
        return cast("Study", getattr(import_module(f"emergent_heads.experiments.{module}"), name))


_SLOWER = (
    "Slower means: the ratio of steps to solve (restricted means, seeds in pairs) is above 1 with its whole 95 % "
    "bootstrap interval; not slower: the interval is below 1.25."
)

_ALL = (
    Experiment(
        "bits-one-at-a-time",
        "Bits are learned one at a time",
        "On the linear map, output bits are learned one at a time and abruptly, each when the entropy of some head's "
        "attention drops.",
        "Holds if (a) the median bit rises from 10 % to 90 % of its way in less than half of the steps from the first "
        "learned bit to the last, and (b) around the step where a bit is learned, the entropy of some head at that "
        "bit's query falls further than in windows of the same length at other times of the run. Each with "
        "the whole 95 % bootstrap interval over seeds. Bits with the same row as an earlier bit can be copied from it "
        "and are left out.",
        "one_bit_at_a_time:BITS",
    ),
    Experiment(
        "attention-bias",
        "Attention bias removes the plateau",
        "Adding the right pattern to the attention scores removes the plateau, on the linear map and on cellular "
        "automata.",
        "Holds for a task if without the bias the plateau is at least twice as long as with it (ratio of steps to "
        "leave the plateau, whole 95 % interval above 2) and the task is solved later (ratio above 1).",
        "attention_bias:ATTENTION_BIAS",
    ),
    Experiment(
        "context-length",
        "Longer context is harder",
        "The longer the context, the more steps both tasks take.",
        "Holds if the slope of log steps to solve against log state size, seed by seed, has a 95 % interval above 0 "
        "on both tasks. Runs that never solve it count with their last step, so a slope is a lower bound. The slope "
        "of the steps to leave the plateau stands beside it: on the linear map that is the first bit only, which is "
        "easy where two rows of the matrix are alike.",
        "context_length:CONTEXT_LENGTH",
    ),
    Experiment(
        "sparsity",
        "Medium sparsity is the hardest",
        "On the linear map medium sparsity is harder than low and high sparsity, and with s = S models only copy the "
        "parity that all output bits share.",
        "Holds if (a) at s = S / 2 fewer bits are learned by the end than at s = 2 and than at s = S - 1 (differences "
        "of shares, whole 95 % interval above 0), and (b) at s = S most runs end with all bits but the first, whose "
        "accuracy is at chance.",
        "sparsity:SPARSITY",
    ),
    Experiment(
        "heads",
        "More heads help",
        "More heads make both tasks easier, at fixed width and at fixed head size.",
        "Holds if the fewest heads are slower than the most, on both tasks and both ways. " + _SLOWER,
        "heads:HEADS",
    ),
    Experiment(
        "head-dimension",
        "Head dimension helps, less and less",
        "A larger head dimension helps with diminishing returns, and cellular automata need a minimum.",
        "Holds if, on the linear map, the smallest heads are slower than the largest and the first half of the "
        "doublings saves more (in log steps) than the second, and if on cellular automata the smallest heads are at "
        "least twice as slow as the largest. " + _SLOWER,
        "heads:HEAD_DIMENSION",
    ),
    Experiment(
        "depth",
        "Depth hurts the linear map and helps automata",
        "More layers make the linear map harder and cellular automata of many rules easier.",
        "Holds if the deepest model is slower than one layer on the linear map, and one layer slower than the deepest "
        "model on automata. " + _SLOWER,
        "depth:DEPTH",
    ),
    Experiment(
        "mixer-linear-map",
        "MLP-Mixer beats the transformer on the linear map",
        "A causal MLP-Mixer solves the linear map in fewer steps than a transformer.",
        "Holds if the transformer is slower at every state size tried. " + _SLOWER,
        "mixers:MIXER_LINEAR_MAP",
    ),
    Experiment(
        "mixer-automata",
        "MLP-Mixer does worse on cellular automata",
        "A causal MLP-Mixer does worse than a transformer on cellular automata.",
        "Holds if the Mixer is slower at every state size tried. " + _SLOWER,
        "mixers:MIXER_AUTOMATA",
    ),
    Experiment(
        "mixers",
        "Other mixers against the transformer",
        "Recurrent and linear-attention mixers mostly do worse than the transformer, on both tasks.",
        "One comparison per mixer and task. Holds if the mixer is slower in more than half of them, does not hold if "
        "it is not slower in more than half. " + _SLOWER,
        "mixers:OTHER_MIXERS",
    ),
    Experiment(
        "seeds",
        "Which seeds solve, and when, is random",
        "With everything but the seed fixed, when a model solves the task differs widely between seeds.",
        "Holds if the steps to solve of at least ten seeds vary by a factor (exponential of the standard deviation of "
        "log steps) above 1.1 on both tasks, with the whole 95 % bootstrap interval; does not hold if an interval is "
        "wholly below 1.1.",
        "seeds:SEEDS",
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = {each.name: each for each in _ALL}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ArgumentError: there is none; the message gives the nearest names.
    """
    if name not in EXPERIMENTS:
        raise ArgumentError(f"no experiment {name!r}; {nearest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
