"""Tasks: what a model is asked to do, and how each is made.

`from emergent_heads import tasks` needs neither torch nor transformers.
"""

from emergent_heads.tasks.algorithmic import AlgorithmicTask
from emergent_heads.tasks.arithmetic import Addition, MajorityOfMajorities, Multiplication
from emergent_heads.tasks.cellular_automata import CellularAutomaton
from emergent_heads.tasks.features import Feature, FeatureValues
from emergent_heads.tasks.formal_languages import Dyck, ShuffleDyck
from emergent_heads.tasks.graphs import (
    BreadthFirstSearch,
    DepthFirstSearch,
    MinimumSpanningTree,
    ShortestPath,
    TopologicalSort,
)
from emergent_heads.tasks.language import (
    from_table,
    from_tokens,
    in_context_repetition,
    indirect_object,
    pattern_completion,
    string_repetition,
)
from emergent_heads.tasks.linear_map import LinearMap
from emergent_heads.tasks.mixture import Mixture
from emergent_heads.tasks.neural_cellular_automata import NeuralCellularAutomata
from emergent_heads.tasks.sequences import ActivitySelection, MaximumSubarray
from emergent_heads.tasks.settings import from_settings
from emergent_heads.tasks.task import PromptBatch, PromptTask, SequenceBatch, SequenceTask
from emergent_heads.tasks.text import RepeatedText, ShuffledTokens, TextCorpus, repeated_text

__all__ = [
    "ActivitySelection",
    "Addition",
    "AlgorithmicTask",
    "BreadthFirstSearch",
    "CellularAutomaton",
    "DepthFirstSearch",
    "Dyck",
    "Feature",
    "FeatureValues",
    "LinearMap",
    "MajorityOfMajorities",
    "MaximumSubarray",
    "MinimumSpanningTree",
    "Mixture",
    "Multiplication",
    "NeuralCellularAutomata",
    "PromptBatch",
    "PromptTask",
    "RepeatedText",
    "SequenceBatch",
    "SequenceTask",
    "ShortestPath",
    "ShuffleDyck",
    "ShuffledTokens",
    "TextCorpus",
    "TopologicalSort",
    "from_settings",
    "from_table",
    "from_tokens",
    "in_context_repetition",
    "indirect_object",
    "pattern_completion",
    "repeated_text",
    "string_repetition",
]
