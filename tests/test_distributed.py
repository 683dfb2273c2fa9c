"""Statistics over real gloo processes: what several give together is what one gives alone."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as parse

import scaledot
from scaledot import heads
from scaledot.distributed import reduce

SOURCE = Path(__file__).parents[1] / "src"
START = """
import os, sys, torch, torch.distributed as dist
import scaledot
from scaledot import heads
from scaledot.distributed import reduce
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder = sys.argv[1]

def model(seed=0):
    from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(seed)
    return LlamaModel(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)).double()

ids = torch.randint(64, (7, 19), generator=torch.Generator().manual_seed(1))
"""
NORM = 5 * 16 * 2.0**-24
"""The scripts compute in float64, but this model's five RMSNorms round to float32 whatever they are
given, so sums taken in another order may come out 2⁻²⁴ apart at each; and a change of q and k moves
a score, an entropy by its size times the largest score, below 16."""
END = """
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
"""`destroy_process_group` ends the threads of a group that nothing refers to. torch refers to it
itself: default arguments of torch.distributed.nn.functional where that is imported after
`init_process_group`, as transformers does, and the caches of DTensor. A thread that is left and
lets go of a tensor while the interpreter ends aborts the process; so it does not end here: the
process does, as those of `multiprocessing` do."""


def torchrun(tmp_path, body, processes=2, wanted=0):
    script = tmp_path / "run.py"
    script.write_text(START + textwrap.dedent(body) + END, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}",
         "--standalone", "--local-addr=127.0.0.1", str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (wanted == 0), done.stderr[-3000:]
    return done


def here():
    """The scripts' model and texts, in this process."""
    scope = {}
    start = START.replace('dist.init_process_group("gloo")', "").split("rank, world")[0]
    exec(start + START.split("folder = sys.argv[1]")[1], scope)
    return scope["model"](), scope["ids"]


def alone(texts=7):
    """The same texts through the same model in this process."""
    model, ids = here()
    with torch.no_grad(), scaledot.observe(model) as seen:
        for text in ids[:texts]:
            model(input_ids=text[None])
    return seen.heads


