"""``ipufit run`` runs a script as Python does, with a poptorch to import."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import ipufit
from ipufit.cli.main import main
from ipufit.cli.run import offer_poptorch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clean(monkeypatch):
    """What a run changes in this process is as before when the test ends."""
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "poptorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    # Beside the tests lies a folder with this name.
    path = [entry for entry in sys.path if not (Path(entry) / "poptorch").exists()]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("IPUFIT_CLAIM_IPUS", "0")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "poptorch":
            del sys.modules[name]


def write(folder, text, name="script.py"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def command(*arguments, run=("-m", "ipufit", "run"), **options):
    """A Python of its own, in the folder that ipufit is imported from."""
    done = subprocess.run(
        [sys.executable, *run, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=str(ROOT),
        timeout=600,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys
import poptorch
import poptorch.poptorch_core
from beside import word

class Own:
    pass

def work(queue, own):
    queue.put((poptorch.__name__, type(own).__name__))

if __name__ == "__main__":
    print(word, sys.argv[1:], poptorch.Error is poptorch.poptorch_core.Error)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue, Own()))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    sys.exit(7)
"""
ASK = """
    ask = "import poptorch, poptorch.poptorch_core; print(poptorch.__name__)"
    subprocess.run([sys.executable, "-c", ask], cwd="/", check=True)
    sys.exit(7)
"""


@pytest.mark.long
@pytest.mark.parametrize("asks", [False, True])
def test_a_script_and_the_processes_it_starts_find_the_stand_in(asks, tmp_path):
    """A process that multiprocessing spawns, and one of another kind, have no finder of ours."""
    script = write(tmp_path, CHILDREN.replace("\n    sys.exit(7)\n", ASK) if asks else CHILDREN)
    write(tmp_path, "word = 'beside'", "beside.py")
    status, out, err = command(script, "--", "--quiet", "x")
    assert out.splitlines() == [
        "beside ['--', '--quiet', 'x'] True",
        "('ipufit.poptorch', 'Own')",
        *["ipufit.poptorch"] * asks,
    ]
    assert err.splitlines() == [
        "ipufit run: poptorch is ipufit's stand-in in plain torch: "
        "no SDK is installed for this Python"
    ]
    assert status == 7


@pytest.mark.long
def test_an_exception_ends_a_script_as_in_python_itself(tmp_path):
    """The same traceback and status: the frames of the command would only be in the way."""
    script = write(
        tmp_path,
        "import sys\n\ndef fails():\n    raise ValueError(sys.argv, __name__, __file__)\n\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    fails()\n",
    )
    ours = command(script, "a", "--b")
    assert ours == command(script, "a", "--b", run=())
    assert ours[0] == 1
    assert "During handling of the above exception" in ours[2]


def test_quiet_leaves_the_line_out(tmp_path, clean, capfd):
    script = write(tmp_path, "import poptorch; print(poptorch.__name__)")
    main(["run", "--quiet", "--poptorch", "standin", str(script)])
    assert capfd.readouterr() == ("ipufit.poptorch\n", "")


def test_a_script_may_set_environment_variables_before_it_imports_poptorch(tmp_path, clean):
    """PopTorch reads its variables when it is imported, so nothing imports it earlier."""
    write(
        tmp_path, "import os; seen = os.environ.get('POPTORCH_LOG_LEVEL')", "poptorch/__init__.py"
    )
    script = write(
        tmp_path,
        "import os; os.environ['POPTORCH_LOG_LEVEL'] = 'ERR'\n"
        "import poptorch; assert poptorch.seen == 'ERR'\n"
        "del os.environ['POPTORCH_LOG_LEVEL']\n",
    )
    main(["run", "--quiet", str(script)])


def test_threads_of_a_script_outlive_it(tmp_path, clean):
    """Its classes can still be pickled when it has ended: `__main__` stays the script's."""
    script = write(tmp_path, "class Own:\n    pass\n")
    main(["run", str(script)])
    assert sys.modules["__main__"].Own.__module__ == "__main__"
    assert sys.argv == [str(script)]
    assert sys.path[0] == os.path.realpath(str(tmp_path))


def test_a_syntax_error_is_shown_without_frames(tmp_path, clean, capsys):
    script = write(tmp_path, "def broken(:\n")
    with pytest.raises(SyntaxError) as caught:
        main(["run", str(script)])
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err.startswith(f'  File "{script}", line 1')


