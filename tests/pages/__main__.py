"""Look through a built site: end with an error if a page needs another host, or a link is dead.

So it is if a public name is not where the reference has it, if a signature has a name in place of
the words that an argument may be, or if what newcomers search for is in no heading.
"""

import sys
import typing
from pathlib import Path

from ipufit import core
from tests.pages import catalog
from tests.pages.site import Site

SEARCHED = (
    *("binary classification", "class weights", "cross validation", "custom loss"),
    *("custom metric", "early stopping", "freezing layers", "gradient accumulation"),
    *("gradient clipping", "how to debug", "learning rate finder", "mixed precision", "nan"),
    *("reproducible", "resume", "saving the best", "several gpus", "several outputs"),
    *("tensorboard", "transfer learning", "two inputs", "warm up"),
)

site = Site(Path(sys.argv[1]))
anchors = catalog.anchors(catalog.public_objects())
words = [name for name, value in vars(core).items() if typing.get_origin(value) is typing.Literal]
faults = [*site.foreign(), *site.dead(), *site.absent(anchors), *site.unfound(SEARCHED)]
faults += site.cryptic(words)
for fault in faults:
    print(fault, file=sys.stderr)
pages, links = len(site.pages), len(site.external())
print(f"{pages} pages, {len(faults)} faults, links to {links} addresses elsewhere, not followed:")
for address in site.external():
    print(" ", address)
sys.exit(bool(faults))
