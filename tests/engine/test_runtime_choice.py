"""The choice of a runtime: the one that was named or an error; for `auto` the fastest proven one, with every reason."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audit.classifier import ModuleClassifier
from audit.explain import Explainer
from engine.errors import InputError, ModelError, PfungstError, RecipeError, WeightsError
from engine.recipe import Recipe
from engine.runtime import choice
from engine.runtime.artifact_folder import MANIFEST, Manifest, read_manifest
from engine.runtime.choice import Chosen, RuntimeChoice, check_choice, choose_runtime
from engine.runtime.cuda_graph import CudaGraphRuntime
from engine.runtime.onnx_runtime import OnnxRuntime
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import trajectory
from tests.engine.small_export import RECIPE, SIZE, export, small_guide, small_prior

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with exports in two precisions."""
    root = tmp_path_factory.mktemp("exports")
    for precision in ("fp32", "fp16"):
        export(root / precision, small_guide(), precision=precision)
    return root


@pytest.fixture
def copied(exports: Path, tmp_path: Path) -> Path:
    """One export that a test may spoil."""
    return Path(shutil.copytree(exports / "fp32", tmp_path / "fp32"))


def choose(name: str, artifacts: Path | None = None, recipe: Recipe = RECIPE, **options: Any) -> Chosen:
    settings: dict[str, Any] = {"f": small_guide(7), "f_hat": small_guide(), "size": SIZE, "batch": 2, **options}
    prior = settings.pop("prior", None) or small_prior()
    return choose_runtime(name, prior, recipe=recipe, artifacts=artifacts, **settings)


def sealed(folder: Path, **changes: Any) -> Path:
    """A manifest with other content and a digest that fits."""
    content = json.loads((folder / MANIFEST).read_text())
    manifest = Manifest.model_validate({**content, **changes})
    (folder / MANIFEST).write_text(manifest.sealed().model_dump_json())
    return folder


@needs_no_gpu
def test_auto_takes_the_fastest_proven_one_and_tells_why_not_a_faster(
    exports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.runtime.choice")
    chosen = choose("auto", exports)
    assert chosen.name == "onnx" and isinstance(chosen.runtime, OnnxRuntime)
    assert chosen.folder == exports / "fp32" and chosen.runtime.manifest.precision == "fp32"
    told = [record.getMessage() for record in caplog.records if record.name == "engine.runtime.choice"]
    assert all(record.levelno == logging.INFO for record in caplog.records if record.name == "engine.runtime.choice")
    assert len(told) == len(chosen.rejected) + 1 == 4
    assert "runtime tensorrt is passed over: " in told[0] and "runtime onnx-cuda is passed over: " in told[1]
    assert "fp16: " in chosen.rejected[2] and "fp16 is not run by onnx" in told[2]
    assert told[-1] == f"runtime onnx from {exports / 'fp32'} is chosen"


def test_auto_without_exports_is_torch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="engine.runtime.choice")
    chosen = choose("auto")
    assert chosen.name == "torch" and isinstance(chosen.runtime, TorchRuntime) and chosen.folder is None
    assert len(chosen.rejected) == 3 and all("--artifacts DIR" in reason for reason in chosen.rejected)
    assert caplog.text.count("is passed over") == 3


def unproven(folder: Path) -> Path:
    manifest = read_manifest(folder)
    parity = json.loads(json.dumps(manifest.parity))
    parity["graphs"]["guidance"]["gradient"]["error"] = 2e-4
    return sealed(folder, parity=parity)


def without_figures(folder: Path) -> Path:
    return sealed(folder, parity={})


def altered(folder: Path) -> Path:
    (folder / "guidance.onnx").write_bytes((folder / "guidance.onnx").read_bytes()[:-1])
    return folder


def unsealed(folder: Path) -> Path:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"opset": 20', '"opset": 19'))
    return folder


def wrong_sign(folder: Path) -> Path:
    """Figures that look well on a graph that is not: only a comparison on this machine finds it."""
    import hashlib

    import onnx

    file = folder / "guidance.onnx"
    model = onnx.load(str(file))
    for node in model.graph.node:
        for k, name in enumerate(node.output):
            if name == "gradient":
                node.output[k] = "positive"
    model.graph.node.append(onnx.helper.make_node("Neg", ["positive"], ["gradient"]))
    file.write_bytes(model.SerializeToString())
    manifest = json.loads((folder / MANIFEST).read_text())
    (graph,) = manifest["graphs"]["guidance"]
    graph["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return sealed(folder, graphs=manifest["graphs"])


@pytest.mark.parametrize(
    ("spoil", "kind", "reason"),
    [
        (unproven, WeightsError, "missed the parity threshold: gradient has a relative error of 2.0e-04"),
        (without_figures, WeightsError, "no parity figures for encoder.onnx"),
        (altered, WeightsError, "cut short or altered"),
        (unsealed, WeightsError, "altered after the export"),
        (wrong_sign, ModelError, "its guidance differs from torch on this machine"),
    ],
)
def test_what_is_not_proven_is_passed_over_by_auto_and_refused_by_name(
    copied: Path, spoil: Any, kind: type[PfungstError], reason: str
) -> None:
    spoil(copied)
    with pytest.raises(kind) as caught:
        choose("onnx", copied)
    assert reason in str(caught.value)
    chosen = choose("auto", copied)
    assert chosen.name == "torch" and any(reason in line for line in chosen.rejected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"f_hat": small_guide(3)}, "exported for another guide"),
        ({"prior": small_prior(4)}, "exported for another prior"),
        ({"recipe": RECIPE.changed(temperature=2.0)}, "exported for another temperature"),
        ({"recipe": RECIPE.changed(gradient="smoothgrad")}, "'smoothgrad' cannot be exported"),
        ({"recipe": RECIPE.changed(micro_batch=1)}, "bound the memory of torch alone"),
        ({"size": (16, 16)}, "its graphs are for 8x8 pixels, the images have 16x16"),
        ({"batch": 5}, "batch of 5 is outside what encoder was exported for"),
    ],
)
def test_an_export_of_something_else_is_not_used(exports: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PfungstError, match=reason):
        choose("onnx", exports / "fp32", **options)
    chosen = choose("auto", exports / "fp32", **options)
    assert chosen.name == "torch" and any(reason in line for line in chosen.rejected)


