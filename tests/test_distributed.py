"""Statistics over real gloo processes: what several give together is what one gives alone."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as parse

import scaledot
from forked import ranks
from scaledot import heads
from scaledot.distributed import reduce
from scaledot.loading import load
from states import assert_same_heads

SOURCE = Path(__file__).parents[1] / "src"
START = """
import sys, torch, torch.distributed as dist
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
LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
"""`destroy_process_group` ends the threads of a group that nothing refers to. torch refers to it
itself: default arguments of torch.distributed.nn.functional where that is imported after
`init_process_group`, as transformers does, and the caches of DTensor. A thread that is left and
lets go of a tensor while the interpreter ends aborts the process; so it does not end here: the
process does, as those of `multiprocessing` do."""


def torchrun(tmp_path, text):
    script = tmp_path / "run.py"
    script.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--standalone", "--local-addr=127.0.0.1", str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def together(tmp_path, body, processes=2):
    """The body in each of these processes, after START."""
    end = "\ndist.destroy_process_group()\n"
    ranks(START + textwrap.dedent(body) + end, processes, str(tmp_path))


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
    assert_same_heads(
        got, wanted, mean={"rtol": 1e-12, "atol": 1e-12}, m2={"rtol": 1e-11, "atol": 1e-12}
    )
    for path, one in wanted.items():
        other = got[path]
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
    together(tmp_path, textwrap.dedent(WRAPPED[wrapper]) + textwrap.dedent(body))
    first, second = (parse((tmp_path / str(i)).read_bytes()) for i in range(2))
    assert all(x.equal(second[name]) for name, x in first.items())
    same(heads.load(tmp_path / "0"), alone(texts))


def test_heads_that_are_spread_over_processes_stand_side_by_side(tmp_path):
    """Tensor parallel by torch's own plan: each rank holds half of the heads of every layer."""
    together(tmp_path, """
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


def test_a_rank_that_saw_nothing_and_a_group(tmp_path):
    together(tmp_path, """
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
        """, processes=3)  # fmt: skip
    rows = heads.load(tmp_path / "every")["layers.1.self_attn"].counts["rows"]
    assert rows.tolist() == [38] * 4


DISAGREE = {
    "heads": (
        'reduce({"layer": odd})',
        "layer on rank 2: cannot merge: heads is 4 in one, 5 in the other",
    ),
    "path": (
        'reduce({} if rank == 1 else {"layer": none}, heads="shards")',
        "layer was seen on rank 0 and not on rank 1: each holds a part of its heads",
    ),
    "call": (
        'reduce({"layer": none}, heads="shards" if rank == 1 else "same")',
        "rank 0 calls reduce with heads='same', kv_heads=None, rank 1 with heads='shards', "
        "kv_heads=None: call it alike",
    ),
    "key heads": (
        'reduce({"layer": none}, heads="shards", kv_heads=rank + 1)',
        "rank 0 calls reduce with heads='shards', kv_heads=1, rank 1 with heads='shards', "
        "kv_heads=2: call it alike",
    ),
    "measures": (
        'reduce({"layer": measured("entropy", *["max_score"] * (rank == 2))})',
        "layer on rank 2: cannot join: max_score was not measured on every rank: observe the same "
        "on each",
    ),
    "measures beside": (
        'reduce({"layer": measured("entropy") if rank else none}, heads="shards")',
        "layer on rank 1: cannot join: one saw rows and the other none",
    ),
    "no statistics": (
        'reduce({"layer": "no statistics"} if rank == 1 else {})',
        "rank 1: AttributeError: 'str' object has no attribute 'kv_heads'",
    ),
    "an unknown word": (
        'reduce({}, heads="some" if rank else "same")',
        'rank 1: heads is \'some\': pass "same" or "shards"',
    ),
    "no copies": (
        'reduce({"layer": none}, heads="shards", kv_heads=2)',
        "layer: 3 ranks hold 3 key heads, which are no copies of 2: where there are copies each "
        "rank holds one, and each key head as many ranks",
    ),
    "other copies": (
        'reduce({"layer": odd}, heads="shards", kv_heads=1)',
        "layer: copies of a key head serve other numbers of heads by rank",
    ),
    "the same key": (
        'reduce({"layer": measured("entropy", "key_norm")}, heads="shards")',
        "layer: ranks 0 and 1 hold the same key head: pass kv_heads=, how many the whole module "
        "has (3 if they only look the same)",
    ),
    "a step without": (
        "watched(rank)",
        "rank 1: step 1 had no training forward, only of a model in eval mode or under no_grad: "
        "call model.train() before it",
    ),
}


AWAY = "the statistics of 2 ranks did not all come: one has ended, or does not call reduce"
ABROAD = "this process is not in the group: only its ranks call reduce"


def test_ranks_that_disagree_or_fail_say_the_same_and_a_rank_that_stays_away_is_noticed(tmp_path):
    """After each error the group is as it was; one rank alone knows that it is not in a group."""
    cases = "".join(f"""
        try:
            {call}
        except scaledot.ScaledotError as error:
            said["{name}"] = str(error)
        """ for name, (call, _) in DISAGREE.items())  # fmt: skip
    start = """
        import dataclasses, datetime, json
        said = {}
        none = heads.HeadStats.identity(4, 1, 8)
        odd = heads.HeadStats.identity(4 + (rank == 2), 1, 8)

        def measured(*names):
            values = {x: torch.ones(1 if x == "key_norm" else 4, 3) for x in names}
            measures = {x: heads.Measure.of(x, y) for x, y in values.items()}
            return dataclasses.replace(none, measures=measures)

        def watched(rank):
            layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            with scaledot.Monitor(layer) as monitor, torch.set_grad_enabled(rank != 1):
                layer(torch.ones(1, 3, 8))
                monitor.step()
        """
    end = """
        pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        if rank != 1:  # who does not call it, or may not
            try:
                reduce({}, pair)
            except scaledot.ScaledotError as error:
                said["pair"] = str(error)
        dist.barrier()
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(said, file)
        """
    body = textwrap.dedent(start) + textwrap.dedent(cases) + textwrap.dedent(end)
    together(tmp_path, body, processes=3)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for name, (_, wanted) in DISAGREE.items():
        assert [one[name] for one in said] == [wanted] * 3
    reason = said[0]["pair"].removeprefix(f"{AWAY} (")
    assert "imed out" in reason
    assert said[2]["pair"] == ABROAD
    assert [len(one) - len(DISAGREE) for one in said] == [1, 0, 1]


SLICES = """
def slices():
    \"\"\"Queries, keys and values of five texts, four heads in groups of two.\"\"\"
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(5, 4, 11, 8, generator=draw, dtype=torch.float64)
    k, v = torch.randn(2, 5, 2, 11, 8, generator=draw, dtype=torch.float64)
    return q, k, v

class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True)

