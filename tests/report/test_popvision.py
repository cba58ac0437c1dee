"""On IPUs the report's folder gets PopVision's profile: what the options of the program say."""

import json
import warnings

import pytest
import torch
from torch import nn

import ipufit
import ipufit.poptorch as poptorch
from ipufit.engines.ipu import options as ipu_options
from ipufit.report import recorder
from ipufit.report.run import FACTS


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """The page has tests of its own."""
    monkeypatch.setattr(recorder, "write_page", lambda folder: None)


@pytest.fixture
def compiled(monkeypatch):
    """The options of every program that is compiled, in order."""
    found, make = [], ipu_options.make_options

    def noting(*args):
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr("ipufit.engines.ipu.program_cache.make_options", noting)
    monkeypatch.setattr("ipufit.engines.ipu.inference.make_options", noting)
    return found


def fit(folder, samples=8, options=None, **more):
    """A model for the stand-in, trained with a report."""
    torch.manual_seed(0)
    model = ipufit.Model(nn.Linear(3, 2), engine="ipu-standin")
    model.compile("sgd", "mse", poptorch=options)
    data = torch.ones(samples, 3), torch.ones(samples, 2)
    report = None if folder is None else ipufit.Report(folder)
    model.fit(*data, batch_size=2, verbose=0, callbacks=report, **more)
    return model


def engine_options(options):
    return options._Popart.options.get("engineOptions", {})


def profile_into(folder):
    """What PopTorch's enableProfiling sets."""
    return {
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": str(folder),
        "autoReport.all": "true",
    }


def facts(folder):
    return json.loads((folder / FACTS).read_text())


def test_the_training_program_writes_its_profile_into_the_folder(tmp_path, compiled):
    """And no other one: that of a validation would overwrite nothing, and says little."""
    data = torch.ones(4, 3), torch.ones(4, 2)
    fit(tmp_path, validation_data=data)
    training, *others = map(engine_options, compiled)
    assert training == profile_into(tmp_path / "popvision")
    assert others == [{}]


@pytest.mark.long
def test_without_a_report_there_is_no_profile(compiled):
    fit(None)
    assert list(map(engine_options, compiled)) == [{}]


def test_programs_of_smaller_updates_have_folders_beside(tmp_path, compiled):
    """PopTorch gives all profiles of training one name: in one folder the last one would win."""
    fit(tmp_path, samples=10, device_iterations=4)
    folders = [engine_options(each)["autoReport.directory"] for each in compiled]
    main = str(tmp_path / "popvision")
    assert folders == [main, f"{main}/1x1x1x2"]


@pytest.mark.long
def test_the_stand_in_writes_none_and_says_so(tmp_path):
    fit(tmp_path)
    assert facts(tmp_path)["popvision"] is None
    assert not (tmp_path / "popvision").exists()


def test_where_it_is_stands_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(ipu_options, "is_standin", lambda sdk: False)
    fit(tmp_path)
    assert facts(tmp_path)["popvision"] == str(tmp_path / "popvision")


@pytest.mark.long
def test_other_options_of_the_engine_stay(tmp_path, compiled):
    options = poptorch.Options()
    options._Popart.setEngineOptions({"opt.useAutoloader": "true"})
    fit(tmp_path, options=options)
    wanted = {"opt.useAutoloader": "true", **profile_into(tmp_path / "popvision")}
    assert engine_options(compiled[0]) == wanted
    assert engine_options(options) == {"opt.useAutoloader": "true"}


@pytest.mark.long
def test_a_profile_that_options_ask_for_goes_where_they_say(tmp_path, compiled, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(ipu_options, "is_standin", lambda sdk: False)
    with pytest.warns(UserWarning, match="^report asks for") as warned:
        fit(tmp_path / "run", options=poptorch.Options().enableProfiling(str(own)))
    assert [str(each.message) for each in warned] == [
        f"report asks for PopVision's profile in {str(tmp_path / 'run' / 'popvision')!r}, but "
        "training_options sets autoReport.all, autoReport.directory, which takes precedence: the "
        f"profile is written to {str(own)!r}."
    ]
    assert engine_options(compiled[0]) == profile_into(own)
    assert facts(tmp_path / "run")["popvision"] == str(own)
    assert facts(tmp_path / "run")["warnings"][0]["text"] == str(warned[0].message)


@pytest.mark.long
def test_a_profile_that_options_forbid_is_not_written(tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(ipu_options, "is_standin", lambda sdk: False)
    options = poptorch.Options()
    options._Popart.setEngineOptions({"autoReport.all": "false"})
    with pytest.warns(UserWarning, match="which takes precedence: the profile is not written"):
        fit(tmp_path, options=options)
    assert engine_options(compiled[0]) == {"autoReport.all": "false"}
    assert facts(tmp_path)["popvision"] is None


def test_the_environment_comes_first(tmp_path, compiled, monkeypatch):
    """As for Poplar itself."""
    setting = {"autoReport.directory": str(tmp_path / "env"), "autoReport.all": "true"}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(setting))
    with pytest.warns(UserWarning, match="but POPLAR_ENGINE_OPTIONS sets autoReport.all"):
        fit(tmp_path / "run")
    assert engine_options(compiled[0]) == {}


RUNS = {"autoReport.executionProfileProgramRunCount": "5"}


@pytest.mark.parametrize("in_environment", [False, True])
def test_a_number_of_runs_leaves_the_profile_where_it_is(
    in_environment, tmp_path, compiled, monkeypatch
):
    """Poplar's default are the first two: a limit says neither whether there is one, nor where."""
    monkeypatch.setattr(ipu_options, "is_standin", lambda sdk: False)
    options = poptorch.Options()
    if in_environment:
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(RUNS))
    else:
        options._Popart.setEngineOptions(RUNS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(tmp_path, options=options)
    expected = profile_into(tmp_path / "popvision")
    assert engine_options(compiled[0]) == {**expected, **({} if in_environment else RUNS)}
    assert facts(tmp_path)["popvision"] == str(tmp_path / "popvision")


@pytest.mark.long
def test_an_environment_that_agrees_or_says_nothing_of_profiles_is_no_warning(
    tmp_path, compiled, monkeypatch
):
    same = {"autoReport.all": "true", "autoReport.directory": str(tmp_path / "popvision")}
    for folder, text in ((tmp_path, json.dumps(same)), (tmp_path / "b", '{"debug.x": "1"}')):
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit(folder)
    assert engine_options(compiled[0]) == {}
    assert engine_options(compiled[1]) == profile_into(tmp_path / "b" / "popvision")
