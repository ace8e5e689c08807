"""Findings name what moved, where, and which edits are alike."""

import numpy as np
import pytest
import torch

from audit.findings import attribute_findings, cluster, cluster_findings, headline, region_findings, silhouette


def test_attributes_are_counted_and_said_in_words_beside_the_label() -> None:
    shifts = {
        "label": np.array([0.1, 0.0, 0.6, -0.1]),
        "no_Beard": np.array([0.9, 0.3, -0.5, 0.1]),
        "short hair": np.array([0.2, 0.5, 0.1, 0.0]),
    }
    found = attribute_findings(shifts)
    assert [finding.name for finding in found] == ["no_Beard", "short hair"]
    assert found[0].rate.value == 0.5  # in the third edit the label moved farther, in the fourth nothing moved
    assert found[0].sentence == "No Beard moved in 50 % of 4 false counterfactuals, the label itself in 25 %."
    assert found[0].examples == (0, 1)
    assert found[0].lift == pytest.approx(1.8 / 0.8)
    assert headline(found) == ("no Beard", found[0].sentence)


def test_attributes_without_a_label_to_compare_with_are_counted_alone() -> None:
    (found,) = attribute_findings({"beard": np.array([0.9, 0.6, -0.7, 0.1])})
    assert found.sentence == "Beard moved in 75 % of 4 false counterfactuals."
    assert found.examples == (0, 2, 1)
    assert found.lift is None
    assert found.notable
    assert attribute_findings({"beard": np.array([])}) == []
    assert headline([]) is None


def test_what_moves_with_the_label_is_no_headline() -> None:
    found = attribute_findings({"label": np.array([0.5, 0.6]), "smile": np.array([0.6, 0.7])})
    assert [finding.name for finding in found] == ["smile"]
    assert headline(found) is None


def region(rows: slice, n: int = 2) -> torch.Tensor:
    mask = torch.zeros(n, 1, 8, 8)
    mask[:, :, rows] = 1
    return mask


def test_regions_are_measured_by_the_edit_s_area_and_against_their_size() -> None:
    edits = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    edits[0, :, :4] = True
    edits[1, :, 6:] = True
    found = region_findings(
        edits, {"skin": region(slice(0, 6)), "chin": region(slice(6, 8)), "nowhere": region(slice(0))}
    )
    assert [finding.name for finding in found] == ["chin", "skin"]
    assert [finding.rate.value for finding in found] == [0.5, 0.5]
    assert [finding.lift for finding in found] == [pytest.approx(0.5 / 0.25), pytest.approx(0.5 / 0.75)]
    assert found[0].examples == (1,)
    assert found[0].sentence == (
        "Chin: 50 % of the edited area lies there, 2.0 times its share of the picture (25 %); touched in 50 % of 2 "
        "false counterfactuals."
    )


def test_the_headline_prefers_what_moved_to_where_and_leaves_large_regions_out() -> None:
    edits = region(slice(4, 8)) > 0
    regions = region_findings(edits, {"everything": region(slice(0, 8)), "lower half": region(slice(4, 8))})
    assert headline(regions) == ("something in the region 'lower half'", regions[0].sentence)
    assert headline(region_findings(edits, {"everything": region(slice(0, 8))})) is None
    attributes = attribute_findings({"label": np.array([0.0, 0.1]), "hat": np.array([0.0, 0.9])})
    said = headline([*regions, *attributes])
    assert said is not None
    assert said[0] == "hat"


def test_alike_edits_lie_together_whatever_their_strength() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(14, 3, 32, 32, generator=g)
    x_cf = x.clone()
    strength = torch.linspace(0.1, 0.5, 14).view(-1, 1, 1, 1)
    x_cf[:8, :, :8] += strength[:8]
    x_cf[8:, :, -8:] -= strength[8:]
    found = cluster_findings(x, x_cf)
    assert [finding.rate.value for finding in found] == [pytest.approx(8 / 14), pytest.approx(6 / 14)]
    assert set(found[0].examples) <= set(range(8))
    assert set(found[1].examples) <= set(range(8, 14))
    assert found[0].sentence.endswith("mostly at the top.")
    assert found[1].sentence.endswith("mostly at the bottom.")
    assert cluster_findings(x[:3], x_cf[:3]) == []


def test_points_without_groups_are_one_cluster() -> None:
    points = np.random.default_rng(0).normal(size=(40, 30))
    assert set(cluster(points)) == {0}


def test_equal_edits_are_one_cluster_or_as_many_as_differ() -> None:
    assert set(cluster(np.ones((9, 3)))) == {0}
    assert np.bincount(cluster(np.repeat(np.eye(3)[:2], [5, 4], axis=0))).tolist() == [5, 4]


def test_silhouette_of_a_known_case() -> None:
    # Two pairs on a line: inside 1 apart, the groups 10 apart.
    points = np.array([[0.0], [1.0], [11.0], [12.0]])
    a, b_outer, b_inner = 1.0, 11.5, 10.5
    expected = ((b_outer - a) / b_outer + (b_inner - a) / b_inner) / 2
    assert silhouette(points, np.array([0, 0, 1, 1])) == pytest.approx(expected)
