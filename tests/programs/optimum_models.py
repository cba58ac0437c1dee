"""``python optimum_models.py FOLDER [NAME ...]``: small models with random weights, by their names.

With names these models alone, and data and metrics for the examples.

Transformers looks for a folder before it asks the hub, so the tests of optimum-graphcore find
models, tokenizers, data sets and configurations for IPUs in the folder that they run in.
"""

import json
import os
import sys

import torch
import transformers as t

WORDS = "a the of and where name what who my first second here text part going to from".split()  # noqa: SIM905
SENTENCES = "A river runs past the mill, and in winter it freezes. Who saw the hare in the field?"
CHARACTERS = [chr(number) for number in range(33, 127)]
CASED = CHARACTERS + ["##" + one for one in CHARACTERS]


def word_pieces(folder, kind, **more):
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind is t.MPNetTokenizer:
        marks = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", "<unk>"]
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(dict.fromkeys(marks + CASED + WORDS)) + "\n")
    tokenizer = kind(f"{folder}/vocab.txt", model_max_length=128, **more)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def byte_pairs(folder, kind, **more):
    from tokenizers import ByteLevelBPETokenizer

    marks = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        "[CLS]",
        "[PAD]",
        "[SEP]",
        "[UNK]",
        "[MASK]",
        "<|endoftext|>",
    ]
    os.makedirs(folder, exist_ok=True)
    trained = ByteLevelBPETokenizer()
    texts = [SENTENCES, " ".join(WORDS), "".join(CHARACTERS)] * 3
    trained.train_from_iterator(
        texts, vocab_size=700, min_frequency=1, special_tokens=marks, show_progress=False
    )
    trained.save_model(folder)
    tokenizer = kind(f"{folder}/vocab.json", f"{folder}/merges.txt", model_max_length=128, **more)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def pieces(folder, kind=t.T5Tokenizer):
    import sentencepiece

    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/text.txt", "w") as file:
        for at in range(400):
            file.write(
                " ".join(WORDS[(at * 7 + step * (1 + at % 5)) % len(WORDS)] for step in range(9))
                + ". "
            )
            file.write("".join(CHARACTERS[(at + step) % 94] for step in range(20)) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=f"{folder}/text.txt",
        model_prefix=f"{folder}/spiece",
        vocab_size=200,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = kind(f"{folder}/spiece.model", model_max_length=512)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def letters(folder):
    os.makedirs(folder, exist_ok=True)
    signs = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ"]
    with open(f"{folder}/vocab.json", "w") as file:
        json.dump({sign: at for at, sign in enumerate(signs)}, file)
    t.Wav2Vec2CTCTokenizer(f"{folder}/vocab.json").save_pretrained(folder)
    t.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    return len(signs)


SMALL = dict(  # noqa: C408
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=512,
)


def bert(folder, kind=t.BertForPreTraining, config=t.BertConfig, layers=4, **more):
    size = word_pieces(folder, t.BertTokenizer)
    kind(config(vocab_size=size, **{**SMALL, "num_hidden_layers": layers}, **more)).save_pretrained(
        folder
    )


def distilbert(folder, kind=t.DistilBertForMaskedLM, layers=4, **more):
    size = word_pieces(folder, t.DistilBertTokenizer)
    kind(
        t.DistilBertConfig(
            vocab_size=size, dim=32, n_layers=layers, n_heads=4, hidden_dim=64, **more
        )
    ).save_pretrained(folder)


def roberta(folder, layers=4, kind=t.RobertaForMaskedLM, **more):
    size = byte_pairs(folder, t.RobertaTokenizer)
    kind(
        t.RobertaConfig(
            vocab_size=size,
            **{**SMALL, "num_hidden_layers": layers, "max_position_embeddings": 514},
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            type_vocab_size=1,
            **more,
        )
    ).save_pretrained(folder)


def deberta(folder):
    size = byte_pairs(folder, t.DebertaTokenizer)
    t.DebertaForMaskedLM(
        t.DebertaConfig(
            vocab_size=size,
            **SMALL,
            relative_attention=True,
            pos_att_type="c2p|p2c",
            type_vocab_size=0,
            position_biased_input=False,
            max_relative_positions=-1,
            pad_token_id=6,
            legacy=True,
        )
    ).save_pretrained(folder)


def mpnet(folder):
    size = word_pieces(folder, t.MPNetTokenizer)
    t.MPNetForMaskedLM(
        t.MPNetConfig(
            vocab_size=size,
            **{**SMALL, "max_position_embeddings": 514},
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
        )
    ).save_pretrained(folder)


def lxmert(folder):
    size = word_pieces(folder, t.LxmertTokenizer)
    t.LxmertForQuestionAnswering(
        t.LxmertConfig(
            vocab_size=size,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            l_layers=2,
            x_layers=1,
            r_layers=1,
            num_qa_labels=20,
        )
    ).save_pretrained(folder)


def gpt2(folder, layers=4, embd=32):
    size = byte_pairs(folder, t.GPT2Tokenizer)
    t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=size,
            n_embd=embd,
            n_layer=layers,
            n_head=4,
            n_positions=512,
            bos_token_id=10,
            eos_token_id=10,
        )
    ).save_pretrained(folder)


