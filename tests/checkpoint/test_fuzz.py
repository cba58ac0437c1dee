"""Bytes in the place of a file of a checkpoint: a little of ``nox -s fuzz``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import few
from tests.fuzz.checkpoint import FILES, Reader

pytestmark = pytest.mark.both_engines


@pytest.fixture(scope="module", params=FILES)
def reader(request):
    found = Reader(request.param)
    yield found
    found.close()


@given(st.data())
@few(15, exhaustive=60)
def test_any_change_of_a_file_is_an_error_of_ours_or_none(reader, data):
    """Bits are flipped, bytes put in or left out."""
    content = bytearray(reader.whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["flip", "put", "cut", "copy"]))
        if kind == "flip" and content:
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "put":
            content[place:place] = data.draw(st.binary(max_size=12))
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 64))]
        else:
            content += content[place : place + 64]
    reader.read(bytes(content))


@pytest.mark.few
@given(st.binary(max_size=200))
@few(15, exhaustive=60)
def test_any_bytes_are_an_error_of_ours(reader, content):
    assert not reader.read(content)


def test_the_whole_file_is_read(reader):
    assert reader.read(reader.whole)
