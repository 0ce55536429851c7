"""Train the demo pipeline: a tiny FluxPipeline that writes digits, from scikit-learn's own data.

python examples/digits/train.py --output DIR
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from digit_data import SIZE, varied_pictures
from digit_prompts import training_prompts
from digit_text import (
    make_clip_encoder,
    make_clip_tokenizer,
    make_t5_encoder,
    make_t5_tokenizer,
    pooled_embeddings,
    token_embeddings,
)
from torch import nn
from torch.nn import functional as F

# (text length, pictures a step, share of the steps). Padding is not masked in Flux, so a model that
# only saw 16 text tokens fails at the pipeline's own default of 512.
TEXT_LENGTHS = ((16, 64, 0.9), (64, 24, 0.05), (512, 4, 0.05))
EMPTY_PROMPT_SHARE = 0.1  # so that guidance has something to compare with
GUIDANCE = 2.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line can change."""

    seed: int
    vae_steps: int
    steps: int
    guided_steps: int
    variants: int


def make_vae() -> AutoencoderKL:
    """32 x 32 pictures to 8 x 8 latents of 4 channels; 242 thousand parameters."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_transformer() -> FluxTransformer2DModel:
    """Three heads of 32, two double and three single blocks; 1.16 million parameters."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def rising_and_falling(step: int, steps: int, warm_up: int = 100) -> float:
    """Learning rate factor: linear up, then half a cosine down to a hundredth."""
    if step < warm_up:
        return (step + 1) / warm_up
    part = torch.tensor((step - warm_up) / max(1, steps - warm_up))
    return float(0.01 + 0.99 * 0.5 * (1 + torch.cos(part * torch.pi)))


def optimise(
    name: str, module: nn.Module, steps: int, rate: float, loss_of: Callable[[], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run AdamW on `loss_of` and return a moving average of the module's weights."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.99)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rising_and_falling(i, steps))
    average = {key: value.detach().clone() for key, value in module.state_dict().items()}
    started, seen = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        keep = min(0.998, (1 + step) / (10 + step))
        with torch.no_grad():
            for key, value in module.state_dict().items():
                average[key].lerp_(value, 1 - keep)
        seen += loss.item()
        if step % 100 == 0 or step == steps:
            passed = time.perf_counter() - started
            mean = seen / (step % 100 or 100)
            print(f"{name} {step}/{steps}  loss {mean:.4f}  {passed:.0f} s", flush=True)
            seen = 0.0
    return average


def train_vae(vae: AutoencoderKL, pictures: torch.Tensor, steps: int) -> None:
    """Fit the VAE on pictures (n, 1, 32, 32) from -1 to 1."""
    vae.train().to(memory_format=torch.channels_last)

    def loss_of() -> torch.Tensor:
        chosen = torch.randint(len(pictures), (32,))
        batch = pictures[chosen].expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(batch).latent_dist
        again = vae.decode(posterior.sample()).sample
        divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return F.l1_loss(again, batch) + F.mse_loss(again, batch) + 4e-3 * divergence

    vae.load_state_dict(optimise("vae", vae, steps, 3e-3, loss_of))
    vae.eval().to(memory_format=torch.contiguous_format)


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Pictures to normalised, packed latents (n, 16, 16); sets the VAE's scale and shift."""
    coloured = (part.expand(-1, 3, -1, -1) for part in pictures.split(256))
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in coloured])
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 6), scaling_factor=round(scale, 6))
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    count, channels, height, width = latents.shape
    return FluxPipeline._pack_latents(latents, count, channels, height, width)


