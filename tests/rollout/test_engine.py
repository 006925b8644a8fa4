"""Tests of the engine's client and of the check of its weights, without vLLM: tests/engine has the real one."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from offcorr.rollout import Engine, EngineError, Sampling, VLLMServer, save_for_engine, score
from offcorr.rollout.engine import parse_urls
from offcorr.rollout.served import ServedWeights
from offcorr.training import Replica
from tests.rollout.rollout_models import fresh_model

ARGUMENTS = {"max_new_tokens": 4, "eos_token_ids": [1], "sampling": Sampling()}


class Server:
    """An HTTP server that answers as it is told: {path: answer, or a list of answers, or a function of the body}."""

    def __init__(self, answers):
        self.answers, self.asked, outer = answers, [], self
        answers.setdefault("/v1/models", {"data": [{"id": "policy", "max_model_len": 64}]})

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                outer.asked.append((self.path, body))
                answer = outer.answers.get(self.path.partition("?")[0], 404)
                answer = answer.pop(0) if isinstance(answer, list) else answer
                answer = answer(body) if callable(answer) else answer
                code, said = (answer, {"error": "so it is"}) if isinstance(answer, int) else (200, answer)
                with contextlib.suppress(ConnectionError):  # a client that did not wait
                    self.send_response(code)
                    self.end_headers()
                    self.wfile.write(json.dumps(said).encode())

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve():
    servers = []

    def start(**answers):
        servers.append(Server({"/" + path: answer for path, answer in answers.items()}))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def completions(body):
    """As many completions as were asked for, of tokens that say which they are."""
    choices = [
        {"index": i, "token_ids": [body["prompt"][0], i], "logprobs": {"token_logprobs": [-1.0, -0.5]}}
        for i in reversed(range(body["n"]))
    ]
    return {"choices": choices}


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_one():
    with pytest.raises(
        EngineError, match=r"(?s)http://127.0.0.1:9/v1/models for 0.2 seconds.*VLLM_SERVER_DEV_MODE=1 vllm serve"
    ):
        Engine("127.0.0.1:9", patience=0.2).longest()


def test_a_failing_server_is_tried_again_and_a_refusing_one_is_not(serve):
    server = serve(reset_prefix_cache=[503, 500, {}], collective_rpc=lambda body: {}, pause=400)
    engine = Engine(server.url)
    engine._call(server.url, "/reset_prefix_cache", {})
    assert [path for path, _ in server.asked] == ["/reset_prefix_cache"] * 3
    with pytest.raises(EngineError, match=r"refused /pause\?mode=wait with status 400: .*so it is"):
        engine.replace_weights("folder", 1)
    assert len(server.asked) == 4


def test_a_server_that_does_not_answer_in_time_is_named(serve):
    released = threading.Event()
    server = serve(weight_info=lambda body: released.wait(5) and {})
    with pytest.raises(EngineError, match=r"weight_info did not answer within timeout=0.2 seconds"):
        Engine(server.url, timeout=0.2).check_version(0)
    released.set()


def test_a_server_outside_development_mode_is_told_from_one_that_is_missing(serve):
    with pytest.raises(EngineError, match=r"(?s)has no /collective_rpc: .*VLLM_SERVER_DEV_MODE=1"):
        Engine(serve().url).replace_weights("folder", 1)


def test_a_cache_that_stays_is_an_error_and_the_server_goes_on(serve):
    server = serve(pause={}, resume={}, collective_rpc={}, reset_prefix_cache={"success": False})
    with pytest.raises(EngineError, match="did not drop its cached prefixes"):
        Engine(server.url).replace_weights("folder", 1)
    assert [path for path, _ in server.asked][-1] == "/resume"


def test_equal_neighbours_are_one_request_and_servers_share_the_prompts(serve):
    servers = [serve(**{"v1/completions": completions}) for _ in range(2)]
    servers[0].answers["/v1/completions"] = servers[1].answers["/v1/completions"] = completions
    engine = Engine([server.url for server in servers])
    decoded = engine.sample([[5], [5], [5], [6], [7], [7]], seeds=range(10, 16), **ARGUMENTS)
    assert decoded.completion_ids == [[5, 0], [5, 1], [5, 2], [6, 0], [7, 0], [7, 1]]
    assert decoded.logp == [[-1.0, -0.5]] * 6
    asked = {body["prompt"][0]: body for server in servers for path, body in server.asked if "completions" in path}
    assert {token: (body["n"], body["seed"]) for token, body in asked.items()} == {5: (3, 10), 6: (1, 13), 7: (2, 14)}
    assert [sum("completions" in path for path, _ in server.asked) for server in servers] == [2, 1]


def test_a_completion_without_a_log_prob_for_each_token_is_refused(serve):
    short = {"choices": [{"index": 0, "token_ids": [3, 4], "logprobs": {"token_logprobs": [-1.0]}}]}
    with pytest.raises(EngineError, match="1 log-probs for 2 tokens"):
        Engine(serve(**{"v1/completions": short}).url).sample([[5]], seeds=[0], **ARGUMENTS)


def test_the_version_is_that_of_this_run_or_an_error(serve):
    server = serve(weight_info={"weight_version": "default"})
    engine = Engine(server.url, run="mine")
    assert not engine.check_version(3)  # restarted
    server.answers["/weight_info"] = {"weight_version": "mine:3"}
    assert engine.check_version(3)
    for found in ("mine:2", "another:3"):
        server.answers["/weight_info"] = {"weight_version": found}
        with pytest.raises(EngineError, match=rf"replaced by somebody else: it has '{found}', expected 'mine:3'"):
            engine.check_version(3)
    del server.answers["/weight_info"]
    assert engine.check_version(3)  # an older vLLM, which cannot say


@pytest.mark.parametrize(
    ("mode", "sampling", "refused"),
    [
        ("processed_logprobs", Sampling(0.7), False),
        ("raw_logprobs", Sampling(), False),
        ("raw_logprobs", Sampling(0.7), True),
        ("raw_logits", Sampling(), True),
    ],
)
def test_log_probs_of_another_distribution_are_refused(serve, mode, sampling, refused):
    engine = Engine(serve(server_info={"vllm_config": {"model_config": {"logprobs_mode": mode}}}).url)
    if refused:
        with pytest.raises(EngineError, match=rf"--logprobs-mode {mode}.*processed_logprobs"):
            engine.check(sampling)
    else:
        engine.check(sampling)


@pytest.mark.parametrize("urls", ["", "localhost", "ftp://localhost:8", "http://:", [], "vllm://a:1,b"])
def test_urls_that_are_none_are_refused(urls):
    with pytest.raises(ValueError, match=r"^urls is"):
        parse_urls(urls)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sync_every", 0), ("sync_every", 1.5), ("tolerance", 0.0), ("seed", -1), ("top_p", 0.0), ("timeout", 0)],
)
def test_a_mistaken_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}"):
        VLLMServer(url="127.0.0.1:8000", **{field: value})


# -- weights


def test_another_address_or_wait_is_no_other_sampler():
    """A run that goes on from a checkpoint with a server elsewhere is not said to have another sampler."""
    first = VLLMServer(url="127.0.0.1:8000", sync_every=4)
    moved = VLLMServer(url="127.0.0.1:8001", sync_every=4, timeout=60.0, patience=1.0, folder="weights", tolerance=0.2)
    assert repr(first) == repr(moved)
    assert repr(first) != repr(VLLMServer(url="127.0.0.1:8000", sync_every=8))


class Answering(Engine):
    """An engine whose log-probs are those of a model that is here, ``model``."""

    model = None

    def score(self, sequences):
        rows = score(self.model, [s[:1] for s in sequences], [s[1:] for s in sequences])
        noise = torch.Generator().manual_seed(0)
        return [[[x + 2e-3 * torch.randn((), generator=noise).item() for x in row] for row in rows]]

    def longest(self):
        return 64


def changed(model, by=0.02):
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for weight in new.parameters():
        weight.data += by * torch.randn(weight.shape, generator=generator)
    return new


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", ["nothing", "all weights", "the output head"])
def test_weights_that_stayed_old_are_found_and_named(tmp_path, tied, kept):
    old = fresh_model(tie_word_embeddings=tied)
    new = changed(old)
    replica = Replica(new, "cpu")
    served = ServedWeights(Answering("127.0.0.1:9"), replica, tmp_path / "weights", 0.1, Sampling())
    prompts = [[3 + i % 9, 4 + i % 7, 5, 6, 7 + i % 3] for i in range(16)]
    served.remember(prompts, [[8, 9, 2 + i % 12, 3, 4, 5 + i % 5, 1] for i in range(16)])
    served._version, served._weights = 3, dict(old.named_parameters())
    served._heads = {3: old.lm_head.weight.detach().clone()}
    engine = copy.deepcopy({"nothing": new, "all weights": old, "the output head": new}[kept])
    if kept == "the output head":
        engine.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach().clone())
    served.engine.model = engine.eval()
    if kept == "nothing":
        served._check(4, dict(new.named_parameters()))
    else:
        with pytest.raises(EngineError, match=f"weights of version 4, but its log-probs are those with {kept} of ver"):
            served._check(4, dict(new.named_parameters()))


def test_a_head_that_stayed_as_it_was_at_the_start_is_found_later(tmp_path):
    """Each update changes less than the engine's rounding, so that it shows only after several."""
    model = fresh_model(tie_word_embeddings=False)
    served = ServedWeights(Answering("127.0.0.1:9"), Replica(model, "cpu"), tmp_path, 0.1, Sampling())
    served.remember([[3 + i % 9, 4, 5] for i in range(16)], [[8, 9, 2 + i % 12, 3, 4, 5 + i % 5] for i in range(16)])
    served.engine.replace_weights = lambda folder, version: None
    served.engine.check = lambda sampling: None
    served.engine.check_version = lambda version: True
    at_start = model.lm_head.weight.detach().clone()
    with pytest.raises(EngineError, match="those with the output head of version 0"):
        for version in range(40):
            served.engine.model = copy.deepcopy(model).eval()
            served.engine.model.lm_head.weight = torch.nn.Parameter(at_start)
            served.ensure(version, {n: w.detach().clone() for n, w in model.named_parameters()}, [])
            model = changed(model, by=5e-5)
    assert 3 < version < 39


