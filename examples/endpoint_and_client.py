"""An OpenAI-compatible endpoint of the bundled model with its KV cache in two drives, and a client of it.

`python examples/endpoint_and_client.py` needs the extra `endpoint` and the package openai.
"""

from threading import Thread

import openai

import vcsd
from vcsd.endpoint.app import EndpointConfig, ModelEndpoint
from vcsd.endpoint.run import http_server, listen, url_of
from vcsd.loading import CHECKPOINT, load


def main() -> str:
    """Print an answer as it is generated, and return it."""
    model, tokenizer = load(CHECKPOINT)
    with vcsd.serve(model, policy="in-storage", drives=2) as server, listen("127.0.0.1", 0) as listening:
        http = http_server(ModelEndpoint(server, tokenizer, EndpointConfig(name="bundled")))
        thread = Thread(target=http.run, kwargs={"sockets": [listening]})
        thread.start()
        answer = ""
        with openai.OpenAI(base_url=url_of(listening), api_key="none") as client:
            request = {"model": "bundled", "prompt": "The drive ", "max_tokens": 12, "temperature": 0}
            for chunk in client.completions.create(**request, stream=True):
                print(chunk.choices[0].text, end="", flush=True)
                answer += chunk.choices[0].text
        http.should_exit = True
        thread.join()
    print()
    return answer


if __name__ == "__main__":
    main()
