"""Models of torchvision and timm: classification, segmentation, detection, video."""

import functools

import torch
from torch import nn

from tests.models.model import ITSELF, Model, Own

TITLE, PACKAGES = "torchvision and timm", ("torchvision", "timm")
CLASSES = 5


def pictures(size=64, shape=(3,), count=2, target=(), samples=2):
    """Batches of pictures with classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, *shape, size, size, generator=generator),
            torch.randint(0, CLASSES, (samples, *target), generator=generator),
        )
        for _ in range(count)
    ]


def of_torchvision(name, samples=2):
    """A classifier of torchvision."""

    def make():
        import torchvision

        return getattr(torchvision.models, name)(num_classes=CLASSES)

    return Model(name, make, functools.partial(pictures, samples=samples), "cross_entropy")


def of_timm(name, samples=2, **options):
    """A classifier of timm."""

    def make():
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    batches = functools.partial(pictures, samples=samples)
    return Model(f"timm `{name}`", make, batches, "cross_entropy")


def transformer():
    """A small vision transformer."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)


def swin():
    """A small shifted-window transformer."""
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=CLASSES)


def segmentation(name):
    """A segmentation model, of which the main output counts."""

    def make():
        from torchvision.models import segmentation as models

        options = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
        return Own(getattr(models, name)(**options), per_pixel)

    return Model(name, make, lambda: pictures(64, target=(64, 64)))


def per_pixel(model, x, y):
    """Classes of pixels."""
    output = model(x)["out"]
    return output, nn.functional.cross_entropy(output, y)


def video():
    """A small video model on clips."""
    from torchvision.models.video import r3d_18

    return r3d_18(num_classes=CLASSES)


def clips():
    """Batches of clips."""
    return pictures(32, (3, 4))


def boxed(masks=False):
    """Batches of pictures of several sizes, each with another number of boxes."""
    generator, batches = torch.Generator().manual_seed(2), []
    for sizes in ([(64, 80), (72, 64)], [(80, 64), (64, 64)]):
        images, targets = [], []
        for number, (height, width) in enumerate(sizes):
            corner = torch.rand(number + 1, 2, generator=generator) * 20
            boxes = torch.cat([corner, corner + 25], 1)
            target = {"boxes": boxes, "labels": torch.arange(number + 1) % 2 + 1}
            if masks:
                target["masks"] = torch.ones(number + 1, height, width, dtype=torch.uint8)
            images.append(torch.rand(3, height, width, generator=generator))
            targets.append(target)
        batches.append((images, targets))
    return batches


def detector(name, batches=boxed, within=1e-10):
    """A detector, whose losses are added."""

    def make():
        from torchvision.models import detection as models

        sizes = {} if "ssd" in name else {"min_size": 64, "max_size": 96}
        kinds = {"weights": None, "weights_backbone": None, "num_classes": 3}
        return Own(getattr(models, name)(**kinds, **sizes), added)

    why = "boxes are selected by their values"
    return Model(name, make, batches, way=ITSELF, why=why, within=within)


def added(model, images, targets):
    """The losses of a detector, added."""
    losses = model(images, targets)
    return {name: loss.detach() for name, loss in losses.items()}, sum(losses.values())


MODELS = (
    *(
        of_torchvision(name)
        for name in (
            *("efficientnet_b0", "mnasnet0_5", "mobilenet_v3_small", "resnet18", "squeezenet1_1"),
        )
    ),
    # Normalisations over few numbers enlarge what rounding leaves.
    of_torchvision("mobilenet_v2", samples=8),
    of_torchvision("regnet_y_400mf", samples=8),
    of_torchvision("shufflenet_v2_x0_5", samples=8),
    Model("VisionTransformer", transformer, lambda: pictures(32), "cross_entropy"),
    Model("SwinTransformer", swin, lambda: pictures(32), "cross_entropy"),
    segmentation("lraspp_mobilenet_v3_large"),
    segmentation("deeplabv3_mobilenet_v3_large"),
    Model("r3d_18", video, clips, "cross_entropy"),
    detector("fasterrcnn_mobilenet_v3_large_320_fpn"),
    detector("retinanet_resnet50_fpn"),
    detector("fcos_resnet50_fpn", within=1e-8),
    detector("ssdlite320_mobilenet_v3_large"),
    detector("maskrcnn_resnet50_fpn", functools.partial(boxed, masks=True)),
    of_timm("resnet10t"),
    of_timm("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.2),
    of_timm("convnext_atto"),
    of_timm("efficientnet_lite0"),
    of_timm("ghostnet_050"),
    of_timm("mixer_s32_224", img_size=64),
    of_timm("mobilenetv4_conv_small", samples=8),
    of_timm("pvt_v2_b0"),
    of_timm("repvgg_a0"),
    of_timm("edgenext_xx_small"),
)
