"""A prior whose network runs on ONNX Runtime wherever no gradient is asked for.

DiME's chains call their network for hours; the same numbers, to float32's rounding, come sooner there. Only what
a method finds is measured so; what it costs is measured in eager torch (benchmarks.tables.cost).
"""

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine.guidance import Model
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.onnx_runtime import open_session
from export.graphs import contracts, traced, write_graph


class QuickForward(Prior):
    """A prior with the same weights, and so the same content hash, as the one it was made of."""

    def __init__(self, prior: Prior, guide: Model, size: int) -> None:
        super().__init__(prior.autoencoder, prior.network, prior.scheduler, prior.image_size)
        contract = contracts(prior, guide, Recipe(), size, size)["velocity"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "velocity.onnx"
            write_graph(contract, traced(contract, None), file, None)
            self._session: Any = open_session(file.read_bytes(), threads=torch.get_num_threads())
        self._names = [port.name for port in contract.inputs]

    def predict(self, z: Tensor, t: Tensor) -> Tensor:
        """As Prior.predict, by the graph where autograd is off."""
        if torch.is_grad_enabled():
            return super().predict(z, t)
        fed = {name: value.numpy() for name, value in zip(self._names, (z.contiguous(), t), strict=True)}
        return torch.from_numpy(cast(Any, self._session.run(None, fed)[0]))
