"""seed_everything: every global generator, in this process and through it in others."""

import random
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.errors import ConfigurationError

numpy = pytest.importorskip("numpy")


def drawn():
    """One number from each global generator."""
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def _generators_kept():
    """Other tests find Python's and NumPy's generators as they were."""
    kept = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, numpy.int64(7)])
def test_every_generator_starts_at_the_seed(seed):
    assert ipufit.seed_everything(seed) == seed
    assert type(ipufit.seed_everything(seed)) is int
    first = drawn()
    assert first == (
        random.Random(int(seed)).random(),
        numpy.random.RandomState(int(seed)).rand(),
        torch.rand((), generator=torch.Generator().manual_seed(int(seed))).item(),
    )
    assert drawn() != first
    ipufit.seed_everything(seed)
    assert drawn() == first


def test_without_a_seed_one_is_drawn_that_can_be_used_again():
    """From the operating system: a generator that was seeded before does not decide it."""
    ipufit.seed_everything(3)
    seed = ipufit.seed_everything()
    first = drawn()
    ipufit.seed_everything(3)
    assert ipufit.seed_everything() != seed
    ipufit.seed_everything(seed)
    assert drawn() == first


def test_numpy_may_be_absent(monkeypatch):
    """It is no dependency."""
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "numpy" else real(name)
    )
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert ipufit.seed_everything(5) == 5
    assert random.random() == random.Random(5).random()


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (True, "seed_everything needs an integer or None, got True. Pass for example 0."),
        (1.0, "seed_everything needs an integer or None, got 1.0. Pass for example 0."),
        (
            torch.tensor(1.5),
            "seed_everything needs an integer or None, got tensor(1.5000). Pass for example 0.",
        ),
        ("0", "seed_everything needs an integer or None, got '0'. Pass for example 0."),
        (
            -1,
            "seed_everything needs a seed from 0 to 4294967295, the range of NumPy, got -1. Try "
            "4294967295.",
        ),
        (
            2**32,
            "seed_everything needs a seed from 0 to 4294967295, the range of NumPy, got "
            "4294967296. Try 0.",
        ),
    ],
)
def test_a_bad_seed_seeds_nothing(seed, text):
    ipufit.seed_everything(11)
    expected = drawn()
    ipufit.seed_everything(11)
    with pytest.raises(ConfigurationError) as caught:
        ipufit.seed_everything(seed)
    assert str(caught.value) == text
    assert drawn() == expected


class Noisy(Dataset):
    """Augments with all three generators."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.tensor([random.random(), numpy.random.rand()]).float()
        return x + torch.rand(2), x[:1]


def losses(workers, seed=None):
    """Of two epochs, from a net that is seeded too."""
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
    model = ipufit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    return model.fit(loader, epochs=2, seed=seed, verbose=0).history["loss"]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_repeats_with_and_without_workers(workers):
    """Weights, shuffling and augmentation, from one call."""
    ipufit.seed_everything(17)
    first = losses(workers)
    ipufit.seed_everything(17)
    assert losses(workers) == first
    ipufit.seed_everything(18)
    assert losses(workers) != first
    assert first[0] != first[1]


@pytest.mark.long
def test_workers_depend_on_the_seed_of_fit_alone():
    """As documented: they do not inherit the generators of this process."""
    ipufit.seed_everything(1)
    torch.manual_seed(0)
    first = losses(2, seed=5)
    ipufit.seed_everything(2)
    torch.manual_seed(0)
    assert losses(2, seed=5) == first
