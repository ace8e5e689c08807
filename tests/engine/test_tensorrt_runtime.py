"""The TensorRT runner's whole state machine, driven by a stand-in for the module `tensorrt`, which cannot exist here.

The stand-in keeps the rules that the real module has (bounds of profiles, memory that must be given, weights by name)
and computes with ONNX Runtime on the very addresses it was told, so results are checked too. A test holds its names
against the real bindings of TensorRT-RTX, which share TensorRT's interface.
"""

import ctypes
import hashlib
import json
import logging
import math
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from engine.errors import InputError, ModelError, WeightsError
from engine.loop import counterfactuals
from engine.runtime import Runtime
from engine.runtime.artifact_folder import GraphFile, Port, read_graph, read_manifest
from engine.runtime.cuda_graph import CapturableRuntime, CudaGraphRuntime
from engine.runtime.onnx_runtime import OnnxRuntime, open_session
from engine.runtime.tensorrt_runtime import TensorRtRuntime, _Builder, batch_ranges
from tests.engine.small_export import RECIPE, SIZE, export, small_guide, small_prior

TYPES: dict[int, Any] = {1: np.float32, 7: np.int64}


class Flag(Enum):
    """Every enumeration that the runner names."""

    STRONGLY_TYPED = 1
    USER_MANAGED = 2
    REFIT = 3
    TF32 = 4
    FLOAT = 5
    INT64 = 6

    def __int__(self) -> int:
        return self.value


class Logger:
    ERROR, INTERNAL_ERROR = "error", "internal error"

    def log(self, severity: Any, message: str) -> None:
        raise NotImplementedError


class Network:
    content: bytes = b""


class Parser:
    def __init__(self, network: Network, logger: Logger) -> None:
        self.network, self.errors = network, list[str]()

    def parse(self, content: bytes) -> bool:
        if FAKE.refused_by_parser in content:
            self.errors = ["unsupported operator"]
            return False
        self.network.content = content
        return True

    def parse_from_file(self, file: str) -> bool:
        FAKE.parsed_files.append(Path(file).name)
        return self.parse(onnx.load(file).SerializeToString())

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, i: int) -> Any:
        return SimpleNamespace(desc=lambda: self.errors[i])


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[tuple[int, ...], ...]] = {}

    def set_shape(self, name: str, low: tuple[int, ...], best: tuple[int, ...], high: tuple[int, ...]) -> None:
        assert low <= best <= high
        self.shapes[name] = (low, best, high)


class TimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content


class Config:
    def __init__(self) -> None:
        self.flags, self.profiles, self.times = {Flag.TF32}, list[Profile](), None

    def set_flag(self, flag: Flag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Flag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, content: bytes) -> TimingCache | None:
        return None if content == b"damaged" else TimingCache(content)

    def set_timing_cache(self, times: TimingCache, ignore_mismatch: bool) -> bool:
        self.times = times  # type: ignore[assignment]
        return not ignore_mismatch

    def get_timing_cache(self) -> TimingCache | None:
        return self.times


class Builder:
    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << int(Flag.STRONGLY_TYPED)
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        assert Flag.TF32 not in config.flags
        FAKE.builds += 1
        if FAKE.build_error:
            self.logger.log(Logger.ERROR, FAKE.build_error)
            return None
        assert config.times is not None
        config.times.content += b"t"
        head = {
            "version": FAKE.__version__,
            "profiles": [profile.shapes for profile in config.profiles],
            "refit": Flag.REFIT in config.flags,
        }
        return json.dumps(head).encode() + b"\n" + network.content


class Deserialiser:
    def __init__(self, logger: Logger) -> None:
        pass

    def deserialize_cuda_engine(self, content: bytes) -> "Engine | None":
        head, _, graph = content.partition(b"\n")
        told = json.loads(head)
        return Engine(told, graph) if told["version"] == FAKE.__version__ and not FAKE.opens_nothing else None


