"""``python -m tests.gallery.draw SCRIPT PICTURE [ARGUMENT ...]``: run an example, then draw.

The script runs as ``python SCRIPT ARGUMENT ...`` would run it, and prints the same. What it trained
is drawn when it has ended: its curves, or what DRAWINGS has for it. Beside the picture, a JSON file
of the same name says how long the script took, and what it printed.
"""

import functools
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.figure
from PIL import Image

WIDTH, HEIGHT, DPI = 6.4, 2.8, 150  # inches, and pixels per inch
LARGEST = 60_000  # bytes
COLORS = (256, 128, 64, 32, 16)


class Finished:
    """An example that has run: its names, what it trained, and what it printed."""

    def __init__(self, script, names, fits, printed):
        self.script, self.names, self.fits, self.printed = script, names, fits, printed

    @property
    def model(self):
        """The model of the last fit."""
        return self.fits[-1][0]

    @property
    def history(self):
        """What the last fit returned."""
        return self.fits[-1][1]


class Copied(io.TextIOBase):
    """Standard output that also keeps what is written."""

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        """Write to both."""
        self.text += text
        return self.stream.write(text)

    def flush(self):
        """Flush what is behind."""
        self.stream.flush()


def run(script, arguments):
    """Run the script as the main program, and watch its calls of fit."""
    import ipufit

    fits, fit = [], ipufit.Model.fit

    @functools.wraps(fit)
    def observed(model, *args, **options):
        history = fit(model, *args, **options)
        fits.append((model, history, args))
        return history

    ipufit.Model.fit = observed
    sys.argv[:] = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    sys.stdout = Copied(sys.stdout)
    try:
        names = runpy.run_path(str(script), run_name="__main__")
        return Finished(script, names, fits, sys.stdout.text)
    finally:
        ipufit.Model.fit, sys.stdout = fit, sys.stdout.stream


