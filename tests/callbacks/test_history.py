"""History: which epoch a value belongs to, files, tables, the best epoch and the picture."""

import csv
import json
import math
import sys
import types

import pytest

import ipufit
from ipufit import History
from ipufit.callbacks.history import direction_of
from ipufit.errors import ConfigurationError
from tests.told import message

NAN = math.nan


def every_second():
    """Six epochs from the third on, validated after every second, with a value that is NaN."""
    history = History({"seed": 3, "engine": "embedded"})
    losses = [3.0, 2.0, NAN, 1.0 / 3.0, 0.5, 0.25]
    for i, loss in enumerate(losses):
        logs = {"loss": loss, "accuracy": i / 10}
        if i % 2:
            logs["val_loss"] = [0, 2.5, 0, 0.75, 0, 0.75][i]
        history.append(i + 2, logs)
    return history


def test_lists_hold_what_there_is_and_know_their_epochs():
    history = every_second()
    assert history.history["val_loss"] == [2.5, 0.75, 0.75]
    assert history.places("val_loss") == [1, 3, 5]
    assert history.places("loss") == [0, 1, 2, 3, 4, 5]
    aligned = history.aligned("val_loss")
    assert aligned[1::2] == [2.5, 0.75, 0.75]
    assert all(math.isnan(value) for value in aligned[::2])


def test_a_list_put_there_by_hand_ends_with_the_last_epoch():
    """Users of Keras write into history.history."""
    history = every_second()
    history.history["mine"] = [1.0, 2.0]
    assert history.places("mine") == [4, 5]
    history.history["loss"] = [9.0]
    assert history.places("loss") == [5]


def test_values_of_updates_are_kept_with_their_index():
    history = every_second()
    history.append_update("gradient_norm", 0, 2)
    history.append_update("gradient_norm", 5, 1.5)
    assert history.updates == {"gradient_norm": [(0, 2.0), (5, 1.5)]}
    assert all(isinstance(value, float) for _, value in history.updates["gradient_norm"])


