"""When two states of a corpus say the same."""

import torch


def assert_same(a, b):
    """Counts, histograms and extremes exactly, moments to 1e-12."""
    assert a.counted == b.counted
    for name in ("texts", "windows", "tokens", "pairs", "longest"):
        assert getattr(a.gathered, name) == getattr(b.gathered, name), name
    assert list(a.gathered.stats) == list(b.gathered.stats)
    for path, x in a.gathered.stats.items():
        y = b.gathered.stats[path]
        assert all(n.equal(y.counts[name]) for name, n in x.counts.items())
        assert x.measures.keys() == y.measures.keys()
        for name, m in x.measures.items():
            n = y.measures[name]
            for exact in ("count", "minimum", "maximum", "histogram"):
                assert getattr(m, exact).equal(getattr(n, exact)), (path, name, exact)
            torch.testing.assert_close(m.mean, n.mean, rtol=1e-12, atol=1e-300)
            torch.testing.assert_close(m.m2, n.m2, rtol=1e-12, atol=1e-300)