class Prompts:
    """Draws prompts for labels and embeds them as FluxPipeline does."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        texts = [training_prompts(digit) for digit in range(10)]
        self._starts = torch.tensor([0, *(len(part) for part in texts)]).cumsum(0)
        self._texts = [text for part in texts for text in part] + [""]
        self.tokenizer = make_clip_tokenizer(self._texts)
        self.tokenizer_2 = make_t5_tokenizer(self._texts)
        self.text_encoder = make_clip_encoder(self.tokenizer)
        self.text_encoder_2 = make_t5_encoder(self.tokenizer_2)
        lower = [text.lower() for text in self._texts]  # CLIP's tokenizer does the same
        distinct = {text: index for index, text in enumerate(dict.fromkeys(lower))}
        pooled = pooled_embeddings(self.tokenizer, self.text_encoder, list(distinct))
        self._pooled = pooled[torch.tensor([distinct[text] for text in lower])]
        shortest = TEXT_LENGTHS[0][0]
        self._short = token_embeddings(self.tokenizer_2, self.text_encoder_2, self._texts, shortest)

    def draw(self, labels: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of one random prompt a label: (n, length, 32) and pooled (n, 32)."""
        first, last = self._starts[labels], self._starts[labels + 1]
        part = torch.rand(len(labels), generator=self._random)
        chosen = first + (part * (last - first)).long()
        empty = torch.rand(len(labels), generator=self._random) < EMPTY_PROMPT_SHARE
        chosen = torch.where(empty, len(self._texts) - 1, chosen)
        return self._embed(chosen, length)

    def empty(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of `count` empty prompts, of the same shapes."""
        words, pooled = self._embed(torch.tensor([len(self._texts) - 1]), length)
        return words.expand(count, -1, -1), pooled.expand(count, -1)

    def _embed(self, chosen: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length == self._short.shape[1]:
            return self._short[chosen], self._pooled[chosen]
        texts = [self._texts[index] for index in chosen.tolist()]
        words = token_embeddings(self.tokenizer_2, self.text_encoder_2, texts, length)
        return words, self._pooled[chosen]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Points between latents and noise, with prompts: all tensors have n entries."""

    noisy: torch.Tensor
    at: torch.Tensor
    words: torch.Tensor
    pooled: torch.Tensor
    velocity: torch.Tensor


class Batches:
    """Draws batches from latents (n, 16, 16) and their labels (n,)."""

    def __init__(self, latents: torch.Tensor, labels: torch.Tensor, prompts: Prompts) -> None:
        self._latents, self._labels, self.prompts = latents, labels, prompts
        self._shares = torch.tensor([share for _, _, share in TEXT_LENGTHS])

    def draw(self) -> Batch:
        """A new batch at one of TEXT_LENGTHS."""
        length, count, _ = TEXT_LENGTHS[int(torch.multinomial(self._shares, 1))]
        chosen = torch.randint(len(self._latents), (count,))
        clean = self._latents[chosen]
        noise = torch.randn_like(clean)
        # Mostly the middle, where the picture is decided, but never none at the ends.
        middle, even = torch.sigmoid(torch.randn(count)), torch.rand(count)
        at = torch.where(torch.rand(count) < 0.6, middle, even)
        words, pooled = self.prompts.draw(self._labels[chosen], length)
        return Batch(
            noisy=torch.lerp(clean, noise, at[:, None, None]),
            at=at,
            words=words,
            pooled=pooled,
            velocity=noise - clean,
        )


def predict(
    transformer: FluxTransformer2DModel,
    batch: Batch,
    words: torch.Tensor | None = None,
    pooled: torch.Tensor | None = None,
) -> torch.Tensor:
    """The transformer's output for a batch: (n, 16, 16); `words` and `pooled` replace its own."""
    words = batch.words if words is None else words
    side = SIZE // 8
    output: torch.Tensor = transformer(
        hidden_states=batch.noisy,
        timestep=batch.at,
        pooled_projections=batch.pooled if pooled is None else pooled,
        encoder_hidden_states=words,
        txt_ids=torch.zeros(words.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return output


def train_transformer(transformer: FluxTransformer2DModel, batches: Batches, steps: int) -> None:
    """Fit the transformer to predict noise minus latents at a random point between the two."""

    def loss_of() -> torch.Tensor:
        batch = batches.draw()
        return F.mse_loss(predict(transformer, batch), batch.velocity)

    transformer.train()
    transformer.load_state_dict(optimise("transformer", transformer, steps, 2e-3, loss_of))
    transformer.eval()


def distil_guidance(transformer: FluxTransformer2DModel, batches: Batches, steps: int) -> None:
    """Teach the transformer to give with one call what guidance gives with two.

    Digits become clearer and a little more alike, without `true_cfg_scale`; Flux's published
    models are made in the same way.
    """
    teacher = copy.deepcopy(transformer).requires_grad_(False)

    def loss_of() -> torch.Tensor:
        batch = batches.draw()
        with torch.no_grad():
            words, pooled = batches.prompts.empty(len(batch.at), batch.words.shape[1])
            without = predict(teacher, batch, words, pooled)
            target = torch.lerp(without, predict(teacher, batch), GUIDANCE)
        return F.mse_loss(predict(transformer, batch), target)

    transformer.train()
    transformer.load_state_dict(optimise("guidance", transformer, steps, 5e-4, loss_of))
    transformer.eval()


def save(pipe: FluxPipeline, output: Path) -> None:
    """Write the pipeline: safetensors only, no local paths, readable by everybody."""
    pipe.save_pretrained(output, safe_serialization=True)
    for path in sorted(output.rglob("*")):
        if path.is_dir():
            continue
        path.chmod(0o644)
        if path.suffix != ".json":
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("_name_or_path", None)
        if path.name == "model_index.json":
            # The name that transformers 4 and 5 both know for a tokenizer.json.
            content["tokenizer_2"] = ["transformers", "T5TokenizerFast"]
        # A tokenizer's tables, one number a line, would be most of the folder's lines.
        indent = None if path.name == "tokenizer.json" else 2
        text = json.dumps(content, indent=indent, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def train(settings: Settings, output: Path) -> None:
    """Train everything and write the pipeline to `output`."""
    started = time.perf_counter()
    torch.manual_seed(settings.seed)
    drawn, digits = varied_pictures(settings.variants, settings.seed)
    pictures, labels = torch.from_numpy(drawn)[:, None] * 2 - 1, torch.from_numpy(digits)
    prompts = Prompts(settings.seed)
    vae, transformer = make_vae(), make_transformer()
    train_vae(vae, pictures, settings.vae_steps)
    batches = Batches(encode(vae, pictures), labels, prompts)
    train_transformer(transformer, batches, settings.steps)
    distil_guidance(transformer, batches, settings.guided_steps)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=prompts.text_encoder,
        tokenizer=prompts.tokenizer,
        text_encoder_2=prompts.text_encoder_2,
        tokenizer_2=prompts.tokenizer_2,
        transformer=transformer,
    )
    save(pipe, output)
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size_bytes / 1e6:.2f} MB, {time.perf_counter() - started:.0f} s in all")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4600)
    parser.add_argument("--guided-steps", type=int, default=400)
    parser.add_argument("--variants", type=int, default=12, help="poses of each original")
    options = vars(parser.parse_args())
    output = options.pop("output")
    train(Settings(**options), output)


if __name__ == "__main__":
    main()
