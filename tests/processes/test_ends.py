"""Whatever becomes of one process, the others end soon, and name it."""

import pytest

from tests.processes.launching import on_one_python, run_copies, run_processes, run_torchrun

SOON = 600  # seconds, so that it ends at all; how fast the machine is decides nothing

GO_ON = "all processes of a run must continue together, but "
RESUME = "a run with checkpoints resumes from the last one."
CURE = f"Start all processes again; {RESUME}"
LOOK = (
    "Read the output of that process, fix the cause, and start all processes again; a run with "
    "checkpoints resumes from the last one."
)

# The others end by a ProcessError, and stay unable to speak.
BEGIN = """
    import os, signal, sys, time
    import torch
    from ipufit.errors import DataError, ProcessError
    from ipufit.processes import current, distributed

    def together():  # all have imported torch, which a busy machine may keep some from
        folder = os.path.dirname(os.path.abspath(sys.argv[0]))
        open(os.path.join(folder, os.environ["RANK"]), "w").close()
        while len(os.listdir(folder)) <= int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)

    def ends(run):
        try:
            with us.propagate_errors():
                run()
        except ProcessError as error:
            print(error, flush=True)
            try:
                us.gather(1)
            except ProcessError as error:
                print(error, flush=True)
        else:
            print("went on")

"""


def last(text, after=()):
    """What a process prints that another one's end has stopped."""
    what = text[len(GO_ON) :].split(". ")[0]
    again = "a process that left the others can't reconnect, but this one left "
    return [text, f"{again}them because {what}. {CURE}", *after]


def check_killed(ended, number, text):
    """One process was killed, and the others print this of it."""
    for each, process in enumerate(ended):
        if each == number:
            assert process.code == -9
        else:
            assert process.code == 0, process
            assert process.stdout.splitlines() == last(text), process


@pytest.mark.long
@on_one_python
def test_an_error_in_one_process_is_named_by_the_others():
    """One waits in a sum, one comes to its own later."""
    script = """
    us = current()
    us.gather(0)
    def run():
        if us.process_id == 1:
            time.sleep(0.5)
            raise DataError("row 7 is NaN.")
        time.sleep(2 * us.process_id)
        us.add([torch.ones(3)])
    ends(run)
    """
    ended = run_processes(BEGIN + script, 3, timeout=SOON)
    text = f"{GO_ON}process 1 of 3 ended with DataError: row 7 is NaN. {LOOK}"
    for number in (0, 2):
        assert ended[number].code == 0, ended[number]
        assert ended[number].stdout.splitlines() == last(text), ended[number]
    assert ended[1].code == 1
    # Newer torch begins its lines with the number.
    assert ended[1].stderr.endswith("ipufit.errors.DataError: row 7 is NaN.\n")


@on_one_python
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_process_is_named_by_the_others(number):
    """Number 0 takes with it what the others could ask."""
    script = """
    us = current()
    us.gather(0)
    def run():
        ones = torch.ones(10**6)
        for round in range(10**6):
            if us.process_id == int(sys.argv[1]) and round == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            us.add([ones])
    ends(run)
    """
    ended = run_copies(BEGIN + script, 3, timeout=SOON, args=[str(number)])
    text = f"{GO_ON}process {number} of 3 has gone (killed, or the machine failed). {CURE}"
    if number == 0:
        text = f"{GO_ON}process 0 of 3 has gone (ended, killed, or its machine failed). {CURE}"
    check_killed(ended, number, text)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_does_not_come_is_named_by_the_others(number):
    """It is stopped, as a debugger would; the test ends it."""
    script = """
    together()
    us = distributed(timeout=10)
    stopped = int(sys.argv[1])
    pids = us.gather(os.getpid())
    def run():
        if us.process_id == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        us.add([torch.ones(3)])
    ends(run)
    if us.process_id == 2:
        time.sleep(10)
        os.kill(pids[stopped], signal.SIGKILL)
    """
    ended = run_processes(BEGIN + script, 3, timeout=SOON, args=[str(number)])
    text = (
        f"{GO_ON}process {number} of 3 did not reach the same point within 10 s (waits, is busy, "
        "or hangs). If it is only slow, raise the limit with ipufit.distributed(timeout=...); then "
        f"start all processes again; {RESUME}"
    )
    if number == 0:
        text = (
            f"{GO_ON}process 0 of 3 did not reach the same point within 10 s, and does not answer "
            f"(it hangs, or its machine failed). {CURE}"
        )
    check_killed(ended, number, text)


@pytest.mark.long
def test_a_late_process_learns_that_the_others_gave_up():
    """It alone was slow, and has to know why nobody is there any more."""
    script = """
    together()
    us = distributed(timeout=10)
    us.gather(0)
    done = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "done")
    def run():
        while us.process_id == 1 and not os.path.exists(done):
            time.sleep(0.01)
        time.sleep(6 * (us.process_id == 1))  # the other's connections are closed by then
        us.add([torch.ones(3)])
    ends(run)
    if us.process_id == 0:
        open(done, "w").close()
    """
    ended = run_processes(BEGIN + script, 2, timeout=SOON)
    why = "process 1 of 2 did not reach the same point within 10 s (waits, is busy, or hangs)"
    advice = (
        "If it is only slow, raise the limit with ipufit.distributed(timeout=...); then start all "
        f"processes again; {RESUME}"
    )
    assert ended[0].stdout.splitlines() == last(f"{GO_ON}{why}. {advice}"), ended[0]
    late = f"{GO_ON}process 0 of 2 gave up because {why}. {CURE}"
    assert ended[1].stdout.splitlines() == last(late), ended[1]


