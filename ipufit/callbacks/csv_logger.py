"""The values of every epoch as a table."""

from __future__ import annotations

import csv
import os
from typing import Any, Dict, List, Optional, Tuple, Union

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of
from ipufit.callbacks.records import check_length, log_file
from ipufit.errors import ConfigurationError

__all__ = ["CSVLogger"]

_ABSENT = "NA"


class CSVLogger(Callback):
    """Writes one row an epoch: its index, and its values in alphabetical order.

    The columns are those that are known before training; should a later epoch have another value,
    the file is written again with one more column. A value that an epoch has not is "NA".

    Args:
        filename: of the table; its folder is made.
        separator: between the columns, one character.
        append: go on with a table that is there; False replaces it.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the file can't be written, or
            is another table.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        separator: str = ",",
        append: bool = False,
    ) -> None:
        super().__init__()
        self.filename: str = os.fspath(filename)
        if not isinstance(separator, str) or len(separator) != 1 or separator in '\r\n"':
            raise ConfigurationError(
                "separator of CSVLogger must be one character, and no quote or end of line, got "
                f"{separator!r}. Use ',' or ';' or '\\t'."
            )
        self.separator = separator
        self.append: bool = one_of(self, "append", append, (True, False))
        self._columns: List[str] = []
        self._rows = 0

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Open the table, or begin one."""
        path = log_file(self, self.filename)
        self._columns = ["epoch"]
        rows = self._read(path) if self.append or self.params.get("resumes") else []
        metrics = [name for name in self.params.get("metrics", ()) if name not in self._columns]
        self._rewrite([*self._columns, *sorted(metrics)], rows)

    def state_dict(self) -> Any:
        """How many rows the table has."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Any) -> None:
        """Take out the rows that came later: they come again.

        Raises:
            ConfigurationError: there are fewer.
        """
        rows = self._read(self.filename)
        check_length(self, self.filename, "rows", len(rows), state["rows"])
        self._rewrite(self._columns, rows[: state["rows"]])

    def _read(self, path: str) -> List[Dict[str, Any]]:
        """The rows of the file; its columns become ours."""
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter=self.separator)
            rows = list(reader)
            if reader.fieldnames is None:
                return []
            if reader.fieldnames[0] != "epoch":
                raise ConfigurationError(
                    f"CSVLogger appends to a table whose first column is 'epoch', but that of "
                    f"{path!r} is {reader.fieldnames[0]!r}. Choose another filename or separator, "
                    "or append=False."
                )
            self._columns = list(reader.fieldnames)
            return rows

    def _rewrite(self, columns: List[str], rows: List[Dict[str, Any]]) -> None:
        """Put the table in place at once, so that no row can be lost."""
        self._columns, self._rows = columns, len(rows)
        part = f"{self.filename}.part"
        with open(part, "w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.filename)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval=_ABSENT, delimiter=self.separator)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Write the row of the epoch, with new columns for new names."""
        row = {"epoch": epoch, **(logs or {})}
        new = sorted(name for name in row if name not in self._columns)
        if new:
            before = self._columns
            self._rewrite([*before, *new], self._read(self.filename))
        with open(self.filename, "a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow(row)
        self._rows += 1
