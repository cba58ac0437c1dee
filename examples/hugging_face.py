"""Train a small GPT-2 of the transformers library, from a random configuration.

The text is the description of the digits data set that ships with scikit-learn: nothing is
downloaded. The model predicts the next of its characters; it computes the loss itself, from the
labels in each batch. It is trained, saved with save_pretrained, and read again. Prints the loss
before (about 4, as if all characters were as likely), after (at most 1.0) and after reading (the
same), and a line that the model writes. Takes under a minute on two cores.

    pip install ".[examples]"
    python examples/hugging_face.py
"""

import tempfile

import torch
import transformers
from sklearn.datasets import load_digits
from transformers import GPT2Config, GPT2LMHeadModel

import ipufit

SEED = 0
LENGTH = 32


def load():
    """The characters that occur, and pieces of the text as their numbers, shape (n, LENGTH)."""
    text = load_digits().DESCR
    characters = sorted(set(text))
    numbers = torch.tensor([characters.index(character) for character in text])
    return characters, numbers.unfold(0, LENGTH, 8).contiguous()


def build(words):
    """Two layers. A cache is of use in generating alone."""
    config = GPT2Config(
        vocab_size=words,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def evaluated(net, pieces):
    """The mean loss of a model."""
    model = ipufit.Model(net)
    model.compile(None)  # no optimizer: to evaluate alone
    return model.evaluate(pieces, batch_size=16, verbose=0)["loss"]


def main():
    """Train, save, read, write."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    characters, numbers = load()
    pieces = {"input_ids": numbers, "labels": numbers}
    net = build(len(characters))
    before = evaluated(net, pieces)

    model = ipufit.Model(net)
    model.compile(
        lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
        loss=None,
        clip=ipufit.Clip(global_norm=1.0),
    )
    model.fit(
        pieces,
        batch_size=8,
        epochs=30,
        ipus=2,
        device_iterations=4,
        seed=SEED,
        verbose=2,
    )
    after = evaluated(net, pieces)

    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        again = evaluated(GPT2LMHeadModel.from_pretrained(folder), pieces)
    print(f"{len(numbers)} pieces of text; loss {before:.2f} before, {after:.2f} after training")
    print(f"saved and read again: {again:.2f}")

    start = numbers[21:22, : LENGTH // 4]
    written = net.generate(start, max_new_tokens=LENGTH - LENGTH // 4, pad_token_id=0)
    text = "".join(characters[number] for number in written[0])
    begun, rest = text[: LENGTH // 4], text[LENGTH // 4 :]
    print(f"after {begun!r} it writes {rest!r}")
    if not (before > 3.0 and after <= 1.0 and abs(after - again) < 1e-6):
        raise SystemExit("the losses are not what they should be")


if __name__ == "__main__":
    main()
