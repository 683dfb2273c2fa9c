"""The explorer's server: what it answers, and what it refuses."""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import scaledot
from scaledot import report, server
from scaledot.exploring import prepare
from scaledot.loading import load
from scaledot.server import HEADERS, LARGEST, LOOPBACK, TEXTS, Shelf, application

TEXT = "In the beginning God created the heaven and the earth."
HOSTILE = "</script><img src=x onerror=alert(1)> \u202eabc\u0000\x1b[31m ﷽ 👩‍👩‍👧 שלום"


@pytest.fixture(scope="module")
def explorer():
    return prepare(load(predicts=True))


@pytest.fixture(autouse=True)
def web(tmp_path, monkeypatch):
    """A page of one line in place of the real one."""
    (tmp_path / "index.html").write_text("<!doctype html><title>page</title>")
    (tmp_path / "app.js").write_text("export const one = 1;\n")
    (tmp_path / "secret.txt").write_text("not a page's file")
    monkeypatch.setattr(report, "WEB", tmp_path)
    return tmp_path


@pytest.fixture
def shelf(explorer, monkeypatch):
    monkeypatch.setattr(server.secrets, "token_hex", lambda _: "run")
    return Shelf(explorer)


@pytest.fixture
def client(shelf):
    app = application(shelf, names=LOOPBACK, token=None)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def send(client, text, **options):
    return client.post("/api/texts", json={"text": text}, **options)


def array(packed):
    data = np.frombuffer(base64.b64decode(packed["float32"]), "<f4")
    return torch.from_numpy(data.reshape(packed["shape"]).copy())


# What it answers


def test_a_text_comes_back_as_the_page_s_document(client):
    answer = send(client, TEXT)
    assert answer.status_code == 200
    document = answer.json()
    assert document["format"] == "scaledot/page"
    assert document["model"]["embedded"] is True
    assert document["model"]["kind"] == "GPT-2 decoder"
    (text,) = document["texts"]
    assert text["text"] == TEXT
    assert "".join(token["text"] for token in text["tokens"]) == TEXT
    assert [len(layer["heads"]) for layer in text["layers"]] == [4, 4, 4, 4]
    assert {layer["mask"]["kind"] for layer in text["layers"]} == {"causal"}
    assert document["heads"] == {}
    assert sum(p for _, p in text["next"]["tokens"]) + text["next"]["others"] == pytest.approx(1)


def test_a_head_s_arrays_give_the_weights_that_trace_gives(client, explorer):
    send(client, TEXT)
    got = client.get("/api/texts/t1_run/heads/2/3").json()
    q, k, v = array(got["query"]), array(got["key"]), array(got["value"])
    tokens = explorer.loaded.tokenizer(TEXT, return_tensors="pt")
    model = explorer.loaded.model
    with torch.no_grad(), scaledot.observe(model, keep="qk") as seen:
        model(**tokens, use_cache=False)
    expected = seen.trace("h.2.attn", head=3)
    found = scaledot.trace(q, k, v, is_causal=True, scale=expected.scale)
    assert torch.allclose(found.weights, expected.weights, atol=1e-6)
    assert torch.allclose(found.output, expected.output, atol=1e-6)
    assert got["sink"] is None
    assert got["hidden"] is None
    assert got["bias"] is None


def test_what_heads_add_is_their_own_part_of_the_projection(client, explorer):
    send(client, TEXT)
    got = array(client.get("/api/texts/t1_run/layers/1").json()["contributions"])
    model, tokens = explorer.loaded.model, explorer.loaded.tokenizer(TEXT, return_tensors="pt")
    given = []
    module = model.h[1].attn.c_proj
    handle = module.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        model(**tokens)
        handle.remove()
        for head in range(4):
            alone = torch.zeros_like(given[0])
            part = slice(32 * head, 32 * (head + 1))
            alone[..., part] = given[0][..., part]
            length = (module(alone) - module.bias).norm(dim=-1)[0]
            assert torch.allclose(got[:, head], length, rtol=1e-4)