def same(got, wanted):
    assert list(got) == list(wanted)
    for path, one in wanted.items():
        other = got[path]
        assert (other.kv_heads, other.d_k, other.scale) == (one.kv_heads, one.d_k, one.scale)
        for name, x in one.counts.items():
            assert x.equal(other.counts[name]), (path, name)
        assert other.measures.keys() == one.measures.keys()
        for name, x in one.measures.items():
            y = other.measures[name]
            for part in ("count", "histogram", "minimum", "maximum"):
                assert getattr(x, part).equal(getattr(y, part)), (path, name, part)
            torch.testing.assert_close(y.mean, x.mean, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(y.m2, x.m2, rtol=1e-11, atol=1e-12)
        for x, y in ((one.scaled, other.scaled), (one.raw, other.raw)):
            assert x.count.equal(y.count)
            for part in ("mean", "within", "between"):
                torch.testing.assert_close(
                    getattr(y, part), getattr(x, part), rtol=1e-11, atol=1e-12
                )


WRAPPED = {
    "none": "net = model()",
    "ddp": "net = torch.nn.parallel.DistributedDataParallel(model())",
    "fsdp2": """
        from torch.distributed.fsdp import fully_shard
        net = model()
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        """,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_processes_that_share_the_texts_give_what_one_gives(tmp_path, wrapper):
    """Of seven texts one rank has one more than the other, but under FSDP, whose forwards wait for
    each other; the names are the model's own."""
    texts = 6 if wrapper == "fsdp2" else 7
    body = f"""
        with torch.no_grad(), scaledot.observe(net) as seen:
            for text in ids[:{texts}][rank::world]:
                net(input_ids=text[None])
        heads.save(f"{{folder}}/{{rank}}", reduce(seen.heads))
        """
    torchrun(tmp_path, textwrap.dedent(WRAPPED[wrapper]) + textwrap.dedent(body))
    first, second = (parse((tmp_path / str(i)).read_bytes()) for i in range(2))
    assert all(x.equal(second[name]) for name, x in first.items())
    same(heads.load(tmp_path / "0"), alone(texts))


def test_heads_that_are_spread_over_processes_stand_side_by_side(tmp_path):
    """Tensor parallel by torch's own plan: each rank holds half of the heads of every layer."""
    torchrun(tmp_path, """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module)
        mesh = init_device_mesh("cpu", (world,))
        net = model()
        for layer in net.layers:
            parallelize_module(layer.self_attn, mesh, {
                "q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(),
                "v_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
        with torch.no_grad(), scaledot.observe(net) as seen:
            for text in ids:
                net(input_ids=text[None])
        assert seen.heads["layers.0.self_attn"].heads == 2
        heads.save(f"{folder}/{rank}", reduce(seen.heads, heads="shards"))
        """)  # fmt: skip
    got, wanted = heads.load(tmp_path / "0"), alone()
    assert (got["layers.0.self_attn"].heads, got["layers.0.self_attn"].kv_heads) == (4, 2)
    for path, one in wanted.items():
        for name, x in one.counts.items():
            assert x.equal(got[path].counts[name])
        for name in ("entropy", "max_score", "score_var", "query_norm", "key_norm"):
            torch.testing.assert_close(
                got[path].measures[name].mean, one.measures[name].mean, rtol=NORM, atol=0
            )


def test_a_rank_that_saw_nothing_a_group_and_ranks_that_disagree(tmp_path):
    done = torchrun(tmp_path, """
        net = model()
        with torch.no_grad(), scaledot.observe(net) as seen:
            net(input_ids=ids[rank][None])
        mine = seen.heads if rank else {}
        every = reduce(mine)
        assert list(every) == list(seen.heads), rank
        if rank == 2:
            heads.save(f"{folder}/every", every)
        pair = dist.new_group([0, 2])
        if rank != 1:
            some = reduce(mine, pair)
            assert int(some["layers.0.self_attn"].counts["rows"][0]) == 19
        odd = heads.HeadStats.identity(4 + (rank == 2), 1, 8)
        try:
            reduce({"layer": odd})
        except scaledot.ScaledotError as error:
            print(f"rank {rank} said: {error}", flush=True)
        try:
            reduce({} if rank == 1 else {"layer": odd}, heads="shards")
        except scaledot.ScaledotError as error:
            print(f"rank {rank} saw: {error}", flush=True)
        """, processes=3)  # fmt: skip
    said = "layer on rank 2: cannot merge: heads is 4 in one, 5 in the other"
    for rank in range(3):
        assert f"rank {rank} said: {said}" in done.stdout
        assert f"rank {rank} saw: layer was seen on rank 0 and not on rank 1: each" in done.stdout
    rows = heads.load(tmp_path / "every")["layers.1.self_attn"].counts["rows"]
    assert rows.tolist() == [38] * 4


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path):
    done = torchrun(tmp_path, """
        if rank == 1:
            raise RuntimeError("this rank is gone")
        reduce({})
        """, wanted=1)  # fmt: skip
    assert "this rank is gone" in done.stderr


def test_without_a_process_group_nothing_changes():
    stats = alone()
    got = reduce(stats)
    assert list(got) == list(stats)
    assert all(got[path] is stats[path] for path in stats)


def test_every_rank_of_a_training_is_told_the_same_and_one_writes(tmp_path):
    """Two ranks under DDP, each with texts of its own, against one process with all of them."""
    torchrun(tmp_path, """
        net = torch.nn.parallel.DistributedDataParallel(model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with scaledot.Monitor(net, every=1, file=f"{folder}/run.jsonl") as monitor:
            for step in range(2):
                net(input_ids=ids[2 * step + rank][None])[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                look = monitor.step()
        heads.save(f"{folder}/{rank}", look.heads)
        """)  # fmt: skip
    first, second = (parse((tmp_path / str(i)).read_bytes()) for i in range(2))
    assert all(x.equal(second[name]) for name, x in first.items())
    lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(x) for x in lines[1:]]
    assert [x["step"] for x in steps] == [1, 2]
    assert steps[0]["rows"] == 2 * 4 * 2 * 19  # texts, heads, layers, tokens
    net, ids = here()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with scaledot.Monitor(net, every=1) as monitor:
        for step in range(2):
            losses = [net(input_ids=ids[2 * step + i][None])[0].square().mean() for i in range(2)]
            (sum(losses) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            look = monitor.step()
    for name in ("entropy", "max_score", "gradient"):
        for layer, got in enumerate(steps[1]["heads"][name]):
            wanted = look.values[name][layer]  # after a step of gradients added in another order
            torch.testing.assert_close(torch.tensor(got).double(), wanted, rtol=NORM, atol=0)


def test_a_sharded_weight_is_clipped_as_a_whole_one(tmp_path):
    """FSDP2 keeps half of each weight's rows on a rank, a head's among them."""
    torchrun(tmp_path, """
        from safetensors.torch import save_file
        from torch.distributed.fsdp import fully_shard
        net = model()
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        with torch.no_grad(), scaledot.observe(net) as seen:
            net(input_ids=ids)
        clipped = scaledot.qk_clip(net, seen.heads, 1e-4)
        assert len(clipped) == 8
        whole = {name: x.full_tensor().contiguous() for name, x in net.state_dict().items()}
        if rank == 0:
            save_file(whole, f"{folder}/weights")
        """)  # fmt: skip
    net, ids = here()
    with torch.no_grad(), scaledot.observe(net) as seen:
        net(input_ids=ids)
    scaledot.qk_clip(net, seen.heads, 1e-4)
    got = parse((tmp_path / "weights").read_bytes())
    for name, x in net.state_dict().items():
        torch.testing.assert_close(got[name], x, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("unannotated")
def test_heads_are_the_same_or_shards():
    with pytest.raises(ValueError, match=r"heads is 'some': pass \"same\" or \"shards\""):
        reduce({}, heads="some")
