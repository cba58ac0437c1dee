"""Look through a built site; end with an error if a page needs another host or a link is dead."""

import sys
from pathlib import Path

from tests.pages.site import Site

site = Site(Path(sys.argv[1]))
faults = [*site.foreign(), *site.dead()]
for fault in faults:
    print(fault, file=sys.stderr)
pages, links = len(site.pages), len(site.external())
print(f"{pages} pages, {len(faults)} faults, links to {links} addresses elsewhere, not followed:")
for address in site.external():
    print(" ", address)
sys.exit(bool(faults))
