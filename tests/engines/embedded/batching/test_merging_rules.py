"""What each rule about the samples of a batch allows and refuses, forward and backward.

A function that a rule accepts has the values and gradients of its micro-batches when they run as
one. A function that a rule refuses has others, so that a rule which let it pass would be wrong.
"""

import pytest
import torch
from torch.nn import functional

from ipufit.engines.embedded.batching import rules
from ipufit.engines.embedded.batching.batch_dim import BatchDim, RefusalError
from ipufit.engines.embedded.batching.proof import prove
from ipufit.tracing.capture import capture

pytestmark = pytest.mark.both_engines

aten = torch.ops.aten
MICRO_BATCHES, SIZE = 3, 2


def table_of(rows=5):
    """A parameter that all samples share."""
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float64).reshape(rows, 4).requires_grad_()


def samples():
    """Micro-batches of rows with zeros and ties, at which derivatives are most particular."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-2, 3, (MICRO_BATCHES * SIZE, 4), generator=generator).double() / 2
    rows[1], rows[4] = 0, 0.5
    return rows.split(SIZE)


def indices(x):
    """Numbers from 0 to 4, one for each element; several samples have some in common."""
    return (2 * x + 2).long()


def masks(x):
    return indices(x) > 2


def pictures(x, *shape):
    """Each sample as channels of one picture that is large enough for every layer."""
    size = shape or (2, 4, 4)
    count = torch.Size(size).numel()
    return x.repeat(1, -(-count // 4))[:, :count].reshape(-1, *size)


def weights(table, *shape):
    """The shared parameter in another shape."""
    count = torch.Size(shape).numel()
    return table.flatten().repeat(-(-count // table.numel()))[:count].reshape(shape)


def gru_over(steps, table):
    """The outputs of a GRU over steps of shape (time, samples, 2)."""
    weight = weights(table, 6, 2)
    state = steps.new_zeros(1, steps.shape[1], 2)
    return torch.gru(steps, state, [weight, weight], False, 1, 0.0, False, False, False)[0]


# What each rule accepts: functions of the parameter and of a micro-batch.
ACCEPTED = {
    "_elementwise": [
        lambda p, x: x * p[0] + p[1, :1],
        lambda p, x: torch.where(masks(x), x, p[0]),
        lambda p, x: torch.maximum(x, p[2]) - torch.clamp(x, p[0], p[3]),
        lambda p, x: torch.hypot(x, p[1]) + torch.lerp(x, p[0], p[1]),
        lambda p, x: x.masked_fill(masks(x), 2.0) / (p[3].square() + 1),
        lambda p, x: functional.prelu(x, p[1].abs()),
    ],
    "_view": [lambda p, x: (x * p[0]).reshape(-1, 2, 2)],
    "_expand": [
        lambda p, x: (x * p[0])[:, None].expand(-1, 3, -1),
        lambda p, x: x * p[0].expand(x.shape[0], 4),
    ],
    "_repeated_rows": [
        lambda p, x: x * p[0] + torch.ones(x.shape[0], 4, dtype=x.dtype),
        lambda p, x: x * p[0] + x.new_full((x.shape[0], 1), 2.0),
    ],
    "_repeat": [
        lambda p, x: (x * p[0]).repeat(1, 2),
        lambda p, x: x * p[:1].repeat(x.shape[0], 1),
    ],
    "_permute": [lambda p, x: (x * p[0]).reshape(-1, 2, 2).permute(0, 2, 1)],
    "_transpose": [lambda p, x: (p[:4] @ x.t()).t()],
    "_unsqueeze": [lambda p, x: (x * p[0]).unsqueeze(0).unsqueeze(-1)[0]],
    "_squeeze": [
        lambda p, x: aten.squeeze.dim((x * p[0]).reshape(-1, 1, 4), 1),
        lambda p, x: aten.squeeze.default((x * p[0]).reshape(-1, 1, 4)),
    ],
    "_slice": [lambda p, x: (x * p[0])[:, 1:3]],
    "_select": [lambda p, x: (x * p[0])[:, 1], lambda p, x: (x * p[0]).unbind(1)[2]],
    "_cat": [lambda p, x: torch.cat([x, x * p[0]], 1)],
    "_stack": [lambda p, x: torch.stack([x, x * p[0]], 1)],
    "_pad": [lambda p, x: functional.pad(x * p[0], (1, 2))],
    "_triangle": [lambda p, x: (x * p[0]).reshape(-1, 2, 2).triu()],
    "_along_another": [
        lambda p, x: (x * p[0]).softmax(1) + x.log_softmax(1) * p[1],
        lambda p, x: (x * p[0]).sort(1)[0] + (x * p[0]).topk(4, 1)[0],
        lambda p, x: (x * p[0]).cumsum(1) + (x * p[1]).cumprod(1) + (x * p[2]).cummax(1)[0],
        lambda p, x: (x * p[0]).logcumsumexp(1) + (x * p[1]).cummin(1)[0],
        lambda p, x: functional.glu(x * p[0], 1),
        lambda p, x: torch.cat([part * row for part, row in zip(x.split(2, 1), p[:, :2])][::-1], 1),
        lambda p, x: (x * p[0]).split([1, 3], 1)[1],
        lambda p, x: (x * p[0]).flip(1) + (x * p[1]).roll(1, 1),
    ],
    "_reduction": [
        lambda p, x: (x * p[0]).sum(1) + (x * p[1]).mean(1) + (x * p[2]).prod(1),
        lambda p, x: (x * p[0]).amax(1) + (x * p[1]).amin(1) + (x * p[2]).max(1)[0],
        lambda p, x: (x * p[0]).std(1) + (x * p[1]).var(1) + (x * p[2]).logsumexp(1),
        lambda p, x: (x * p[0]).median(1)[0] + (x * p[1]).kthvalue(2, 1)[0],
        lambda p, x: torch.linalg.vector_norm(x * p[0], dim=1) + (x * p[1]).norm(dim=1),
    ],
    "_log_sigmoid": [lambda p, x: functional.logsigmoid(x * p[0])],
    "_joined": [],
    "_product": [
        lambda p, x: x @ p[:4],
        lambda p, x: torch.bmm(x[:, :, None], x[:, None] * p[0]),
        lambda p, x: torch.addmm(p[0], x, p[:4]),
        lambda p, x: torch.addmm(x, x, p[:4]),
        lambda p, x: torch.baddbmm(p[:1, :, None], x[:, :, None], x[:, None]),
    ],
    "_mv": [lambda p, x: torch.mv(x, p[0])],
    "_embedding": [
        lambda p, x: functional.embedding(indices(x), p),
        lambda p, x: functional.embedding(indices(x), p, padding_idx=2),
    ],
    "_index_select": [
        lambda p, x: p.index_select(0, indices(x)[:, 0]),
        lambda p, x: (x * p[0]).index_select(1, torch.tensor([3, 1, 1])),
    ],
    "_index": [
        lambda p, x: p[indices(x)],
        lambda p, x: (x * p[0])[:, torch.tensor([3, 1, 1])],
    ],
    "_picked": [
        lambda p, x: (x * p[0]).gather(1, indices(x) // 2),
        lambda p, x: (x * p[0]).scatter_add(1, indices(x) // 2, x * p[1]),
        lambda p, x: (x * p[0]).scatter(1, x.argsort(1), x * p[1]),
    ],
    "_convolution": [
        lambda p, x: functional.conv2d(pictures(x), weights(p, 3, 2, 2, 2), p[0, :3]),
        lambda p, x: functional.conv_transpose1d(pictures(x, 2, 4), weights(p, 2, 3, 2)),
    ],
    "spatial_layer": [
        lambda p, x: functional.max_pool2d(pictures(x) * p[0], 2),
        lambda p, x: functional.adaptive_avg_pool2d(pictures(x) * p[0], 2),
        lambda p, x: functional.avg_pool2d(pictures(x) * p[0], 3, 1, 1),
        lambda p, x: functional.interpolate(pictures(x) * p[0], scale_factor=2, mode="bilinear"),
        lambda p, x: functional.pad(pictures(x) * p[0], (1, 1, 1, 1), mode="reflect"),
        lambda p, x: functional.unfold(pictures(x) * p[0], 2),
    ],
    "_layer_norm": [lambda p, x: functional.layer_norm(x, (4,), p[0], p[1])],
    "_group_norm": [lambda p, x: functional.group_norm(x * p[2], 2, p[0], p[1])],
    "_batch_norm": [
        lambda p, x: functional.batch_norm(x, p[0].detach(), p[1].detach().abs(), p[2], p[3]),
        lambda p, x: functional.instance_norm(pictures(x), weight=p[0, :2], bias=p[1, :2]),
    ],
    "_recurrent": [lambda p, x: gru_over(x.reshape(-1, 2, 2).transpose(0, 1), p)],
    "_attention": [
        lambda p, x: functional.scaled_dot_product_attention(
            *[pictures(x, 2, 4, 4) * p[row] for row in range(3)]
        )
    ],
}

# What each rule refuses, with the samples along the first dimension of the result. Nothing, where
# the sizes among an operator's arguments differ first.
REFUSED = {
    "_elementwise": [lambda p, x: (x[:, :1] + x[:, :1].t() * p[0, 0]).square().sum(1)],
    "_view": [lambda p, x: (x * p[0]).t().reshape(-1, 4)],
    "_expand": [],
    "_repeated_rows": [],
    "_repeat": [lambda p, x: (x * p[0]).repeat(2, 1)[: x.shape[0]] + x.repeat(2, 1)[-1:]],
    "_permute": [],
    "_transpose": [],
    "_unsqueeze": [],
    "_squeeze": [],
    "_slice": [lambda p, x: x + x[:1] * p[0]],
    "_select": [lambda p, x: x + x[0] * p[0], lambda p, x: x + (x * p[0]).unbind()[0]],
    "_cat": [lambda p, x: torch.cat([x, x * p[0]])[1 : x.shape[0] + 1]],
    "_stack": [
        lambda p, x: torch.stack(
            [(x * p[0]).reshape(-1, 2), x.reshape(-1, 2, 2).transpose(0, 1).reshape(-1, 2)], 1
        )
    ],
    "_pad": [lambda p, x: functional.pad(x * p[0], (0, 0, 1, 0))[:-1]],
    "_triangle": [lambda p, x: (x * p[0]).tril()],
    "_along_another": [
        lambda p, x: (x * p[0]).softmax(0),
        lambda p, x: (x * p[0]).cumsum(0),
        lambda p, x: (x * p[0]).sort(0)[0],
        lambda p, x: x * (x * p[0]).split(3)[0].sum(0),
        lambda p, x: (x * p[0]).flip(0),
        lambda p, x: (x * p[0]).roll(1, 0),
    ],
    "_reduction": [
        lambda p, x: x + (x * p[0]).sum(0, keepdim=True),
        lambda p, x: x + (x * p[0]).amax(0),
        lambda p, x: x / (1 + torch.linalg.vector_norm(x * p[0], dim=0)),
    ],
    "_log_sigmoid": [],
    "_joined": [lambda p, x: x * (x * p[0]).sum(), lambda p, x: x * (x * p[0]).max()],
    "_product": [
        lambda p, x: x @ (x.t() @ x) * p[0],
        lambda p, x: x @ x.t() @ x * p[0],
        lambda p, x: x @ torch.addmm(p[:4], x.t(), x),
        lambda p, x: x @ torch.baddbmm(p[None, :4], x.t()[None], x[None])[0],
    ],
    "_mv": [lambda p, x: x * torch.mv(x.t(), x[:, 0]) * p[0]],
    "_embedding": [
        lambda p, x: functional.embedding(indices(x), p, scale_grad_by_freq=True),
        lambda p, x: functional.embedding(indices(x) // 3, x * p[0]),
    ],
    "_index_select": [lambda p, x: (x * p[0]).index_select(0, indices(x)[:, 0] // 3)],
    "_index": [lambda p, x: (x * p[0])[indices(x)[:, 0] // 3]],
    "_picked": [
        lambda p, x: (x * p[0]).gather(0, indices(x) // 3),
        lambda p, x: (x * p[0]).scatter_add(0, indices(x) // 3, x * p[1]),
    ],
    "_convolution": [
        lambda p, x: functional.conv1d((x * p[0]).t()[None], weights(p, 4, 4, 3), padding=1)[0].t()
    ],
    "spatial_layer": [
        lambda p, x: functional.max_pool2d((x * p[0])[None, None], 3, 1, 1)[0, 0],
        lambda p, x: functional.avg_pool2d((x * p[0])[None, None], 3, 1, 1)[0, 0],
    ],
    "_layer_norm": [],
    "_group_norm": [],
    "_batch_norm": [lambda p, x: functional.batch_norm(x * p[0], None, None, training=True)],
    "_recurrent": [lambda p, x: gru_over(x[:, None, :2] * p[0, :2], p)],
    "_attention": [
        lambda p, x: functional.scaled_dot_product_attention(
            *[(x * p[row])[None, None] for row in range(3)]
        )[0, 0]
    ],
}

# Refused though the numbers would be right: nobody has needed it.
CAUTIOUS = {
    "_joined": [lambda p, x: x.view(torch.int64)],
    "_index": [lambda p, x: p[indices(x)[:, 0], indices(x)[:, 1] % 4]],
}

# Attention has an operator of its own on CPUs since torch 2.1.
UNFUSED = set() if hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu") else {"_attention"}


def cases(table):
    return [
        (name, place)
        for name, functions in table.items()
        if name not in UNFUSED
        for place in range(len(functions))
    ]


@pytest.fixture
def entered(monkeypatch):
    """Names of the rules that have accepted something, and of those that have refused."""
    names = (set(), set())

    def watched(rule):
        def watch(call):
            try:
                state = rule(call)
            except RefusalError:
                names[1].add(rule.__name__)
                raise
            names[0].add(rule.__name__)
            return state

        return watch

    for name, rule in list(rules.BATCHING_RULES.items()):
        monkeypatch.setitem(rules.BATCHING_RULES, name, watched(rule))
    return names


def proved(function):
    """Where the samples are in the one result."""
    table, parts = table_of(), samples()
    graphs = [
        capture(lambda p, x: [function(p, x)], [table.detach(), rows])
        for rows in (parts[0], torch.cat(parts))
    ]
    return prove(graphs[0], graphs[1], 1, (SIZE, SIZE * MICRO_BATCHES))[0]


def results(function, batches, dim=0):
    """The result for each micro-batch of batches in turn, and the gradients of weighted sums."""
    table, parts, total = table_of(), [], 0
    leaves = [batch.clone().requires_grad_() for batch in batches]
    for leaf in leaves:
        value = function(table, leaf)
        size = value.shape[dim] * SIZE // len(leaf)
        parts += value.split(size, dim)
    for number, part in enumerate(parts):
        factor = torch.linspace(1, 2, part.numel(), dtype=part.dtype).reshape(part.shape)
        total = total + ((number + 1) * factor * part).sum()
    gradients = torch.autograd.grad(total, [table, *leaves], allow_unused=True)
    pairs = zip(gradients, [table, *leaves])
    return [*parts, *(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)]


def largest_difference(function, dim=0):
    """Between a larger batch and its micro-batches: of values, and of all gradients."""
    parts = samples()
    merged = results(function, [torch.cat(parts)], dim)
    apart = results(function, parts, dim)
    apart[MICRO_BATCHES + 1 :] = [torch.cat(apart[MICRO_BATCHES + 1 :])]
    if any(one.shape != other.shape for one, other in zip(merged, apart)):
        return float("inf")
    return max(float((one - other).detach().abs().max()) for one, other in zip(merged, apart))


@pytest.mark.parametrize(("name", "place"), cases(ACCEPTED))
def test_what_a_rule_accepts_has_the_numbers_of_its_micro_batches(name, place, entered):
    function = ACCEPTED[name][place]
    state = proved(function)
    assert isinstance(state, BatchDim)
    assert name in entered[0]
    # Float64 sums in another order.
    assert largest_difference(function, state.dim) < 1e-12


@pytest.mark.parametrize(("name", "place"), cases(REFUSED))
def test_what_a_rule_refuses_would_have_other_numbers(name, place, entered):
    """So a rule without that condition is wrong, and is found by this."""
    function = REFUSED[name][place]
    with pytest.raises(RefusalError):
        proved(function)
    assert name in entered[1]
    assert largest_difference(function) > 1e-3


@pytest.mark.parametrize(("name", "place"), cases(CAUTIOUS))
def test_what_a_rule_refuses_out_of_caution(name, place, entered):
    with pytest.raises(RefusalError):
        proved(CAUTIOUS[name][place])
    assert name in entered[1]


def test_every_rule_has_its_cases():
    """A new rule comes with what it accepts and what it refuses."""
    names = {rule.__name__ for rule in rules.BATCHING_RULES.values()}
    assert names == ACCEPTED.keys() | CAUTIOUS.keys()
    assert names == REFUSED.keys() | CAUTIOUS.keys()
