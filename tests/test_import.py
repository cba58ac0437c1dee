"""What `import ipufit` loads: next to nothing, and a model nothing that only some programs need."""

import ast
import importlib
import importlib.util
import json
import pathlib
import pickle
import subprocess
import sys

import pytest

import ipufit

pytestmark = pytest.mark.both_engines

# Packages of which some names are imported when they are asked for.
PACKAGES = (
    "ipufit",
    *("ipufit.callbacks", "ipufit.checkpoint", "ipufit.metrics", "ipufit.optim"),
    *("ipufit.optim.schedules", "ipufit.partition"),
)
CODE = f"""
import importlib, json, sys
import torch
before = set(sys.modules)
import ipufit
light = sorted(set(sys.modules) - before)
names = {{name: dir(importlib.import_module(name)) for name in {PACKAGES}}}
ipufit.Model
added = sorted(set(sys.modules) - before)
model = ipufit.Model(torch.nn.Linear(4, 1), engine="embedded")
model.compile("sgd", "mse")
model.fit(torch.zeros(8, 4), torch.zeros(8, 1), batch_size=4, verbose=0)
print(json.dumps([light, names, added, sorted(set(sys.modules) - before)]))
"""
# Of the engine, of other packages, and slow to import; used by some models, calls or users.
ON_USE = (
    *("html", "matplotlib", "pandas", "poptorch", "safetensors", "sympy", "tensorboard"),
    *("torch._dynamo", "torch._functorch", "torch._inductor", "torch.fx", "torchmetrics"),
    *("torch.utils.tensorboard", "tqdm.auto"),
    *("ipufit.conformance", "ipufit.engines.embedded", "ipufit.engines.ipu", "ipufit.poptorch"),
    "ipufit.tracing.capture",
)
# What a plain fit of a model on one device has no use for either.
NOT_FOR_A_PLAIN_FIT = (
    *("safetensors", "torchmetrics", "tqdm.auto"),
    *("ipufit.callbacks.stopping", "ipufit.callbacks.progbar_logger"),
    *(
        "ipufit.checkpoint.store",
        "ipufit.checkpoint.restore",
        "ipufit.checkpoint.training_state",
        "ipufit.training.merge_settings",
    ),
    *(
        "ipufit.analysis.check",
        "ipufit.analysis.tuner",
        "ipufit.engines.ipu.ipu_config",
        "ipufit.tracing.layers",
    ),
    *("ipufit.losses.multi_output", "ipufit.planner.partition_plan", "ipufit.planner.planning"),
    *("ipufit.partition.resolve", "ipufit.partition.cut_layers", "ipufit.tracing.stage_trace"),
    *(
        "ipufit.planner.plan_partition",
        "ipufit.engines.ipu.preflight",
        "ipufit.processes.connection",
        "ipufit.report.recorder",
    ),
    *(
        "ipufit.optim.schedules.resolve",
        "ipufit.analysis.tuner",
        "ipufit.core.weights_file",
    ),
    "ipufit.engines.ipu.poptorch_options",
)
# Of the engine: what only some fits need.
NOT_FOR_A_PLAIN_UPDATE = (
    "ipufit.tracing.find_nonfinite",
    *(
        f"ipufit.engines.embedded.{name}"
        for name in (
            *("batching", "compare_with_reference", "fsdp", "passes.collective_hooks", "profiling"),
            *("programs.cuda_graph", "programs.sharded", "replay_update", "zero"),
        )
    ),
)


@pytest.fixture(scope="module")
def told():
    """What a fresh process says, in which torch is imported, then ipufit, then a model fitted."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def added(told):
    """Names of the modules that `ipufit.Model` loads after torch."""
    return told[2]


@pytest.fixture
def fitted(told):
    """Names of all modules that are loaded, besides torch's at its import, when fit returns."""
    return told[3]


def test_import_adds_a_table_of_names(told):
    """A shell that completes ``ipufit``, and a program that may never train, do not wait."""
    assert [name for name in told[0] if name.startswith("ipufit")] == [
        "ipufit",
        "ipufit._version",
        "ipufit.training",
        "ipufit.utils",
        "ipufit.utils.lazy_exports",
    ]


@pytest.mark.long
def test_a_model_adds_our_own_modules(added):
    """So that the next tests look at something."""
    assert {
        "ipufit",
        "ipufit.training.model",
        "ipufit.training.trainer",
        "ipufit.callbacks.history",
    } <= set(added)


def test_what_some_programs_need_is_imported_on_use(added):
    for part in (*ON_USE, *NOT_FOR_A_PLAIN_FIT):
        assert _loaded(part, added) == [], part


def test_a_fit_adds_the_engine(fitted):
    """So that the next test looks at something."""
    assert {"ipufit.engines.embedded.programs.training", "ipufit.tracing.grad_step"} <= set(fitted)


def test_a_plain_fit_does_without(fitted):
    for part in (*NOT_FOR_A_PLAIN_FIT, *NOT_FOR_A_PLAIN_UPDATE):
        assert importlib.util.find_spec(part) is not None, part
        assert _loaded(part, fitted) == [], part


