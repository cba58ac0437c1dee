"""A file is replaced at once, or stays as it was."""

import os
import stat

import pytest

from ipufit.utils.files import replace_file, write_text


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path = str(tmp_path / "facts.json")
    write_text(path, "old")
    with replace_file(path) as part:
        with open(part, "w", encoding="utf-8") as file:
            file.write("new")
        with open(path, encoding="utf-8") as file:
            assert file.read() == "old"
    with open(path, encoding="utf-8") as file:
        assert file.read() == "new"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_what_fails_leaves_the_old_file_alone(tmp_path):
    path = str(tmp_path / "facts.json")
    write_text(path, "old")

    def write_half():
        with replace_file(path) as part:
            with open(part, "w", encoding="utf-8") as file:
                file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    with open(path, encoding="utf-8") as file:
        assert file.read() == "old"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_others_may_read_it_as_the_umask_says(tmp_path):
    path = str(tmp_path / "facts.json")
    before = os.umask(0o022)
    try:
        write_text(path, "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
