"""LightningModules as users write them, in float64."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.lightning.twins import pl, rows


class Boring(pl.LightningModule):
    """As in Lightning's own tests: dicts as results, two lists, its own loaders."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(32, 2).double()

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, batch_idx):
        return {"loss": F.mse_loss(self(batch), torch.ones(len(batch), 2).double())}

    def validation_step(self, batch, batch_idx):
        return {"x": F.mse_loss(self(batch), torch.ones(len(batch), 2).double())}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(rows(64, 32)[0], batch_size=4)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(rows(16, 32, seed=1)[0], batch_size=4)


class Pictures(pl.LightningModule):
    """A convolutional net with BatchNorm, a schedule per step, and several logged values."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(2)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).double()

    def training_step(self, batch):
        inputs, target = batch
        loss = F.cross_entropy(self.net(inputs.unflatten(1, (1, 4, 4))), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        inputs, target = batch
        loss = F.cross_entropy(self.net(inputs.unflatten(1, (1, 4, 4))), target)
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp()}, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Language(pl.LightningModule):
    """A small transformer on dict batches, with parameter groups and a warm-up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(17, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 17)
        self.double()

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
        return self.head(self.layers(self.embedding(tokens), mask=mask))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["next"].flatten())
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "tokens": batch["tokens"]}

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        warm_up = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return [optimizer], [{"scheduler": warm_up, "interval": "step", "name": "warm-up"}]


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, 17, (count, 9), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index, :-1], "next": self.tokens[index, 1:]}
