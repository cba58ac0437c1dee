"""Look through a built site: end with an error if a page needs another host, or a link is dead.

So it is if a public name is not where the reference has it.
"""

import sys
from pathlib import Path

from tests.pages import catalog
from tests.pages.site import Site

site = Site(Path(sys.argv[1]))
anchors = catalog.anchors(catalog.public_objects())
faults = [*site.foreign(), *site.dead(), *site.absent(anchors)]
for fault in faults:
    print(fault, file=sys.stderr)
pages, links = len(site.pages), len(site.external())
print(f"{pages} pages, {len(faults)} faults, links to {links} addresses elsewhere, not followed:")
for address in site.external():
    print(" ", address)
sys.exit(bool(faults))
