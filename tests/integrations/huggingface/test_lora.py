"""Adapters of PEFT: they alone are trained, and what they stand on stays as it is."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

import ipufit
from tests.integrations.tiny_models import batch_of, by_hand, net_of

# PEFT asks the model by a name that transformers is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TARGETS = {"bert": ("SEQ_CLS", ["query", "value"]), "gpt2": ("CAUSAL_LM", ["c_attn"])}


def adapted(name):
    """With adapters that are no longer zero, so that every one of them has a gradient."""
    task, targets = TARGETS[name]
    config = peft.LoraConfig(
        task_type=task,
        r=2,
        lora_alpha=4,
        target_modules=targets,
        fan_in_fan_out=name == "gpt2",
    )
    net = peft.get_peft_model(net_of(name), config).double().train()
    for key, parameter in net.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.02)
    return net


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_alone_are_trained(name, tmp_path):
    """With the numbers of a plain loop; the files of PEFT have the trained adapters."""
    net, batch = adapted(name), batch_of(name)
    before = copy.deepcopy(net.state_dict())
    expected, losses = by_hand(net, batch, [(0, 4, 4), (4, 8, 4), (8, 10, 4)])
    model = ipufit.Model(net)
    model.compile(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    history = model.fit(batch, batch_size=4, epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(history.history["loss"], losses, rtol=0, atol=1e-10)
    wanted = expected.state_dict()
    trained = {key for key, parameter in net.named_parameters() if parameter.requires_grad}
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]) == (key not in trained)
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-10)
    net.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(net_of(name), tmp_path).double().eval()
    net.eval()
    with torch.no_grad():
        assert torch.equal(back(**batch).logits, net(**batch).logits)