def test_the_result_is_what_the_next_module_gets(client, explorer):
    """Observed outside of scaledot: what the attention hands to the model."""
    tokens = explorer.loaded.tokenizer(TEXT, return_tensors="pt")
    given = []
    attention = explorer.loaded.model.h[1].attn
    handle = attention.register_forward_hook(lambda _, args, out: given.append(out[0][0]))
    with torch.no_grad():
        explorer.loaded.model(**tokens)
    handle.remove()
    send(client, TEXT)
    address = "/api/texts/t1_run/layers/1/result"
    n = len(given[0])
    told = client.get(f"{address}?first=0&last={n}").json()
    assert told["biased"] is True
    # Attention is computed there by another kernel, in the layer before too.
    assert torch.allclose(array(told["result"]), given[0], rtol=1e-4, atol=1e-4)
    some = client.get(f"{address}?first=2&last=5").json()["result"]
    assert array(some).equal(array(told["result"])[2:5])


def test_no_more_of_a_result_is_sent_than_is_looked_at(client):
    tokens = send(client, "light " * 200).json()["texts"][0]["tokens"]
    address = "/api/texts/t1_run/layers/1/result"
    assert client.get(f"{address}?first=0&last=128").status_code == 200
    for first, last in ((0, 129), (5, 5), (-1, 4), (90, len(tokens) + 1)):
        refused = client.get(f"{address}?first={first}&last={last}")
        assert refused.status_code == 404
        assert "128 at once" in refused.json()["error"]


def test_the_same_text_keeps_its_id_and_is_not_read_again(client, monkeypatch):
    assert send(client, TEXT).json()["texts"][0]["id"] == "t1_run"
    monkeypatch.setattr(server, "read", None)
    assert send(client, TEXT).json()["texts"][0]["id"] == "t1_run"


def test_some_texts_are_kept_and_the_longest_unseen_goes(client):
    for i in range(TEXTS):
        assert send(client, f"text {i}").status_code == 200
    assert client.get("/api/texts/t1_run/layers/0").status_code == 200  # looked at: it stays
    send(client, "one more")
    kept = [text["id"] for text in client.get("/api/document").json()["texts"]]
    assert len(kept) == TEXTS
    assert kept[0] == "t1_run"
    assert "t2_run" not in kept
    gone = client.get("/api/texts/t2_run/layers/0")
    assert gone.status_code == 410
    assert gone.json() == {"error": "the text 't2_run' is not kept any more: send it again"}


def test_memory_bounds_what_is_kept(client, monkeypatch):
    send(client, TEXT)
    monkeypatch.setattr(server, "MEMORY", 1)
    send(client, "another text")
    assert [t["text"] for t in client.get("/api/document").json()["texts"]] == ["another text"]


def test_the_document_is_there_before_any_text(client):
    document = client.get("/api/document").json()
    assert document["texts"] == []
    assert document["model"]["layers"] == 4
    assert document["model"]["context"] == 256


def test_a_text_beyond_the_context_says_what_is_left_out(client, explorer):
    text = TEXT * 40
    ids = explorer.loaded.tokenizer(text, verbose=False)["input_ids"]
    (shown,) = send(client, text).json()["texts"]
    assert len(shown["tokens"]) == 256
    assert shown["left_out"] == len(ids) - 256 > 0


