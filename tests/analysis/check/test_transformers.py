"""Models of the transformers library, with random weights and tiny sizes, have no finding."""

import pytest
import torch

import ipufit

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 16}
TOKENS = {"input_ids": torch.arange(24).reshape(2, 12) % 29 + 1}
SPEECH = {"input_features": torch.randn(2, 8, 40)}
PICTURES = {"pixel_values": torch.randn(2, 3, 8, 8)}
ROWS = {"labels": torch.tensor([0, 1])}
NEXT = {"labels": TOKENS["input_ids"]}
MASK = {"attention_mask": torch.ones(2, 12, dtype=torch.long)}
T5 = {
    "vocab_size": 31,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "vocab_size": 31,
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
BART = {
    **{name: size for name, size in WHISPER.items() if not name.startswith("max_")},
    "max_position_embeddings": 16,
}
LLAMA = {**BERT, "num_key_value_heads": 2}
VIT = {**BERT, "image_size": 8, "patch_size": 4}

CASES = {
    "bert_for_classes": ("Bert", "ForSequenceClassification", BERT, {**TOKENS, **MASK, **ROWS}),
    "bert_for_masked_words": ("Bert", "ForMaskedLM", BERT, {**TOKENS, **MASK, **NEXT}),
    "roberta": ("Roberta", "ForSequenceClassification", BERT, {**TOKENS, **MASK, **ROWS}),
    "distilbert": (
        "DistilBert",
        "ForSequenceClassification",
        {"vocab_size": 31, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
        {**TOKENS, **ROWS},
    ),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        {**TOKENS, **NEXT},
    ),
    "llama": ("Llama", "ForCausalLM", LLAMA, {**TOKENS, **NEXT}),
    "t5": ("T5", "ForConditionalGeneration", T5, {**TOKENS, **NEXT}),
    "mistral": ("Mistral", "ForCausalLM", LLAMA, {**TOKENS, **NEXT}),
    "electra": ("Electra", "ForSequenceClassification", BERT, {**TOKENS, **ROWS}),
    "bart": ("Bart", "ForConditionalGeneration", BART, {**TOKENS, **NEXT}),
    "vit": ("ViT", "ForImageClassification", VIT, {**PICTURES, **ROWS}),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER, {**SPEECH, **NEXT}),
}


def made(name):
    family, task, sizes, batch = CASES[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}{task}")(config), batch


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_has_no_finding(name):
    """People bring these models; what they can't change must not be complained of."""
    net, batch = made(name)
    net.train()
    model = ipufit.Model(net)
    model.compile("adamw", None)
    report = model.check(batch)
    assert str(report) == f"{type(net).__name__}: nothing found."
