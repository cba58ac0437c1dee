"""Models of the transformers library: text, speech, pictures."""

import torch

from tests.models.model import ITSELF, Model

TITLE, PACKAGES = "transformers", ("transformers",)
SMALL = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 48, "pad_token_id": 0},
}
EXPERTS = {"way": ITSELF, "why": "experts are selected by values"}
DROPPED = {"way": ITSELF, "why": "layer drop branches at random"}
SPOKEN = {"way": ITSELF, "why": "it compares labels with the vocabulary, and NumPy draws the masks"}


def words(labels="words", count=3, names=("input_ids",), length=12):
    """Batches of words, with masks of padding."""
    generator, batches = torch.Generator().manual_seed(3), []
    for _ in range(count):
        batch = {}
        for name in names:
            batch[name] = torch.randint(3, 60, (4, length), generator=generator)
        batch["attention_mask"] = torch.ones(4, length, dtype=torch.long)
        batch["attention_mask"][0, length // 2 :] = 0
        if labels == "words":
            batch["labels"] = torch.randint(3, 60, (4, length), generator=generator)
        else:
            batch["labels"] = torch.randint(0, 2, (4,), generator=generator)
        batches.append(batch)
    return batches


def model(config, kind, batches=words, how=None, **settings):
    """A model of a class of the library."""

    def make():
        import transformers

        made = getattr(transformers, config)(**{"use_cache": False, **settings})
        # The other ways of computing experts are for bfloat16.
        made._experts_implementation = "eager"
        return getattr(transformers, kind)(made)

    return Model(kind, make, batches, **(how or {}))


def text(kind, labels="words", how=None, **settings):
    """A model of texts with settings that many share."""
    family = kind.partition("For")[0].replace("LMHeadModel", "")
    batches = (lambda: words(labels)) if labels != "words" else words
    return model(f"{family}Config", kind, batches, how, **{**SMALL, **settings})


def sounds():
    """Batches of sound waves, with letters of several lengths."""
    generator, batches = torch.Generator().manual_seed(4), []
    for _ in range(2):
        values = torch.randn(2, 2000, generator=generator)
        labels = torch.randint(1, 20, (2, 3), generator=generator)
        batches.append({"input_values": values, "labels": labels})
    return batches


def spectra():
    """Batches of spectra for a model that writes words."""
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "input_features": torch.randn(2, 8, 40, generator=generator),
            "labels": torch.randint(3, 60, (2, 6), generator=generator),
        }
        for _ in range(2)
    ]


def pictures():
    """Batches of pictures with classes."""
    generator = torch.Generator().manual_seed(6)
    return [
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 2, (2,), generator=generator),
        }
        for _ in range(3)
    ]


SPEECH = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 24},
    **{"intermediate_size": 48, "conv_dim": (16, 16, 16), "conv_stride": (5, 4, 2)},
    **{"conv_kernel": (10, 8, 4), "num_conv_pos_embeddings": 16, "pad_token_id": 0},
    **{"num_conv_pos_embedding_groups": 4, "layerdrop": 0.3, "mask_time_length": 4},
    "num_feat_extract_layers": 3,
}
WHISPER = {
    **{"vocab_size": 60, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_layers": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 20},
    **{"max_target_positions": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "dropout": 0.1},
}
SEQUENCES = {
    **{"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48},
    **{"decoder_ffn_dim": 48, "max_position_embeddings": 48, "pad_token_id": 0},
    **{"eos_token_id": 2, "decoder_start_token_id": 2, "bos_token_id": 1},
}
T5 = {
    **{"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2},
    **{"decoder_start_token_id": 0, "pad_token_id": 0},
}
VISION = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8},
}

MODELS = (
    text("BertForMaskedLM"),
    text("BertForSequenceClassification", "classes"),
    text("RobertaForMaskedLM"),
    text("AlbertForMaskedLM", embedding_size=16),
    text("ElectraForMaskedLM", embedding_size=16),
    model(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        **{"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    ),
    text("DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    text("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    text("MPNetForMaskedLM"),
    model(
        "GPT2Config",
        "GPT2LMHeadModel",
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=60,
        n_positions=48,
    ),
    text("OPTForCausalLM", how=DROPPED, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.3),
    text("GPTNeoXForCausalLM"),
    text("LlamaForCausalLM", num_key_value_heads=1),
    text("MistralForCausalLM", num_key_value_heads=1, sliding_window=4),
    text("Qwen2ForCausalLM", num_key_value_heads=1),
    text("GemmaForCausalLM", num_key_value_heads=1, head_dim=16),
    text("MixtralForCausalLM", how=EXPERTS, num_key_value_heads=1, num_local_experts=4),
    text(
        "Qwen2MoeForCausalLM",
        how=EXPERTS,
        **{"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    model("T5Config", "T5ForConditionalGeneration", **T5),
    model(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        how={**EXPERTS, "dtype": torch.float32, "within": 1e-6},
        **{**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2},
        num_sparse_decoder_layers=1,
    ),
    model(
        "BartConfig",
        "BartForConditionalGeneration",
        how=DROPPED,
        encoder_layerdrop=0.3,
        **SEQUENCES,
    ),
    model("MarianConfig", "MarianMTModel", **SEQUENCES),
    model("Wav2Vec2Config", "Wav2Vec2ForCTC", sounds, SPOKEN, **SPEECH),
    model("HubertConfig", "HubertForCTC", sounds, SPOKEN, **SPEECH),
    model("WavLMConfig", "WavLMForCTC", sounds, SPOKEN, **SPEECH),
    model("WhisperConfig", "WhisperForConditionalGeneration", spectra, **WHISPER),
    model("ViTConfig", "ViTForImageClassification", pictures, **VISION),
    model("BeitConfig", "BeitForImageClassification", pictures, **VISION),
    model(
        "SwinConfig",
        "SwinForImageClassification",
        pictures,
        **{"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2]},
        **{"num_heads": [2, 2], "window_size": 4},
    ),
)