@pytest.mark.parametrize("text", [HOSTILE, "a\ud800b", "\udfff", "猫は犬", "\ufeff", "🙂" * 50])
def test_any_text_is_shown_as_it_is(client, text):
    answer = client.post(
        "/api/texts",
        content=json.dumps({"text": text}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    (shown,) = json.loads(answer.content)["texts"]
    assert shown["text"] == text
    for token in shown["tokens"]:
        assert not any(c in token["label"] for c in "\u202e\0\x1b\n")


def test_progress_and_stop_answer_without_a_text(client):
    idle = {"layers": None, "of": 4, "seconds": 0.0, "measured": []}
    assert client.get("/api/progress").json() == idle
    assert client.post("/api/stop").json() == idle
    assert send(client, TEXT).json()["texts"][0]["complete"] is True


def test_layers_are_told_while_the_next_are_measured(shelf, monkeypatch):
    told = []

    def at(progress):
        Shelf._at(shelf, progress)
        told.append(shelf.progress(len(told[-1]["measured"]) if len(told) == 3 else 0))

    monkeypatch.setattr(shelf, "_at", at)
    (text,) = shelf.document(shelf.put(TEXT))["texts"]
    # Nobody had asked before the first; the second answer catches up; the last is asked from 3 on.
    assert [[x["index"] for x in one["measured"]] for one in told] == [[], [0, 1], [0, 1, 2], [3]]
    assert [one["layers"] for one in told] == [1, 2, 3, 4]
    for layer in told[2]["measured"] + told[3]["measured"]:
        final = text["layers"][layer["index"]]
        unfound = [{**head, "findings": []} for head in final["heads"]]
        assert layer == {**final, "heads": unfound}
    assert shelf.progress()["measured"] == []


def test_a_stopped_text_keeps_the_layers_that_are_done(shelf, monkeypatch):
    calls = []

    def at(progress):
        calls.append(progress.layers)
        if progress.layers == 3:
            shelf.stop()
        Shelf._at(shelf, progress)

    monkeypatch.setattr(shelf, "_at", at)
    (text,) = shelf.document(shelf.put(TEXT))["texts"]
    assert calls == [1, 2, 3]
    assert text["complete"] is False
    assert text["next"] is None
    assert [layer["observed"] for layer in text["layers"]] == [
        True, True, True, "the model was stopped before it"
    ]  # fmt: skip
    # The model is whole again, and the text is read anew.
    monkeypatch.undo()
    assert shelf.document(shelf.put(TEXT))["texts"][0]["complete"] is True


def test_nothing_is_kept_of_a_text_that_nobody_waits_for(shelf, monkeypatch):
    def at(progress):
        shelf.stop(keep=False)
        Shelf._at(shelf, progress)

    monkeypatch.setattr(shelf, "_at", at)
    with pytest.raises(server.Stopped):
        shelf.put(TEXT)
    assert shelf.document()["texts"] == []


def test_a_text_is_stopped_when_nobody_waits_for_it(shelf, monkeypatch):
    """The page gives up a text when another is typed: the model is free at its next layer."""
    started, layers = threading.Event(), []

    def at(progress):
        layers.append(progress.layers)
        started.set()
        assert shelf._stop.wait(10)
        Shelf._at(shelf, progress)

    monkeypatch.setattr(shelf, "_at", at)

    class Gone:
        async def is_disconnected(self):
            return started.is_set()

    with ThreadPoolExecutor(1) as worker, pytest.raises(server.Refused) as refused:
        asyncio.run(server._through(Gone(), worker, shelf, TEXT))
    assert refused.value.status == 409
    assert layers == [1]
    assert shelf.document()["texts"] == []
    started.set()
    with ThreadPoolExecutor(1) as worker, pytest.raises(server.Refused, match="nobody waits"):
        asyncio.run(server._through(Gone(), worker, shelf, TEXT))


def test_an_earlier_run_s_text_is_not_taken_for_this_one_s(explorer):
    ids = [Shelf(explorer).put(TEXT) for _ in range(2)]
    assert ids[0] != ids[1]


def test_layers_without_w_o_are_counted_and_can_be_stopped(explorer):
    """Progress and Stop must not hang on a projection that was found."""
    shelf = Shelf(replace(explorer, projections={}))
    calls = []

    def at(progress):
        calls.append(progress.layers)
        if progress.layers == 2:
            shelf.stop()
        Shelf._at(shelf, progress)

    shelf._at = at
    (text,) = shelf.document(shelf.put(TEXT))["texts"]
    assert calls == [1, 2]
    assert text["complete"] is False
    assert [layer["observed"] is True for layer in text["layers"]] == [True, True, False, False]


def test_a_body_that_breaks_off_is_no_fault_of_ours(client, capsys):
    messages = iter([{"type": "http.request", "body": b'{"te', "more_body": True}])
    sent = []

    async def receive():
        return next(messages, {"type": "http.disconnect"})

    async def send_(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/api/texts", "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }  # fmt: skip
    asyncio.run(client.app(scope, receive, send_))
    assert sent[0]["status"] == 409
    assert capsys.readouterr().err == ""


# What it refuses


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[]", 422),
        (b"{", 422),
        (b'{"text": 3}', 422),
        (b'{"file": "/etc/passwd"}', 422),
        (b"[" * 100_000, 422),
        (b'{"text": ""}', 422),
        (b'{"text": " \\n\\t"}', 422),
        (b'{"text": "' + b"a" * LARGEST + b'"}', 413),
    ],
)
def test_what_is_no_text_is_refused_in_a_sentence(client, body, status):
    answer = client.post("/api/texts", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    (sentence,) = answer.json().values()
    assert "\n" not in sentence
    assert len(sentence.split()) > 3


def test_a_form_is_no_json(client):
    answer = client.post("/api/texts", data={"text": TEXT})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/texts/t1_run/heads/9/0", 404),
        ("/api/texts/t1_run/heads/0/4", 404),
        ("/api/texts/t1_run/heads/-1/0", 404),
        ("/api/texts/t1_run/heads/one/0", 422),
        ("/api/texts/t1_run/layers/4", 404),
        ("/api/texts/t77/heads/0/0", 410),
        ("/api/texts/t77", 410),
        ("/api/timeline?after=x.1", 404),
        ("/api/nothing", 404),
        ("/docs", 404),
        ("/redoc", 404),
        ("/openapi.json", 404),
        ("/secret.txt", 404),
        ("/../server.py", 404),
        ("/..%2fserver.py", 404),
        ("/%2e%2e%2fserver.py", 404),
        ("/etc/passwd", 404),
        ("//etc/passwd", 404),
    ],
)
def test_what_is_not_there_is_a_sentence(client, path, status):
    send(client, TEXT)
    answer = client.get(path)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


