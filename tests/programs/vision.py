"""Graphcore's examples of computer vision: classification, detection, self-supervised learning."""

import json
import os
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from PIL import Image

from tests.programs.made_up import empty_library
from tests.programs.program import (
    OUT_OF_REACH,
    PASSES,
    RUNS,
    TRAINS,
    Environment,
    Program,
    graphcore_examples,
)

SOURCE = graphcore_examples("Graphcore's examples: vision")

_PACKAGES = (
    "torchvision==0.15.2",
    "numpy==1.23.5",
    "pytest==6.2.5",
    "setuptools<66",
    "transformers==4.18.0",
    "protobuf==3.19.4",
    "wandb==0.12.8",
    "pyyaml",
    "pillow==8.4.0",
    "attrdict==2.0.1",
    "randaugment==1.0.2",
    "simplejpeg",
    "PyTurboJPEG==1.6.3",
    "yacs==0.1.8",
    "ruamel.yaml==0.17.21",
    "scipy",
    "pycocotools==2.0.7",
    "torchinfo==1.5.4",
    "matplotlib",
    "requests==2.27.1",
    "fvcore==0.1.5.post20210727",
)
ENVIRONMENTS = {
    "default": Environment((*_PACKAGES, "timm==0.5.4"), "3.8"),
    "swin": Environment((*_PACKAGES, "timm==0.4.5"), "3.8"),
    "perceiver": Environment(
        (
            *("torchvision==0.15.2", "numpy==1.23.5", "transformers==4.20.1", "protobuf==3.19.4"),
            *("wandb==0.12.8", "datasets==2.2.0", "timm==0.5.4", "pillow==8.4.0", "scikit-learn"),
            *("optimum==1.3.0", "optimum-graphcore==0.5.0", "opencv-python-headless"),
        ),
        "3.8",
    ),
}

CNNS = "vision/cnns/pytorch"
VIT = "vision/vit/pytorch"
SWIN = "vision/swin/pytorch"
DINO = "vision/dino/pytorch"
MAE = "vision/mae/pytorch"
PERCEIVER = "preview/multimodal/perceiver_io/pytorch"
YOLO = ("vision/yolo_v4/pytorch", "preview/vision/yolo_v4/pytorch")


def cifar(folder, train, test):
    """Write CIFAR-10's files: ten colours, with noise."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 255, (10, 3, 1, 1))
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    parts = [(f"data_batch_{number}", train // 5) for number in range(1, 6)]
    for name, samples in [*parts, ("test_batch", test)]:
        labels = rng.permutation(np.arange(samples) % 10)
        images = colours[labels] + rng.normal(0, 20, (samples, 3, 32, 32))
        rows = np.clip(images, 0, 255).astype(np.uint8).reshape(samples, -1)
        # As NumPy before 2 finds it.
        text = pickle.dumps({"data": rows, "labels": labels.tolist()}, protocol=2)
        (folder / name).write_bytes(text.replace(b"numpy._core", b"numpy.core"))
    classes = {"label_names": [str(number) for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(classes))


def pictures(folder, names, size=256):
    """Write JPEG files of random colours."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        coarse = rng.integers(0, 255, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize((size, size)).save(folder / name, "JPEG")


def imagenet(folder, classes, each):
    """Write ImageNet's folders of classes, for training and validation."""
    for split in ("train", "validation"):
        for number in range(classes):
            names = [f"{index}.JPEG" for index in range(each)]
            pictures(folder / split / f"n{number:08d}", names)


