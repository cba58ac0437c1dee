"""Batches of any shape, size and structure train, evaluate and predict like a plain loop."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ipufit
from tests.engines import one_shape, runs_eagerly
from tests.told import message

EITHER = [{}, pytest.param({"run_eagerly": True}, marks=runs_eagerly)]
# Lengths of the sequences of each batch, and its number of samples.
FORMS = [(3, 4), (5, 4), (3, 2), (7, 4), (5, 4), (5, 3), (3, 4), (7, 1), (4, 4)]


def sequences(forms=FORMS, dtype=torch.float64):
    """A batch of token ids, the same ones for every call, for each (length, size)."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length, size in forms:
        tokens = torch.randint(1, 20, (size, length), generator=generator)
        batches.append((tokens, torch.randn(size, 2, generator=generator, dtype=dtype)))
    return batches


class Pooled(nn.Module):
    """An embedding, a hidden layer for each token, and the mean over the tokens."""

    def __init__(self, drop=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 5)
        self.hidden = nn.Linear(5, 6)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens):
        return self.head(self.drop(self.hidden(self.embed(tokens)).tanh()).mean(1))


class Tagger(Pooled):
    """Two numbers for each token."""

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)).tanh())


def compiled(module=None, **options):
    module = (Pooled() if module is None else module).double()
    model = ipufit.Model(module)
    model.compile(torch.optim.AdamW(module.parameters(), lr=0.01), "mse", **options)
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


