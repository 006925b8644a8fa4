"""``Engine``: a running vLLM server, or several with the same weights, spoken to over HTTP by token ids."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Any

from offcorr.rollout.decode import Decoded, Sampling, limits_of

START = """\
  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --port {port}
or, with vLLM's build for CPUs:
  VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \\
      --logprobs-mode processed_logprobs --enforce-eager --port {port}"""
"""Commands that start a server which can do everything this library asks of it."""

UNMARKED = "default"
"""The weight version of a server that nobody has named one for, such as one that was just started."""


class EngineError(RuntimeError):
    """An engine that does not answer, or answers what cannot be used; the message says what to do."""


@dataclass
class Engine:
    """A client of vLLM's server that samples, scores and replaces weights.

    Args:
        urls: "http://127.0.0.1:8000", or several, comma-separated or in a list: data-parallel servers that share the
            prompts among them and always get the same weights.
        timeout: seconds for one request.
        patience: seconds during which a request is tried again where the server cannot be reached, or answers with a
            status of 500 or above.
        in_flight: requests at a time to one server.
        run: name of the run, which marks the weights that it loads; the same on every rank.

    The server must run with ``VLLM_SERVER_DEV_MODE=1``, which opens ``/collective_rpc``, and
    ``--logprobs-mode processed_logprobs``, so that its log-probs are those of the distribution that it sampled from.

    >>> Engine("127.0.0.1:8000,127.0.0.1:8001").urls
    ['http://127.0.0.1:8000', 'http://127.0.0.1:8001']

    Raises:
        ValueError: a url that is not one.
        EngineError: from every method, where a server does not answer or refuses.
    """

    urls: Any
    _: KW_ONLY
    timeout: float = 600.0
    patience: float = 10.0
    in_flight: int = 32
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12], repr=False)
    _models: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.urls = parse_urls(self.urls)
        for name in ("timeout", "patience", "in_flight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a number above 0")

    # Sampling and scoring

    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Decoded:
        """One completion for each prompt, with the log-prob (nats) of each token as the engine sampled it.

        Neighbours with the same prompt are one request for several completions.

        Args:
            max_new_tokens: of every completion, or one number for each prompt.
            seeds: one for each prompt; of neighbours with the same prompt the first is taken.
        """
        requests = []
        limits = limits_of(max_new_tokens, len(prompt_ids))
        for _, group in groupby(range(len(prompt_ids)), key=lambda i: (tuple(prompt_ids[i]), limits[i])):
            rows = list(group)
            requests.append(
                {
                    "prompt": list(prompt_ids[rows[0]]),
                    "n": len(rows),
                    "seed": int(seeds[rows[0]]) % 2**63,
                    "max_tokens": limits[rows[0]],
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k or -1,
                    "stop_token_ids": list(eos_token_ids),
                    "logprobs": 0,
                }
            )
        answers = self._spread(self._complete, requests)
        choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda c: c["index"])]
        tokens = [choice["token_ids"] for choice in choices]
        logp = [choice["logprobs"]["token_logprobs"] for choice in choices]
        for ids, row in zip(tokens, logp, strict=True):
            if not ids or len(ids) != len(row):
                raise EngineError(f"the engine returned {len(row)} log-probs for {len(ids)} tokens of a completion")
        return Decoded(tokens, logp)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """[servers][sequences][tokens - 1]: log-probs (nats) of given tokens, at temperature 1, by every server."""
        requests = [{"prompt": list(s), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0} for s in sequences]
        answers = [self._spread(self._complete, requests, [url]) for url in self.urls]
        return [
            [
                [place[str(token)]["logprob"] for token, place in zip(ids[1:], row[1:], strict=True)]
                for ids, row in zip(sequences, (a["choices"][0]["prompt_logprobs"] for a in of_one), strict=True)
            ]
            for of_one in answers
        ]

    def _complete(self, url: str, request: dict[str, Any]) -> Any:
        return self._call(url, "/v1/completions", request | {"model": self.model(url)["id"], "return_token_ids": True})

    def model(self, url: str) -> dict[str, Any]:
        """The server's answer on its model: ``id``, ``root`` (its folder), ``max_model_len``."""
        if url not in self._models:
            self._models[url] = self._call(url, "/v1/models")["data"][0]
        return self._models[url]

    def version(self) -> str:
        """The version of vLLM that the (first) server runs."""
        return self._call(self.urls[0], "/version")["version"]

    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and completion, that every server takes."""
        return min(self.model(url)["max_model_len"] for url in self.urls)

    def check(self, sampling: Sampling) -> None:
        """Raise ``EngineError`` where a server would report log-probs of another distribution than it samples from."""
        for url in self.urls:
            info = self._call(url, "/server_info?config_format=json", lacking_is_none=True)
            mode = ((info or {}).get("vllm_config") or {}).get("model_config", {}).get("logprobs_mode")
            if mode is not None and mode != "processed_logprobs" and (mode != "raw_logprobs" or sampling != Sampling()):
                raise EngineError(
                    f"the vLLM server at {url} runs with --logprobs-mode {mode}, and sampling with {sampling} needs "
                    "processed_logprobs: its log-probs would be those of another distribution than it samples from"
                )

    # Weights

    def replace_weights(self, folder: str, version: int) -> None:
        """Every server loads the checkpoint in ``folder``, drops its cached prefixes, and is marked with ``version``.

        A server first finishes what it has begun, so that no sequence is sampled by two versions.
        """

        for url in self.urls:
            self._call(url, "/pause?mode=wait", {}, lacking_is_none=True)
            try:
                self._call(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
                # A reload leaves the keys and values of the old weights in the prefix cache.
                answer = self._call(url, "/reset_prefix_cache", {})
                if not (answer or {}).get("success", True):
                    raise EngineError(f"the vLLM server at {url} did not drop its cached prefixes, of older weights")
                mark = {"new_version": self._mark(version)}
                self._call(url, "/update_weight_version", mark, lacking_is_none=True)
            except EngineError:
                with contextlib.suppress(EngineError):
                    self._call(url, "/resume", {}, lacking_is_none=True)
                raise
            self._call(url, "/resume", {}, lacking_is_none=True)

    def check_version(self, version: int) -> bool:
        """Whether every server holds the weights that were last loaded as ``version``; False where one was restarted.

        Servers from before vLLM had ``/weight_info`` cannot say, and count as holding them.

        Raises:
            EngineError: somebody else replaced a server's weights.
        """
        for url in self.urls:
            info = self._call(url, "/weight_info", lacking_is_none=True)
            found = None if info is None else info["weight_version"]
            if found == UNMARKED:
                return False
            if found not in (None, self._mark(version)):
                raise EngineError(
                    f"the weights of the vLLM server at {url} were replaced by somebody else: it has {found!r}, "
                    f"expected {self._mark(version)!r} (run:version). Which weights sampled is not known; a server "
                    "serves one run at a time"
                )
        return True

    def _mark(self, version: int) -> str:
        return f"{self.run}:{version}"

    # Requests

    def _spread(self, call: Callable[[str, Any], Any], items: Sequence[Any], urls: Sequence[str] | None = None) -> list:
        """The results of ``call(url, item)``, in order; the items are dealt out to the servers."""
        urls = self.urls if urls is None else urls
        with ThreadPoolExecutor(self.in_flight * len(urls)) as pool:
            futures = [pool.submit(call, urls[i % len(urls)], item) for i, item in enumerate(items)]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _call(self, url: str, path: str, body: Any = None, lacking_is_none: bool = False) -> Any:
        """The JSON answer to a GET, or to a POST of ``body``; None for a path that the server does not have."""
        data = None if body is None else json.dumps(body).encode()
        began, pause = time.monotonic(), 0.1
        while True:
            request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
            try:
                with _OPENER.open(request, timeout=self.timeout) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")[:500]
                if error.code == 404 and lacking_is_none:
                    return None
                if error.code < 500:
                    raise EngineError(self._refused(url, path, error.code, said)) from None
                reason: Any = f"{error.code} {said}"
            except TimeoutError:
                raise EngineError(f"{url}{path} did not answer within timeout={self.timeout:g} seconds") from None
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    raise EngineError(f"{url}{path} did not answer within timeout={self.timeout:g} seconds") from None
            if time.monotonic() - began + pause > self.patience:
                raise EngineError(
                    f"no answer from a vLLM server at {url}{path.partition('?')[0]} for {self.patience:g} seconds "
                    f"({reason}). Start one, and wait until it answers:\n{START.format(port=url.rpartition(':')[2])}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _refused(self, url: str, path: str, code: int, said: str) -> str:
        if code == 404 and not path.startswith("/v1/"):
            port = url.rpartition(":")[2]
            return (
                f"the vLLM server at {url} has no {path}: it must be started in development mode:\n"
                f"{START.format(port=port)}"
            )
        return f"the vLLM server at {url} refused {path} with status {code}: {said}"


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Engines are reached directly; a proxy for the world outside would not know them."""


def parse_urls(urls: Any) -> list[str]:
    """["http://host:port", ...] of one url or several, also written ``host:port`` or ``vllm://host:port``.

    >>> parse_urls("vllm://127.0.0.1:8000")
    ['http://127.0.0.1:8000']
    """
    parts = urls.split(",") if isinstance(urls, str) else list(urls)
    found = []
    for part in map(str.strip, parts):
        scheme, _, rest = part.partition("://") if "://" in part else ("http", "", part)
        scheme, rest = {"vllm": "http"}.get(scheme, scheme), rest.rstrip("/")
        if scheme not in ("http", "https") or not rest or not rest.rpartition(":")[2].isdigit():
            raise ValueError(f"urls is {urls!r}, expected http://host:port of a vLLM server, or several")
        found.append(f"{scheme}://{rest}")
    if not found:
        raise ValueError("urls is empty, expected http://host:port of a vLLM server")
    return found
