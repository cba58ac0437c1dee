"""Lightning's strategy for IPUs as a package of its own, with Lightning 2.0."""

from tests.programs.program import PASSES, Environment, Program, Source

SOURCE = Source(
    title="lightning-Graphcore 0.1.0",
    repository="https://github.com/Lightning-AI/lightning-Graphcore",
    commit="264afac6957002125b3861a3a26503dc743a21b8",
)
ENVIRONMENTS = {
    "default": Environment(
        ("lightning==2.0.9", "lightning-graphcore==0.1.0", "pytest==7.4.4", "scikit-learn")
    )
}
# Their settings make an error of a FutureWarning, and today's torch has one for Lightning 2.0.
QUIET = {
    "folder": "",
    "arguments": "-W ignore::FutureWarning",
    "adaptation": "pytest 7, which still has `warns(None)`",
}
PROGRAMS = [
    Program(
        "tests/test_accelerator.py",
        PASSES,
        "ten are marked as expected failures, two as skipped",
        **QUIET,
    ),
    Program("tests/test_utils.py", PASSES, **QUIET),
]
