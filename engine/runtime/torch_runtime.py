"""The reference runtime: eager torch, autograd for the guidance gradient.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.guidance import GradientSource, guidance
from engine.path import Path
from engine.prior import Prior


class TorchRuntime:
    """A prior and a gradient source in eager torch.

    `micro_batch` bounds the samples per network or decoder call, `checkpointed` recomputes the decoder's activations in
    its backward pass: together they bound the peak memory. With micro_batch = 1 a sample's result has the same bits in
    every batch. `tiny_decoder` replaces the decoder inside the guidance gradient only.
    """

    def __init__(
        self,
        prior: Prior,
        path: Path,
        source: GradientSource,
        *,
        micro_batch: int | None = None,
        checkpointed: bool = False,
        tiny_decoder: Callable[[Tensor], Tensor] | None = None,
        channels_last: bool = False,
    ) -> None:
        self.prior, self.source = prior, source
        self.micro_batch, self.checkpointed, self.tiny_decoder = micro_batch, checkpointed, tiny_decoder
        self._path = path
        if channels_last:
            # Changes how weights lie in memory, not what they are.
            self.prior.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def path(self) -> Path:
        """The path whose steps `velocity` counts."""
        return self._path

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """z0 of images in [0, 1]."""
        return self._in_parts(self.prior.encode, images)

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """Images by the full decoder."""
        return self._in_parts(self.prior.decode, z)

    @torch.no_grad()
    def velocity(self, z: Tensor, i: int) -> Tensor:
        """The network's output at state z in step i."""
        t = self._path.timesteps[i]
        return self._in_parts(lambda part: self.prior.predict(part, t), z)

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, image, logits) from one decoder forward and one backward."""
        return guidance(self._decode_for_gradient, self.source, z_hat, y, self.micro_batch)

    def _decode_for_gradient(self, z: Tensor) -> Tensor:
        if self.tiny_decoder is None:
            return self.prior.decode(z, checkpointed=self.checkpointed)
        if self.checkpointed:
            image: Tensor = checkpoint(self.tiny_decoder, z, use_reentrant=False)
            return image
        return self.tiny_decoder(z)

    def _in_parts(self, function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        if self.micro_batch is None or len(batch) <= self.micro_batch:
            return function(batch)
        return torch.cat([function(part) for part in batch.split(self.micro_batch)])