def test_an_update_that_the_engine_rounds_away_is_no_alarm(tmp_path):
    """As with a bf16 engine and one small update: it is as near to the old weights as to the new."""
    old = fresh_model()
    new = changed(old, by=5e-5)
    served = ServedWeights(Answering("127.0.0.1:9"), Replica(new, "cpu"), tmp_path, 0.1, Sampling())
    served.remember([[3 + i % 9, 4, 5] for i in range(16)], [[8, 9, 2 + i % 12, 3, 4, 5 + i % 5] for i in range(16)])
    served._version, served._weights = 3, dict(old.named_parameters())
    served._heads = {3: old.lm_head.weight.detach().clone()}
    for share in (0.0, 0.5, 1.0):
        served.engine.model = copy.deepcopy(old).eval()
        for weight, target in zip(served.engine.model.parameters(), new.parameters(), strict=True):
            weight.data += share * (target.data - weight.data)
        served._check(4, dict(new.named_parameters()))


def test_another_model_is_found(tmp_path):
    model = fresh_model()
    served = ServedWeights(Answering("127.0.0.1:9"), Replica(model, "cpu"), tmp_path, 0.1, Sampling())
    served.remember([[3, 4]], [[5, 6, 7]])
    served.engine.model = fresh_model(seed=1).eval()
    with pytest.raises(EngineError, match=r"differ from the trainer's by .* more than tolerance=0.1"):
        served._check(0, dict(model.named_parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_the_checkpoint_for_an_engine_has_a_head_of_its_own(tmp_path, tied):
    model = fresh_model(tie_word_embeddings=tied).eval()
    save_for_engine(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_lora_adapters_are_merged_into_the_checkpoint(tmp_path):
    model = fresh_model()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    save_for_engine(adapted, tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="only plain LoRA"):
        save_for_engine(get_peft_model(fresh_model(), LoraConfig(r=4, use_dora=True)), tmp_path)
