"""Which kernel runs: the rule of "auto", what each refuses and why, and what nobody notices."""

import re

import pytest
import torch

from oracle import MASKS, inputs, masks
from scaledot import cli, row_stats
from scaledot.dispatch import KERNELS, attention
from scaledot.kernels import native

SHAPE = {"batch": 2, "heads": 6, "queries": 19, "keys": 37}
NOT_COMPILED = "it was not compiled: no C++ compiler was found when scaledot was installed"


def ran(*qkv, **arguments):
    return attention(*qkv, return_stats=True, **arguments)[1].kernel


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """An installation without its compiled libraries."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native._library.cache_clear()
    yield
    native._library.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "dropout_p", "kernel"),
    [
        (torch.float32, 0.0, "native"),
        (torch.bfloat16, 0.0, "native"),
        (torch.float16, 0.0, "native"),
        (torch.float64, 0.0, "tiled"),
        (torch.float32, 0.5, "tiled"),
    ],
)
def test_auto_takes_native_where_it_can(dtype, dropout_p, kernel):
    qkv = inputs(heads=3, dtype=dtype)
    assert ran(*qkv, dropout_p=dropout_p) == kernel
    assert ran(*(x.requires_grad_() for x in qkv), dropout_p=dropout_p) == kernel


def test_a_kernel_that_is_named_runs_or_says_why_not():
    q, k, v = inputs(heads=3)
    for name in KERNELS:
        assert ran(q, k, v, kernel=name) == name
        assert row_stats(q, k, kernel=name).kernel == name
    with pytest.raises(ValueError, match="kernel is 'fast': pass \"auto\" or one of native, tiled"):
        attention(q, k, v, kernel="fast")
    with pytest.raises(ValueError, match=r"float32, bfloat16 and float16, not torch\.float64"):
        attention(q.double(), k.double(), v.double(), kernel="native")
    with pytest.raises(ValueError, match='no dropout: pass kernel="tiled" or "auto"'):
        attention(q, k, v, dropout_p=0.1, kernel="native")
    assert "runs on a CPU, not on cuda" in native.reason("cuda", torch.float32, False)


@pytest.mark.usefixtures("no_library")
def test_without_the_library_tiled_serves_and_the_reason_is_told(capfd):
    q, k, v = inputs(heads=3)
    assert ran(q, k, v) == row_stats(q, k).kernel == "tiled"
    for call in (lambda: attention(q, k, v, kernel="native"),
                 lambda: row_stats(q, k, kernel="native")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"is not there: {NOT_COMPILED}")):
            call()
    assert cli.run(["info"]) == 0
    out, _ = capfd.readouterr()
    assert f"native        not there: {NOT_COMPILED}\n" in out
    assert "auto          tiled\n" in out


def test_info_says_what_is_here(capfd):
    assert cli.run(["info"]) == 0
    out, err = capfd.readouterr()
    assert not err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(lines) == [
        "scaledot", "python", "torch", "transformers", "threads", "native", "tiled", "auto",
    ]  # fmt: skip
    assert lines["torch"] == torch.__version__
    assert lines["threads"] == str(torch.get_num_threads())
    if native.available() is None:
        assert lines["native"].split(",")[0] in ("avx512", "avx2", "baseline")


def test_a_library_that_does_not_load_is_a_reason(monkeypatch, tmp_path):
    for variant in ("baseline", "avx2", "avx512"):
        (tmp_path / f"native_{variant}.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native._library.cache_clear()
    try:
        assert native.available().startswith("its library does not load: ")
    finally:
        native._library.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_statistics_change_no_bit_of_the_output(kernel, mask, gradients):
    q, k, v = (x.requires_grad_(gradients) for x in inputs(**SHAPE))
    arguments = {**masks(**SHAPE)[mask], "enable_gqa": True, "kernel": kernel}
    plain = attention(q, k, v, **arguments)
    out, _ = attention(q, k, v, **arguments, return_stats=True)
    assert torch.equal(plain, out)
    if gradients:
        for a, b in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (plain, out)),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("statistics", [False, True])
def test_the_short_way_of_plain_calls_is_the_long_way(causal, statistics):
    """attention() checks less where nothing can be wrong: a scale given takes the long way."""
    for queries in (37, 5):
        q, k, v = inputs(heads=3, queries=queries, keys=37, d_k=16)
        arguments = {"is_causal": causal, "return_stats": statistics}
        short = attention(q, k, v, **arguments)
        long = attention(q, k, v, scale=0.25, **arguments)
        if statistics:
            assert torch.equal(short[1].entropy, long[1].entropy)
            short, long = short[0], long[0]
        assert torch.equal(short, long)


@pytest.mark.parametrize("kernel", KERNELS)
def test_torchs_defaults_for_new_tensors_do_not_matter(kernel):
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    results = []
    for change in (False, True):
        torch.set_default_dtype(torch.float64 if change else torch.float32)
        torch.set_default_device("meta" if change else None)
        try:
            out, rows = attention(q, k, v, kernel=kernel, return_stats=True)
            grads = torch.autograd.grad(out.sum() + rows.entropy.sum(), (q, k, v))
            alone = attention(q.detach(), k.detach(), v.detach(), kernel=kernel)
            sweep = row_stats(q, k, factors=(1, 2), kernel=kernel)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        results.append((out, rows.entropy, rows.mean_key, *grads, alone, sweep.entropy))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
