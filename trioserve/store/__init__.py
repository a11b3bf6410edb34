"""Responses, conversations, files and batches that outlive a connection, in an SQLite database.

`Store` is what an event loop uses: it runs functions of `Records` in a thread. `database` opens,
checks, compacts and copies the file. Nothing here knows what the records mean.
"""

from trioserve.store.database import DRAFT, MEMORY, Database
from trioserve.store.records import Part, Record, Records, Ref, check_sizes, damaged, new_id
from trioserve.store.store import Store, open_store

__all__ = [
    "DRAFT",
    "MEMORY",
    "Database",
    "Part",
    "Record",
    "Records",
    "Ref",
    "Store",
    "check_sizes",
    "damaged",
    "new_id",
    "open_store",
]
