"""Each model that optimum-graphcore registers trains three updates over a pipeline, under pytest.

It runs in the folder that ``optimum_models.py`` has filled.
"""

import math

import numpy as np
import optimum.graphcore.models  # noqa: F401
import pytest
import torch
from optimum.graphcore import IPUConfig, IPUTrainer, IPUTrainingArguments
from optimum.graphcore.modeling_utils import _PRETRAINED_TO_PIPELINED_REGISTRY

# The others return no loss.
MODELS = [
    kind
    for kind in _PRETRAINED_TO_PIPELINED_REGISTRY
    if kind.__name__ not in ("BertModel", "T5EncoderModel", "MPNetModel")
]
FOLDER = {
    "Bart": "facebook/bart-base",
    "Bert": "bert-base-uncased",
    "ConvNext": "facebook/convnext-base-224",
    "Deberta": "microsoft/deberta-base",
    "GPT2": "gpt2",
    "GroupBert": "Graphcore/groupbert-base-uncased",
    "Hubert": "facebook/hubert-base-ls960",
    "Lxmert": "unc-nlp/lxmert-base-uncased",
    "MT5": "google/mt5-small",
    "Roberta": "roberta-base",
    "T5Encoder": "sentence-transformers/sentence-t5-base",
    "T5For": "t5-small",
    "ViT": "google/vit-base-patch16-224-in21k",
    "Wav2Vec2": "facebook/wav2vec2-base",
    "Whisper": "openai/whisper-tiny",
    "DistilBert": "distilbert-base-uncased",
    "MPNet": "sentence-transformers/all-mpnet-base-v2",
}
IPUS = {
    "Bart": "bart-base-ipu",
    "Bert": "bert-base-ipu",
    "ConvNext": "convnext-base-ipu",
    "Deberta": "deberta-base-ipu",
    "GPT2": "gpt2-small-ipu",
    "GroupBert": "groupbert-base-uncased",
    "Hubert": "hubert-base-ipu",
    "Lxmert": "lxmert-base-ipu",
    "MT5": "mt5-small-ipu",
    "Roberta": "roberta-base-ipu",
    "T5Encoder": "sentence-t5-base",
    "T5For": "t5-small-ipu",
    "ViT": "vit-base-ipu",
    "Wav2Vec2": "wav2vec2-base-ipu",
    "Whisper": "whisper-tiny-ipu",
    "DistilBert": "distilbert-base-ipu",
    "MPNet": "mpnet-base-ipu",
}
LENGTH = 16


def key(name):
    return max((one for one in FOLDER if name.startswith(one)), key=len)


def example(kind, config, draw):
    name = kind.__name__

    def ids(*shape):
        return draw.integers(12, min(config.vocab_size, 150), shape)

    if "Hubert" in name or "Wav2Vec2" in name:
        sound = {"input_values": draw.standard_normal(1600 * 4).astype(np.float32)}
        if "PreTraining" in name:
            long = 19
            mask = np.zeros(long, bool)
            mask[3:9] = True
            return {
                **sound,
                "mask_time_indices": mask,
                "sampled_negative_indices": draw.integers(0, 6, (long, config.num_negatives)),
            }
        if "CTC" in name:
            return {**sound, "labels": draw.integers(5, 30, 6)}
        return {**sound, "labels": int(draw.integers(0, 2))}
    if "Whisper" in name:
        return {
            "input_features": draw.standard_normal((80, 3000)).astype(np.float32),
            "labels": ids(LENGTH),
        }
    if "Image" in name:
        return {
            "pixel_values": draw.standard_normal((3, config.image_size, config.image_size)).astype(
                np.float32
            ),
            "labels": int(draw.integers(0, 2)),
        }
    row = {"input_ids": ids(LENGTH), "attention_mask": np.ones(LENGTH, np.int64)}
    if "Lxmert" in name:
        return {
            **row,
            "visual_feats": draw.standard_normal((5, 2048)).astype(np.float32),
            "visual_pos": draw.random((5, 4)).astype(np.float32),
            "token_type_ids": np.zeros(LENGTH, np.int64),
            "labels": int(draw.integers(0, 20)),
        }
    if "MultipleChoice" in name:
        return {
            "input_ids": ids(2, LENGTH),
            "attention_mask": np.ones((2, LENGTH), np.int64),
            "labels": int(draw.integers(0, 2)),
        }
    if "PreTraining" in name:
        return {**row, "labels": ids(LENGTH), "next_sentence_label": int(draw.integers(0, 2))}
    if "QuestionAnswering" in name:
        return {
            **row,
            "start_positions": int(draw.integers(0, LENGTH)),
            "end_positions": int(draw.integers(0, LENGTH)),
        }
    if "SequenceClassification" in name:
        return {**row, "labels": int(draw.integers(0, 2))}
    if "TokenClassification" in name:
        return {**row, "labels": draw.integers(0, 2, LENGTH)}
    if "MaskedLM" in name or "LMHead" in name:
        return {**row, "labels": ids(LENGTH)}
    if "ConditionalGeneration" in name:
        return {**row, "labels": ids(LENGTH)}
    raise LookupError(name)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_three_updates(kind, replicas, tmp_path):
    name = kind.__name__
    torch.manual_seed(0)
    model = kind.from_pretrained(FOLDER[key(name)])
    model.config.use_cache = False
    if name == "DebertaForSequenceClassification":  # without it forward looks for labels
        model.config.problem_type = "single_label_classification"
    if name.startswith("GPT2"):
        model.config.pad_token_id = 0
    ipus = "wav2vec2-ctc-base-ipu" if "CTC" in name else IPUS[key(name)]
    config = IPUConfig.from_pretrained("Graphcore/" + ipus)
    config.gradient_accumulation_steps = 16
    config.replication_factor = replicas
    draw = np.random.default_rng(0)
    data = [example(kind, model.config, draw) for _ in range(3 * 16 * replicas)]
    arguments = IPUTrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        num_train_epochs=1,
        learning_rate=1e-3,
        fp32=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = IPUTrainer(model, config, arguments, train_dataset=data, eval_dataset=data[:8])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.train().global_step == 3
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before if name in after)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
