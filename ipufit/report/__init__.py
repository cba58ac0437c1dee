"""The execution report: what a ``fit`` did, where its time and memory went, as one page."""

from ipufit.report.settings import Report

__all__ = ["Report"]
