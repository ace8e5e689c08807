"""An edit that is an intervention is attributed to the factor that was turned over."""

import torch

from worlds import WORLDS
from worlds.truth import edit_shares


def _shares(name: str, factor: str) -> tuple[float, float, float]:
    world = WORLDS[name]
    factors = world.factors(12, seed=3)
    x = world.render(factors).images
    x_cf = world.render(world.intervene(factors, flip=factor)).images
    edit = (x_cf - x).abs().amax(1, keepdim=True) > 8 / 255
    found = edit_shares(world, factors, x, x_cf, edit)
    return found.label.mean().item(), found.confounder.mean().item(), found.elsewhere.mean().item()


def test_turning_the_label_over_counts_as_label() -> None:
    for name in WORLDS:
        label, confounder, elsewhere = _shares(name, "label")
        assert label > 0.95
        assert elsewhere == 0
        assert confounder < 0.05


def test_turning_the_confounder_over_counts_as_confounder() -> None:
    for name in WORLDS:
        label, confounder, elsewhere = _shares(name, "confounder")
        assert confounder > 0.9
        assert elsewhere == 0
        assert label < 0.1


def test_nuclei_that_come_and_go_anywhere_count_as_label_whoever_stained_them() -> None:
    """Other tissue has its nuclei elsewhere, where turning this tissue's label over would draw none."""
    world = WORLDS["histology"]
    factors = world.factors(12, seed=3)
    before = world.render(factors)
    moved = world.intervene(factors, flip="label").assign(tissue_seed=world.factors(12, seed=4)["tissue_seed"])
    for hospital_too in (False, True):
        after = world.render(world.intervene(moved, flip="confounder") if hospital_too else moved)
        edit = ((after.parts["nuclei"] - before.parts["nuclei"]).abs() > 0.5).view(12, 1, 64, 64)
        found = edit_shares(world, factors, before.images, after.images, edit)
        assert found.label.mean() > 0.95
        assert found.confounder.mean() < 0.05


def test_an_edit_of_the_wall_is_elsewhere_and_no_edit_is_nan() -> None:
    world = WORLDS["portraits"]
    factors = world.factors(2, seed=3)
    x = world.render(factors).images
    edit = torch.zeros(2, 1, 64, 64, dtype=torch.bool)
    edit[0, :, :6, :6] = True
    found = edit_shares(world, factors, x, torch.where(edit, 1 - x, x), edit)
    assert found.elsewhere[0] == 1
    assert found.elsewhere[1].isnan()
