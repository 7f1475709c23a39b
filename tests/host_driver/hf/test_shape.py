"""Shapes read from models, and the reasons for which unsupported ones are refused at once."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MllamaForCausalLM,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import vcsd
from host_driver.hf.shape import placement
from vcsd import UnsupportedModelError

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}
BART = {"vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}


def bart():
    return BartForCausalLM(BartConfig(**BART, decoder_attention_heads=2, decoder_ffn_dim=64))


def gemma3n():
    sizes = GEMMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4}
    with torch.device("meta"):  # it is refused before a weight is looked at
        return Gemma3nForCausalLM(Gemma3nTextConfig(**sizes, vocab_size_per_layer_input=97))


def mllama():
    sizes = SMALL | {"num_hidden_layers": 3, "cross_attention_layers": [1], "intermediate_size": 64}
    return MllamaForCausalLM(MllamaTextConfig(**sizes, num_key_value_heads=2, pad_token_id=0))


def test_shape_is_that_of_the_decoder():
    model = bart().eval()
    shape = placement(model).shape
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (3, 2, 2, 32)
    with torch.inference_mode(), vcsd.attach(model):
        model(torch.arange(3, 40)[None])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(**GPT2, add_cross_attention=True)), "cross-attention"),
        (lambda: BertLMHeadModel(BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)), "cross-attention"),
        (mllama, "cross-attention"),
        (gemma3n, "num_kv_shared_layers"),
    ],
)
def test_unsupported_models_are_refused_at_attach(make, reason):
    with pytest.raises(UnsupportedModelError, match=reason), vcsd.attach(make()):
        pass


def test_states_of_an_encoder_are_refused():
    model = bart().eval()
    with (
        torch.inference_mode(),
        vcsd.attach(model),
        pytest.raises(UnsupportedModelError, match="encoder_hidden_states"),
    ):
        model(torch.arange(3, 40)[None], encoder_hidden_states=torch.zeros(1, 5, 64))
