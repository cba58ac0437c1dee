"""What the names in stages and layers mean, and what is said of those that mean nothing."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import PartitionError, UnknownNameError
from ipufit.partition.layers_per_ipu import repeated_layers
from ipufit.partition.resolve import first_gap


def linear():
    return nn.Linear(4, 4)


def stack(count, make=linear):
    return nn.Sequential(*(make() for _ in range(count)))


class Block(nn.Module):
    """A layer that holds another."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return self.inner(x)


class Grouped(nn.Module):
    """Layers in lists of lists, and in a dict."""

    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Tanh()})
        self.none = nn.ModuleList()

    def forward(self, x):
        for layer in (layer for group in self.groups for layer in group):
            x = layer(x)
        return x


class Shared(nn.Module):
    """One layer under two names, and a dict of layers alone."""

    def __init__(self):
        super().__init__()
        self.body = linear()
        self.alias = self.body
        self.heads = nn.ModuleDict({"a": linear(), "b": linear()})

    def forward(self, x):
        return self.heads["b"](self.heads["a"](self.alias(x)))


def compiled(net, **options):
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy", **options)
    return model


def refused(net, error=PartitionError, **options):
    with pytest.raises(error) as caught:
        compiled(net, **options)
    return str(caught.value)


def explained(model, capsys, runs=True):
    """What the model says of its stages."""
    x, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    if runs:
        model.fit(x, y, batch_size=2, gradient_accumulation=3, verbose=0)
        model.explain()
    else:
        model.summary()
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(("Training: ", "Inference: "))]


def test_of_nested_stacks_the_longer_one_counts():
    inner = repeated_layers(nn.Sequential(stack(4, Block), stack(4, Block)), None)
    assert inner == tuple(f"{group}.{layer}" for group in (0, 1) for layer in range(4))
    outer = repeated_layers(stack(4, lambda: stack(3)), None)
    assert outer == ("0", "1", "2", "3")
    assert repeated_layers(stack(3, lambda: stack(3)), None) == ("0", "1", "2")


@pytest.mark.long("ipu-standin")
def test_layers_are_modules_that_can_be_called():
    """A ModuleList is none, so that its own layers count."""
    layers = tuple(f"groups.{group}.{layer}" for group in range(3) for layer in range(2))
    assert repeated_layers(Grouped(), None) == layers
    model = compiled(Grouped(), parallel=ipufit.Parallel(layers_per_ipu=[2, 4]))
    x, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    model.fit(x, y, batch_size=2, gradient_accumulation=3, verbose=0)
    assert refused(Grouped(), parallel=ipufit.Parallel(layers_per_ipu=[1, 2], layers="groups")) == (
        "layers must name modules that contain layers, but 'groups.0' in 'groups' only contains "
        "others, such as 'groups.0.0'. Name those instead: layers=['groups.0', 'groups.1', "
        "'groups.2']."
    )


def test_a_dict_of_layers_counts_where_there_is_no_list():
    assert repeated_layers(Shared(), None) == ("heads.a", "heads.b")


@pytest.mark.parametrize(
    ("name", "kind", "cure"),
    [
        ("groups", "ModuleList", "Name its first layer, 'groups.0.0'."),
        ("groups.1", "ModuleList", "Name its first layer, 'groups.1.0'."),
        ("named", "ModuleDict", "Name its first layer, 'named.a'."),
        ("none", "ModuleList", "Name a module that is called."),
    ],
)
def test_what_only_holds_modules_begins_no_stage(name, kind, cure):
    assert refused(Grouped(), parallel=ipufit.Parallel(stages={name: 1})) == (
        f"stages must name modules that forward calls, got '{name}', which is a {kind} and only "
        f"contains others. {cure}"
    )


@pytest.mark.long
def test_a_list_with_a_forward_of_its_own_begins_a_stage(capsys):
    class Called(nn.ModuleList):
        def forward(self, x):
            return self[1](self[0](x))

    model = compiled(
        nn.Sequential(linear(), Called([linear(), linear()])),
        parallel=ipufit.Parallel(stages={"1": 1}),
    )
    assert explained(model, capsys)[0] == "Training: pipelined over 2 stages: stage 1 from 1."


@pytest.mark.long
def test_numbers_name_the_layers_of_a_sequential(capsys):
    lines = explained(compiled(stack(3), parallel=ipufit.Parallel(stages={0: 0, 2: 1})), capsys)
    assert lines[0] == "Training: pipelined over 2 stages: stage 0 from 0; stage 1 from 2."


def test_any_name_of_a_shared_module_will_do(capsys):
    net = nn.Sequential(Shared(), linear())
    lines = explained(
        compiled(net, parallel=ipufit.Parallel(stages={"0.alias": 0, "0.heads.a": 1})),
        capsys,
        runs=False,
    )
    assert lines[0] == (
        "Training: pipelined over 2 stages: stage 0 from 0.body; stage 1 from 0.heads.a."
    )
    assert refused(Shared(), parallel=ipufit.Parallel(stages={"alias": 1, "body": 0})) == (
        "stages must give a module one stage, but 'alias' and 'body' are the same module, got 1 "
        "and 0. Leave one out."
    )


