"""An endpoint of a tiny random model whose tokens are bytes, with a real HTTP server on a free port."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import openai
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.host_driver.hf.test_cache import llama, sharpen
from vcsd.config import ServingConfig
from vcsd.endpoint.app import EndpointConfig, ModelEndpoint
from vcsd.endpoint.run import http_server, listen
from vcsd.loading import CHECKPOINT
from vcsd.server import Server
from vcsd.serving import serve

NAME, VOCABULARY = "tiny", 256
LIMIT_S = 60.0
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def tiny_model() -> PreTrainedModel:
    """The model."""
    torch.manual_seed(0)
    with torch.inference_mode():
        return sharpen(llama(vocab_size=VOCABULARY))


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """Tokenizer of the bundled checkpoint: a token is a byte, and token 0 is special."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    tokenizer.chat_template = template
    return tokenizer


@dataclass
class Running:
    """An endpoint that runs."""

    server: Server
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of an OpenAI client."""
        return {"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "key", "max_retries": 0, "timeout": LIMIT_S}

    def request(self, method: str, path: str, body: Any = None, key: str = "key") -> tuple[int, Any]:
        """Status and body of a plain HTTP request. `body`: bytes, or values for JSON."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)) as line:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            line.request(method, path, sent, {"Authorization": f"Bearer {key}"})
            answer = line.getresponse()
            text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def holds_nothing(self) -> bool:
        """Whether no request and no KV data is left."""
        kv = self.server.kv
        return not (self.server.handles or self.server._incoming or kv.requests() or kv.runner.table.used.total())

    def wait_until_idle(self) -> None:
        """Wait until no request is left."""
        ends = time.monotonic() + LIMIT_S
        while not self.holds_nothing():
            assert time.monotonic() < ends, "requests are left"
            time.sleep(0.01)


@contextmanager
def running(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    serving: ServingConfig = ServingConfig(),
    **config: Any,
) -> Iterator[Running]:
    """Run an endpoint until the block ends."""
    with closing(listen("127.0.0.1", 0)) as listening, serve(model, serving) as server:
        setting = EndpointConfig(**{"name": NAME, "api_key": "key"} | config)
        http = http_server(ModelEndpoint(server, tokenizer, setting))
        thread = Thread(target=http.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Running(server, listening.getsockname()[1])
        finally:
            http.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextmanager
def client_of(endpoint: Running) -> Iterator[openai.OpenAI]:
    """An OpenAI client of an endpoint."""
    with openai.OpenAI(**endpoint.options) as client:
        yield client
