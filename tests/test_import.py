"""What `import ipufit` adds to `import torch`: nothing that only some programs need."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.both_engines

CODE = """
import json, sys
import torch
before = set(sys.modules)
import ipufit
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Slow to import, and used by some models, some calls or some users.
ON_USE = (
    *("html", "matplotlib", "pandas", "poptorch", "sympy", "tensorboard", "torchmetrics"),
    *("torch._dynamo", "torch._functorch", "torch._inductor", "torch.fx"),
    "torch.utils.tensorboard",
    *("ipufit.conformance", "ipufit.engines.embedded", "ipufit.engines.ipu", "ipufit.poptorch"),
)


@pytest.fixture(scope="module")
def added():
    """Names of the modules that `import ipufit` loads in a fresh process after torch."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_adds_our_own_modules(added):
    """So that the next test looks at something."""
    assert {"ipufit", "ipufit.model", "ipufit.loop", "ipufit.history"} <= set(added)


@pytest.mark.parametrize("heavy", ON_USE)
def test_what_is_slow_to_import_is_imported_on_use(heavy, added):
    assert [name for name in added if f"{name}.".startswith(f"{heavy}.")] == []