def test_csv_has_a_line_per_epoch_and_all_digits(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("old")
    every_second().to_csv(path)
    assert path.read_text() == (
        "epoch,loss,accuracy,val_loss\n"
        "2,3.0,0.0,\n"
        "3,2.0,0.1,2.5\n"
        "4,nan,0.2,\n"
        "5,0.3333333333333333,0.3,0.75\n"
        "6,0.5,0.4,\n"
        "7,0.25,0.5,0.75\n"
    )
    History().to_csv(str(path))
    assert path.read_text() == "epoch\n"
    odd = History()
    odd.append(0, {"a,b": 1.0})
    odd.to_csv(path)
    with open(path, newline="") as file:
        assert list(csv.reader(file)) == [["epoch", "a,b"], ["0", "1.0"]]


def equal(a, b):
    """Whether two histories are the same, NaN included."""
    same = {name: [repr(value) for value in values] for name, values in a.history.items()}
    other = {name: [repr(value) for value in values] for name, values in b.history.items()}
    places = [{name: h.places(name) for name in h.history} for h in (a, b)]
    return (
        list(same.items()) == list(other.items())
        and places[0] == places[1]
        and (a.epoch, a.params) == (b.epoch, b.params)
        and repr(a.updates) == repr(b.updates)
    )


def test_json_brings_everything_back(tmp_path):
    """Through a path, through the text, and NaN and infinity too."""
    history = every_second()
    history.append(8, {"loss": math.inf, "val_loss": -math.inf})
    history.append_update("scale", 3, NAN)
    path = tmp_path / "history.json"
    text = history.to_json(path)
    assert path.read_text() == text + "\n"

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(text, parse_constant=refuse)
    for source in (text, path, str(path)):
        again = History.from_json(source)
        assert equal(again, history)
        assert again.best_epoch("loss", "max") == 8
    assert history.to_json() == text
    assert equal(History.from_json(History().to_json()), History())
    again.append(9, {"val_loss": 1.0})
    assert again.places("val_loss") == [1, 3, 5, 6, 7]


@pytest.mark.long("ipu-standin")
def test_a_fit_survives_json():
    """What fit puts into params is JSON."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(12, 3)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    model = ipufit.Model(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse")
    history = model.fit(loader, epochs=2, validation_data=loader, verbose=0)
    assert equal(History.from_json(history.to_json()), history)


def test_params_that_json_lacks_are_refused(tmp_path):
    history = every_second()
    history.params["net"] = object
    assert message(history.to_json, tmp_path / "history.json") == (
        "History.params must hold only JSON values (finite numbers, strings, lists, dicts, "
        "None), but Object of type type is not JSON serializable. Remove that entry, or convert "
        "it to a string."
    )
    assert not (tmp_path / "history.json").exists()


def test_what_is_no_history_is_refused(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        History.from_json('{"format": "other/1"}')
    assert str(caught.value) == (
        "from_json needs the output of History.to_json, got something else in the text "
        "(ValueError: its format is 'other/1'). Write it with history.to_json(path)."
    )
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert message(History.from_json, path) == (
        f"from_json needs the output of History.to_json, got something else in {str(path)!r} "
        "(TypeError: list indices must be integers or slices, not str). Write it with "
        "history.to_json(path)."
    )
    assert message(History.from_json, "nowhere.json") == (
        "from_json needs a file that to_json wrote, or its text, but [Errno 2] No such file or "
        "directory: 'nowhere.json'. Check the path."
    )


def test_dataframe_has_a_row_per_epoch():
    pandas = pytest.importorskip("pandas")
    frame = every_second().to_dataframe()
    expected = pandas.DataFrame(
        {
            "loss": [3.0, 2.0, NAN, 1.0 / 3.0, 0.5, 0.25],
            "accuracy": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
            "val_loss": [NAN, 2.5, NAN, 0.75, NAN, 0.75],
        },
        index=pandas.Index(range(2, 8), name="epoch", dtype="int64"),
    )
    pandas.testing.assert_frame_equal(frame, expected)
    assert len(History().to_dataframe()) == 0


def test_dataframe_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert message(every_second().to_dataframe) == (
        "History.to_dataframe needs pandas, which is not installed. Run: pip install ipufit[pandas]"
    )


@pytest.mark.parametrize(
    ("arguments", "epoch"),
    [((), 5), (("loss",), 7), (("loss", "max"), 2), (("accuracy",), 7), (("accuracy", "min"), 2)],
)
def test_best_epoch(arguments, epoch):
    """The first of equal ones, NaN never, and the index that fit counts with."""
    assert every_second().best_epoch(*arguments) == epoch


def test_best_epoch_needs_a_value_and_a_direction():
    history = every_second()
    history.history["widgets"] = [1.0] * 6
    history.history["hollow_loss"] = [NAN] * 6
    for arguments, text in [
        (
            ("val_acc",),
            "the history must have a value of that name, got 'val_acc'. It has loss, accuracy, "
            "val_loss, widgets, hollow_loss.",
        ),
        (
            ("widgets",),
            "mode='auto' needs a name that says whether smaller is better, such as 'val_loss' or "
            "'val_accuracy', got 'widgets'. Pass mode='min' or mode='max'.",
        ),
        (
            ("loss", "lowest"),
            "mode must be one of 'auto', 'min', 'max', got 'lowest'. Use 'min' where a smaller "
            "value is better.",
        ),
        (
            ("hollow_loss",),
            "best_epoch needs an epoch with a value of 'hollow_loss', but all are NaN. Monitor "
            "another value.",
        ),
    ]:
        assert message(history.best_epoch, *arguments) == text
    assert history.best_epoch("widgets", "max") == 2
    with pytest.raises(ConfigurationError, match="It has none yet"):
        History().best_epoch()


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        ("min", "loss val_loss MeanSquaredError mse val_top5_error cross_entropy accuracy_loss"),
        ("min", "brier_score CrossEntropyLoss head_loss perplexity"),
        ("max", "accuracy val_acc BinaryAccuracy AUROC F1Score top5_acc r2_score mean_iou"),
        (None, "lr learning_rate gradient_norm widgets score entropy"),
    ],
)
def test_names_say_which_way_is_better(direction, names):
    assert {name: direction_of(name) for name in names.split()} == dict.fromkeys(
        names.split(), direction
    )


def test_what_a_metric_says_goes_before_its_name():
    """A history must not call that epoch the best which a callback took for the worst."""
    known = {"error": "max", "val_error": "max", "widgets": "min"}
    assert direction_of("val_error", known) == "max"
    assert direction_of("val_error", known, guess=False) == "max"
    assert direction_of("other_error", known) == "min"
    assert direction_of("other_error", known, guess=False) is None
    assert direction_of("head_loss", known, guess=False) == "min"
    history = History({"directions": known})
    for value in (1.0, 3.0, 2.0):
        history.append(len(history.epoch), {"error": value, "widgets": value})
    assert [history.best_epoch(name) for name in ("error", "widgets")] == [1, 0]
    assert history.best_epoch("error", "min") == 0
    page = history._repr_html_()
    assert "<tr><td>1</td><td>1</td><td><b>1</b></td></tr>" in page
    assert "<tr><td>2</td><td><b>3</b></td><td>3</td></tr>" in page
    assert page.count("<b>") == 2


def curves(count, validated=1, **more):
    """A history of so many epochs."""
    history = History()
    for i in range(count):
        logs = {"loss": 1.0 + (i - 5) ** 2 / 100, "accuracy": i / count}
        logs.update({name: values[i] for name, values in more.items()})
        if i % validated == 0:
            logs["val_loss"] = 1.5 + (i - 3) ** 2 / 100
            logs["val_accuracy"] = 0.5
        history.append(i, logs)
    return history


def panels(figure):
    return {axes.get_title(loc="left").strip(): axes for axes in figure.axes}


def lines(axes):
    return {
        line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist())
        for line in axes.get_lines()
    }


@pytest.fixture
def _matplotlib():
    pytest.importorskip("matplotlib")


needs_matplotlib = pytest.mark.usefixtures("_matplotlib")


@needs_matplotlib
def test_a_panel_shows_training_and_validation_where_they_belong():
    """Epochs without a validation leave no gap and shift nothing."""
    figure = curves(7, validated=3).plot()
    loss = lines(panels(figure)["loss"])
    assert loss["training"][0] == [1, 2, 3, 4, 5, 6, 7]
    assert loss["validation"] == ([1, 4, 7], [1.59, 1.5, 1.59])


class Shell:
    """As much of a notebook's IPython as a picture meets; the real one: tests/integrations."""

    kernel = True

    def __init__(self):
        self.events = self.display_formatter = self.display_pub = self
        self.formatters = {"text/plain": repr, "image/png": lambda figure: None}
        self.due = []

    def register(self, event, function):
        assert event == "post_execute"
        self.due.append(function)

    def unregister(self, event, function):
        self.due.remove(function)

    def end_cell(self):
        for function in list(self.due):
            function()


@pytest.mark.long("ipu-standin")
@needs_matplotlib
def test_a_notebook_shows_a_plot_once(monkeypatch, tmp_path):
    """It showed nothing: IPython knows the figures of pyplot alone."""
    shell, shown = Shell(), []
    shell.publish = lambda data, metadata: shown.append(data)
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    curves(7).plot()
    assert shown == []
    shell.end_cell()
    assert [sorted(data) for data in shown] == [["image/png", "text/plain"]]
    assert shown[0]["image/png"].startswith(b"\x89PNG")
    figure = curves(7).plot()
    figure._ipython_display_()  # what ends the cell
    shell.end_cell()
    shell.end_cell()
    assert len(shown) == 2
    curves(7).plot(tmp_path / "picture.png")
    shell.end_cell()
    assert len(shown) == 2
    monkeypatch.delattr(Shell, "kernel")
    assert not hasattr(curves(7).plot(), "_ipython_display_")


@pytest.mark.long("ipu-standin")
@needs_matplotlib
def test_the_best_epoch_is_marked_by_the_validation():
    figure = curves(10).plot()
    loss, accuracy = panels(figure)["loss"], panels(figure)["accuracy"]
    assert loss.get_title(loc="right") == "★ validation 1.5, epoch 4"
    assert accuracy.get_title(loc="right") == "★ validation 0.5, epoch 1"
    assert [[4.0, 1.5]] in [c.get_offsets().tolist() for c in loss.collections]
    plain = panels(curves(10).plot(mark_best=False))["loss"]
    assert plain.get_title(loc="right") == ""
    assert list(plain.collections) == []
    history = History()
    for i in range(3):
        history.append(i, {"loss": 3.0 - i, "widgets": 1.0})
    figure = history.plot()
    assert panels(figure)["loss"].get_title(loc="right") == "★ training 1, epoch 3"
    assert panels(figure)["widgets"].get_title(loc="right") == ""
    history.params["directions"] = {"loss": "max", "widgets": "min"}
    figure = history.plot()
    assert panels(figure)["loss"].get_title(loc="right") == "★ training 3, epoch 1"
    assert panels(figure)["widgets"].get_title(loc="right") == "★ training 1, epoch 1"


@needs_matplotlib
def test_the_learning_rate_has_the_last_panel_in_steps():
    rates = [0.1 * 0.1 ** (i // 2) for i in range(8)]
    figure = curves(8, lr=rates).plot()
    assert list(panels(figure)) == ["loss", "accuracy", "lr"]
    lr = panels(figure)["lr"]
    assert lr.get_lines()[0].get_drawstyle() == "steps-mid"
    assert lr.get_yscale() == "log"
    assert panels(figure)["loss"].get_yscale() == "linear"
    assert lr.get_legend() is None


@pytest.mark.long("ipu-standin")
@needs_matplotlib
def test_values_of_updates_have_panels_of_their_own():
    history = curves(3)
    for update in range(50):
        history.append_update("norm", update, 2.0 + update)
    figure = history.plot()
    norm = panels(figure)["norm, per update"]
    assert norm.get_xlabel() == "update"
    assert norm.get_lines()[0].get_xdata().tolist() == list(range(50))
    assert norm.get_lines()[0].get_marker() in ("", "None", None)
    assert list(panels(history.plot(metrics=["norm"]))) == ["norm, per update"]


@pytest.mark.long("ipu-standin")
@needs_matplotlib
def test_metrics_chooses_panels_in_order():
    history = curves(4)
    assert list(panels(history.plot(metrics=["accuracy", "loss"]))) == ["accuracy", "loss"]
    assert list(panels(history.plot(metrics="accuracy"))) == ["accuracy"]
    assert message(history.plot, metrics=["loss", "val_loss"]) == (
        "metrics must be names of the history without 'val_', got 'val_loss'. It has loss, "
        "accuracy."
    )
    assert message(history.plot, metrics=[]) == (
        "metrics must name at least one value, got none. Leave it out to draw all."
    )


@pytest.mark.long("ipu-standin")
@needs_matplotlib
@pytest.mark.parametrize(
    ("count", "columns", "shape"),
    [(1, None, (1, 1)), (3, None, (1, 3)), (4, None, (2, 2)), (7, None, (3, 3)), (7, 2, (4, 2))],
)
def test_many_panels_wrap_into_rows(count, columns, shape):
    history = History()
    for i in range(3):
        history.append(i, {f"a{n}": 1.0 + i for n in range(count)})
    figure = history.plot(columns=columns)
    assert len(figure.axes) == count
    grid = figure.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == shape


@needs_matplotlib
@pytest.mark.parametrize("columns", [0, -1, 1.5, True, "2"])
def test_columns_must_be_a_count(columns):
    assert message(curves(2).plot, columns=columns) == (
        f"columns must be an integer of at least 1, got {columns!r}. Leave it out to let the "
        "number of panels decide."
    )


@pytest.mark.long
@needs_matplotlib
def test_what_is_not_finite_leaves_a_gap_and_a_cross(tmp_path):
    """Infinity must not flatten everything else."""
    values = [1.0, NAN, 2.0, math.inf, 0.5]
    figure = curves(5, mae=values).plot(tmp_path / "curves.png")
    axes = panels(figure)["mae"]
    assert [repr(v) for v in lines(axes)["training"][1]] == ["1.0", "nan", "2.0", "nan", "0.5"]
    crosses = [c for c in axes.collections if c.get_label() == "NaN or infinite"]
    assert crosses[0].get_offsets()[:, 0].tolist() == [2.0, 4.0]
    assert axes.get_title(loc="right") == "★ training 0.5, epoch 5"
    nothing = History()
    for i in range(2):
        nothing.append(i, {"loss": NAN})
    assert panels(nothing.plot(tmp_path / "nan.png"))["loss"].get_title(loc="right") == ""


@pytest.mark.long
@needs_matplotlib
def test_one_epoch_and_many_epochs_can_be_read(tmp_path):
    """Points where a line has no length, no points where they would hide the line."""
    one = panels(curves(1).plot(tmp_path / "one.png"))["loss"]
    assert one.get_lines()[0].get_marker() == "o"
    assert one.get_xticks().tolist() == [1]
    assert one.get_title(loc="right") == ""
    many = panels(curves(200).plot(tmp_path / "many.png"))["loss"]
    assert many.get_lines()[0].get_marker() in ("", "None", None)
    long = History()
    for i in range(2):
        long.append(i, {"a_name_that_is_far_too_long_for_one_line_loss": 1.0})
    assert long.plot().axes[0].get_title(loc="left").endswith("loss\n")


def test_a_notebook_shows_the_last_and_the_best_epochs():
    history = curves(20, **{"<b>": [1.0] * 20})
    page = history._repr_html_()
    assert page.startswith("<table><caption>History of 20 epochs</caption>")
    assert "<th>epoch</th><th>loss</th><th>accuracy</th><th>&lt;b&gt;</th>" in page
    assert page.count("&#8230;") == 3
    assert "<tr><td>6</td><td><b>1</b></td>" in page
    assert page.count("<tr>") == 1 + 3 + 3 + 8
    assert "<tr><td>12</td>" not in page
    assert "<tr><td>13</td>" in page
    one = History()
    one.append(0, {"loss": NAN})
    assert "History of 1 epoch</caption>" in one._repr_html_()
    assert "<tr><td>1</td><td></td></tr>" in one._repr_html_()


def test_a_value_that_is_no_number_is_refused_by_name():
    """A callback may write into the logs of an epoch, and what it writes goes into History."""
    history = ipufit.History()
    assert message(history.append, 0, {"loss": 1.0, "note": "good"}) == (
        "values of an epoch must be numbers, but 'note' in logs is a str. Keep it in the "
        "callback itself, or log a number."
    )
    assert history.epoch == []
    assert history.history == {}
