"""The record of a method: its factory, names, diagnostics and remarks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_pfl.core.diagnostics import Diagnostic, Picture

VARIANT = "variant of this library"
_NO_DIAGNOSTICS: Mapping[str, Diagnostic] = {}
_NO_PICTURES: Mapping[str, Picture] = {}


def _no_remark(settings: Mapping[str, Any], clients: int) -> str:
    return ""


class Method(NamedTuple):
    """A federated method as the package lists it: its factory, names, and data for reports.

    diagnostics: Numbers that tell whether the method's mechanism is active, by name.
    pictures: Titles and captions of the arrays that `Algorithm.observe` returns, by their name.
    remark: (values of the factory's keyword-only arguments by name, number of clients) -> a line
      to print before a run, or "".
    tuning_note: A caution for readers of tuning results, or "".
    """

    factory: Callable[..., Any]  # (model, training, federation, **settings) -> Algorithm
    title: str  # as the paper writes it
    paper: str  # authors and year; empty if the method has none
    variant_of: "Method | None" = None  # the paper's method that this library changed
    diagnostics: Mapping[str, Diagnostic] = _NO_DIAGNOSTICS
    pictures: Mapping[str, Picture] = _NO_PICTURES
    remark: Callable[[Mapping[str, Any], int], str] = _no_remark
    tuning_note: str = ""

    @property
    def name(self) -> str:
        """Returns the name in configurations, which is the factory's."""
        return self.factory.__name__

    @property
    def origin(self) -> str:
        """Returns "the method of PAPER" or, for a variant, "variant of this library (of TITLE)"."""
        if self.variant_of is not None:
            return f"{VARIANT} (of {self.variant_of.title})"
        return f"the method of {self.paper}" if self.paper else ""

    @property
    def label(self) -> str:
        """Returns title and origin, such as "pFedLA, the method of Ma et al. 2022"."""
        return ", ".join(filter(None, (self.title, self.origin)))

    @property
    def row(self) -> str:
        """Returns the title for tables and figures, with a mark if the method is a variant."""
        return self.title if self.variant_of is None else f"{self.title} ({VARIANT})"
