"""The five graphs of a prior and its guide, each with its contract, as ONNX files.

    encoder     image -> z
    decoder     z -> image
    velocity    z, timestep -> output       (velocity, or noise for diffusion; the null conditioning is a constant)
    surrogate   image -> logits
    guidance    z_hat, y, scale -> gradient, image, logits

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.

Inputs and outputs are float32 whatever the precision inside. Precision is written into the graph from torch: weights
and activations in it, but norm statistics, softmax and the loss in float32, and the gradient multiplied by `scale` on
its way back and divided by it in float32. Converters that lower the precision of a finished graph have destroyed
gradients.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxscript import ir
from torch import Tensor, nn
from torch.fx import GraphModule

from engine.errors import RecipeError
from engine.guidance import Model, classification_loss, frozen_model
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.artifact_folder import DTYPES, Port, check_gradient, network_of
from export.rules import UnsupportedOperator
from export.tail import fold_tail
from export.trace import trace
from export.translate import translate
from export.units import scale_units

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORBIDDEN = frozenset(
    {
        "ConvTranspose",
        "If",
        "Loop",
        "Scan",
        "NonZero",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
        "Dropout",
    }
)
EXTERNAL_BYTES = 1_800_000_000
"""Weights beyond this go into a file of their own: protobuf ends at 2 GB."""


@dataclass(frozen=True)
class Contract:
    """One graph before it is exported: what it computes, takes and gives."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    classes: int
    timesteps: int

    @property
    def has_gradient(self) -> bool:
        """Whether autograd works inside."""
        return self.name == "guidance"

    def examples(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        """Inputs as the loop gives them: normal latents, images in [0, 1], known classes."""
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for port in self.inputs:
            shape = [batch if size is None else size for size in port.shape]
            if port.name == "y":
                drawn.append(torch.randint(self.classes, shape, generator=generator))
            elif port.name == "timestep":
                drawn.append(torch.randint(1, self.timesteps, shape, generator=generator).to(DTYPES[port.dtype][0]))
            elif port.name == "scale":
                drawn.append(torch.ones(shape))
            elif port.name == "image":
                drawn.append(torch.rand(shape, generator=generator))
            else:
                drawn.append(torch.randn(shape, generator=generator))
        return tuple(drawn)


def contracts(
    prior: Prior, guide: Model, recipe: Recipe, height: int, width: int, precision: str = "fp32", *, as_is: bool = False
) -> dict[str, Contract]:
    """The graphs of a prior, a guide and a recipe's loss at one resolution and precision.

    `as_is` leaves the networks in the form they came in, to compare with. Lower precisions work on copies: the models
    handed in stay as they are.
    """
    check_gradient(recipe)
    if precision not in PRECISIONS:
        raise RecipeError(f"The precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    dtype = PRECISIONS[precision]
    channels, h, w = prior.latent_shape(height, width)
    network = network_of(guide)
    with torch.no_grad(), frozen_model(network):
        classes = int(network(torch.zeros(1, 3, height, width)).shape[1])
    generator = _in_precision(prior if as_is else fold_tail(prior), dtype)
    classifier = _in_precision(network if as_is else scale_units(network), dtype)

    def encoder(image: Tensor) -> Tensor:
        return generator.encode(image.to(dtype)).float()

    def decoder(z: Tensor) -> Tensor:
        return generator.decode(z.to(dtype)).float()

    def velocity(z: Tensor, timestep: Tensor) -> Tensor:
        return generator.predict(z.to(dtype), timestep).float()

    def surrogate(image: Tensor) -> Tensor:
        return classifier(image.to(dtype)).float()

    def guidance(z_hat: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            z = z_hat.detach().requires_grad_(True)
            image = generator.decode(z.to(dtype))
            logits = classifier(image).float()
            loss = classification_loss(logits, y, recipe.loss, recipe.temperature).sum() * scale
            (gradient,) = torch.autograd.grad(loss, z)
        return gradient / scale, image.detach().float(), logits.detach()

    def floats(name: str, *shape: int | None) -> Port:
        return Port(name=name, dtype="float32", shape=shape)

    image, z, logits = (
        floats("image", None, 3, height, width),
        floats("z", None, channels, h, w),
        floats("logits", None, classes),
    )
    timestep = Port(name="timestep", dtype="float32" if prior.is_flow else "int64", shape=())
    y, scale = Port(name="y", dtype="int64", shape=(None,)), floats("scale")
    z_hat, gradient = floats("z_hat", None, channels, h, w), floats("gradient", None, channels, h, w)
    timesteps = int(prior.scheduler.get("num_train_timesteps", 1000))
    signatures: dict[str, tuple[Callable[..., Any], tuple[Port, ...], tuple[Port, ...]]] = {
        "encoder": (encoder, (image,), (z,)),
        "decoder": (decoder, (z,), (image,)),
        "velocity": (velocity, (z, timestep), (floats("output", None, channels, h, w),)),
        "surrogate": (surrogate, (image,), (logits,)),
        "guidance": (guidance, (z_hat, y, scale), (gradient, image, logits)),
    }
    return {
        name: Contract(name, function, inputs, outputs, classes, timesteps)
        for name, (function, inputs, outputs) in signatures.items()
    }


def traced(contract: Contract, batch: int | None) -> GraphModule:
    """A contract's graph for a fixed batch, or for every batch if it is None."""
    examples = contract.examples(batch or 2, seed=0)
    free = [batch is None and None in port.shape for port in contract.inputs]
    with torch.no_grad():
        return trace(contract.function, examples, free, gradient=contract.has_gradient)


def write_graph(contract: Contract, graph: GraphModule, file: Path, batch: int | None) -> None:
    """The ONNX file of a traced graph, checked; large weights lie beside it in FILE.data."""
    program = translate(
        graph,
        contract.examples(batch or 2, seed=0),
        [batch is None and None in port.shape for port in contract.inputs],
        [port.name for port in contract.inputs],
        [port.name for port in contract.outputs],
    )
    steps_in_one_operator(program.model)
    _strip(program.model)
    size = sum(tensor.nbytes for tensor in graph.buffers()) + sum(tensor.nbytes for tensor in graph.parameters())
    program.save(str(file), external_data=size > EXTERNAL_BYTES)
    check_graph(file)


def check_graph(file: Path) -> None:
    """The file is valid ONNX of the standard operators, without those that engines lack or run differently."""
    onnx.checker.check_model(str(file), full_check=False)
    model = onnx.load(str(file), load_external_data=False)
    foreign = sorted({node.op_type for node in model.graph.node if node.domain not in ("", "ai.onnx")})
    found = sorted({node.op_type for node in model.graph.node if node.op_type in FORBIDDEN})
    if foreign or found or model.functions:
        names = ", ".join([*foreign, *found]) or "functions"
        raise UnsupportedOperator(
            f"The graph {file.name} holds {names}, which not every engine runs; change that layer."
        )


def steps_in_one_operator(model: Any) -> None:
    """Masks 1[x > 0] in float32 become a hard sigmoid so steep that it is a step.

    ONNX Runtime keeps convolutions in a blocked layout, and this is the one such operator that it runs in that layout:
    a comparison and a cast would bring every activation and every gradient out of it and back. Exact for x >= 2^-100.
    """
    for cast in [node for node in model.graph if node.op_type == "Cast"]:
        compare = cast.inputs[0].producer()
        if compare is None or compare.op_type != "Greater" or len(list(compare.outputs[0].uses())) != 1:
            continue
        x, threshold = compare.inputs
        value = ir.convenience.get_const_tensor(threshold)
        if value is None or value.size != 1 or float(value.numpy().reshape(())) != 0.0 or x.dtype != ir.DataType.FLOAT:
            continue
        if cast.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        slope = [ir.AttrFloat32("alpha", 2.0**100), ir.AttrFloat32("beta", 0.0)]
        step = ir.Node("", "HardSigmoid", [x], attributes=slope, num_outputs=1)
        step.outputs[0].name, step.outputs[0].type = cast.outputs[0].name, cast.outputs[0].type
        step.outputs[0].shape = cast.outputs[0].shape
        model.graph.insert_before(cast, step)
        ir.convenience.replace_all_uses_with(cast.outputs[0], step.outputs[0])
        model.graph.remove([cast, compare], safe=True)


def _strip(model: Any) -> None:
    """Removes what the exporter notes about source files, so that equal models give equal files."""
    for function in (model.graph, *model.functions.values()):
        for node in function:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in function.inputs:
            value.metadata_props.clear()
        function.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
    model.metadata_props.clear()


def _in_precision(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module itself in float32, else a frozen copy in another precision."""
    same = all(tensor.dtype == dtype for tensor in module.state_dict().values() if tensor.is_floating_point())
    if same and not module.training and not any(p.requires_grad for p in module.parameters()):
        return module
    # nn.Module.to, not diffusers' own, which warns that it knows nothing to exempt.
    return nn.Module.to(copy.deepcopy(module), dtype).eval().requires_grad_(False)