def axes(columns=1, **options):
    """A row of empty plots."""
    figure = mpl.figure.Figure((WIDTH, HEIGHT), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def curves(finished):
    """Every value over the epochs."""
    figure = finished.history.plot(columns=3)
    panels = figure.axes[0].get_gridspec()
    figure.set_size_inches(WIDTH * max(2, panels.ncols) / 2, HEIGHT * panels.nrows)
    return figure


def own_picture(finished):
    """The picture that the script saves, and whose path it prints."""
    (path,) = re.findall(r"^.*: (\S+\.png)$", finished.printed, re.MULTILINE)
    return Image.open(path)


def page(finished):
    """The top of the page that the script writes, in a browser."""
    (path,) = re.findall(r"^(\S+\.html): ", finished.printed, re.MULTILINE)
    target = Path(path).with_suffix(".png")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    size = ("--window-size=1000,760", "--virtual-time-budget=5000")
    command = ("chromium", *options, *size, f"--screenshot={target}", Path(path).resolve().as_uri())
    subprocess.run(command, check=True, capture_output=True)
    return Image.open(target)


def points(finished):
    """The ring to learn, and what the generator makes of noise."""
    import torch

    figure, (real, made) = axes(2, sharex=True, sharey=True)
    ring = finished.names["ring"](1500)
    drawn = finished.model.predict(torch.randn(1500, 4), batch_size=500, verbose=0)
    for plot, values, title in ((real, ring, "data"), (made, drawn, "made by the generator")):
        plot.scatter(*values.T, s=3, alpha=0.6, linewidths=0)
        plot.set(title=title, aspect="equal")
    return figure


def optimizers(finished):
    """The loss of each optimizer."""
    figure, plot = axes()
    for (_, history, _), name in zip(finished.fits, ("muon", "adamw")):
        plot.plot([epoch + 1 for epoch in history.epoch], history.history["loss"], label=name)
    plot.set(xlabel="epoch", ylabel="loss", xticks=[epoch + 1 for epoch in history.epoch])
    plot.legend()
    return figure


def schedule(finished):
    """The learning rate from update to update, and the loss of each epoch."""
    figure, (rates, losses) = axes(2)
    updates = finished.names["UPDATES"]
    rates.plot([finished.names["rate"](update) for update in range(updates)])
    rates.set(xlabel="update", ylabel="part of the learning rate")
    history = finished.history
    losses.plot([epoch + 1 for epoch in history.epoch], history.history["loss"], marker="o")
    losses.set(xlabel="epoch", ylabel="loss", xticks=[epoch + 1 for epoch in history.epoch])
    return figure


def lengths(finished):
    """How many texts have which length, and the lengths that they are padded to."""
    figure, plot = axes()
    train, _ = finished.names["load"]()
    plot.hist([len(inputs["words"]) for inputs, _ in train], bins=64)
    padded = {inputs["words"].shape[1] for inputs, _ in finished.names["loader"](train)}
    for place, length in enumerate(sorted(padded)):
        plot.axvline(length, color="C1", linestyle="--", label=None if place else "padded to")
    plot.set(xlabel="words", ylabel="docstrings", yscale="log")
    plot.legend()
    return figure


def sound(finished):
    """A recording that was not trained on, and how likely each digit is in each frame."""
    import torch

    recording = finished.names["Recordings"](1, 2)[0]
    net = finished.model.module.eval()
    with torch.no_grad():
        scores = net(recording["sound"][None])
    scores = (scores[0] if isinstance(scores, (tuple, list)) else scores).squeeze()
    digits = [digit - 1 for digit in recording["digits"].tolist() if digit]
    figure, (heard, read) = axes(2)
    heard.imshow(recording["sound"].T, aspect="auto", origin="lower")
    spoken = " ".join(map(str, digits))
    heard.set(title=f"spoken: {spoken}", xlabel="frame", ylabel="band")
    chances = scores.softmax(-1)
    read.imshow(chances.T, aspect="auto", origin="lower")
    read.set(title="what the net makes of it", xlabel="frame")
    read.set_yticks(range(11), ["silence", *map(str, range(10))])
    return figure


def bars(finished):
    """The times that were printed."""
    figure, plot = axes()
    times = re.findall(r"^(.+): (\d+) microseconds", finished.printed, re.MULTILINE)
    bars = plot.barh([name for name, _ in times], [int(time) for _, time in times])
    plot.bar_label(bars, padding=4)
    plot.set(xlabel="microseconds per update")
    plot.margins(x=0.1)
    plot.invert_yaxis()
    return figure


def grid(finished):
    """The accuracy of each setting that was tried, as printed."""
    figure, plot = axes()
    rows = re.findall(r"^ +(\d+) +(\S+) +(\S+)$", finished.printed, re.MULTILINE)
    names = [f"{hidden} hidden, lr {rate}" for hidden, rate, _ in rows]
    bars = plot.barh(names, [float(accuracy) for *_, accuracy in rows])
    plot.bar_label(bars, padding=4)
    plot.set(xlabel="accuracy, mean of three folds", xlim=(0, 1.1))
    plot.invert_yaxis()
    return figure


def classes(finished):
    """Pictures, and what the net takes them for."""
    figure, plots = axes(8)
    x, y = finished.fits[-1][2][:2]
    guesses = finished.model.predict(x[:8], batch_size=8, verbose=0).argmax(1).tolist()
    for plot, picture, guess, label in zip(plots, x, guesses, y.tolist()):
        plot.imshow(picture, cmap="gray")
        plot.set(title=f"{guess}", xlabel=f"label {label}", xticks=[], yticks=[])
    figure.set_size_inches(WIDTH, HEIGHT / 2)
    return figure


def kill(finished):
    """The run that was killed and went on, beside the one that was left alone."""
    figure, plot = axes()
    (left,) = re.findall(r"update-(\d+) left", finished.printed) or ["0"]
    total = 20 * 113  # epochs, and updates of each
    plot.barh(["left alone"], [total])
    plot.barh(["killed"], [int(left)], color="C0")
    plot.barh(["killed"], [total - int(left)], left=int(left), color="C1", label="went on")
    plot.axvline(int(left), color="black", linestyle="--", label="last checkpoint")
    plot.set(xlabel="update")
    plot.legend(loc="lower right")
    figure.set_size_inches(WIDTH, HEIGHT * 0.7)
    return figure


DRAWINGS = {
    "benchmark_mlp": bars,
    "digits": own_picture,
    "fashion_mnist": classes,
    "gan": points,
    "language_model": schedule,
    "muon": optimizers,
    "pipeline": own_picture,
    "report": page,
    "resume_after_kill": kill,
    "scikit_learn_estimator": grid,
    "speech": sound,
    "text_buckets": lengths,
}


def drawing(script):
    """The function that draws what this script makes; its docstring says what is to be seen."""
    return DRAWINGS.get(script.stem, curves)


def save(picture, path):
    """Write a figure or an image, with as many colours as LARGEST allows."""
    if not isinstance(picture, Image.Image):
        file = io.BytesIO()
        picture.savefig(file, format="png", dpi=DPI)
        picture = Image.open(file)
    widest = round(WIDTH * DPI)
    if picture.width > widest:
        height = round(picture.height * widest / picture.width)
        picture = picture.convert("RGB").resize((widest, height), Image.Resampling.LANCZOS)
    for colors in COLORS:
        picture.convert("RGB").quantize(colors).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            return
    raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}")


def main(script, picture, *arguments):
    """Run, and draw."""
    mpl.use("Agg")
    script = Path(script).resolve()
    finished = run(script, arguments)
    # Of this process and those that it has started: what others do at the time adds nothing.
    seconds = sum(os.times()[:4])
    facts = {"seconds": seconds, "printed": finished.printed}
    Path(picture).with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")
    save(drawing(script)(finished), Path(picture))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(*sys.argv[1:])
