"""Figures are readable: nothing cut, no text on other text, whatever the data, the names and matplotlib's settings."""

import inspect
import pkgutil
import warnings
from importlib import import_module

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from figures import FEATURES, FIGURES, ODD, faults
from matplotlib.backends.backend_agg import FigureCanvasAgg

import emergent_heads
from emergent_heads.plots import ablation as ablation_plots
from emergent_heads.plots import heads as head_plots
from emergent_heads.plots import quiet as quiet_plots
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import look_of, plain, style
from emergent_heads.plots.panels import columns_grid
from emergent_heads.results import Result

WITHOUT_PLOT: dict[str, str] = {}  # name of a result: why it has none


def pixels(figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_and_no_text_lies_on_other_text(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that is missing, a layout that does not fit
        assert faults(FIGURES[name]()) == []


def test_the_faults_are_found_where_they_are():
    figure = new_figure(2, 2)
    with style():
        axes = figure.subplots()
        axes.set_xticks([0.5, 0.52], ["one label", "another"])
        axes.set_ylabel("a label that is far longer than the figure is tall")
    found = faults(figure)
    assert "'one label' on 'another'" in found
    assert any("is cut" in fault for fault in found)
    assert any("a page of" in fault for fault in faults(new_figure(30, 2)))


def test_every_result_plots_in_one_call():
    for module in pkgutil.walk_packages(emergent_heads.__path__, "emergent_heads."):
        import_module(module.name)
    pending, found = [Result], set()
    while pending:
        subclasses = [each for each in pending.pop().__subclasses__() if each.__module__.startswith("emergent_heads")]
        pending += subclasses
        found |= set(subclasses)
    assert len(found) > 15
    for each in {*found, emergent_heads.Run}:
        if each.__name__ in WITHOUT_PLOT:
            continue
        wanted = list(inspect.signature(each.plot).parameters.values())[1:]
        assert all(parameter.default is not parameter.empty for parameter in wanted), each


@pytest.mark.parametrize(
    "name", ["emergence curve, scanned", "head map, screened", "recovery, 12 x 12", "patterns, indirect object"]
)
def test_a_figure_looks_the_same_whatever_the_settings(name):
    plain = pixels(FIGURES[name]())
    theirs = {
        "axes.facecolor": "black",
        "axes.grid": True,
        "figure.autolayout": True,
        "figure.facecolor": "navy",
        "font.size": 20,
        "lines.linewidth": 5,
        "text.color": "white",
        "xtick.labelsize": 30,
        "ytick.color": "red",
    }
    with mpl.rc_context(theirs):
        assert np.array_equal(pixels(FIGURES[name]()), plain)
        figure = FIGURES[name]()
    assert np.array_equal(pixels(figure), plain)  # ticks are made while drawing, and the settings have changed since


def test_text_of_users_is_written_as_it_is():
    tokens = [label.get_text() for label in FIGURES["patterns, odd tokens"]().axes[0].get_yticklabels()]
    assert tokens[:9] == [
        r"\$", r"a\$b\$c", " _x^2", r"'\n'", r"'\t'", "' '", "''", r"\u4e2d\u6587", r"\U0001f642",
    ]  # fmt: skip
    assert tokens[11] == "a" * 13 + "…"
    assert len(tokens) == len(ODD)
    assert plain("cost_in_$ of $x$") == r"cost_in_\$ of \$x\$"
    assert plain("one two three", 8).count("\n") == 1
    rows = pd.DataFrame({"feature": ["_x$ and $y"], "verdict": ["not learned"], "lead_steps": [np.nan]})
    curves = pd.DataFrame({"feature": ["a"], "run": [0], "step": [1], "gap_left": [0.5]})
    figure = quiet_plots.quiet_features(rows, curves, curves, transition=None, fast_phase=None)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend[-1] == r" _x\$ and \$y: not learned"
    assert faults(figure) == []


def test_twenty_four_lines_are_told_apart_by_colour_and_by_more_than_colour():
    drawn = FIGURES["quiet, 24 features"]().axes[0].lines
    named = [line for line in drawn if "steps" in line.get_label() and len(line.get_xdata())]
    looks = [(line.get_color(), line.get_linestyle(), line._dash_pattern[1]) for line in named]
    assert len({str(look) for look in looks}) == len(looks) > 15
    assert len({str(look[2]) for look in looks[:4]}) == 4
    looks = [tuple(look_of(index).values()) for index in range(36)]
    assert len(set(looks)) == 36
    assert len({marker for _, marker in looks[:6]}) == 6


def test_the_colours_of_a_head_map_differ_in_grey_print():
    """A rise and a fall of the same size have different lightness."""
    fall, zero, rise = (
        np.dot(head_plots._diverging()(place)[:3], [0.2126, 0.7152, 0.0722]) for place in (0.0, 0.5, 1.0)
    )
    assert zero > fall + 0.2 > rise + 0.5


def test_columns_keep_their_panels_together():
    figure, columns = columns_grid(5, 2, width=2, height=1)
    places = [[axes.get_subplotspec().num1 for axes in column] for column in columns]
    assert places == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert len(figure.axes) == 10


def test_recovery_leaves_out_ticks_that_would_touch():
    axes = FIGURES["recovery, many ks"]().axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[-1] == "all 1440"
    assert labels[:3] == ["1", "2", "3"]
    assert "15" not in labels
    assert "512" not in labels  # would touch the last


def test_steps_are_whole_numbers_at_every_axis():
    for name in ("emergence curve, one point", "trajectories, one step", "training, one row"):
        axes = FIGURES[name]().axes[-1]
        assert len(axes.get_xticks()) == 1
    for name in ("emergence curve, narrow", "ablation series, one feature"):
        axes = FIGURES[name]().axes[-1]
        assert (np.mod(axes.get_xticks(), 1) == 0).all()


def test_names_of_ablated_features_may_be_long():
    table = pd.DataFrame(
        {"step": 0, "feature": name, "edit": edit, "exact_match": 0.5, "loss_nats": 0.5}
        | {f"{stem}_{end}": 0.5 for stem in ("exact_match", "loss") for end in ("low", "high")}
        for name in ("the carry into the next digit of the sum when $a$ > $b$", FEATURES[0])
        for edit in ("none", "feature")
    )
    controls = pd.DataFrame(columns=["feature", "edit", "exact_match", "loss_nats"])
    assert faults(ablation_plots.ablation(table, controls)) == []
    assert faults(ablation_plots.ablation_series(table)) == []
