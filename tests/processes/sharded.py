"""What a process runs of which each has a part of the optimizer's state; see test_sharded.py.

Arguments: a folder, and names of functions here. Each compares with a fit that is not sharded. With
"weights" these lie in parts too; with "briefly" fewer nets and settings are tried; with "buckets"
gradients go in small ones.
"""

import dataclasses
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune

import ipufit
from ipufit.callbacks import Callback, LambdaCallback
from ipufit.engines.embedded import overlapped_reduction
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import ConfigurationError, NonFiniteLossError, ProcessError
from ipufit.processes import current

FOLDER = sys.argv[1]
WEIGHTS = "weights" in sys.argv[2:]  # whether these lie in parts too
BRIEFLY = "briefly" in sys.argv[2:]
US = current()
# Of a process; a power of two, and in all as many where one process goes on for two.
IPUS = 4 // US.num_processes or 1
ODD = 95  # parameters, which neither 2 nor 3 processes share evenly


def net():
    """Weights of process 0 are those of all, so they differ at first."""
    torch.manual_seed(US.process_id)
    found = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
    assert sum(p.numel() for p in found.parameters()) == ODD
    if US.is_rank_zero:
        torch.manual_seed(11)
        for parameter in found.parameters():
            nn.init.normal_(parameter, std=0.3)
    return found


def data(samples=61):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 8, generator=generator)
    return x, torch.randint(0, 4, (samples,), generator=generator)


def compiled(shards, optimizer="adam", engine="embedded", **options):
    """A model; an optimizer's settings may be given as a dict."""
    model = ipufit.Model(net(), engine=engine)
    if isinstance(optimizer, tuple):
        kind, settings = optimizer
        optimizer = lambda parameters: kind(parameters, **settings)  # noqa: E731
    options = {"loss": "cross_entropy", **options}
    memory = options.pop("memory", ipufit.Memory())
    if shards:
        memory = dataclasses.replace(memory, shard="weights" if WEIGHTS else "optimizer")
    model.compile(optimizer, memory=memory, **options)
    return model


def fit(model, epochs=2, **options):
    options = {"gradient_accumulation": 1, "device_iterations": 2, **options}
    # 61 samples leave an update that is not full.
    given = options.pop("given", None) or data(64 if BRIEFLY else 61)
    model.fit(*given, batch_size=2, epochs=epochs, ipus=IPUS, seed=3, verbose=0, **options)


def weights(model):
    return torch.cat([t.detach().flatten() for t in model.module.parameters()])


def same(model, other, what):
    """Up to the order of sums, and of the same bits in every process."""
    own = weights(model)
    torch.testing.assert_close(own, weights(other), rtol=1e-10, atol=1e-10, msg=what)
    assert not own.isnan().any(), what
    assert all(own.equal(each) for each in US.gather(own)), what


def state_of(optimizer):
    """By place of the parameter."""
    return optimizer.state_dict()["state"]


def same_state(optimizer, other, what):
    mine, theirs = state_of(optimizer), state_of(other)
    # Without momentum SGD has none.
    assert mine or what == "sgd", what
    assert mine.keys() == theirs.keys(), what
    for place in mine:
        assert mine[place].keys() == theirs[place].keys(), what
        for name in mine[place]:
            a, b = (torch.as_tensor(each[place][name]) for each in (mine, theirs))
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (what, name)
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=f"{what} {name}")
            assert type(mine[place][name]) is type(theirs[place][name])


def groups(parameters):
    first, second, *rest = parameters
    alike = [{"params": [first, second]}, {"params": rest, "lr": 0.02, "weight_decay": 0.01}]
    return torch.optim.Adam(alike, lr=0.05)