def coco(folder, train=12, val=4, size=96):
    """Write COCO's pictures, labels and annotations."""
    rng = np.random.default_rng(0)
    for split, samples in (("train2017", train), ("val2017", val)):
        names = [f"{number:012d}" for number in range(1, samples + 1)]
        pictures(folder / "images" / split, [f"{name}.jpg" for name in names], size)
        (folder / "labels" / split).mkdir(parents=True)
        boxes = []
        for number, name in enumerate(names, 1):
            rows = [
                (int(rng.integers(80)), *rng.uniform(0.3, 0.7, 2), *rng.uniform(0.1, 0.5, 2))
                for _ in range(3)
            ]
            text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
            (folder / "labels" / split / f"{name}.txt").write_text(text)
            for kind, x, y, width, height in rows:
                corner = [(x - width / 2) * size, (y - height / 2) * size]
                boxes.append(
                    {
                        "id": len(boxes) + 1,
                        "image_id": number,
                        "category_id": kind + 1,
                        "iscrowd": 0,
                        "area": width * height * size * size,
                        "bbox": [*corner, width * size, height * size],
                    }
                )
        (folder / f"{split}.txt").write_text(
            "\n".join(f"./images/{split}/{name}.jpg" for name in names)
        )
        (folder / "annotations").mkdir(exist_ok=True)
        annotations = {
            "images": [
                {"id": number, "width": size, "height": size} for number, _ in enumerate(names, 1)
            ],
            "annotations": boxes,
            "categories": [{"id": number, "name": str(number)} for number in range(1, 91)],
        }
        path = folder / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(annotations))


# torchvision compares CIFAR's files with their checksums, which made-up ones can't have.
_NO_CHECKSUMS = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision.datasets.cifar":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            files = module.CIFAR10
            files.train_list = [[name, None] for name, _ in files.train_list]
            files.test_list = [[name, None] for name, _ in files.test_list]
            files.meta["md5"] = None
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def cnns(source, work, train=30, test=10):
    """Make up what the convolutional networks read, and say that it was downloaded."""
    (work / "sitecustomize.py").write_text(_NO_CHECKSUMS)
    cifar(source / CNNS / "data" / "cifar10", train, test)
    names = ("zebra", "jay", "polar_bear", "banana", "hippo", "ostrich", "pelican")
    pictures(source / CNNS / "data" / "images", [f"{name}.jpg" for name in names])
    (source / CNNS / "lockfile.lock").touch()


def vit(source, work):
    """Make up what the vision transformer reads, a checkpoint with random weights included."""
    (work / "sitecustomize.py").write_text(_NO_CHECKSUMS)
    cifar(source / VIT / "data" / "cifar10", 30, 20)
    imagenet(source / VIT / "data" / "imagenet1k", 4, 14)
    (source / VIT / "made-up").mkdir()
    weights = {"vit.embeddings.cls_token": torch.zeros(1, 1, 32)}
    torch.save(weights, source / VIT / "made-up" / "pytorch_model.bin")


def dino(source, work, each=11):
    """Make up pictures and a compiled library."""
    imagenet(source / DINO / "data" / "imagenet1k", 3, each)
    imagenet(source / DINO / "data" / "few", 3, 4)
    empty_library(source / DINO / "ema" / "build" / "exp_avg_custom_op.so")


def mae(source, work, each=8):
    """Make up pictures and a compiled library."""
    imagenet(source / MAE / "data" / "imagenet1k", 3, each)
    empty_library(source / MAE / "remap" / "remap_ops.so")


def mae_tuned(source, work):
    """Make up pictures: of training enough for an update, more to validate."""
    mae(source, work, each=3)
    names = [f"more-{index}.JPEG" for index in range(64)]
    pictures(source / MAE / "data" / "imagenet1k" / "validation" / "n00000000", names)


# Four layers; an update takes 1024 pictures, the fewest that the loader of pictures can.
_SMALL_SWIN = """
MADE_UP:
  DATA: {BATCH_SIZE: 64}
  IPU: {NUM_LOCALREPLICA: 1, GRADIENT_ACCUMULATION_STEPS: 16, IPUS: 4, LAYERS_PER_IPU: [1, 1, 1, 1]}
  PRECISION: [float, float]
  MODEL:
    TYPE: linear
    DEVICE: ipu
    SWIN: {EMBED_DIM: 16, DEPTHS: [1, 1, 1, 1], NUM_HEADS: [1, 2, 2, 4], WINDOW_SIZE: 7}
"""


