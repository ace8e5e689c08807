"""Findings name what moved, where, and which edits are alike."""

import numpy as np
import pytest
import torch

from audit.findings import attribute_findings, cluster, cluster_findings, headline, region_findings, silhouette


def test_attributes_are_counted_and_said_in_words() -> None:
    shifts = {
        "Blond_Hair": np.array([0.1, 0.0, 0.2, -0.1]),
        "beard": np.array([0.9, 0.6, -0.7, 0.2]),
        "short hair": np.array([0.8, 0.9, 0.1, 0.0]),
    }
    found = attribute_findings(shifts)
    assert [finding.name for finding in found] == ["beard", "short hair"]
    assert found[0].rate.value == 0.75
    assert found[0].sentence == "Beard moved in 75% of 4 false counterfactuals."
    assert found[0].examples == (0, 2, 1)
    assert headline(found) == "Beard and Short hair moved in 50% of false counterfactuals."
    assert headline([]) is None
    assert attribute_findings({"beard": np.array([])}) == []


def test_regions_are_measured_by_the_edit_s_area() -> None:
    edits = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    edits[0, :, :4] = True
    edits[1, :, 6:] = True
    upper = torch.zeros(2, 1, 8, 8)
    upper[:, :, :4] = 1
    found = region_findings(edits, {"hair": upper, "nowhere": torch.zeros(2, 1, 8, 8)})
    assert [finding.name for finding in found] == ["hair"]
    assert found[0].rate.value == 0.5
    assert found[0].examples == (0,)
    assert "on average 50% of the edited area" in found[0].sentence


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
