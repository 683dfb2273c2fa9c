"""What an experiment may be asked, and the one sentence for what it may not."""

import pytest

from scaledot.lab import arguments


def test_a_seed_is_a_whole_number_from_0():
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
