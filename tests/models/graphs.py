"""Models of PyTorch Geometric on mini-batches of graphs."""

import torch
from torch import nn

from tests.models.model import ITSELF, Model, Own

TITLE, PACKAGES = "PyTorch Geometric", ("torch_geometric",)
WHY = "each batch is an object with another number of nodes"


def graphs():
    """Batches of three graphs of several sizes, and one of two."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    generator = torch.Generator().manual_seed(7)
    data = [
        Data(
            x=torch.randn(nodes, 6, generator=generator),
            edge_index=torch.randint(0, nodes, (2, 3 * nodes), generator=generator),
            y=torch.tensor([nodes % 3]),
        )
        for nodes in (5, 7, 4, 6, 8, 5, 9, 6)
    ]
    return list(DataLoader(data, batch_size=3))


def of_graphs(model, data):
    """Classes of graphs, from means over the nodes."""
    from torch_geometric.nn import global_mean_pool

    output = global_mean_pool(model(data.x, data.edge_index), data.batch)
    return output, nn.functional.cross_entropy(output, data.y)


def named(name, call=of_graphs, **options):
    """A model of the library."""

    def make():
        import torch_geometric.nn

        return Own(getattr(torch_geometric.nn, name)(6, 8, 2, 3, **options), call)

    return Model(name, make, graphs, way=ITSELF, why=WHY)


class Pooled(nn.Module):
    """Keeps the nodes with the highest scores."""

    def __init__(self):
        from torch_geometric.nn import GraphConv, TopKPooling

        super().__init__()
        self.first, self.pool, self.last = GraphConv(6, 8), TopKPooling(8, 0.6), GraphConv(8, 3)

    def forward(self, data):
        from torch_geometric.nn import global_mean_pool

        x = self.first(data.x, data.edge_index).relu()
        x, edges, _, batch, _, _ = self.pool(x, data.edge_index, None, data.batch)
        return global_mean_pool(self.last(x, edges), batch)


class Attentive(nn.Module):
    """Attention over neighbours as in a transformer."""

    def __init__(self):
        from torch_geometric.nn import TransformerConv

        super().__init__()
        self.first = TransformerConv(6, 4, heads=2, dropout=0.1)
        self.last = TransformerConv(8, 3)

    def forward(self, data):
        from torch_geometric.nn import global_mean_pool

        x = self.last(self.first(data.x, data.edge_index).relu(), data.edge_index)
        return global_mean_pool(x, data.batch)


def classified(model, data):
    """Classes of graphs, from what the model returns."""
    output = model(data)
    return output, nn.functional.cross_entropy(output, data.y)


MODELS = (
    named("GCN", dropout=0.2),
    named("GraphSAGE"),
    named("GAT", heads=1),
    named("GIN"),
    named("EdgeCNN"),
    Model("TopKPooling", lambda: Own(Pooled(), classified), graphs, way=ITSELF, why=WHY),
    Model("TransformerConv", lambda: Own(Attentive(), classified), graphs, way=ITSELF, why=WHY),
)
