"""Tests of optimum-graphcore 0.7.1 and its registered models, with small models in folders."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.programs.program import OUT_OF_REACH, PASSES, Environment, Program, Source

SOURCE = Source(
    "optimum-graphcore 0.7.1",
    "https://github.com/huggingface/optimum-graphcore",
    "b6e81699253d71dff7a57026ff44726433349354",
)
ENVIRONMENTS = {
    # Later releases of datasets and pyarrow need a NumPy that optimum 1.6.1 does not take.
    "default": Environment(
        (
            *("optimum-graphcore==0.7.1", "numpy==1.23.5", "datasets==2.14.7"),
            *("pyarrow==14.0.2", "fsspec<2023.11", "pandas<2.3", "scipy<1.12"),
            *("scikit-learn<1.6", "evaluate", "parameterized", "GitPython", "psutil"),
            *("librosa", "soundfile", "peft==0.3.0", "pytest==8.3.5"),
        )
    )
}
HERE = Path(__file__).parent
OFFLINE = {
    **{f"{name}_OFFLINE": "1" for name in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS")},
    # It loads checkpoints of random generators, which torch takes for unsafe since 2.6.
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}


def models(source, work):
    """Write small models, tokenizers and data sets into folders with the names of the hub."""
    folder = HERE.parents[1] / "build/programs/environments/optimum-default/bin/python"
    python = str(folder) if folder.exists() else sys.executable
    # Python looks beside a script first, and optimum.py is here.
    script = shutil.copy(HERE / "optimum_models.py", work)
    made = [python, "-m", "ipufit", "run", str(script), str(source)]
    subprocess.run(made, check=True, cwd=str(work), stdout=subprocess.DEVNULL)


def registered(source, work):
    """The models, and beside their tests the file that trains each of them."""
    models(source, work)
    shutil.copy(HERE / "optimum_registered.py", source / "tests" / "test_registered.py")


def of_tests(path, reason="", more=(), **fields):
    """A file of tests that runs in the folder of the repository; more are variables."""
    made = {"adaptation": "small models in local folders", "prepare": models, **fields}
    return Program(path, PASSES, reason, folder="", variables={**OFFLINE, **dict(more)}, **made)


PROGRAMS = (
    of_tests("tests/test_modeling_utils.py", adaptation="", prepare=None),
    of_tests("tests/test_ipu_configuration.py"),
    of_tests(
        "tests/test_trainer.py",
        "four tests push to the hub, and are skipped",
        arguments="-k not(push_to_hub)",
        adaptation="",
        prepare=None,
        seconds=1800,
    ),
    of_tests("tests/test_trainer_seq2seq.py", more={"RUN_SLOW": "1"}, seconds=1800),
    of_tests(
        "tests/test_pipelined_models.py",
        "two read a picture from a server",
        failures=2,
        seconds=1800,
    ),
    of_tests("tests/test_registered.py", prepare=registered, seconds=3600),
    of_tests("tests/pipelines/test_pipelines_fill_mask.py"),
    of_tests("tests/pipelines/test_pipelines_question_answering.py"),
    Program(
        "tests/test_examples.py",
        OUT_OF_REACH,
        "downloads the data and the models of every example",
    ),
    Program(
        "tests/test_custom_ops.py",
        OUT_OF_REACH,
        "compiles C++ with the headers and libraries of Poplar",
    ),
)
