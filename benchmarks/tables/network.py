"""A prior whose network runs on ONNX Runtime, gradient included.

The baselines' chains call their network for hours; the same numbers, to float32's rounding, come sooner there. Only
what a method finds is measured so; what it costs is measured in eager torch (benchmarks.tables.cost).
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from engine.guidance import Model, frozen_model
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.onnx_runtime import open_session
from export.graphs import contracts, traced, write_graph
from export.trace import trace
from export.translate import translate

OFTEN = 200
"""Calls of one shape after which its gradient is traced: that takes as long as these took."""


class QuickPrior(Prior):
    """A prior with the same weights, and so the same content hash, as the one it was made of."""

    def __init__(self, prior: Prior, guide: Model, size: int) -> None:
        super().__init__(prior.autoencoder, prior.network, prior.scheduler, prior.image_size)
        contract = contracts(prior, guide, Recipe(), size, size)["velocity"]
        self._session = opened(lambda file: write_graph(contract, traced(contract, None), file, None))
        self._names = [port.name for port in contract.inputs]
        self._asked: Counter[torch.Size] = Counter()
        self._halves: dict[torch.Size, Halves] = {}

    def predict(self, z: Tensor, t: Tensor) -> Tensor:
        """As Prior.predict; where autograd is on, it is eager until a shape was asked for often."""
        if not torch.is_grad_enabled():
            return self._run(z, t)
        self._asked[z.shape] += 1
        if self._asked[z.shape] <= OFTEN:
            return super().predict(z, t)
        if z.shape not in self._halves:
            self._halves[z.shape] = halves(cast(nn.Module, self.network), z, t)
        return cast(Tensor, Recorded.apply(z, t, self._halves[z.shape]))

    def _run(self, z: Tensor, t: Tensor) -> Tensor:
        fed = {name: value.numpy() for name, value in zip(self._names, (z.contiguous(), t), strict=True)}
        return torch.from_numpy(cast(Any, self._session.run(None, fed)[0]))


@dataclass(frozen=True)
class Halves:
    """A network's forward pass, which hands on what its backward pass needs, and that backward pass."""

    forward: Any
    backward: Any
    kept: tuple[str, ...]


class Recorded(torch.autograd.Function):
    """A network in two halves, differentiable in its first input."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, t: Tensor, network: Halves) -> Tensor:
        """The network's output; what the backward pass needs stays in ONNX Runtime's memory."""
        found = network.forward.run_with_ort_values(["output", *network.kept], values(z=z, t=t))
        ctx.network, ctx.kept = network, dict(zip(network.kept, found[1:], strict=True))
        return torch.from_numpy(found[0].numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient with respect to z."""
        (found,) = ctx.network.backward.run_with_ort_values(
            ["gradient"], {**ctx.kept, **values(cotangent=gradients[0])}
        )
        return torch.from_numpy(found.numpy()), None, None


def values(**tensors: Tensor) -> dict[str, Any]:
    """Tensors as ONNX Runtime takes them."""
    import onnxruntime as ort

    return {
        name: ort.OrtValue.ortvalue_from_numpy(tensor.detach().contiguous().numpy()) for name, tensor in tensors.items()
    }


def halves(network: nn.Module, z: Tensor, t: Tensor) -> Halves:
    """The two halves of a network at inputs of this shape."""

    def both(z: Tensor, t: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            seen = z.detach().requires_grad_(True)
            output = network(seen, t)
            (gradient,) = torch.autograd.grad(output, seen, cotangent)
        return output.detach(), gradient

    examples = (torch.randn_like(z), t, torch.randn_like(z))
    with torch.no_grad(), frozen_model(network):
        graph = trace(both, examples, [False] * len(examples), gradient=True)
        first, second = split(graph)
        saved = first(*examples[:2])[1:]
    names = tuple(f"kept_{number}" for number in range(len(saved)))
    return Halves(
        session_of(first, examples[:2], ("z", "t"), ("output", *names)),
        session_of(second, (*saved, examples[2]), (*names, "cotangent"), ("gradient",)),
        names,
    )


def split(graph: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Of (z, t, cotangent) -> (y, g): the graph (z, t) -> (y, kept...) and the graph (kept..., cotangent) -> (g).

    All that depends on the cotangent is in the second.
    """
    *_, cotangent = (node for node in graph.graph.nodes if node.op == "placeholder")
    late = {cotangent}
    for node in graph.graph.nodes:
        if node.op == "call_function" and late & set(node.all_input_nodes):
            late.add(node)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    y, gradient = output.args[0]
    kept = [
        node
        for node in graph.graph.nodes
        if node not in late and node.op not in ("get_attr", "output") and late & set(node.users)
    ]
    forward, backward = Graph(), Graph()
    here: dict[Node, Node] = {}
    there = {node: backward.placeholder(f"kept_{number}") for number, node in enumerate(kept)}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node not in late:
            here[node] = forward.node_copy(node, here.__getitem__)
        if node in late or (node.op == "get_attr" and late & set(node.users)):
            there[node] = backward.node_copy(node, there.__getitem__)
    forward.output((here[y], *(here[node] for node in kept)))
    backward.output((there[gradient],))
    for part in (forward, backward):
        part.eliminate_dead_code()
    return GraphModule(graph, forward), GraphModule(graph, backward)


def session_of(graph: GraphModule, examples: Sequence[Tensor], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """A traced graph of fixed shapes on ONNX Runtime."""
    program = translate(graph, examples, [False] * len(examples), inputs, outputs)
    return opened(lambda file: program.save(str(file)))


def opened(write: Callable[[Path], object]) -> Any:
    """The graph that `write` puts into a file, on ONNX Runtime with as many threads as torch has."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.onnx"
        write(file)
        return open_session(file.read_bytes(), threads=torch.get_num_threads())
