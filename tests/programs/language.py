"""Programs of Graphcore's examples for language, speech, and pictures with texts."""

import gzip
import json
import math
import random
import shutil
import struct
import wave
import zlib

import numpy as np
import torch

from tests.programs.made_up import empty_library
from tests.programs.program import (
    OUT_OF_REACH,
    PASSES,
    RUNS,
    TRAINS,
    Environment,
    Program,
    graphcore_examples,
)

SOURCE = graphcore_examples("Graphcore's examples: language, speech, and pictures with texts")

ENVIRONMENTS = {
    "default": Environment(
        (
            "aiohttp==3.10.11",
            "av==12.3.0",
            "axial-positional-embedding==0.2.1",
            "datasets==2.1.0",
            "decord==0.6.0",
            "dill==0.3.4",
            "editdistance==0.8.1",
            "einops==0.4.1",
            "fire==0.4.0",
            "fsspec[http]==2022.11.0",
            "ftfy==6.0.3",
            "huggingface-hub==0.7.0",
            "humanize==4.10.0",
            "inflect==5.3.0",
            "librosa==0.8.1",
            "matplotlib==3.3.4",
            "multiprocess==0.70.12.2",
            "numba==0.56.4",
            "numpy==1.23.5",
            "omegaconf==2.1.2",
            "opencv-python-headless==4.6.0.66",
            "pandas==1.5.3",
            "praat-parselmouth==0.3.3",
            "protobuf==3.19.4",
            "pyarrow==12.0.1",
            "pytest==6.2.5",
            "pytest-pythonpath==0.7.4",
            "pytorch-lightning==1.7.7",
            "responses==0.18.0",
            "scipy==1.5.4",
            "taming-transformers-rom1504==0.0.6",
            "tensorboard==2.9.1",
            "tfrecord==1.14.1",
            "timm==0.5.4",
            "tokenizers==0.12.1",
            "torchaudio==2.0.2",
            "torchmetrics==0.11.4",
            "torchvision==0.15.2",
            "transformers==4.18.0",
            "Unidecode==1.3.2",
            "wandb==0.12.8",
        ),
        python="3.8",
    ),
}

BERT = "nlp/bert/pytorch"
GPT2 = "nlp/gpt2/pytorch"
CONFORMER = "speech/conformer/pytorch"
FASTPITCH = "speech/fastpitch/pytorch"
CLIP = "multimodal/CLIP/pytorch"
FROZEN = "multimodal/frozen_in_time/pytorch"
DALLE = "multimodal/mini_dalle/pytorch"

# Nothing is reported or fetched. Packages that no index has, or that are hard to build, are made
# up: what they would compile or log, they don't.
VARIABLES = {
    "PYTHONPATH": "{work}/packages",
    "HOME": "{work}",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCH_HOME": "{work}/torch",
    "WANDB_MODE": "disabled",
}
NO_COMPILER = "`examples_utils.load_lib`, which compiles C++ operators, does nothing"
NO_OPERATORS = "a `custom_ops.so` without operators"
NO_LOGGER = "a `dllogger` that logs nothing"

WORDS = "a the dog number is cute my hello , . ? it unit test for frozen yo where city tower in was"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
PACKAGES = {
    "examples_utils": "def load_lib(path, timeout=0):\n    pass\n",
    "dllogger": (
        "class Verbosity:\n    OFF, DEFAULT, VERBOSE = -1, 0, 1\n"
        "class JSONStreamBackend:\n    def __init__(self, *args, **kwargs):\n        pass\n"
        "StdOutBackend = JSONStreamBackend\n"
        "def init(backends=()):\n    pass\n"
        "def log(step=(), data=None, verbosity=0):\n    pass\n"
        "metadata = log\n"
        "def flush():\n    pass\n"
    ),
    "youtokentome": (
        "class OutputType:\n    ID = 0\n"
        "class BPE:\n    def __init__(self, model):\n        pass\n"
        "    def vocab_size(self):\n        return 8192\n"
        "    def encode(self, texts, output_type=0):\n"
        "        return [[1 + ord(c) for c in text] for text in texts]\n"
    ),
}


