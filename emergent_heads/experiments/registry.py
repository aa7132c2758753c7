"""The findings that can be reproduced, by name. Importing this brings no torch: the work is in each one's home.

The claims are those of "Emergent Capabilities Arise Randomly from Learning Sparse Attention Patterns"
(arXiv 2606.25010) and of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

from emergent_heads.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from emergent_heads.experiments.study import Study

Scale = Literal["small", "paper"]
Paper = Literal["sparse attention", "quiet features", "pre-pretraining"]
SCALES: tuple[Scale, ...] = ("small", "paper")


@dataclass(frozen=True)
class Experiment:
    """One finding.

    Attributes:
        name: on the command line.
        title: the finding in a few words.
        claim: what the paper says, in one sentence.
        rule: what makes the claim hold or not.
        home: module and name of the `Study` that does the work.
        notes: how scale "small" differs from what the paper did, and what else was tried.
        paper: whose claim it is.
    """

    name: str
    title: str
    claim: str
    rule: str
    home: str
    notes: str = ""
    paper: Paper = "sparse attention"

    def study(self) -> "Study":
        """The runs, the judgement and the figure; imports torch."""
        module, name = self.home.split(":")
        return cast("Study", getattr(import_module(f"emergent_heads.experiments.{module}"), name))


_SLOWER = (
    "Slower means: the ratio of steps to solve (restricted means, seeds in pairs) is above 1 with its whole 95 % "
    "bootstrap interval; not slower: the interval is below 1.25."
)

_SPARSE_ATTENTION = (
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
        "S = 12, 3,000 steps and no early stop, where the paper has S = 16. At S = 8, tried first, the bits come so "
        "close together that part (a) was not settled (0.34, 0.14 to 0.68); part (b) held there, too. Not all bits "
        "are learned by the last step, and after a bit is learned the same head may turn to another place.",
    ),
    Experiment(
        "attention-bias",
        "Attention bias removes the plateau",
        "Adding the right pattern to the attention scores removes the plateau, on the linear map and on cellular "
        "automata.",
        "Holds for a task if without the bias the plateau is at least twice as long as with it (ratio of steps to "
        "leave the plateau, whole 95 % interval above 2) and the task is solved later (ratio above 1).",
        "attention_bias:ATTENTION_BIAS",
        "The paper does not give the strength c of its bias; here it is 5, in all heads and layers, from the first "
        "step. The paper's linear map is S = 16, which is tried here too, and its automata go to S = 512. Without the "
        "bias no linear map of S = 16 is solved in 2,000 steps, so that ratio is a lower bound; the paper's takes "
        "about 4,600.",
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
        "Slopes of the linear map are lower bounds: most maps of S = 10 and 12 are not solved in 2,000 steps. First "
        "meant to be judged by the steps to leave the plateau, with three seeds, which did not settle the linear "
        "map (slope 1.64, -0.23 to 3.29); now five seeds and the steps to solve. The paper's slope for automata, of "
        "steps to leave the plateau from S = 32 to 256, is about 1.24; here states are fewer (4) and S = 4 to 12.",
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
        "S = 10 in place of 16 and 2,000 steps in place of 10,000. At s = S - 1 models stop one bit short as well: "
        "all but the first can be had by correcting the output before by two inputs.",
    ),
    Experiment(
        "heads",
        "More heads help",
        "More heads make both tasks easier, at fixed width and at fixed head size.",
        "Holds if the fewest heads are slower than the most, on both tasks and both ways. " + _SLOWER,
        "heads:HEADS",
        "1 to 16 heads in place of 1 to 128. The paper finds an optimum of 8 to 32 heads for automata at fixed width, "
        "which this range does not reach.",
    ),
    Experiment(
        "head-dimension",
        "Head dimension helps, less and less",
        "A larger head dimension helps with diminishing returns, and cellular automata need a minimum.",
        "Holds if, on the linear map, the smallest heads are slower than the largest and the first half of the "
        "doublings saves more (in log steps) than the second, and if on cellular automata the smallest heads are at "
        "least twice as slow as the largest. " + _SLOWER,
        "heads:HEAD_DIMENSION",
        "Eight heads at width 64, so that only the head dimension changes; in the paper the width grows with it. "
        "With three seeds the smallest heads were slower on the linear map (2.84 times, 2.28 to 3.48); of five "
        "seeds, one with the largest heads was not solved, which leaves it open. The need for a minimum is judged "
        "by a factor of two in steps, since the smallest heads solve these small automata, too, if slowly.",
    ),
    Experiment(
        "depth",
        "Depth hurts the linear map and helps automata",
        "More layers make the linear map harder and cellular automata of many rules easier.",
        "Holds if the deepest model is slower than one layer on the linear map, and one layer slower than the deepest "
        "model on automata. " + _SLOWER,
        "depth:DEPTH",
        "1, 2 and 4 layers; eight rules for the automata, twice the base. The paper's own grid and numbers are not "
        "known.",
    ),
    Experiment(
        "mixer-linear-map",
        "MLP-Mixer beats the transformer on the linear map",
        "A causal MLP-Mixer solves the linear map in fewer steps than a transformer.",
        "Holds if the transformer is slower at every state size tried. " + _SLOWER,
        "mixers:MIXER_LINEAR_MAP",
        "The Mixer has eight hidden units per position. Its form in the paper is not known; in the form of one "
        "learned matrix per layer it learned nothing in 1,500 steps, with which the finding would be the opposite, as "
        "public reproductions found.",
    ),
    Experiment(
        "mixer-automata",
        "MLP-Mixer does worse on cellular automata",
        "A causal MLP-Mixer does worse than a transformer on cellular automata.",
        "Holds if the Mixer is slower at every state size tried. " + _SLOWER,
        "mixers:MIXER_AUTOMATA",
        "The same Mixer and learning rate as on the linear map.",
    ),
    Experiment(
        "mixers",
        "Other mixers against the transformer",
        "Recurrent and linear-attention mixers mostly do worse than the transformer, on both tasks.",
        "One comparison per mixer, task and state size. Holds if the mixer is slower in more than half of them, does "
        "not hold if it is not slower in more than half. On automata the steps to leave the plateau count, since few "
        "mixers solve the longer ones by the last step. " + _SLOWER,
        "mixers:OTHER_MIXERS",
        "All mixers at the same width, layers and learning rate as attention, without a search for each of them, so "
        "a slower mixer may be one that wants another learning rate. Parameters differ (see the table). The rule was "
        'first written for automata of S = 4 and steps to solve; its verdict was "does not hold" (six of the seven '
        "mixers were faster than attention there, two of seven on the linear map). At learning rate 1e-3 that stays: "
        "733 steps for attention, 387 for Mamba, 233 for Gated DeltaNet, 573 for RG-LRU (3 seeds). A short "
        "convolution covers much of so small a state, so S = 12 was added: attention solves two of three seeds in 800 "
        "steps there, and no other mixer any, which is why plateaus count on automata now. Mamba and RWKV-7, tried at "
        "S = 12 as well, solved none either, and their plateaus settled nothing; they are left out there to stay near "
        "ten minutes. The paper's sizes of these mixers are not known.",
    ),
    Experiment(
        "seeds",
        "Which seeds solve, and when, is random",
        "With everything but the seed fixed, when a model solves the task differs widely between seeds.",
        "Holds if the steps to solve of at least ten seeds vary by a factor (exponential of the standard deviation of "
        "log steps) above 1.1 on both tasks, with the whole 95 % bootstrap interval; does not hold if an interval is "
        "wholly below 1.1.",
        "seeds:SEEDS",
        "The matrix and the tables are the same for all ten seeds; weights and sequences differ. Automata of S = 12 "
        "were tried, too: ten seeds solved them at step 640 to 780, a factor of 1.06. At these sizes the linear map "
        "is random and automata are not.",
    ),
)

_CROSSES = (
    "The share of the gap left is u = (loss - floor) / (plateau - floor); the plateau is the loss of a model that "
    "knows how often each token stands at each place of the answer."
)
_QUIET = (
    "Quiet means that the whole interval of the lead over seeds is above 0, loud that none of it is. The lead is the "
    "step at which the task's loss is half-way from plateau to floor, minus the step at which the probe's loss is "
    "half-way from its strongest baseline (class prior, tokens alone, untrained model) to the best it reaches."
)
_SMALL = (
    "Models of two layers and width 64 at one learning rate (3e-3, constant), chosen so that the tasks are solved in "
    "about a minute; the paper trains up to 50 million parameters, on 16 bits, 11 nodes, 64 values and 16 activities."
)
_QUIET_FEATURES = (
    Experiment(
        "plateau-then-drop",
        "The loss stays on a plateau, then drops",
        "Within a run the loss stays on a plateau and then drops, on addition, a graph task and maximum subarray.",
        "Holds for a task if from u = 0.9 to u = 0.1 the steps grow at most 5-fold (geometric mean over seeds, whole "
        "95 % interval); does not hold if more. An exponential approach without a plateau takes 21.9-fold. "
        + _CROSSES,
        "plateau_then_drop:PLATEAU_THEN_DROP",
        _SMALL,
        "quiet features",
    ),
    Experiment(
        "data-budgets",
        "Plateau and drop over data budgets",
        "A model of fixed size, trained anew for each data budget, stays on the plateau up to one and then drops.",
        "As the finding before, over training sequences in place of steps: each budget is a training of its own, with "
        "warm-up and cosine schedule to its end.",
        "plateau_then_drop:DATA_BUDGETS",
        "Addition of 8 bits, 80 to 640 steps of 64 sequences, which is less than one epoch of its 65,536 problems.",
        "quiet features",
    ),
    Experiment(
        "compute-budgets",
        "Plateau and drop on the compute-optimal frontier",
        "The best run for each compute budget stays on the plateau up to a budget and then drops.",
        "Holds if from u = 0.9 to u = 0.1 the budget grows at most 10-fold (the paper's budgets are so far apart) and "
        "the drop leaves the power law of the budgets before it (all losses below its 99.9 % prediction interval). "
        "For each budget the configuration of lowest held-out loss is chosen and reported on other rows.",
        "compute_budgets:COMPUTE_BUDGETS",
        "Addition of 8 bits, widths 8 to 64 and two learning rates, seven budgets from 3e9 to 3e11. Runs have at "
        "least 100 steps and stand under their true FLOPs, padding included; the paper counts runs of one step too. "
        "The 10-fold was set after a trial sweep, on which the 5-fold of the findings before would not have held.",
        "quiet features",
    ),
    Experiment(
        "quiet-carry",
        "Carry is learned before the loss moves",
        "On addition, the carry can be read from the residual stream before the loss moves.",
        "Holds if carry is quiet at every width. " + _QUIET,
        "quiet_features:QUIET_CARRY",
        _SMALL,
        "quiet features",
    ),
    Experiment(
        "quiet-features",
        "Which features are quiet and which are loud",
        "Operands, carries, the queue of a breadth-first search and the signs of an array are quiet; adjacency "
        "lists, start times and running sums are loud.",
        "One part for each feature that the paper's figures show; holds if all come out as in the paper. A task that "
        "is not solved (exact match below 0.5 in the end) settles nothing. " + _QUIET,
        "quiet_features:QUIET_FEATURES",
        _SMALL + " Adjacency lists and start times are in the prompt, so a probe of the tokens alone is part of the "
        "baseline here. Positions are each example's own; the paper's code took those of the first example for all.",
        "quiet features",
    ),
    Experiment(
        "position-order",
        "Early positions first, or late ones",
        "Addition and multiplication learn early positions first, breadth-first search late ones.",
        "Holds for a feature if Spearman's correlation of place and step of emergence has a 95 % interval (over seeds "
        "and places) above 0 for early first, below 0 for late first; does not hold if it is on the other side. "
        "Emergence is measured against the strongest baseline of each place, the tokens alone included.",
        "quiet_features:POSITION_ORDER",
        "What the tokens alone give away at each place stands in the table and below in the figure: the queue's late "
        "places are nearly all nodes not yet visited.",
        "quiet features",
    ),
    Experiment(
        "u-shape",
        "Quiet probes rise again after the transition",
        "After the transition the probe losses of some quiet features rise again, and stay below the baseline.",
        "Holds if the last probe loss of at least one quiet feature is above its lowest by more than 2 % of the way "
        "from baseline to best (whole 95 % interval over seeds); does not hold if all quiet ones are wholly below.",
        "quiet_features:U_SHAPE",
        "Runs end at two to four times the step of the transition; a rise that takes longer is not seen.",
        "quiet features",
    ),
    Experiment(
        "ablation",
        "Solved models need their quiet features",
        "Ablating the direction of a quiet feature costs a solved model far more exact match than every control.",
        "Holds for a feature if, with the feature erased (LEACE) after the best layer of each place below the last "
        "block, every control keeps at least 0.2 more exact match (whole 95 % interval over seeds); does not hold if "
        "wholly less. Controls: random directions of the same rank; others matched in removed variance; probes of "
        "shuffled labels; the task's other features.",
        "feature_ablation:FEATURE_ABLATION",
        "The paper puts the residual stream on the probes' hyperplanes, at the layer of the best probe. That was "
        "tried first and stands in the table: a fresh probe reads the feature afterwards about as well as before, and "
        "at these depths the best layer is mostly the last, after which nothing but the unembedding reads. So the "
        "verdict rests on LEACE (arXiv 2306.03819), after which no linear probe beats its prior, below the last "
        "block.",
        "quiet features",
    ),
    Experiment(
        "early-warning",
        "Quiet probes warn of the transition",
        "The probes of quiet features leave their baseline before the transition, and the earlier, the earlier it is.",
        "Holds if the steps between warning (mean probe loss at 0.9 of its strongest baseline) and transition are "
        "above 0, and Spearman's correlation of the two over ten seeds is above 0, each with the whole 95 % interval.",
        "quiet_features:EARLY_WARNING",
        "Not in the paper. Addition of 8 bits, ten seeds.",
        "quiet features",
    ),
)

_PRE_PRETRAINING = (
    Experiment(
        "pre-pretraining",
        "Synthetic data first",
        "Pre-pretraining on Dyck languages or neural cellular automata can make in-context capabilities of a language "
        "model emerge in fewer steps.",
        "An arm brings a capability sooner if the difference of restricted mean steps to those without "
        "pre-pretraining has its whole 95 % bootstrap interval below 0 and a log-rank test gives p < 0.05; not sooner "
        "if the interval says that it saves less than a tenth of the steps. Two clocks: steps on text alone, and all "
        "steps. The claim holds if Dyck, shuffle Dyck or NCA brings string repetition or in-context repetition sooner "
        "by the first clock, with p < 0.05 after Holm's correction for these six tries; it does not hold if all six "
        "are not sooner. Heads carry over if, over the heads, the rank correlation of what they do in the end of "
        "pre-pretraining (fall of p of its own answers with the head's pattern of step 0) and delta_p at the "
        "emergence of in-context repetition is higher within a seed than between seeds (whole interval).",
        "pre_pretraining:PRE_PRETRAINING",
        "GPT-NeoX models of two layers and width 64 on the Python standard library (byte-pair encoding of 128 "
        "tokens; in three rows of four one passage said over and over). 500 steps of 2,048 tokens before, 1,500 on "
        "text after, 2,000 without pre-pretraining, one optimiser for all, embeddings drawn anew in between; 48 "
        "runs of 500 steps stand behind the 56. All took 31 minutes of two cores, in part beside other work. "
        "Checkpoints are 50 steps apart. String repetition counts as emerged at 0.3 of the prompts (0.1 are right "
        "by chance, and such models end near 0.5), in-context repetition at 0.5; both were set after two runs on "
        "text alone. Single trial runs of most arms were seen before, and changed the number of steps only. More "
        "of the same text shows that what carries over can be seen: both kinds of heads are there at its step 0. "
        "In all it is not sooner either, since its embeddings are learned twice. Two other ways were tried, three "
        "seeds and 1,000 steps each (restricted means of string and in-context repetition; none: 650 and 433). A "
        "learning rate of 1e-3 in pre-pretraining harms less: Dyck 700 and 533, shuffle Dyck 833 and 617, NCA 617 "
        "and 483. 150 steps of it: Dyck 817 and 750 (one of three never), shuffle Dyck 1,000 and 950 (three and "
        "two never), NCA 700 and 517. With three seeds none of these is a saving. Models this small, on so few "
        "sequences, say nothing of those of the cited works, which have 160 million parameters.",
        "pre-pretraining",
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each for each in (*_SPARSE_ATTENTION, *_QUIET_FEATURES, *_PRE_PRETRAINING)
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ArgumentError: there is none; the message gives the nearest names.
    """
    if name not in EXPERIMENTS:
        raise ArgumentError(f"no experiment {name!r}; {nearest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
