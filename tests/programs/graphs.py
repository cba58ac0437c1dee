"""``python graphs.py FOLDER NAME ...``: made-up graphs, in files that PyTorch Geometric reads.

It runs with the Python of a program that needs them.
"""

import os
import pickle
import sys

import numpy as np
import scipy.sparse
import torch

RANDOM = np.random.default_rng(0)


def folder(*parts):
    """A folder that is there."""
    path = os.path.join(*parts)
    os.makedirs(path, exist_ok=True)
    return path


def planetoid(place, name, classes, features):
    """A citation graph of Planetoid; its first nodes have labels for training."""
    labelled, rest, test = classes * 20, 600, 200
    nodes = labelled + rest + test
    labels = RANDOM.integers(0, classes, nodes)
    labels[:labelled] = np.arange(labelled) % classes
    x = (RANDOM.random((nodes, features)) < 0.02).astype(np.float32)
    x[np.arange(nodes), labels * 10] = 1
    hot = np.eye(classes, dtype=np.int32)[labels]
    graph = {node: [] for node in range(nodes)}
    for node in range(nodes):
        for other in RANDOM.integers(0, nodes, 3).tolist():
            graph[node].append(other)
            graph[other].append(node)
    rows = scipy.sparse.csr_matrix
    files = {
        **{"x": rows(x[:labelled]), "y": hot[:labelled]},
        **{"allx": rows(x[:-test]), "ally": hot[:-test]},
        **{"tx": rows(x[-test:]), "ty": hot[-test:], "graph": graph},
    }
    path = os.path.join(folder(place, name, "raw"), f"ind.{name.lower()}.")
    for key, value in files.items():
        with open(path + key, "wb") as file:
            pickle.dump(value, file)
    np.savetxt(path + "test.index", np.arange(nodes - test, nodes), "%d")


def molecules(place, name, graphs, atoms, bonds=0):
    """Molecules of the TU collection, of two classes."""
    edges, kinds, graph_of, counts = [], [], [], RANDOM.integers(10, 28, graphs)
    for number, count in enumerate(counts.tolist()):
        first = len(graph_of) + 1
        graph_of += [number + 1] * count
        for node in range(count):
            for other in {(node + 1) % count, int(RANDOM.integers(0, count))} - {node}:
                pair = (first + node, first + other)
                edges += [pair, pair[::-1]]
                kinds += [int(RANDOM.integers(0, max(bonds, 1)))] * 2
    path = os.path.join(folder(place, name, "raw"), name)
    np.savetxt(path + "_A.txt", edges, "%d", delimiter=", ")
    np.savetxt(path + "_graph_indicator.txt", graph_of, "%d")
    np.savetxt(path + "_graph_labels.txt", np.arange(graphs) % 2 * 2 - 1, "%d")
    np.savetxt(path + "_node_labels.txt", RANDOM.integers(0, atoms, len(graph_of)), "%d")
    if bonds:
        np.savetxt(path + "_edge_labels.txt", kinds, "%d")


def qm9(place, graphs):
    """Molecules of QM9, in the form that is read without RDKit; 50 of them, again and again."""
    some = []
    for number in range(50):
        # The one that PopTorch Geometric's tests name has the name and atoms of the largest in QM9.
        count = 29 if number == 17 else int(RANDOM.integers(5, 29))
        chain = torch.arange(count - 1)
        molecule = {
            "x": torch.rand(count, 11),
            "z": torch.tensor(RANDOM.choice([1, 6, 7, 8, 9], count)),
            "pos": torch.randn(count, 3) * 2,
            "edge_index": torch.stack(
                [torch.cat([chain, chain + 1]), torch.cat([chain + 1, chain])]
            ),
            "edge_attr": torch.eye(4)[torch.randint(0, 4, (2 * count - 2,))],
            "y": torch.randn(1, 19),
            **{"name": f"gdb_{57501 + number}", "idx": torch.tensor([number])},
        }
        some.append(molecule)
    torch.save(
        [some[number % 50] for number in range(graphs)],
        os.path.join(folder(place, "raw"), "qm9_v3.pt"),
    )


def imdb(place, films=1200, directors=200, actors=400):
    """Films, directors and actors, each film with one director and three actors."""
    path = folder(place, "raw")
    for number, count in enumerate((films, directors, actors)):
        features = scipy.sparse.csr_matrix((RANDOM.random((count, 64)) < 0.1).astype(np.float32))
        scipy.sparse.save_npz(os.path.join(path, f"features_{number}.npz"), features)
    np.save(os.path.join(path, "labels.npy"), RANDOM.integers(0, 3, films))
    third = np.split(RANDOM.permutation(films), 3)
    indices = {f"{part}_idx": rows for part, rows in zip(("train", "val", "test"), third)}
    np.savez(os.path.join(path, "train_val_test_idx.npz"), **indices)
    graph = scipy.sparse.lil_matrix((films + directors + actors,) * 2)
    for film in range(films):
        others = [films + RANDOM.integers(directors), *films + directors + RANDOM.choice(actors, 3)]
        for other in others:
            graph[film, other] = graph[other, film] = 1
    scipy.sparse.save_npz(os.path.join(path, "adjM.npz"), graph.tocsr())


