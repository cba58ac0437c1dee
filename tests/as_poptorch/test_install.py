"""Programs find a poptorch to import, the SDK's or the stand-in, and know which it is."""

import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

import ipufit.poptorch
from ipufit.cli.main import main
from ipufit.engines.ipu.sdk import find_sdk, why_no_sdk
from ipufit.utils.poptorch_sdk import install

OF_NO_SDK = "no SDK is installed for this Python"


def write(folder, text, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def sdk(tmp_path, imports):
    """A folder in which an SDK is installed."""
    write(tmp_path, "__version__ = '3.4.0'", "poptorch/__init__.py")
    write(tmp_path, "name = 'of the SDK'", "poptorch/part.py")
    text = "Metadata-Version: 2.1\nName: poptorch\nVersion: 3.4.0\n"
    write(tmp_path, text, "poptorch-3.4.0.dist-info/METADATA")
    sys.path.insert(1, str(tmp_path))
    return tmp_path


def imported(capsys):
    """Import poptorch: the module, and what is said of it."""
    return __import__("poptorch"), capsys.readouterr().err.splitlines()


def test_the_sdk_s_is_imported_where_it_works(sdk, capsys):
    install()
    module, lines = imported(capsys)
    assert lines == [f"ipufit: poptorch is PopTorch 3.4.0 from {sdk / 'poptorch'}"]
    assert module is sys.modules["poptorch"]
    assert module.__spec__.origin == str(sdk / "poptorch" / "__init__.py")
    assert __import__("poptorch.part").part.name == "of the SDK"


def test_the_ipu_engine_sees_an_sdk_behind_what_is_offered(sdk):
    """Its PopTorch has a compiled half; it is found before it is imported, and after it."""
    core = write(sdk, "", "poptorch/poptorch_core.so")
    install(quiet=True)
    for _ in range(2):
        assert find_sdk().origin == str(core.with_name("__init__.py"))
        __import__("poptorch")
    assert why_no_sdk() is None


def test_the_ipu_engine_sees_no_sdk_where_the_stand_in_was_chosen(sdk):
    write(sdk, "", "poptorch/poptorch_core.so")
    install("standin", quiet=True)
    assert why_no_sdk() == "`import poptorch` finds the stand-in, not the SDK's PopTorch"


def test_the_stand_in_is_imported_where_there_is_no_sdk(imports, capsys):
    ipufit.poptorch.install()
    module, lines = imported(capsys)
    assert module is ipufit.poptorch
    assert lines == [f"ipufit: poptorch is ipufit's stand-in in plain torch: {OF_NO_SDK}"]
    # Under both names, submodules are the same.
    assert __import__("poptorch.optim").optim is sys.modules["ipufit.poptorch.optim"]
    with pytest.raises(ModuleNotFoundError):
        __import__("poptorch.half")
    install()
    assert imported(capsys) == (module, [])


def test_the_stand_in_can_be_chosen_where_the_sdk_works(sdk, capsys):
    install("standin")
    module, lines = imported(capsys)
    assert module is ipufit.poptorch
    assert lines == [
        "ipufit: poptorch is ipufit's stand-in in plain torch: as --poptorch standin asks"
    ]


def versions():
    """What is said of poptorch's version, by those who ask for it and who list everything."""
    listed = {d.metadata["Name"]: d.version for d in reversed(list(metadata.distributions()))}
    return [metadata.version("poptorch"), listed["poptorch"]]


def test_every_module_of_the_stand_in_is_one_under_both_names(imports):
    install(quiet=True)
    __import__("poptorch")
    prefix = f"{ipufit.poptorch.__name__}."
    for module in pkgutil.walk_packages(ipufit.poptorch.__path__, prefix):
        alias = module.name[len("ipufit.") :]
        assert sys.modules[alias] is sys.modules[module.name]


@pytest.mark.long
def test_the_version_of_the_stand_in_is_told_where_it_is_offered_and_nowhere_else(imports):
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("poptorch")
    install(quiet=True)
    # Programs ask before the import and after it.
    assert versions() == ["3.4.0+ipufit", "3.4.0+ipufit"]
    module = __import__("poptorch")
    assert versions() == [module.__version__, module.__version__]


@pytest.mark.long
def test_the_version_is_that_of_what_is_imported(sdk):
    install(quiet=True)
    assert versions() == ["3.4.0", "3.4.0"]
    __import__("poptorch")
    assert versions() == ["3.4.0", "3.4.0"]


@pytest.mark.long
def test_the_version_is_the_stand_in_s_where_it_was_chosen(sdk):
    install("standin", quiet=True)
    assert versions() == ["3.4.0+ipufit", "3.4.0+ipufit"]
    assert metadata.version("torch").startswith("2.")


BROKEN = """
import sys
import poptorch.half
sys.excepthook = None
assert False, "torch 2.0.1\\nis needed"
"""


def test_an_sdk_that_cannot_be_imported_gives_way_and_is_named(sdk, capsys):
    """An SDK made for another torch fails in the middle of its import."""
    write(sdk, BROKEN, "poptorch/__init__.py")
    write(sdk, "", "poptorch/half.py")
    hook = sys.excepthook
    install()
    assert metadata.version("poptorch") == "3.4.0"
    module, lines = imported(capsys)
    assert module is ipufit.poptorch
    assert lines == [
        f"ipufit: poptorch is ipufit's stand-in in plain torch: the one in {sdk / 'poptorch'} "
        "can't be imported (AssertionError: torch 2.0.1 is needed)"
    ]
    assert sys.excepthook is hook
    assert metadata.version("poptorch") == "3.4.0+ipufit"
    with pytest.raises(ImportError):
        __import__("poptorch.half")


@pytest.mark.parametrize("works", [True, False])
def test_the_parsers_of_poptorch_geometric_are_there_where_they_can_be(works, imports, tmp_path):
    """A program passes batches of torch_geometric, and imports poptorch and nothing else."""
    text = """
    import poptorch

    class Box: pass

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct): yield struct.tensor
        def reconstruct(self, original_structure, tensor_iterator): return Box()

    def registerCustomArgParsers():
        poptorch.registerCustomArgParser(Box, Parser())
    """
    text = textwrap.dedent(text) if works else "import a_library_that_is_missing"
    write(tmp_path, "", "poptorch_geometric/__init__.py")
    write(tmp_path, text, "poptorch_geometric/types.py")
    sys.path.insert(1, str(tmp_path))
    install(quiet=True)
    module = __import__("poptorch")
    if works:
        box = sys.modules["poptorch_geometric.types"].Box()
        box.tensor = torch.ones(2)
        assert module.flattenTensorStructure([box]) == [box.tensor]
        module.registerCustomArgParser(type(box), None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import a_library_that_is_missing",
            "the one in {} can't be imported (ModuleNotFoundError: No module named "
            "'a_library_that_is_missing')",
        ),
        (None, OF_NO_SDK),
    ],
)
def test_an_sdk_that_was_asked_for_and_cannot_be_imported_is_an_error(text, reason, sdk, capsys):
    place = write(sdk, text or "", "poptorch/__init__.py")
    if text is None:
        place.unlink()  # a folder of that name is not the SDK
    install("sdk")
    with pytest.raises(ImportError) as caught:
        __import__("poptorch")
    assert str(caught.value) == (
        f"--poptorch sdk needs the PopTorch of the Poplar SDK, but {reason.format(place.parent)}. "
        "Enable the SDK in this shell, with the Python and torch that it was made for, or leave "
        "the option out to run on ipufit's stand-in."
    )
    assert capsys.readouterr().err == ""


