"""Write a release into its files: `python -m tests.release 0.2.0`, for the nox session `release`.

Everything that stands against it is said together, before a file is changed.
"""

import datetime
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
# Where the version stands, and how.
VERSIONED = {
    "pyproject.toml": r'(?m)^version = "(.*)"$',
    "ipufit/_version.py": r'(?m)^__version__ = "(.*)"$',
    "CITATION.cff": r"(?m)^version: (.*)$",
}
UNRELEASED = "## [Unreleased]\n"


def git(root, *command):
    """What git prints."""
    run = subprocess.run(["git", *command], cwd=root, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def replace(root, file, pattern, text):
    """Write a text in place of the one group of a pattern, which matches once."""
    path = root / file
    old = path.read_text(encoding="utf-8")
    (found,) = re.finditer(pattern, old)
    path.write_text(old[: found.start(1)] + text + old[found.end(1) :], encoding="utf-8")


def faults(root, version):
    """What stands against a release of this version."""
    (present,) = re.findall(VERSIONED["pyproject.toml"], (root / "pyproject.toml").read_text())
    try:
        if str(Version(version)) != version:
            yield f"a version is written in its normal form, {Version(version)}, got {version}"
        if Version(version) <= Version(present):
            yield f"a version must be newer than {present}, got {version}"
    except InvalidVersion:
        yield f"a version must be one of PEP 440, such as 0.2.0 or 1.0.0rc1, got {version}"
    if changed := git(root, "status", "--porcelain"):
        yield f"everything must be committed, but these are not:\n{changed}"
    if git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} is there already"
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    _, heading, below = changelog.partition(UNRELEASED)
    if not heading or not below.partition("\n## ")[0].strip():
        yield "CHANGELOG.md must say under [Unreleased] what is new, but says nothing"


def write(root, version, day):
    """Change the version where it stands, and date what CHANGELOG.md says is new.

    Args:
        root: the checkout.
        version: of the release.
        day: its date.
    """
    for file, pattern in VERSIONED.items():
        replace(root, file, pattern, version)
    replace(root, "CITATION.cff", r"(?m)^date-released: (.*)$", str(day))
    replace(root, "CHANGELOG.md", r"(?m)^## \[Unreleased\]\n()", f"\n## [{version}] - {day}\n")


if __name__ == "__main__":
    if found := [*faults(ROOT, sys.argv[1])]:
        sys.exit("No release yet:\n" + "\n".join(f"- {fault}." for fault in found))
    write(ROOT, sys.argv[1], datetime.date.today())
    print(f"The files say {sys.argv[1]}; if a later step fails, `git restore .` takes that back.")
