"""What an experiment may be asked, and the one sentence for what it may not."""

import numpy as np
import pytest

from scaledot.lab import arguments


@pytest.mark.parametrize("value", [1, np.int64(7), 10**9])
def test_whole_numbers_of_any_kind(value):
    assert arguments.whole("trials", value) == int(value)


@pytest.mark.parametrize("value", [True, 2.0, "3", None, [1]])
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"trials is .*: pass a whole number"):
        arguments.whole("trials", value)


def test_too_small_says_the_least():
    with pytest.raises(ValueError, match="d_k is 0: pass at least 1"):
        arguments.whole("d_k", 0)
    with pytest.raises(ValueError, match="trials is 1: pass at least 2"):
        arguments.whole("trials", 1, least=2)
    with pytest.raises(ValueError, match="seed is -1: pass at least 0"):
        arguments.seed(-1)
    assert arguments.seed(0) == 0


def test_sizes_are_one_or_several_each_once():
    assert arguments.sizes("d_k", 64) == (64,)
    assert arguments.sizes("d_k", [16, 4, 16]) == (16, 4)
    assert arguments.sizes("d_k", range(1, 4)) == (1, 2, 3)
    with pytest.raises(ValueError, match="d_k is empty"):
        arguments.sizes("d_k", [])
    with pytest.raises(TypeError, match="d_k is '64'"):
        arguments.sizes("d_k", "64")
    with pytest.raises(ValueError, match="d_k is -4"):
        arguments.sizes("d_k", [4, -4])


def test_one_of_several_names():
    assert arguments.one_of("components", "normal", ("normal", "uniform")) == "normal"
    with pytest.raises(ValueError, match="components is 'gauss': pass one of normal, uniform"):
        arguments.one_of("components", "gauss", ("normal", "uniform"))