def swin(source, work):
    """Make up pictures, a small configuration and a compiled library."""
    imagenet(source / SWIN / "data" / "imagenet1k", 4, 256)
    with (source / SWIN / "configs" / "configs.yaml").open("a") as file:
        file.write(_SMALL_SWIN)
    empty_library(source / SWIN / "custom_ops.so")


def swin_test(source, work):
    """Give pytest the program's options, and `make` a compiled library."""
    empty_library(source / SWIN / "custom_ops.so")
    (source / SWIN / "Makefile").write_text("all:\n")
    options = "    parser.addoption('--cfg')\n    parser.addoption('--batch-size')\n"
    (work / "made_up.py").write_text(f"def pytest_addoption(parser):\n{options}")


_CIFAR10 = """
import datasets
import numpy as np

class Coloured(datasets.GeneratorBasedBuilder):
    def _info(self):
        labels = datasets.ClassLabel(num_classes=10)
        return datasets.DatasetInfo(
            features=datasets.Features({"img": datasets.Image(), "label": labels})
        )

    def _split_generators(self, manager):
        sizes = {datasets.Split.TRAIN: 192, datasets.Split.TEST: 32}
        return [datasets.SplitGenerator(name=n, gen_kwargs={"size": s}) for n, s in sizes.items()]

    def _generate_examples(self, size):
        from PIL import Image
        rng = np.random.default_rng(0)
        for number in range(size):
            image = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            yield number, {"img": Image.fromarray(image), "label": number % 10}
"""
_ACCURACY = """
import datasets

class Accuracy(datasets.Metric):
    def _info(self):
        integer = datasets.Value("int32")
        features = datasets.Features({"predictions": integer, "references": integer})
        return datasets.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        same = [p == r for p, r in zip(predictions, references)]
        return {"accuracy": sum(same) / len(same)}
"""


def perceiver(source, work):
    """Make up the model's configuration, and the scripts of a data set and of a metric."""
    folder = source / PERCEIVER
    model = folder / "deepmind" / "vision-perceiver-conv"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "perceiver"}))
    (model / "preprocessor_config.json").write_text(json.dumps({"size": 32, "crop_size": 32}))
    for name, text in (("cifar10", _CIFAR10), ("accuracy", _ACCURACY)):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(text)


# Makes weights in the order in which the detector lists its own, and answers requests for pictures.
_DETECTION = """
import http.server, io, os, threading
import numpy as np
import torch
from PIL import Image

class Picture(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        image = np.random.default_rng(0).integers(0, 255, (480, 640, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(file.getvalue())

    def log_message(self, *arguments):
        pass

def pytest_sessionstart(session):
    server = http.server.HTTPServer(("127.0.0.1", 0), Picture)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["http_proxy"] = "http://127.0.0.1:%d" % server.server_port
    from models.yolov4_p5 import Yolov4P5
    from utils.config import get_cfg_defaults
    torch.manual_seed(0)
    config = get_cfg_defaults()
    config.model.normalization, config.model.activation = "batch", "mish"
    config.model.ipu = False
    model = Yolov4P5(config).eval()
    model.optimize_for_inference(fuse_all_layers=False)
    os.makedirs("weights", exist_ok=True)
    torch.save(model.state_dict(), "weights/yolov4-p5-sd.pt")
"""


def yolo(folder, source, work):
    """Make up pictures with boxes, and compiled libraries."""
    coco(source / folder / "data" / "coco")
    for name in ("nms", "copy_tensor"):
        empty_library(source / folder / "utils" / "custom_ops" / "build" / f"{name}_custom_op.so")
    # A package, so that no other `tests` is found before it.
    (source / folder / "tests" / "__init__.py").touch()
    (work / "made_up.py").write_text(_DETECTION)