def packages(source, work):
    """Packages of the names that programs import, with what they call."""
    folder = work / "packages"
    folder.mkdir()
    for name, text in PACKAGES.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def vocabulary(folder, **config):
    """A tokenizer of BERT's kind, of few words."""
    folder.mkdir()
    rows = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), "##hell", "##o"]
    rows += [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(rows)), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def picture(path, chooser, size=64):
    """A picture of random grey stripes, as PNG."""
    rows = b"".join(bytes([0]) + bytes([chooser.randrange(256)]) * size for _ in range(size))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0))]
    parts += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, body in parts:
            checksum = struct.pack(">I", zlib.crc32(kind + body))
            file.write(struct.pack(">I", len(body)) + kind + body + checksum)


def bert(source, work):
    """The tokenizer that BERT's programs load by name."""
    packages(source, work)
    vocabulary(source / BERT / "bert-base-uncased", model_type="bert")


SQUAD = """
import datasets

CONTEXT = "the dog is in the city . it was my tower ."
ANSWER = {"text": datasets.Value("string"), "answer_start": datasets.Value("int32")}
ANSWERS = datasets.Sequence(ANSWER)
COLUMNS = {name: datasets.Value("string") for name in ("id", "title", "context", "question")}


class Questions(datasets.GeneratorBasedBuilder):
    def _info(self):
        return datasets.DatasetInfo(features=datasets.Features({**COLUMNS, "answers": ANSWERS}))

    def _split_generators(self, manager):
        # Whole batches: the loss of one that is filled up with ignored answers is 0 / 0.
        sizes = {datasets.Split.TRAIN: 63, datasets.Split.VALIDATION: 20}
        return [datasets.SplitGenerator(name, {"rows": rows}) for name, rows in sizes.items()]

    def _generate_examples(self, rows):
        answers = {"text": ["the city"], "answer_start": [CONTEXT.index("the city")]}
        texts = {"title": "dog", "context": CONTEXT, "question": "where is the dog ?"}
        for row in range(rows):
            yield row, {"id": str(row), **texts, "answers": answers}


class Exact(datasets.Metric):
    def _info(self):
        prediction = {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}
        reference = {"id": datasets.Value("string"), "answers": ANSWERS}
        columns = datasets.Features({"predictions": prediction, "references": reference})
        return datasets.MetricInfo("", "", columns, "")

    def _compute(self, predictions, references):
        right = [p["prediction_text"] == "the city" for p in predictions]
        return {"exact_match": sum(right) / len(right)}
"""


def squad(source, work):
    """A data set and a metric that are loaded by the name of SQuAD."""
    bert(source, work)
    folder = source / BERT / "squad"
    folder.mkdir()
    (folder / "squad.py").write_text(SQUAD, encoding="utf-8")


def gpt2(source, work):
    """The model and the tokenizer that are loaded by the name of GPT-2, of two small layers."""
    packages(source, work)
    folder, tokenizer = source / GPT2 / "gpt2", source / GPT2 / "tokenizer"
    folder.mkdir()
    shutil.copy(tokenizer / "gpt2-vocab-50256.json", folder / "vocab.json")
    shutil.copy(tokenizer / "gpt2-merges-50256.txt", folder / "merges.txt")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 256}
    config = {"model_type": "gpt2", "vocab_size": 50257, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = (json.dumps({"text": f"the dog number {row} is in the city"}) for row in range(8))
    (work / "lambada.jsonl").write_text("\n".join(rows), encoding="utf-8")
    # What a file of weights lacks is drawn at random.
    torch.save({"wpe.weight": torch.zeros(256, 32)}, folder / "pytorch_model.bin")


def tone(path, frequency, rate):
    """A tone of somewhat less than a second, as WAV."""
    step = 2 * math.pi * frequency / rate
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        samples = (int(8000 * math.sin(step * time)) for time in range(14000))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))