def bart(folder, layers=2, **more):
    size = byte_pairs(folder, t.BartTokenizer)
    t.BartForConditionalGeneration(
        t.BartConfig(
            vocab_size=size,
            d_model=32,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=512,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
            **more,
        )
    ).save_pretrained(folder)


def t5(folder, kind=t.T5ForConditionalGeneration, config=t.T5Config, layers=2):
    size = pieces(folder)
    kind(
        config(
            vocab_size=(size + 7) // 8 * 8,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ).save_pretrained(folder)


def t5_encoder(folder):
    from optimum.graphcore.models.t5.configuration_t5 import T5EncoderConfig

    size = pieces(folder)
    t.T5EncoderModel(
        T5EncoderConfig(
            vocab_size=(size + 7) // 8 * 8, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4
        )
    ).save_pretrained(folder)


def vit(folder):
    t.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    t.ViTForImageClassification(
        t.ViTConfig(
            **{k: v for k, v in SMALL.items() if k[:3] != "max"}, image_size=32, patch_size=8
        )
    ).save_pretrained(folder)


def convnext(folder):
    t.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(folder)
    t.ConvNextForImageClassification(
        t.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1], image_size=64)
    ).save_pretrained(folder)


SOUND = dict(
    **{k: v for k, v in SMALL.items() if k[:3] != "max"},
    conv_dim=(16,) * 7,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    ctc_loss_reduction="mean",
    pad_token_id=0,
    mask_time_length=2,
)


def wav2vec2(folder, kind=t.Wav2Vec2ForPreTraining, **more):
    size = letters(folder)
    kind(
        t.Wav2Vec2Config(
            vocab_size=size,
            num_codevectors_per_group=8,
            codevector_dim=16,
            proj_codevector_dim=16,
            num_negatives=4,
            **SOUND,
            **more,
        )
    ).save_pretrained(folder)


def hubert(folder, kind=t.HubertForCTC):
    size = letters(folder)
    kind(t.HubertConfig(vocab_size=size, **SOUND)).save_pretrained(folder)


