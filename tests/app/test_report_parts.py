"""What the drawings of the report are made of: scales, ticks, labels that keep apart, curves made fit for a page."""

import math

import numpy as np
import pytest

from mfac.app.report.curves import over_seeds, peaks, smoothed, window_of
from mfac.app.report.end_labels import spread
from mfac.app.report.lettering import shortened, text_width
from mfac.app.report.scales import linear_scale, log_scale, sparsity_scale, tight_scale, value_scale
from mfac.app.report.strips import SHADES, Heat
from mfac.app.report.svg import path, tag
from mfac.app.report.tables import Table, evenly, thinned

RANGES = [
    (0, 1),
    (0.1, 0.983),
    (-3, 7),
    (0.0745, 0.0768),
    (97.1, 97.2),
    (1e-9, 3e-9),
    (0, 250_000),
    (5, 5),
    (0, 0),
    (1e-15, 2e-15),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_linear_ticks_are_few_round_and_around_the_values(low, high):
    scale = linear_scale([low, high])
    assert scale.low <= low <= high <= scale.high
    assert 3 <= len(scale.ticks) <= 8
    assert len({scale.label(tick) for tick in scale.ticks}) == len(scale.ticks)
    assert [scale.place(scale.low), scale.place(scale.high)] == [0, 1]


def test_linear_ticks_of_a_known_range():
    scale = linear_scale([12, 97])
    assert [scale.label(tick) for tick in scale.ticks] == ["0", "20", "40", "60", "80", "100"]
    steps = tight_scale([1, 430_000])
    assert [steps.label(tick) for tick in steps.ticks] == ["0", "100k", "200k", "300k", "400k"]
    assert (steps.low, steps.high) == (0, 430_000)
    assert scale.place(25) == 0.25


@pytest.mark.parametrize(
    ("low", "high"), [(1e-7, 1), (0.07, 2.3), (0.2, 0.21), (1e-3, 1e-3), (3e-5, 4e-4), (1e-30, 1e30)]
)
def test_log_ticks_are_few_and_inside(low, high):
    scale = log_scale([low, high])
    assert scale.low < low <= high < scale.high
    assert 1 <= len(scale.ticks) <= 7
    assert len({scale.label(tick) for tick in scale.ticks}) == len(scale.ticks)
    middle = math.sqrt(scale.low * scale.high)
    assert scale.place(middle) == pytest.approx(0.5)


def test_log_labels():
    scale = log_scale([1e-7, 1])
    assert [scale.label(tick) for tick in (1e-7, 3e-5, 1.5e-4, 0.01, 2, 1e6)] == [
        "10⁻⁷", "3·10⁻⁵", "1.5·10⁻⁴", "0.01", "2", "10⁶",
    ]  # fmt: skip
    assert scale.titled("loss") == "loss, log scale"


def test_a_log_scale_only_for_positive_values_far_apart():
    assert value_scale([0.07, 2.3]).log
    assert not value_scale([0.5, 2.3]).log
    assert not value_scale([0.0, 2.3]).log
    assert not value_scale([-1.0, 100.0]).log


def test_high_sparsities_stand_apart():
    scale = sparsity_scale([50, 70, 80, 90, 95, 98])
    assert [scale.label(tick) for tick in scale.ticks] == ["50", "70", "80", "90", "95", "98"]
    assert scale.place(98) - scale.place(95) > 0.2
    # Half of the weights that are left, again and again, is the same way each time.
    steps = [scale.place(value) for value in (60, 80, 90, 95)]
    assert np.diff(steps) == pytest.approx([np.diff(steps)[0]] * 3)


@pytest.mark.parametrize("percents", [[10, 50], [50, 100], [100], [0], [90], [99.999], [0, 99.9999]])
def test_every_sparsity_has_a_place(percents):
    scale = sparsity_scale(percents)
    assert all(0 <= scale.place(value) <= 1 for value in percents)
    assert scale.ticks


def test_ticks_are_at_few_sparsities_and_at_round_ones_where_there_are_many():
    few = sparsity_scale([50.01, 97.46, 80.0])
    assert [few.label(tick) for tick in few.ticks] == ["50", "80", "97.5"]
    many = sparsity_scale(list(np.linspace(7, 95, 16)))
    assert [many.label(tick) for tick in many.ticks] == ["20", "50", "70", "80", "90", "95"]


def test_long_names_keep_both_ends():
    assert shortened("magnitude", 15) == "magnitude"
    assert shortened("mfac · Other methods", 15) == "mfac ·…methods"
    assert shortened("magnitude gradual", 15) == "magnitu…gradual"
    assert text_width("mmmm") > text_width("llll")


def test_labels_keep_their_distance_and_stay_inside():
    assert spread([10, 50, 90], 15, 0, 100) == [10, 50, 90]
    assert spread([50, 50, 50], 15, 0, 100) == [50, 65, 80]
    assert spread([95, 97, 99], 15, 0, 100) == [70, 85, 100]
    assert spread([], 15, 0, 100) == []


def test_smoothing_is_the_mean_around_each_place():
    values = np.random.default_rng(0).normal(size=50)
    values[7] = np.nan
    expected = []
    for i in range(50):
        back = min(i, 4)
        expected.append(np.nanmean(values[i - back : min(i + back + 1, 50)]))
    np.testing.assert_allclose(smoothed(values, 9), expected, rtol=1e-12)
    assert smoothed(values, 1) is values
    assert np.isnan(smoothed(np.full(9, np.nan), 3)).all()


def test_windows_are_odd_and_light():
    assert [window_of(count) for count in (0, 39, 80, 440, 100_000)] == [1, 1, 3, 11, 501]


def test_mean_and_range_over_seeds_of_different_length():
    one, other = np.array([1.0, 2.0, np.nan, 4.0]), np.array([3.0, np.nan, np.nan])
    found = over_seeds([one, other])
    np.testing.assert_array_equal(found.mean, [2, 2, np.nan, 4])
    np.testing.assert_array_equal(found.low, [1, 2, np.nan, 4])
    np.testing.assert_array_equal(found.high, [3, 2, np.nan, 4])


def test_thinning_keeps_the_peaks_the_ends_and_the_gaps():
    values = np.random.default_rng(0).normal(size=10_000)
    values[4321], values[8765], values[5000:5050] = 50, -50, np.nan
    kept = peaks(values, 200)
    assert len(kept) <= 204
    assert {0, 4321, 8765, 9999} <= set(kept)
    assert np.isnan(values[kept]).any()
    assert peaks(values[:200], 200) == list(range(200))


def test_rows_are_thinned_evenly():
    assert evenly(5, 9) == [0, 1, 2, 3, 4]
    assert evenly(101, 5) == [0, 25, 50, 75, 100]
    table = thinned(Table("t", ("a",), [[str(i)] for i in range(101)]), 5)
    assert [row[0] for row in table.rows] == ["0", "25", "50", "75", "100"]
    assert table.note == "5 of 101 rows, evenly spread; run.json has all of them."


def test_shades_go_from_the_lowest_to_the_highest_sparsity():
    heat = Heat.of([32.6, 50.0, 98.6, 100.0])
    assert (heat.low, heat.high) == (30, 99)
    shades = [heat.shade(value) for value in (30, 32.6, 50, 80, 90, 95, 98.6, 100)]
    assert shades == [0, 0, 0, 2, 4, 5, 8, 8]
    assert Heat.of([100.0]).shade(100.0) == SHADES - 1
    assert Heat.of([0.0]).shade(0.0) == 0


def test_lines_have_gaps_and_tags_are_escaped():
    assert path([(0, 0), (1.26, 2), None, (3, 4), (5, 6)]) == "M0 0L1.3 2M3 4L5 6"
    assert str(tag("text", "<&>", class_='a"b', dy=None, x=1.0)) == '<text class="a&#34;b" x="1">&lt;&amp;&gt;</text>'


@pytest.mark.parametrize("value", [0.00386, 1.19, 8.4, 4.1e7])
def test_a_logarithmic_axis_of_one_value_has_a_tick(value):
    scale = log_scale([value])
    assert scale.low < value < scale.high
    assert any(scale.low <= tick <= scale.high for tick in scale.ticks)
