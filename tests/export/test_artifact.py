"""Exported folders: what they compute, and that nothing altered, foreign or unproven is ever used."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import export.parity
from engine.errors import Cancelled, InputError, ModelError, RecipeError, WeightsError
from engine.loop import counterfactuals
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.artifact_folder import GRAPHS, MANIFEST, Manifest, read_manifest
from engine.runtime.onnx_runtime import OnnxRuntime, open_session
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from engine.trajectory import Originals, WalkingRuntime, draw_noise, trajectory
from export.artifact import Batches, write_artifact
from export.graphs import FORBIDDEN, contracts, traced, write_graph
from export.manifest import sha256, verify
from export.parity import Figures, ParityError, compare_graph, in_session, iou
from export.rules import UnsupportedOperator
from tests.engine.test_loop import Sides
from tests.engine.test_prior import kl_vae, save_folder, save_ldm, save_sd3, transformer, unet

RECIPE = Recipe(
    steps=6, strength=0.7, eta=0.5, normalise=True, blur=1.0, temperature=2.0, margin=None, escalation=(1.0,)
)
SIZE = (32, 32)


def small_guide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    guide = SurrogateNetwork(3, NetworkConfig(input_size=32, widths=(8, 16), blocks=1))
    for part in guide.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return guide.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Prior:
    return load_prior(save_sd3(tmp_path_factory.mktemp("sd3")))


@pytest.fixture(scope="module")
def exported(prior: Prior, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of graphs for any batch up to 4."""
    out = tmp_path_factory.mktemp("exported") / "graphs"
    told: list[tuple[str, int, int]] = []
    write_artifact(
        prior,
        small_guide(),
        RECIPE,
        out,
        size=SIZE,
        batches=Batches.parse("1-4"),
        classifier=small_guide(1),
        pictures=pictures(4),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told) and told[-1][1] == told[-1][2] == 6
    return out