def inside(folder, programs, environment="default"):
    """Programs that all run in one folder, to which their paths are relative."""
    variables = {
        "PYTHONPATH": os.pathsep.join(("{work}", "{source}/" + folder, "{source}/utils")),
        "WANDB_MODE": "disabled",
        "PYTORCH_APPS_DETECTION_PATH": "{source}/" + folder,
    }
    common = {"folder": folder, "variables": variables, "environment": environment}
    return [replace(one, path=f"{folder}/{one.path}", **common) for one in programs]


_RESNET = (
    "--data cifar10 --model resnet18 --precision 32.32 --optimizer sgd_combined --lr 0.1 "
    "--micro-batch-size 2 --gradient-accumulation 3 --norm-type group --norm-num-groups 32 "
    "--dataloader-worker 1 --seed 0"
)
_TRAINED_RESNET = (
    f"train/train.py {_RESNET} --epoch 2 --validation-mode none --checkpoint-output-dir made-up",
)
_CIFAR = "30 pictures in CIFAR-10's files"
_FOLDERS = "a few pictures in ImageNet's folders"
_POPRUN = "starts several processes with poprun, which comes with the Poplar SDK"

_NETWORKS = [
    Program(
        "train/train.py",
        TRAINS,
        arguments=f"{_RESNET} --epoch 1 --checkpoint-output-dir {{work}}/out",
        adaptation=_CIFAR,
        prepare=cnns,
    ),
    Program(
        "train/restore.py",
        TRAINS,
        arguments="--checkpoint-input-path made-up/resnet18_cifar10_1.pt",
        adaptation=f"{_CIFAR}; after two epochs of train.py",
        before=_TRAINED_RESNET,
        prepare=cnns,
    ),
    Program(
        "train/weight_avg.py",
        RUNS,
        arguments="--checkpoint-input-path made-up --checkpoint-output-path made-up "
        "--weight-avg-strategy mean",
        adaptation=f"{_CIFAR}; after two epochs of train.py",
        before=_TRAINED_RESNET,
        prepare=cnns,
    ),
    Program(
        "train/validate.py",
        RUNS,
        arguments="--checkpoint-input-path made-up",
        adaptation=f"{_CIFAR}; after two epochs of train.py",
        before=_TRAINED_RESNET,
        prepare=cnns,
    ),
    Program(
        "datasets/host_benchmark.py",
        RUNS,
        arguments="--data cifar10 --micro-batch-size 5 --dataloader-worker 1",
        adaptation=_CIFAR,
        prepare=cnns,
    ),
    Program(
        "inference/run_benchmark.py",
        RUNS,
        arguments="--data real --model resnet18 --pipeline-splits layer3/0 --precision 32.32 "
        "--micro-batch-size 1 --device-iterations 2 --iterations 4 --dataloader-worker 1 "
        "--random-weights",
        adaptation="7 random pictures, random weights",
        prepare=cnns,
    ),
    Program(
        "inference/run_benchmark_with_triton_server.py",
        OUT_OF_REACH,
        "builds and starts a Triton server with Graphcore's backend for IPUs",
    ),
    Program("tests/tritonserver/multi_client_test.py", OUT_OF_REACH, "needs the same server"),
    Program("tests/test_models.py", PASSES, prepare=cnns),
    Program(
        "tests/test_data.py",
        PASSES,
        "one test starts two processes with poprun, one needs a patched libjpeg-turbo",
        adaptation="10,000 pictures to test with in CIFAR-10's files, 7 others",
        prepare=partial(cnns, train=512, test=10000),
        failures=2,
        seconds=1200,
    ),
    Program(
        "tests/test_config.py",
        PASSES,
        arguments="-k mobilenet-v3-small",
        adaptation="two of its tests; the others are the same with larger models",
        prepare=cnns,
        seconds=1200,
    ),
    Program(
        "tests/test_train.py",
        PASSES,
        arguments="-k recomputation_checkpoints",
        adaptation="one of its tests; the others start the programs above, with all of CIFAR-10",
        prepare=cnns,
    ),
    Program(
        "tests/test_inference.py",
        PASSES,
        arguments="-k normlayer_efficientnet",
        adaptation="two of its tests; the others download trained weights",
        prepare=cnns,
    ),
    Program("tests/test_popdist.py", OUT_OF_REACH, _POPRUN),
]