def reddit(place, nodes=3000):
    """Posts of five communities."""
    path = folder(place, "raw")
    np.savez(
        os.path.join(path, "reddit_data.npz"),
        feature=RANDOM.normal(size=(nodes, 32)).astype(np.float32),
        label=RANDOM.integers(0, 5, nodes),
        # Each batch of a few has nodes for training.
        node_types=RANDOM.choice([1, 2, 3], nodes, p=[0.9, 0.05, 0.05]),
    )
    ends = RANDOM.integers(0, nodes, (2, 6000))
    both = (np.concatenate(ends), np.concatenate(ends[::-1]))
    graph = scipy.sparse.coo_matrix((np.ones(12000), both), shape=(nodes, nodes))
    scipy.sparse.save_npz(os.path.join(path, "reddit_graph.npz"), graph)


def wikipedia(place, edits=800):
    """Edits of pages of JODIE, whose first has the last user and page; few others edit again."""
    path = os.path.join(folder(place, "wikipedia", "raw"), "wikipedia.csv")
    users, pages = RANDOM.integers(0, 200, edits), RANDOM.integers(0, 100, edits)
    users[0], pages[0] = 8226, 999
    reverted = RANDOM.integers(0, 2, edits)
    columns = [users, pages, np.arange(edits), reverted, *RANDOM.random((172, edits))]
    formats = ["%d"] * 4 + ["%.3f"] * 172
    np.savetxt(path, np.stack(columns, 1), formats, delimiter=",", header="made up", comments="")


def facts(place, relations=237):
    """Facts of FB15k-237, and of two versions that know other entities in training than later."""
    names = [f"e{number}" for number in range(200)]
    if os.path.exists(os.path.join(place, "names.txt")):  # a file that has names of entities
        with open(os.path.join(place, "names.txt")) as file:
            names = [line.partition("\t")[0] for line in file]
    parts = (("train.txt", 800, 200), ("valid.txt", 64, 200), ("test.txt", 64, 200))
    later = (("train_ind.txt", 400, 100), ("test_ind.txt", 64, 100))
    for version in ("", "v1", "v4"):
        path = folder(place, "FB15k-237", version, "raw")
        kinds = {"entities": names, "relations": [f"r{number}" for number in range(relations)]}
        for kind, rows in kinds.items():
            with open(os.path.join(path, f"{kind}.dict"), "w") as file:
                file.writelines(f"{number}\t{name}\n" for number, name in enumerate(rows))
        for name, count, entities in (*parts, *later):
            with open(os.path.join(path, name), "w") as file:
                for number in range(count):
                    relation, tail = RANDOM.integers(relations), RANDOM.integers(entities)
                    file.write(f"{names[number % entities]}\tr{relation}\t{names[tail]}\n")


def clusters(place, count, dataset):
    """A partition into clusters without regard to edges, where METIS is not at hand."""
    from torch_geometric.loader import ClusterData

    data = dataset[0]
    maker = ClusterData.__new__(ClusterData)
    maker.num_parts = count
    partition = maker._partition(data.edge_index, torch.arange(data.num_nodes) % count)
    torch.save(partition, os.path.join(place, f"metis_{count}.pt"))


def pubmed(place):
    """PubMed and a partition of it, as it is with a loop at each node."""
    from torch_geometric.datasets import Planetoid
    from torch_geometric.transforms import AddSelfLoops

    planetoid(place, "PubMed", 3, 500)
    clusters(place, 100, Planetoid(place, "PubMed", transform=AddSelfLoops()))


def posts(place):
    """Reddit and a partition of it."""
    from torch_geometric.datasets import Reddit

    reddit(place)
    clusters(place, 1500, Reddit(place))


WRITERS = {
    "Cora": lambda place: planetoid(place, "Cora", 7, 1433),
    "PubMed": pubmed,
    "MUTAG": lambda place: molecules(place, "MUTAG", 188, 7, bonds=4),
    "self_loops/MUTAG": lambda place: molecules(f"{place}/self_loops", "MUTAG", 188, 7, bonds=4),
    "TUDataset/MUTAG": lambda place: molecules(f"{place}/TUDataset", "MUTAG", 188, 7, bonds=4),
    "TUDataset/NCI1": lambda place: molecules(f"{place}/TUDataset", "NCI1", 4110, 37),
    "QM9": lambda place: qm9(place, 300),
    "qm9/all": lambda place: qm9(f"{place}/qm9", 130831),
    "planetoid/Cora": lambda place: planetoid(f"{place}/planetoid", "Cora", 7, 1433),
    "IMDB": lambda place: imdb(f"{place}/IMDB"),
    "Reddit": lambda place: posts(f"{place}/Reddit"),
    "wikipedia": wikipedia,
    "JODIE": lambda place: wikipedia(f"{place}/JODIE", 12500),
    "FB15k-237": facts,
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        WRITERS[name](sys.argv[1])