@pytest.mark.long("ipu-standin")
def test_one_stage_is_one_ipu(capsys):
    alone = ["Training: the whole module on one IPU.", "Inference: the whole module on one IPU."]
    assert (
        explained(compiled(stack(3), parallel=ipufit.Parallel(stages={"0": 0, "2": 0})), capsys)
        == alone
    )
    lines = explained(
        compiled(
            stack(3),
            parallel=ipufit.Parallel(stages={"2": 1}, inference=ipufit.Parallel(stages={"0": 0})),
        ),
        capsys,
    )
    assert lines[1] == alone[1]


def test_of_many_names_the_nearest_are_told():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    text = refused(
        nn.TransformerEncoder(layer, 6),
        UnknownNameError,
        parallel=ipufit.Parallel(stages={"layer.3": 1}),
    )
    assert text == (
        "unknown module in stages 'layer.3'. Did you mean 'layers.3'? Nearest of 61 names: "
        "layers.3, layers.5, layers.4, layers.2, layers.1."
    )


def test_a_gap_of_any_size_is_found():
    assert refused(stack(3), parallel=ipufit.Parallel(stages={"2": 10**9})) == (
        "stages must number the stages without gaps, but no module begins stage 1, got 1000000000. "
        "Renumber them from 0."
    )
    assert [first_gap(numbers) for numbers in ([0], [1], [0, 2], [3, 1], [1, 2])] == (
        [None, None, 1, 2, None]
    )
    assert first_gap([3], {0, 1, 2}) is None


@pytest.mark.parametrize("layers", [3, [], [3], ("0", None), {"0": 1}])
def test_layers_are_names(layers):
    assert refused(stack(3), parallel=ipufit.Parallel(layers_per_ipu=[1, 2], layers=layers)) == (
        "layers must name the containers of the layers, as a string or a list of strings, got "
        f"{layers!r}. Write for example layers='encoder.layers'."
    )


def test_an_argument_is_called_as_it_was_written():
    assert refused(
        linear(), parallel=ipufit.Parallel(inference=ipufit.Parallel(layers_per_ipu=[1, 2]))
    ).startswith(
        "inference.layers_per_ipu counts the blocks of a ModuleList or Sequential of equal blocks, "
        "but Linear has none."
    )


def test_layers_that_stand_twice_count_once():
    one, other = linear(), linear()
    assert refused(
        nn.Sequential(one, other, one, other), parallel=ipufit.Parallel(layers_per_ipu=[1, 3])
    ) == (
        "layers_per_ipu must add up to the number of repeated layers, got 4 and the module has 2 "
        "(2 in the module itself, 2 more places hold one of them again). Write -1 for one of the "
        "numbers to assign the rest, or name the layers with layers=."
    )


@pytest.mark.long
def test_one_wildcard_is_one_for_each_ipu(capsys):
    model = compiled(stack(4), parallel=ipufit.Parallel(layers_per_ipu=[-1], ipus_per_replica=2))
    assert explained(model, capsys)[0] == (
        "Training: pipelined over 2 stages: stage 0 from 0; stage 1 from 2."
    )
    assert (
        explained(compiled(stack(4), parallel=ipufit.Parallel(layers_per_ipu=[-1])), capsys) == []
    )
    assert refused(
        stack(3), parallel=ipufit.Parallel(layers_per_ipu=[-1], ipus_per_replica=10**9)
    ) == (
        "layers_per_ipu=[-1] shares the repeated layers among the IPUs of a replica, but "
        "ipus_per_replica=1000000000 and the module has 3 (3 in the module itself). Use fewer IPUs."
    )


def notes(capsys):
    """The last column of the table, by the name of the layer."""
    rows = capsys.readouterr().out.splitlines()
    rows = [row.split("  ") for row in rows[2 : rows.index(rows[1], 2)]]
    return {row[0] or row[1] or row[2]: row[-1] for row in rows if "begins" in row[-1]}


def test_summary_shows_where_stages_begin(capsys):
    """Where one module begins a stage and others are of it, at the first; of inference if it has
    stages of its own."""
    net = nn.Sequential(linear(), stack(2), linear())
    compiled(net).summary()
    assert notes(capsys) == {}
    model = compiled(
        net,
        parallel=ipufit.Parallel(
            stages={"0": 0, "1.0": 1, "1.1": 1}, inference=ipufit.Parallel(stages={"2": 1})
        ),
    )
    model.summary()
    assert notes(capsys) == {
        "0": "stage 0 begins",
        "1.0": "stage 1 begins",
        "2": "stage 1 of inference begins",
    }
    model.summary(depth=1)
    assert notes(capsys) == {
        "0": "stage 0 begins",
        "1": "0: stage 1 begins",
        "2": "stage 1 of inference begins",
    }
    compiled(net, parallel=ipufit.Parallel(stages={"2": 1}, strategy="serial_phased")).summary()
    assert notes(capsys) == {"2": "phase 1 begins"}
