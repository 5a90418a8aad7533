"""Clients that send or read slowly, ask for too much, or leave, do not keep the server from answering others."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import numpy as np
import pytest

from megajax.inference.scheduling.waiting import Owner, WaitingLine
from megajax.inference.server import connections
from servers import FakeEngine, FakePrompts, serving, serving_fake, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.6)
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.1)


def connect(url, sent=b"", receive_buffer=None):
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, _, port = url.removeprefix("http://").partition(":")
    connection.settimeout(20)
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


def post(path, body, *more, length=None):
    """The bytes of a request."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    head.append(f"Content-Length: {len(content) if length is None else length}")
    return "\r\n".join([*head, "", ""]).encode() + content


def test_connections_that_send_slowly_are_ended(impatient):
    with serving_fake(api_keys=("key",)) as (_, url):
        key = "Authorization: Bearer key"
        bodies = [post("/v1/completions", {}, length=9), post("/v1/completions", {}, key, length=9)]
        for sent in [b"", b"GET /health HT", *bodies]:
            with connect(url, sent) as connection:
                begin = time.monotonic()
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(10_000):
                        pass
                assert time.monotonic() - begin < 3, sent
        assert httpx2.get(f"{url}/health").status_code == 503


def test_the_oldest_waiting_connection_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    with serving_fake() as (_, url), contextlib.ExitStack() as stack:
        opened = []
        for _ in range(8):
            opened.append(stack.enter_context(connect(url, b"GET ")))
            time.sleep(0.01)  # the clock of the event loop has milliseconds
        first, *others = opened
        assert httpx2.get(f"{url}/health").status_code == 503
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(100) == b""
        for other in others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(100)


class SmallBuffer(connections.Connection):
    """What is not read waits in the server soon, and not in the system."""

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


def test_a_client_that_does_not_read_locks_nobody_out(impatient, monkeypatch):
    """What has finished does not count, and the connection ends."""
    monkeypatch.setattr(connections, "Connection", SmallBuffer)
    with serving_fake(max_requests=16) as (fake, url):
        fake.warm.set()
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        body = {"prompt": ["a"] * 16, "max_tokens": 400, "stream": True, "return_token_ids": True}
        with connect(url, post("/v1/completions", body), receive_buffer=2048) as connection:
            wait_until(lambda: len(fake.running) == 16)
            assert httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 429
            fake.permissions.release(500)
            wait_until(lambda: not fake.running)
            wait_until(lambda: httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success)
            time.sleep(1)
            with contextlib.suppress(ConnectionResetError):
                received = b""
                while part := connection.recv(100_000):
                    received += part
                assert b"[DONE]" not in received


