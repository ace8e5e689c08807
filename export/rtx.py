"""TensorRT takes the graphs: TensorRT-RTX parses and builds each on the CPU, for GPUs that are not here.

Building without a device needs the compute capability to be named. RTX has no SM90, so an H100 stays unproven here.
Networks are strongly typed: precision is what the graph says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError, ModelError
from engine.runtime.artifact_folder import GraphFile
from engine.runtime.tensorrt_runtime import keeping_logger

CAPABILITIES = ("SM80", "SM89", "SM120")
MODULE = "tensorrt_rtx_bindings"


@dataclass(frozen=True)
class Build:
    """One engine that was built for some compute capabilities, or why not."""

    capabilities: tuple[str, ...]
    bytes: int
    error: str | None = None


def available() -> bool:
    """Whether TensorRT-RTX is installed."""
    try:
        _tensorrt()
    except ModelError:
        return False
    return True


def build(file: Path, graph: GraphFile | None, capabilities: Sequence[str] = CAPABILITIES) -> Build:
    """Parses an ONNX file and builds one engine with kernels for every capability.

    `graph` gives the batches of a free batch axis.
    """
    trt = _tensorrt()
    asked = tuple(capabilities)
    for capability in asked:
        if capability not in trt.ComputeCapability.__members__:
            raise InputError(f"TensorRT-RTX knows no {capability}; choose from {', '.join(CAPABILITIES)}.")
    messages: list[str] = []
    builder = trt.Builder(keeping_logger(trt, messages))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(file)):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        return Build(asked, 0, "; ".join(errors) or "the parser refused the graph without a reason")
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(asked)
    for place, capability in enumerate(asked):
        config.set_compute_capability(trt.ComputeCapability.__members__[capability], place)
    profile = _profile(builder, network, 8 if graph is None else graph.largest_batch)
    if profile is not None:
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return Build(asked, 0, messages[-1] if messages else "the builder gave no engine and no reason")
    return Build(asked, int(engine.nbytes))


def build_all(
    folder: Path, graphs: dict[str, tuple[GraphFile, ...]], capabilities: Sequence[str] = CAPABILITIES
) -> dict[str, bool | str]:
    """Graph by graph: true if every file builds for every capability, else the first error."""
    outcome: dict[str, bool | str] = {}
    for name, files in graphs.items():
        errors = [build(folder / graph.file, graph, capabilities).error for graph in files]
        outcome[name] = next((error for error in errors if error is not None), True)
    return outcome


def _profile(builder: Any, network: Any, largest: int) -> Any:
    """The range of a free batch axis, tuned for its largest size; None if all sizes are fixed."""
    profile, free = builder.create_optimization_profile(), False
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = tuple(tensor.shape)
        if -1 in shape:
            free = True
            low, high = (tuple(batch if size == -1 else size for size in shape) for batch in (1, largest))
            profile.set_shape(tensor.name, low, high, high)
    return profile if free else None


def _tensorrt() -> Any:
    from importlib import import_module

    try:
        return import_module(MODULE)
    except (ImportError, OSError) as error:
        raise ModelError(
            f"TensorRT-RTX cannot be loaded ({error}); install the extra `rtx`: pip install 'pfungst[rtx]'."
        ) from None