def speech(source, work):
    """Tones with two letters each, and what Conformer's configuration names beside them."""
    packages(source, work)
    # Its own library is loaded by name, and nothing in it is called.
    empty_library(source / CONFORMER / "custom_ops.so")
    symbols = ["<blank>", "<unk>", *LETTERS[:8]]
    rows = [f"{symbol} {place}" for place, symbol in enumerate(symbols)]
    (work / "symbols.txt").write_text("\n".join([*rows, "<sos/eos> 49"]), encoding="utf-8")
    statistics = {"mean_stat": [0.0] * 80, "var_stat": [10.0] * 80, "frame_num": 10}
    (work / "cmvn").write_text(json.dumps(statistics), encoding="utf-8")
    rows = []
    for place in range(24):
        name, text = f"BAC009S0723W{1000 + place}", LETTERS[place % 8] + LETTERS[(place + 3) % 8]
        tone(work / f"{name}.wav", 300 + 40 * place, 16000)
        rows.append(json.dumps({"key": name, "wav": str(work / f"{name}.wav"), "txt": text}))
    (work / "data.list").write_text("\n".join(rows), encoding="utf-8")


def recorded(source, work):
    """Tones as for training, and their texts, which recognition is compared with."""
    speech(source, work)
    rows = [json.loads(row) for row in (work / "data.list").read_text("utf-8").splitlines()]
    texts = "\n".join(f"{row['key']} {row['txt']}" for row in rows)
    (work / "texts.txt").write_text(texts, encoding="utf-8")


def spectra(source, work):
    """Random spectra, durations and pitches for one sentence."""
    packages(source, work)
    sentence, rows = "the dog is in the city.", []
    torch.manual_seed(0)
    for name in ("mel", "duration", "pitch"):
        (work / name).mkdir()
    for row in range(12):
        durations = torch.randint(1, 6, (len(sentence),))
        torch.save(torch.randn(80, int(durations.sum())), work / f"mel/{row}.pt")
        torch.save(durations, work / f"duration/{row}.pt")
        torch.save(torch.randn(len(sentence)), work / f"pitch/{row}.pt")
        rows.append(f"mel/{row}.pt|duration/{row}.pt|pitch/{row}.pt|{sentence}")
    (work / "files.txt").write_text("\n".join(rows), encoding="utf-8")
    (work / "pitch.json").write_text(json.dumps({"mean": 0.0, "std": 1.0}), encoding="utf-8")


def sounds(source, work):
    """Tones of a voice's height, each with a text."""
    packages(source, work)
    (work / "wavs").mkdir()
    for row in range(4):
        tone(work / f"wavs/{row}.wav", 120 + 20 * row, 22050)
    rows = (f"wavs/{row}.wav|the dog number {row}" for row in range(4))
    (work / "files.txt").write_text("\n".join(rows), encoding="utf-8")


def captions(source, work):
    """Pictures, each with a text of its own, and one list of all texts."""
    packages(source, work)
    (source / CLIP / "output").mkdir()
    (work / "pictures").mkdir()
    chooser, rows = random.Random(0), []
    for row in range(40):
        picture(work / f"pictures/{row}.png", chooser)
        text = f"a dog in the city {row}"
        (work / f"pictures/{row}.txt").write_text(text, encoding="utf-8")
        rows.append(f"{row}.png\t{text}")
    (work / "captions.csv").write_text("\n".join(rows), encoding="utf-8")
    with gzip.open(work / "merges.gz", "wt", encoding="utf-8") as file:
        file.write("merges\nt h\nd o")


