"""The tutorials, feature examples and graph networks of Graphcore's examples."""

import json
import pickle
import subprocess

import numpy as np
import torch

from tests.programs.made_up import empty_library, write_idx
from tests.programs.program import (
    OUT_OF_REACH,
    PASSES,
    RUNS,
    TRAINS,
    Environment,
    Program,
    graphcore_examples,
)

SOURCE = graphcore_examples("Tutorials and graph networks of Graphcore's examples")

ENVIRONMENTS = {
    "default": Environment(
        ("torchvision==0.15.2", "matplotlib", "scikit-learn", "filelock", "octconv", "psutil"),
        "3.8",
    ),
    # datasets 2.2.0 and optimum 1.3.0 come from before these releases of fsspec and packaging.
    "transformers": Environment(
        (
            *("transformers==4.20.1", "optimum==1.3.0", "optimum-graphcore==0.5.0"),
            *("datasets==2.2.0", "fsspec==2023.9.2", "packaging==21.3", "torchvision==0.15.2"),
            *("numpy==1.23.5", "protobuf==3.19.4", "pandas", "matplotlib", "scikit-learn"),
            *("scipy", "ipywidgets"),
        ),
        "3.8",
    ),
    # torch-scatter, torch-sparse and torch-cluster come as source, which needs torch to be built.
    "graphs": Environment(
        (
            *("pyg-nightly==2.4.0.dev20230613", "pandas==1.5.3", "scipy", "scikit-learn"),
            *("matplotlib", "seaborn==0.12.1", "periodictable", "py3Dmol", "ipywidgets"),
            *("torchinfo", "networkx==3.0", "pyyaml", "jupytext", "ipython"),
        ),
        "3.8",
    ),
    "compiled": Environment(
        (
            *("pyg-nightly==2.4.0.dev20230613", "pandas==2.0.1", "scipy", "scikit-learn"),
            *("matplotlib", "torchinfo", "networkx==3.0", "pyyaml", "jupytext", "ipython"),
            *("torch-scatter==2.1.1", "torch-sparse==0.6.17", "torch-cluster==1.6.1"),
        ),
        "3.8",
    ),
}


