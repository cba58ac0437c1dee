"""Models of the transformers library with random weights and tiny sizes, in float64."""

import copy

import torch
import transformers

WORDS = 31
_BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {
    **_BLOCKS,
    "vocab_size": WORDS,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "bert": ("Bert", "ForSequenceClassification", _BERT),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {
            **_SPECIAL,
            "vocab_size": WORDS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 16,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        },
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
    "vit": (
        "ViT",
        "ForImageClassification",
        {
            **_BLOCKS,
            "intermediate_size": 32,
            "image_size": 8,
            "patch_size": 4,
            "hidden_dropout_prob": 0.0,
        },
    ),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            **_SPECIAL,
            "vocab_size": WORDS,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            "dropout": 0.0,
        },
    ),
}
# More models whose last layer has the weight of the embedding.
TIED_CONFIGS = {
    "bert_masked": ("Bert", "ForMaskedLM", _BERT),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {
            **_SPECIAL,
            "vocab_size": WORDS,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 16,
            "decoder_start_token_id": 2,
            "dropout": 0.0,
        },
    ),
    "opt": (
        "OPT",
        "ForCausalLM",
        {
            **_SPECIAL,
            **_BLOCKS,
            "vocab_size": WORDS,
            "word_embed_proj_dim": 16,
            "ffn_dim": 32,
            "max_position_embeddings": 16,
            "dropout": 0.0,
        },
    ),
}


def net_of(name, seed=0, **changes):
    """A model with the weights of this seed, in train mode."""
    family, task, sizes = {**CONFIGS, **TIED_CONFIGS}[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{family}{task}")(config).double().train()


def batch_of(name, rows=10, seed=1):
    """Inputs by name, labels among them; some words are padding, some labels are left out."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(4, WORDS, (rows, 12), generator=generator)
    classes = torch.randint(0, 2, (rows,), generator=generator)
    mask = torch.ones(rows, 12, dtype=torch.int64)
    for row in range(rows):
        mask[row, 12 - row % 4 :] = 0
    labels = words.masked_fill(mask == 0, -100)
    if name == "bert":
        return {"input_ids": words, "attention_mask": mask, "labels": classes}
    if name == "vit":
        pictures = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pictures, "labels": classes}
    if name == "whisper":
        sounds = torch.randn(rows, 8, 40, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "labels": labels}
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def by_hand(net, batch, updates, epochs=2):
    """A copy trained in a plain loop of AdamW, and its loss in each epoch.

    Args:
        updates: begin, end and micro-batch size of each.
    """
    net = copy.deepcopy(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    rows = len(batch["labels"])
    losses = []
    for _ in range(epochs):
        total = 0.0
        for begin, end, size in updates:
            optimizer.zero_grad()
            for first in range(begin, end, size):
                last = min(first + size, end)
                part = {key: value[first:last] for key, value in batch.items()}
                loss = net(**part).loss
                (loss * (last - first) / (end - begin)).backward()
                total += loss.item() * (last - first)
            optimizer.step()
        losses.append(total / rows)
    return net, losses