def loop(module, batches, per_update, epochs=1):
    """The weights of an eager loop, and the mean loss over the samples of each epoch."""
    module = copy.deepcopy(module).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for start in range(0, len(batches), per_update):
            update = batches[start : start + per_update]
            samples = sum(len(x) for x, _ in update)
            optimizer.zero_grad()
            for x, y in update:
                loss = nn.functional.mse_loss(module(x), y)
                (loss * len(x) / samples).backward()
                total += loss.item() * len(x)
            optimizer.step()
        losses.append(total / sum(len(x) for x, _ in batches))
    return torch.cat([p.detach().flatten() for p in module.parameters()]), losses


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@one_shape
@pytest.mark.parametrize("how", [{"jit": "graph"}, {"jit": "auto"}, {"run_eagerly": True}])
@pytest.mark.parametrize(("accumulation", "replicas"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_mixed_shapes_equal_a_plain_loop(how, accumulation, replicas):
    """One update may mix shapes; each sample counts the same, in the last, smaller update too."""
    batches = sequences()
    model = compiled(**how)
    expected, losses = loop(model.module, batches, accumulation * replicas, epochs=3)
    history = model.fit(
        batches, epochs=3, gradient_accumulation=accumulation, ipus=replicas, verbose=0
    )
    close(weights(model), expected)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)


@one_shape
@pytest.mark.parametrize("iterations", [2, 3, 9])
def test_device_iterations_change_no_bit(iterations):
    """Dropout is keyed by update and place, and what merges depends on the update alone."""

    def fitted(**plan):
        model = compiled(Pooled(drop=0.3))
        model.fit(sequences(), epochs=2, seed=1, verbose=0, **plan)
        return weights(model)

    one = fitted(gradient_accumulation=2)
    assert torch.equal(one, fitted(gradient_accumulation=2, device_iterations=iterations))


@one_shape
def test_updates_of_one_shape_merge_whatever_stands_beside_them(capsys):
    """Shapes that fill an update run as one larger batch; the bits are those of any division."""
    batches = sequences([(3, 4), (3, 4), (5, 4), (5, 4), (3, 4), (5, 4)] * 2)
    results = []
    for iterations in (1, 2, 6):
        model = compiled()
        model.fit(
            batches, gradient_accumulation=2, device_iterations=iterations, epochs=2, verbose=0
        )
        model.explain()
        assert (
            "The 2 micro-batches of an update run as one batch of 8 samples.\nSo it is for updates "
            "of one shape; those that mix shapes run one micro-batch at a time."
        ) in capsys.readouterr().out
        results.append(weights(model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    close(results[0], loop(Pooled(), batches, 2, epochs=2)[0])


@one_shape
def test_recordings_are_made_once():
    """Another epoch meets no shape for the first time."""
    model = compiled()
    batches = sequences()
    model.fit(batches, epochs=1, verbose=0)
    engine = model._session.engine
    # (5, 4) and (3, 4) come more than once.
    assert engine.captures == len(set(FORMS)) == 7
    model.fit(batches, epochs=2, verbose=0)
    assert engine.captures == 7


@pytest.mark.parametrize("how", EITHER)
def test_evaluate_is_exact_and_predict_keeps_the_order(how):
    """Every row is there, in the loader's order, whatever the shapes."""
    batches = sequences()
    model = compiled(metrics=["mae"], **how)
    outputs = torch.cat([model.module(x) for x, _ in batches]).detach()
    targets = torch.cat([y for _, y in batches])
    values = model.evaluate(batches, device_iterations=2, verbose=0)
    assert values["loss"] == pytest.approx(((outputs - targets) ** 2).mean().item(), rel=1e-12)
    assert values["mae"] == pytest.approx((outputs - targets).abs().mean().item(), rel=1e-6)
    predicted = model.predict(batches, device_iterations=4, verbose=0)
    close(predicted, outputs)


@pytest.mark.parametrize("how", EITHER)
def test_ragged_outputs_are_a_list_of_rows(how):
    """A tensor for each sample; those of all batches where they have one shape."""
    batches = [x for x, _ in sequences()]
    model = compiled(Tagger(), **how)
    rows = [row for x in batches for row in model.module(x).detach()]
    predicted = model.predict(batches, device_iterations=2, verbose=0)
    assert isinstance(predicted, list)
    assert len(predicted) == len(rows) == sum(size for _, size in FORMS)
    for one, other in zip(predicted, rows):
        close(one, other)
    padded = model.predict(batches, device_iterations=2, padding_value=-1.0, verbose=0)
    close(padded, nn.utils.rnn.pad_sequence(rows, True, -1.0))
    pieces = list(model.predict_iter(batches))
    assert [tuple(piece.shape) for piece in pieces] == [(n, t, 2) for t, n in FORMS]


class Described(Pooled):
    """Returns what is no tensor beside the numbers, or alone."""

    def __init__(self, alone):
        super().__init__()
        self.alone = alone

    def forward(self, tokens):
        facts = {"tokens": tokens.shape[1], "unit": "cm"}
        return facts if self.alone else {**facts, "size": super().forward(tokens)}


@one_shape
@pytest.mark.parametrize("alone", [False, True])
def test_outputs_that_are_no_tensors_are_those_of_all_batches(alone):
    """With one value for each row, or each batch, where they differ; else as they are."""
    batches = [x for x, _ in sequences(FORMS[:3])]
    model = ipufit.Model(Described(alone).double())
    predicted = model.predict(batches, verbose=0)
    assert predicted["unit"] == "cm"
    assert predicted["tokens"] == ([3, 5, 3] if alone else [3] * 4 + [5] * 4 + [3] * 2)
    assert model.predict(batches[:1], verbose=0)["tokens"] == 3


class Reshaped(nn.Module):
    """As many dimensions as there are columns; of integers where these are two."""

    def forward(self, x):
        return x.reshape(-1, *[1] * (x.shape[1] - 2), x.shape[1]).to(x.dtype).long()


@one_shape
@pytest.mark.parametrize(
    ("columns", "value", "what"), [((2, 3), 0, "2 and 3 dimensions"), ((1, 2), 0.5, "integers")]
)
def test_outputs_that_cannot_be_padded_are_named(columns, value, what):
    """A list of rows is always there."""
    model = ipufit.Model(Reshaped())
    batches = [torch.zeros(2, size) for size in columns]
    assert len(model.predict(batches, verbose=0)) == 4
    assert message(model.predict, batches, padding_value=value, verbose=0) == (
        f"padding_value={value!r} can't pad outputs of {what}. Leave it out to get a list of "
        "rows, or pad in forward."
    )


@pytest.mark.parametrize("value", ["0", True, torch.zeros(())])
def test_a_padding_value_that_is_no_number_is_refused(value):
    """Before anything is predicted."""
    with pytest.raises(ipufit.errors.ConfigurationError) as caught:
        ipufit.Model(nn.ReLU()).predict(torch.zeros(2, 2), padding_value=value, verbose=0)
    assert str(caught.value) == (
        f"padding_value must be a number or None, got {value!r}. Pass for example 0.0."
    )


class Either(Pooled):
    """Takes tokens, or tokens with a mask beside them."""

    def forward(self, tokens, mask=None):
        hidden = self.hidden(self.embed(tokens)).tanh()
        if mask is None:
            return self.head(hidden.mean(1))
        kept = mask.to(hidden.dtype)[..., None]
        return self.head((hidden * kept).sum(1) / kept.sum(1))


@one_shape
@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}])
def test_structures_may_differ(how):
    """A recording for each structure, as for each shape."""
    plain = sequences()[:4]
    mixed = []
    for index, (x, y) in enumerate(plain):
        inputs = {"tokens": x, "mask": torch.ones_like(x)} if index % 2 else {"tokens": x}
        mixed.append((inputs, y))
    model = compiled(Either(), **how)
    expected, _ = loop(model.module, plain, 2)
    model.fit(mixed, gradient_accumulation=2, verbose=0)
    close(weights(model), expected)


