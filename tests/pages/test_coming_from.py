"""What the pages for those who come from elsewhere say of each option, held against the code."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import poptorch
from ipufit.engines.ipu import effects
from ipufit.utils.names import REPLACEMENTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "coming-from-poptorch.md"


def rows():
    """Kind and text by the setter of a row."""
    table = PAGE.read_text(encoding="utf-8").partition("## Setters")[2]
    found = re.findall(r"^\| (`.*`) \| (.*?) \| (.*) \|$", table, re.M)
    return {name: (kind, text) for names, kind, text in found for name in names[1:-1].split("`, `")}


def test_the_kind_of_every_setter_is_the_real_one():
    """Who moves by this table would lose an option that it calls exact by mistake."""
    kinds = dict.fromkeys(effects._EXACT.values(), "exact")
    kinds.update({setter: "approximated" for setter, _ in effects._APPROXIMATED.values()})
    absent = [*effects._NO_EFFECT.values(), *effects._BY_FIELD.values()]
    for setter, why in absent:
        assert rows()[setter] == ("absent", why)
    for setter, kind in kinds.items():
        assert rows()[setter][0] == kind


def test_every_setter_has_a_row():
    """An option that is not in the table might be anything."""
    options = poptorch.Options()
    groups = {"": options, "Precision.": options.Precision, "Training.": options.Training}
    groups["TensorLocations."] = options.TensorLocations
    # All groups have these; what is left of Options reads or copies.
    shared = {"checkIsFrozen", "createOrSet", "deleteIfExists", "exists", "set", "update"}
    shared |= {"clone", "defaultOutputMode", "from_json", "loadFromFile", "toDict"}
    setters = {
        f"{group}{name}"
        for group, owner in groups.items()
        for name in dir(type(owner))
        if name[0].islower() and callable(getattr(type(owner), name)) and name not in shared
    }
    assert len(setters) > 40
    assert setters <= set(rows())


# Pages, and the tables in which the first column has names of arguments elsewhere.
TABLES = {
    "coming-from-lightning.md": "## The Trainer's arguments",
    "hugging-face.md": "## From optimum-graphcore's IPUTrainer",
    "scikit-learn.md": "## Coming from skorch",
}
# Of these tables, what is no argument that a call of ours might get.
OTHER = {"NeuralNetClassifier", "NeuralNetRegressor", "module__", "optimizer__", "warm_start"}
OTHER |= {"predict_nonlinearity", "to_pipelined", "hyperparameter_search"}
OTHER |= {"dataloaders", "test_dataset"}  # of evaluate and predict


def rows_of(page):
    """Names in the first column of a page's table of arguments, and the rest of their row."""
    table = (DOCS / page).read_text("utf-8").partition(TABLES[page])[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (.*) \|$", table, re.M)[2:]:
        first, _, rest = row.partition(" | ")
        for name in re.findall(r"`(\w+)(?:=[^`]*)?`", first):
            yield name, rest


@pytest.mark.parametrize("page", TABLES)
def test_an_error_names_what_the_page_has_for_an_argument(page):
    """Who types the name that another library has is told what the page would have told."""
    model = ipufit.Model(torch.nn.Linear(1, 1))
    methods = (ipufit.Model.fit, ipufit.Model.compile, ipufit.Model.evaluate)
    ours = {name for method in methods for name in inspect.signature(method).parameters}
    rows = [(name, rest) for name, rest in rows_of(page) if name not in ours | OTHER]
    assert len(rows) >= (3 if "scikit" in page else 20)
    for name, rest in rows:
        with pytest.raises(ipufit.errors.UnknownArgumentError) as caught:
            model.fit(torch.ones(1, 1), **{name: 1})
        advice = str(caught.value).partition(". ")[2]
        if "absent" in rest or rest.startswith("nothing"):
            continue
        assert not advice.startswith("Leave it out, or write"), name
        words = [set(re.findall(r"[a-z]{4,}", text.lower())) for text in (advice, rest)]
        assert words[0] & words[1], (name, advice, rest)


def test_names_of_other_libraries_that_errors_know_are_on_a_page():
    """The table of the errors and those of the pages are one."""
    known = {name for page in TABLES for name, _ in rows_of(page)}
    known |= {name for _, name in options_of_keras()}
    texts = [(DOCS / page).read_text("utf-8") for page in ("coming-from-keras.md", *TABLES)]
    texts.append((DOCS.parent / "CHANGELOG.md").read_text("utf-8"))
    words = {word.rpartition(".")[2] for names in REPLACEMENTS for word in names.split()}
    missing = {word for word in words - known if not any(f"`{word}`" in text for text in texts)}
    assert missing <= HABITS
    assert words >= HABITS


# What people type who remember torch.compile, other trainers, loaders or old versions; on no page.
HABITS = {
    *("backend", "clip_norm", "dataset", "distribute", "drop_last", "dynamic", "early_stopping"),
    *(
        "eval_batch_size",
        "eval_data",
        "evaluation_strategy",
        "fullgraph",
        "gpus",
        "label_smoothing",
    ),
    *("lr_schedule", "max_iter", "max_queue_size", "mixed_precision", "mode", "momentum", "name"),
    *("nb_epoch", "net", "num_devices", "num_replicas", "num_workers", "pin_memory", "replicas"),
    *("prefetch_factor", "replication_factor", "scheduler", "scoring", "train_batch_size"),
    *("train_loader", "use_multiprocessing", "val_data", "val_loader", "val_split", "warmup"),
    *("validation_set", "workers"),
}


def options_of_keras():
    """Kind by method and parameter."""
    page = (DOCS / "coming-from-keras.md").read_text(encoding="utf-8")
    table = page.partition("## Options, one by one")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", table, re.M)[2:]
    assert {kind for _, kind in rows} == {"exact", "approximated", "absent"}
    return {
        (method, name): kind
        for names, kind in rows
        for method, name in re.findall(r"`(\w+)\((\w+)\)`", names)
    }


def test_what_is_exactly_as_in_keras_has_its_name():
    """An argument that is called exact is typed as it is there."""
    kinds = options_of_keras()
    assert len(kinds) > 30
    for (method, name), kind in kinds.items():
        taken = inspect.signature(getattr(ipufit.Model, method)).parameters
        assert name in taken or kind != "exact", f"{method}({name})"