_VIT = (
    "--hidden-size 32 --num-hidden-layers 4 --layers-per-ipu 1 1 1 1 --num-attention-heads 2 "
    "--mlp-dim 32 --micro-batch-size 1 --gradient-accumulation 7 --replication-factor 1 "
    "--warmup-steps 1 --dataloader-workers 1 --checkpoint-save-steps 1 "
)
_VIT_PRETRAIN = (
    f"--config b16_in1k_pretrain {_VIT} --epochs 0 --dataset generated --iterations 4 "
    "--representation-size 32 "
)
_VIT_FINETUNE = f"--config b16_cifar10 {_VIT} --pretrained-checkpoint made-up "
_VIT_VALIDATE = (
    f"--config b16_in1k_pretrain_valid {_VIT} --micro-batch-size 4 --gradient-accumulation 1 "
    "--device-iterations 4 --representation-size 32 --pretrained-checkpoint out/step_2"
)
_TRANSFORMERS = [
    Program(
        "pretrain.py",
        TRAINS,
        arguments=f"{_VIT_PRETRAIN} --training-steps 4 --checkpoint-output-dir {{work}}/out",
        adaptation="a small model; the program's own generated data",
        prepare=vit,
    ),
    Program(
        "pretrain.py",
        TRAINS,
        arguments=f"--config b16_in1k_pretrain_lamb {_VIT} --epochs 0 --training-steps 4 "
        "--micro-batch-size 2 --representation-size 32 --checkpoint-output-dir {work}/out",
        adaptation=f"a small model; {_FOLDERS}",
        prepare=vit,
    ),
    Program(
        "finetune.py",
        TRAINS,
        arguments=f"{_VIT_FINETUNE} --training-steps 4 --checkpoint-output-dir {{work}}/out",
        adaptation=f"a small model with random weights; {_CIFAR}",
        prepare=vit,
    ),
    Program(
        "validation.py",
        RUNS,
        arguments=_VIT_VALIDATE,
        adaptation=f"a small model, after four steps of pretrain.py; {_FOLDERS}; four device "
        "iterations, which its pipeline needs",
        before=(f"pretrain.py {_VIT_PRETRAIN} --training-steps 4 --checkpoint-output-dir out",),
        prepare=vit,
    ),
    Program(
        "test_vit.py",
        OUT_OF_REACH,
        "downloads Google's weights and COCO's pictures",
    ),
]

_WINDOWS = [
    Program(
        "train_swin.py",
        TRAINS,
        arguments="--cfg MADE_UP --data-path data/imagenet1k --num-workers 1 "
        "--checkpoint-output-dir {work}",
        adaptation=f"a small configuration in its format; {_FOLDERS}",
        prepare=swin,
        seconds=1200,
    ),
    Program(
        "validate.py",
        OUT_OF_REACH,
        "reads `args.checkpoint_output_dir`, which is not one of its arguments",
    ),
    Program(
        "swin_test.py",
        TRAINS,
        arguments="-p made_up --cfg SWIN_TINY --batch-size 1",
        adaptation="its smallest model, chosen by an option of pytest; an empty Makefile",
        prepare=swin_test,
        seconds=1800,
    ),
]