def test_samples_are_counted_before_they_are_accepted():
    with serving_fake(max_requests=4) as (fake, url), httpx2.Client(base_url=url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        with client.stream("POST", "/v1/completions", json={"prompt": ["a"] * 3, "stream": True}):
            assert client.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 429
            assert client.post("/v1/completions", json={"prompt": "a", "n": 5}).status_code == 400
            assert len(fake.running) == 3
    with serving_fake(max_requests=100) as (fake, url), httpx2.Client(base_url=url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        assert client.post("/v1/completions", json={"prompt": ["a"] * 51}).status_code == 400
        with client.stream("POST", "/v1/completions", json={"prompt": ["a"] * 50, "stream": True}):
            assert client.post("/v1/completions", json={"prompt": ["a"] * 26}).status_code == 429
            with client.stream("POST", "/v1/completions", json={"prompt": ["a"] * 25, "stream": True}) as others:
                assert others.is_success


def test_others_may_not_ask_by_a_name_of_theirs():
    with serving_fake() as (_, url):
        for host, status in [("localhost:9", 503), ("[::1]", 503), ("127.0.0.2", 503), ("evil.com", 400), ("", 400)]:
            assert httpx2.get(f"{url}/health", headers={"Host": host}).status_code == status, host
    with serving_fake(host="0.0.0.0") as (_, url):
        assert httpx2.get(f"{url}/health", headers={"Host": "my.machine"}).status_code == 503


def test_contradicting_lengths_end_the_connection():
    with serving_fake() as (_, url):
        smuggled = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sent = post("/v1/completions", {}, "Transfer-Encoding: chunked", length=5)[:-2] + b"0\r\n\r\n" + smuggled
        with connect(url, sent) as connection:
            received = b""
            while part := connection.recv(100_000):
                received += part
        assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1


class SlowPrompts(FakePrompts):
    """Needs a permission to encode a long text."""

    max_length = 1_000_000

    def __init__(self):
        self.may_encode = threading.Semaphore(0)
        self.num_encoding = 0

    def encode(self, text):
        if len(text) > 1000:
            self.num_encoding += 1
            self.may_encode.acquire()
        return super().encode(text)


def test_long_texts_wait_for_each_other_and_nobody_for_them():
    """They are encoded before the deadline or not at all, and do not keep the server from stopping."""
    slow = FakeEngine()
    slow.prompts = SlowPrompts()
    slow.warm.set()
    slow.permissions.release(1000)
    try:
        with serving(slow, request_timeout_seconds=2) as url, httpx2.Client(base_url=url, timeout=10) as client:
            wait_until(lambda: client.get("/health").is_success)
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(connect(url, post("/v1/completions", {"prompt": "a" * 100_000})))
                wait_until(lambda: slow.prompts.num_encoding)
                assert client.post("/v1/completions", json={"prompt": "a"}).is_success
            # all have left, and so has the one that begins when it is its turn
            waits = client.post("/v1/completions", json={"prompt": "b" * 100_000})
            assert waits.status_code == 503 and "request_timeout_seconds" in waits.text
            assert slow.prompts.num_encoding == 1
    finally:
        slow.prompts.may_encode.release(100)


class Waits:
    def __init__(self, name, *owner):
        self.name = name
        self.tokens = [1, 2]
        self.owner = Owner(*owner)


def test_who_waits_takes_turns():
    line = WaitingLine()
    line += [Waits(f"a{number}", "a", 1) for number in range(3)]
    line += [Waits(f"A{number}", "a", 2) for number in range(2)]
    line += [Waits("b0", "b", 3), Waits("b1", "b", 3)]
    assert (len(line), line.num_tokens) == (7, 14)
    order = []
    while line:
        first = line.first
        assert line.first is first  # until it is admitted
        line.admit(first)
        order.append(first.name)
        if len(order) == 2:  # it was preempted
            line.left(first)
            line.put_back(first)
    assert order == ["a0", "b0", "b0", "A0", "b1", "a1", "A1", "a2"]


def test_cancelling_takes_linear_time():
    line = WaitingLine()
    waiting = [Waits("", number % 7, number % 100) for number in range(100_000)]
    line += waiting
    begin = time.process_time()
    for waits in reversed(waiting):
        line.remove(waits)
    assert not line and not line.num_tokens and time.process_time() - begin < 2


@contextlib.contextmanager
def server_process(max_length, timeout_seconds):
    """-> (process, URL, file of its log)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(__file__).with_name("servers.py")
    command = [sys.executable, str(script), str(port), str(max_length), str(timeout_seconds)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_ready(url))
            yield process, url, log
        finally:
            process.kill()
            process.wait()


def is_ready(url):
    try:
        return httpx2.get(f"{url}/health").is_success
    except httpx2.TransportError:
        return False


def forged_chat():
    return {"messages": [{"role": "user", "content": "a"}] * 1600 + [{"role": "user", "content": "<|im_start|>"}]}


MANY = {"prompt": ["a"] * 1100, "max_tokens": 16, "logprobs": 20, "stream": True, "ignore_eos": True}
ATTACKS = {
    # name -> (request, seconds that the client stays, size of its receive buffer, how many at once)
    "forged": (lambda: post(CHAT, forged_chat()), 3, None, 6),
    "empty messages": (lambda: post(CHAT, {"messages": [{"role": "user", "content": ""}] * 700_000}), 5, None, 1),
    "does not read": (lambda: post("/v1/completions", MANY), 30, 2048, 3),
    "many samples": (lambda: post("/v1/completions", {"prompt": ["a"] * 2048, "n": 128}), 5, None, 2),
    "fitting samples": (lambda: post("/v1/completions", {"prompt": ["a"] * 16, "n": 128}), 0.5, None, 2),
    "stop texts": (lambda: post("/v1/completions", {"prompt": "a", "stop": ["b" * 9] * 300_000}), 5, None, 1),
    "half a header": (lambda: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", 30, None, 20),
    "half a body": (lambda: post("/v1/completions", {"prompt": "a"}, length=1000), 30, None, 20),
    "long generations": (
        lambda: post("/v1/completions", {"prompt": ["a"] * 50, "n": 4, "max_tokens": 3000, "ignore_eos": True}), 30,
        None, 4,
    ),
    "31 MB": (lambda: post("/v1/completions", {"prompt": "a" * 31_000_000}), 20, None, 2),
    "31 MB of tokens": (lambda: post("/v1/completions", {"prompt": [97] * 7_000_000}), 20, None, 1),
}  # fmt: skip


def attack(name, url):
    make, patience, receive_buffer, _ = ATTACKS[name]
    sent = make()
    is_silent = receive_buffer is not None or "half" in name
    while True:
        with contextlib.suppress(OSError), connect(url, receive_buffer=receive_buffer) as connection:
            connection.settimeout(patience)
            connection.sendall(sent)
            if is_silent:
                time.sleep(patience)
            else:
                connection.recv(100)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [*([name] for name in ATTACKS), list(ATTACKS)], ids=lambda names: "+".join(names)[:30]
)
def test_others_are_answered_during_attacks_and_a_stop_ends_in_time(names):
    """The attackers run in a process of their own, as many clients at a time as ATTACKS says (20 times for half
    requests), and share two cores with the server."""
    timeout_seconds = 10
    with server_process(32768, timeout_seconds) as (process, url, log):
        attackers = subprocess.Popen([sys.executable, __file__, url, *names], stdout=subprocess.DEVNULL)
        try:
            time.sleep(3)
            waits = []
            body = {"prompt": "Once upon a time", "max_tokens": 8}
            end = time.monotonic() + 30
            with httpx2.Client(base_url=url, timeout=30) as client:
                while time.monotonic() < end:
                    begin = time.monotonic()
                    answer = client.post("/v1/completions", json=body)
                    waits.append(time.monotonic() - begin)
                    assert answer.is_success, (answer.status_code, answer.text)
                    time.sleep(0.2)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            stop_seconds = time.monotonic() - begin
        finally:
            attackers.kill()
        log.seek(0)
        text = log.read()
    print(f"{names}: {len(waits)} answers, {np.median(waits):.2f} s median, {max(waits):.2f} s longest, "
          f"stopped after {stop_seconds:.1f} s with status {process.returncode}")  # fmt: skip
    assert max(waits) < 5, text
    assert stop_seconds < timeout_seconds + 15 and process.returncode == 0, text
    assert "serving tiny\\nforged" in text and "Traceback" not in text, text


if __name__ == "__main__":  # URL NAMES: the attackers
    url, *names = sys.argv[1:]
    for name in names:
        for _ in range(ATTACKS[name][3] * (20 if "half" in name else 1)):
            threading.Thread(target=attack, args=(name, url)).start()
