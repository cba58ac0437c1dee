"""Sums of gradients go along with the backward pass where that is faster."""

import pytest
import torch
from torch import nn

from ipufit.engines.embedded import overlapped_reduction
from ipufit.engines.embedded.overlapped_reduction import Overlap, buckets_of


class Others:
    """Processes that have measured the same, or something else."""

    def __init__(self, *medians):
        self.medians = medians
        self.asked = []

    def gather(self, own):
        self.asked.append(own)
        return [own, *self.medians]


def run(others, after, along):
    """Twenty updates, of which those after backward and those along take so many seconds."""
    now, ways = [0.0], []
    found = Overlap(others, (1, 0), clock=lambda: now[0])
    for _ in range(20):
        ways.append(found.begin())
        now[0] += along if ways[-1] else after
        found.end()
    return found, ways


@pytest.mark.parametrize(
    ("after", "along", "others", "chosen", "ratio"),
    [
        (2.0, 1.5, [], True, "0.75"),
        (2.0, 3.0, [], False, "1.50"),
        (2.0, 1.5, [[1.0, 2.0]], False, "1.17"),
        (2.0, 2.5, [[4.0, 1.0]], True, "0.58"),
    ],
)
def test_what_all_processes_together_find_faster_is_kept(after, along, others, chosen, ratio):
    """Each measures both; one alone must not choose another way than the others."""
    processes = Others(*others)
    found, ways = run(processes, after, along)
    assert ways == [False, True] * 6 + [chosen] * 8
    assert processes.asked == [[after, along]]
    when = "during" if chosen else "after"
    assert found.explain() == (
        f"Gradients are added in 2 buckets, {when} the backward pass: updates up to that point "
        f"took {ratio} of the time when they were added during it."
    )


def test_before_both_ways_are_measured_it_says_so():
    assert Overlap(Others(), (2, 1, 0)).explain() == (
        "Gradients are added in 3 buckets, alternately during and after the backward pass, to "
        "see which is faster."
    )


def test_buckets_are_of_one_size_in_the_order_of_the_parameters(monkeypatch):
    monkeypatch.setattr(overlapped_reduction, "BUCKET", 100)
    named = list(nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)]).named_parameters())
    found = buckets_of(named)
    assert [len(each) for each in found] == [5, 5, 2]
    assert [name for each in found for name, _ in each] == [name for name, _ in named]
    assert buckets_of([("w", nn.Parameter(torch.zeros(2)))])[0][0][0] == "w"