def vqgan(source, work):
    """A small VQGAN with random weights, where the large one would be downloaded to."""
    captions(source, work)
    folder = work / ".cache" / "dalle"
    folder.mkdir(parents=True)
    layers = {"double_z": False, "z_channels": 16, "resolution": 256, "in_channels": 3, "ch": 32}
    layers.update({"out_ch": 3, "ch_mult": [1] * 5, "num_res_blocks": 1, "attn_resolutions": [16]})
    loss = {"target": "taming.modules.losses.DummyLoss"}
    sizes = {"embed_dim": 16, "n_embed": 1024, "ddconfig": layers, "lossconfig": loss}
    config = {"model": {"target": "taming.models.vqgan.VQModel", "params": sizes}}
    layers["dropout"] = 0.0
    (folder / "vqgan.1024.config.yml").write_text(json.dumps(config), encoding="utf-8")
    torch.save({"state_dict": {}}, folder / "vqgan.1024.model.ckpt")


# The file that timm downloads for ViT-B/32.
VIT = "B_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03"


def video(source, work):
    """A small DistilBERT and a vision transformer, with random weights in their files' forms."""
    packages(source, work)
    folder = source / FROZEN / "distilbert-base-uncased"
    sizes = {"dim": 64, "hidden_dim": 128, "n_heads": 2, "n_layers": 2, "vocab_size": 30522}
    vocabulary(folder, model_type="distilbert", **sizes)
    weights = {"embeddings.position_embeddings.weight": torch.zeros(512, 64)}
    torch.save(weights, folder / "pytorch_model.bin")
    numbers, width, heads = np.random.RandomState(0), 768, 12
    shapes = {"embedding/kernel": (32, 32, 3, width), "embedding/bias": (width,)}
    shapes.update({"cls": (1, 1, width), "head/kernel": (width, 1000), "head/bias": (1000,)})
    shapes["Transformer/posembed_input/pos_embedding"] = (1, 50, width)
    norms = ["Transformer/encoder_norm"]
    for place in range(12):
        block = f"Transformer/encoderblock_{place}"
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_2"]
        attention, perceptron = f"{block}/MultiHeadDotProductAttention_1", f"{block}/MlpBlock_3"
        for part in ("query", "key", "value"):
            shapes[f"{attention}/{part}/kernel"] = (width, heads, width // heads)
            shapes[f"{attention}/{part}/bias"] = (heads, width // heads)
        shapes[f"{attention}/out/kernel"] = (heads, width // heads, width)
        shapes[f"{attention}/out/bias"] = (width,)
        for part, (rows, columns) in enumerate([(width, 4 * width), (4 * width, width)]):
            shapes[f"{perceptron}/Dense_{part}/kernel"] = (rows, columns)
            shapes[f"{perceptron}/Dense_{part}/bias"] = (columns,)
    shapes.update({f"{norm}/{part}": (width,) for norm in norms for part in ("scale", "bias")})
    arrays = {n: (0.02 * numbers.randn(*s)).astype("float32") for n, s in shapes.items()}
    (work / "torch/hub/checkpoints").mkdir(parents=True)
    with open(work / f"torch/hub/checkpoints/{VIT}-res_224.npz", "wb") as file:
        np.savez(file, **arrays)


PRETRAINING = (
    "--config unit_test --dataset generated --training-steps 3 --wandb false "
    "--device-iterations 1 --dataloader-workers 1 --lr-schedule constant --lr-warmup 0.0 "
    "--optimizer AdamW --loss-scaling 16"
)
GPT2_SIZES = (
    "--model gpt2-test --max-len 16 --dataset generated --layers-per-ipu 1 3 "
    "--matmul-proportion 0.2 0.2 --ipus-per-replica 2 --device-iterations 1 --num-workers 1"
)
EVALUATION = (
    "--checkpoint-input-dir gpt2 --fp16 --seq-length 64 --tokenizer-type 1 "
    "--device-iterations 1 --layers-per-ipu 1 1 --matmul-proportion 0.4 0.4"
)
CONFORMER_SIZES = (
    "--encoder.num_blocks 4 --encoder.max_len 120 --encoder.linear_units 32 "
    "--encoder.output_size 16 --decoder.encoder_output_size 16 --decoder.num_blocks 1 "
    "--decoder.linear_units 32 --decoder.max_len 32 --decoder.vocab_size 50 "
    "--loss_fn.vocab_size 50 --train_dataset.dtype FLOAT32 --val_dataset.dtype FLOAT32 "
    "--trainer.dtype FLOAT32 --ipu_options.enable_half_partials False "
    "--ipu_options.gradient_accumulation 7 --train_iterator.batch_size 1 "
    "--train_iterator.num_workers 1 --val_iterator.num_workers 1 --normalizer.cmvn {work}/cmvn "
    "--vocab.vocab_path {work}/symbols.txt --train_dataset.data_list {work}/data.list "
    "--val_dataset.data_list {work}/data.list "
    "--train_conf.filter_conf {{'max_length':120,'token_max_length':8}} "
    "--ipu_options.pipeline "
    "[['encoder.encoders__1.',1],['encoder.encoders__2.',2],['encoder.encoders__3.',3]]"
)
CONFORMER_SAVED = (
    f"{CONFORMER_SIZES} --trainer.num_epochs 2 --checkpoints.save_checkpoint_path {{work}}/out"
)
CONFORMER_VALIDATE = f"validate {CONFORMER_SAVED} --ipu_options.device_iterations 4"
CLIP_SIZES = (
    "--config CLIP_ViT-B-32_cc3m --image_path {work}/pictures "
    "--captions_path {work}/captions.csv "
    "--bpe_vocab_path {work}/merges.gz "
    "--batch_size 1 --epochs 2 --dataloader_workers 1 --warmup_epochs 1 --memory_size 2 "
    "--embed_dim 16 --transformer_width 16 --transformer_heads 2 --context_length 16 "
    "--vision_width 64 --vision_heads 1 --loss_scaling 16"
)
DALLE_SIZES = (
    "--config unit_test --input-folder {work}/pictures --dataloader-workers 1 "
    "--checkpoint-output-dir {work}/out --layers-per-ipu 1 --matmul-proportion 0.2 "
    "--gradient-accumulation 3"
)


def program(path, result, prepare=packages, **rest):
    """An entry, with what all of these have."""
    return Program(path, result, prepare=prepare, variables=VARIABLES, **rest)


def suite(application, name, prepare=packages, **rest):
    """A file of tests of an application, which runs in the folder of the application."""
    path = f"{application}/tests/{name}.py"
    return program(path, PASSES, prepare, folder=application, seconds=1800, **rest)


def unreachable(path, reason):
    """An entry of a program that needs what is not to be had."""
    return Program(path, OUT_OF_REACH, reason)


PROGRAMS = (
    program(
        f"{BERT}/run_pretraining.py",
        TRAINS,
        bert,
        arguments=PRETRAINING,
        adaptation=f"its own unit-test configuration and generated data; {NO_COMPILER}",
    ),
    program(
        f"{BERT}/run_pretraining.py",
        TRAINS,
        bert,
        arguments=f"{PRETRAINING} --packed-data True --max-sequences-per-pack 3 --optimizer LAMB",
        adaptation=f"the same with packed sequences; {NO_COMPILER}",
    ),
    program(
        f"{BERT}/run_squad.py",
        TRAINS,
        squad,
        arguments="--config demo_tiny_128 --vocab-size 500 --hidden-size 32 --num-epochs 1 "
        "--gradient-accumulation 9 --wandb false --squad-do-training True "
        "--squad-do-validation True --matmul-proportion 0.3 --sequence-length 384",
        adaptation=f"substitutes for questions, tokenizer and metric; {NO_COMPILER}",
        updates=1000,
    ),
    program(f"{BERT}/pretraining_data.py", RUNS, bert, adaptation="a substitute tokenizer"),
    suite(BERT, "accuracy_test", bert),
    suite(BERT, "argparse_test", bert),
    suite(
        BERT,
        "bert_tiny_test",
        bert,
        arguments="-k help",
        reason="seven of its eight tests were left out: each trains 360 updates, which takes "
        "hours on two cores",
    ),
    suite(BERT, "checkpoint_test", bert),
    suite(BERT, "cpu_ipu_test", bert, adaptation=f"a substitute tokenizer; {NO_COMPILER}"),
    unreachable(
        f"{BERT}/data/packing/shuffle_packed_data.py",
        "reads the configuration `pretrain_base_128_packed`, which its own file lacks",
    ),
    unreachable(
        f"{BERT}/data/packing/pack_pretraining_data.py",
        "not run: its configuration starts 64 processes that read files of Wikipedia",
    ),
    unreachable(f"{BERT}/tests/recompute_checkpoint_test.py", "counts operators of PopART's graph"),
    unreachable(f"{BERT}/tests/packing_script_test.py", "skips itself, because it needs Wikipedia"),
    unreachable(
        f"{BERT}/tests/wikipedia_dataset_test.py", "skips itself, because it needs Wikipedia"
    ),
    unreachable(f"{BERT}/tests_serial/poprun_test.py", "needs PopRun"),
    unreachable(f"{BERT}/tests_serial/tritonserver/multi_client_test.py", "needs a Triton server"),
    unreachable(f"{BERT}/run_benchmark_with_triton_server.py", "needs a Triton server"),
    program(
        f"{GPT2}/train_gpt2.py",
        TRAINS,
        arguments=f"{GPT2_SIZES} --gradient-accumulation 9",
        adaptation=f"its own test configuration and generated data; {NO_COMPILER}",
        seconds=1200,
    ),
    program(
        f"{GPT2}/inference_gpt2.py",
        RUNS,
        arguments=f"{GPT2_SIZES} --gradient-accumulation 1",
        adaptation=f"its own test configuration and generated data; {NO_COMPILER}",
    ),
    program(
        f"{GPT2}/text_generate_gpt2.py",
        RUNS,
        gpt2,
        arguments="--model-name-or-path gpt2 --single-ipu true --fp16 true --poptorch-loop true "
        "--input-len 8 --output-len 8 --prompt dog",
        adaptation=f"two small layers with random weights; {NO_COMPILER}",
    ),
    program(
        f"{GPT2}/text_generate_gpt2.py",
        RUNS,
        gpt2,
        arguments="--model-name-or-path gpt2 --fp16 true --layers-per-ipu 1 1 "
        "--matmul-proportion 0.2 0.2 --input-len 8 --output-len 8 --prompt dog",
        adaptation=f"the same on two IPUs, which keep keys and values; {NO_COMPILER}",
    ),
    Program(
        f"{GPT2}/tasks/evaluate_lambada.py",
        RUNS,
        arguments=f"--valid-data {{work}}/lambada.jsonl {EVALUATION}",
        adaptation="random texts; two small layers with random weights",
        prepare=gpt2,
        folder=GPT2,
        variables={**VARIABLES, "PYTHONPATH": "{work}/packages:{source}/" + GPT2},
    ),
    unreachable(
        f"{GPT2}/tasks/evaluate_wiki.py",
        "reads `args.pretrained_checkpoint`, which is not one of its arguments",
    ),
    suite(GPT2, "cpu_ipu_test"),
    suite(GPT2, "loss_seralize_test"),
    suite(
        GPT2,
        "tokenizer_test",
        gpt2,
        arguments="-p no:skipping",
        adaptation="run although it is marked as skipped; the tokenizer is built from files of "
        "its repository",
    ),
    program(
        f"{CONFORMER}/main.py",
        TRAINS,
        speech,
        arguments=f"train {CONFORMER_SIZES} --trainer.num_epochs 2",
        adaptation=f"synthetic tones and letters; small sizes, float32; {NO_OPERATORS}",
        seconds=900,
    ),
    program(
        f"{CONFORMER}/main.py",
        RUNS,
        speech,
        before=(f"main.py train {CONFORMER_SAVED}",),
        arguments=CONFORMER_VALIDATE,
        adaptation=f"the same, with the weights after two epochs of training; {NO_OPERATORS}",
        seconds=1200,
    ),
    program(
        f"{CONFORMER}/main.py",
        RUNS,
        recorded,
        before=(f"main.py train {CONFORMER_SAVED}", f"main.py {CONFORMER_VALIDATE}"),
        arguments=f"recognize {CONFORMER_SAVED} --compute_cer.average_num 2 "
        "--compute_cer.label_text {work}/texts.txt",
        adaptation=f"the same, after its validation, with a beam search; {NO_OPERATORS}",
        seconds=1200,
    ),
    suite(CONFORMER, "test_forward_grad", speech, adaptation=NO_OPERATORS),
    program(
        f"{FASTPITCH}/train.py",
        TRAINS,
        spectra,
        arguments="--checkpoint-dir {work}/out --dataset-path {work} "
        "--training-files {work}/files.txt --validation-files {work}/files.txt "
        "--pitch-mean-std-file {work}/pitch.json --epochs 1 --batch-size 1 "
        "--gradient-accumulation 3 --num-dataloader-workers 1 --learning-rate 0.1 "
        "--optimizer lamb --in-fft-n-layers 1 --out-fft-n-layers 1",
        adaptation="random spectra, because its generated data is all zeros, for which its loss "
        "is 0 / 0; one layer each; {NO_LOGGER}",
        seconds=1200,
    ),
    program(
        f"{FASTPITCH}/extract_mels.py",
        RUNS,
        sounds,
        arguments="--dataset-path {work} --wav-text-filelist {work}/files.txt --batch-size 2 "
        "--log-file {work}/log.json --extract-mels --extract-durations --extract-pitch-char",
        adaptation=f"synthetic tones; Tacotron with random weights; {NO_LOGGER}",
    ),
    unreachable(
        f"{FASTPITCH}/inference.py", "needs CUDA: it measures times with `torch.cuda.synchronize`"
    ),
    suite(FASTPITCH, "test_layers"),
    program(
        f"{CLIP}/train.py",
        TRAINS,
        captions,
        arguments=CLIP_SIZES,
        adaptation="random pictures and captions; small sizes and a smaller loss scale: the "
        "gradient of the text embedding is 70, and its own loss scale of 1024 would overflow "
        "float16",
        seconds=1200,
    ),
    suite(CLIP, "cpu_ipu_test"),
    unreachable(
        f"{CLIP}/zero_shot.py", "calls `tokenize` without `bpe_vocab_path`, which is required"
    ),
    program(
        f"{FROZEN}/run.py",
        TRAINS,
        video,
        arguments="--config_name configs/unit_test.json --trainer.init_val False",
        adaptation="its own unit-test configuration; random weights",
        seconds=1200,
    ),
    suite(FROZEN, "cpu_ipu_test", video, adaptation="random weights"),
    unreachable(
        f"{FROZEN}/tests/test_train.py",
        "its package `examples_tests` is in no package index; it starts the program above",
    ),
    program(
        f"{DALLE}/train.py",
        TRAINS,
        vqgan,
        arguments=f"{DALLE_SIZES} --epochs 3",
        adaptation="its own unit-test configuration; random pictures and captions, and "
        "`youtokentome`; a small VQGAN with random weights",
    ),
    program(
        f"{DALLE}/generate.py",
        RUNS,
        vqgan,
        before=(f"train.py {DALLE_SIZES} --epochs 1",),
        arguments="--dalle_path {work}/out/dalle_1.pt --text dog --num_images 1 --batch_size 1 "
        "--outputs_dir {work}/pictures --bpe_path models/bpe/bpe_yttm_vocab.txt",
        adaptation="the weights after one epoch of the training above",
        seconds=1200,
    ),
    suite(DALLE, "cpu_ipu_test", vqgan, adaptation="a small VQGAN with random weights"),
)