class Groups:
    """A batch sampler of batches of several sizes, which tells no batch size."""

    def __iter__(self):
        return iter([[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])

    def __len__(self):
        return 4


@one_shape
def test_batches_of_a_sampler_may_grow():
    """Where the loader says no batch_size, the first batch is no bound."""
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    pairs = torch.utils.data.TensorDataset(x, y)
    loader = DataLoader(pairs, batch_sampler=Groups())
    torch.manual_seed(0)
    model = compiled(nn.Linear(3, 2))
    expected, losses = loop(model.module, list(loader), 2, epochs=2)
    history = model.fit(loader, gradient_accumulation=2, epochs=2, verbose=0)
    close(weights(model), expected)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    close(model.predict(loader, verbose=0), model.module(x).detach())


@one_shape
def test_images_of_several_resolutions():
    """Convolutions and pooling take them as they come."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(4, 2))
    sizes = [(8, 8), (6, 9), (8, 8), (12, 5)]
    batches = [(torch.randn(3, 3, *s).double(), torch.randn(3, 2).double()) for s in sizes]
    model = compiled(net)
    expected, _ = loop(net, batches, 2, epochs=2)
    model.fit(batches, gradient_accumulation=2, epochs=2, verbose=0)
    close(weights(model), expected)


@one_shape
def test_outputs_of_several_shapes_are_not_added_up():
    """What outputs="sum" adds up has one shape."""
    batches = [(x, torch.zeros(*x.shape, 2).double()) for x, _ in sequences([(3, 4), (5, 4)])]
    model = compiled(Tagger(), outputs="sum")

    class Looks(ipufit.callbacks.Callback):
        wants_outputs = True

    assert message(model.fit, batches, gradient_accumulation=2, callbacks=[Looks()], verbose=0) == (
        "outputs='sum' adds up outputs of one shape, but micro-batches have outputs of shape "
        "(4, 3, 2) and (4, 5, 2). Use outputs='all' or 'final', or pad batches to one shape in "
        "collate_fn."
    )


@pytest.mark.parametrize("iterations", [1, 2])
@one_shape
def test_more_shapes_than_max_recordings_end_training(iterations):
    """The error lists them; what was learned stays, and nothing was lost."""
    batches = sequences([(3, 4), (3, 4), (5, 4), (3, 4), (4, 4)])
    model = compiled(max_recordings=2)
    expected, _ = loop(model.module, batches[:4], 1)
    with pytest.raises(ipufit.errors.DataError) as caught:
        model.fit(batches, device_iterations=iterations, verbose=0)
    assert str(caught.value) == (
        "a program is recorded for each shape of batch, at most max_recordings=2, but batches of 3 "
        "shapes came: (4, 3), (4, 2); (4, 5), (4, 2); (4, 4), (4, 2). Pad them to fewer shapes in "
        "collate_fn, as ipufit.data.LengthBuckets does, or compile with a larger max_recordings or "
        "with run_eagerly=True."
    )
    close(weights(model), expected)
    # Validation and prediction have programs of their own.
    model.evaluate(batches[:4], verbose=0)
    with pytest.raises(ipufit.errors.DataError, match="at most max_recordings=2"):
        model.predict([x for x, _ in batches], verbose=0)
    eager = compiled(max_recordings=1, run_eagerly=True)
    eager.fit(batches, verbose=0)
    assert eager.history.params["recordings"] == 0


@one_shape
def test_recordings_are_reported(capsys):
    """Their number in the history, what they are for and how long they took in explain."""
    model = compiled()
    history = model.fit(sequences([(3, 4), (5, 4), (3, 4)]), verbose=0)
    assert history.params["recordings"] == 2
    model.explain()
    told = capsys.readouterr().out
    pattern = r"Training is recorded for 2 shapes of batches: \(4, 3\), \(4, 2\) in [0-9.e-]+ s; "
    assert re.search(pattern, told.replace("\n", " "))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "16"])
def test_a_bound_that_is_no_number_is_refused(value):
    """Together with all other faults of compile."""
    model = ipufit.Model(nn.Linear(2, 2))
    with pytest.raises(ipufit.errors.ConfigurationError) as caught:
        model.compile("sgd", "mse", max_recordings=value)
    assert str(caught.value) == (f"max_recordings must be an integer of at least 1, got {value!r}.")