_DINO = (
    "--config vit_small_pod16 --arch vit_tiny --pipeline 12 0 "
    "--ipu_per_replica 2 --out_dim 64 "
    "--batch_size 1 --ga 11 --replica 1 --epochs 1 --warmup_epochs 0 "
    "--warmup_teacher_temp_epochs 0 --num_workers 1 --local_crops_number 1 --threads 1 "
    "--data_path data/imagenet1k/train --precision float32 --checkpoint-output-dir out"
)
_VIT_TINY = "--arch vit_tiny"
_WEIGHTS = f"{_VIT_TINY} --out_dim 64 --weights out/checkpoint.pth --output out/vit.pth"
_FEATURES = (
    f"{_VIT_TINY} --weights out/vit.pth --batch_size 2 --replic 1 --di 2 --num_workers 1 "
    "--data_path data/imagenet1k/{split} --output out/{split}.pth"
)
_KNN = "--train out/train.pth --validation out/validation.pth"
_AFTER_DINO = (
    f"{_FOLDERS}; after one update of train_ipu.py and the steps that its page lists before this"
)
_DINO_STEPS = (
    f"train_ipu.py {_DINO}".replace("imagenet1k", "few"),
    f"script/extract_weights.py {_WEIGHTS}",
    f"script/extract_feature.py {_FEATURES.format(split='train')}",
    f"script/extract_feature.py {_FEATURES.format(split='validation')}",
)
_SELF_DISTILLED = [
    Program(
        "train_ipu.py",
        TRAINS,
        arguments=_DINO,
        adaptation=f"{_FOLDERS}; an empty library in place of its compiled operator",
        prepare=dino,
        seconds=1200,
    ),
    Program(
        "script/extract_weights.py",
        RUNS,
        arguments=_WEIGHTS,
        adaptation=_AFTER_DINO,
        before=_DINO_STEPS[:1],
        prepare=dino,
    ),
    Program(
        "script/extract_feature.py",
        RUNS,
        arguments=_FEATURES.format(split="train"),
        adaptation=_AFTER_DINO,
        before=_DINO_STEPS[:2],
        prepare=dino,
    ),
    Program(
        "script/knn_accuracy.py",
        RUNS,
        arguments=_KNN,
        adaptation=_AFTER_DINO,
        before=_DINO_STEPS,
        prepare=partial(dino, each=50),
    ),
    Program(
        "script/linear_train.py",
        TRAINS,
        arguments=f"{_VIT_TINY} --pretrained_weights out/checkpoint.pth --epochs 1 "
        "--batch_size 1 --data_path data/imagenet1k --num_workers 1 --output out",
        adaptation=_AFTER_DINO,
        before=_DINO_STEPS[:1],
        prepare=dino,
    ),
    Program(
        "tests/test_dino.py",
        PASSES,
        arguments="--noconftest -k alignment",
        adaptation="an empty library in place of its compiled operator",
        prepare=dino,
        seconds=3600,
    ),
    Program(
        "tests/test_dino.py",
        TRAINS,
        arguments="--noconftest -k dino_model",
        adaptation="its other test, stopped after three of 50 updates",
        prepare=dino,
        seconds=3600,
    ),
    Program(
        "ema/test_ema.py",
        OUT_OF_REACH,
        "builds a PopART model with popart.Builder, which comes with the Poplar SDK",
    ),
]

_MAE_FINETUNE = (
    "--config vit_base_finetune --batch_size 1 --gradient_accumulation_count 8 --replica 1 "
    "--epochs 1 --num_workers 1 --data_path data/imagenet1k --nb_classes 10 "
    "--rebatched_worker_size 8"
)
_MASKED = [
    Program(
        "main_pretrain.py",
        TRAINS,
        arguments="--config vit_base_pod16 --model mae_vit_align_patch16 --pipeline 3 2 --ipus 2 "
        "--batch_size 1 --gradient_accumulation_count 6 --replica 1 --epochs 1 --num_workers 1 "
        "--data_path data/imagenet1k --output {work} --log log --warmup_epochs 0 --loss_scale 128",
        adaptation=_FOLDERS,
        prepare=mae,
        seconds=1200,
    ),
    Program(
        "tests/test_mae.py",
        PASSES,
        arguments="--noconftest -k alignment",
        adaptation="an empty library in place of its compiled operator",
        prepare=mae,
        seconds=3600,
    ),
    Program(
        "tests/test_mae.py",
        TRAINS,
        arguments="--noconftest -k mae_model",
        adaptation="its other test, stopped after three of 100 updates",
        prepare=mae,
        seconds=3600,
    ),
    Program(
        "main_finetune.py",
        TRAINS,
        arguments=f"{_MAE_FINETUNE} --output {{work}}",
        adaptation=_FOLDERS,
        prepare=mae,
        seconds=1800,
    ),
    Program(
        "finetune_validate.py",
        RUNS,
        arguments=f"{_MAE_FINETUNE} --device_iterations 4 --resume out/checkpoint.pth --output out",
        adaptation=f"{_FOLDERS}; after main_finetune.py",
        before=(f"main_finetune.py {_MAE_FINETUNE} --output out",),
        prepare=mae_tuned,
        seconds=1800,
    ),
]