def pictures(source, work):
    """Digits and clothes, as many as the real ones, in the files that torchvision reads."""
    rng = np.random.default_rng(0)
    means = rng.integers(0, 200, (10, 28, 28))
    for part, count in (("train", 60000), ("t10k", 10000)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = (means[labels] + rng.integers(0, 56, (28, 28))).astype(np.uint8)
        for name in ("MNIST", "FashionMNIST"):
            for root in (work / ".torch" / "datasets", work):
                write_idx(root / name / "raw", part, images, labels)


def compiled_operator(source, work):
    """Pictures, and a shared library with nothing in it in the place of the compiled operator."""
    pictures(source, work)
    example = source / "tutorials/feature_examples/pytorch/custom_op/leaky_relu_example"
    empty_library(example / "build" / "custom_ops.so")


def cifar(source, work):
    """CIFAR-10 in its files, and a module that lets torchvision take them without their sums."""
    rng = np.random.default_rng(0)
    means = rng.integers(0, 200, (10, 3072))
    folder = work / ".torch" / "datasets" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, 400)
        data = (means[labels] + rng.integers(0, 56, (400, 3072))).astype(np.uint8)
        # As an earlier NumPy writes it, which every NumPy reads.
        text = pickle.dumps({"data": data, "labels": labels.tolist()}, protocol=2)
        (folder / name).write_bytes(text.replace(b"numpy._core", b"numpy.core"))
    meta = {"label_names": [str(label) for label in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    (work / "sitecustomize.py").write_text(
        "import os\nimport torchvision.datasets.cifar as cifar\n"
        "cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)\n"
    )


def library(source, work):
    """PopTorch Geometric of PopTorch's repository, which is on no package index."""
    poptorch = source.parent / "poptorch"
    git = ("git", "-C", str(poptorch))
    commit = "c2a8b17762f1d7106f7bf048ff011ab4fee7685e"
    if not poptorch.exists():
        subprocess.run(["git", "init", "--quiet", str(poptorch)], check=True)
        repository = "https://github.com/graphcore/poptorch"
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", repository, commit], check=True)
        subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)
    (work / "poptorch_geometric").symlink_to(poptorch / "poptorch_geometric" / "python")


def facts(source, work):
    """The folder of data sets that the network of facts looks into."""
    (source / "gnn/nbfnet/pytorch_geometric/data").symlink_to(work)


def named_facts(source, work):
    """The names of entities that the notebook has a list of."""
    names = source / "gnn/nbfnet/pytorch_geometric/static/fb15k-237_entitymapping.txt"
    (work / "names.txt").symlink_to(names)


def transactions(source, work):
    """Transactions by cards, and who made them; of those for the test no one knows the fraud."""
    rng = np.random.default_rng(0)
    library(source, work)
    raw = work / "ieee-fraud-detection" / "raw"
    raw.mkdir(parents=True)
    domains = ("P_emaildomain", "R_emaildomain")
    chosen = {
        **dict.fromkeys((f"card{n}" for n in range(1, 7)), 40),
        **{"ProductCD": 5, "addr1": 30, "addr2": 4, **dict.fromkeys(domains, 12)},
        **{f"M{n}": 2 for n in range(1, 10)},
    }
    of_identity = {"DeviceType": 2, "DeviceInfo": 9, **{f"id_{n}": 3 for n in range(12, 39)}}
    first = 0
    for part, rows in (("train", 1500), ("test", 200)):
        numbers = {"TransactionID": np.arange(first, first + rows)}
        transaction = {**numbers, "TransactionDT": np.arange(rows) + first}
        if part == "train":
            transaction["isFraud"] = (rng.random(rows) < 0.2).astype(int)
        transaction["TransactionAmt"] = rng.random(rows) * 100 + 1
        transaction.update({f"C{n}": rng.random(rows) for n in range(1, 15)})
        tables = {"transaction": (transaction, chosen), "identity": (numbers, of_identity)}
        for table, (columns, kinds) in tables.items():
            drawn = {name: rng.integers(0, count, rows) for name, count in kinds.items()}
            columns = {**columns, **drawn}
            values = np.stack(list(columns.values()), 1)
            np.savetxt(
                raw / f"{part}_{table}.csv",
                values,
                "%g",
                delimiter=",",
                header=",".join(columns),
                comments="",
            )
        first += rows


def no_training(folder, config, shapes, **files):
    """A model in a folder that has a few random weights; transformers draws the others."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    torch.save(weights, str(folder / "pytorch_model.bin"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def chests(source, work):
    """Pictures of chests with findings, a small model of pictures, and a metric, in folders."""
    rng = np.random.default_rng(0)
    images = work / "chest-xray-nihcc" / "images"
    images.mkdir(parents=True)
    rows = ["Image Index,Finding Labels"]
    for number in range(200):
        pixels = rng.integers(0, 255, 32 * 32).astype(np.uint8)
        (images / f"{number:08}.pgm").write_bytes(b"P5 32 32 255\n" + pixels.tobytes())
        rows.append(f"{number:08}.pgm,{('Mass', 'Edema', 'Mass|Edema', 'No Finding')[number % 4]}")
    (images.parent / "Data_Entry_2017_v2020.csv").write_text("\n".join(rows))
    here = source / TUTORIAL / "pytorch/vit_model_training"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    no_training(
        here / "google/vit-base-patch16-224-in21k",
        {"model_type": "vit", "num_hidden_layers": 4, "image_size": 32, "patch_size": 8, **small},
        # What is all zeros has no gradient through a layer norm in half precision.
        {"embeddings.cls_token": (1, 1, 32), "embeddings.position_embeddings": (1, 17, 32)},
        preprocessor_config={
            **{"feature_extractor_type": "ViTFeatureExtractor", "size": 32},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
    )
    ipus = {"layers_per_ipu": [2, 2], "ipus_per_replica": 2, "gradient_accumulation_steps": 4}
    no_training(here / "Graphcore/vit-base-ipu", {}, {}, ipu_config=ipus)
    # optimum 1.3 joins the name of a folder with that of the file in it, which has the folder's.
    (here / "Graphcore/vit-base-ipu/Graphcore").symlink_to(here / "Graphcore")
    (here / "roc_auc").mkdir()
    (here / "roc_auc/roc_auc.py").write_text(
        "import datasets\n"
        "class Area(datasets.Metric):\n"
        "    def _info(self):\n"
        "        numbers = datasets.Sequence(datasets.Value('float'))\n"
        "        features = {'prediction_scores': numbers, 'references': numbers}\n"
        "        return datasets.MetricInfo('', '', datasets.Features(features))\n"
        "    def _compute(self, prediction_scores, references, **options):\n"
        "        return {'roc_auc': 0.5}\n"
    )


def answers(source, work):
    """Questions with answers, and a small BERT, in folders with the names of the hub."""
    here = source / TUTORIAL / "pytorch/finetuning_bert"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", "where", "is", "the", "here"]
    words += [f"word{number}" for number in range(90)]
    (here / "bert-base-uncased").mkdir()
    (here / "bert-base-uncased/vocab.txt").write_text("\n".join(words))
    no_training(here / "Graphcore/bert-large-uncased", {"model_type": "bert"}, {})
    (here / "squad").mkdir()
    for part, count in (("train", 10100), ("validation", 20)):
        with (here / f"squad/{part}.json").open("w") as file:
            for number in range(count):
                word = words[10 + number % 90]
                answer = {"text": [word], "answer_start": [len("here is the ")]}
                row = {"id": str(number), "title": word, "context": f"here is the {word}"}
                row.update({"question": f"where is the {word}?", "answers": answer})
                file.write(json.dumps(row) + "\n")
    (work / "sitecustomize.py").write_text(
        "import transformers\n"
        "make = transformers.BertConfig.__init__\n"
        "small = {'hidden_size': 32, 'intermediate_size': 64, 'num_attention_heads': 2}\n"
        "def changed(self, **options): make(self, **{**options, **small})\n"
        "transformers.BertConfig.__init__ = changed\n"
    )


def no_weights(source, work):
    """A module that has torchvision take random weights for those of a download."""
    (work / "sitecustomize.py").write_text(
        "import torchvision.models as models\n"
        "models.WeightsEnum.get_state_dict = lambda weights, **_: (\n"
        "    models.get_model(weights.__class__.__name__.partition('_W')[0].lower()).state_dict()\n"
        ")\n"
    )


TUTORIAL = "tutorials/tutorials/"
MEMORY = "tutorials/tech_notes_code/available_memory/"
FRAUD = "gnn/fraud_detection/pytorch_geometric/"
FEATURE = "tutorials/feature_examples/pytorch/"
HOME = {"HOME": "{work}"}
OFFLINE = {**HOME, "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
UTILITIES = {**HOME, "PYTHONPATH": "{work}:{source}/tutorials/utils"}


def of_graphs(path, *names, environment="graphs", **rest):
    """A program on made-up graphs of these names."""
    return Program(
        path,
        TRAINS,
        prepare=library,
        graphs=names,
        adaptation="random graphs",
        variables={"DATASETS_DIR": "{work}", "PYTHONPATH": "{work}"},
        environment=environment,
        **rest,
    )


def on_pictures(path, result=TRAINS, prepare=pictures, **rest):
    """A program on made-up pictures."""
    variables = {**HOME, **rest.pop("variables", {})}
    adaptation = rest.pop("adaptation", "random pictures")
    return Program(
        path, result, prepare=prepare, variables=variables, adaptation=adaptation, **rest
    )


NO_DOWNLOAD = "a published model or data set is downloaded"
NO_POPLAR = "C++ code for IPUs, which only the Poplar SDK compiles"
NO_PROFILE = "libpva reads profiles that the Poplar SDK writes"

PROGRAMS = (
    on_pictures("tutorials/simple_applications/pytorch/mnist/mnist_poptorch.py"),
    on_pictures("tutorials/simple_applications/pytorch/mnist/mnist_poptorch_code_only.py"),
    on_pictures(TUTORIAL + "pytorch/basics/walkthrough_code_only.py"),
    on_pictures(TUTORIAL + "pytorch/mixed_precision/walkthrough_code_only.py"),
    on_pictures(TUTORIAL + "pytorch/pipelining/mnist_pipeline.py"),
    Program(
        TUTORIAL + "pytorch/pipelining/walkthrough_code_only.py",
        RUNS,
        "outside a notebook, it only names mnist_pipeline.py and ends",
    ),
    Program(TUTORIAL + "pytorch/efficient_data_loading/tuto_data_loading.py", TRAINS),
    Program(
        TUTORIAL + "pytorch/efficient_data_loading/walkthrough_code_only.py",
        RUNS,
        "outside a notebook, it only names tuto_data_loading.py and ends",
    ),
    on_pictures(TUTORIAL + "pytorch/observing_tensors/anchor_tensor_example.py"),
    on_pictures(TUTORIAL + "popvision/reading_pvti_files/poptorch_mnist.py"),
    on_pictures(TUTORIAL + "popvision/system_analyser_instrumentation/poptorch_mnist.py"),
    on_pictures(TUTORIAL + "popvision/system_analyser_instrumentation/poptorch_mnist_complete.py"),
    Program(
        TUTORIAL + "popvision/reading_pvti_files/walkthrough_code_only.py",
        OUT_OF_REACH,
        "libpvti reads files that PopVision's own library writes",
    ),
    Program(TUTORIAL + "popvision/libpva/walkthrough_code_only.py", OUT_OF_REACH, NO_PROFILE),
    Program(
        TUTORIAL + "popvision/lightweight_profiling/tests/test_lightweight_profiling.py",
        OUT_OF_REACH,
        NO_POPLAR,
    ),
    on_pictures(
        FEATURE + "custom_op/poptorch_custom_op.py",
        prepare=compiled_operator,
        adaptation="random pictures; an empty library in place of the compiled operator",
    ),
    Program(
        FEATURE + "custom_op/leaky_relu_example/run_leaky_relu.py",
        OUT_OF_REACH,
        "needs PopART, which comes with the Poplar SDK",
    ),
    Program(FEATURE + "custom_op/cube_op_example/tests/test_cube_op.py", OUT_OF_REACH, NO_POPLAR),
    on_pictures(
        FEATURE + "octconv/octconv_example.py",
        arguments="--epochs 1 --data-dir {work}/.torch/datasets",
        prepare=cifar,
        variables={"PYTHONPATH": "{work}"},
    ),
    Program(
        FEATURE + "octconv/test_octconv.py",
        PASSES,
        arguments="-k not(test_smoke)and(not(test_profiling))",
        adaptation="without the cases that download CIFAR-10",
        variables=UTILITIES,
    ),
    on_pictures(
        FEATURE + "popdist/popdist_training.py",
        arguments="--epochs 1 --num-replicas 2 --dataloader-workers 1",
        prepare=cifar,
        variables={"PYTHONPATH": "{work}"},
    ),
    Program(
        FEATURE + "popdist/tests/test_popdist_training.py",
        OUT_OF_REACH,
        "needs poprun, which comes with the Poplar SDK",
    ),
    Program(
        MEMORY + "pytorch_demo.py",
        RUNS,
        "inference only; stopped after three of 3,000 executions",
        adaptation="random weights",
        prepare=no_weights,
        variables={"PYTHONPATH": "{work}"},
        calls=3,
    ),
    Program(
        MEMORY + "tests/pytorch/test_all.py",
        OUT_OF_REACH,
        "they expect an IPU to run out of memory",
    ),
    Program(
        TUTORIAL + "pytorch/finetuning_bert/Fine-tuning-BERT.py",
        TRAINS,
        adaptation="random questions; 24 layers of 32 features instead of 1024; a later "
        "transformers, 4.20.1",
        prepare=answers,
        variables={**OFFLINE, "PYTHONPATH": "{work}"},
        environment="transformers",
        seconds=2400,
    ),
    Program(
        TUTORIAL + "pytorch/vit_model_training/walkthrough_code_only.py",
        TRAINS,
        adaptation="random pictures; a small model and a metric in local folders",
        prepare=chests,
        variables={**OFFLINE, "DATASETS_DIR": "{work}"},
        environment="transformers",
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/1_at_a_glance/1_at_a_glance_code_only.py",
        *("Cora", "MUTAG", "self_loops/MUTAG"),
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/2_a_worked_example/2_a_worked_example_code_only.py", "Cora"
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/3_small_graph_batching_with_padding/"
        "3_small_graph_batching_with_padding_code_only.py",
        "QM9",
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/4_small_graph_batching_with_packing/"
        "4_small_graph_batching_with_packing_code_only.py",
        "TUDataset/MUTAG",
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/5_large_graph_sampling/5_large_graph_sampling_code_only.py",
        "PubMed",
        environment="compiled",
    ),
    of_graphs(
        TUTORIAL + "pytorch_geometric/6_heterogeneous_graphs/6_heterogeneous_graphs_code_only.py",
        "IMDB",
        environment="compiled",
    ),
    of_graphs(
        "gnn/message_passing/pytorch_geometric/molecular_property_prediction_with_gin_code_only.py",
        "TUDataset/NCI1",
    ),
    Program(
        "gnn/tgn/pytorch/test/test_tgn.py", PASSES, folder="gnn/tgn/pytorch", environment="compiled"
    ),
    Program(
        "gnn/tgn/pytorch/test/test_buffer.py",
        PASSES,
        folder="gnn/tgn/pytorch",
        environment="graphs",
    ),
    of_graphs(
        "gnn/tgn/pytorch/train.py",
        "wikipedia",
        arguments="--data {work} --epochs 3",
        environment="compiled",
    ),
    of_graphs(
        "gnn/tgn/pytorch/Train_TGN.ipynb",
        "JODIE",
        environment="compiled",
    ),
    of_graphs(
        "gnn/schnet/pytorch_geometric/molecular_property_prediction_with_schnet_code_only.py",
        "qm9/all",
        seconds=2400,
    ),
    of_graphs(
        "gnn/cluster_gcn/pytorch_geometric/node_classification_with_cluster_gcn_code_only.py",
        "Reddit",
        environment="compiled",
        seconds=1200,
    ),
    Program(
        "gnn/nbfnet/pytorch_geometric/run_nbfnet.py",
        TRAINS,
        arguments="--c configs/IndFB15k-237_v1.yaml",
        prepare=facts,
        graphs=("FB15k-237",),
        environment="compiled",
    ),
    Program(
        "gnn/nbfnet/pytorch_geometric/NBFNet_training.ipynb",
        TRAINS,
        adaptation="random facts; run to its end",
        prepare=named_facts,
        graphs=("FB15k-237",),
        variables={"DATASETS_DIR": "{work}"},
        environment="compiled",
        updates=1000,
        seconds=1200,
    ),
    Program(
        "gnn/nbfnet/pytorch_geometric/tests/test_utils.py",
        PASSES,
        folder="gnn/nbfnet/pytorch_geometric",
        environment="graphs",
    ),
    Program(
        FRAUD + "test/test_loss.py",
        PASSES,
        folder=FRAUD,
        environment="graphs",
    ),
    Program(
        FRAUD + "1_dataset_preprocessing.ipynb",
        RUNS,
        adaptation="random transactions",
        prepare=transactions,
        variables={"DATASETS_DIR": "{work}"},
        environment="compiled",
    ),
    Program(
        FRAUD + "2_training.ipynb",
        TRAINS,
        adaptation="random transactions",
        prepare=transactions,
        variables={"DATASETS_DIR": "{work}", "PYTHONPATH": "{work}"},
        environment="compiled",
    ),
)