def lines(choice, expected=None):
    """Import poptorch under this choice: the module, or None where that fails, and what is told."""
    told = []
    offer_poptorch(choice, told.append)
    if expected is not None:
        with pytest.raises(ImportError, match="--poptorch sdk") as caught:
            __import__("poptorch")
        assert str(caught.value) == expected
        return None, told
    return __import__("poptorch"), told


def test_the_sdk_is_found_where_it_works(tmp_path, clean):
    write(tmp_path, "__version__ = '3.4.0'", "poptorch/__init__.py")
    write(tmp_path, "name = 'of the SDK'", "poptorch/part.py")
    sys.path.insert(0, str(tmp_path))
    module, told = lines("auto")
    assert told == [f"poptorch is PopTorch 3.4.0 from {tmp_path / 'poptorch'}"]
    assert module.__spec__.origin == str(tmp_path / "poptorch" / "__init__.py")
    assert __import__("poptorch.part").part.name == "of the SDK"


def test_the_stand_in_can_be_chosen_where_the_sdk_works(tmp_path, clean):
    write(tmp_path, "__version__ = '3.4.0'", "poptorch/__init__.py")
    sys.path.insert(0, str(tmp_path))
    module, told = lines("standin")
    assert module is sys.modules["ipufit.poptorch"]
    assert told == ["poptorch is ipufit's stand-in in plain torch: as --poptorch standin asks"]


def versions():
    """What is said of poptorch's version, by those who ask for it and who list everything."""
    listed = {d.metadata["Name"]: d.version for d in reversed(list(metadata.distributions()))}
    return [metadata.version("poptorch"), listed["poptorch"]]


@pytest.fixture
def sdk(tmp_path):
    """A folder in which an SDK is installed."""
    write(tmp_path, "__version__ = '3.4.0'", "poptorch/__init__.py")
    text = "Metadata-Version: 2.1\nName: poptorch\nVersion: 3.4.0\n"
    write(tmp_path, text, "poptorch-3.4.0.dist-info/METADATA")
    return tmp_path


@pytest.mark.long
def test_the_version_of_the_stand_in_is_told_where_it_is_offered_and_nowhere_else(clean):
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("poptorch")
    offer_poptorch("auto", tell=len)
    # Programs ask before the import and after it.
    assert versions() == ["3.4.0+ipufit", "3.4.0+ipufit"]
    module = __import__("poptorch")
    assert versions() == [module.__version__, module.__version__]


@pytest.mark.long
def test_the_version_is_that_of_what_is_imported(sdk, clean):
    sys.path.insert(0, str(sdk))
    offer_poptorch("auto", tell=len)
    assert versions() == ["3.4.0", "3.4.0"]
    __import__("poptorch")
    assert versions() == ["3.4.0", "3.4.0"]


@pytest.mark.long
def test_the_version_is_the_stand_in_s_where_it_was_chosen_or_had_to_be(sdk, clean):
    sys.path.insert(0, str(sdk))
    offer_poptorch("standin", tell=len)
    assert versions() == ["3.4.0+ipufit", "3.4.0+ipufit"]
    assert metadata.version("torch").startswith("2.")


def test_the_version_changes_where_an_sdk_gives_way(sdk, clean):
    sys.path.insert(0, str(sdk))
    write(sdk, BROKEN, "poptorch/__init__.py")
    offer_poptorch("auto", tell=len)
    __import__("poptorch")
    assert metadata.version("poptorch") == "3.4.0+ipufit"


@pytest.mark.long
def test_processes_that_a_script_starts_are_told_the_same_version(tmp_path):
    script = write(
        tmp_path,
        """
        import subprocess, sys
        ask = "import importlib.metadata as m; print(m.version('poptorch'))"
        exec(ask)
        subprocess.run([sys.executable, "-c", ask], cwd="/", check=True)
        """.replace("\n        ", "\n"),
    )
    status, out, err = command(script)
    assert (status, out.split()) == (0, ["3.4.0+ipufit", "3.4.0+ipufit"]), err


BROKEN = """
import sys
import poptorch.half
sys.excepthook = None
assert False, "torch 2.0.1\\nis needed"
"""