def whisper(folder, kind=t.WhisperForConditionalGeneration):
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    rest = ["translate", "transcribe", "startoflm", "startofprev", "nocaptions", "notimestamps"]
    marks = [f"<|{one}|>" for one in ("startoftranscript", *LANGUAGES, *rest)]
    byte_pairs(folder, t.WhisperTokenizer, additional_special_tokens=marks)
    t.WhisperFeatureExtractor().save_pretrained(folder)
    tokenizer = t.WhisperTokenizer.from_pretrained(folder)
    t.WhisperProcessor(t.WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    size = len(tokenizer) + 8
    kind(
        t.WhisperConfig(
            vocab_size=size,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            pad_token_id=1,
            bos_token_id=10,
            eos_token_id=10,
            decoder_start_token_id=11,
            suppress_tokens=[],
            begin_suppress_tokens=[10],
        )
    ).save_pretrained(folder)


def sounds():
    import datasets
    import numpy as np

    draw = np.random.default_rng(0)
    heard = [(draw.standard_normal(16000 * 2) * 0.1).astype(np.float32) for _ in range(4)]
    rows = [{"array": one, "sampling_rate": 16000} for one in heard]
    files = [f"{at}.flac" for at in range(4)]
    kinds = datasets.Features(
        file=datasets.Value("string"),
        audio=datasets.Audio(16000),
        text=datasets.Value("string"),
        id=datasets.Value("string"),
    )
    asr = datasets.Dataset.from_dict(
        {"file": files, "audio": rows, "text": ["A"] * 4, "id": list("0123")}, features=kinds
    )
    superb = datasets.Dataset.from_dict({"file": files, "speech": heard, "label": [0, 1, 0, 1]})
    for name, one, part, whole in (
        ("hf-internal-testing/librispeech_asr_dummy", "clean", "validation", asr),
        ("anton-l/superb_dummy", "ic", "test", superb),
    ):
        os.makedirs(f"{name}/{one}", exist_ok=True)
        whole.to_parquet(f"{name}/{one}/{part}.parquet")
        with open(f"{name}/README.md", "w") as file:
            file.write(
                f"---\nconfigs:\n- config_name: {one}\n  data_files:\n"
                f"  - split: {part}\n    path: {one}/{part}.parquet\n---\n"
            )


def articles():
    import datasets

    rows = [
        " ".join(WORDS[(at * 3 + step) % len(WORDS)] for step in range(30)) for at in range(10000)
    ]
    for part in ("train", "validation"):
        os.makedirs("cnn_dailymail/3.0.0", exist_ok=True)
        datasets.Dataset.from_dict(
            {"article": rows, "highlights": [row[:60] for row in rows], "id": rows}
        ).to_parquet(f"cnn_dailymail/3.0.0/{part}.parquet")
    with open("cnn_dailymail/README.md", "w") as file:
        file.write(
            "---\nconfigs:\n- config_name: 3.0.0\n  data_files:\n"
            + "".join(
                f"  - split: {part}\n    path: 3.0.0/{part}.parquet\n"
                for part in ("train", "validation")
            )
            + "---\n"
        )


def groupbert(folder):
    from optimum.graphcore.models.groupbert import modeling_groupbert as g

    bert(folder, g.GroupBertForPreTraining, g.GroupBertConfig)
    ipus(folder, layers_per_ipu=[1, 1, 1, 1])


def ipus(folder, **more):
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/ipu_config.json", "w") as file:
        json.dump(
            {
                "ipus_per_replica": len(more.get("layers_per_ipu", [1])),
                "gradient_accumulation_steps": 16,
                "replication_factor": 1,
                **more,
            },
            file,
        )


MODELS = {
    "facebook/bart-base": bart,
    "hf-internal-testing/tiny-random-bart": bart,
    "sshleifer/bart-tiny-random": bart,
    "facebook/bart-large-cnn": bart,
    "ainize/bart-base-cnn": bart,
    "bert-base-uncased": bert,
    "hf-internal-testing/tiny-random-bert": bert,
    "facebook/convnext-base-224": convnext,
    "microsoft/deberta-base": deberta,
    "distilbert-base-uncased": distilbert,
    "hf-internal-testing/tiny-random-distilbert": lambda folder: distilbert(
        folder, t.DistilBertForSequenceClassification, 5
    ),
    "sshleifer/tiny-distilbert-base-cased-distilled-squad": lambda folder: distilbert(
        folder, t.DistilBertForQuestionAnswering, 2
    ),
    "sshleifer/tiny-distilroberta-base": lambda folder: roberta(folder, 2),
    "gpt2": gpt2,
    "distilgpt2": gpt2,
    "hf-internal-testing/tiny-random-gpt2": gpt2,
    "Graphcore/groupbert-base-uncased": groupbert,
    "facebook/hubert-base-ls960": hubert,
    "unc-nlp/lxmert-base-uncased": lxmert,
    "roberta-base": roberta,
    "t5-small": t5,
    "t5-base": t5,
    "hf-internal-testing/tiny-random-t5": t5,
    "patrickvonplaten/t5-tiny-random": t5,
    "google/mt5-small": lambda folder: t5(folder, t.MT5ForConditionalGeneration, t.MT5Config, 8),
    "sentence-transformers/all-mpnet-base-v2": mpnet,
    "sentence-transformers/sentence-t5-base": t5_encoder,
    "google/vit-base-patch16-224-in21k": vit,
    "hf-internal-testing/tiny-random-vit": vit,
    "facebook/wav2vec2-base": wav2vec2,
    "facebook/wav2vec2-base-960h": lambda folder: wav2vec2(folder, t.Wav2Vec2ForCTC),
    "hf-internal-testing/tiny-random-wav2vec2": lambda folder: wav2vec2(
        folder, t.Wav2Vec2ForSequenceClassification
    ),
    "openai/whisper-tiny": whisper,
    "hf-internal-testing/tiny-random-WhisperForConditionalGeneration": whisper,
    "hf-internal-testing/tiny-bert-for-token-classification": lambda folder: bert(
        folder, t.BertForTokenClassification, layers=2
    ),
    "sshleifer/tiny-dbmdz-bert-large-cased-finetuned-conll03-english": lambda folder: bert(
        folder, t.BertForTokenClassification, layers=2, num_labels=9
    ),
}
FOUR = [1, 1, 1, 1]
CONFIGURATIONS = {
    "Graphcore/bart-base-ipu": FOUR,
    "Graphcore/bert-base-ipu": FOUR,
    "Graphcore/bert-large-ipu": FOUR,
    "Graphcore/convnext-base-ipu": [2, 3],
    "Graphcore/deberta-base-ipu": FOUR,
    "Graphcore/distilbert-base-ipu": FOUR,
    "Graphcore/gpt2-small-ipu": FOUR,
    "Graphcore/hubert-base-ipu": FOUR,
    "Graphcore/wav2vec2-ctc-base-ipu": [7, 2, 2, 2],
    "Graphcore/wav2vec2-base-ipu": [7, 3, 3, 2],
    "Graphcore/lxmert-base-ipu": FOUR,
    "Graphcore/roberta-base-ipu": FOUR,
    "Graphcore/roberta-large-ipu": FOUR,
    "Graphcore/t5-small-ipu": FOUR,
    "Graphcore/mt5-small-ipu": [4, 4, 4, 4],
    "Graphcore/sentence-t5-base": FOUR,
    "Graphcore/mpnet-base-ipu": FOUR,
    "Graphcore/vit-base-ipu": FOUR,
    "Graphcore/whisper-tiny-ipu": [2, 2],
}


def lines(name, rows):
    """A file of JSON lines."""
    with open(f"data/{name}.json", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def said(at, count):
    return " ".join(WORDS[(at * 3 + step) % len(WORDS)] for step in range(count))


def example_data():
    """What the examples read, and the metrics that they load from the folder they run in."""
    import datasets
    import numpy as np
    from PIL import Image

    os.makedirs("data", exist_ok=True)
    rows = range(200)
    lines("glue", [{"sentence": said(at, 9), "label": at % 2} for at in rows])
    tags = ["O", "PLACE", "NAME"]
    lines(
        "ner",
        [{"tokens": said(at, 6).split(), "ner_tags": [tags[at % 3]] * 6} for at in rows],
    )
    endings = [{f"ending{number}": said(number, 4) for number in range(4)}] * 200
    lines(
        "swag",
        [
            {"sent1": said(at, 6), "sent2": said(at + 1, 2), "label": at % 4, **one}
            for at, one in enumerate(endings)
        ],
    )
    lines("translation", [{"translation": {"en": said(at, 8), "fr": said(at, 6)}} for at in rows])
    lines("summary", [{"text": said(at, 20), "summary": said(at, 5)} for at in rows])
    with open("data/text.txt", "w") as file:
        file.writelines(said(at, 60) + "\n" for at in range(400))
    answers = [
        {
            "id": str(at),
            "context": said(at, 120),
            "question": said(at, 5) + "?",
            "answers": {"text": [said(at, 2)], "answer_start": [0]},
        }
        for at in rows
    ]
    with open("data/qa.json", "w") as file:
        json.dump({"data": answers}, file)
    draw = np.random.default_rng(0)
    for at in range(120):
        os.makedirs(f"data/pictures/{at % 2}", exist_ok=True)
        pixels = draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"data/pictures/{at % 2}/{at}.png")
    heard = [(draw.standard_normal(16000) * 0.1).astype(np.float32) for _ in range(60)]
    features = datasets.Features(
        audio=datasets.Audio(16000),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
    )
    spoken = {
        "audio": [{"array": one, "sampling_rate": 16000} for one in heard],
        "text": ["who saw the hare"] * 60,
        "label": [at % 2 for at in range(60)],
    }
    os.makedirs("data/spoken")
    spoken = datasets.Dataset.from_dict(spoken, features=features)
    spoken.to_parquet("data/spoken/train.parquet")
    spoken.select(range(8)).to_parquet("data/spoken/validation.parquet")
    for name in ("accuracy", "seqeval", "squad", "sacrebleu", "rouge", "wer", "cer"):
        os.makedirs(name, exist_ok=True)
        with open(f"{name}/{name}.py", "w") as file:
            file.write(METRIC)
    os.makedirs("data/tokenizers/punkt")  # for nltk; nothing is split before an evaluation


METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        one = datasets.Value("float32")
        features = datasets.Features({"predictions": one, "references": one})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": 0.0}
"""

if __name__ == "__main__":
    torch.manual_seed(0)
    os.chdir(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        MODELS[name](name)
    for name, layers in CONFIGURATIONS.items():
        more = (
            {"embedding_serialization_factor": 4, "projection_serialization_factor": 4}
            if "mt5" in name
            else {}
        )
        ipus(name, layers_per_ipu=layers, **more)
    ipus(
        "Graphcore/internal-testing-tiny-ipu",
        layers_per_ipu=[-1],
        ipus_per_replica=2,
        inference_ipus_per_replica=2,
    )
    if sys.argv[2:]:
        example_data()
    else:
        sounds()
        articles()
