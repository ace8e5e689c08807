"""The converter against networks in the CompVis layout, written out here independently and run side by side."""

import math
import pathlib

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from engine.compvis import convert_compvis, null_embedding
from engine.errors import PriorError, WeightsError
from engine.path import Diffusion
from engine.prior import load_prior

WIDTH, CONTEXT, LEVELS, LAYERS = 32, 12, (1, 2), 1


class ResBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, c_time: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, c_in), nn.SiLU(), nn.Conv2d(c_in, c_out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(c_time, c_out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, c_out), nn.SiLU(), nn.Identity(), nn.Conv2d(c_out, c_out, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(time)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(width, width, bias=False), nn.Linear(context, width, bias=False)
        self.to_v, self.to_out = nn.Linear(context, width, bias=False), nn.Sequential(nn.Linear(width, width))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weights = (self.to_q(x) @ self.to_k(context).transpose(1, 2) / math.sqrt(x.shape[2])).softmax(-1)
        return self.to_out(weights @ self.to_v(context))


class GEGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 8 * width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(width), nn.Identity(), nn.Linear(4 * width, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(width, width), Attention(width, CONTEXT)
        self.ff = FeedForward(width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn1(h, h)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff.net(self.norm3(x))


class SpatialTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(width)])

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        h = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        h = self.transformer_blocks[0](h, context).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(h)


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return self.op(x)


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Plain(nn.Conv2d):
    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class UNet(nn.Module):
    """A U-Net in the CompVis layout: transformers in the second of two levels, one block each."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        c, time = WIDTH, 4 * WIDTH
        self.time_embed = nn.Sequential(nn.Linear(c, time), nn.SiLU(), nn.Linear(time, time))
        self.input_blocks = nn.ModuleList(
            [
                nn.ModuleList([Plain(channels, c, 3, padding=1)]),
                nn.ModuleList([ResBlock(c, c, time)]),
                nn.ModuleList([Down(c)]),
                nn.ModuleList([ResBlock(c, 2 * c, time), SpatialTransformer(2 * c)]),
            ]
        )
        self.middle_block = nn.ModuleList(
            [ResBlock(2 * c, 2 * c, time), SpatialTransformer(2 * c), ResBlock(2 * c, 2 * c, time)]
        )
        self.output_blocks = nn.ModuleList(
            [
                nn.ModuleList([ResBlock(4 * c, 2 * c, time), SpatialTransformer(2 * c)]),
                nn.ModuleList([ResBlock(3 * c, 2 * c, time), SpatialTransformer(2 * c), Up(2 * c)]),
                nn.ModuleList([ResBlock(3 * c, c, time)]),
                nn.ModuleList([ResBlock(2 * c, c, time)]),
            ]
        )
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, channels, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = t[:, None].float() * rates
        time = self.time_embed(torch.cat([angles.cos(), angles.sin()], dim=1))
        skips = []
        for block in self.input_blocks:
            for layer in block:
                x = layer(x, time, context)
            skips.append(x)
        for layer in self.middle_block:
            x = layer(x, time, context)
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)
            for layer in block:
                x = layer(x, time, context)
        return self.out(x)


class StageBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, c_in, eps=1e-6), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, c_out, eps=1e-6), nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class StageAttention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, c, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = (q @ k.transpose(1, 2) / math.sqrt(x.shape[1])).softmax(-1) @ v
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


def stage_mid(c: int) -> nn.ModuleDict:
    return nn.ModuleDict({"block_1": StageBlock(c, c), "attn_1": StageAttention(c), "block_2": StageBlock(c, c)})


def level(blocks: list[nn.Module], **resize: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"block": nn.ModuleList(blocks), **resize})


class FirstStage(nn.Module):
    """A VQ autoencoder in the CompVis layout with one halving and one block per level."""

    def __init__(self) -> None:
        super().__init__()
        c, z = WIDTH, 3
        conv = nn.ModuleDict
        self.encoder = conv(
            {
                "conv_in": nn.Conv2d(3, c, 3, padding=1),
                "down": nn.ModuleList(
                    [
                        level([StageBlock(c, c)], downsample=conv({"conv": nn.Conv2d(c, c, 3, stride=2)})),
                        level([StageBlock(c, 2 * c)]),
                    ]
                ),
                "mid": stage_mid(2 * c),
                "norm_out": nn.GroupNorm(32, 2 * c, eps=1e-6),
                "conv_out": nn.Conv2d(2 * c, z, 3, padding=1),
            }
        )
        self.decoder = conv(
            {
                "conv_in": nn.Conv2d(z, 2 * c, 3, padding=1),
                "mid": stage_mid(2 * c),
                "up": nn.ModuleList(
                    [
                        level([StageBlock(2 * c, c), StageBlock(c, c)]),
                        level(
                            [StageBlock(2 * c, 2 * c), StageBlock(2 * c, 2 * c)],
                            upsample=conv({"conv": nn.Conv2d(2 * c, 2 * c, 3, padding=1)}),
                        ),
                    ]
                ),
                "norm_out": nn.GroupNorm(32, c, eps=1e-6),
                "conv_out": nn.Conv2d(c, 3, 3, padding=1),
            }
        )
        self.quantize = conv({"embedding": nn.Embedding(16, z)})
        self.quant_conv, self.post_quant_conv = nn.Conv2d(z, z, 1), nn.Conv2d(z, z, 1)

    def encode(self, x: Tensor) -> Tensor:
        e = self.encoder
        h = e["down"][0]["block"][0](e["conv_in"](x))
        h = e["down"][0]["downsample"]["conv"](F.pad(h, (0, 1, 0, 1)))
        h = e["down"][1]["block"][0](h)
        for name in ("block_1", "attn_1", "block_2"):
            h = e["mid"][name](h)
        return self.quant_conv(e["conv_out"](F.silu(e["norm_out"](h))))

    def decode(self, z: Tensor) -> Tensor:
        d, book = self.decoder, self.quantize["embedding"].weight
        flat = z.permute(0, 2, 3, 1)
        z = book[(flat[..., None, :] - book).square().sum(-1).argmin(-1)].permute(0, 3, 1, 2)
        h = d["conv_in"](self.post_quant_conv(z))
        for name in ("block_1", "attn_1", "block_2"):
            h = d["mid"][name](h)
        for number in (1, 0):
            for block in d["up"][number]["block"]:
                h = block(h)
            if number:
                h = d["up"][1]["upsample"]["conv"](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return d["conv_out"](F.silu(d["norm_out"](h)))


def clip_text() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=10, hidden_size=CONTEXT, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=6, bos_token_id=8, eos_token_id=9, pad_token_id=9, hidden_act="quick_gelu",
    )  # fmt: skip
    return CLIPTextModel(config).eval()


def under(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def text_state(text: CLIPTextModel) -> dict[str, Tensor]:
    """The encoder's weights without the prefix that some versions of transformers put before them."""
    return {name.removeprefix("text_model."): tensor for name, tensor in text.state_dict().items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, UNet, FirstStage, CLIPTextModel]:
    """A Lightning-like checkpoint file and the networks in it."""
    torch.manual_seed(3)
    unet, stage, text = UNet().eval(), FirstStage().eval(), clip_text()
    file = tmp_path_factory.mktemp("compvis") / "last.ckpt"
    state = {
        **under("model.diffusion_model.", unet),
        **under("first_stage_model.", stage),
        "first_stage_model.loss.logvar": torch.zeros(1),
        **{f"cond_stage_model.transformer.text_model.{n}": t for n, t in text_state(text).items()},
        "betas": torch.linspace(0.0015**0.5, 0.0195**0.5, 1000, dtype=torch.float64) ** 2,
        "scale_factor": torch.tensor(0.5),
    }
    torch.save({"epoch": 3, "global_step": 7, "state_dict": state}, file)
    return file, unet, stage, text


def test_the_converted_networks_compute_what_the_originals_do(made, tmp_path: pathlib.Path) -> None:
    file, unet, stage, text = made
    prior = load_prior(convert_compvis(file, tmp_path / "prior", text_tokens=6))
    images, z = torch.rand(2, 3, 16, 16), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        ids = torch.tensor([[8, 9, 9, 9, 9, 9]])
        context = text(ids, attention_mask=(torch.arange(6) < 2).long()[None]).last_hidden_state
        stored = load_file(tmp_path / "prior" / "null_embedding.safetensors")["null_embedding"]
        torch.testing.assert_close(stored, context, atol=1e-5, rtol=1e-4)
        expected = unet(z, torch.tensor([500, 500]), context.expand(2, -1, -1))
        torch.testing.assert_close(prior.predict(z, torch.tensor(500)), expected, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(prior.encode(images), 0.5 * stage.encode(2 * images - 1), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(prior.decode(z), (stage.decode(z / 0.5) + 1) / 2, atol=1e-4, rtol=1e-3)
    path = prior.path(25, 1.0, 16, 16)
    assert isinstance(path, Diffusion) and path.clip_range is None
    alphas_bar = (1 - torch.linspace(0.0015**0.5, 0.0195**0.5, 1000, dtype=torch.float64) ** 2).cumprod(0)
    torch.testing.assert_close(path.a[0].double() ** 2, alphas_bar[961], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(path.a[-1].double() ** 2, alphas_bar[0], atol=1e-5, rtol=1e-4)


def test_a_moving_average_is_preferred(made, tmp_path: pathlib.Path) -> None:
    state = torch.load(made[0], weights_only=True)["state_dict"]
    averaged = torch.full_like(state["model.diffusion_model.out.2.bias"], 0.25)
    torch.save({**state, "model_ema.diffusion_modelout2bias": averaged}, tmp_path / "ema.ckpt")
    prior = load_prior(convert_compvis(tmp_path / "ema.ckpt", tmp_path / "prior"))
    assert torch.equal(prior.network.model.conv_out.bias, averaged)  # type: ignore[union-attr]


def test_longer_texts_restart_the_positions() -> None:
    state = text_state(clip_text())
    embedding = null_embedding(state, 12)
    assert embedding is not None and embedding.shape == (1, 12, CONTEXT)
    assert null_embedding({}, 12) is None


def test_what_is_no_such_checkpoint_is_refused(made, tmp_path: pathlib.Path) -> None:
    state = torch.load(made[0], weights_only=True)["state_dict"]
    file = tmp_path / "broken.ckpt"

    def refused(error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            convert_compvis(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(WeightsError, "missing")
    file.write_bytes(made[0].read_bytes()[:5000])
    refused(WeightsError, "cannot be read")
    for part in ("model.diffusion_model", "first_stage_model"):
        torch.save({name: t for name, t in state.items() if not name.startswith(part)}, file)
        refused(PriorError, part)
    torch.save({name: t for name, t in state.items() if name != "model.diffusion_model.out.0.bias"}, file)
    refused(WeightsError, "unet")
    torch.save([1, 2], file)
    refused(WeightsError, "state dict")


class Canary:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("canary"),)


def test_code_in_a_checkpoint_is_never_run(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "callbacks": Canary()}, "evil.ckpt")
    with pytest.raises(WeightsError, match="Python objects"):
        convert_compvis("evil.ckpt", "out")
    assert not pathlib.Path("canary").exists()