def attended(q, k, v, texts):
    net = Attend()
    with torch.no_grad(), scaledot.observe(net) as seen:
        for i in texts:
            net(q[i:i+1], k[i:i+1], v[i:i+1])
    return seen.heads
"""


def test_four_processes_by_texts_by_heads_and_by_both(tmp_path):
    """Of seven or five texts one process has fewer; heads and key heads are spread over two or four
    processes, in the latter case each key head over two."""
    together(tmp_path, SLICES + textwrap.dedent("""
        net = model()
        with torch.no_grad(), scaledot.observe(net) as seen:
            for text in ids[rank::world]:
                net(input_ids=text[None])
        heads.save(f"{folder}/texts {rank}", reduce(seen.heads))

        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor = (mesh[name].get_local_rank() for name in ("data", "tensor"))
        q, k, v = slices()
        h = slice(2 * tensor, 2 * tensor + 2)
        part = attended(q[:, h], k[:, tensor:tensor+1], v[:, tensor:tensor+1], range(data, 5, 2))
        part = reduce(part, mesh["data"].get_group())
        both = reduce(part, mesh["tensor"].get_group(), heads="shards")
        heads.save(f"{folder}/both {rank}", both)

        h, g = slice(rank, rank + 1), slice(rank // 2, rank // 2 + 1)
        part = attended(q[:, h], k[:, g], v[:, g], range(5))
        heads.save(f"{folder}/copies {rank}", reduce(part, heads="shards", kv_heads=2))
        [four] = reduce(part, heads="shards", kv_heads=4).values()
        assert (four.heads, four.kv_heads) == (4, 4)
        """), processes=4)  # fmt: skip
    scope = {"torch": torch, "scaledot": scaledot}
    exec(SLICES, scope)
    whole = scope["attended"](*scope["slices"](), range(5))
    for name, wanted in (("texts", alone()), ("both", whole), ("copies", whole)):
        first, *others = (parse((tmp_path / f"{name} {i}").read_bytes()) for i in range(4))
        assert all(x.equal(other[key]) for other in others for key, x in first.items())
        same(heads.load(tmp_path / f"{name} 0"), wanted)


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path):
    done = torchrun(tmp_path, START + textwrap.dedent("""
        if rank == 1:
            raise RuntimeError("this rank is gone")
        reduce({})
        """))  # fmt: skip
    assert done.returncode
    assert "this rank is gone" in done.stderr


def test_without_a_process_group_nothing_changes():
    stats = alone()
    got = reduce(stats)
    assert list(got) == list(stats)
    assert all(got[path] is stats[path] for path in stats)


TRAININGS = ("ddp", "compiled", "fsdp2")


def test_every_rank_of_a_training_is_told_the_same_and_one_writes(tmp_path):
    """Two ranks with two texts a step each, whose gradients add up before ranks exchange them,
    against one process with all four."""
    together(tmp_path, f"""
        import contextlib
        from torch.distributed.fsdp import fully_shard

        def wrapped(kind):
            net = model()
            if kind == "fsdp2":
                for layer in net.layers:
                    fully_shard(layer)
                return fully_shard(net)
            net = torch.nn.parallel.DistributedDataParallel(net)
            return torch.compile(net, backend="eager") if kind == "compiled" else net

        def apart(kind, net):
            if kind != "fsdp2":
                return getattr(net, "_orig_mod", net).no_sync()
            net.set_requires_gradient_sync(False)
            done = contextlib.ExitStack()
            done.callback(net.set_requires_gradient_sync, True)
            return done

        for kind in {TRAININGS}:
            net = wrapped(kind)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with scaledot.Monitor(net, every=1, file=f"{{folder}}/{{kind}}.jsonl") as monitor:
                for step in range(2):
                    first, second = ids[4 * step % 3 + rank::2][:2]
                    with apart(kind, net):
                        net(input_ids=first[None])[0].square().mean().backward()
                    net(input_ids=second[None])[0].square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    look = monitor.step()
                    heads.save(f"{{folder}}/{{kind}} {{step}} {{rank}}", look.heads)
            assert len(scaledot.qk_clip(net, look.heads, 1e-4)) == 8
        """)  # fmt: skip
    net, ids = here()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    looks = []
    with scaledot.Monitor(net, every=1) as monitor:
        for step in range(2):
            texts = ids[4 * step % 3 :][:4]
            (sum(net(input_ids=x[None])[0].square().mean() for x in texts) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            looks.append(monitor.step())
    for kind in TRAININGS:
        for step in range(2):
            first, second = (
                parse((tmp_path / f"{kind} {step} {rank}").read_bytes()) for rank in range(2)
            )
            assert all(x.equal(second[name]) for name, x in first.items())
        same(heads.load(tmp_path / f"{kind} 0 0"), looks[0].heads)
        lines = (tmp_path / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(x) for x in lines[1:]]
        assert [x["step"] for x in steps] == [1, 2]
        assert steps[0]["rows"] == 4 * 4 * 2 * 19  # texts, heads, layers, tokens
        for name in ("entropy", "max_score", "gradient"):
            for layer, got in enumerate(steps[1]["heads"][name]):
                wanted = looks[1].values[name][layer]  # after gradients added in another order
                torch.testing.assert_close(torch.tensor(got).double(), wanted, rtol=NORM, atol=0)


def test_a_sharded_weight_is_clipped_as_a_whole_one(tmp_path):
    """FSDP2 keeps half of each weight's rows on a rank, a head's among them."""
    together(tmp_path, """
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


DOCUMENT = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text(encoding="utf-8")


def test_the_documents_example_prints_what_stands_below_it(tmp_path):
    code, said = re.findall(r"```(?:python|text)\n(.*?)```", DOCUMENT, re.S)
    assert torchrun(tmp_path, code + LEAVE).stdout == said


def test_the_documents_errors_are_those_that_are_raised():
    raised = [*(wanted for _, wanted in DISAGREE.values()), AWAY, ABROAD]
    named = " ".join(DOCUMENT.split("## Errors")[1].split())
    messages = [x for x in re.findall(r"`([^`]+)`", named) if " " in x]
    assert len(messages) == 9
    for message in messages:
        pieces = re.split(" ?…,? ?", message)
        assert any(all(piece in one for piece in pieces) for one in raised), message


def test_as_many_bytes_travel_as_the_document_says():
    """Of the package's own model: 16 heads in four layers."""
    sample = load()
    ids = sample.tokenizer("The cat sat on the mat.", return_tensors="pt")
    with torch.no_grad(), scaledot.observe(sample.model) as seen:
        sample.model(**ids)
    with scaledot.Monitor(sample.model.train()) as monitor:
        sample.model(**ids)
        look = monitor.step()
    for name, stats in (("observe", seen.heads), ("Monitor", look.heads)):
        measures = {len(one.measures) for one in stats.values()}
        kilobytes = len(heads.packed(stats)) / 16 / 1000
        assert measures == {int(re.search(rf"`{name}`, (\d+) measures", DOCUMENT)[1])}
        stated = re.search(rf"`{name}`, \d+ measures \| (\d+) kB", DOCUMENT)[1]
        assert f"{kilobytes:.0f}" == stated
    assert f"{30 * 9 * kilobytes / 1000:.1f} MB a rank" in DOCUMENT