_DETECT = "--config configs/inference-yolov4p5.yaml --data {source}/%s/data --num-workers 1"


def _detection_tests(folder, name):
    return Program(
        f"tests/{name}_test.py",
        PASSES,
        arguments="--noconftest -p made_up",
        adaptation="random weights; random pictures from a server on this machine",
        prepare=partial(yolo, folder),
        seconds=1200,
    )


def detection(folder):
    """The programs of the detector, which is published twice."""
    light = ("autoanchors", "backbone", "fusing", "head", "label_preprocessing", "neck")
    names = (*light, "preprocessing", "tools", "nms")
    return [
        Program(
            "run.py",
            RUNS,
            arguments=f"{_DETECT % folder} --image-size 128 --pre-nms-topk-k 500 "
            "--nms-max-detections 20 --class-conf-threshold 0.01",
            adaptation="4 pictures in COCO's files, random weights; empty libraries in place of "
            "its compiled operators",
            prepare=partial(yolo, folder),
        ),
        Program(
            "utils/autoanchors_nlabels_sweep.py",
            RUNS,
            arguments=f"--data {{source}}/{folder}/data/",
            adaptation="pictures in COCO's files",
            prepare=partial(yolo, folder),
        ),
        *(_detection_tests(folder, name) for name in names),
        replace(
            _detection_tests(folder, "model"),
            reason="four of its five tests are marked as skipped",
        ),
        replace(
            _detection_tests(folder, "loss"),
            reason="of three tests, one compares with predictions that are a download, and one is "
            "marked as skipped",
            failures=1,
        ),
    ]


_NOTEBOOK = [
    Program(
        "tests/test_yolo_notebook.py",
        OUT_OF_REACH,
        "its notebook downloads the trained weights",
    ),
]
_DETECTION_TRAINING = [
    Program(
        "run.py",
        OUT_OF_REACH,
        "its configuration has no training.device_iterations, which it reads; its loss reads the "
        "value of a tensor to make a shape, which PopTorch 3.4 refuses, too",
        arguments="--config configs/training-yolov4p5.yaml",
    ),
]
_PERCEIVER = [
    Program(
        "run_ipu.py",
        TRAINS,
        arguments="--config configs/cifar10_classification.json --pod_type pod4 --fp32 True "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_train_epochs 3 "
        "--dataloader_num_workers 1 --dataloader_mode async --profile_dir made-up",
        adaptation="substitutes for data, metric and configuration in the folders that it loads; "
        "optimum-graphcore 0.5.0, because the version of July 2022 that it names needs "
        "poptorch.autocast, which PopTorch 3.4 no longer has",
        prepare=perceiver,
    ),
    Program("run_cpu.py", OUT_OF_REACH, "uses no IPU, and downloads the same data"),
    Program(
        "run_multimodal_inference.py",
        OUT_OF_REACH,
        "downloads a film and weights, and extracts the sound with ffmpeg",
    ),
]

PROGRAMS = [
    *inside(CNNS, _NETWORKS),
    *inside(VIT, _TRANSFORMERS),
    *inside(SWIN, _WINDOWS, "swin"),
    *inside(DINO, _SELF_DISTILLED),
    *inside(MAE, _MASKED),
    *inside(YOLO[0], [*detection(YOLO[0]), *_NOTEBOOK]),
    *inside(YOLO[1], [*detection(YOLO[1]), *_DETECTION_TRAINING]),
    *inside(PERCEIVER, _PERCEIVER, "perceiver"),
]
