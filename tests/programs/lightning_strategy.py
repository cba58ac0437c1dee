"""Lightning 1.9 itself, the last one that had a strategy for IPUs in its tree."""

import torch

from tests.programs.program import PASSES, TRAINS, Environment, Program, Source

SOURCE = Source(
    title="PyTorch Lightning 1.9.5",
    repository="https://github.com/Lightning-AI/pytorch-lightning",
    commit="a020506a81a671e380872aa5e435647b549e14e6",
)
ENVIRONMENTS = {
    "default": Environment(("pytorch-lightning==1.9.5", "pytest==7.4.4", "scikit-learn"))
}


def digits(source, work):
    """Noise with random labels, in the files that Lightning's own MNIST reads."""
    folder = source / "examples/pl_ipu/data/MNIST/complete"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, rows in (("training", 8448), ("test", 512)):
        images = torch.randint(0, 256, (rows, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (rows,), generator=generator)
        torch.save((images, labels), folder / f"{name}.pt")


PROGRAMS = [
    Program(
        "tests/tests_pytorch/accelerators/test_ipu.py",
        PASSES,
        "`test_autoreport` looks for `profile.pop`, which Poplar's engine writes",
        # Six pass that are marked as expected to fail, and today's torch has a FutureWarning.
        arguments="-o xfail_strict=false -W ignore::FutureWarning",
        folder="tests/tests_pytorch",
        failures=1,
    ),
    Program(
        "examples/pl_ipu/mnist_sample.py",
        TRAINS,
        adaptation="random data",
        prepare=digits,
        variables={"PL_USE_MOCKED_MNIST": "1"},
    ),
]
