"""What processes tell each other arrives, whatever it is, and is the same in each."""

import sys

import pytest

from tests.processes.launching import on_one_python, run_copies, run_processes

COLLECTIVES = """
    import sys
    import torch
    from ipufit.utils.codec import encode
    from ipufit.errors import DataError, ProcessError
    from ipufit.processes import current, group

    # Buckets and windows are smaller by so much, and so is what does not fit into one.
    small = int(sys.argv[1])
    group._BUCKET //= small
    group._WINDOW //= small
    million = 10**6 // small

    us = current()
    me, count = us.process_id, us.num_processes
    assert us is current() and us.is_distributed and us.is_rank_zero == (me == 0)
    assert not torch.distributed.is_initialized()
    assert us.describe() == (
        f"Process {me} of {count}, started by a launcher that sets RANK, number {me} on this "
        "machine."
    ), us.describe()

    # Trees, small and larger than the first frame.
    assert us.gather(me) == list(range(count))
    assert current() is us
    tree = {"a": (me, [None, True, float("inf")]), 3: "x" * 5000 * me, "t": torch.arange(me)}
    for process, found in enumerate(us.gather(tree)):
        assert found["a"] == (process, [None, True, float("inf")])
        assert found[3] == "x" * 5000 * process
        assert found["t"].equal(torch.arange(process)) and found["t"].dtype == torch.int64
    assert [len(each) for each in us.gather(torch.zeros(million * me))] == [0, million, 2 * million]

    # Rows of every dtype; some have none.
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.complex64, torch.complex128]
    for dtype in dtypes:
        own = torch.full((2 * me, 3), me, dtype=dtype)
        found = us.gather_rows(own, [0, 2, 4])
        for process, rows in enumerate(found):
            assert rows.dtype == dtype
            assert rows.equal(torch.full((2 * process, 3), process, dtype=dtype)), dtype
    nothing = us.gather_rows(torch.zeros(0, 2), [0] * 3)
    assert [tuple(each.shape) for each in nothing] == [(0, 2)] * 3
    assert [tuple(each.shape) for each in us.gather_rows(torch.zeros(me, 0), [0, 1, 2])] == [
        (0, 0), (1, 0), (2, 0)
    ]

    # Sums: every dtype, no values, no dimension, strides, more than a bucket, and a large one.
    for dtype in dtypes:
        sums = [torch.ones(4, 3, dtype=dtype).t(), torch.tensor(me, dtype=dtype).clone()]
        sums.append(torch.ones(0, dtype=dtype))
        us.add(sums)
        expected = 1 if dtype is torch.bool else 3
        assert sums[0].equal(torch.full((3, 4), expected, dtype=dtype)), dtype
        assert sums[1].item() == 3 or (dtype is torch.bool and sums[1].item()), dtype
        assert sums[2].shape == (0,)
    conjugate = torch.tensor([1 + 1j]).conj()
    us.add([conjugate])
    assert conjugate.tolist() == [3 - 3j]
    weight = torch.nn.Parameter(torch.ones(2))
    us.add([weight])
    assert weight.tolist() == [3, 3] and weight.requires_grad
    generator = torch.Generator().manual_seed(me)
    sizes = (10, 7 * million, 3 * million, 4 * million, 5)
    parts = [torch.randn(n, generator=generator) for n in sizes]
    parts.append(torch.randn(6, 2, generator=generator)[:, 0])
    before = us.gather([each.double() for each in parts])
    address = parts[1].data_ptr()
    us.add(parts)
    assert parts[1].data_ptr() == address
    for part, theirs in zip(parts, zip(*before)):
        torch.testing.assert_close(part.double(), sum(theirs), rtol=0, atol=1e-5)
    for theirs in us.gather(parts):
        assert all(a.equal(b) for a, b in zip(parts, theirs))  # the same bits

    # From process 0: mixed dtypes share a bucket.
    spread = [torch.full((2, 3), me + 1, dtype=dtype).t() for dtype in dtypes]
    spread += [torch.full((7 * million,), me), torch.zeros(0), torch.tensor(float(me))]
    spread.append(torch.nn.Parameter(torch.full((3,), float(me))))
    us.broadcast(spread)
    for each, dtype in zip(spread, dtypes):
        assert each.equal(torch.ones(3, 2, dtype=dtype)) and each.stride() == (1, 3)
    assert spread[-4].sum() == 0 and spread[-2].item() == 0 and spread[-1].sum() == 0
    us.add([]), us.broadcast([])

    # What the first one makes.
    assert us.run_on_rank_zero(lambda: {"from": me, "long": (1,) * 3000}) == {
        "from": 0, "long": (1,) * 3000
    }
    def fails():
        assert me == 0
        raise DataError("the file is empty.")
    for _ in range(2):
        try:
            us.run_on_rank_zero(fails)
        except (DataError, ProcessError) as error:
            assert error.is_common
            print(type(error).__name__, error)

    # One fails, and the group goes on.
    assert us.run_on_all_ranks(lambda: me) == me
    def fails_in_2():
        if me == 2:
            raise DataError("row 7 is NaN.")
    try:
        with us.propagate_errors():
            us.run_on_all_ranks(fails_in_2)
    except (DataError, ProcessError) as error:
        print(type(error).__name__, error)

    us.assert_equal_across_ranks(seed=5, batch_size=[1, {"a": 2}])
    for facts in (
        {"seed": 5, "number_of_rows": 10 + me // 2},
        {"model": "ab"[me % 2]},
        {"a" * (me + 1): 1},
    ):
        try:
            with us.propagate_errors():
                us.assert_equal_across_ranks(**facts)
        except ProcessError as error:
            assert error.is_common
            print(error)
    assert us.gather(me) == [0, 1, 2]
    print("whole")
"""

FAILED = (
    "all processes must complete this step, but process {0} of 3 failed: {1}. Read the output of "
    "that process, and fix it there."
)
DIFFER = (
    "all processes of a run must have the same {0}, but process 0 has {1} and process {2} has {3}. "
    "Start all of them with the same program, arguments and seed, and pass the whole data to each; "
    "each takes its own share."
)


THREADS = """
    import atexit
    import os

    def threads():
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{each}/comm").read() for each in tasks]
        return sum("gloo" in name for name in names)

    atexit.register(lambda: print(threads()))
    from ipufit.processes import current

    assert current().gather(1) == [1, 1]
    assert threads() > 0
"""


@pytest.mark.long
@on_one_python  # torch 2.0 does not name its threads
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_no_thread_of_torch_goes_on_when_python_ends():
    """One that lets go of a tensor then would take the process down, after all its work."""
    for each in run_processes(THREADS, 2):
        assert (each.code, each.stdout) == (0, "0\n"), str(each)


@pytest.mark.long
@pytest.mark.parametrize("small", [100, 1])
def test_everything_arrives_in_three_processes(small):
    ended = run_copies(COLLECTIVES, 3, args=[str(small)])
    for number, each in enumerate(ended):
        assert each.code == 0, str(each)
        first = "ProcessError " + FAILED.format(0, "DataError: the file is empty")
        first = "DataError the file is empty." if number == 0 else first
        agreed = "ProcessError " + FAILED.format(2, "DataError: row 7 is NaN")
        assert each.stdout.splitlines() == [
            first,
            first,
            "DataError row 7 is NaN." if number == 2 else agreed,
            DIFFER.format("number of rows", "10", 2, "11"),
            DIFFER.format("model", "'a'", 1, "'b'"),
            DIFFER.format("next step", '["a"]', 1, '["aa"]'),
            "whole",
        ], each
        assert each.stderr == "", each