OPTIMIZERS = {
    "sgd": {"optimizer": (torch.optim.SGD, {"lr": 0.1})},
    "momentum": {"optimizer": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1})},
    "adam": {"optimizer": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.01})},
    "amsgrad": {"optimizer": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True})},
    "centered": {
        "optimizer": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5})
    },
    "lamb": {"optimizer": (ipufit.optim.LAMB, {"lr": 0.05})},
    "groups": {"optimizer": groups},
}
OTHERS = {
    "global norm": {"clip": ipufit.Clip(global_norm=0.1)},
    "norm": {"clip": ipufit.Clip(norm=0.05)},
    "value": {"clip": ipufit.Clip(value=0.003)},
    "norm of lamb": {"optimizer": "lamb", "clip": ipufit.Clip(norm=0.05)},
    "schedule": {"lr_scheduler": lambda update: 0.05 / (1 + update)},
    "momentum through zero": {
        "optimizer": (torch.optim.SGD, {"lr": 0.1, "dampening": 0.1}),
        "lr_scheduler": {"momentum": lambda update: 0.9 if update // 3 % 2 else 0.0},
    },
    "ema": {"ema": ipufit.EMA(overwrite_frequency=3)},
    "eager": {"run_eagerly": True},
    "scaled": {"precision": ipufit.Precision(loss_scale=8.0)},
    "wide": {"precision": ipufit.Precision(accumulation_dtype="float64"), "optimizer": "lamb"},
    "sum": {"reduction": ipufit.Reduction(gradients="sum"), "optimizer": ("sgd")},
}


# The norm of all, that of one, and averages; those of one part differ from those of the whole.
SOME_OTHERS = ("global norm", "norm of lamb", "momentum through zero", "ema")


def optimizers():
    """Each rule, in three fits, between which a layer is frozen and trained again."""
    for name, options in OPTIMIZERS.items():
        models = [compiled(shards, **options) for shards in (True, False)]
        for frozen in (False, True, False):
            for model in models:
                model.module[0].weight.requires_grad_(not frozen)
                fit(model)
            same(*models, name)
            assert not any(state_of(models[0].optimizer).values()), name
        sharded, whole = models
        held = sharded._session.engine.carried.state_parts
        assert sharded.gather_optimizer() is sharded.optimizer
        assert whole.gather_optimizer() is whole.optimizer
        same_state(sharded.optimizer, whole.optimizer, name)
        # What was gathered goes on, and is let go of.
        for model in models:
            fit(model)
        same(*models, f"{name} after it was gathered")
        assert not any(state_of(sharded.optimizer).values()), name
        counts = US.gather(sum(t.numel() for p in held._parts.values() for t in p.tensors.values()))
        kept = sum(t.numel() for p in state_of(whole.optimizer).values() for t in tensors(p))
        assert sum(counts) == kept, name


def tensors(state):
    return [t for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]


def others():
    """What else happens to a gradient or a weight, and the same where the host looks late."""
    for name, options in OTHERS.items():
        if (WEIGHTS and name in ("ema", "eager")) or (BRIEFLY and name not in SOME_OTHERS):
            continue
        models = [compiled(shards, **options) for shards in (True, False)]
        for model in models:
            fit(model)
        same(*models, name)
    late_ones = {"late norm": {"clip": ipufit.Clip(global_norm=0.1)}}
    for name, options in (late_ones if BRIEFLY else {"late": {}, **late_ones}).items():
        models = [compiled(each, engine=late, **options) for each in (True, False)]
        for model in models:
            fit(model)

        same(*models, name)
    models = [
        compiled(each, engine=late, memory=ipufit.Memory(offload_optimizer=True))
        for each in (True, False)
    ]
    for model in models:
        for _ in range(1 if BRIEFLY else 2):
            fit(model)
    same(*models, "offloaded")
    models[0].gather_optimizer()
    same_state(models[0].optimizer, models[1].optimizer, "offloaded")


def late():
    engine = EmbeddedEngine()
    engine.as_device = True
    return engine


def skips():
    """Updates that are skipped, or taken back, leave the state as it was."""
    x, y = data()
    spoilt = x.clone()
    spoilt[30] = 1e200
    for engine in ("embedded", late):
        scale = {
            "precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**1015, 4)),
            "engine": engine,
        }
        models = [compiled(each, **scale, loss="mse") for each in (True, False)]
        target = 1e4 * torch.randn(61, 4, generator=torch.Generator().manual_seed(2))
        for model in models:
            fit(model, given=(x, target), epochs=3)
        skipped = [model.history.history["skipped_updates"] for model in models]
        assert skipped[0] == skipped[1]
        assert sum(skipped[0]) > 1
        same(*models, "skipped")
        spoilt[30] = float("nan")
        models = [compiled(each, engine=engine) for each in (True, False)]
        for model in models:
            fit(model)
            with pytest.raises(NonFiniteLossError):
                fit(model, given=(spoilt, y))
            fit(model)
        same(*models, "not finite")


class Halves(Callback):
    """Changes the optimizer's state at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        for own in self.model.gather_optimizer().state.values():
            own["exp_avg"].mul_(0.5)


class Freezes(Callback):
    """Leaves the first parameter out of the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        next(self.model.module.parameters()).requires_grad_(epoch != 0)


class Prunes(Callback):
    """Replaces a weight by what is left of it, twice."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch < 2:
            prune.l1_unstructured(self.model.gather_weights()[0], "weight", amount=0.3)


class Looks(Callback):
    """Gathers in the middle of everything, and remembers what it saw."""

    def __init__(self):
        super().__init__()
        self.seen, self.held = [], []

    def on_train_batch_end(self, batch, logs=None):
        program = self.model._session._training
        self.held.append([t.numel() for t in program.state.updater.state_tensors()])
        assert not any(self.model.optimizer.state_dict()["state"].values()) or batch % 2
        state = self.model.gather_optimizer().state_dict()["state"]
        self.seen.append({place: own["exp_avg"].clone() for place, own in state.items()})


def callbacks():
    """State that callbacks ask for or change; how much a process holds of it."""
    models = [compiled(shards) for shards in (True, False)]
    for model in models:
        fit(model, epochs=3, callbacks=[Halves()])
    same(*models, "halved")
    for optimizer in ("adam", (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
        models = [compiled(shards, optimizer) for shards in (True, False)]
        for model in models:
            fit(model, epochs=4, callbacks=[Freezes()])
        same(*models, "frozen")
    models = [compiled(shards) for shards in (True, False)]
    for model in models:
        fit(model, epochs=4, callbacks=[Prunes()])
    same(*models, "pruned")
    looks, plain = Looks(), compiled(True)
    fit(plain, epochs=3)
    model = compiled(True)
    fit(model, epochs=3, callbacks=[looks])
    assert weights(model).equal(weights(plain))
    share = ODD // US.num_processes
    own = share if US.process_id < US.num_processes - 1 else ODD - share * (US.num_processes - 1)
    if WEIGHTS:
        # Each of several pieces is cut by itself; all parts together are the whole.
        (own,) = {sum(held) // 2 for held in looks.held}
        assert sum(US.gather(own)) == ODD
    else:
        assert looks.held == [[own, own]] * len(looks.seen)
    assert all(len(seen) == 4 for seen in looks.seen)
    model.close()
    refused()


def refused():
    """What can't work is said before it is tried, by all processes."""

    def changed(logs):
        if US.process_id == 0:
            model.optimizer.state[next(model.module.parameters())] = {"step": 1.0}

    def within(logs):
        model.gather_optimizer().state[next(model.module.parameters())]["exp_avg"].mul_(2)

    texts = []
    kinds = (ConfigurationError, ProcessError)
    whole = ({"run_eagerly": True}, {"ema": ipufit.EMA()}) if WEIGHTS else ()
    for options in ({"optimizer": "adagrad"}, {"jit": "inductor"}, *whole):
        try:
            compiled(True, **options)
        except kinds as error:
            texts.append(f"{type(error).__name__}: {error}")
    one = LambdaCallback(on_epoch_end=lambda epoch, logs: changed(logs))
    several = LambdaCallback(on_train_batch_end=lambda batch, logs: within(logs))
    for callback in (one, several):
        model = compiled(True)
        try:
            fit(model, callbacks=[callback])
        except kinds as error:
            texts.append(f"{type(error).__name__}: {error}")
    print("\n".join(texts), flush=True)
    for options in (
        {},
        {"clip": ipufit.Clip(global_norm=1.0)},
        {"precision": ipufit.Precision(loss_scale=2.0)},
    ):
        compiled(True, **options).explain(data()[0], batch_size=2)
    if not WEIGHTS:
        config = ipufit.IPUConfig(replicated_tensor_sharding=True)
        compiled(None, config=config).explain(data()[0], batch_size=2)


def checkpointed(shards, name, epochs, **options):
    """A fit that writes, or goes on from, checkpoints."""
    model = compiled(shards, optimizer=options.pop("optimizer", "adam"))
    settings = ipufit.Checkpoint(os.path.join(FOLDER, name), every_updates=2, resume="auto")
    fit(model, epochs, checkpoint=settings, **options)
    return model


def writes():
    """Checkpoints of two epochs, of both kinds, and what four epochs come to."""
    for name in ("adam", "lamb"):
        for shards in (True, False):
            checkpointed(shards, f"{name}-{shards}", 2, optimizer=name)
        whole = compiled(False, optimizer=name)
        fit(whole, 4)
        if US.is_rank_zero:
            save_file({"weights": weights(whole)}, os.path.join(FOLDER, f"{name}.safetensors"))


def resumes():
    """Each goes on as the other kind, and as its own."""
    for name in ("adam", "lamb"):
        expected = load_file(os.path.join(FOLDER, f"{name}.safetensors"))["weights"]
        for wrote in (True, False):
            for shards in (True, False):
                copied = f"{name}-{wrote}-{shards}-{US.num_processes}"
                if US.is_rank_zero:
                    source = os.path.join(FOLDER, f"{name}-{wrote}")
                    shutil.copytree(source, os.path.join(FOLDER, copied))
                US.gather(None)
                model = checkpointed(shards, copied, 4, optimizer=name)
                text = f"{name} of {wrote} goes on as {shards}"
                torch.testing.assert_close(weights(model), expected, rtol=1e-9, atol=1e-9, msg=text)


class Tied(nn.Module):
    """Uses a weight twice, has one that is frozen, one that nobody uses, and draws numbers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        layer = {"dim_feedforward": 20, "dropout": 0.2, "batch_first": True}
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 2, **layer), 1 if BRIEFLY else 3
        )
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens):
        hidden = self.frozen(self.layers(self.embedding(tokens)))
        return (hidden @ self.embedding.weight.t()).transpose(1, 2)


class Reading(nn.Module):
    """Recurrent layers, whose backward pass reads the weights again; one of them is frozen."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.frozen = nn.LSTM(12, 10, batch_first=True)
        self.frozen.requires_grad_(False)
        self.layer = nn.GRU(10, 8, num_layers=2, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        hidden = self.frozen(self.embedding(tokens))[0]
        hidden = self.layer(hidden.transpose(0, 1))[0].transpose(0, 1)
        return self.head(hidden).transpose(1, 2)


def picture_net():
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(*layers, *more)


def tokens(samples=26):
    """Of a third of the targets, none counts: a loss is a mean over what does."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randint(0, 11, (samples, 6), generator=generator)
    y = torch.randint(0, 11, (samples, 6), generator=generator)
    y[torch.rand(samples, 6, generator=generator) < 0.3] = -100
    y[:, 0] = 3
    return x, y


def pictures(samples=27):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 2, 8, 8, generator=generator)
    return x, torch.randint(0, 5, (samples,), generator=generator)


NETS = {
    "tokens": (Tied, tokens, {"loss": nn.CrossEntropyLoss(), "metrics": ["accuracy"]}),
    "tokens that count": (Tied, tokens, {"reduction": ipufit.Reduction(normalize="tokens")}),
    "recomputed": (
        Tied,
        tokens,
        {"memory": ipufit.Memory(recompute=["layers.layers.0", "layers.layers.1"])},
    ),
    "recurrent": (Reading, tokens, {}),
    "pictures": (picture_net, pictures, {"metrics": ["accuracy"]}),
    "kernels": (
        picture_net,
        pictures,
        {"jit": "kernels", "reduction": ipufit.Reduction(gradients="sum")},
    ),
}


SOME_NETS = ("tokens that count",)


def nets():
    """Nets that use weights twice, not at all, in other orders; data that ends anywhere."""
    for name in SOME_NETS if BRIEFLY else NETS:
        (make, read, options), found = NETS[name], []
        for shards in (True, False):
            torch.manual_seed(5)
            model = ipufit.Model(make())
            options = {"optimizer": "adamw", "loss": "cross_entropy", **options}
            memory = options.get("memory", ipufit.Memory())
            options["memory"] = dataclasses.replace(memory, shard="weights" if shards else None)
            model.compile(**options)
            x, y = read()
            how = {"batch_size": 2, "verbose": 0}
            work = {"ipus": IPUS, "gradient_accumulation": 2, "device_iterations": 2}
            model.fit(x, y, epochs=2, seed=3, validation_data=(x, y), **work, **how)
            more = model.evaluate(x[:7], y[:7], ipus=IPUS, **how)
            found.append((model, model.predict(x[:7], ipus=IPUS, **how), more))
        (model, rows, measured), (whole, all_rows, expected) = found
        same(model, whole, name)
        torch.testing.assert_close(rows, all_rows, rtol=1e-9, atol=1e-10, msg=name)
        assert measured == pytest.approx(expected, rel=1e-9), name
        assert model.history.history.keys() == whole.history.history.keys()
        for key, values in model.history.history.items():
            assert values == pytest.approx(whole.history.history[key], rel=1e-9), (name, key)


class Watch(Callback):
    """What the module holds while its weights lie in parts, and how much is whole at a time."""

    def __init__(self):
        super().__init__()
        self.stale, self.fresh, self.bytes = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        program = self.model._session._training
        pieces = program.state.placement.weights.pieces
        assert not any(piece.is_there for piece in pieces)
        assert not any(piece.flat.untyped_storage().nbytes() for piece in pieces)
        self.bytes.append(sum(piece.local.numel() for piece in pieces))
        self.stale.append(weights(self.model))
        if len(self.stale) % 2:
            assert self.model.gather_weights() is self.model.module
            self.fresh.append((len(self.stale) - 1, weights(self.model)))


def gathers():
    """The module is up to date when somebody asks, at epochs' ends, and when a loss is lost."""
    watch, model, whole = Watch(), compiled(True), compiled(False)
    seen = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(weights(whole)))
    fit(model, callbacks=[watch])
    fit(whole, callbacks=[look])
    assert len(seen) == len(watch.stale) == 8
    assert len(watch.fresh) == 4
    for index, mine in watch.fresh:
        torch.testing.assert_close(mine, seen[index], rtol=1e-10, atol=1e-10)
    assert watch.stale[1].equal(watch.stale[2])
    assert not seen[1].equal(seen[2])
    assert sum(US.gather(watch.bytes[0])) == ODD
    same(model, whole, "watched")
    halved = LambdaCallback(on_epoch_end=lambda epoch, logs: halve(model))
    fit(model, callbacks=[halved])
    halved = LambdaCallback(on_epoch_end=lambda epoch, logs: halve(whole))
    fit(whole, callbacks=[halved])
    same(model, whole, "halved")
    x, y = data()
    spoilt = x.clone()
    spoilt[30] = float("nan")
    for each in (model, whole):
        with pytest.raises(NonFiniteLossError):
            fit(each, given=(spoilt, y), callbacks=[])
    same(model, whole, "of before the update that was lost")
    model = compiled(True)
    within = LambdaCallback(on_train_batch_end=lambda batch, logs: halve(model))
    with pytest.raises(ConfigurationError) as caught:
        fit(model, callbacks=[within])
    print(f"{caught.value}", flush=True)


def halve(model):
    with torch.no_grad():
        next(model.module.parameters()).mul_(0.5)


def most():
    """No more than two pieces are whole at a time."""
    from ipufit.engines.embedded.fsdp import Piece

    whole, before = [0, 0], (Piece.make_room, Piece.free)

    def make_room(piece):
        before[0](piece)
        whole[0] += 1
        whole[1] = max(whole)

    def free(piece):
        whole[0] -= piece.is_there
        before[1](piece)

    Piece.make_room, Piece.free = make_room, free
    torch.manual_seed(1)
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(6)])
    model = ipufit.Model(deep)
    model.compile("adam", "mse", memory=ipufit.Memory(shard="weights"))
    x = torch.randn(24, 9)
    model.fit(x, x, batch_size=2, epochs=1, verbose=0)
    model.predict(x, batch_size=2, verbose=0)
    assert whole == [0, 2], whole


def main():
    torch.set_default_dtype(torch.float64)
    if "buckets" in sys.argv[2:]:
        overlapped_reduction.BUCKET = 64
    for part in (most, nets, optimizers, others, skips, writes, resumes, callbacks, gathers):
        if part.__name__ in sys.argv[2:]:
            part()
            print(f"{part.__name__} done", flush=True)


if __name__ == "__main__":
    main()