def test_a_choice_that_comes_too_late_is_refused(imports):
    install(quiet=True)
    __import__("poptorch")
    install("standin", quiet=True)  # what it is already
    with pytest.raises(RuntimeError) as caught:
        install("sdk")
    assert str(caught.value) == (
        "`choice` must be set before poptorch is imported, but 'sdk' came after it was imported "
        f"from {ipufit.poptorch.__file__}. Call install first, in a new process or kernel."
    )


def test_a_choice_that_there_is_not_is_refused(imports, monkeypatch):
    text = (
        " must be one of auto, sdk, standin, but is 'gpu'. Leave it out for the SDK's PopTorch if "
        "that works, and ipufit's stand-in otherwise."
    )
    with pytest.raises(ValueError, match=re.escape("`choice`" + text)):
        install("gpu")
    install()
    monkeypatch.setenv("IPUFIT_POPTORCH", "gpu")
    with pytest.raises(ValueError, match=re.escape("IPUFIT_POPTORCH" + text)):
        __import__("poptorch")


VERSION = (
    "import poptorch, importlib.metadata as m; print(poptorch.__name__, m.version('poptorch'))"
)
ASKS = """
import sys, subprocess, poptorch
print(poptorch.ipuHardwareIsAvailable(16), poptorch.ipuHardwareVersion(), flush=True)
ask = "import poptorch; print(poptorch.ipuHardwareVersion())"
subprocess.run([sys.executable, "-c", ask], cwd="/", check=True)
"""


