"""A decoder's linear end in one convolution: the same picture and the same gradient, at the border too."""

import pytest
import torch
from diffusers import AutoencoderTiny
from torch import nn

from engine.prior import LatentAutoencoder, Prior
from export.tail import FoldedTail, fold_tail
from tests.engine.small_export import FLOW, small_prior


@pytest.mark.parametrize(("h", "w"), [(1, 1), (2, 3), (5, 4)])
def test_the_folded_tail_is_the_same_function(h: int, w: int) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.Conv2d(6, 3, 3, padding=1)
    whole = nn.Sequential(nn.Upsample(scale_factor=2), first, second).double()
    folded = FoldedTail(first, second).double()
    features = torch.randn(2, 4, h, w, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 3, 2 * h, 2 * w, dtype=torch.float64)
    pictures = [tail(features) for tail in (whole, folded)]
    torch.testing.assert_close(pictures[1], pictures[0], rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(picture, features, cotangent)[0] for picture in pictures]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)


def tiny_prior(decoder_blocks: tuple[int, int]) -> Prior:
    """A prior whose autoencoder is a tiny one with two levels."""
    torch.manual_seed(0)
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=decoder_blocks,
        upsampling_scaling_factor=2,
    )
    return Prior(LatentAutoencoder(vae), small_prior().network, FLOW).eval().requires_grad_(False)


def test_a_decoder_that_ends_linearly_is_folded_and_decodes_the_same() -> None:
    prior = tiny_prior((1, 0))
    folded = fold_tail(prior)
    assert sum(isinstance(module, FoldedTail) for module in folded.modules()) == 1
    assert not any(isinstance(module, FoldedTail) for module in prior.modules())
    assert folded.network is prior.network
    z = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(folded.decode(z), prior.decode(z), rtol=0, atol=1e-6)


def test_a_decoder_that_bends_at_full_resolution_stays_as_it_is() -> None:
    prior = tiny_prior((1, 1))
    assert fold_tail(prior) is prior
