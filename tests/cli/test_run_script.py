"""``ipufit run`` runs a script as Python does, with a poptorch to import."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ipufit
from ipufit.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


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
        "ipufit: poptorch is ipufit's stand-in in plain torch: no SDK is installed for this Python"
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


def test_quiet_leaves_the_line_out(tmp_path, imports, capfd):
    script = write(tmp_path, "import poptorch; print(poptorch.__name__)")
    main(["run", "--quiet", "--poptorch", "standin", str(script)])
    assert capfd.readouterr() == ("ipufit.poptorch\n", "")


def test_a_script_may_set_environment_variables_before_it_imports_poptorch(tmp_path, imports):
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


def test_threads_of_a_script_outlive_it(tmp_path, imports):
    """Its classes can still be pickled when it has ended: `__main__` stays the script's."""
    script = write(tmp_path, "class Own:\n    pass\n")
    main(["run", str(script)])
    assert sys.modules["__main__"].Own.__module__ == "__main__"
    assert sys.argv == [str(script)]
    assert sys.path[0] == os.path.realpath(str(tmp_path))


def test_a_syntax_error_is_shown_without_frames(tmp_path, imports, capsys):
    script = write(tmp_path, "def broken(:\n")
    with pytest.raises(SyntaxError) as caught:
        main(["run", str(script)])
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err.startswith(f'  File "{script}", line 1')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.py", f"{{}} does not exist. The path is relative to {os.getcwd()}."),
        ("", "{} is a folder. Pass a file in it."),
        ("there.py/in.py", "{} can't be: Not a directory. Pass another."),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(name, text, tmp_path, capsys):
    """Status 2, as Python's own, and no traceback: nothing has run yet."""
    write(tmp_path, "", "there.py")
    path = str(tmp_path / name).rstrip("/")
    with pytest.raises(SystemExit) as caught:
        main(["run", path])
    assert caught.value.code == 2
    wanted = "ipufit run: `script` must be a readable Python file, but "
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


def test_an_exception_ends_a_module_as_in_python_itself(tmp_path, imports, monkeypatch, capsys):
    """The traceback begins in the module."""
    path = write(tmp_path, "def f():\n    raise KeyError(3)\nf()\n", "failing_module.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError) as caught:
        main(["run", "-m", "failing_module"])
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert re.findall('File "(.*?)", line (\\d+)', shown) == [(str(path), "3"), (str(path), "2")]
    assert sys.argv == ["-m"]


def test_a_module_that_is_not_there_is_refused(imports, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "-m", "no_such_module.part"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "ipufit run: `-m` must be followed by the name of a module that can be imported, but "
        f"there is no module 'no_such_module'. Install it for {sys.executable}, or start in the "
        f"folder that contains it; this one is {os.getcwd()}.\n"
    )


def test_the_command_line_is_checked(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--quiet"])
    assert caught.value.code == 2
    assert "error: pass a script, or -m and a module" in capsys.readouterr().err
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