class Engine:
    def __init__(self, told: dict[str, Any], graph: bytes) -> None:
        self.told, self.device_memory_size_v2 = told, len(graph)
        self.load(graph)
        FAKE.engines.append(self)

    def load(self, graph: bytes) -> None:
        self.model = onnx.load_model_from_string(graph)
        self.session = open_session(graph)

    def create_execution_context(self, strategy: Flag) -> "Context":
        assert strategy is Flag.USER_MANAGED
        FAKE.contexts.append(Context(self))
        return FAKE.contexts[-1]


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile, self.memory = engine, 0, (0, 0)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return index < max(1, len(self.engine.told["profiles"]))

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name not in self.shapes, "a captured context must not change its shapes"
        self.shapes[name] = shape
        profiles = self.engine.told["profiles"]
        low, _, high = profiles[self.profile].get(name, (shape,) * 3) if profiles else (shape,) * 3
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address > 0

    def execute_async_v3(self, stream: int) -> bool:
        if FAKE.runs_nothing or not self.memory[0]:
            return False
        ctypes.memset(self.memory[0], 0xAB, self.engine.device_memory_size_v2)
        graph = self.engine.model.graph
        feed = {port.name: self._array(port, self.shapes[port.name]).copy() for port in graph.input}
        names = [port.name for port in graph.output]
        for port, value in zip(graph.output, self.engine.session.run(names, feed), strict=True):
            self._array(port, value.shape)[...] = value
        FAKE.runs += 1
        return True

    def _array(self, port: Any, shape: tuple[int, ...]) -> Any:
        kind = np.dtype(TYPES[port.type.tensor_type.elem_type])
        raw = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(self.addresses[port.name])
        return np.frombuffer(raw, dtype=kind).reshape(shape)


class Weights:
    def __init__(self, kind: Flag, address: int, count: int) -> None:
        size = {Flag.FLOAT: 4, Flag.INT64: 8}[kind]
        self.kind, self.count, self.content = kind, count, ctypes.string_at(address, count * size)


