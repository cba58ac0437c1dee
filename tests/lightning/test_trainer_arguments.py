"""docs/coming-from-lightning.md has a row for every argument of Lightning's Trainer."""

import inspect

from tests.lightning import pl
from tests.pages.test_coming_from import rows_of


def test_every_argument_has_a_row():
    """One that is not in the table might be anything."""
    names = {name for name, _ in rows_of("coming-from-lightning.md")}
    for call in (pl.Trainer.__init__, pl.Trainer.fit):
        parameters = set(inspect.signature(call).parameters) - {"self", "model", "weights_only"}
        assert parameters - names == set(), call
