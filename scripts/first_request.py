"""Waits until a server is ready, sends it one chat request and prints the answer.

Called by `./run` beside the server that it has just started; standard library only, so that it starts at
once. It ends quietly when the server's process ends first: the server has then said why.

    python scripts/first_request.py --url http://127.0.0.1:8000 --server-pid 4711
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

PROMPT = "ROMEO:"
MAX_TOKENS = 96
POLL_S = 0.2


def opener(certfile: str) -> urllib.request.OpenerDirector:
    """Return what opens URLs of the server, which is on this host: no proxy of the environment knows it.

    Args:
        certfile: the server's own certificate, which is trusted whatever name it has; empty for plain HTTP.
    """
    context = ssl.create_default_context(cafile=certfile or None)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )


def server_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_ready(direct: urllib.request.OpenerDirector, url: str) -> bool:
    try:
        with direct.open(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wait_until_ready(direct: urllib.request.OpenerDirector, url: str, pid: int, timeout_s: float) -> bool:
    """False if the server ended first; TimeoutError if it lives but is not ready in time."""
    deadline = time.monotonic() + timeout_s
    while server_lives(pid):
        if is_ready(direct, url):
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}/health did not say ready within {timeout_s:g} s")
        time.sleep(POLL_S)
    return False


def chat_events(
    direct: urllib.request.OpenerDirector, url: str, model: str, api_key: str
) -> Iterator[dict[str, Any]]:
    """The events of one streamed answer, each a chunk of the chat completion."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with direct.open(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])


def print_answer(direct: urllib.request.OpenerDirector, url: str, model: str, api_key: str) -> None:
    began = time.monotonic()
    first, tokens, text = 0.0, 0, ""
    for event in chat_events(direct, url, model, api_key):
        if "error" in event:
            raise ValueError(event["error"]["message"])
        for choice in event.get("choices", []):
            text += choice["delta"].get("content") or ""
            first = first or (time.monotonic() - began if text else 0.0)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    rate = (tokens - 1) / max(time.monotonic() - began - first, 1e-9)
    print(f"> {PROMPT}")
    print("\n".join(f"  {line}" for line in text.strip().splitlines()))
    print(f"  {tokens} tokens, first after {first * 1000:.0f} ms, then {rate:.0f} tokens/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--certfile", default="", help="of a server that speaks HTTPS")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the server")
    arguments = parser.parse_args()
    try:
        direct = opener(arguments.certfile)
        if not wait_until_ready(direct, arguments.url, arguments.server_pid, arguments.timeout):
            return 1
        print("[4/4] a first request; the server stays up until Ctrl-C")
        print_answer(direct, arguments.url, arguments.model, os.environ.get("PENSTOCK_API_KEY", ""))
    except (OSError, ValueError, KeyError) as error:
        print(f"run: the first request failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
