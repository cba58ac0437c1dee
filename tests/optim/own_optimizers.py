"""Optimizers as other people write them, for tests."""

import math

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * first + p.grad * (1 - first)
                p.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024, "The Road Less Scheduled": SGD, whose weights in training are y."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        defaults = {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def _move(self, is_training, weight):
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["momentum"]))
                group["train_mode"] = is_training

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            share, lr = 1 / group["k"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(z, share)
                p.add_(p.grad, alpha=lr * (group["momentum"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018, with its matrices in lists, and roots that are worked out now and then."""

    def __init__(self, params, lr=0.1, every=3):
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    sizes = [size for size in p.shape if size > 1]
                    state["step"] = 0
                    state["sums"] = [torch.eye(n, dtype=p.dtype) for n in sizes]
                    state["roots"] = [torch.eye(n, dtype=p.dtype) for n in sizes]
                gradient = p.grad
                for side, matrix in enumerate(state["sums"]):
                    rows = p.grad.movedim(side, 0).reshape(len(matrix), -1)
                    matrix.add_(rows @ rows.T)
                    if state["step"] % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(matrix)
                        power = -1 / (2 * len(state["sums"]))
                        state["roots"][side] = (vectors * values**power) @ vectors.T
                    gradient = torch.tensordot(state["roots"][side], gradient, ([1], [side]))
                    gradient = gradient.movedim(0, side)
                state["step"] += 1
                p.sub_(gradient, alpha=group["lr"])


class Attributes(torch.optim.Optimizer):
    """Has Python numbers in its state, a mathematical function and a decision by a number."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                n = self.state[p]["n"] = self.state[p].get("n", 0) + 1
                rate = group["lr"] / math.sqrt(n) * (0.5 if n % 4 == 0 else 1.0)
                p.sub_(p.grad * min(rate, 0.02))