@pytest.mark.long
def test_a_process_that_ends_early_is_named_by_the_others():
    """It has called fewer of what all have to call, and sees no error itself."""
    script = """
    us = current()
    us.gather(0)
    if us.process_id == 1:
        sys.exit()
    ends(lambda: us.add([torch.ones(3)]))
    """
    ended = run_processes(BEGIN + script, 3, timeout=SOON)
    text = f"{GO_ON}process 1 of 3 has ended the program already. {LOOK}"
    for number in (0, 2):
        assert ended[number].stdout.splitlines() == last(text), ended[number]
    assert (ended[1].code, ended[1].stdout) == (0, ""), ended[1]


@pytest.mark.long
def test_an_error_before_the_first_word_is_named_by_the_others():
    """Its data cannot be read, say, while the others wait for it at the start."""
    script = """
    us = current()
    def run():
        if us.process_id == 1:
            raise DataError("row 7 is NaN.")
        us.gather(0)
    ends(run)
    """
    ended = run_processes(BEGIN + script, 2, timeout=SOON)
    text = f"{GO_ON}process 1 of 2 ended with DataError: row 7 is NaN. {LOOK}"
    assert ended[0].stdout.splitlines() == last(text), ended[0]
    assert ended[1].code == 1


@pytest.mark.long
@on_one_python  # torch 2.0 does not name its threads
def test_torchrun_starts_processes():
    """Its own store is used, which outlives process 0; and no thread of torch goes on at the end.

    One that lets go of a tensor then would take the process down, after all its work.
    """
    last = """
    import atexit, os

    def ends():
        folder = "/proc/self/task"
        tasks = os.listdir(folder) if os.path.isdir(folder) else []
        if any("gloo" in open(f"{folder}/{each}/comm").read() for each in tasks):
            print("a thread of torch goes on", flush=True)
            os._exit(9)

    atexit.register(ends)
    """
    script = """
    us = current()
    assert us.launcher == "torchrun" and us.local_id == us.process_id
    assert us.gather(us.process_id) == [0, 1]
    assert us.place.is_hosted
    print(us.describe(), flush=True)
    """
    ended = run_torchrun(last + BEGIN + script, 2, timeout=SOON)
    assert ended.code == 0, ended
    # Both write to one pipe, line feeds by themselves.
    assert sorted(ended.stdout.replace("machine.", "machine.\n").split("\n"))[-2:] == [
        "Process 0 of 2, started by torchrun, number 0 on this machine.",
        "Process 1 of 2, started by torchrun, number 1 on this machine.",
    ]


@pytest.mark.long
def test_a_group_of_the_users_is_used_and_kept():
    """Its numbers count, and ipufit does not end it."""
    script = """
    from ipufit.errors import ConfigurationError
    torch.distributed.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    us = current()
    assert us.launcher == "torch.distributed"
    assert us.gather(us.process_id) == [0, 1]
    ones = torch.ones(2)
    us.add([ones])
    torch.distributed.all_reduce(ones)
    assert ones.tolist() == [4, 4]
    try:
        distributed(timeout=3)
    except ConfigurationError as error:
        print(error)
    def run():
        if us.process_id == 1:
            raise DataError("row 7 is NaN.")
        us.add([ones])
    ends(run)
    """
    ended = run_processes(BEGIN + script, 2, timeout=SOON)
    connected = (
        "ipufit.distributed must be called before the processes first communicate, but they are "
        "already connected. Call it at the start of the program."
    )
    text = f"{GO_ON}process 1 of 2 ended with DataError: row 7 is NaN. {LOOK}"
    assert ended[0].stdout.splitlines() == [connected, *last(text)], ended[0]
    assert ended[1].code == 1, ended[1]


@pytest.mark.long
def test_starts_that_cannot_work_are_refused():
    """Each says what is wrong, in every process."""
    script = """
    from ipufit.errors import ConfigurationError
    case = sys.argv[1]
    me = int(os.environ["RANK"])
    if case == "size":
        us = distributed(me, 2 + me)
    elif case == "late":
        together()
        us = distributed(me, 3, timeout=10)
    elif case == "numbers":
        torch.distributed.init_process_group("gloo")
        us = distributed(1 - me, 2)
    try:
        us.connect()
    except (ConfigurationError, ProcessError) as error:
        print(error)
        time.sleep(1.0)
    """
    unlike = "all processes of a run must know of the same number of processes, but process "
    check = "Check what the launcher or ipufit.distributed tells each."
    by_case = {
        "size": [
            f"{unlike}0 has 2 and another has another number. {check}",
            f"{unlike}1 has 3 and process 0 has 2. {check}",
        ],
        "late": [
            "all processes of a run must start within 10 s, but process 2 of 3 did "
            "not. Start it too, or raise the limit with ipufit.distributed(timeout=...)."
        ]
        * 2,
        "numbers": [
            f"torch.distributed and ipufit must agree, but for torch this is process {me} of 2, "
            f"and for ipufit {1 - me} of 2. Leave ipufit.distributed out, or pass it the same "
            "numbers."
            for me in range(2)
        ],
    }
    for case, texts in by_case.items():
        ended = run_processes(BEGIN + script, 2, timeout=SOON, args=[case])
        for number, (each, text) in enumerate(zip(ended, texts)):
            # Whoever sees it first tells the others.
            other = f"{1 - number} of {2 + number * (case == 'size')}"
            told = f"{GO_ON}process {other} ended with ConfigurationError: {texts[1 - number]}"
            found = each.stdout.rstrip("\n")
            assert found == text or (case == "size" and found == f"{told} {LOOK}"), each
