"""What a value looks like beside its text: a table's data, a figure's chart, lists and dicts as JSON.

The data and chart types (`e2b/data`, `e2b/chart`) are those that the code interpreter SDKs read.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.core.interactiveshell import InteractiveShell
from traitlets import ObjectName, Unicode

JSON_LIMIT = 1 << 20  # characters; beyond it a list or dict is shown as text only
ROW_LIMIT = 100_000  # of a table; beyond it its data are left out


class DataFormatter(BaseFormatter):
    """A pandas DataFrame as {column: [values]}, times in ISO 8601, no value as null."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)

    def __call__(self, value: Any) -> Any:
        # Only who has imported pandas can hold a table: nobody else pays for the import.
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.DataFrame):
            return super().__call__(value)
        if len(value) > ROW_LIMIT:
            return None
        return {str(name): [plain(item) for item in value.iloc[:, at]] for at, name in enumerate(value.columns)}


class ChartFormatter(BaseFormatter):
    """A matplotlib figure as the description of its chart."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, value: Any) -> Any:
        figures = sys.modules.get("matplotlib.figure")
        if figures is None or not isinstance(value, figures.Figure):
            return super().__call__(value)
        try:
            from e2b_charts import chart_figure_to_dict

            with warnings.catch_warnings():  # those of its making are nothing that the user's code did
                warnings.simplefilter("ignore")
                return plain(chart_figure_to_dict(value))
        except Exception:  # noqa: BLE001 - a figure it cannot read is shown as its picture alone
            return None


class PlainJSON(JSONFormatter):
    """Lists and dicts that JSON can carry, beside the objects that say themselves how."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list | dict):
            try:
                text = json.dumps(value, default=_scalar, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                return None
            return (json.loads(text), {"expanded": True}) if len(text) <= JSON_LIMIT else None
        return super().__call__(value)


def plain(value: Any) -> Any:
    """The nearest that JSON has: no value, not a number and the infinities are null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    try:
        return _scalar(value)
    except TypeError:
        return str(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):  # pandas' Timestamp is a datetime, NaT too
        return value.isoformat() if value == value else None  # NaT is not itself
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        item = value.tolist()
        return plain(item) if not isinstance(item, numpy.generic) else str(item)
    pandas = sys.modules.get("pandas")
    if pandas is not None and value is pandas.NA:
        return None
    raise TypeError(type(value).__name__)


def install(shell: InteractiveShell) -> None:
    """Teach the shell's displays these types, and pictures that are shown or saved to be displayed."""
    display = shell.display_formatter
    assert display is not None  # an initialized shell has one
    for formatter in (DataFormatter(parent=display), ChartFormatter(parent=display), PlainJSON(parent=display)):
        display.formatters[formatter.format_type] = formatter
    try:
        import PIL.Image
    except ImportError:
        return  # no pictures without it
    _show_pictures(PIL.Image)


def _show_pictures(module: Any) -> None:
    """There is no screen: `Image.show()` displays, and so does saving under a name, as users of the
    hosted code interpreter know it."""
    from IPython.display import display as untyped

    display: Callable[[Any], Any] = untyped

    save = module.Image.save

    def show(self: Any, title: str | None = None) -> None:
        display(self)

    def save_and_show(self: Any, fp: Any, format: str | None = None, **options: Any) -> None:
        save(self, fp, format, **options)
        if isinstance(fp, str):
            display(self)

    module.Image.show = show
    module.Image.save = save_and_show