@needs_no_gpu
@pytest.mark.parametrize("name", ["tensorrt", "onnx-cuda"])
def test_a_named_runtime_that_cannot_run_is_an_error(exports: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"TensorRT cannot be loaded|no CUDA provider|torch sees none"):
        choose(name, exports)


def test_names_and_folders_are_checked_before_any_model(tmp_path: Path, exports: Path) -> None:
    with pytest.raises(InputError, match="'gpu' is unknown; choose one of auto, torch, onnx, onnx-cuda, tensorrt"):
        check_choice("gpu")
    with pytest.raises(InputError, match="name their folder"):
        check_choice("onnx")
    for name in ("auto", "onnx"):
        with pytest.raises(InputError, match="holds no exported graphs; run `pfungst export"):
            check_choice(name, tmp_path)
    check_choice("auto", exports)
    check_choice("torch")
    with pytest.raises(RecipeError, match="needs a surrogate"):
        choose("torch", f_hat=None)


def test_half_precision_alone_leaves_torch_and_says_so(exports: Path) -> None:
    with pytest.raises(ModelError, match="fp16 is not run by onnx, only fp32"):
        choose("onnx", exports / "fp16")
    assert choose("auto", exports / "fp16").name == "torch"


def test_a_graph_that_fails_at_run_time_is_passed_over(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(OnnxRuntime):
        def decode(self, z: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(choice, "OnnxRuntime", Exhausted)
    chosen = choose("auto", exports / "fp32")
    assert chosen.name == "torch" and "the device is full" in chosen.rejected[-1]
    with pytest.raises(ModelError, match=r"The runtime onnx cannot run.*the device is full"):
        choose("onnx", exports / "fp32")


def test_torch_on_a_gpu_comes_before_onnx_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.speed_order(small_prior()) == ("tensorrt", "onnx-cuda", "onnx", "torch")
    monkeypatch.setattr(choice, "device_of", lambda prior: torch.device("cuda"))
    assert choice.speed_order(small_prior()) == ("tensorrt", "onnx-cuda", "torch", "onnx")


def run_of(recipe: Recipe = RECIPE) -> Any:
    return choice._Run(small_prior(), small_guide(7), small_guide(), recipe, SIZE, 2)


def test_a_pass_is_captured_only_if_it_ends_where_an_uncaptured_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner = choice.eager(run_of())
    looped = choice.captured(inner, run_of(), 6, device="cpu")
    assert isinstance(looped, CudaGraphRuntime) and looped.buckets == (1, 2, 4, 6)
    monkeypatch.setattr(
        choice, "trajectory", lambda *args, **options: replace(end := trajectory(*args, **options), z=end.z + 1)
    )
    assert choice.captured(inner, run_of(), 6, device="cpu") is inner
    assert "not captured as a CUDA graph: a captured pass ends elsewhere" in caplog.text


def test_a_factory_keeps_its_choice_for_as_long_as_it_fits(exports: Path) -> None:
    made = RuntimeChoice("onnx", small_prior(), small_guide(7), small_guide(), artifacts=exports / "fp32")
    first = made(RECIPE, SIZE, 2)
    assert made(RECIPE, SIZE, 1) is first
    assert made(RECIPE, SIZE, 4) is not first
    with pytest.raises(InputError, match="is unknown"):
        RuntimeChoice("fast", small_prior(), small_guide(7), small_guide())


def test_an_explainer_runs_on_the_runtime_it_is_given(exports: Path) -> None:
    class Pair:
        guide, evaluator = small_guide(), small_guide(9)

    f: nn.Module = small_guide(7)
    classifier = ModuleClassifier(f, ("a", "b"), None, (0.0,) * 3, (1.0,) * 3)
    explainer = Explainer(small_prior(), classifier, Pair(), RECIPE)  # type: ignore[arg-type]
    asked: list[tuple[tuple[int, int], int]] = []
    made = RuntimeChoice("onnx", explainer.prior, classifier, Pair.guide, artifacts=exports / "fp32")

    def runtime(recipe: Recipe, size: tuple[int, int], batch: int) -> Any:
        asked.append((size, batch))
        return made(recipe, size, batch)

    x0 = torch.rand(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        targets = (1 - f(x0).argmax(1)).tolist()
    eager = explainer(x0, targets, [1, 2, 3])
    fast = replace(explainer, runtime=runtime)(x0, targets, [1, 2, 3])
    assert asked == [(SIZE, 3)]
    for one, other in zip(fast, eager, strict=True):
        assert one.flipped == other.flipped
        torch.testing.assert_close(one.images, other.images, atol=1e-4, rtol=1e-4)