def test_an_sdk_that_cannot_be_imported_gives_way_and_is_named(tmp_path, clean):
    """An SDK made for another torch fails in the middle of its import."""
    write(tmp_path, BROKEN, "poptorch/__init__.py")
    write(tmp_path, "", "poptorch/half.py")
    sys.path.insert(0, str(tmp_path))
    hook = sys.excepthook
    module, told = lines("auto")
    assert module is sys.modules["ipufit.poptorch"]
    assert told == [
        f"poptorch is ipufit's stand-in in plain torch: the one in {tmp_path / 'poptorch'} "
        "can't be imported (AssertionError: torch 2.0.1 is needed)"
    ]
    assert sys.excepthook is hook
    with pytest.raises(ImportError):
        __import__("poptorch.half")


def test_an_sdk_that_was_asked_for_and_cannot_be_imported_is_an_error(tmp_path, clean):
    write(tmp_path, "import a_library_that_is_missing", "poptorch/__init__.py")
    sys.path.insert(0, str(tmp_path))
    _, told = lines(
        "sdk",
        expected="--poptorch sdk needs the PopTorch of the Poplar SDK, but the one in "
        f"{tmp_path / 'poptorch'} can't be imported (ModuleNotFoundError: No module named "
        "'a_library_that_is_missing'). Use the Python and torch that this SDK was made for, or "
        "leave the option out to run on ipufit's stand-in.",
    )
    assert told == []


