"""Who may ask the server, and how much."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import httpx
import openai
import pytest

from edgekv.serve.encoding import Json
from edgekv.serve.gate import Gate, is_loopback
from edgekv.serve.options import ServeOptions
from tests.serving import PATIENCE, get, post, serving, started, until
from tests.test_serve_worker import said

ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(
        api_keys=("first",),
        file_keys=("second",),
        cors_origins=(ORIGIN,),
        max_request=5000,
        slots=False,
    )
    with serving(tiny("llama-gqa"), options) as (url, _):
        yield url


@pytest.fixture(scope="module")
def open_url(tiny):
    with serving(tiny("llama-gqa")) as (url, _):
        yield url


BODY = {"content": "abc"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"X-Api-Key": "second"},
    ],
)
def test_a_right_key_lets_in(url, headers):
    assert post(f"{url}/tokenize", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer fir"},
        {"Authorization": "first"},
        {"X-Api-Key": "first,second"},
        {"X-Api-Key": "é".encode()},
    ],
)
def test_a_wrong_key_does_not(url, headers):
    reply = post(f"{url}/tokenize", json=BODY, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "authentication_error"


def test_openais_client_sees_a_wrong_key(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(
                messages=[{"role": "user", "content": "abc"}], model="tiny"
            )


def test_health_and_models_need_no_key(url):
    assert get(f"{url}/health").status_code == 200
    assert get(f"{url}/v1/models").status_code == 200
    assert get(f"{url}/props").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example"])
def test_on_loopback_another_host_is_refused(open_url, host):
    reply = get(f"{open_url}/v1/models", headers={"Host": host})
    assert reply.status_code == 403 and reply.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "LOCALHOST:80", "[::1]:8080"])
def test_on_loopback_its_own_names_are_answered(open_url, host):
    assert get(f"{open_url}/v1/models", headers={"Host": host}).status_code == 200


def test_which_addresses_are_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.3.4.5", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.2", "example.org", "::")))


def test_a_page_of_a_named_origin_may_ask(url):
    headers = {"Origin": ORIGIN, "Authorization": "Bearer first"}
    reply = post(f"{url}/tokenize", json=BODY, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type"
    reply = httpx.options(f"{url}/v1/chat/completions", headers=preflight)
    assert reply.status_code == 200
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()


def test_a_page_of_another_origin_may_not(url, open_url):
    for address in (url, open_url):
        headers = {"Origin": "https://evil.example", "Authorization": "Bearer first"}
        reply = post(f"{address}/tokenize", json=BODY, headers=headers)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_the_servers_own_page_may_ask(open_url):
    headers = {"Origin": open_url}
    assert post(f"{open_url}/tokenize", json=BODY, headers=headers).status_code == 200


def test_a_request_that_is_too_large_is_refused(url):
    headers = {"Authorization": "Bearer first"}
    reply = post(f"{url}/tokenize", json={"content": "a" * 6000}, headers=headers)
    assert reply.status_code == 413 and "5,000 bytes" in reply.json()["error"]["message"]


def test_a_body_without_a_length_is_counted(url):
    def parts():
        yield b'{"content": "'
        for _ in range(100):
            yield b"a" * 100
        yield b'"}'

    headers = {"Authorization": "Bearer first"}
    reply = post(f"{url}/tokenize", content=parts(), headers=headers)
    assert reply.status_code == 413


def test_what_is_not_there_is_said_in_one_line(open_url):
    reply = get(f"{open_url}/v1/nothing")
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    assert get(f"{open_url}/v1/chat/completions").status_code == 405


def test_what_is_turned_off_says_how_to_turn_it_on(url, open_url):
    reply = get(f"{open_url}/metrics")
    assert reply.status_code == 501 and "--metrics" in reply.json()["error"]["message"]
    reply = get(f"{url}/slots", headers={"Authorization": "Bearer first"})
    assert reply.status_code == 501


def test_there_are_no_pages_with_scripts_from_elsewhere(open_url):
    assert get(f"{open_url}/docs").status_code == 404
    assert get(f"{open_url}/redoc").status_code == 404


def test_an_answer_does_not_wait_for_the_clients_system(open_url):
    """Small pieces go out at once: the system would hold them back for 40 ms otherwise."""
    with httpx.Client(base_url=open_url, timeout=PATIENCE) as client:
        client.get("/health")
        waits = [client.get("/health").elapsed.total_seconds() for _ in range(20)]
    assert min(waits[10:]) < 0.03


@pytest.mark.parametrize("origin", ["https://{}", "evil://{}", "http://{}/x", "{}", "null"])
def test_another_scheme_of_the_same_host_is_another_origin(open_url, origin):
    headers = {"Origin": origin.format(open_url.removeprefix("http://"))}
    assert post(f"{open_url}/tokenize", json=BODY, headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/"])
def test_head_is_answered_where_get_is(open_url, path):
    reply = httpx.head(f"{open_url}{path}")
    assert reply.status_code == 200 and not reply.content
    assert reply.headers["content-length"] == get(f"{open_url}{path}").headers["content-length"]
    assert httpx.head(f"{open_url}/tokenize").status_code == 405


def host_status(options: ServeOptions, host: str, path: str = "/props") -> int:
    """The status of the gate for a host, in front of an application that answers all."""

    async def app(scope, receive, send):
        await Json({})(scope, receive, send)

    async def ask() -> int:
        transport = httpx.ASGITransport(app=Gate(app, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path, headers={"Host": host})).status_code

    return asyncio.run(ask())


def test_an_open_server_without_a_key_answers_to_names_of_no_web_site():
    options = ServeOptions(host="0.0.0.0", allow_hosts=("Chat.example.org",))
    for host in ("192.168.1.2:8080", "[fe80::1]", "kitchen:8080", "localhost", "chat.example.org"):
        assert host_status(options, host) == 200, host
    for host in ("evil.example", "evil.example:8080", "x.chat.example.org", "1.2.3.4.evil.example"):
        assert host_status(options, host) == host_status(options, host, "/health") == 403, host
    assert host_status(ServeOptions(host="0.0.0.0", allow_hosts=("*",)), "evil.example") == 200


def test_a_key_is_as_good_as_a_name():
    assert host_status(ServeOptions(host="0.0.0.0", api_keys=("a",)), "a.example.org") == 401


def test_a_name_is_let_in_on_loopback():
    assert host_status(ServeOptions(allow_hosts=("a.example.org",)), "a.example.org:80") == 200


@pytest.mark.skipif(os.name != "posix", reason="the limit is POSIX'")
def test_more_connections_than_files_are_no_fault(tiny, tmp_path):
    """Idle connections make room for one that asks."""
    limit = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash"]
    with started(tiny, tmp_path, before=limit) as child:
        host, port = child.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(200)]
        assert get(f"{child.url}/health").status_code == 200
        for one in idle:
            one.close()
        assert get(f"{child.url}/health").status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.stderr.read().strip() == ""
        assert child.wait(PATIENCE) == 143


def test_an_open_server_without_a_key_says_so(tiny, tmp_path):
    for words, is_said in ((["--host", "0.0.0.0"], True), (["--api-key", "a"], False)):
        with started(tiny, tmp_path, *words) as child:
            child.send_signal(signal.SIGTERM)
            child.wait(PATIENCE)
            child.stderr.read()
            assert ("--api-key" in child.said) == is_said


def test_bodies_are_bounded_together(tiny):
    """They are held until they are whole; the memory for them has a limit."""
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4900\r\n\r\n"
    with serving(tiny("llama-gqa"), ServeOptions(max_request=5000)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(5)]
        for one in slow:
            one.sendall((head + "a" * 4800).encode())
        body = {"content": "a" * 4000}
        until(lambda: post(f"{url}/tokenize", json=body).status_code == 503)
        assert "too large at the moment" in post(f"{url}/tokenize", json=body).text
        assert get(f"{url}/health").status_code == 200
        for one in slow:
            one.close()
        until(lambda: post(f"{url}/tokenize", json=body).status_code == 200)


@pytest.mark.parametrize("origin", ["http://localhost", "http://127.0.0.1:3000", "http://[::1]:8"])
@pytest.mark.parametrize("other", ["http://localhost.evil.com", "http://notlocalhost", "https://x"])
def test_localhost_stands_for_all_origins_of_this_machine(local_url, origin, other):
    for asked, status in ((origin, 200), (other, 403)):
        reply = get(f"{local_url}/health", headers={"Origin": asked})
        assert reply.status_code == status
        allowed = asked if status == 200 else None
        assert reply.headers.get("Access-Control-Allow-Origin") == allowed


@pytest.fixture(scope="module")
def local_url(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(cors_origins=("localhost",))) as (url, _):
        yield url


def test_origins_may_have_commas_between_them():
    assert said("--cors-origins", "https://a, localhost").cors_origins == ("https://a", "localhost")
    assert said("--cors-origin", "https://a", "--cors-origin", "b").cors_origins[1] == "b"