@pytest.fixture(scope="module")
def halved(prior: Prior, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of fp16 graphs for a batch of 3, with weights beside the graphs as if they were beyond 2 GB."""
    out = tmp_path_factory.mktemp("halved") / "graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.graphs.EXTERNAL_BYTES", 1000)
        write_artifact(prior, small_guide(), RECIPE, out, size=SIZE, batches=Batches.parse("3"), precision="fp16")
    return out


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may spoil."""
    yield Path(shutil.copytree(exported, tmp_path / "graphs"))


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def test_the_folder_states_its_contract_and_its_proof(prior: Prior, exported: Path) -> None:
    manifest = verify(exported)
    assert set(manifest.graphs) == set(GRAPHS) and manifest.source.prior == prior.content_hash
    assert {file.name for file in exported.iterdir()} == {MANIFEST, *(f"{name}.onnx" for name in GRAPHS)}
    assert manifest.parity["graphs"]["guidance"]["gradient"]["error"] <= 1e-4
    loop = manifest.parity["loop"]
    assert loop["flips_identical"] and loop["mask_iou"] > 0.99 and loop["latent_error"] < 1e-3
    (guidance,) = manifest.graphs["guidance"]
    assert [port.name for port in guidance.inputs] == ["z_hat", "y", "scale"]
    assert [port.name for port in guidance.outputs] == ["gradient", "image", "logits"]
    for name in GRAPHS:
        model = onnx.load(exported / f"{name}.onnx")
        assert not FORBIDDEN & {node.op_type for node in model.graph.node}
        text = str(model.metadata_props) + "".join(str(node.metadata_props) for node in model.graph.node)
        assert text.replace("[]", "") == "", "source paths must not be shipped"


def test_the_loop_runs_the_same_on_it(prior: Prior, exported: Path) -> None:
    guide, f = small_guide(), small_guide(1)
    runtime = OnnxRuntime(exported, prior, guide, RECIPE)
    assert isinstance(runtime, Runtime)
    x0 = pictures(3, seed=8)
    targets = [(int(c) + 1) % 3 for c in f(x0).argmax(dim=1)]
    fast, eager = (
        counterfactuals(prior, f, guide, x0, targets, RECIPE, [1, 2, 3], runtime=one) for one in (runtime, None)
    )
    for a, b in zip(fast, eager, strict=True):
        assert a.flipped == b.flipped
        torch.testing.assert_close(a.images, b.images, rtol=0, atol=1e-3)


def started(prior: Prior, f: nn.Module, n: int) -> tuple[Originals, Tensor, Tensor]:
    """(originals, eps, m_excl) of a pass over n pictures."""
    x0 = pictures(n, seed=8)
    originals = Originals(x0, prior.encode(x0), (f(x0).argmax(dim=1) + 1) % 3, None)
    return originals, draw_noise(range(n), 1, originals.z0)[:, 0], torch.ones_like(x0[:, :1])


def test_threads_walk_shares_of_a_pass_to_the_same_end(prior: Prior, exported: Path) -> None:
    """An odd batch, margins that end some samples' guidance early, and a caller that watches from its own thread."""
    guide, f = small_guide(), small_guide(1)
    runtime = OnnxRuntime(exported, prior, guide, RECIPE, threads=2)
    assert isinstance(runtime, WalkingRuntime)
    start = started(prior, f, 3)
    seen: list[tuple[int, threading.Thread]] = []
    shared = runtime.trajectory(
        *start, RECIPE, margin=-0.05, watch=lambda step: seen.append((step, threading.current_thread()))
    )
    with torch.no_grad():
        whole = trajectory(OnnxRuntime(exported, prior, guide, RECIPE, threads=1), *start, RECIPE, margin=-0.05)
    assert seen == [(step, threading.current_thread()) for step in range(runtime.path.length)]
    assert torch.equal(shared.guided_steps, whole.guided_steps) and torch.equal(shared.kept, whole.kept)
    torch.testing.assert_close(shared.z, whole.z, rtol=1e-5, atol=1e-5)
    assert not shared.z.requires_grad


def test_cancelling_a_shared_pass_ends_every_share(prior: Prior, exported: Path) -> None:
    runtime = OnnxRuntime(exported, prior, small_guide(), RECIPE, threads=2)
    before = torch.get_num_threads()

    def cancel(step: int) -> None:
        raise Cancelled("The run was cancelled.")

    with pytest.raises(Cancelled):
        runtime.trajectory(*started(prior, small_guide(1), 2), RECIPE, watch=cancel)
    assert torch.get_num_threads() == before
    assert runtime.trajectory(*started(prior, small_guide(1), 2), RECIPE).z.shape[0] == 2


@pytest.mark.parametrize(
    ("recipe", "vae", "names"),
    [(RECIPE, "kl", ("guidance", "velocity")), (RECIPE.changed(loss="target_logit"), "tiny", ("guidance",))],
)
def test_group_norm_attention_and_other_losses(
    tmp_path: Path, recipe: Recipe, vae: str, names: tuple[str, ...]
) -> None:
    """A KL autoencoder's decoder has all that a large one has; the network is a U-Net with integer timesteps."""
    torch.manual_seed(0)
    folder = save_ldm(tmp_path / "ldm") if vae == "tiny" else None
    if folder is None:
        parts = {"vae": kl_vae(), "unet": unet(), "scheduler": DDIMScheduler(clip_sample=False)}
        folder = save_folder(tmp_path / "kl", **parts)
    made = contracts(load_prior(folder), Sides(), recipe, 16, 16)
    for name in names:
        file = tmp_path / f"{name}.onnx"
        write_graph(made[name], traced(made[name], None), file, None)
        figures = compare_graph(made[name], in_session(made[name], open_session(file.read_bytes())), made[name], 3, 1.0)
        assert all(worst.error < 1e-5 and worst.cosine > 0.99999 for worst in figures.values()), figures


def test_half_precision_is_written_into_the_graph(prior: Prior, halved: Path) -> None:
    manifest = read_manifest(halved)
    assert [graph.largest_batch for graph in manifest.graphs["guidance"]] == [3]
    assert manifest.parity["graphs"]["guidance-3"]["gradient"]["cosine"] >= 0.999
    weights = onnx.load(halved / "decoder-3.onnx", load_external_data=False).graph.initializer
    assert {w.data_type for w in weights if len(w.dims) == 4} == {onnx.TensorProto.FLOAT16}
    # Two samples run on the graph for three, and padding changes neither.
    runtime = OnnxRuntime(halved, prior, small_guide(), RECIPE)
    z, y = torch.randn(3, 4, 8, 8), torch.tensor([0, 1, 2])
    for whole, part in zip(runtime.guidance(z, y), runtime.guidance(z[:2], y[:2]), strict=True):
        torch.testing.assert_close(whole[:2], part, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match=r"batch of 4 is outside .* 1 to 3"):
        runtime.decode(torch.randn(4, 4, 8, 8))
    runtime.decode(z)


def test_the_same_models_give_the_same_files(prior: Prior, exported: Path, tmp_path: Path) -> None:
    guidance = contracts(prior, small_guide(), RECIPE, *SIZE)["guidance"]
    write_graph(guidance, traced(guidance, None), tmp_path / "again.onnx", None)
    assert sha256(tmp_path / "again.onnx") == sha256(exported / "guidance.onnx")


def test_large_weights_lie_beside_the_graph(prior: Prior, halved: Path, tmp_path: Path) -> None:
    assert (halved / "velocity-3.onnx.data").is_file()
    runtime = OnnxRuntime(halved, prior, small_guide(), RECIPE)
    z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(runtime.decode(z), prior.decode(z), rtol=0.02, atol=0.005)
    spoilt = Path(shutil.copytree(halved, tmp_path / "spoilt"))
    content = bytearray((spoilt / "velocity-3.onnx.data").read_bytes())
    content[len(content) // 2] ^= 1
    (spoilt / "velocity-3.onnx.data").write_bytes(content)
    with pytest.raises(WeightsError, match=r"velocity-3\.onnx\.data is cut short or altered"):
        OnnxRuntime(spoilt, prior, small_guide(), RECIPE)


@pytest.mark.parametrize("spoil", ["cut", "bit", "missing", "manifest", "no manifest", "version", "outside"])
def test_an_altered_folder_is_refused(prior: Prior, copied: Path, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, manifest = copied / "guidance.onnx", copied / MANIFEST
    content = bytearray(graph.read_bytes())
    words = "guidance.onnx is cut short or altered"
    if spoil == "cut":
        graph.write_bytes(content[:-100])
    elif spoil == "bit":
        content[len(content) // 2] ^= 1
        graph.write_bytes(content)
    elif spoil == "missing":
        graph.unlink()
        words = "guidance.onnx is missing"
    elif spoil == "manifest":
        manifest.write_text(manifest.read_text().replace('"temperature": 2.0', '"temperature": 1.0'))
        words = "was altered after the export"
    elif spoil == "no manifest":
        manifest.unlink()
        words = "holds no exported graphs"
    elif spoil == "version":
        reseal(manifest, pfungst="0.0.1")
        words = r"was exported by pfungst 0\.0\.1"
    else:
        text = manifest.read_text().replace('"guidance.onnx"', '"../guidance.onnx"')
        manifest.write_text(text)
        words = "cannot be read as a manifest"
    with pytest.raises(WeightsError, match=words):
        OnnxRuntime(copied, prior, small_guide(), RECIPE)


def reseal(file: Path, **changes: object) -> None:
    """A manifest with other content and a digest that fits."""
    old = Manifest.model_validate_json(file.read_bytes())
    file.write_text(old.model_copy(update=changes).sealed().model_dump_json())


def test_graphs_of_other_models_are_refused(exported: Path, prior: Prior, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="another guide"):
        OnnxRuntime(exported, prior, small_guide(5), RECIPE)
    with pytest.raises(WeightsError, match="another temperature"):
        OnnxRuntime(exported, prior, small_guide(), RECIPE.changed(temperature=1.0))
    torch.manual_seed(9)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    other = save_folder(tmp_path / "other", vae=kl_vae(), transformer=transformer(), scheduler=scheduler)
    with pytest.raises(WeightsError, match="another prior"):
        OnnxRuntime(exported, load_prior(other), small_guide(), RECIPE)
    # The settings that no graph depends on are free.
    OnnxRuntime(exported, prior, small_guide(), RECIPE.changed(steps=9, eta=0.1))


def test_a_missed_threshold_writes_nothing(prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.parity, "LARGEST_ERROR", 0.0)
    with pytest.raises(ParityError, match="differs from torch"):
        write_artifact(prior, small_guide(), RECIPE, tmp_path / "out", size=SIZE, batches=Batches.parse("2"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_somebody_elses_is_left_alone(prior: Prior, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("five years of work")
    with pytest.raises(InputError, match="no exported folder"):
        write_artifact(prior, small_guide(), RECIPE, tmp_path, size=SIZE, batches=Batches.parse("2"))
    assert (tmp_path / "thesis.txt").read_text() == "five years of work"


def test_what_cannot_be_exported_is_said(prior: Prior) -> None:
    with pytest.raises(RecipeError, match="'smoothgrad' cannot be exported"):
        contracts(prior, small_guide(), RECIPE.changed(gradient="smoothgrad"), *SIZE)
    with pytest.raises(RecipeError, match="precision 'int8' is unknown"):
        contracts(prior, small_guide(), RECIPE, *SIZE, "int8")
    with pytest.raises(ModelError, match="torch module"):
        contracts(prior, lambda x: x, RECIPE, *SIZE)

    class Sorting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x.mean(1))[:, :3]

    with pytest.raises(UnsupportedOperator):
        made = contracts(prior, Sorting(), RECIPE, *SIZE)["guidance"]
        write_graph(made, traced(made, 2), Path("never.onnx"), 2)
    assert not Path("never.onnx").exists()


@pytest.mark.parametrize("text", ["", "0", "x", "8-1", "2-8", "1-", "1,,2", "1000"])
def test_batches_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError, match="batch"):
        Batches.parse(text)


def test_batches() -> None:
    assert Batches.parse("8,1") == Batches((1, 8), fixed=True)
    assert Batches.parse("1-8") == Batches((8,), fixed=False)


def test_figures_are_those_of_the_worst_sample() -> None:
    b = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    a = torch.tensor([[100.0, 0.0], [1.0, 0.0]])  # 0.7 % off as a batch, orthogonal as a sample
    assert Figures.of(a, b) == Figures(error=pytest.approx(2**0.5), cosine=0.0, n=2)
    assert Figures.of(b, b) == Figures(0.0, pytest.approx(1.0), 2)
    assert Figures.of(b * float("nan"), b).cosine == -1.0
    m = torch.tensor([[True, True, False]])
    assert iou(m, m) == 1.0 and iou(m, ~m) == 0.0 and iou(m & ~m, m & ~m) == 1.0


def test_the_manifest_survives_its_own_json(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert Manifest.model_validate(json.loads(manifest.model_dump_json())) == manifest