@pytest.mark.long
def test_ipus_are_claimed_for_scripts_that_ask_and_what_they_start(tmp_path, imports, capfd):
    """Many published programs end at once where there is no IPU."""
    main(["run", "--claim-ipus", str(write(tmp_path, ASKS, "script.py"))])
    out, err = capfd.readouterr()
    assert out.split() == ["True", "2", "2"]
    # Said by the first, for all processes.
    assert err.splitlines() == [
        f"ipufit: poptorch is ipufit's stand-in in plain torch: {OF_NO_SDK}; it claims IPUs, as "
        "--claim-ipus asks"
    ]


def test_an_sdk_is_not_made_to_claim_anything(sdk, capsys):
    install(claim_ipus=True)
    _, lines = imported(capsys)
    place = sdk / "poptorch"
    assert lines == [
        f"ipufit: poptorch is PopTorch 3.4.0 from {place}, and --claim-ipus has no effect"
    ]


@pytest.mark.long
def test_a_search_path_is_enough_for_every_process(sdk, tmp_path_factory):
    """The environment alone offers the stand-in, to test runners and notebook servers."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("IPUFIT_")}

    def run(*command, **environment):
        """Standard output and error of a Python."""
        command = [sys.executable, *map(str, command)]
        environment = {**clean, **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, env=environment, cwd="/", check=True, **pipes)
        return done.stdout.strip(), done.stderr.splitlines()

    root = Path(ipufit.__file__).parents[1]
    path, _ = run("-m", "ipufit.as_poptorch", PYTHONPATH=str(root))
    assert run("-c", VERSION, PYTHONPATH=path) == (
        "ipufit.poptorch 3.4.0+ipufit",
        [f"ipufit: poptorch is ipufit's stand-in in plain torch: {OF_NO_SDK}"],
    )
    claims = "import poptorch; print(poptorch.ipuHardwareIsAvailable())"
    assert run("-c", claims, PYTHONPATH=path, IPUFIT_CLAIM_IPUS="1")[0] == "True"
    # An SDK that is installed comes first here, too.
    out, err = run("-c", VERSION, PYTHONPATH=os.pathsep.join([path, str(sdk)]))
    assert out.startswith("poptorch ")
    assert err == [f"ipufit: poptorch is PopTorch 3.4.0 from {sdk / 'poptorch'}"]
    text = "import sys, poptorch; print(poptorch.__name__, *sys.argv[1:])"
    script = write(tmp_path_factory.mktemp("program"), text, "script.py")
    command = ("-m", "ipufit.as_poptorch", script, "--lr", "1")
    assert run(*command, PYTHONPATH=str(root))[0] == "ipufit.poptorch --lr 1"