def test_an_sdk_that_was_asked_for_and_is_absent_is_an_error(tmp_path, clean):
    (tmp_path / "poptorch").mkdir()  # a folder of that name is not the SDK
    sys.path.insert(0, str(tmp_path))
    lines(
        "sdk",
        expected="--poptorch sdk needs the PopTorch of the Poplar SDK, but no package poptorch is "
        "installed for this Python. Enable the SDK in this shell, or leave the option out to run "
        "on ipufit's stand-in.",
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.py", f"{{}} does not exist. The path is relative to {os.getcwd()}."),
        ("", "{} is a folder. Name the file in it to run."),
        ("there.py/in.py", "{} can't be: Not a directory. Give another."),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(name, text, tmp_path, capsys):
    """Status 2, as Python's own, and no traceback: nothing has run yet."""
    write(tmp_path, "", "there.py")
    path = str(tmp_path / name).rstrip("/")
    with pytest.raises(SystemExit) as caught:
        main(["run", path])
    assert caught.value.code == 2
    wanted = "ipufit run: `script` must be a file of Python that can be read, but "
    assert capsys.readouterr().err == wanted + text.format(path) + "\n"


def module_of_children(folder):
    """A package whose module starts processes, and a folder to start it from."""
    write(folder, "", "pack/__init__.py")
    text = CHILDREN.replace("\n    sys.exit(7)\n", ASK)
    write(folder, text.replace("from beside", "from pack.beside"), "pack/train.py")
    write(folder, 'word = "near"', "pack/beside.py")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.long
@pytest.mark.parametrize("spelt", [["-m", "pack.train"], ["-mpack.train"]])
def test_a_module_and_the_processes_it_starts_find_the_stand_in(spelt, tmp_path):
    environment = {**os.environ, **module_of_children(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "ipufit", "run", "--poptorch", "standin", *spelt, "-m", "--", "a"],
        capture_output=True,
        text=True,
        cwd=str(tmp_path),
        timeout=600,
        env=environment,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == [
        "near ['-m', '--', 'a'] True",
        "('ipufit.poptorch', 'Own')",
        "ipufit.poptorch",
    ]


def test_an_exception_ends_a_module_as_in_python_itself(tmp_path, clean, monkeypatch, capsys):
    """The traceback begins in the module."""
    path = write(tmp_path, "def f():\n    raise KeyError(3)\nf()\n", "failing_module.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError) as caught:
        main(["run", "-m", "failing_module"])
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert re.findall('File "(.*?)", line (\\d+)', shown) == [(str(path), "3"), (str(path), "2")]
    assert sys.argv == ["-m"]


def test_a_module_that_is_not_there_is_refused(clean, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "-m", "no_such_module.part"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "ipufit run: `-m` must be followed by the name of a module that can be imported, but there "
        f"is no module 'no_such_module'. Install it for {sys.executable}, or start in the folder "
        f"that it is in, not in {os.getcwd()}.\n"
    )


def test_the_command_line_is_checked(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--quiet"])
    assert caught.value.code == 2
    assert "error: give a script, or -m and a module" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["run", "--poptorch", "other", "script.py"])
    assert caught.value.code == 2
    assert "invalid choice: 'other'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"ipufit {ipufit.__version__}\n")
    main([])
    assert "run a PopTorch script" in capsys.readouterr().out


def test_the_command_is_installed_under_its_name():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^\[project.scripts\]\nipufit = "ipufit.cli.main:main"$', text, re.M)


ASKS = """
import sys, subprocess, poptorch
print(poptorch.ipuHardwareIsAvailable(16), poptorch.ipuHardwareVersion(), flush=True)
ask = "import poptorch; print(poptorch.ipuHardwareVersion())"
subprocess.run([sys.executable, "-c", ask], cwd="/", check=True)
"""


@pytest.mark.long
def test_ipus_are_claimed_for_scripts_that_ask_and_what_they_start(tmp_path, clean, capfd):
    """Many published programs end at once where there is no IPU."""
    main(["run", "--claim-ipus", str(write(tmp_path, ASKS))])
    out, err = capfd.readouterr()
    assert out.split() == ["True", "2", "2"]
    assert err.splitlines() == [
        "ipufit run: poptorch is ipufit's stand-in in plain torch: no SDK is installed for this "
        "Python; it claims IPUs, as --claim-ipus asks"
    ]


def test_an_sdk_is_not_made_to_claim_anything(sdk, clean):
    sys.path.insert(0, str(sdk))
    told = []
    offer_poptorch("auto", tell=told.append, claim_ipus=True)
    __import__("poptorch")
    place = sdk / "poptorch"
    assert told == [f"poptorch is PopTorch 3.4.0 from {place}, and --claim-ipus has no effect"]


SETTINGS = """
import popart, popdist, popdist.poptorch, poptorch
from popart import SyntheticDataMode

options = popdist.poptorch.Options(ipus_per_replica=4)
assert isinstance(options, poptorch.Options)
options.replicationFactor(2).enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
schedule = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
options._Popart.set("accumulateOuterFragmentSettings.schedule", int(schedule))
options._Popart.set("subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime))
print(options.replication_factor, SyntheticDataMode.Zeros.value, int(schedule))
popdist.init()
print(popdist.isPopdistEnvSet(), popdist.getInstanceIndex(), popdist.getNumInstances())
print(popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas(), popdist.getNumIpusPerReplica())
popdist.synchronize()
print(popdist.execute_on_instances({0}, max, 3, 4), popdist.execute_on_instances({1}, max, 3, 4))
for module, name in ((popart, "Builder"), (popdist, "tensorflow")):
    try:
        getattr(module, name)
    except AttributeError as reason:
        print(reason)
"""


@pytest.mark.long
def test_a_script_for_one_process_finds_popart_s_enums_and_popdist_s_functions(tmp_path):
    status, out, err = command(write(tmp_path, SETTINGS))
    assert status == 0, err
    assert out.splitlines()[:4] == ["2 1 3", "False 0 1", "1 1 1", "4 None"]
    popart, popdist = out.splitlines()[4:]
    assert popart.startswith(
        "popart.Builder comes with Graphcore's Poplar SDK, and this is ipufit's stand-in, which "
        "has enums alone: AccumulateOuterFragmentSchedule, "
    )
    assert popart.endswith("Enable the SDK in this shell, or leave out what uses it.")
    assert popdist.startswith(
        "popdist.tensorflow comes with Graphcore's Poplar SDK, and this is ipufit's stand-in for "
        "one process, which has execute_on_instances, getInstanceIndex, "
    )


@pytest.mark.long
def test_several_processes_of_poprun_are_not_taken_for_one(tmp_path):
    script = write(tmp_path, "import popdist\npopdist.init()\n")
    status, _, err = command(script, env={**os.environ, "POPDIST_NUM_TOTAL_REPLICAS": "4"})
    assert status == 1
    assert err.splitlines()[-1] == (
        "RuntimeError: this process must be the only one, but POPDIST_NUM_TOTAL_REPLICAS is set, "
        "as PopRun does for the processes that it starts. PopDist for several comes with "
        "Graphcore's Poplar SDK: enable it in this shell, or start the script without poprun."
    )


@pytest.mark.long
def test_the_sdk_s_own_modules_come_first(tmp_path):
    write(tmp_path, "name = 'of the SDK'", "popart.py")
    script = write(tmp_path, "import popart; print(popart.name)", "elsewhere/script.py")
    status, out, err = command(script, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (status, out) == (0, "of the SDK\n"), err
