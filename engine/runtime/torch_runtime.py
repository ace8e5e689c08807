"""The reference runtime: eager torch, autograd for the guidance gradient.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.errors import InputError, ModelError
from engine.guidance import GradientSource, guidance
from engine.path import Path
from engine.prior import Prior

ATTENTIONS = ("sdpa", "xformers")


class TorchRuntime:
    """A prior and a gradient source in eager torch.

    `micro_batch` bounds the samples per network or decoder call, `checkpointed` recomputes the decoder's activations in
    its backward pass: together they bound the peak memory. With micro_batch = 1 a sample's result has the same bits in
    every batch. `tiny_decoder` replaces the decoder inside the guidance gradient only.

    Two switches change how the prior is computed, not what: `channels_last` lays its weights out for convolutions by
    channels, `attention = "xformers"` gives attention to that package, which needs a CUDA device. Both stay with the
    prior.
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
        attention: str = "sdpa",
    ) -> None:
        self.prior, self.source = prior, source
        self.micro_batch, self.checkpointed, self.tiny_decoder = micro_batch, checkpointed, tiny_decoder
        self._path = path
        if channels_last:
            # Changes how weights lie in memory, not what they are.
            self.prior.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if attention not in ATTENTIONS:
            raise InputError(f"The attention {attention!r} is unknown; choose one of {', '.join(ATTENTIONS)}.")
        if attention == "xformers":
            use_xformers(prior)

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
        return self.velocity_at(z, self._path.timesteps[i])

    @torch.no_grad()
    def velocity_at(self, z: Tensor, timestep: Tensor) -> Tensor:
        """The network's output at state z, told a timestep that is a tensor without dimensions."""
        return self._in_parts(lambda part: self.prior.predict(part, timestep), z)

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


def use_xformers(prior: Prior) -> None:
    """Every diffusers model of the prior attends with xformers from here on; a ModelError where that cannot be."""
    try:
        import_module("xformers.ops")
    except (ImportError, OSError) as error:
        raise ModelError(
            f"xformers cannot be loaded ({error}); install the extra `gpu`: pip install 'pfungst[gpu]', or choose the "
            "attention sdpa."
        ) from None
    models = [getattr(part, "model", None) for part in (prior.network, prior.autoencoder)]
    switches = [getattr(model, "enable_xformers_memory_efficient_attention", None) for model in models]
    if not any(switches):
        raise ModelError("No network of this prior takes xformers attention; choose the attention sdpa.")
    for switch in filter(None, switches):
        try:
            switch()
        except Exception as error:  # diffusers tries a kernel and passes on whatever it raised
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise ModelError(f"xformers does not run here: {reason}. Choose the attention sdpa.") from None
