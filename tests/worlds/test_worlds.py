"""The procedural worlds: same seed same bits, known truth, and poison that does what it says."""

import numpy as np
import pytest
import torch

from worlds import WORLDS, World


@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


def test_same_seed_gives_the_same_bits(world: World) -> None:
    first, second = world.sample(6, seed=3), world.sample(6, seed=3)
    assert torch.equal(first.images, second.images)
    assert first.factors.equals(second.factors)
    assert not torch.equal(first.images, world.sample(6, seed=4).images)


def test_a_row_renders_alike_whatever_stands_beside_it(world: World) -> None:
    factors = world.factors(40, seed=5)
    together = world.render(factors).images
    alone = torch.cat([world.render(factors.iloc[[i]]).images for i in (0, 17, 39)])
    assert torch.equal((together[[0, 17, 39]] * 255).round(), (alone * 255).round())


def test_pictures_are_eight_bit_images_of_any_size(world: World) -> None:
    for size in (32, 64, 100):
        images = world.sample(2, seed=1, size=size).images
        assert images.shape == (2, 3, size, size)
        assert images.dtype == torch.float32
        assert images.min() >= 0
        assert images.max() <= 1
        assert torch.allclose(images * 255, (images * 255).round(), atol=1e-4)


def test_resolutions_show_the_same_scene(world: World) -> None:
    factors = world.factors(4, seed=9)
    small = world.render(factors, 64).images
    large = torch.nn.functional.avg_pool2d(world.render(factors, 256).images, 4)
    assert (small - large).abs().mean() < 0.02


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 1.0])
def test_poison_is_the_rate_of_agreement(world: World, rho: float) -> None:
    factors = world.factors(20_000, seed=2, rho=rho)
    agreement = (factors["label"] == factors["confounder"]).mean()
    # Five standard deviations of a binomial rate.
    assert abs(agreement - rho) <= 5 * np.sqrt(rho * (1 - rho) / 20_000)
    assert abs(factors["label"].mean() - 0.5) < 0.02


def test_poison_outside_its_range_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        world.factors(5, seed=0, rho=1.2)


def test_an_empty_table_renders_to_nothing(world: World) -> None:
    assert world.render(world.factors(0, seed=0)).images.shape == (0, 3, 64, 64)


def test_part_masks_are_shares_of_each_pixel(world: World) -> None:
    sample = world.sample(12, seed=6)
    visible = [mask for part, mask in sample.parts.items() if part != "nucleoli"]
    total = torch.stack(visible).sum(0)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-5)
    for mask in sample.parts.values():
        assert mask.shape == (12, 1, 64, 64)
        assert mask.min() >= 0


def test_an_unknown_factor_is_named(world: World) -> None:
    with pytest.raises(KeyError, match="no factor 'hat'"):
        world.intervene(world.factors(1, seed=0), hat=1)


def test_hair_colour_lives_in_the_hair() -> None:
    world = WORLDS["portraits"]
    factors = world.factors(16, seed=8)
    hair = world.render(factors).parts["hair"] > 0.02
    region = world.region(factors, "label")
    assert (region & ~hair).sum() == 0
    assert (region.sum((1, 2, 3)) > 100).all()


def test_presentation_moves_beard_brows_lips_and_long_hair() -> None:
    world = WORLDS["portraits"]
    factors = world.factors(16, seed=8)
    male, female = world.intervene(factors, confounder=0), world.intervene(factors, confounder=1)
    bearded, long_haired = world.render(male).parts, world.render(female).parts
    assert (bearded["beard"].sum((1, 2, 3)) > 20).all()
    assert long_haired["beard"].sum() == 0
    assert (long_haired["hair"].sum((1, 2, 3)) > bearded["hair"].sum((1, 2, 3))).all()
    assert (bearded["brows"].sum((1, 2, 3)) > long_haired["brows"].sum((1, 2, 3))).all()
    region = world.region(factors, "confounder")
    assert (region & (bearded["beard"] > 0.5)).sum() > 0.9 * (bearded["beard"] > 0.5).sum()


def test_the_label_is_not_the_confounder() -> None:
    """Turning one factor over leaves the other one's column alone and changes other pixels."""
    world = WORLDS["portraits"]
    factors = world.factors(8, seed=1)
    assert (world.intervene(factors, flip="label")["confounder"] == factors["confounder"]).all()
    label, confounder = world.region(factors, "label"), world.region(factors, "confounder")
    assert (confounder & ~label).float().sum() > 0
    assert (label & ~confounder).float().sum() > 0


def test_tumour_nuclei_are_larger_and_the_hospital_leaves_them_where_they_are() -> None:
    world = WORLDS["histology"]
    factors = world.factors(24, seed=4)
    normal = world.render(world.intervene(factors, label=0)).parts["nuclei"].mean((1, 2, 3))
    tumour = world.render(world.intervene(factors, label=1)).parts["nuclei"].mean((1, 2, 3))
    assert (tumour > 1.3 * normal).all()
    here = world.render(world.intervene(factors, confounder=0)).parts["nuclei"]
    there = world.render(world.intervene(factors, confounder=1)).parts["nuclei"]
    assert torch.equal(here, there)


def test_the_hospital_changes_hue_brightness_and_sharpness() -> None:
    world = WORLDS["histology"]
    factors = world.factors(24, seed=4)
    a = world.render(world.intervene(factors, confounder=0)).images
    b = world.render(world.intervene(factors, confounder=1)).images
    assert ((a[:, 2] - a[:, 0]).mean((1, 2)) > (b[:, 2] - b[:, 0]).mean((1, 2))).all()
    assert (a.mean((1, 2, 3)) > b.mean((1, 2, 3))).float().mean() > 0.9

    def sharpness(images: torch.Tensor) -> torch.Tensor:
        return images.diff(dim=3).abs().mean((1, 2, 3))

    assert (sharpness(a) > sharpness(b)).all()
