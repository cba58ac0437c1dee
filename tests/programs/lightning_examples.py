"""Graphcore's examples that train with Lightning 1.9."""

import numpy as np

from tests.programs.made_up import write_idx
from tests.programs.program import OUT_OF_REACH, TRAINS, Environment, Program, graphcore_examples

SOURCE = graphcore_examples("graphcore/examples with Lightning")
ENVIRONMENTS = {
    "default": Environment(
        (
            *("pytorch-lightning==1.9.5", "torchvision==0.28.0", "rich==13.3.1", "wandb"),
            *("timm==0.5.4", "PyTurboJPEG==1.6.3", "text_unidecode", "pyyaml", "tqdm"),
        )
    )
}
CNNS = "vision/cnns/pytorch-lightning"
RNN = "tutorials/simple_applications/pytorch_lightning/shakespeare-rnn"


FASHION = f"{CNNS}/code-examples/fashion-mnist"


def clothes(folder, rows):
    """A function that writes so many made-up images of FashionMNIST into this folder."""

    def prepare(source, work):
        random = np.random.RandomState(0)
        for name, count in (("train", rows), ("t10k", rows)):
            labels = random.randint(0, 10, count).astype(np.uint8)
            images = random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
            write_idx(source / folder / "FashionMNIST" / "raw", name, images, labels)

    return prepare


def text(source, work):
    """Words in an order of no meaning."""
    words = ["to be ", "or not ", "that is\n", "the question. "]
    chosen = np.random.RandomState(0).randint(0, len(words), 12_000)
    made = "".join(words[index] for index in chosen)
    (source / RNN / "shakespeare.txt").write_text(made, encoding="utf-8")


def tutorial(name, rows, adaptation="random data", **how):
    folder = f"{CNNS}/tutorials"
    path, prepare = f"{folder}/{name}.py", clothes(f"{folder}/FashionMNIST", rows)
    return Program(path, TRAINS, adaptation=adaptation, prepare=prepare, **how)


PROGRAMS = [
    Program(f"{CNNS}/tutorials/custom_losses.py", TRAINS),
    tutorial("simple_lightning_ipu", 1600),
    tutorial(
        "pipelined_ipu", 26_000, "random data; an execution is 50 updates", updates=1, seconds=1200
    ),
    tutorial(
        "ipu_strategy_and_dataloading",
        20_000,
        "random data; an execution is 300 updates",
        updates=1,
        seconds=1800,
    ),
    *(
        Program(
            f"{FASHION}/train.py",
            TRAINS,
            arguments=f"--model {model} --ipus 1 --num-epochs 1",
            adaptation="random data; on one IPU, where an execution is 250 updates; the notebooks "
            "next to it have the same code",
            prepare=clothes(f"{FASHION}/fashionmnist_data", 8000),
            updates=1,
            seconds=1200,
        )
        for model in ("ours", "torchvision")
    ),
    Program(
        f"{CNNS}/train_lightning.py",
        TRAINS,
        arguments="--config resnet50 --model resnet18 --data generated --epoch 1 "
        "--validation-mode none --replica 1 --micro-batch-size 1 --gradient-accumulation 2 "
        "--dataloader-worker 1 --precision 32.32 --recompute-mode none",
    ),
    Program(
        f"{RNN}/train.py",
        TRAINS,
        arguments="--ipus 2 --epochs 1",
        adaptation="random text; an execution is 500 updates",
        prepare=text,
        updates=1,
        seconds=1200,
    ),
    Program(
        f"{CNNS}/test/smoke_test.py",
        OUT_OF_REACH,
        "its package `examples_tests` is in no package index; it starts the programs above",
    ),
    Program(
        f"{RNN}/smoke_test.py",
        OUT_OF_REACH,
        "downloads its text, and its package `examples_tests` is in no package index",
    ),
]
