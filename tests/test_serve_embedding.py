"""The server of a model that gives embeddings, or ranks documents."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import openai
import pytest

from edgekv import Llama, llama_cpp
from edgekv.serve.embedding.run import EmbeddingServer
from edgekv.serve.listening import listen
from edgekv.serve.options import ServeOptions
from tests import embedders
from tests.lib import ROOT
from tests.serving import PATIENCE, get, post

TEXTS = ["the rain in the air", "abc def", "the rain"]


@contextmanager
def serving(path, pooling):
    kind = {"embedding": True, "pooling_type": pooling, "n_ctx": 256, "n_batch": 256}
    llm = Llama(str(path), n_ubatch=256, n_threads=1, verbose=False, **kind)
    server = EmbeddingServer(llm, ServeOptions(alias="tiny"))
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", llm
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        llm.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return embedders.write("llama-embed", tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def both(path):
    with serving(path, llama_cpp.LLAMA_POOLING_TYPE_MEAN) as both:
        yield both


@pytest.fixture(scope="module")
def url(both):
    return both[0]


def test_vectors_are_the_parents(both):
    url, llm = both
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        done = client.embeddings.create(model="tiny", input=TEXTS)
    expected = llm.embed(TEXTS, normalize=True)
    assert done.model == "tiny" and [one.index for one in done.data] == [0, 1, 2]
    assert np.allclose([one.embedding for one in done.data], expected, atol=1e-5)
    assert done.usage.prompt_tokens == sum(len(llm.tokenize(text.encode())) for text in TEXTS)


def test_forms_of_texts_and_vectors(both):
    url, llm = both
    tokens = llm.tokenize(TEXTS[0].encode())
    whole = post(f"{url}/v1/embeddings", json={"input": TEXTS[0]}).json()["data"][0]["embedding"]
    for said in (tokens, [tokens], [TEXTS[0]]):
        found = post(f"{url}/v1/embeddings", json={"input": said}).json()["data"][0]["embedding"]
        assert found == whole
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 8}
    data = post(f"{url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    cut = np.frombuffer(base64.b64decode(data), "<f4")
    assert len(cut) == 8 and np.isclose(np.linalg.norm(cut), 1)
    assert np.allclose(cut / cut[0], np.array(whole[:8]) / whole[0], atol=1e-3)


def test_ollamas_client_has_them_too(url):
    ollama = pytest.importorskip("ollama")
    expected = post(f"{url}/v1/embeddings", json={"input": TEXTS}).json()["data"]
    with ollama.Client(url) as client:
        done = client.embed("tiny", TEXTS)
        assert np.allclose(done.embeddings, [one["embedding"] for one in expected])
        assert done.prompt_eval_count > 0 and len(client.embed("tiny", "abc").embeddings) == 1
        assert list(client.embeddings("tiny", TEXTS[0]).embedding) == expected[0]["embedding"]
        assert len(client.embed("tiny", "abc " * 500, truncate=True).embeddings) == 1
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed("tiny", "abc " * 500, truncate=False)
        (one,) = client.list().models
        assert one.model == "tiny" and client.ps().models[0].context_length == 256


@pytest.mark.parametrize(
    ("where", "body", "status", "says"),
    [
        ("v1/embeddings", {"input": "abc " * 500}, 400, "tokens"),
        ("v1/embeddings", {"input": [10**6]}, 400, "token"),
        ("v1/embeddings", {"input": "abc", "dimensions": 10**4}, 400, "dimensions"),
        ("v1/embeddings", {}, 400, "input"),
        ("v1/rerank", {"query": "a", "documents": ["b"]}, 501, "--reranking"),
        ("v1/chat/completions", {"messages": []}, 501, "/v1/embeddings"),
    ],
)
def test_a_mistake_is_one_line(url, where, body, status, says):
    reply = post(f"{url}/{where}", json=body)
    assert reply.status_code == status and says in reply.json()["error"]["message"]


def test_documents_are_ranked(path, tiny):
    with serving(tiny("llama-gqa"), llama_cpp.LLAMA_POOLING_TYPE_RANK) as (url, _):
        body = {"query": "the rain", "documents": [*TEXTS[:2], {"text": TEXTS[2]}]}
        done = post(f"{url}/v1/rerank", json=body).json()
        scores = [one["relevance_score"] for one in done["results"]]
        assert scores == sorted(scores, reverse=True) and done["usage"]["prompt_tokens"] > 0
        assert sorted(one["index"] for one in done["results"]) == [0, 1, 2]
        first = post(f"{url}/v1/rerank", json={**body, "top_n": 1}).json()["results"]
        assert first == done["results"][:1]
        body = {"query": "the rain", "texts": TEXTS, "return_text": True}
        found = post(f"{url}/rerank", json=body).json()
        assert [one["text"] for one in found] == [TEXTS[one["index"]] for one in found]
        assert post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 400
        for documents in ([], [7], [{"a": "b"}]):
            body = {"query": "a", "documents": documents}
            assert post(f"{url}/v1/rerank", json=body).status_code == 400


def test_the_command_sees_what_the_model_is_for(path, tmp_path):
    command = [sys.executable, "-m", "edgekv", "serve", str(path), "--port", "0", "-t", "1"]
    places = {"XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **places}, stderr=subprocess.PIPE, text=True
    ) as child:
        line = child.stderr.readline()
        assert " at http" in line, line + child.stderr.read()
        url = line.split(" at ")[1].strip()
        assert post(f"{url}/v1/embeddings", json={"input": "abc"}).status_code == 200
        assert get(f"{url}/v1/models").json()["data"][0]["meta"]["n_embd"] > 0
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