class Refitter:
    def __init__(self, engine: Engine, logger: Logger) -> None:
        assert engine.told["refit"]
        self.engine, self.new, self.logger = engine, dict[str, Weights](), logger

    def get_all_weights(self) -> list[str]:
        return [tensor.name for tensor in self.engine.model.graph.initializer]

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        self.new[name] = weights
        (old,) = (tensor for tensor in self.engine.model.graph.initializer if tensor.name == name)
        return name != FAKE.refused_weights and weights.count == math.prod(old.dims)

    def get_missing_weights(self) -> list[str]:
        return [name for name in self.get_all_weights() if name not in self.new]

    def refit_cuda_engine(self) -> bool:
        if FAKE.refit_error:
            self.logger.log(Logger.ERROR, FAKE.refit_error)
            return False
        model = onnx.ModelProto()
        model.CopyFrom(self.engine.model)
        for tensor in model.graph.initializer:
            kind = numpy_helper.to_array(tensor).dtype
            value = np.frombuffer(self.new[tensor.name].content, dtype=kind).reshape(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        self.engine.load(model.SerializeToString())
        return True


class FakeTensorRT:
    """The module, with what tests tell it and what it has seen."""

    Builder, Runtime, Refitter, Weights, OnnxParser, ILogger = Builder, Deserialiser, Refitter, Weights, Parser, Logger
    NetworkDefinitionCreationFlag = BuilderFlag = ExecutionContextAllocationStrategy = DataType = Flag

    def __init__(self) -> None:
        self.__version__ = "11.0.0"
        self.builds = self.runs = 0
        self.engines, self.contexts, self.parsed_files = list[Engine](), list[Context](), list[str]()
        self.build_error = self.refit_error = self.refused_weights = ""
        self.refused_by_parser = b"\0never\0"
        self.runs_nothing = self.opens_nothing = False


FAKE = FakeTensorRT()
REAL_NAMES = {
    Builder: "Builder",
    Config: "IBuilderConfig",
    Parser: "OnnxParser",
    Profile: "IOptimizationProfile",
    TimingCache: "ITimingCache",
    Deserialiser: "Runtime",
    Engine: "ICudaEngine",
    Context: "IExecutionContext",
    Refitter: "Refitter",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    FAKE.__init__()  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "tensorrt", FAKE)  # type: ignore[arg-type]
    return FAKE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of two guides of the same form for any batch up to 4, and of fixed batches."""
    root = tmp_path_factory.mktemp("exports")
    return {
        "first": export(root / "first", small_guide(1)),
        "second": export(root / "second", small_guide(2)),
        "fixed": export(root / "fixed", small_guide(1), "1,3"),
    }


def opened(folder: Path, cache: Path, seed: int = 1, **options: Any) -> TensorRtRuntime:
    return TensorRtRuntime(folder, small_prior(), small_guide(seed), RECIPE, cache=cache, device="cpu", **options)


def latents(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def assert_same(runtime: Runtime, expected: Runtime, n: int = 3) -> None:
    z, y = latents(n), torch.arange(n) % 2
    for found, exact in (
        (runtime.encode(z.sigmoid()), expected.encode(z.sigmoid())),
        (runtime.decode(z), expected.decode(z)),
        (runtime.velocity(z, 1), expected.velocity(z, 1)),
        *zip(runtime.guidance(z, y), expected.guidance(z, y), strict=True),
    ):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)


def onnx_twin(folder: Path, seed: int = 1) -> OnnxRuntime:
    return OnnxRuntime(folder, small_prior(), small_guide(seed), RECIPE)


def test_the_stand_in_has_no_name_that_the_real_bindings_lack() -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed (extra `rtx`)")
    for ours, name in REAL_NAMES.items():
        told = {attribute for attribute in vars(ours) if not attribute.startswith("_")} - {"load"}
        if ours is Engine:
            told |= {"device_memory_size_v2"}
        assert told and told <= set(dir(getattr(real, name))), name
    assert "STRONGLY_TYPED" in real.NetworkDefinitionCreationFlag.__members__
    assert "USER_MANAGED" in real.ExecutionContextAllocationStrategy.__members__
    assert {"REFIT", "TF32"} <= set(real.BuilderFlag.__members__)
    assert {"FLOAT", "HALF", "BF16", "INT64", "INT32", "BOOL"} <= set(real.DataType.__members__)
    assert real.ILogger.ERROR != real.ILogger.INTERNAL_ERROR
    array = np.arange(3, dtype=np.float32)
    assert real.Weights(real.DataType.FLOAT, array.ctypes.data, array.size).size == 3


@pytest.mark.rtx
@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops in TensorRT-RTX:DeprecationWarning")
def test_the_real_builder_takes_what_the_runner_hands_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """Parsing, profiles and flags by TensorRT-RTX; without a GPU it has to be told which one to build for."""
    real = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed (extra `rtx`)")

    class BuilderForAbsent:
        def __init__(self, logger: Any) -> None:
            self.builder = real.Builder(logger)

        def create_builder_config(self) -> Any:
            config = self.builder.create_builder_config()
            config.num_compute_capabilities = 1
            config.set_compute_capability(real.ComputeCapability.SM89, 0)
            return config

        def __getattr__(self, name: str) -> Any:
            return getattr(self.builder, name)

    names = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    module = SimpleNamespace(**{**names, "Builder": BuilderForAbsent, "Runtime": lambda logger: None})
    builder = _Builder(module, tmp_path, "SM89")
    for folder in ("first", "fixed"):
        for graph in read_manifest(folders[folder]).graphs["guidance"]:
            content = read_graph(folders[folder], graph)
            assert len(builder.build(folders[folder], graph, content, refittable=False)) > len(content)


def test_it_builds_runs_and_gives_what_onnx_runtime_gives(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path
) -> None:
    runtime = opened(folders["first"], tmp_path)
    assert isinstance(runtime, Runtime) and isinstance(runtime, CapturableRuntime)
    assert fake.builds == 4 and len(fake.engines) == 4
    for n in (1, 2, 4):
        assert_same(runtime, onnx_twin(folders["first"]), n)
    assert len(fake.contexts) == 4 * 3  # one per engine and batch, however often it runs
    assert_same(runtime, onnx_twin(folders["first"]), 2)
    assert len(fake.contexts) == 12
    assert {context.profile for context in fake.contexts if (1, 3, *SIZE) in context.shapes.values()} == {0}
    assert {context.profile for context in fake.contexts if (4, 3, *SIZE) in context.shapes.values()} == {1}


def test_one_block_of_memory_serves_every_engine(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    runtime = opened(folders["first"], tmp_path)
    assert_same(runtime, onnx_twin(folders["first"]), 2)
    needs = {engine.device_memory_size_v2 for engine in fake.engines}
    assert len(needs) > 1 and runtime.shared_bytes == max(needs)
    assert {context.memory for context in fake.contexts} == {(runtime._memory.data_ptr(), max(needs))}


def test_results_are_handed_out_as_copies(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    runtime = opened(folders["first"], tmp_path)
    first = runtime.decode(latents(2))
    kept = first.clone()
    second = runtime.decode(latents(2, seed=1))
    assert torch.equal(first, kept) and not torch.equal(first, second)


def test_fixed_batches_are_padded_and_bounds_are_kept(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path
) -> None:
    runtime = opened(folders["fixed"], tmp_path)
    assert fake.builds == 8
    assert_same(runtime, onnx_twin(folders["first"]), 2)
    assert all((3, 3, *SIZE) in context.shapes.values() for context in fake.contexts)
    runs = fake.runs
    for folder, largest in (("fixed", 3), ("first", 4)):
        with pytest.raises(InputError, match=f"batch of {largest + 1} is outside what decoder was exported for"):
            opened(folders[folder], tmp_path / folder).decode(latents(largest + 1))
    with pytest.raises(InputError, match=r"z \['B', 3, 8, 8\]; this is \[1, 3, 16, 16\]"):
        runtime.decode(torch.zeros(1, 3, 16, 16))
    assert fake.runs == runs


def test_profiles_cover_every_batch_once() -> None:
    def graph(largest: int, fixed: bool) -> GraphFile:
        port = Port(name="z", dtype="float32", shape=(None, 3))
        return GraphFile(
            file="g.onnx", sha256="", fixed_batch=fixed, largest_batch=largest, inputs=(port,), outputs=(port,)
        )

    assert batch_ranges(graph(8, False)) == ((1, 1), (2, 8))
    assert batch_ranges(graph(1, False)) == ((1, 1),)
    assert batch_ranges(graph(8, True)) == ()


def test_a_second_start_finds_its_engines(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    opened(folders["first"], tmp_path)
    runtime = opened(folders["first"], tmp_path)
    assert fake.builds == 4
    assert_same(runtime, onnx_twin(folders["first"]))
    assert not list(tmp_path.glob("*.partial")) and len(list(tmp_path.glob("*.engine"))) == 4


@pytest.mark.parametrize("spoil", ["version", "graph", "refittable", "gpu", "cut", "text", "refused"])
def test_a_stale_or_damaged_cache_is_built_again(
    fake: FakeTensorRT,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: str,
) -> None:
    caplog.set_level(logging.INFO, logger="engine.runtime.tensorrt_runtime")
    opened(folders["first"], tmp_path)
    files = sorted(tmp_path.glob("*.engine"))
    guide, rebuilt, options, seed, folder = 1, 4, {}, 1, folders["first"]
    if spoil == "version":
        fake.__version__ = "11.1.0"
    elif spoil == "graph":
        folder, seed, guide, rebuilt = folders["second"], 2, 2, 1  # the prior's graphs are the same
    elif spoil == "refittable":
        options, rebuilt = {"refittable": True}, 1  # only guidance holds the guide
    elif spoil == "gpu":
        monkeypatch.setattr("engine.runtime.tensorrt_runtime.gpu_name", lambda device: "another GPU")
    elif spoil == "cut":
        for file in files:
            file.write_bytes(file.read_bytes()[:-1])
    elif spoil == "text":
        for file in files:
            file.write_text("no engine")
    else:
        # A header that fits, around an engine of another TensorRT.
        for file in files:
            head, _, engine = file.read_bytes().partition(b"\n")
            told, foreign = json.loads(head), engine.replace(b'"11.0.0"', b'"10.0.0"')
            told["sha256"] = hashlib.sha256(foreign).hexdigest()
            file.write_bytes(json.dumps(told).encode() + b"\n" + foreign)
    runtime = opened(folder, tmp_path, seed, **options)
    assert fake.builds == 4 + rebuilt
    assert_same(runtime, onnx_twin(folder, guide))
    if spoil != "gpu":  # another GPU has files of its own beside these
        assert caplog.text.count("built again") == rebuilt
        assert len(list(tmp_path.glob("*.engine"))) == 4
    opened(folder, tmp_path, seed, **options)
    assert fake.builds == 4 + rebuilt


def test_times_of_earlier_builds_are_used_and_damaged_ones_left(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path
) -> None:
    opened(folders["first"], tmp_path)
    (times,) = tmp_path.glob("timing-*.cache")
    assert times.read_bytes() == b"tttt"
    times.write_bytes(b"damaged")
    opened(folders["second"], tmp_path, 2)
    assert times.read_bytes() == b"t"


def test_a_cache_that_cannot_be_written_costs_only_time(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    runtime = opened(folders["first"], tmp_path / "file" / "cache")
    assert_same(runtime, onnx_twin(folders["first"]))
    assert "the next start builds again" in caplog.text


def test_a_guide_is_swapped_without_a_build(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    runtime = opened(folders["first"], tmp_path, refittable=True)
    assert_same(runtime, onnx_twin(folders["first"]))
    runtime.swap_guide(folders["second"], small_guide(2))
    assert fake.builds == 4 and runtime.generation == 1
    assert_same(runtime, onnx_twin(folders["second"], 2))
    runtime.swap_guide(folders["first"], small_guide(1))
    assert_same(runtime, onnx_twin(folders["first"]))


def test_a_swap_that_does_not_fit_changes_nothing(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    wide = small_guide(1, width=5)
    other_form = export(tmp_path / "other", wide)
    runtime = opened(folders["first"], tmp_path / "cache", refittable=True)
    with pytest.raises(ModelError, match="another form than the engine"):
        runtime.swap_guide(other_form, wide)
    with pytest.raises(WeightsError, match="exported for another guide"):
        runtime.swap_guide(folders["second"], small_guide(3))
    with pytest.raises(ModelError, match="another precision, resolution or batch"):
        runtime.swap_guide(folders["fixed"], small_guide(1))
    with pytest.raises(ModelError, match="open the runtime with refittable=True"):
        opened(folders["first"], tmp_path / "plain").swap_guide(folders["second"], small_guide(2))
    assert runtime.generation == 0
    assert_same(runtime, onnx_twin(folders["first"]))


@pytest.mark.parametrize("failure", ["refused", "failed"])
def test_a_swap_that_fails_half_way_leaves_no_engine_to_trust(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path, failure: str
) -> None:
    runtime = opened(folders["first"], tmp_path, refittable=True)
    if failure == "refused":
        fake.refused_weights = "_param_constant0"
        reason = "does not take the new weights '_param_constant0'"
    else:
        fake.refit_error = reason = "out of memory"
    with pytest.raises(ModelError, match=reason):
        runtime.swap_guide(folders["second"], small_guide(2))
    with pytest.raises(ModelError, match="open the runtime again"):
        runtime.decode(latents(1))


def test_the_loop_runs_on_it_captured_or_not(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    guide, prior = small_guide(), small_prior()
    runtime = opened(folders["first"], tmp_path)
    x0 = torch.rand(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        targets = (1 - guide(x0).argmax(1)).tolist()
    expected, *others = (
        counterfactuals(prior, guide, guide, x0, targets, RECIPE, [1, 2, 3], runtime=one)
        for one in (None, runtime, CudaGraphRuntime(runtime, RECIPE, device="cpu", buckets=(4,)))
    )
    for found in others:
        for one, exact in zip(found, expected, strict=True):
            assert one.flipped == exact.flipped
            torch.testing.assert_close(one.images, exact.images, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(one.soft_masks, exact.soft_masks, atol=1e-4, rtol=1e-4)


def test_large_weights_are_read_from_beside_the_graph(
    fake: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.graphs.EXTERNAL_BYTES", 100)
    folder = export(tmp_path / "external", small_guide())
    runtime = opened(folder, tmp_path / "cache", refittable=True)
    assert set(fake.parsed_files) >= {"guidance.onnx", "velocity.onnx"}
    assert_same(runtime, onnx_twin(folder))
    second = export(tmp_path / "second", small_guide(2))
    runtime.swap_guide(second, small_guide(2))
    assert_same(runtime, onnx_twin(second, 2))


def test_a_missing_module_says_what_to_install(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ModelError, match=r"TensorRT cannot be loaded.*pip install 'pfungst\[gpu\]'"):
        opened(folders["first"], tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_one_clear_error(fake: FakeTensorRT, folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="needs a CUDA device and torch sees none"):
        TensorRtRuntime(folders["first"], small_prior(), small_guide(), RECIPE)


def test_failures_of_tensorrt_say_why(fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path) -> None:
    fake.build_error = "no tactic for Conv_3"
    with pytest.raises(ModelError, match=r"cannot build encoder\.onnx: no tactic for Conv_3\. Choose"):
        opened(folders["first"], tmp_path)
    assert not list(tmp_path.glob("*.engine"))
    fake.build_error, fake.refused_by_parser = "", b"Conv"
    with pytest.raises(ModelError, match=r"cannot read velocity\.onnx: unsupported operator"):
        opened(folders["first"], tmp_path)
    fake.refused_by_parser, fake.opens_nothing = b"\0never\0", True
    with pytest.raises(ModelError, match="that it cannot open"):
        opened(folders["first"], tmp_path)
    fake.opens_nothing = False
    runtime = opened(folders["first"], tmp_path)
    fake.runs_nothing = True
    with pytest.raises(ModelError, match=r"could not run decoder\.onnx for a batch of 2"):
        runtime.decode(latents(2))
    fake.runs_nothing = False
    assert_same(runtime, onnx_twin(folders["first"]))


def test_foreign_models_and_altered_files_are_refused(
    fake: FakeTensorRT, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="exported for another guide"):
        opened(folders["first"], tmp_path, seed=5)
    with pytest.raises(WeightsError, match="exported for another prior"):
        TensorRtRuntime(folders["first"], small_prior(3), small_guide(), RECIPE, cache=tmp_path, device="cpu")
    assert fake.builds == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_engines_on_a_gpu_give_what_onnx_runtime_gives(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="needs TensorRT (extra `gpu`)")
    runtime = TensorRtRuntime(folders["first"], small_prior(), small_guide(), RECIPE, cache=tmp_path, refittable=True)
    twin = onnx_twin(folders["first"])
    z, y = latents(3), torch.tensor([0, 1, 0])
    for found, exact in zip(runtime.guidance(z.cuda(), y.cuda()), twin.guidance(z, y), strict=True):
        torch.testing.assert_close(found.cpu(), exact, atol=1e-4, rtol=1e-3)
    runtime.swap_guide(folders["second"], small_guide(2))
    swapped = onnx_twin(folders["second"], 2)
    for found, exact in zip(runtime.guidance(z.cuda(), y.cuda()), swapped.guidance(z, y), strict=True):
        torch.testing.assert_close(found.cpu(), exact, atol=1e-4, rtol=1e-3)
