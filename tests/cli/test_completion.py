"""``ipufit --print-completion`` writes what a shell needs to complete the command line."""

import shutil
import subprocess
import sys

import pytest

from ipufit.cli.main import main
from ipufit.cli.parsing import SHELLS


def printed(shell, capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_it_knows_all_commands(shell, capsys):
    out = printed(shell, capsys)
    commands = ("run", "check", "plan", "bench", "report", "watch", "doctor", "conformance")
    assert [name for name in commands if name not in out] == []
    assert "per-replica" in out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ipufit", "pl"], ["plan"]),
        (["ipufit", "bench", "--s"], ["--seconds"]),
        (["ipufit", "run", "--poptorch", "s"], ["sdk", "standin"]),
        (["ipufit", "plan", "tr"], ["train.py"]),
        (["ipufit", "watch", "ru"], ["runs"]),
        (["ipufit", "conformance", "--on"], ["--only"]),
        (["ipufit", "conformance", "--engine", "st"], ["standin"]),
    ],
)
def test_bash_completes(words, offered, tmp_path, capsys):
    """Commands, options, their values, and files, as when TAB is pressed."""
    (tmp_path / "train.py").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "rubbish").touch()
    line = " ".join(words)
    ask = f'\nCOMP_WORDS=({line}) COMP_CWORD={len(words) - 1} COMP_LINE="{line}"\n'
    ask += '_shtab_ipufit\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    script = printed("bash", capsys) + ask
    done = subprocess.run(
        ["bash", "-c", script], cwd=str(tmp_path), capture_output=True, text=True, check=False
    )
    assert sorted(set(done.stdout.split())) == offered


def test_without_the_library_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "ipufit: --print-completion needs shtab, which is not installed. Run: "
        "pip install ipufit[completion]\n"
    )


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "fish"])
    assert end.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err


def test_help_names_it(capsys):
    main([])
    assert 'eval "$(ipufit --print-completion bash)"' in capsys.readouterr().out