def test_every_answer_has_the_headers(client):
    send(client, TEXT)
    answers = [
        client.get("/"),
        client.get("/app.js"),
        client.get("/nothing"),
        client.get("/api/document"),
        client.delete("/api/texts"),
        client.options("/api/texts"),
        client.post("/api/texts", content=b"x", headers={"content-type": "application/json"}),
        client.get("/", headers={"host": "evil.example"}),
        send(client, TEXT, headers={"sec-fetch-site": "cross-site"}),
    ]
    assert [a.status_code for a in answers] == [200, 200, 404, 200, 405, 405, 422, 400, 403]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers.get_list(name) == [value]
        assert not any(name.startswith("access-control-") for name in answer.headers)
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert answers[0].headers["content-type"].startswith("text/html")
    assert answers[1].headers["content-type"].startswith("text/javascript")


def test_a_fault_of_ours_is_a_sentence_too(client, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server, "read", fail)
    answer = send(client, TEXT)
    assert answer.status_code == 500
    assert answer.json() == {"error": "it failed with RuntimeError: the terminal shows where"}
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "secret detail" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("evil.example:127.0.0.1", 400),
        ("localhost@evil.example", 400),
        ("", 400),
    ],
)
def test_only_its_own_names_are_answered(client, host, status):
    """A page elsewhere can have its name resolve here: the Host header still holds that name."""
    assert client.get("/", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_cannot_ask(client, headers):
    assert send(client, TEXT, headers=headers).status_code == 403
    assert client.get("/api/document", headers=headers).status_code == 403
    assert send(client, TEXT, headers={"origin": "http://127.0.0.1"}).status_code == 200


def test_bound_elsewhere_everything_takes_the_token(shelf):
    app = application(shelf, names=None, token="s3cret")
    with TestClient(app, base_url="http://box.lan", follow_redirects=False) as client:
        for path in ("/", "/app.js", "/api/document", "/?token=wrong", "/app.js?token=s3cret"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
            assert answer.headers["x-frame-options"] == "DENY"
        assert send(client, TEXT).status_code == 401
        entered = client.get("/?token=s3cret")
        assert entered.status_code == 303
        assert entered.headers["location"] == "/"
        assert "HttpOnly" in entered.headers["set-cookie"]
        # The cookie opens the rest.
        assert client.get("/").status_code == 200
        assert client.get("/app.js").status_code == 200
        assert send(client, TEXT).status_code == 200
    with TestClient(app, base_url="http://box.lan") as client:
        headers = {"x-scaledot-token": "s3cret"}
        assert client.get("/api/document", headers=headers).status_code == 200
        assert (
            client.get(
                "/api/document", headers={"x-scaledot-token": "\xe9".encode("latin-1")}
            ).status_code
            == 401
        )


def test_too_many_wait(client, monkeypatch):
    monkeypatch.setattr(server, "WAITING", 0)
    answer = send(client, TEXT)
    assert answer.status_code == 429
    assert "busy" in answer.json()["error"]


def test_one_text_at_a_time_goes_through_the_model(client, monkeypatch):
    inside, most = 0, 0
    lock, reading = threading.Lock(), server.read

    def watched(*args, **options):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        try:
            return reading(*args, **options)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(server, "read", watched)
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(send(client, f"text {i}").status_code))
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    # Meanwhile the page's other questions are answered.
    assert client.get("/api/progress").status_code == 200
    for thread in threads:
        thread.join()
    assert found == [200] * 5
    assert most == 1


# Listening


def test_it_listens_says_where_and_stops(shelf, monkeypatch):
    import uvicorn

    servers, said = [], threading.Event()
    made = uvicorn.Server.__init__

    def remember(self, *args, **options):
        made(self, *args, **options)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", remember)
    monkeypatch.setattr(uvicorn.Server, "capture_signals", _no_signals)
    address = []

    def ready(url):
        address.append(url)
        said.set()

    thread = threading.Thread(target=lambda: server.serve(shelf, on_ready=ready))
    thread.start()
    assert said.wait(10)
    try:
        assert address[0].startswith("http://127.0.0.1:")
        asked = urllib.request.Request(
            f"{address[0]}api/texts",
            json.dumps({"text": TEXT}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert json.load(answer)["texts"][0]["text"] == TEXT
            assert "server" not in answer.headers
    finally:
        servers[0].should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def test_ctrl_c_while_a_text_runs_ends_it_without_a_traceback(tmp_path):
    """The text that runs is stopped, those that wait are answered, and nothing is printed."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, signal, sys, threading, time\n"
        "from scaledot import server\n"
        "from scaledot.exploring import Progress, prepare\n"
        "from scaledot.loading import load\n"
        "def slow(explorer, text, on_layer):\n"
        "    for i in range(1000):\n"
        "        print('layer', flush=True)\n"
        "        time.sleep(0.1)\n"
        "        on_layer(Progress(i, lambda first: ([], [])))\n"
        "server.read = slow\n"
        "server.serve(server.Shelf(prepare(load())), on_ready=lambda x: print(x, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(server.__file__).parents[1])},
    )  # fmt: skip
    try:
        address = process.stdout.readline().strip()
        found = []

        def ask(text):
            asked = urllib.request.Request(
                f"{address}api/texts", json.dumps({"text": text}).encode(),
                {"content-type": "application/json"},
            )  # fmt: skip
            try:
                urllib.request.urlopen(asked, timeout=30)
            except urllib.error.HTTPError as error:
                found.append((error.code, json.load(error)["error"]))

        threads = [threading.Thread(target=ask, args=(text,)) for text in ("one", "two")]
        for thread in threads:
            thread.start()
        assert process.stdout.readline() == "layer\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        for thread in threads:
            thread.join()
        assert {code for code, _ in found} <= {409, 503}
        assert len(found) == 2
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()
        process.communicate()


def _no_signals(self):
    import contextlib

    return contextlib.nullcontext()


def test_a_port_that_is_taken_is_one_line(shelf):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(scaledot.ScaledotError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            server.serve(shelf, port=port)
    with pytest.raises(scaledot.ScaledotError, match=r"no host 'nowhere\.invalid'"):
        server.serve(shelf, host="nowhere.invalid")


def test_without_the_extra_the_error_names_the_line(shelf, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(scaledot.ScaledotError, match=r'pip install "scaledot\[web\]"'):
        application(shelf, names=LOOPBACK, token=None)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True),
     ("0.0.0.0", False), ("::", False), ("192.168.0.7", False), ("box.lan", False), ("", False)],
)  # fmt: skip
def test_what_is_this_machine_alone(host, local):
    assert server._is_loopback(host) is local
