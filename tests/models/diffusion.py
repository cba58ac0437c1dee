"""Models of the diffusers library: what takes noise away, and autoencoders."""

import torch
from torch import nn

from tests.models.model import Model, Own

TITLE, PACKAGES = "diffusers", ("diffusers",)
BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}


def noisy(words=False, channels=3):
    """Batches of noisy pictures, times, the noise, and words to go by."""
    generator, batches = torch.Generator().manual_seed(8), []
    for _ in range(2):
        pictures = torch.randn(2, channels, 16, 16, generator=generator)
        times = torch.randint(0, 100, (2,), generator=generator)
        noise = torch.randn(2, channels, 16, 16, generator=generator)
        text = (torch.randn(2, 5, 24, generator=generator),) if words else ()
        batches.append((pictures, times, noise, *text))
    return batches


def denoised(model, pictures, times, noise, *text):
    """How far the predicted noise is from the real one."""
    output = model(pictures, times, *text).sample
    return output, nn.functional.mse_loss(output, noise)


def autoencoded(model, pictures, *_):
    """How far pictures are from what is made of their code, with the code's divergence."""
    code = model.encode(pictures).latent_dist
    output = model.decode(code.mode()).sample
    return output, nn.functional.mse_loss(output, pictures) + 1e-3 * code.kl().mean()


def named(name, call=denoised, batches=noisy, **options):
    """A model of the library."""

    def make():
        import diffusers

        return Own(getattr(diffusers, name)(**options), call)

    return Model(name, make, batches)


MODELS = (
    named(
        "UNet2DModel",
        **{"sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")},
        **{"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
        **BLOCKS,
    ),
    named(
        "UNet2DConditionModel",
        batches=lambda: noisy(words=True, channels=4),
        **{"sample_size": 16, "cross_attention_dim": 24, "attention_head_dim": 8},
        **{"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")},
        **{"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        **BLOCKS,
    ),
    named(
        "AutoencoderKL",
        autoencoded,
        **{"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 2},
        **{"down_block_types": ("DownEncoderBlock2D",) * 2},
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
)
