"""The tests of PopTorch Geometric, in PopTorch's repository: each compares an IPU with the CPU."""

from tests.programs.program import PASSES, Environment, Program, Source

SOURCE = Source(
    "PopTorch Geometric",
    "https://github.com/graphcore/poptorch",
    "c2a8b17762f1d7106f7bf048ff011ab4fee7685e",
)

ENVIRONMENTS = {
    "default": Environment(
        (
            *("pyg-nightly==2.4.0.dev20230613", "pandas==2.0.1", "scipy", "nbformat==5.7.3"),
            *("pytest==6.2.5", "pytest-benchmark==4.0.0", "nbconvert==7.2.9"),
            *("torch-scatter==2.1.1", "torch-sparse==0.6.17", "torch-cluster==1.6.1"),
            "torch-spline-conv==1.2.2",
        ),
        "3.8",
    )
}


def library(source, work):
    """The package, which is on no index, under the name that it is installed by."""
    (work / "poptorch_geometric").symlink_to(source / "poptorch_geometric" / "python")


def clusters(source, work):
    """The package, and a plugin of pytest that cuts graphs where METIS is not at hand."""
    library(source, work)
    (work / "without_metis.py").write_text(
        "import torch\nfrom torch_geometric.loader import ClusterData\n"
        "def cut(self, edges, count): return torch.arange(count) % self.num_parts\n"
        "ClusterData._metis = cut\n"
    )


def of(path, reason="", failures=0, arguments="", prepare=library):
    """The tests in a folder or file, on made-up molecules and papers."""
    return Program(
        path,
        PASSES,
        reason,
        arguments=f"{arguments}-p no:cacheprovider -W ignore --external-datasets-dir={{work}}",
        adaptation="random data in place of QM9 and Cora",
        prepare=prepare,
        graphs=("qm9/all", "planetoid/Cora"),
        folder="tests",
        variables={"PYTHONPATH": "{work}"},
        failures=failures,
        seconds=3600,
    )


TIES = "one expects topk to choose the first of equal numbers, as on an IPU; torch may choose any"

PROGRAMS = (
    of("tests/gnn/nn/conv"),
    of("tests/gnn/nn/norm"),
    of(
        "tests/gnn/nn",
        TIES,
        failures=1,
        arguments="--ignore=gnn/nn/conv --ignore=gnn/nn/norm ",
    ),
    of("tests/gnn/ops", TIES, failures=1),
    of(
        "tests/gnn",
        "one checks the base classes of poptorch.DataLoader; the stand-in has one more",
        failures=1,
        arguments="--ignore=gnn/nn --ignore=gnn/ops -p without_metis ",
        prepare=clusters,
    ),
    of(
        "tests/pyg_torch_scatter_test.py",
        "two read the compiler's log",
        failures=2,
    ),
)