@pytest.mark.long
def test_the_translation_of_a_lightning_module_needs_no_lightning():
    """It looks at the module's own classes; importing ipufit.lightning registers an accelerator."""
    code = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import ipufit.lightning_module as translation\n"
        "print(translation.LightningModel.__name__, 'ipufit.lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["LightningModel", "False"]


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_has_all_public_names_before_they_are_imported(package, told):
    shown = {name for name in told[1][package] if not name.startswith("__")}
    assert shown == set(importlib.import_module(package).__all__) - {"__version__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_read_the_same_names(package):
    """A name that a stub imports without ``as`` is none of the package to them."""
    module = importlib.import_module(package)
    stub = ast.parse(pathlib.Path(module.__file__).with_suffix(".pyi").read_text("utf-8"))
    [*imports] = [(line.module, name) for line in stub.body for name in line.names]
    assert all(name.name == name.asname for _, name in imports)
    names = [name.name for _, name in imports if name.name != "__version__"]
    assert sorted(names) == module.__all__


@pytest.mark.parametrize("package", PACKAGES)
def test_all_public_names_are_found_when_they_are_asked_for(package):
    """By attribute, by ``from``, and by a star."""
    module, found = importlib.import_module(package), {}
    exec(f"from {package} import *", found)
    assert set(module.__all__) == set(found) - {"__builtins__"}
    for name, value in found.items():
        assert name == "__builtins__" or getattr(module, name) is value


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_the_usual_error(package):
    with pytest.raises(AttributeError) as caught:
        sys.modules[package].Modle  # noqa: B018
    assert str(caught.value) == f"module '{package}' has no attribute 'Modle'"
    with pytest.raises(ImportError, match="cannot import name 'Modle'"):
        exec(f"from {package} import Modle")


def test_what_is_imported_on_use_is_the_class_of_its_module():
    from ipufit.engines.ipu.ipu_config.config import IPUConfig
    from ipufit.partition.cut_layers import serialize

    assert ipufit.IPUConfig is IPUConfig
    assert ipufit.partition.serialize is serialize
    assert isinstance(ipufit.IPUConfig(), IPUConfig)
    assert pickle.loads(pickle.dumps(ipufit.IPUConfig)) is IPUConfig
    assert pickle.loads(pickle.dumps(ipufit.callbacks.Timer)) is ipufit.callbacks.Timer


def _loaded(part, modules):
    return [name for name in modules if f"{name}.".startswith(f"{part}.")]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("optimizer_state", "ipufit.optim.state"),
        ("parallel", "ipufit.partition"),
        ("schedules", "ipufit.optim.schedules"),
    ],
)
def test_a_name_that_has_moved_says_where_it_is(name, place):
    with pytest.raises(AttributeError) as caught:
        getattr(ipufit, name)
    assert str(caught.value) == f"ipufit.{name} is {place} now. Write that instead."
    assert importlib.import_module(place).__all__


@pytest.mark.parametrize("line", ["--version", "--help", "report --help", ""])
def test_the_command_answers_without_torch(line):
    """Whose import takes a second, and more from a disk that is shared."""
    code = (
        "import sys\n"
        "from ipufit.cli.main import main\n"
        "try:\n"
        f"    main({line.split()})\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = f"ipufit {ipufit.__version__}\n" if line == "--version" else "usage: ipufit"
    assert done.stdout.startswith(expected)


@pytest.mark.parametrize(
    "code", ["ipufit.Model", "from ipufit import Model", "from ipufit import *", "ipufit.losses"]
)
def test_a_torch_that_is_missing_is_the_error_of_who_asks_for_a_model(code):
    """Not an ipufit without a Model; and ipufit itself says its version."""
    fresh = f"import sys; sys.modules['torch'] = None; import ipufit; ipufit.__version__; {code}"
    done = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: import of torch halted; None in sys.modules"
    )


# What users import from: packages, and these. A star of them gives what they list.
PUBLIC = ("ipufit/errors.py", "ipufit/optim/state.py", "ipufit/as_poptorch/", "ipufit/poptorch/")


def test_a_module_lists_its_names_only_where_they_are_not_those_without_an_underscore():
    """A list of the same would be written twice."""
    root = pathlib.Path(ipufit.__file__).parents[1]
    for path in sorted((root / "ipufit").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        is_private = where.startswith("ipufit/poptorch/_") or not where.startswith(PUBLIC)
        if path.name != "__init__.py" and is_private:
            own, listed = _names_in(path)
            assert listed != own, f"{where}: __all__ repeats the names without an underscore"


def _names_in(path):
    """The names that a module defines for others, and those that it lists."""
    own, listed = set(), None
    for node in ast.parse(path.read_text("utf-8")).body:
        names = [getattr(node, "name", "")]
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)]
        if names == ["__all__"]:
            listed = {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
        else:
            own.update(name for name in names if name[:1] not in ("", "_"))
    return own, listed
