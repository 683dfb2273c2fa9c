"""When two sums of the same rows say the same."""

import torch

EXACT = ("count", "minimum", "maximum", "histogram")


def assert_same_heads(got, wanted, *, mean, m2):
    """Counts, histograms and extremes of modules exactly, moments within these tolerances."""
    assert list(got) == list(wanted)
    for path, one in wanted.items():
        other = got[path]
        assert (other.kv_heads, other.d_k, other.scale) == (one.kv_heads, one.d_k, one.scale)
        assert all(x.equal(other.counts[name]) for name, x in one.counts.items()), path
        assert other.measures.keys() == one.measures.keys()
        for name, x in one.measures.items():
            y = other.measures[name]
            assert all(getattr(x, part).equal(getattr(y, part)) for part in EXACT), (path, name)
            torch.testing.assert_close(y.mean, x.mean, **mean)
            torch.testing.assert_close(y.m2, x.m2, **m2)


def assert_same(a, b):
    """Two states: the same documents, and of their rows all but the moments, which to 1e-12."""
    assert a.counted == b.counted
    for name in ("texts", "windows", "tokens", "pairs", "longest"):
        assert getattr(a.gathered, name) == getattr(b.gathered, name), name
    close = {"rtol": 1e-12, "atol": 1e-300}
    assert_same_heads(a.gathered.stats, b.gathered.stats, mean=close, m2=close)
