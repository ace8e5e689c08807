"""Where the networks run: torch as the reference, optimised runtimes proven against it.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.path import Path


@runtime_checkable
class Runtime(Protocol):
    """A prior's and a guide's networks, bound to one path; the loop calls nothing else.

    Samples never influence each other in any of these calls.
    """

    @property
    def path(self) -> Path:
        """The path whose steps `velocity` counts."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """z0 [B, C, h, w] of images [B, 3, H, W] in [0, 1]."""
        ...

    def decode(self, z: Tensor) -> Tensor:
        """Images [B, 3, H, W], nominally in [0, 1], by the full decoder."""
        ...

    def velocity(self, z: Tensor, i: int) -> Tensor:
        """The network's output (velocity, or noise for diffusion) at state z in step i."""
        ...

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient [B, C, h, w], image [B, 3, H, W], logits [B, K]) from one decoder forward and one backward."""
        ...
